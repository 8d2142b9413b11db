"""Copies in lists of sets."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from msb_jax.agent.assignment import elites_first
from msb_jax.sets import best_distinct, copies_last, first_copies

SETS = jnp.array([[0, 1, 2], [3, 4, 5], [2, 0, 1], [1, 2, 3], [5, 4, 3], [0, 1, 2]])


def test_first_copies__finds_equal_sets_in_any_order() -> None:
    assert first_copies(SETS).tolist() == [0, 1, 0, 3, 1, 0]


def test_first_copies__keeps_rows_with_different_tags_apart() -> None:
    tags = jnp.array([0, 0, 1, 0, 0, 1])
    assert first_copies(SETS, tags).tolist() == [0, 1, 2, 3, 1, 2]


def test_copies_last__keeps_the_order_otherwise() -> None:
    rows = copies_last(SETS).tolist()
    assert rows[:3] == [[0, 1, 2], [3, 4, 5], [1, 2, 3]]
    assert sorted(map(sorted, rows)) == sorted(map(sorted, SETS.tolist()))


def test_best_distinct__puts_copies_last() -> None:
    values = jnp.array([1.0, 5.0, 3.0, 4.0, 9.0, 0.0])
    found = best_distinct(SETS, values, 4).tolist()
    assert found == [[5, 4, 3], [1, 2, 3], [2, 0, 1], [3, 4, 5]]


def test_elites_first__mixes_the_best_with_those_as_drawn() -> None:
    actions = jnp.array([[0, 1], [2, 3], [4, 5], [6, 7], [2, 3]])
    values = jnp.array([1.0, 2.0, 3.0, 4.0, 2.0])
    found = np.asarray(elites_first(actions, values)).tolist()
    # Best, first, second best, second, ...: each set once before any copy.
    assert found[:4] == [[6, 7], [0, 1], [4, 5], [2, 3]]
    assert len(found) == 5
