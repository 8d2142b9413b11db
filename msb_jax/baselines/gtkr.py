"""Gumbel top-K REINFORCE: logits of the arms, trained on the rewards of its own sets.

One logit an arm; an action is a Gumbel top-K draw from them, and after every f_in
rounds one Adam step raises mean((r - b) log P(S)) over these rounds (ALGORITHMS 2.4).
Rewards are standardised by their running moments; b is the mean of the block's other
rewards, or the running mean. P(S) is the probability of the set, by the exact
integral or by the paper's average over permutations.

The first n_re rounds are drawn from logits of zero, as the other policies' are, and
their gradient is taken there: on policy for the rounds that were played.

Differs from the paper:
* the noise is added to logits, and the probability is summed over the orders, not
  averaged (I-16); the authors' code has neither the right denominators nor the right
  action (2.3);
* the state is constant, so the logits themselves are trained instead of a network
  that maps a constant to them;
* `penalise` trains on r - lam c (I-28): off in the main tables, where the paper's
  text has r alone, on for sweeps over lam;
* hard constraints: arms are drawn one by one from those that add no conflict. The
  probability of such a set is a sum over K! orders of products with different masks,
  so the probability of the order that was drawn takes its place, whose gradient is
  unbiased too. It wants actions to be told as they were asked, not sorted.

Feedback that comes late trains the logits of that later time; of more than f_in
rounds between two refreshes the last f_in count.

Tuning: share of the unconstrained optimum in the last tenth, soft constraints, a
warm-up of 2L rounds; L=300, K=20 over 5,000 rounds is seed 0, L=60, K=6 over 2,000
rounds the mean of seeds 0 and 1.

    rate                    0.02    0.05    0.1     0.2     0.3     0.5
    linear, L=300           0.787   0.927   0.966   0.983   0.979   0.977
    linear, L=60            0.738   0.903   0.976   0.996   0.998   0.997
    quadratic, L=60                         0.881   0.912   0.903
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from msb_jax.baselines.checks import check_least, check_numbers
from msb_jax.baselines.random import check_constraints
from msb_jax.parallel import map_seeds, one_or_many
from msb_jax.problem import Problem, repair, violation_rate
from msb_jax.rng import stream
from msb_jax.topk import set_log_prob_permutations, set_log_prob_trapezoid
from msb_jax.types import Key, Policy

SET_PROBS = ("trapezoid", "permutations")
BASELINES = ("leave_one_out", "running_mean")


@dataclass(frozen=True, kw_only=True)
class GtkrConfig:
    """Settings of `gtkr`."""

    constraints: str = "soft"
    lam: float = 5.0  # weight of the violation rate, if it is penalised
    penalise: bool = False  # train on r - lam c
    n_re: int = 600  # uniform rounds at the start
    f_in: int = 20  # rounds of one update
    rate: float = 0.2  # of Adam
    set_prob: str = "trapezoid"  # or permutations; soft mode only
    num_permutations: int = 10
    baseline: str = "leave_one_out"  # or running_mean

    def __post_init__(self) -> None:
        check_constraints(self.constraints)
        check_least(self, {"n_re": 0, "f_in": 1, "num_permutations": 1})
        check_numbers(self, "lam", "rate")
        for name, known in (("set_prob", SET_PROBS), ("baseline", BASELINES)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {value!r}."
                )


class GtkrState(NamedTuple):
    """The logits, their optimiser, and the rounds since the last update."""

    problem: Problem
    logits: jax.Array  # [L]
    optimiser: Any
    actions: jax.Array  # [f_in, K] int32, a ring
    rewards: jax.Array  # [f_in]; NaN where there is none
    is_uniform: jax.Array  # [f_in] bool, told within the first n_re
    place: jax.Array  # [] int32, next row of the ring
    asked: jax.Array  # [] int32
    told: jax.Array  # [] int32
    num_rewards: jax.Array  # [] rewards in the moments
    mean: jax.Array  # []
    square: jax.Array  # [] sum of squared deviations


def gtkr(config: GtkrConfig) -> Policy:
    """Make the policy."""
    is_hard = config.constraints == "hard"
    adam = optax.adam(config.rate)

    def init(key: Key, problem: Problem) -> GtkrState:
        del key
        zero, none = jnp.zeros(()), jnp.zeros((), jnp.int32)
        logits = jnp.zeros((problem.num_arms,))
        first = jnp.arange(problem.k, dtype=jnp.int32)
        return GtkrState(
            problem=problem,
            logits=logits,
            optimiser=adam.init(logits),
            actions=jnp.tile(first, (config.f_in, 1)),
            rewards=jnp.full((config.f_in,), jnp.nan),
            is_uniform=jnp.zeros((config.f_in,), bool),
            place=none,
            asked=none,
            told=none,
            num_rewards=zero,
            mean=zero,
            square=zero,
        )

    def ask(key: Key, state: GtkrState) -> tuple[GtkrState, jax.Array]:
        logits = jnp.where(state.asked < config.n_re, 0.0, state.logits)
        noisy = logits + jax.random.gumbel(key, logits.shape, logits.dtype)
        action = jax.lax.top_k(noisy, state.problem.k)[1]
        if is_hard:
            # The top K come first in any case, so this inserts arms by noisy logits.
            action = repair(state.problem, action, noisy)
        return state._replace(asked=state.asked + 1), action

    def tell(
        key: Key, state: GtkrState, action: jax.Array, reward: jax.Array
    ) -> GtkrState:
        del key
        if config.penalise:
            reward = reward - config.lam * violation_rate(state.problem, action)
        is_number = jnp.isfinite(reward)
        count = state.num_rewards + is_number
        gap = jnp.where(is_number, reward - state.mean, 0.0)
        mean = state.mean + gap / jnp.maximum(count, 1.0)
        return state._replace(
            actions=state.actions.at[state.place].set(action),
            rewards=state.rewards.at[state.place].set(reward),
            is_uniform=state.is_uniform.at[state.place].set(state.told < config.n_re),
            place=(state.place + 1) % config.f_in,
            told=state.told + 1,
            num_rewards=count,
            mean=mean,
            square=state.square + gap * jnp.where(is_number, reward - mean, 0.0),
        )

    def update(key: Key, state: GtkrState) -> GtkrState:
        gains = advantages(state, config.baseline)  # [f_in], 0 where nothing was told
        num_told = jnp.isfinite(state.rewards).sum()
        key = stream(key, "permutations")

        def loss(logits: jax.Array) -> jax.Array:
            # Zeros for the uniform rounds, with the gradient of `logits`.
            played = jnp.where(
                state.is_uniform[:, None], logits - state.logits, logits
            )  # [f_in, L]
            each = log_probs(key, config, state.problem, played, state.actions)
            return -(gains * each).sum() / jnp.maximum(num_told, 1)

        gradient = jax.grad(loss)(state.logits)
        steps, optimiser = adam.update(gradient, state.optimiser, state.logits)
        logits = optax.apply_updates(state.logits, steps)
        logits, optimiser = jax.tree.map(
            lambda new, old: jnp.where(num_told > 0, new, old),
            (logits, optimiser),
            (state.logits, state.optimiser),
        )
        return state._replace(
            logits=logits,
            optimiser=optimiser,
            rewards=jnp.full_like(state.rewards, jnp.nan),
        )

    update_all = map_seeds(update)

    def origin(state: GtkrState) -> jax.Array:
        return jnp.zeros_like(state.asked)

    return Policy(init, ask, tell, one_or_many(update_all), origin, ("gtkr",))


def advantages(state: GtkrState, baseline: str) -> jax.Array:
    """Standardise the rewards of the ring and take the baseline off, [f_in].

    Rows without a reward get 0, and so does all while the rewards do not differ.
    """
    is_told = jnp.isfinite(state.rewards)
    deviation = jnp.sqrt(state.square / jnp.maximum(state.num_rewards, 1.0))
    unit = jnp.where(deviation > 0, deviation, jnp.inf)
    gaps = jnp.where(is_told, (state.rewards - state.mean) / unit, 0.0)
    if baseline == "running_mean":
        return gaps
    num_told = is_told.sum()
    others = (gaps.sum() - gaps) / jnp.maximum(num_told - 1, 1)
    others = jnp.where(num_told > 1, others, 0.0)  # alone: the running mean
    return jnp.where(is_told, gaps - others, 0.0)


def log_probs(
    key: Key,
    config: GtkrConfig,
    problem: Problem,
    logits: jax.Array,
    actions: jax.Array,
) -> jax.Array:
    """Compute the log-probabilities that are trained: [N, L], [N, K] -> [N]."""
    if config.constraints == "hard":
        return jax.vmap(masked_log_prob, in_axes=(None, 0, 0))(problem, logits, actions)
    if config.set_prob == "trapezoid":
        return jax.vmap(set_log_prob_trapezoid)(logits, actions)
    keys = jax.random.split(key, actions.shape[0])
    by_orders = jax.vmap(set_log_prob_permutations, in_axes=(0, 0, 0, None))
    return by_orders(keys, logits, actions, config.num_permutations)


def masked_log_prob(
    problem: Problem, logits: jax.Array, action: jax.Array
) -> jax.Array:
    """Compute the log-probability of drawing arms in this order under conflicts.

    Each arm is drawn from those that add the fewest conflicts to the ones before it
    (none, where there is such an arm), with weights exp(logits).

    Args:
        logits: float[L].
        action: int32[K] in the order of the draw.

    Returns:
        float[].
    """
    size = logits.shape[0]

    def draw(cost: jax.Array, arm: jax.Array) -> tuple[jax.Array, jax.Array]:
        is_open = cost == cost.min()
        left = jax.nn.logsumexp(jnp.where(is_open, logits, -jnp.inf))
        cost = cost + problem.conflicts[arm].astype(jnp.int32)
        # Above the number of conflicts that any arm can have.
        return cost.at[arm].set(2 * size), logits[arm] - left

    return jax.lax.scan(draw, jnp.zeros((size,), jnp.int32), action)[1].sum()
