"""What the actor-critic policies share: replay, state, price of violations, learning.

The learner of the samplers (`samplers/ddpg.py`) on the rounds really played: the
critic learns the reward of the sets of a prioritised replay, Q = reward - price c, and
the actor climbs it at the proto-action. The state is the share of every arm in the
sets played up to the last epoch boundary. Policies differ in the actor, in the way
from proto-action to set, and in the price: none, fixed, or a dual variable.

Differs from the paper (see `samplers/ddpg.py` too):
* it learns once a refresh, from all rounds told so far, not once a round;
* violations are in units of those of a random set and prices in deviations of the
  reward, so that alpha and eta mean the same at any size and scale (I-31);
* the dual variable looks at the policy's own rounds, not at the random ones. With hard
  constraints nothing that is played violates, which would only lower it: it stays.

Not tuned: rates, steps and prices are those of the samplers. The capacity was set for
its cost, clusters of 5,000 rows take half of a refresh. Share of the optimum after the
random rounds, linear, soft, L=300, K=20, 5,000 rounds, one seed (one run each, so that
differences between the two columns may be chance):

    capacity        2,000    5,000
    wolpertinger    0.997    0.986
    pdwa            0.991    0.988
    pdg2anet        0.946    0.896
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.agent import replay as rp
from msb_jax.baselines import planned
from msb_jax.baselines.checks import check_least
from msb_jax.baselines.planned import Proposals, Round
from msb_jax.networks.actor_critic import ActorNet
from msb_jax.problem import Problem
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
from msb_jax.types import Key


@dataclass(frozen=True, kw_only=True)
class ActorCriticConfig:
    """Settings that these policies share."""

    constraints: str = "soft"
    n_re: int = 600  # random rounds at the start
    f_in: int = 20  # rounds between two refreshes
    learner: DdpgConfig = field(default_factory=DdpgConfig)
    replay: str = "prioritized"  # or "uniform"
    n_c: int = 20  # clusters of the prioritised one
    capacity: int = 2000  # rounds kept
    length_epoch: int = 100  # rounds between two changes of the state and of lam2

    def __post_init__(self) -> None:
        planned.plan_of(self)
        learner_of(self)
        check_least(self, {"capacity": 1, "length_epoch": 1})


@dataclass(frozen=True, kw_only=True)
class DualConfig:
    """The dual ascent of RCPO."""

    alpha: float = 0.5  # violation aimed at, as a share of a random set's
    eta: float = 0.2  # step of lam2 an epoch
    lam2: float = 1.0  # at the start, in deviations of the reward
    max_lam2: float = 100.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value}.")
        if self.lam2 > self.max_lam2:
            raise ValueError(
                f"lam2 must be at most max_lam2 = {self.max_lam2}, got {self.lam2}."
            )


def learner_of(config: ActorCriticConfig) -> DdpgConfig:
    """Take the learner out of the settings, or say what is wrong with it."""
    return dataclasses.replace(
        config.learner, replay=config.replay, num_clusters=config.n_c
    )


def dual_of(dual: DualConfig, constraints: str) -> DualConfig:
    """With hard constraints the dual ascent takes no steps."""
    return dataclasses.replace(dual, eta=0.0) if constraints == "hard" else dual


class ActorCriticState(NamedTuple):
    """Networks, memory and price of one run."""

    learner: Learner
    replay: rp.Replay
    counts: jax.Array  # [L] times the arm was played
    usage: jax.Array  # [L] the state s: counts up to the last epoch, sum 1
    lam2: jax.Array  # [] dual variable; 0 without one
    price: jax.Array  # [] of a random set's violation, in deviations of the reward
    told: jax.Array  # [] int32
    epoch: jax.Array  # [] int32, of the last refresh
    violation: jax.Array  # [] sum over the own rounds since the boundary
    rounds: jax.Array  # [] their number


# (key, learner's functions, state, problem, n) -> n sets
Propose = Callable[[Key, Ddpg, ActorCriticState, Problem, int], Proposals]


def actor_critic(
    config: ActorCriticConfig,
    propose: Propose,
    *,
    dual: DualConfig | None = None,
    lam: float = 0.0,
    actor_of: Callable[[Problem], ActorNet | None] = lambda problem: None,
) -> planned.Learner:
    """Build the learner of a planned policy.

    Args:
        config: of the networks, their training and the memory of rounds.
        propose: how sets come from the actor and the critic.
        dual: the price is a dual variable that starts and moves so.
        lam: without `dual`, the fixed price of the violation rate, in rewards.
        actor_of: the actor network; None for the plain one.
    """

    training = learner_of(config)

    def functions(problem: Problem) -> Ddpg:
        return ddpg(training, problem.num_arms, problem.k, actor_of(problem))

    def init(key: Key, problem: Problem) -> ActorCriticState:
        num_arms, none = problem.num_arms, jnp.zeros((), jnp.int32)
        start = jnp.asarray(dual.lam2 if dual else 0.0, jnp.float32)
        return ActorCriticState(
            learner=functions(problem).init(key),
            replay=rp.new_replay(config.capacity, problem.k, num_arms),
            counts=jnp.zeros((num_arms,)),
            usage=jnp.full((num_arms,), 1.0 / num_arms, jnp.float32),
            lam2=start,
            price=start,
            told=none,
            epoch=none,
            violation=jnp.zeros(()),
            rounds=jnp.zeros(()),
        )

    def tell(
        state: ActorCriticState, problem: Problem, played: Round
    ) -> ActorCriticState:
        action, is_known = played.action, played.is_known
        violation = relative_violation(problem, action[None])
        row = rp.Transitions(
            actions=action[None],
            rewards=played.reward[None].astype(jnp.float32),
            violations=violation,
            states=state.usage[None],
            next_states=state.usage[None],  # a round is an episode (I-33)
        )
        counted = (is_known & played.is_own).astype(jnp.float32)
        return state._replace(
            replay=rp.push(state.replay, row, is_known[None]),
            counts=state.counts.at[action].add(is_known.astype(jnp.float32)),
            told=state.told + is_known,
            violation=state.violation + counted * violation[0],
            rounds=state.rounds + counted,
        )

    def learn(key: Key, state: ActorCriticState, problem: Problem) -> ActorCriticState:
        state = end_epoch(state, config.length_epoch, dual)
        price = state.lam2
        if lam:
            price = fixed_price(state.replay, problem, lam)
        learner = functions(problem).learn(
            key, state.learner, state.replay, price, clash_matrix(problem)
        )
        return state._replace(learner=learner, price=price)

    def propose_sets(
        key: Key, state: ActorCriticState, problem: Problem, n: int
    ) -> Proposals:
        return propose(key, functions(problem), state, problem, n)

    return planned.Learner(init, tell, learn, propose_sets)


def end_epoch(
    state: ActorCriticState, length_epoch: int, dual: DualConfig | None
) -> ActorCriticState:
    """At a boundary, let the state follow the counts and lam2 the violations."""
    epoch = state.told // length_epoch
    is_over = epoch > state.epoch
    usage = state.counts / jnp.maximum(jnp.sum(state.counts), 1.0)
    lam2 = state.lam2
    if dual is not None:
        mean = state.violation / jnp.maximum(state.rounds, 1.0)
        lam2 = dual_step(lam2, mean, dual.alpha, dual.eta, dual.max_lam2)
    is_counted = is_over & (state.rounds > 0)
    return state._replace(
        usage=jnp.where(is_over, usage, state.usage),
        lam2=jnp.where(is_counted, lam2, state.lam2),
        epoch=jnp.maximum(epoch, state.epoch),
        violation=jnp.where(is_over, 0.0, state.violation),
        rounds=jnp.where(is_over, 0.0, state.rounds),
    )


def fixed_price(replay: rp.Replay, problem: Problem, lam: float) -> jax.Array:
    """What lam c charges for a random set's violation, in deviations: []."""
    _, deviation = rp.moments(replay.rows.rewards, replay.is_row)
    # Without any deviation only the violations count; any price says so.
    price = lam * random_rate(problem) / jnp.where(deviation > 0, deviation, 1.0)
    return jnp.asarray(price, jnp.float32)
