"""Problems: construction, violations, random sets, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax import problem as pb
from msb_jax.conflicts import distances
from tests.graphs import complete, count_pairs

violated_pairs = jax.jit(pb.violated_pairs)
violation_rate = jax.jit(pb.violation_rate)
random_sets = jax.jit(pb.random_sets, static_argnums=2)


# Construction ---------------------------------------------------------------


@pytest.mark.parametrize("num_conflicts", [0, 1, 17, 189, 190])
def test_make_problem__has_exactly_the_nearest_pairs(num_conflicts: int) -> None:
    x = np.random.default_rng(2).uniform(size=(20, 3))
    problem = pb.make_problem(x, 5, num_conflicts=num_conflicts)
    graph = np.asarray(problem.conflicts)
    assert int(problem.num_conflicts) == num_conflicts == graph.sum() // 2
    np.testing.assert_array_equal(graph, graph.T)
    assert not graph.diagonal().any()
    upper = np.triu_indices(20, 1)
    near, far = graph[upper], ~graph[upper]
    gaps = distances(x, "ned_abs")[upper]
    assert gaps[near].max(initial=0.0) <= gaps[far].min(initial=1.0)


def test_make_problem__breaks_ties_by_pair_index() -> None:
    problem = pb.make_problem(np.ones((4, 2)), 2, num_conflicts=4)
    edges = np.argwhere(np.triu(np.asarray(problem.conflicts))).tolist()
    assert edges == [[0, 1], [0, 2], [0, 3], [1, 2]]


def test_make_problem__threshold_is_strict() -> None:
    x = np.asarray([[0.0], [1.0], [3.0]])
    problem = pb.make_problem(x, 1, metric="euclidean", threshold=2.0)
    assert np.argwhere(np.triu(np.asarray(problem.conflicts))).tolist() == [[0, 1]]
    at_one = pb.make_problem(x, 1, metric="euclidean", threshold=1.0)
    assert int(at_one.num_conflicts) == 0


def test_make_problem__paper_setting() -> None:
    x = np.random.default_rng(0).uniform(size=(300, 10))
    problem = pb.make_problem(x, 20, num_conflicts=3962)
    gaps = distances(x, "ned_abs")[np.asarray(problem.conflicts)]
    assert int(problem.num_conflicts) == 3962
    assert gaps.max() == pytest.approx(0.2286, abs=0.01)
    assert pb.independence_check(problem) is None
    printed = pb.make_problem(x, 20, metric="ned", threshold=0.5)
    message = pb.independence_check(printed)
    assert message is not None
    assert "no conflict-free set of 20 arms exists" in message


def test_make_problem__relabelling_arms_relabels_conflicts() -> None:
    rng = np.random.default_rng(3)
    x, names = rng.uniform(size=(12, 4)), rng.permutation(12)
    plain = np.asarray(pb.make_problem(x, 3, num_conflicts=20).conflicts)
    renamed = np.asarray(pb.make_problem(x[names], 3, num_conflicts=20).conflicts)
    np.testing.assert_array_equal(renamed, plain[np.ix_(names, names)])


def test_problem__is_a_pytree_with_static_k() -> None:
    problem = pb.make_problem(np.ones((4, 2)), 2)
    leaves, treedef = jax.tree.flatten(problem)
    assert [leaf.dtype for leaf in leaves] == [jnp.float32, jnp.bool_, jnp.int32]
    assert [leaf.shape for leaf in leaves] == [(4, 2), (4, 4), ()]
    back = jax.tree.unflatten(treedef, leaves)
    assert (back.k, back.num_arms) == (2, 4)
    assert jax.jit(lambda p: jnp.zeros(p.k))(problem).shape == (2,)


def test_problem_from_conflicts__edge_list_equals_matrix() -> None:
    edges = [[0, 1], [1, 2], [2, 1], [1, 0], [3, 0]]
    graph = np.zeros((5, 5), bool)
    for i, j in edges:
        graph[i, j] = graph[j, i] = True
    by_matrix = pb.problem_from_conflicts(graph, 2)
    by_list = pb.problem_from_conflicts(edges, 2, num_arms=5)
    with_features = pb.problem_from_conflicts(edges, 2, np.ones((5, 3)))
    for problem in (by_matrix, by_list, with_features):
        np.testing.assert_array_equal(problem.conflicts, graph)
        assert int(problem.num_conflicts) == 3
    assert by_list.features.shape == (5, 0)
    assert with_features.features.shape == (5, 3)
    empty = pb.problem_from_conflicts([], 5, num_arms=5)
    assert int(empty.num_conflicts) == 0


def test_stack_problems__vmaps_like_one_by_one() -> None:
    rng = np.random.default_rng(4)
    several = [
        pb.make_problem(rng.uniform(size=(8, 2)), 3, num_conflicts=m)
        for m in (0, 5, 28)
    ]
    stacked = pb.stack_problems(several)
    assert (stacked.num_arms, stacked.k, stacked.features.shape) == (8, 3, (3, 8, 2))

    def play(problem: pb.Problem) -> tuple[jax.Array, jax.Array]:
        actions = pb.random_feasible_sets(jax.random.key(0), problem, 4)
        return actions, pb.violation_rate(problem, actions)

    actions, rates = jax.jit(jax.vmap(play))(stacked)
    for i, problem in enumerate(several):
        one, rate = jax.jit(play)(problem)
        np.testing.assert_array_equal(actions[i], one)
        np.testing.assert_allclose(rates[i], rate)


# Violations -----------------------------------------------------------------


def test_violated_pairs__equals_brute_force_at_any_batch_shape() -> None:
    rng = np.random.default_rng(5)
    problem = pb.make_problem(rng.uniform(size=(15, 3)), 6, num_conflicts=40)
    graph = np.asarray(problem.conflicts)
    sets = np.stack([rng.permutation(15)[:6] for _ in range(12)]).astype(np.int32)
    want = np.asarray([count_pairs(graph, s) for s in sets], np.int32)
    assert want.max() > 0
    got = violated_pairs(problem, jnp.asarray(sets))
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, want)
    batch = violated_pairs(problem, jnp.asarray(sets.reshape(3, 4, 6)))
    np.testing.assert_array_equal(batch, want.reshape(3, 4))
    assert int(violated_pairs(problem, jnp.asarray(sets[0]))) == want[0]
    rate = violation_rate(problem, jnp.asarray(sets))
    assert rate.dtype == jnp.float32
    np.testing.assert_allclose(rate, want / 40, rtol=1e-6)


def test_violation_rate__is_zero_without_conflicts_and_one_when_all_conflict() -> None:
    free = pb.make_problem(np.ones((4, 2)), 4)
    full = pb.problem_from_conflicts(complete(4), 4)
    action = jnp.arange(4)
    assert float(violation_rate(free, action)) == 0.0
    assert float(violation_rate(full, action)) == 1.0


@pytest.mark.parametrize(("num_arms", "k", "edges"), [(40, 10, 97), (20, 10, 169)])
def test_random_sets__mean_violation_does_not_depend_on_the_graph(
    num_arms: int, k: int, edges: int
) -> None:
    n = 4000
    x = np.random.default_rng(6).uniform(size=(num_arms, 4))
    problem = pb.make_problem(x, k, num_conflicts=edges)
    sets = random_sets(jax.random.key(0), problem, n)
    rate = np.asarray(violation_rate(problem, sets), np.float64)
    want = k * (k - 1) / (num_arms * (num_arms - 1))
    assert rate.std() > 0
    assert abs(rate.mean() - want) < 5 * rate.std() / math.sqrt(n)


def test_random_sets__every_set_is_equally_likely() -> None:
    n = 10_000
    problem = pb.make_problem(np.ones((5, 1)), 2)
    sets = np.sort(np.asarray(random_sets(jax.random.key(1), problem, n)), axis=1)
    counts = np.unique(sets, axis=0, return_counts=True)[1]
    assert counts.size == 10
    assert np.all(np.abs(counts / n - 0.1) < 5 * math.sqrt(0.09 / n))


def test_to_multi_hot__marks_the_arms() -> None:
    hot = pb.to_multi_hot(jnp.asarray([[[2, 0]], [[1, 3]]]), 4)
    assert hot.dtype == jnp.float32
    np.testing.assert_array_equal(hot, [[[1, 0, 1, 0]], [[0, 1, 0, 1]]])
    np.testing.assert_array_equal(pb.to_multi_hot(jnp.asarray([1]), 2), [0, 1])


# Validation -----------------------------------------------------------------

GOOD = np.arange(1.0, 9.0).reshape(4, 2)
WITH_NAN = np.where(GOOD == 4.0, np.nan, GOOD)
WITH_ZERO = np.where(np.arange(4)[:, None] == 2, 0.0, GOOD)


@pytest.mark.parametrize(
    ("features", "k", "options", "sentence"),
    [
        (WITH_NAN, 2, {}, "Arm 1 has a feature that is NaN"),
        (np.where(GOOD == 4.0, np.inf, GOOD), 2, {}, "Arm 1 .* infinite"),
        (GOOD * 1e300, 2, {}, "beyond float32"),
        (GOOD[0], 1, {}, r"shape \[L, D\]"),
        (np.zeros((0, 2)), 1, {}, r"shape \[L, D\]"),
        (GOOD, 0, {}, r"K must be an integer in 1\.\.4"),
        (GOOD, 5, {}, r"K must be an integer in 1\.\.4"),
        (GOOD, 1.5, {}, r"K must be an integer in 1\.\.4"),
        (GOOD, 2, {"num_conflicts": 7}, r"in 0\.\.6 for 4 arms, got 7"),
        (GOOD, 2, {"num_conflicts": -1}, r"in 0\.\.6 for 4 arms, got -1"),
        (GOOD, 2, {"num_conflicts": 2.5}, r"must be an integer in 0\.\.6"),
        (GOOD, 2, {"threshold": -0.1}, "threshold must be finite and >= 0"),
        (GOOD, 2, {"threshold": math.nan}, "threshold must be finite and >= 0"),
        (GOOD, 2, {"threshold": 0.1, "num_conflicts": 1}, "not both"),
        (GOOD, 2, {"metric": "cosine"}, "one of ned, ned_abs, euclidean"),
        (-GOOD, 2, {"metric": "ned"}, "use metric='ned_abs'"),
        (WITH_ZERO, 2, {"metric": "ned"}, "Arm 2 has an all-zero feature vector"),
        (WITH_ZERO, 2, {"metric": "ned_abs"}, "use metric='euclidean'"),
    ],
)
def test_make_problem__bad_input_gets_a_sentence(
    features: np.ndarray, k: Any, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        pb.make_problem(features, k, **options)


def test_make_problem__zero_vectors_are_fine_under_euclidean() -> None:
    problem = pb.make_problem(WITH_ZERO, 2, metric="euclidean", num_conflicts=3)
    assert int(problem.num_conflicts) == 3


@pytest.mark.parametrize(
    ("conflicts", "options", "sentence"),
    [
        (np.zeros((2, 3), bool), {}, r"a square \[L, L\]"),
        (np.ones((3, 3), bool), {}, "symmetric with an empty diagonal"),
        (np.triu(complete(3)), {}, "symmetric with an empty diagonal"),
        (complete(3), {"num_arms": 4}, "disagree about L"),
        (complete(3), {"features": GOOD}, "disagree about L"),
        (complete(3), {"features": WITH_NAN}, "Arm 1 has a feature that is NaN"),
        (complete(3), {"k": 4}, r"K must be an integer in 1\.\.3"),
        (complete(3).astype(int), {}, "a bool matrix"),
        ([[0.0, 1.0]], {"num_arms": 3}, "an integer edge list"),
        ([[0, 1]], {}, "needs num_arms or features"),
        ([[0, 3]], {"num_arms": 3}, r"an arm outside 0\.\.2"),
        ([[-1, 0]], {"num_arms": 3}, r"an arm outside 0\.\.2"),
        ([[1, 1]], {"num_arms": 3}, "conflicts with itself"),
    ],
)
def test_problem_from_conflicts__bad_input_gets_a_sentence(
    conflicts: Any, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        pb.problem_from_conflicts(conflicts, **{"k": 2, **options})


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        ([0, 1, 2], r"An action is 2 arm indices, got an array of shape \(3,\)"),
        ([[0, 1]], "An action is 2 arm indices"),
        ([1, 1], "must not name an arm twice"),
        ([0, 4], r"Arms are 0\.\.3"),
        ([-1, 0], r"Arms are 0\.\.3"),
        ([0.0, 1.0], "integer arm indices"),
    ],
)
def test_check_action__bad_input_gets_a_sentence(action: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        pb.check_action(pb.make_problem(GOOD, 2), action)


def test_check_action__returns_the_indices() -> None:
    got = pb.check_action(pb.make_problem(GOOD, 2), jnp.asarray([3, 0]))
    assert got.dtype == np.int32
    assert got.tolist() == [3, 0]


def test_stack_problems__bad_input_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match="at least one problem"):
        pb.stack_problems([])
    with pytest.raises(ValueError, match="equal L, D and K"):
        pb.stack_problems([pb.make_problem(GOOD, k) for k in (1, 2)])
