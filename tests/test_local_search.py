"""Swap search against enumeration."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.problem import (
    problem_from_conflicts,
    random_feasible_sets,
    violated_pairs,
)
from msb_jax.solvers import local_search
from msb_jax.types import Quadratic
from tests.reference import best_set


def _instance(seed: int, num_arms: int, density: float) -> tuple[Quadratic, np.ndarray]:
    rng = np.random.default_rng(seed)
    pair = rng.normal(size=(num_arms, num_arms))
    model = Quadratic(
        pair=jnp.asarray((pair + pair.T) / 2, jnp.float32),
        linear=jnp.asarray(rng.normal(size=num_arms), jnp.float32),
        offset=jnp.asarray(0.5, jnp.float32),
    )
    conflicts = np.triu(rng.random((num_arms, num_arms)) < density, 1)
    return model, conflicts | conflicts.T


@pytest.mark.parametrize("seed", range(6))
def test_tabu_search__finds_the_optimum_of_small_problems(seed: int) -> None:
    model, conflicts = _instance(seed, 12, 0.2)
    problem = problem_from_conflicts(conflicts, 4)
    starts = random_feasible_sets(jax.random.key(seed), problem, 12)
    actions, values = local_search.tabu_search(
        model, problem.conflicts, starts, num_steps=40
    )
    chosen, value = best_set(
        np.asarray(model.pair, float), np.asarray(model.linear, float), conflicts, 4
    )
    winner = int(np.argmax(values))
    assert sorted(np.asarray(actions[winner]).tolist()) == list(chosen)
    np.testing.assert_allclose(values[winner], value + 0.5, rtol=1e-5)


def test_tabu_search__keeps_feasible_starts_feasible_and_arms_distinct() -> None:
    model, conflicts = _instance(3, 30, 0.3)
    problem = problem_from_conflicts(conflicts, 5)
    starts = random_feasible_sets(jax.random.key(0), problem, 20)
    before = np.asarray(violated_pairs(problem, starts))
    actions, values = local_search.tabu_search(
        model, problem.conflicts, starts, num_steps=30
    )
    after = np.asarray(violated_pairs(problem, actions))
    assert np.all(after <= before)
    assert all(len(set(row)) == 5 for row in np.asarray(actions).tolist())
    started = jax.vmap(lambda a: local_search.evaluate(model, a))(starts)
    assert np.all(np.asarray(values) >= np.asarray(started) - 1e-5)
    evaluated = jax.vmap(lambda a: local_search.evaluate(model, a))(actions)
    np.testing.assert_allclose(values, evaluated, rtol=1e-5)


@pytest.mark.parametrize(("num_arms", "k"), [(2, 1), (2, 2), (5, 5), (3, 2)])
def test_tabu_search__works_at_tiny_sizes(num_arms: int, k: int) -> None:
    model, _ = _instance(1, num_arms, 0.0)
    conflicts = np.zeros((num_arms, num_arms), bool)
    start = jnp.arange(k, dtype=jnp.int32)[None]
    actions, values = local_search.tabu_search(
        model, jnp.asarray(conflicts), start, num_steps=10
    )
    _, value = best_set(
        np.asarray(model.pair, float), np.asarray(model.linear, float), conflicts, k
    )
    np.testing.assert_allclose(values[0], value + 0.5, rtol=1e-5)
    assert len(set(np.asarray(actions[0]).tolist())) == k


def test_tabu_search__when_everything_conflicts_the_start_is_not_made_worse() -> None:
    model, _ = _instance(2, 6, 0.0)
    conflicts = ~np.eye(6, dtype=bool)
    actions, _ = local_search.tabu_search(
        model, jnp.asarray(conflicts), jnp.asarray([[0, 1, 2]]), num_steps=10
    )
    assert len(set(np.asarray(actions[0]).tolist())) == 3


def test_swap_gains__equal_the_difference_of_values() -> None:
    model, conflicts = _instance(5, 9, 0.25)
    hollow = local_search.hollow(model)
    action = jnp.asarray([1, 4, 7], jnp.int32)
    gains, allowed = local_search.swap_gains(hollow, jnp.asarray(conflicts), action)
    base = local_search.evaluate(model, action)
    own = [int(conflicts[a][[1, 4, 7]].sum()) for a in (1, 4, 7)]
    for i in range(3):
        rest = [int(a) for j, a in enumerate(action) if j != i]
        for arm in range(9):
            if arm in (1, 4, 7):
                assert not allowed[i, arm]
                continue
            value = local_search.evaluate(model, action.at[i].set(arm))
            np.testing.assert_allclose(gains[i, arm], value - base, atol=1e-5)
            assert bool(allowed[i, arm]) == (conflicts[arm][rest].sum() <= own[i])


def test_penalise__charges_the_price_for_every_conflicting_pair() -> None:
    model, conflicts = _instance(7, 8, 0.5)
    problem = problem_from_conflicts(conflicts, 4)
    action = jnp.asarray([0, 2, 3, 6], jnp.int32)
    priced = local_search.penalise(model, problem.conflicts, jnp.asarray(0.7))
    pairs = int(violated_pairs(problem, action))
    assert pairs > 0
    np.testing.assert_allclose(
        local_search.evaluate(priced, action),
        local_search.evaluate(model, action) - 0.7 * pairs,
        rtol=1e-5,
    )
