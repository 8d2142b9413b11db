"""The ground truth, played every round: the ceiling.

It is the only policy that is told the answer, and no contestant. An experiment hands
it the problems and the best set of each; a run finds its own by the problem.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.baselines.random import learn_nothing, plan_nothing
from msb_jax.problem import Problem
from msb_jax.types import Key, Policy


class OracleState(NamedTuple):
    """The best set of the run's problem."""

    action: jax.Array  # [K] int32


def oracle(problems: Problem, actions: jax.Array) -> Policy:
    """Make the policy that plays the best set of its problem.

    Args:
        problems: every leaf [B, ...].
        actions: int32[B, K], the best set of each.
    """
    actions = jnp.asarray(actions, jnp.int32)

    def init(key: Key, problem: Problem) -> OracleState:
        del key
        same = jnp.all(problems.features == problem.features[None], axis=(1, 2))
        same &= jnp.all(problems.conflicts == problem.conflicts[None], axis=(1, 2))
        return OracleState(action=actions[jnp.argmax(same)])

    def ask(key: Key, state: OracleState) -> tuple[OracleState, jax.Array]:
        del key
        return state, state.action

    def origin(state: OracleState) -> jax.Array:
        return jnp.zeros_like(state.action[..., 0])

    return Policy(init, ask, learn_nothing, plan_nothing, origin, ("oracle",))
