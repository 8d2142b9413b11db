"""Let a policy that plays sets play ordered lists.

Inside, a list is a set of placements (`spaces.ordered`); outside, it is the items
int32[K] from the first place on. The environment, the runner and a live system see
items only.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from msb_jax.problem import Problem
from msb_jax.spaces.ordered import decode, encode, placement_problem
from msb_jax.types import Key, Policy, State


class OrderedState(NamedTuple):
    """A run of a policy on placements."""

    problem: Problem  # of the placements
    inner: State


def ordered(policy: Policy) -> Policy:
    """Wrap a policy so that its actions are lists.

    Args:
        policy: for example `master_slave`; it is told of the placements.

    Returns:
        A policy for problems whose arms are items and whose order matters.
    """

    def init(key: Key, problem: Problem) -> OrderedState:
        placements = placement_problem(problem)
        return OrderedState(placements, policy.init(key, placements))

    def ask(key: Key, state: OrderedState) -> tuple[OrderedState, jax.Array]:
        inner, action = policy.ask(key, state.inner)
        return state._replace(inner=inner), decode(state.problem, action)

    def tell(
        key: Key, state: OrderedState, action: jax.Array, reward: jax.Array
    ) -> OrderedState:
        placed = encode(state.problem, action)
        return state._replace(inner=policy.tell(key, state.inner, placed, reward))

    def refresh(key: Key, state: OrderedState) -> OrderedState:
        return state._replace(inner=policy.refresh(key, state.inner))

    def tell_clicks(
        key: Key,
        state: OrderedState,
        action: jax.Array,
        reward: jax.Array,
        clicks: jax.Array,
    ) -> OrderedState:
        assert policy.tell_clicks is not None
        placed = encode(state.problem, action)
        inner = policy.tell_clicks(key, state.inner, placed, reward, clicks)
        return state._replace(inner=inner)

    producer = policy.producer
    return policy._replace(
        init=init,
        ask=ask,
        tell=tell,
        refresh=refresh,
        origin=lambda state: policy.origin(state.inner),
        producer=None if producer is None else lambda state: producer(state.inner),
        tell_clicks=None if policy.tell_clicks is None else tell_clicks,
    )
