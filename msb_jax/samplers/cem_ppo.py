"""Cross-entropy method with proximal policy steps between its updates.

The sampler is a vector mu of L inclusion rates that add up to K. Sets are drawn by
gumbel top-K on logit(mu). An epoch has N draws; after every n of them mu takes a few
ascent steps on the proximal objective

    mean_S P_new(S) / P_old(S) (Score(S) - b) - beta sum_i KL(old_i || new_i),

and at its end mu moves towards the mean of the best sets: those of the epoch, those
of the last pool of all samplers, and its best draws ever.

Source: paper, "Improved CEM-PPO evolutionary sampler"; Gao, Chen, Li 2018;
ALGORITHMS 5.

Differs from the paper:
* an epoch is one refresh, not N rounds: the surrogate is a known function then, so
  the sampler scores N draws of its own at once. Its last proposals are in the pool;
* the objective is climbed, the KL term stands outside of the mean, and the ratio is
  that of the set, not of each arm (I-16, I-18). Scores are standardised;
* noise goes on logits (I-16);
* every rate stays in [eps K/L, 1 - eps (1 - K/L)], with sum K: rates of 0 and 1
  would never change again. The bounds keep a seventh of the first entropy;
* equal sets count once among the elites, which keeps the distribution open;
* when the best draw has stood for a while, mu starts anew from K/L and learns from
  its own draws alone until these stand still too; then it shares again. Without
  this it stays in the first local optimum; the pool and demonstrations lead back;
* half of the proposals are drawn around the best sets played, with new arms from
  mu: a master needs candidates there also while mu is elsewhere;
* with hard constraints a draw stands for its repaired set and gets its score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from msb_jax.problem import Problem, to_multi_hot, violated_pairs
from msb_jax.samplers.base import Context, Sampler, View, legalise, value_of
from msb_jax.sets import first_copies
from msb_jax.topk import set_log_prob_trapezoid
from msb_jax.types import Key

NUM_NODES = 41  # of the set probability; more change nothing in float32
MAX_LOG_RATIO = 5.0  # log P_new - log P_old is kept within this
HALVINGS = 32  # of the bracket for the shift that gives the sum K
NEAR = (0.1, 0.3)  # weight of mu, from the first to the last proposal near a set


@dataclass(frozen=True, kw_only=True)
class CemPpoConfig:
    """Settings of the sampler."""

    epoch_size: int = 300  # N, draws of an epoch
    interval: int = 60  # n, draws between two proximal updates
    num_steps: int = 2  # ascent steps of a proximal update
    learning_rate: float = 0.01  # of Adam, on logits
    beta: float = 0.2  # weight of the KL term
    elite_share: float = 0.1  # rho, of the draws of an epoch
    zeta: float = 0.7  # of the old rates at the end of an epoch
    num_kept: int = 10  # best draws ever that are remembered
    kept_weight: float = 0.2  # theirs among the elites
    patience: int = 8  # epochs without a better draw that mean a standstill
    epsilon: float = 0.05  # eps of the bounds of the rates
    imitation_steps: int = 20  # n_D
    imitation_rate: float = 0.03  # of each of them

    def __post_init__(self) -> None:
        if min(self.interval, self.num_steps, self.num_kept, self.patience) < 1:
            raise ValueError("Counts of draws, steps and epochs must be positive.")
        if self.epoch_size < 1 or self.epoch_size % self.interval:
            raise ValueError(
                f"epoch_size must be a multiple of interval={self.interval}, "
                f"got {self.epoch_size}."
            )
        if self.learning_rate <= 0 or min(self.beta, self.imitation_steps) < 0:
            raise ValueError(
                "learning_rate must be positive, beta and imitation_steps not negative."
            )
        if not (0 < self.elite_share < 1 and 0 < self.epsilon < 1):
            raise ValueError("elite_share and epsilon must be in (0, 1).")
        for value in (self.zeta, self.kept_weight, self.imitation_rate):
            if not 0 <= value < 1:
                raise ValueError(
                    "zeta, kept_weight and imitation_rate must be in [0, 1), "
                    f"got {value}."
                )


class Ranked(NamedTuple):
    """Distinct sets, best first; rows that are missing have score -inf."""

    actions: jax.Array  # [E, K] int32, arms ascending
    scores: jax.Array  # [E]


class Draws(NamedTuple):
    """Sets drawn from the old logits."""

    actions: jax.Array  # [n, K] int32
    log_probs: jax.Array  # [n] under the old logits
    advantages: jax.Array  # [n] score less baseline


class CemPpoState(NamedTuple):
    """The sampler."""

    mu: jax.Array  # [L] inclusion rates, sum K
    optimizer: Any  # state of Adam
    kept: Ranked  # [E, ...] best draws since the last start
    stalled: jax.Array  # [] int32, epochs since the best of them was found
    is_alone: jax.Array  # [] bool, whether it ignores all others


def start(config: CemPpoConfig, num_arms: int, k: int) -> CemPpoState:
    """Begin with equal rates and nothing remembered."""
    mu = jnp.full((num_arms,), k / num_arms, jnp.float32)
    first = jnp.tile(jnp.arange(k, dtype=jnp.int32)[None, :], (config.num_kept, 1))
    return CemPpoState(
        mu=mu,
        optimizer=optax.adam(config.learning_rate).init(mu),
        kept=Ranked(first, jnp.full((config.num_kept,), -jnp.inf, jnp.float32)),
        stalled=jnp.zeros((), jnp.int32),
        is_alone=jnp.zeros((), bool),
    )


def to_logits(mu: jax.Array) -> jax.Array:
    """Compute log(mu / (1 - mu)), finite for any mu in [0, 1]."""
    mu = jnp.clip(mu, 1e-6, 1.0 - 1e-6)
    return jnp.log(mu) - jnp.log1p(-mu)


def project(logits: jax.Array, k: int, epsilon: float) -> jax.Array:
    """Turn logits [L] into rates [L] within the bounds, shifted to the sum K."""
    share = k / logits.shape[0]
    low, high = epsilon * share, 1.0 - epsilon * (1.0 - share)

    def rates(shift: jax.Array) -> jax.Array:
        return jnp.clip(jax.nn.sigmoid(logits + shift[None]), low, high)

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        middle = 0.5 * (ends[0] + ends[1])
        is_low = jnp.sum(rates(middle)) < k
        return jnp.where(is_low, middle, ends[0]), jnp.where(is_low, ends[1], middle)

    reach = jnp.max(jnp.abs(logits)) + 30.0  # the sigmoid is 0 or 1 beyond
    below, above = jax.lax.fori_loop(0, HALVINGS, halve, (-reach, reach))
    return rates(0.5 * (below + above))


def draw(key: Key, mu: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Draw a set from every row of rates [N, L] by gumbel top-K.

    Returns:
        int32[N, K], and the perturbed logits [N, L]: how much each arm was wanted.
    """
    wanted = to_logits(mu) + jax.random.gumbel(key, mu.shape)
    return jax.lax.top_k(wanted, k)[1].astype(jnp.int32), wanted


