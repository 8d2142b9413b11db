"""The part of a master that changes its state, for those that learn at a refresh."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from msb_jax.masters import history as hist
from msb_jax.problem import Problem
from msb_jax.types import Key, State


class Learner(NamedTuple):
    """How a master starts, takes in rounds, learns and grows; see `types.Master`."""

    init: Callable[[Key, Problem], State]
    refresh: Callable[..., State]  # key, state, and whether to fit
    due: Callable[[State], bool]
    grow: Callable[[State, int], State]


def update(key: Key, state: State, action: jax.Array, reward: jax.Array) -> State:
    """Append a round to the history; all else is for the next refresh."""
    del key
    return state._replace(history=hist.append(state.history, action, reward))
