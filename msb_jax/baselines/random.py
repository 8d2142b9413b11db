"""Uniform random sets: the floor that every policy has to leave below.

In soft mode an action is a uniform K-set; in hard mode a set drawn by random
sequential insertion, which is feasible wherever the insertion succeeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.problem import Problem
from msb_jax.spaces import legal_actions
from msb_jax.types import Key, Policy, State

CONSTRAINTS = ("soft", "hard")


def check_constraints(constraints: str) -> None:
    """Raise unless `constraints` names a way to treat conflicts."""
    if constraints not in CONSTRAINTS:
        raise ValueError(f"constraints must be soft or hard, got {constraints!r}.")


@dataclass(frozen=True, kw_only=True)
class RandomConfig:
    """Settings of `random`."""

    constraints: str = "soft"  # hard: only sets without a conflict, if there are any

    def __post_init__(self) -> None:
        check_constraints(self.constraints)


class RandomState(NamedTuple):
    """What `random` carries: nothing but the problem."""

    problem: Problem


def learn_nothing(
    key: Key, state: State, action: jax.Array, reward: jax.Array
) -> State:
    """The `tell` of a policy that does not learn."""
    del key, action, reward
    return state


def plan_nothing(key: Key, state: State) -> State:
    """The `refresh` of a policy without anything to prepare."""
    del key
    return state


def random(config: RandomConfig) -> Policy:
    """Make the policy that plays random sets and learns nothing."""
    is_hard = config.constraints == "hard"

    def init(key: Key, problem: Problem) -> RandomState:
        del key
        return RandomState(problem=problem)

    def ask(key: Key, state: RandomState) -> tuple[RandomState, jax.Array]:
        return state, legal_actions(key, state.problem, 1, is_hard)[0]

    def origin(state: RandomState) -> jax.Array:
        del state
        return jnp.zeros((), jnp.int32)

    return Policy(init, ask, learn_nothing, plan_nothing, origin, ("random",))