def log_probs(logits: jax.Array, actions: jax.Array) -> jax.Array:
    """Compute the log-probabilities of sets [N, K] under logits [L]: [N]."""
    return jax.vmap(lambda a: set_log_prob_trapezoid(logits, a, NUM_NODES))(actions)


def bernoulli_kl(old: jax.Array, new: jax.Array) -> jax.Array:
    """Sum KL(Bern(old_i) || Bern(new_i)) over arms, from logits [L]: []."""
    rate = jax.nn.sigmoid(old)
    on = jax.nn.log_sigmoid(old) - jax.nn.log_sigmoid(new)
    off = jax.nn.log_sigmoid(-old) - jax.nn.log_sigmoid(-new)
    return jnp.sum(rate * on + (1.0 - rate) * off)


def proximal_objective(
    new: jax.Array, old: jax.Array, draws: Draws, beta: float
) -> jax.Array:
    """Compute what a proximal update climbs, from logits [L]: []."""
    log_ratio = log_probs(new, draws.actions) - draws.log_probs
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return jnp.mean(ratio * draws.advantages) - beta * bernoulli_kl(old, new)


def standardise(scores: jax.Array) -> jax.Array:
    """Bring scores [N] to mean 0 and deviation 1; equal ones become 0."""
    centred = scores - jnp.mean(scores)
    deviation = jnp.sqrt(jnp.mean(jnp.square(centred)))
    # Rounding alone makes some difference between equal scores.
    is_flat = deviation <= 1e-6 * jnp.max(jnp.abs(scores))
    return jnp.where(is_flat, 0.0, centred / jnp.where(is_flat, 1.0, deviation))


