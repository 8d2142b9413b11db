"""Primal-dual Wolpertinger sampler.

An actor proposes a point of [0, 1]^L, rare arms get a bonus, and the K largest entries
are the nearest set. Random swaps of that set give candidates, and the critic picks the
best of them. Both networks learn (`ddpg`) from the sets of all samplers, the rounds
played and sets of the sampler's own. The price of violations is a dual variable: it
rises while the own proposals violate more than a share of what random sets do.

Source: paper, "Primal-dual Wolpertinger sampler"; Dulac-Arnold et al. 2015; Tessler et
al. 2018; ALGORITHMS 3.1, 3.2.

Differs from the paper (see `ddpg` and `agent.replay` too):
* it acts and learns once a refresh; in exchange it lets the surrogate score sets of its
  own (neighbours of its policy and a few random sets), which are the steps that it
  would have taken in the rounds between;
* the rewards of the replay are scored anew by the surrogate, which has learned since;
  those of the rounds really played are the rewards seen;
* violations are in units of those of a random set, E[c] = K(K-1) / (L(L-1)), so that
  alpha and eta mean the same at any size; alpha is half a random set's (I-31);
* a pair never costs less than the master charges, up to the deviation that an arm
  makes: lam2 alone would sell violations that the master does not buy, and a higher
  price (that of a forbidden pair) drives the actor into the first feasible corner;
* with hard constraints the candidates are repaired, arms of high output first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.agent import replay as rp
from msb_jax.problem import Problem, random_sets, to_multi_hot
from msb_jax.samplers.base import Context, Sampler, View, legalise, reward_of
from msb_jax.samplers.ddpg import (
    Ddpg,
    DdpgConfig,
    Learner,
    clash_matrix,
    ddpg,
    dual_step,
    random_rate,
    relative_violation,
)
from msb_jax.sets import best_distinct
from msb_jax.types import Key

NEIGHBOURS = ("random", "exact")
_SIZES = ("capacity", "num_candidates", "max_swaps", "length_epoch")


@dataclass(frozen=True, kw_only=True)
class WolpertingerConfig:
    """Settings of the sampler."""

    learner: DdpgConfig = field(default_factory=DdpgConfig)
    capacity: int = 2000  # transitions kept
    num_scored: int = 64  # own sets scored by the surrogate a refresh
    num_random: int = 16  # uniform sets scored beside them
    neighbours: str = "random"  # swaps of the nearest set, or "exact": in their order
    num_candidates: int = 16  # sets the critic chooses from, for one proposal
    max_swaps: int = 2  # of a candidate, 1 at the least
    bonus: float = 0.01  # c_u, for rarely proposed arms
    length_epoch: int = 100  # rounds between two changes of the state and of lam2
    alpha: float = 0.5  # violation aimed at, as a share of a random set's
    eta: float = 0.2  # step of lam2 an epoch
    lam2: float = 1.0  # at the start, in deviations of the reward
    max_lam2: float = 100.0
    max_pair_price: float = 1.0  # of the master's, in deviations an arm makes

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = int(name in _SIZES)
            if name not in ("learner", "neighbours") and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")
        if self.lam2 > self.max_lam2:
            raise ValueError(
                f"lam2 must be at most max_lam2 = {self.max_lam2}, got {self.lam2}."
            )
        if self.neighbours not in NEIGHBOURS:
            raise ValueError(
                f"neighbours must be one of {', '.join(NEIGHBOURS)}, got "
                f"{self.neighbours!r}."
            )


class WolpertingerState(NamedTuple):
    """Networks, memory and prices of one run."""

    learner: Learner
    replay: rp.Replay
    counts: jax.Array  # [L] times the arm stood in an own proposal
    usage: jax.Array  # [L] the state s: counts up to the last epoch, sum 1
    lam2: jax.Array  # [] dual variable
    price: jax.Array  # [] of violations: lam2, or what the master charges
    epoch: jax.Array  # [] int32, of the last update
    violation: jax.Array  # [] sum over the own proposals since the boundary
    proposals: jax.Array  # [] their number


def nearest_sets(proto: jax.Array, k: int, n: int) -> jax.Array:
    """Return the set nearest to a point and its single swaps in order: int32[n, K].

    The nearest set holds the K largest entries, and a swap takes it further off by
    2 (proto_out - proto_in) in squared distance. Fewer than n such sets are repeated.
    """
    num_arms = proto.shape[0]
    values, order = jax.lax.top_k(proto, num_arms)
    costs = (values[:k, None] - values[None, k:]).reshape(-1)  # [K (L-K)]
    costs = jnp.append(-1.0, costs)  # no swap comes first
    swaps = jnp.argsort(costs)[jnp.arange(n) % costs.size][:, None]
    out, into = jnp.divmod(swaps - 1, max(num_arms - k, 1))
    places = jnp.arange(k)[None, :]
    is_out = (swaps > 0) & (places == out)
    return order[jnp.where(is_out, k + into, places)].astype(jnp.int32)


def random_swaps(key: Key, proto: jax.Array, k: int, n: int, most: int) -> jax.Array:
    """Return the set nearest to a point and random neighbours of it: int32[n, K].

    A neighbour comes from 1..most swaps of a random arm of the set for a random arm;
    a swap for an arm that is in the set already does nothing.
    """
    num_arms = proto.shape[0]
    nearest = jax.lax.top_k(proto, k)[1].astype(jnp.int32)
    actions = jnp.tile(nearest[None, :], (n, 1))
    chance = jax.random.uniform(key, (2 * most + 1, n, 1))
    last = jnp.floor(most * chance[0]).at[0].set(-1.0)
    for i in range(most):
        place = jnp.floor(k * chance[2 * i + 1]).astype(jnp.int32)
        arm = jnp.floor(num_arms * chance[2 * i + 2]).astype(jnp.int32)
        arm = jnp.minimum(arm, num_arms - 1)  # rounding
        is_out = (jnp.arange(k)[None, :] == place) & (i <= last)
        is_in = jnp.any(actions == arm, axis=1, keepdims=True)
        actions = jnp.where(is_out & ~is_in, arm, actions)
    return actions


def wanted(functions: Ddpg, state: Any, k: int, bonus: float) -> jax.Array:
    """Compute the proto-action with a bonus c_u on rare arms: [L].

    `state` is that of the sampler, or one that has its learner, usage and counts.
    """
    proto = functions.proto(state.learner, state.usage)
    rounds = 1.0 + jnp.sum(state.counts) / k
    return proto + bonus * jnp.sqrt(jnp.log(rounds) / (1.0 + state.counts))


def neighbours(key: Key, config: Any, proto: jax.Array, k: int, n: int) -> jax.Array:
    """Return n sets near a point, as `config.neighbours` says: int32[n, K]."""
    if config.neighbours == "exact":
        return nearest_sets(proto, k, n)
    return random_swaps(key, proto, k, n, config.max_swaps)


def liked_best(
    functions: Ddpg, state: Any, problem: Problem, actions: jax.Array, n: int
) -> jax.Array:
    """Return the n sets of [N, K] that the critic likes best, copies last."""
    violations = relative_violation(problem, actions)
    values = functions.value(
        state.learner, state.usage, actions, violations, state.price
    )
    return best_distinct(actions, values, n)


def wolpertinger(config: WolpertingerConfig = WolpertingerConfig()) -> Sampler:
    """Build the primal-dual Wolpertinger sampler."""

    def learner_of(problem: Problem) -> Ddpg:
        return ddpg(config.learner, problem.num_arms, problem.k)

    def init(key: Key, problem: Problem) -> WolpertingerState:
        num_arms, lam2 = problem.num_arms, jnp.asarray(config.lam2, jnp.float32)
        return WolpertingerState(
            learner=learner_of(problem).init(key),
            replay=rp.new_replay(config.capacity, problem.k, num_arms),
            counts=jnp.zeros((num_arms,)),
            usage=jnp.full((num_arms,), 1.0 / num_arms, jnp.float32),
            lam2=lam2,
            price=lam2,
            epoch=jnp.zeros((), jnp.int32),
            violation=jnp.zeros(()),
            proposals=jnp.zeros(()),
        )

    def choose(
        key: Key, state: WolpertingerState, view: View, n: int, size: int
    ) -> jax.Array:
        """The n best of `size` neighbours of the policy, by the critic: int32[n, K]."""
        problem = view.problem
        proto = wanted(learner_of(problem), state, problem.k, config.bonus)
        actions = neighbours(key, config, proto, problem.k, size)
        actions = jax.vmap(legalise, in_axes=(None, 0, None))(view, actions, proto)
        return liked_best(learner_of(problem), state, problem, actions, n)

    def propose(
        key: Key, state: WolpertingerState, context: Context, n: int
    ) -> jax.Array:
        return choose(key, state, context.view, n, n * config.num_candidates)

    def end_epoch(state: WolpertingerState, context: Context) -> WolpertingerState:
        """Count the own proposals; at a boundary move the state and lam2."""
        view = context.view
        is_own = (view.pool_origin == context.origin).astype(jnp.float32)
        counts = state.counts + is_own @ to_multi_hot(view.pool, view.problem.num_arms)
        violations = relative_violation(view.problem, view.pool)
        violation = state.violation + jnp.sum(is_own * violations)
        proposals = state.proposals + jnp.sum(is_own)
        epoch = view.round // config.length_epoch
        is_over = (epoch > state.epoch) & (proposals > 0)
        mean = violation / jnp.maximum(proposals, 1.0)
        lam2 = dual_step(state.lam2, mean, config.alpha, config.eta, config.max_lam2)
        usage = counts / jnp.maximum(jnp.sum(counts), 1.0)
        return state._replace(
            counts=counts,
            usage=jnp.where(is_over, usage, state.usage),
            lam2=jnp.where(is_over, lam2, state.lam2),
            epoch=jnp.maximum(epoch, state.epoch),
            violation=jnp.where(is_over, 0.0, violation),
            proposals=jnp.where(is_over, 0.0, proposals),
        )

    def remember(
        key: Key, state: WolpertingerState, view: View, usage: jax.Array
    ) -> rp.Replay:
        """Push the pool and sets of its own; the surrogate scores all rows anew."""
        keys = jax.random.split(key, 3)
        problem = view.problem
        proto = wanted(learner_of(problem), state, problem.k, config.bonus)
        half, rest = config.num_scored // 2, -(-config.num_scored // 2)
        best = choose(keys[0], state, view, half, 8 * half)
        near = random_swaps(keys[1], proto, problem.k, rest, config.max_swaps)
        random = random_sets(keys[2], problem, config.num_random)
        actions = jnp.concatenate([view.pool, best, near, random])
        blank = jnp.zeros(actions.shape[:1])
        rows = _transitions(problem, actions, blank, usage, state.usage)
        replay = rp.push(state.replay, rows, jnp.ones(blank.shape, bool))
        rescored = replay.rows._replace(rewards=reward_of(view, replay.rows.actions))
        return replay._replace(rows=rescored)

    def update(
        key: Key, state: WolpertingerState, context: Context
    ) -> WolpertingerState:
        view, before = context.view, state.usage
        state = end_epoch(state, context)
        remember_key, learn_key = jax.random.split(key)
        replay = remember(remember_key, state, view, before)
        played = _transitions(
            view.problem, view.played, view.played_values, before, state.usage
        )
        rows = rp.join(replay, played, view.is_played)
        price = jnp.maximum(state.lam2, _least_price(view, replay, config))
        learner = learner_of(view.problem).learn(
            learn_key, state.learner, rows, price, clash_matrix(view.problem)
        )
        return state._replace(learner=learner, replay=replay, price=price)

    def imitate(
        key: Key, state: WolpertingerState, context: Context, action: jax.Array
    ) -> WolpertingerState:
        del key
        teach = learner_of(context.view.problem).imitate
        return state._replace(learner=teach(state.learner, state.usage, action))

    return Sampler("wolpertinger", init, propose, update, num_starts=4, imitate=imitate)


def _least_price(
    view: View, replay: rp.Replay, config: WolpertingerConfig
) -> jax.Array:
    """What the master charges for a random set's violation, in deviations: []."""
    _, deviation = rp.moments(replay.rows.rewards, replay.is_row)
    pair = view.pair_price / jnp.maximum(deviation, jnp.finfo(jnp.float32).tiny)
    pairs = random_rate(view.problem) * view.problem.num_conflicts
    # The deviation of a set is about sqrt(K) times that of an arm in it.
    most = config.max_pair_price / math.sqrt(view.problem.k)
    return jnp.minimum(pair, most) * pairs


def _transitions(
    problem: Problem,
    actions: jax.Array,
    rewards: jax.Array,
    state: jax.Array,
    next_state: jax.Array,
) -> rp.Transitions:
    """Rows of one refresh, from one state to the next."""
    n = actions.shape[0]
    return rp.Transitions(
        actions=actions.astype(jnp.int32),
        rewards=rewards,
        violations=relative_violation(problem, actions),
        states=jnp.tile(state[None], (n, 1)),
        next_states=jnp.tile(next_state[None], (n, 1)),
    )
