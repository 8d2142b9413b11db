"""Sets without conflicts: greedy insertion, repair, and whether there are any."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msb_jax import problem as pb
from tests.graphs import NUM_ARMS, complete, count_pairs, cycle, graphs, properties

K = 4
feasible_sets = jax.jit(pb.random_feasible_sets, static_argnums=2)
repair = jax.jit(pb.repair)
violated_pairs = jax.jit(pb.violated_pairs)


def independence_number(graph: np.ndarray) -> int:
    arms = range(graph.shape[0])
    return max(
        size
        for size in range(graph.shape[0] + 1)
        if any(count_pairs(graph, s) == 0 for s in itertools.combinations(arms, size))
    )


def slow_greedy(
    graph: np.ndarray, priority: np.ndarray, preferred: set[int], k: int
) -> list[int]:
    chosen: list[int] = []
    for _ in range(k):
        rest = [i for i in range(graph.shape[0]) if i not in chosen]

        def merit(i: int) -> tuple[int, bool, float]:
            return -count_pairs(graph, [i, *chosen]), i in preferred, priority[i]

        chosen.append(max(rest, key=merit))
    return chosen


# Feasible sets and repair ---------------------------------------------------


@given(graph=graphs(), seed=st.integers(0, 2**31 - 1))
@properties
def test_random_feasible_sets__are_what_the_slow_greedy_gives(
    graph: np.ndarray, seed: int
) -> None:
    problem = pb.problem_from_conflicts(graph, K)
    sets = np.asarray(feasible_sets(jax.random.key(seed), problem, 3))
    priority = np.asarray(jax.random.uniform(jax.random.key(seed), (3, NUM_ARMS)))
    for got, order in zip(sets, priority, strict=True):
        assert got.tolist() == slow_greedy(graph, order, set(), K)


@given(
    graph=graphs(),
    action=st.permutations(range(NUM_ARMS)),
    order=st.permutations(range(NUM_ARMS)),
)
@properties
def test_repair__keeps_what_it_can(
    graph: np.ndarray, action: list[int], order: list[int]
) -> None:
    problem = pb.problem_from_conflicts(graph, K)
    chosen, priority = action[:K], np.asarray(order, np.float32)
    got = np.asarray(repair(problem, jnp.asarray(chosen), jnp.asarray(priority)))
    assert got.tolist() == slow_greedy(graph, priority, set(chosen), K)
    assert len(set(got.tolist())) == K
    if count_pairs(graph, chosen) == 0:
        assert set(got.tolist()) == set(chosen)
    kept: list[int] = []
    for arm in sorted(chosen, key=lambda i: -priority[i]):
        if not graph[arm, kept].any():
            kept.append(arm)
    assert got[: len(kept)].tolist() == kept


def test_repair__worked_example() -> None:
    # Arms 0-1-2 form a path; 3 conflicts with 0; 4 is free.
    problem = pb.problem_from_conflicts([[0, 1], [1, 2], [0, 3]], 3, num_arms=5)
    priority = jnp.asarray([0.1, 0.9, 0.2, 0.8, 0.0])
    got = repair(problem, jnp.asarray([0, 1, 2]), priority)
    assert got.tolist() == [1, 3, 4]


def test_repair__survives_infinite_and_nan_priorities() -> None:
    problem = pb.problem_from_conflicts(cycle(6), 3)
    action = jnp.asarray([0, 1, 2])
    rows = ([-jnp.inf] * 6, [jnp.nan] * 6, [jnp.inf] * 6, [0.0, -jnp.inf] * 3)
    for row in rows:
        got = np.asarray(repair(problem, action, jnp.asarray(row)))
        assert len(set(got.tolist())) == 3
        assert count_pairs(cycle(6), got) == 0


def test_random_feasible_sets__are_feasible_in_the_paper_setting() -> None:
    x = np.random.default_rng(0).uniform(size=(300, 10))
    problem = pb.make_problem(x, 20, num_conflicts=3962)
    sets = feasible_sets(jax.random.key(0), problem, 16)
    assert sets.dtype == jnp.int32
    assert int(violated_pairs(problem, sets).max()) == 0
    assert all(np.unique(s).size == 20 for s in np.asarray(sets))
    assert len({tuple(sorted(s.tolist())) for s in np.asarray(sets)}) == 16


@pytest.mark.parametrize(
    ("graph", "k", "violated"),
    [
        (np.zeros((2, 2), bool), 2, 0),
        (complete(2), 1, 0),
        (complete(2), 2, 1),
        (complete(5), 3, 3),
        (np.zeros((1, 1), bool), 1, 0),
    ],
)
def test_random_feasible_sets__tiny_and_hopeless_problems(
    graph: np.ndarray, k: int, violated: int
) -> None:
    problem = pb.problem_from_conflicts(graph, k)
    sets = feasible_sets(jax.random.key(0), problem, 4)
    assert all(np.unique(s).size == k for s in np.asarray(sets))
    np.testing.assert_array_equal(violated_pairs(problem, sets), [violated] * 4)


@given(
    graph=graphs(),
    action=st.permutations(range(NUM_ARMS)),
    order=st.permutations(range(NUM_ARMS)),
    names=st.permutations(range(NUM_ARMS)),
)
@properties
def test_repair__relabelling_arms_relabels_the_result(
    graph: np.ndarray, action: list[int], order: list[int], names: list[int]
) -> None:
    new = np.asarray(names)
    chosen, priority = np.asarray(action[:K]), np.asarray(order, np.float32)
    renamed, moved = np.empty_like(graph), np.empty_like(priority)
    renamed[np.ix_(new, new)] = graph
    moved[new] = priority
    plain = repair(
        pb.problem_from_conflicts(graph, K), jnp.asarray(chosen), jnp.asarray(priority)
    )
    other = repair(
        pb.problem_from_conflicts(renamed, K),
        jnp.asarray(new[chosen]),
        jnp.asarray(moved),
    )
    np.testing.assert_array_equal(new[np.asarray(plain)], other)


def test_feasible_sets__lower_for_every_platform() -> None:
    problem = pb.problem_from_conflicts(cycle(6), 3)

    def step(conflicts: jax.Array, seed: jax.Array) -> jax.Array:
        here = pb.Problem(problem.features, conflicts, problem.num_conflicts, 3)
        sets = pb.random_feasible_sets(jax.random.key(seed), here, 2)
        fixed = jax.vmap(pb.repair, (None, 0, None))(here, sets, jnp.arange(6.0))
        return pb.violation_rate(here, fixed)

    platforms = ("cpu", "cuda", "tpu")
    lower = jax.export.export(jax.jit(step), platforms=platforms)
    assert lower(problem.conflicts, jnp.asarray(0)).platforms == platforms


# Whether there are any ------------------------------------------------------


@given(graph=graphs(num_arms=7), k=st.integers(1, 7))
@properties
def test_independence_check__never_contradicts_enumeration(
    graph: np.ndarray, k: int
) -> None:
    problem = pb.problem_from_conflicts(graph, k)
    message, found = pb.independence_check(problem), pb.find_feasible(problem)
    largest = independence_number(graph)
    assert (message is None) == (found is not None)
    if found is not None:
        assert count_pairs(graph, pb.check_action(problem, found)) == 0
    if message is not None and "exists" in message:
        assert largest < k
    # 256 tries cannot miss on seven arms.
    assert (message is None) == (largest >= k)


def test_independence_check__known_graphs() -> None:
    def check(graph: np.ndarray, k: int) -> str | None:
        return pb.independence_check(pb.problem_from_conflicts(graph, k))

    assert check(np.zeros((4, 4), bool), 4) is None
    assert check(complete(4), 1) is None
    for k in (2, 4):
        message = check(complete(4), k)
        assert message is not None
        assert message.startswith(
            f"K={k}: no conflict-free set of {k} arms exists (at most 1 are possible)"
        )
    assert check(cycle(6), 3) is None
    even = check(cycle(6), 4)
    assert even is not None
    assert "exists (at most 3 are possible)" in even
    # Five arms in a ring fall into three cliques, but only two are independent.
    odd = check(cycle(5), 3)
    assert odd is not None
    assert "was found (greedy reaches 2)" in odd
    assert check(cycle(5), 2) is None
