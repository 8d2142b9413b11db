"""The integer programs against enumeration, hand-worked cases and each other."""

from __future__ import annotations

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msb_jax.solvers.bounds import linear_program_cvxpy
from msb_jax.solvers.conflict_graph import climb, roam, split_edges
from msb_jax.solvers.local_search import tabu_search
from msb_jax.solvers.scip import LinearProgram, QuadraticProgram, solve_many
from msb_jax.types import Quadratic


def random_graph(rng: np.random.Generator, num_arms: int, density: float) -> np.ndarray:
    upper = np.triu(rng.uniform(size=(num_arms, num_arms)) < density, 1)
    return upper | upper.T


def enumerate_best(
    conflicts: np.ndarray,
    k: int,
    pair: np.ndarray,
    linear: np.ndarray,
    penalty: float | None = None,
) -> tuple[float, int]:
    """Return value and violations of the best set: least violation first, or priced."""
    sets = np.array(list(itertools.combinations(range(linear.size), k)))
    rows, columns = sets[:, :, None], sets[:, None, :]
    clashes = conflicts[rows, columns].sum(axis=(1, 2)) // 2
    values = pair[rows, columns].sum(axis=(1, 2)) + linear[sets].sum(axis=1)
    if penalty is not None:
        values = values - penalty * clashes
        best = int(values.argmax())
    else:
        best = int(np.lexsort((-values, clashes))[0])
    return float(values[best]), int(clashes[best])