def proximal_update(
    config: CemPpoConfig, state: CemPpoState, actions: jax.Array, scores: jax.Array
) -> CemPpoState:
    """Climb the proximal objective, given n draws [n, K] and scores of any scale."""
    old = to_logits(state.mu)
    draws = Draws(actions, log_probs(old, actions), standardise(scores))
    adam = optax.adam(config.learning_rate)

    def step(carry: tuple[jax.Array, Any], _: None) -> tuple[Any, None]:
        new, optimizer = carry
        grad = jax.grad(proximal_objective)(new, old, draws, config.beta)
        change, optimizer = adam.update(-grad, optimizer)
        return (optax.apply_updates(new, change), optimizer), None

    begin = (old, state.optimizer)
    (new, optimizer), _ = jax.lax.scan(step, begin, None, length=config.num_steps)
    mu = project(new, actions.shape[1], config.epsilon)
    return state._replace(mu=mu, optimizer=optimizer)


def rank(actions: jax.Array, scores: jax.Array, num: int) -> Ranked:
    """Find the `num` best distinct sets of [N, K]."""
    lack = max(0, num - actions.shape[0])
    actions = jnp.concatenate([actions, jnp.tile(actions[:1], (lack, 1))])
    scores = jnp.concatenate([scores, jnp.full((lack,), -jnp.inf)])
    actions = jnp.sort(actions, axis=1)
    is_copy = first_copies(actions, jnp.isfinite(scores)) != jnp.arange(scores.size)
    top, rows = jax.lax.top_k(jnp.where(is_copy, -jnp.inf, scores), num)
    return Ranked(actions[rows], top)


def cross_entropy_update(
    config: CemPpoConfig, mu: jax.Array, elites: Ranked, kept: Ranked
) -> jax.Array:
    """Move the rates [L] towards the mean of the best sets of now and ever: [L]."""

    def frequencies(sets: Ranked) -> jax.Array:
        is_there = jnp.isfinite(sets.scores).astype(jnp.float32)
        return is_there @ to_multi_hot(sets.actions, mu.shape[0]) / jnp.sum(is_there)

    target = (1.0 - config.kept_weight) * frequencies(elites)
    target += config.kept_weight * frequencies(kept)
    mixed = config.zeta * mu + (1.0 - config.zeta) * target
    return project(to_logits(mixed), elites.actions.shape[1], config.epsilon)


def end_epoch(
    config: CemPpoConfig, state: CemPpoState, own: Ranked, shared: Ranked
) -> CemPpoState:
    """Take the cross-entropy step, and start anew after a standstill.

    Args:
        config: settings.
        state: the sampler, with what it has kept scored as of now.
        own: its best draws of the epoch, at least one.
        shared: the best sets of all samplers.
    """
    kept = rank(*_join(state.kept, own), config.num_kept)
    heard = jnp.where(state.is_alone, -jnp.inf, shared.scores)
    elites = _join(own, shared._replace(scores=heard))
    former = state.kept.actions[jnp.argmax(state.kept.scores)]
    is_same = jnp.all(kept.actions[0] == former)
    stalled = jnp.where(is_same, state.stalled + 1, 0)
    is_due = stalled >= config.patience
    onward = state._replace(
        mu=cross_entropy_update(config, state.mu, elites, kept),
        kept=kept,
        stalled=jnp.where(is_due, 0, stalled),
        is_alone=state.is_alone & ~is_due,
    )
    anew = start(config, state.mu.shape[0], own.actions.shape[1])
    anew = anew._replace(is_alone=jnp.ones((), bool))
    return _choose(is_due & ~state.is_alone, anew, onward)


