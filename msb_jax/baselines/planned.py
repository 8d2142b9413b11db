"""Policies that learn from the rewards they are told, and plan a block at a time.

What such policies share: the first n_re rounds are random sets; every f_in rounds the
learner learns from all that it was told and proposes the sets of the coming f_in
rounds; with hard constraints every set is repaired, most wanted arms first. A round
whose reward is NaN or infinite (a lost answer) teaches nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.baselines.checks import check_least
from msb_jax.baselines.random import check_constraints
from msb_jax.parallel import map_seeds, one_or_many
from msb_jax.problem import Problem, random_feasible_sets, random_sets, repair
from msb_jax.rng import stream
from msb_jax.types import Key, Policy, State

# Rewards that a learner needs before it proposes: one of them shows no difference.
_LEAST_TOLD = 2


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How rounds are planned."""

    constraints: str
    n_re: int  # random rounds at the start
    f_in: int  # rounds between two refreshes

    def __post_init__(self) -> None:
        check_constraints(self.constraints)
        check_least(self, {"n_re": 0, "f_in": 1})


def plan_of(config: Any) -> PlanConfig:
    """Take the plan out of the settings of a policy, or say what is wrong with it."""
    return PlanConfig(
        constraints=config.constraints, n_re=config.n_re, f_in=config.f_in
    )


class Proposals(NamedTuple):
    """Sets, and how much each of them wanted each arm."""

    actions: jax.Array  # [n, K] int32
    wanted: jax.Array  # [n, L]


class Round(NamedTuple):
    """A round that was played."""

    action: jax.Array  # [K] int32
    reward: jax.Array  # [] 0 if it is not known
    is_known: jax.Array  # [] bool; if False nothing may be learned
    is_own: jax.Array  # [] bool, not one of the random rounds


class Learner(NamedTuple):
    """What tells one such policy from another; pure functions for one run."""

    init: Callable[[Key, Problem], State]
    tell: Callable[[State, Problem, Round], State]
    learn: Callable[[Key, State, Problem], State]
    propose: Callable[[Key, State, Problem, int], Proposals]


class PlannedState(NamedTuple):
    """One run of such a policy."""

    problem: Problem
    learner: State
    asked: jax.Array  # [] int32
    told: jax.Array  # [] int32, rewards that were finite
    plan: jax.Array  # [f_in, K] int32
    turn: jax.Array  # [] int32, next row of the plan


def planned(name: str, learner: Learner, config: PlanConfig) -> Policy:
    """Make a policy of a learner."""
    is_hard = config.constraints == "hard"
    draw_sets = random_feasible_sets if is_hard else random_sets

    def init(key: Key, problem: Problem) -> PlannedState:
        plan_key, learner_key = jax.random.split(key)
        none = jnp.zeros((), jnp.int32)
        return PlannedState(
            problem=problem,
            learner=learner.init(learner_key, problem),
            asked=none,
            told=none,
            plan=draw_sets(plan_key, problem, config.f_in),
            turn=none,
        )

    def ask(key: Key, state: PlannedState) -> tuple[PlannedState, jax.Array]:
        del key
        turn = (state.turn + 1) % config.f_in
        action = state.plan[state.turn]
        return state._replace(asked=state.asked + 1, turn=turn), action

    def tell(
        key: Key, state: PlannedState, action: jax.Array, reward: jax.Array
    ) -> PlannedState:
        del key
        is_known = jnp.isfinite(reward)
        played = Round(
            action=action,
            reward=jnp.where(is_known, reward, 0.0),
            is_known=is_known,
            is_own=state.told >= max(config.n_re, _LEAST_TOLD),
        )
        return state._replace(
            learner=learner.tell(state.learner, state.problem, played),
            told=state.told + is_known,
        )

    def refresh_one(key: Key, state: PlannedState) -> PlannedState:
        problem = state.problem
        own = learner.learn(stream(key, "learn"), state.learner, problem)
        proposals = learner.propose(stream(key, "propose"), own, problem, config.f_in)
        actions = proposals.actions
        if is_hard:
            fix = jax.vmap(repair, in_axes=(None, 0, 0))
            actions = fix(problem, actions, proposals.wanted)
        random = draw_sets(stream(key, "sets"), problem, config.f_in)
        is_random = state.asked + jnp.arange(config.f_in) < config.n_re
        is_random |= state.told < _LEAST_TOLD
        return state._replace(
            learner=own,
            plan=jnp.where(is_random[:, None], random, actions),
            turn=jnp.zeros_like(state.turn),
        )

    refresh_all = map_seeds(refresh_one, in_turn=True)

    def origin(state: PlannedState) -> jax.Array:
        return jnp.zeros_like(state.turn)

    return Policy(init, ask, tell, one_or_many(refresh_all), origin, (name,))
