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
    origin = (jnp.arange(40) >= 30).astype(jnp.int32)
    refined = jax.jit(lambda k, a: refine(k, bound(worth), view, a, origin, (12, 0)))(
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


def test_refine__each_sampler_has_what_was_found_from_its_own_sets() -> None:
    problem = _problem()
    view = _view(problem, is_hard=False)
    worth = np.random.default_rng(3).uniform(size=problem.num_arms)
    actions = random_feasible_sets(jax.random.key(0), problem, 30)
    origin = jnp.repeat(jnp.arange(3), 10)
    run = jax.jit(lambda k, a: refine(k, bound(worth), view, a, origin, (4, 0, 4)))
    refined = np.asarray(run(jax.random.key(1), actions))
    np.testing.assert_array_equal(refined[10:20], actions[10:20])
    # A walker leaves its start by a single arm at each of its four steps.
    for part in (slice(0, 10), slice(20, 30)):
        own = [set(row) for row in np.asarray(actions)[part].tolist()]
        others = [set(r) for r in np.delete(actions, np.r_[part], axis=0).tolist()]
        new = [set(r) for r in refined[part].tolist() if set(r) not in own]
        assert len(new) == 5
        for found in new:
            assert min(len(found - start) for start in own) <= 4
            assert found not in others


def test_refine__nothing_of_its_own_changes_nothing() -> None:
    problem = _problem()
    view = _view(problem, is_hard=True)
    actions = random_feasible_sets(jax.random.key(0), problem, 12)
    worth = np.ones(problem.num_arms)
    origin = jnp.zeros((12,), jnp.int32)
    for num_starts in ((0, 12), (0,)):  # whoever may start has no candidate, or no one
        same = refine(
            jax.random.key(1), bound(worth), view, actions, origin, num_starts
        )
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
    refined = refine(
        jax.random.key(1), bound(worth), view, whole, jnp.zeros((8,), jnp.int32), (12,)
    )
    np.testing.assert_array_equal(np.sort(refined, axis=1), whole)
