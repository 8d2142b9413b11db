"""The rows of a history."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.masters import history as hist

CAPACITY, K = 12, 3
MERGE = jax.jit(hist.merge)


def _told(*rounds: tuple[list[int], float]) -> hist.History:
    history = hist.new_history(CAPACITY, K)
    for action, reward in rounds:
        history = hist.append(history, jnp.asarray(action), jnp.asarray(reward))
    return history


def test_merge__makes_one_row_of_the_rounds_of_a_set() -> None:
    told = _told(([4, 1, 2], 1.0), ([0, 1, 2], 5.0), ([2, 4, 1], 2.0), ([1, 2, 4], 6.0))
    merged = MERGE(told)
    assert int(merged.count) == 2 and int(merged.absorbed) == 0
    assert int(merged.rounds) == 4
    np.testing.assert_array_equal(merged.actions[:2], [[4, 1, 2], [0, 1, 2]])
    np.testing.assert_allclose(merged.rewards[:3], [3.0, 5.0, 0.0])
    np.testing.assert_array_equal(merged.plays[:3], [3.0, 1.0, 1.0])
    assert not np.asarray(merged.actions[2:]).any()


def test_merge__again_after_more_rounds_weighs_the_means() -> None:
    merged = MERGE(_told(([0, 1, 2], 1.0), ([2, 1, 0], 3.0)))
    merged = hist.append(merged, jnp.asarray([1, 0, 2]), jnp.asarray(8.0))
    again = MERGE(merged)
    assert int(again.count) == 1 and int(again.rounds) == 3
    np.testing.assert_allclose(again.rewards[0], 4.0)
    np.testing.assert_allclose(again.plays[0], 3.0)
    np.testing.assert_array_equal(MERGE(again).rewards, again.rewards)


def test_merge__keeps_the_scatter_of_the_rounds_of_a_set() -> None:
    first, second, third = [1.0, 3.0, 8.0], [2.0, 2.5], [4.0]
    told = _told(*(([0, 1, 2], r) for r in first[:2]), ([3, 4, 5], second[0]))
    merged = MERGE(told)
    np.testing.assert_allclose(merged.scatter[:3], [2.0, 0.0, 0.0])
    for action, reward in (
        ([2, 1, 0], first[2]),
        ([5, 4, 3], second[1]),
        ([6, 7, 8], third[0]),
    ):
        merged = hist.append(merged, jnp.asarray(action), jnp.asarray(reward))
    again = hist.grow(MERGE(merged), CAPACITY + 4)
    wanted = [np.var(x) * len(x) for x in (first, second, third)]
    np.testing.assert_allclose(again.scatter[:3], wanted, rtol=1e-6)
    assert again.scatter.shape == (CAPACITY + 4,) and not again.scatter[3:].any()
    kept = hist.keep_last(again, 2)
    np.testing.assert_allclose(kept.scatter[:3], [*wanted[1:], 0.0], rtol=1e-6)


@pytest.mark.parametrize("rounds", [0, 1, CAPACITY])
def test_merge__keeps_distinct_sets_as_they_are(rounds: int) -> None:
    told = _told(*(([i, i + 1, i + 2], float(i)) for i in range(rounds)))
    merged = MERGE(told)
    for name in ("actions", "rewards", "plays", "count", "rounds"):
        np.testing.assert_array_equal(getattr(merged, name), getattr(told, name))


def test_is_first__is_said_of_rows_not_of_empty_places() -> None:
    told = _told(([0, 0, 0], 1.0), ([0, 0, 0], 1.0))
    first = np.asarray(hist.is_first(told))
    assert first[0] and not first[1]
    assert first[2:].all()  # an empty place is nobody's copy


def test_append__leaves_out_what_is_not_a_number() -> None:
    told = _told(([0, 1, 2], float("nan")), ([0, 1, 3], 2.0))
    assert int(told.count) == int(told.rounds) == 1
    np.testing.assert_array_equal(told.actions[0], [0, 1, 3])