def imitate_set(config: CemPpoConfig, mu: jax.Array, action: jax.Array) -> jax.Array:
    """Take n_D cross-entropy steps of the rates [L] towards a set int32[K]: [L].

    The natural gradient of the cross-entropy is x - mu. Steps along it keep the sum
    of the rates and have a closed form.
    """
    left = (1.0 - config.imitation_rate) ** config.imitation_steps
    hot = to_multi_hot(action, mu.shape[0])
    return project(to_logits(hot + left * (mu - hot)), action.shape[0], config.epsilon)


def cem_ppo(config: CemPpoConfig = CemPpoConfig()) -> Sampler:
    """Build the CEM-PPO sampler."""
    half = math.ceil(config.elite_share * config.epoch_size / 2)

    def init(key: Key, problem: Problem) -> CemPpoState:
        del key
        return start(config, problem.num_arms, problem.k)

    def update(key: Key, state: CemPpoState, context: Context) -> CemPpoState:
        view, k = context.view, context.view.problem.k

        def interval(state: CemPpoState, i: jax.Array) -> tuple[CemPpoState, Any]:
            mu = jnp.tile(state.mu[None, :], (config.interval, 1))
            drawn, wanted = draw(jax.random.fold_in(key, i), mu, k)
            legal = _legalise(view, drawn, wanted)
            scores = score_of(view, legal)
            return proximal_update(config, state, drawn, scores), (legal, scores)

        parts = jnp.arange(config.epoch_size // config.interval)
        moved, (drawn, scores) = jax.lax.scan(interval, state, parts)
        own = rank(drawn.reshape(-1, k), scores.reshape(-1), half)
        shared = rank(view.pool, score_of(view, view.pool), half)
        # The surrogate has changed, and so have the scores of what was kept.
        again = score_of(view, state.kept.actions)
        again = jnp.where(jnp.isfinite(state.kept.scores), again, -jnp.inf)
        moved = moved._replace(kept=state.kept._replace(scores=again))
        learned = end_epoch(config, moved, own, shared)
        # A surrogate whose algebra broke down teaches nothing.
        is_sound = jnp.all(jnp.isfinite(scores)) & jnp.all(jnp.isfinite(learned.mu))
        return _choose(is_sound, learned, state)

    def propose(key: Key, state: CemPpoState, context: Context, n: int) -> jax.Array:
        view = context.view
        num_near = n // 2
        rows = jnp.arange(num_near) % view.elites.shape[0]
        hot = to_multi_hot(view.elites[rows], view.problem.num_arms)
        weight = jnp.linspace(*NEAR, num_near)[:, None]
        near = hot + weight * (state.mu[None, :] - hot)
        own = jnp.tile(state.mu[None, :], (n - num_near, 1))
        rates = jnp.concatenate([own, near])
        return _legalise(view, *draw(key, rates, view.problem.k))

    def imitate(
        key: Key, state: CemPpoState, context: Context, demonstration: jax.Array
    ) -> CemPpoState:
        del key, context
        mu = imitate_set(config, state.mu, demonstration)
        return state._replace(mu=jnp.where(state.is_alone, state.mu, mu))

    return Sampler("cem_ppo", init, propose, update, num_starts=4, imitate=imitate)


def score_of(view: View, actions: jax.Array) -> jax.Array:
    """Compute the surrogate value of sets [N, K] less the price of conflicts: [N].

    Where conflicts are forbidden, a pair that no repair could avoid costs more than
    any two sets can differ in value.
    """
    k = actions.shape[1]
    linear, pair = jnp.abs(view.model.linear), jnp.abs(view.model.pair)
    most = 2 * k * (jnp.max(linear) + k * jnp.max(pair))
    price = jnp.where(jnp.isinf(view.pair_price), most, 0.0)
    pairs = violated_pairs(view.problem, actions)
    return value_of(view, actions) - price * pairs


def _legalise(view: View, actions: jax.Array, wanted: jax.Array) -> jax.Array:
    """Repair sets [N, K] where pairs are forbidden, most wanted arms first."""
    return jax.vmap(legalise, in_axes=(None, 0, 0))(view, actions, wanted)


def _join(first: Ranked, second: Ranked) -> Ranked:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, second)


def _choose(is_first: jax.Array, first: Any, second: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(is_first, a, b), first, second)
