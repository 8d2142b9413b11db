"""Who gets how many places of the pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msb_jax.agent.assignment import assemble, assign, average_scores

ASSIGN = jax.jit(assign, static_argnums=1)


@settings(max_examples=40, deadline=None)
@given(
    scores=st.lists(st.floats(-1e3, 1e3, width=32), min_size=5, max_size=5),
    total=st.sampled_from([5, 6, 13, 167]),
)
def test_assign__shares_all_places_and_forgets_nobody(
    scores: list[float], total: int
) -> None:
    counts = np.asarray(ASSIGN(jnp.asarray(scores), total))
    assert counts.sum() == total
    assert counts.min() >= 1
    # A better score never gets fewer places.
    order = np.argsort(scores, kind="stable")
    assert (np.diff(counts[order]) >= -1).all()


def test_assign__does_not_depend_on_offset_and_unit_of_the_scores() -> None:
    scores = jnp.asarray([0.3, 0.5, 0.1, 0.9])
    counts = assign(scores, 100)
    np.testing.assert_array_equal(counts, assign(1000.0 * scores - 7.0, 100))
    quota = 1 + 96 * jax.nn.softmax((scores - scores.mean()) / scores.std())
    assert np.abs(np.asarray(counts) - np.asarray(quota)).max() < 1
    np.testing.assert_array_equal(assign(jnp.full((3,), 2.0), 9), [3, 3, 3])
    np.testing.assert_array_equal(assign(jnp.asarray([4.0]), 7), [7])


def test_assign__says_when_there_are_too_few_places() -> None:
    with pytest.raises(ValueError, match="2 places"):
        assign(jnp.zeros((3,)), 2)


def test_average_scores__looks_at_the_better_half() -> None:
    values = jnp.asarray([1.0, 5.0, 3.0, 7.0, 2.0, 9.0])
    origin = jnp.asarray([0, 0, 0, 1, 1, -1])
    means = average_scores(values, origin, 3)
    # 0: the better two of three; 1: the better of two; 2 proposed nothing.
    np.testing.assert_allclose(means, [4.0, 7.0, 5.5])


def test_assemble__takes_the_first_proposals_of_each() -> None:
    proposals = jnp.arange(3 * 5 * 2, dtype=jnp.int32).reshape(3, 5, 2)
    counts = jnp.asarray([1, 4, 2])
    pool, owner = jax.jit(assemble, static_argnums=2)(proposals, counts, 7)
    np.testing.assert_array_equal(owner, [0, 1, 1, 1, 1, 2, 2])
    np.testing.assert_array_equal(pool[0], proposals[0, 0])
    np.testing.assert_array_equal(pool[1:5], proposals[1, :4])
    np.testing.assert_array_equal(pool[5:], proposals[2, :2])
