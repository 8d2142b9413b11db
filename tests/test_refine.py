"""The master's search on its own bound."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.agent.refine import refine
from msb_jax.problem import problem_from_conflicts, random_feasible_sets, violated_pairs
from tests.test_samplers import _problem, _view


def bound(worth: np.ndarray):  # type: ignore[no-untyped-def]
    weights = jnp.asarray(worth, jnp.float32)
    return lambda sets: jnp.sum(weights[sets], axis=1)


@pytest.mark.parametrize("is_hard", [False, True])
def test_refine__raises_the_bound_and_keeps_the_others(is_hard: bool) -> None:
    problem = _problem()
    view = _view(problem, is_hard=is_hard)
    worth = np.random.default_rng(3).uniform(size=problem.num_arms)
    actions = random_feasible_sets(jax.random.key(0), problem, 40)
    is_own = jnp.arange(40) < 30
    refined = jax.jit(lambda k, a: refine(k, bound(worth), view, a, is_own))(
        jax.random.key(1), actions
    )
    before, after = (np.asarray(bound(worth)(x)) for x in (actions, refined))
    np.testing.assert_array_equal(refined[30:], actions[30:])
    # The better half stays, and what takes the place of the others is better.
    kept = np.argsort(-before[:30])[:15]
    np.testing.assert_array_equal(np.asarray(refined)[kept], np.asarray(actions)[kept])
    assert after[:30].mean() > before[:30].mean()
    assert after[:30].max() > before[:30].max()
    assert all(len(set(row)) == problem.k for row in np.asarray(refined).tolist())
    if is_hard:
        assert not np.asarray(violated_pairs(problem, refined)).any()


def test_refine__nothing_of_its_own_changes_nothing() -> None:
    problem = _problem()
    view = _view(problem, is_hard=True)
    actions = random_feasible_sets(jax.random.key(0), problem, 12)
    worth = np.ones(problem.num_arms)
    nobody = jnp.zeros((12,), bool)
    same = refine(jax.random.key(1), bound(worth), view, actions, nobody)
    np.testing.assert_array_equal(same, actions)


def test_refine__all_arms_leaves_no_exchange() -> None:
    problem = problem_from_conflicts(np.zeros((6, 6), bool), 6)
    whole = jnp.tile(jnp.arange(6, dtype=jnp.int32), (8, 1))
    base = _view(_problem(), is_hard=False)
    view = base._replace(
        problem=problem,
        forbidden=problem.conflicts,
        arms=jnp.arange(6, dtype=jnp.int32),
        model=base.model._replace(
            pair=base.model.pair[:6, :6], linear=base.model.linear[:6]
        ),
        reach=base.reach[:6],
    )
    worth = np.arange(6.0)
    refined = refine(jax.random.key(1), bound(worth), view, whole, jnp.ones((8,), bool))
    np.testing.assert_array_equal(np.sort(refined, axis=1), whole)
