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
    run = jax.jit(lambda k, a: refine(k, bound(worth), view, a, origin, (12, 0)))
    refined, owner = run(jax.random.key(1), actions)
    np.testing.assert_array_equal(owner, origin)
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


def test_refine__what_is_found_is_credited_to_whose_set_it_started_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("msb_jax.agent.refine.NUM_STEPS", 1)
    problem = _problem()
    view = _view(problem, is_hard=False)
    worth = np.random.default_rng(3).uniform(size=problem.num_arms)
    actions = random_feasible_sets(jax.random.key(0), problem, 30)
    origin = np.repeat(np.arange(3), 10)
    run = jax.jit(
        lambda k, a: refine(k, bound(worth), view, a, jnp.asarray(origin), (4, 0, 4))
    )
    refined, owner = jax.tree.map(np.asarray, run(jax.random.key(1), actions))
    before = np.asarray(bound(worth)(actions))
    is_kept = np.ones(30, bool)
    for part in (slice(0, 10), slice(20, 30)):
        is_kept[part] = before[part] >= np.sort(before[part])[5]
    np.testing.assert_array_equal(refined[is_kept], np.asarray(actions)[is_kept])
    np.testing.assert_array_equal(owner[is_kept], origin[is_kept])
    known = [set(row) for row in np.asarray(actions).tolist()]
    for row, sampler in zip(refined[~is_kept].tolist(), owner[~is_kept], strict=True):
        own = [known[i] for i in range(30) if origin[i] == sampler]
        assert set(row) not in known
        assert min(len(set(row) - start) for start in own) == 1
    assert set(owner[~is_kept]) == {0, 2}


def test_refine__nothing_of_its_own_changes_nothing() -> None:
    problem = _problem()
    view = _view(problem, is_hard=True)
    actions = random_feasible_sets(jax.random.key(0), problem, 12)
    worth = np.ones(problem.num_arms)
    origin = jnp.zeros((12,), jnp.int32)
    for num_starts in ((0, 12), (0,)):  # whoever may start has no candidate, or no one
        same, owner = refine(
            jax.random.key(1), bound(worth), view, actions, origin, num_starts
        )
        np.testing.assert_array_equal(owner, origin)
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
    refined, _ = refine(
        jax.random.key(1), bound(worth), view, whole, jnp.zeros((8,), jnp.int32), (12,)
    )
    np.testing.assert_array_equal(np.sort(refined, axis=1), whole)