def near_features(
    num_arms: int, edges: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Features and the graph of their closest pairs, as in the synthetic setting."""
    x = np.random.default_rng(seed).uniform(size=(num_arms, 10))
    gaps = np.abs(x[:, None] - x[None]).sum(-1) / (x.sum(1)[:, None] + x.sum(1)[None])
    upper = np.triu_indices(num_arms, 1)
    cut = np.sort(gaps[upper])[edges - 1]
    graph = gaps <= cut
    np.fill_diagonal(graph, False)
    return x, graph


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("density", [0.0, 0.15, 0.5, 0.9, 1.0])
def test_linear_program__equals_enumeration(seed: int, density: float) -> None:
    rng = np.random.default_rng([seed, int(100 * density)])
    num_arms = int(rng.integers(2, 11))
    k = int(rng.integers(1, num_arms + 1))
    graph = random_graph(rng, num_arms, density)
    weights = rng.normal(size=num_arms) * 10.0 ** rng.integers(-4, 5)
    unit = np.abs(weights).max()
    program = LinearProgram(graph, k)
    for penalty in (None, 0.0, 0.1 * unit, 100.0 * unit):
        found = program.solve(weights, penalty=penalty)
        value, clashes = enumerate_best(
            graph, k, np.zeros((num_arms, num_arms)), weights, penalty
        )
        np.testing.assert_allclose(found.value, value, atol=1e-8 * unit)
        assert found.bound == found.value
        if penalty is None:
            assert found.violated == clashes
            assert found.status == ("least_violation" if clashes else "optimal")
        else:
            assert found.status == "optimal"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("density", [0.0, 0.2, 0.6, 1.0])
def test_quadratic_program__equals_enumeration(seed: int, density: float) -> None:
    rng = np.random.default_rng([seed, int(100 * density)])
    num_arms = int(rng.integers(2, 11))
    k = int(rng.integers(1, num_arms + 1))
    graph = random_graph(rng, num_arms, density)
    pair, linear = rng.normal(size=(num_arms, num_arms)), rng.normal(size=num_arms)
    program = QuadraticProgram(graph, k)
    for penalty in (None, 0.3, 50.0):
        found = program.solve(pair, linear, penalty=penalty, node_limit=10_000)
        value, clashes = enumerate_best(graph, k, pair, linear, penalty)
        np.testing.assert_allclose(found.value, value, atol=1e-7)
        assert found.bound >= value - 1e-7
        if penalty is None:
            assert found.violated == clashes
            assert found.status == ("least_violation" if clashes else "optimal")


@pytest.mark.parametrize("seed", range(4))
def test_quadratic_program__agrees_with_tabu_search(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_arms, k = 12, 4
    graph = random_graph(rng, num_arms, 0.2)
    pair, linear = rng.normal(size=(num_arms, num_arms)), rng.normal(size=num_arms)
    pair = (pair + pair.T) / 2
    value, clashes = enumerate_best(graph, k, pair, linear)
    assert clashes == 0
    starts = [
        LinearProgram(graph, k).solve(rng.normal(size=num_arms)).action
        for _ in range(16)
    ]
    model = Quadratic(
        jnp.asarray(pair, jnp.float32), jnp.asarray(linear, jnp.float32), jnp.zeros(())
    )
    search = jax.jit(tabu_search, static_argnames="num_steps")
    sets, values = search(
        model, jnp.asarray(graph), jnp.asarray(np.stack(starts)), num_steps=60
    )
    best = np.asarray(sets[int(values.argmax())])
    assert not graph[np.ix_(best, best)].any()
    np.testing.assert_allclose(values.max(), value, rtol=1e-5)
    found = QuadraticProgram(graph, k).solve(pair, linear, start=best, node_limit=1000)
    np.testing.assert_allclose(found.value, value, rtol=1e-9)
    assert found.status == "optimal"


def test_linear_program__small_cases_by_hand() -> None:
    edge = np.array([[False, True], [True, False]])
    found = LinearProgram(edge, 1).solve([1.0, 3.0])
    assert (found.action.tolist(), found.value, found.status) == ([1], 3.0, "optimal")
    found = LinearProgram(edge, 2).solve([1.0, 3.0])
    assert (found.action.tolist(), found.violated) == ([0, 1], 1)
    assert found.status == "least_violation"
    free = LinearProgram(np.zeros((4, 4), bool), 2).solve([2.0, -1.0, 5.0, 4.0])
    assert (free.action.tolist(), free.value) == ([2, 3], 9.0)
    # A path 0-1-2-3: the middle is heavy, but only one end goes with it.
    path = np.zeros((4, 4), bool)
    for i in range(3):
        path[i, i + 1] = path[i + 1, i] = True
    found = LinearProgram(path, 2).solve([3.0, 4.0, 4.0, 2.0])
    assert (found.action.tolist(), found.value) == ([0, 2], 7.0)
    # Together the two in the middle are worth 8, less the price of their conflict.
    assert LinearProgram(path, 2).solve([3, 4, 4, 2], penalty=0.5).value == 7.5
    assert LinearProgram(path, 2).solve([3, 4, 4, 2], penalty=1.5).value == 7.0
    assert found.action.dtype == np.int32


def test_linear_program__all_conflicts_takes_the_heaviest() -> None:
    graph = ~np.eye(30, dtype=bool)
    weights = np.random.default_rng(0).normal(size=30)
    found = LinearProgram(graph, 6).solve(weights)
    assert found.violated == 15
    assert found.action.tolist() == np.sort(np.argsort(-weights)[:6]).tolist()
    assert found.status == "least_violation"


@pytest.mark.parametrize("seed", range(3))
def test_linear_program__equals_cvxpy_where_heavy_arms_conflict(seed: int) -> None:
    x, graph = near_features(120, 1500, seed)
    # Weights that follow the features: the heavy arms are near each other.
    weights = x @ np.random.default_rng(seed).normal(size=10)
    found = LinearProgram(graph, 8).solve(weights)
    action, value = linear_program_cvxpy(graph, 8, weights)
    assert found.status == "optimal"
    np.testing.assert_allclose(found.value, value, rtol=1e-9)
    assert not graph[np.ix_(action, action)].any()


def test_linear_program__leaves_the_heaviest_when_they_form_a_clique() -> None:
    graph = np.zeros((200, 200), bool)
    graph[:150, :150] = ~np.eye(150, dtype=bool)
    weights = np.linspace(2.0, 1.0, 200)
    found = LinearProgram(graph, 4).solve(weights)
    assert found.action.tolist() == [0, 150, 151, 152]
    assert found.status == "optimal"


def test_linear_program__large_graph_equals_cvxpy() -> None:
    rng = np.random.default_rng(3)
    graph = random_graph(rng, 1100, 0.004)
    weights = rng.uniform(size=1100)
    found = LinearProgram(graph, 30).solve(weights)
    np.testing.assert_allclose(
        found.value, linear_program_cvxpy(graph, 30, weights)[1], rtol=1e-9
    )
    assert (found.status, found.violated) == ("optimal", 0)


def test_linear_program__arm_limit_is_reported_with_a_valid_bound() -> None:
    x, graph = near_features(100, 1200, seed=1)
    weights = x @ np.random.default_rng(1).normal(size=10)
    program = LinearProgram(graph, 10)
    exact = program.solve(weights)
    short = program.solve(weights, arm_limit=10)
    assert (exact.status, short.status) == ("optimal", "arm_limit")
    assert short.value < exact.value < short.bound
    assert short.violated == 0


def test_linear_program__penalty_trades_violations() -> None:
    _, graph = near_features(60, 300, seed=2)
    weights = np.random.default_rng(2).uniform(size=60)
    program = LinearProgram(graph, 10)
    runs = [program.solve(weights, penalty=p) for p in (0.0, 0.01, 0.1, 1.0, 50.0)]
    violated = [r.violated for r in runs]
    assert violated == sorted(violated, reverse=True)
    assert violated[0] > 0
    assert violated[-1] == 0
    np.testing.assert_allclose(runs[-1].value, program.solve(weights).value)
    # Each is the best at its own price.
    for run, price in zip(runs, (0.0, 0.01, 0.1, 1.0, 50.0), strict=True):
        for other in runs:
            worth = weights[other.action].sum() - price * other.violated
            assert worth <= run.value + 1e-9


def test_linear_program__too_many_priced_cliques_are_left_to_search() -> None:
    rng = np.random.default_rng(9)
    graph = random_graph(rng, 130, 0.5)
    assert len(split_edges(graph)) > 400
    weights = rng.uniform(size=130)
    found = LinearProgram(graph, 30).solve(weights)
    assert (found.status, found.bound) == ("least_violation", np.inf)
    priced = LinearProgram(graph, 30).solve(weights, penalty=0.5)
    assert priced.status == "node_limit"
    assert priced.value <= priced.bound < np.inf
    assert priced.violated >= found.violated
    # No swap makes either better.
    for run, price in ((found, 31.0), (priced, 0.5)):
        before = weights[run.action].sum() - price * run.violated
        for place in range(30):
            for arm in np.setdiff1d(np.arange(130), run.action):
                other = run.action.copy()
                other[place] = arm
                clashes = graph[np.ix_(other, other)].sum() / 2
                assert weights[other].sum() - price * clashes <= before + 1e-6


def test_roam__leaves_a_local_optimum() -> None:
    # Two pairs that are good together; a single swap away from {0, 1} only loses.
    pair = np.zeros((4, 4))
    pair[0, 1] = pair[1, 0] = 1.0
    pair[2, 3] = pair[3, 2] = 2.0
    start = np.array([0, 1])
    assert sorted(climb(pair, 1.0, np.zeros(4), start)) == [0, 1]
    assert sorted(roam(pair, 1.0, np.zeros(4), start, 10, tenure=1)) == [2, 3]


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.integers(0, 10_000))
def test_linear_program__relabelling_shifting_and_scaling(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, 14, 0.3)
    weights = rng.normal(size=14)
    found = LinearProgram(graph, 4).solve(weights)
    order = rng.permutation(14)
    moved = LinearProgram(graph[np.ix_(order, order)], 4).solve(weights[order])
    assert np.sort(order[moved.action]).tolist() == found.action.tolist()
    other = LinearProgram(graph, 4).solve(1e-5 * weights + 3.0)
    assert other.action.tolist() == found.action.tolist()


def test_programs__same_input_same_output_whatever_came_before() -> None:
    x, graph = near_features(80, 700, seed=4)
    rng = np.random.default_rng(4)
    # Rounded weights: many ties, which a warm start could break either way.
    draws = [np.round(x @ rng.normal(size=10), 1) for _ in range(6)]
    program = LinearProgram(graph, 7)
    forward = [program.solve(w) for w in draws]
    backward = [program.solve(w) for w in reversed(draws)][::-1]
    fresh = [LinearProgram(graph, 7).solve(w) for w in draws]
    for a, b, c in zip(forward, backward, fresh, strict=True):
        assert a.action.tolist() == b.action.tolist() == c.action.tolist()
        assert a[1:] == b[1:] == c[1:]
    pair = np.round(rng.uniform(size=(80, 80)), 1)
    inner = np.ix_(np.arange(25), np.arange(25))
    quadratic = QuadraticProgram(graph[inner], 5)
    runs = [quadratic.solve(pair[inner], np.zeros(25), node_limit=20) for _ in range(2)]
    assert runs[0].action.tolist() == runs[1].action.tolist()
    assert runs[0][1:] == runs[1][1:]


def test_quadratic_program__node_limit_keeps_the_start_and_a_bound() -> None:
    rng = np.random.default_rng(6)
    _, graph = near_features(30, 60, seed=6)
    pair, linear = rng.uniform(size=(30, 30)), rng.normal(size=30)
    start = LinearProgram(graph, 8).solve(rng.normal(size=30)).action
    before = pair[np.ix_(start, start)].sum() + linear[start].sum()
    short = QuadraticProgram(graph, 8).solve(pair, linear, start=start, node_limit=1)
    long = QuadraticProgram(graph, 8).solve(pair, linear, node_limit=50)
    assert short.status == long.status == "node_limit"
    assert before < short.value <= short.bound
    assert max(short.value, long.value) <= min(short.bound, long.bound)
    assert np.isfinite(short.bound)
    assert short.violated == long.violated == 0


def test_split_edges__counts_every_pair_once() -> None:
    graph = random_graph(np.random.default_rng(7), 25, 0.5)
    count = np.zeros((25, 25), int)
    for clique in split_edges(graph):
        count[np.ix_(clique, clique)] += 1
    np.fill_diagonal(count, 0)
    np.testing.assert_array_equal(count, graph.astype(int))


def test_solve_many__keeps_the_order_and_equals_one_by_one() -> None:
    _, graph = near_features(60, 400, seed=8)
    draws = np.random.default_rng(8).normal(size=(6, 60))
    programs = [LinearProgram(graph, 6) for _ in draws]
    jobs = [lambda p=p, w=w: p.solve(w) for p, w in zip(programs, draws, strict=True)]
    threaded = solve_many(jobs, workers=3)
    assert [s.action.tolist() for s in threaded] == [
        LinearProgram(graph, 6).solve(w).action.tolist() for w in draws
    ]
    assert solve_many([]) == []
    # Both jobs are under way at once: each waits for the other.
    barrier = threading.Barrier(2, timeout=20)
    assert solve_many([lambda: barrier.wait() >= 0] * 2, workers=2) == [True, True]


def test_solve_many__says_which_job_failed() -> None:
    def fail() -> int:
        raise ValueError("the weights are wrong")

    for workers in (1, 2):
        with pytest.raises(RuntimeError, match="Job 2 of 2 failed: the weights"):
            solve_many([lambda: 1, fail], workers=workers)
    with pytest.raises(ValueError, match="workers must be at least 1"):
        solve_many([fail], workers=0)


@pytest.mark.parametrize("program", [LinearProgram, QuadraticProgram])
def test_programs__reject_bad_graphs(program: type) -> None:
    with pytest.raises(ValueError, match=r"shape \[L, L\]"):
        program(np.zeros((2, 3), bool), 1)
    with pytest.raises(ValueError, match="symmetric"):
        program(np.triu(np.ones((3, 3), bool), 1), 1)
    with pytest.raises(ValueError, match="empty diagonal"):
        program(np.eye(3, dtype=bool), 1)
    for k in (0, 4):
        with pytest.raises(ValueError, match=r"k must be in 1\.\.3"):
            program(np.zeros((3, 3), bool), k)


def test_programs__reject_bad_arguments() -> None:
    program = LinearProgram(np.zeros((3, 3), bool), 2)
    with pytest.raises(ValueError, match="weights must have shape"):
        program.solve(np.zeros(4))
    with pytest.raises(ValueError, match="NaN or infinite"):
        program.solve([0.0, np.nan, 1.0])
    with pytest.raises(ValueError, match="penalty must be"):
        program.solve(np.zeros(3), penalty=-1.0)
    for start in ([0, 0], [0], [0, 3]):
        with pytest.raises(ValueError, match="start must be 2 distinct arms"):
            program.solve(np.zeros(3), start=start)
    with pytest.raises(ValueError, match="pair must have shape"):
        QuadraticProgram(np.zeros((3, 3), bool), 2).solve(np.zeros(3), np.zeros(3))
