"""Upper bounds against enumeration, and the independent linear model."""

from __future__ import annotations

import numpy as np
import pytest

from msb_jax.solvers.bounds import linear_program_cvxpy, quadratic_upper_bound
from msb_jax.solvers.scip import LinearProgram, QuadraticProgram
from tests.test_scip import enumerate_best, near_features, random_graph


@pytest.mark.parametrize("seed", range(4))
def test_linear_program_cvxpy__agrees_with_scip_and_enumeration(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, 10, 0.3)
    weights = rng.normal(size=10)
    value, clashes = enumerate_best(graph, 3, np.zeros((10, 10)), weights)
    assert clashes == 0
    action, found = linear_program_cvxpy(graph, 3, weights)
    np.testing.assert_allclose(found, value, rtol=1e-9)
    assert action.tolist() == LinearProgram(graph, 3).solve(weights).action.tolist()


def test_linear_program_cvxpy__says_when_nothing_is_feasible() -> None:
    with pytest.raises(ValueError, match="No 2 arms are free of conflicts"):
        linear_program_cvxpy(~np.eye(4, dtype=bool), 2, np.ones(4))


@pytest.mark.parametrize("num_steps", [0, 7, None])
@pytest.mark.parametrize("density", [0.0, 0.2, 0.5])
def test_quadratic_upper_bound__holds(density: float, num_steps: int | None) -> None:
    rng = np.random.default_rng([1, int(10 * density)])
    num_feasible = 0
    for _ in range(12):
        num_arms = int(rng.integers(2, 11))
        k = int(rng.integers(1, num_arms + 1))
        graph = random_graph(rng, num_arms, density)
        shape = (num_arms, num_arms)
        pair, linear = rng.normal(size=shape), rng.normal(size=num_arms)
        pair += rng.choice([0.0, 5.0])  # a common level, as in the synthetic setting
        value, clashes = enumerate_best(graph, k, pair, linear)
        bound = quadratic_upper_bound(graph, k, pair, linear, num_steps=num_steps)
        if clashes == 0:
            num_feasible += 1
            assert bound >= value - 1e-9
    assert num_feasible >= 6


def test_quadratic_upper_bound__is_exact_at_the_ends() -> None:
    rng = np.random.default_rng(2)
    pair, linear = rng.normal(size=(7, 7)), rng.normal(size=7)
    free = np.zeros((7, 7), bool)
    one = (linear + np.diag(pair)).max()
    np.testing.assert_allclose(quadratic_upper_bound(free, 1, pair, linear), one)
    whole = pair.sum() + linear.sum()
    np.testing.assert_allclose(quadratic_upper_bound(free, 7, pair, linear), whole)
    # (theta'x)^2 is largest on the K largest, each of which has the others beside it.
    theta = rng.uniform(size=12)
    bound = quadratic_upper_bound(
        np.zeros((12, 12), bool), 4, np.outer(theta, theta), np.zeros(12)
    )
    np.testing.assert_allclose(bound, np.sort(theta)[-4:].sum() ** 2, rtol=1e-12)


def test_quadratic_upper_bound__tightens_with_steps_and_conflicts() -> None:
    _, graph = near_features(40, 100, seed=3)
    pair = np.random.default_rng(3).uniform(0.0, 0.5, (40, 40))
    zeros = np.zeros(40)
    found = QuadraticProgram(graph, 8).solve(pair, zeros, node_limit=1)
    rows = quadratic_upper_bound(graph, 8, pair, zeros, num_steps=0)
    bound = quadratic_upper_bound(graph, 8, pair, zeros)
    free = quadratic_upper_bound(np.zeros_like(graph), 8, pair, zeros)
    assert found.value <= bound < free
    assert bound < 0.9 * rows
    assert bound < 0.9 * found.bound
    assert bound < 1.1 * found.value


def test_quadratic_upper_bound__scales_with_the_objective() -> None:
    rng = np.random.default_rng(4)
    graph = random_graph(rng, 20, 0.2)
    pair, linear = rng.normal(size=(20, 20)), rng.normal(size=20)
    bound = quadratic_upper_bound(graph, 5, pair, linear, num_steps=40)
    scaled = quadratic_upper_bound(graph, 5, 1e4 * pair, 1e4 * linear, num_steps=40)
    np.testing.assert_allclose(scaled, 1e4 * bound, rtol=1e-8)


def test_quadratic_upper_bound__shows_infeasibility() -> None:
    graph = ~np.eye(5, dtype=bool)
    bound = quadratic_upper_bound(graph, 2, np.ones((5, 5)), np.zeros(5))
    assert bound == -np.inf
    # Two cliques: every arm has a companion, but no three arms go together.
    graph[:2, 2:] = graph[2:, :2] = False
    pair = np.ones((5, 5))
    assert quadratic_upper_bound(graph, 3, pair, np.zeros(5)) == -np.inf
    assert quadratic_upper_bound(graph, 2, pair, np.zeros(5)) >= 4.0 - 1e-9


def test_quadratic_upper_bound__rejects_bad_arguments() -> None:
    free = np.zeros((3, 3), bool)
    with pytest.raises(ValueError, match="pair must have shape"):
        quadratic_upper_bound(free, 2, np.zeros((2, 2)), np.zeros(3))
    with pytest.raises(ValueError, match="NaN or infinite"):
        quadratic_upper_bound(free, 2, np.zeros((3, 3)), [0.0, np.inf, 0.0])
    with pytest.raises(ValueError, match=r"k must be in 1\.\.3"):
        quadratic_upper_bound(free, 4, np.zeros((3, 3)), np.zeros(3))
