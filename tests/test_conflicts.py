"""Conflict graphs on the host: distances and clique covers, against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given

from msb_jax import conflicts
from msb_jax import problem as pb
from tests.graphs import complete, cycle, graphs, properties

# Distances ------------------------------------------------------------------


def test_distances__worked_values() -> None:
    x = np.asarray([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    third = 1 / 3
    want = [[0, 1, third, 1], [1, 0, third, 1], [third, third, 0, 1], [1, 1, 1, 0]]
    np.testing.assert_allclose(conflicts.distances(x, "ned"), np.asarray(want))
    root = math.sqrt(2.0)
    want = [[0, root, 1, 1], [root, 0, 1, 1], [1, 1, 0, root], [1, 1, root, 0]]
    np.testing.assert_allclose(conflicts.distances(x, "euclidean"), np.asarray(want))
    # The triangle inequality fails: 1 > 1/3 + 1/3.
    ned = conflicts.distances(x, "ned_abs")
    assert ned[0, 1] > ned[0, 2] + ned[2, 1]


def test_distances__ned_is_scale_invariant_bounded_and_symmetric() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(40, 5))
    signed = rng.normal(size=(40, 5))
    np.testing.assert_allclose(
        conflicts.distances(x, "ned"), conflicts.distances(x, "ned_abs")
    )
    np.testing.assert_allclose(
        conflicts.distances(x, "ned"), conflicts.distances(7.0 * x, "ned")
    )
    for ned in (conflicts.distances(x, "ned"), conflicts.distances(signed, "ned_abs")):
        np.testing.assert_array_equal(ned, ned.T)
        np.testing.assert_array_equal(ned.diagonal(), np.zeros(40))
        assert ned.min() >= 0
        assert ned.max() <= 1


@pytest.mark.parametrize("metric", conflicts.METRICS)
def test_distances__blocks_equal_the_direct_formula(
    metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(1).uniform(0.1, 1.0, size=(11, 3))
    gap = x[:, None, :] - x[None, :, :]
    total = x.sum(axis=1)
    want = {
        "ned": np.abs(gap).sum(2) / (total[:, None] + total[None, :]),
        "ned_abs": np.abs(gap).sum(2) / (total[:, None] + total[None, :]),
        "euclidean": np.linalg.norm(gap, axis=2),
    }[metric]
    monkeypatch.setattr(
        conflicts, "_BLOCK", 33
    )  # three rows at a time, the last two alone
    np.testing.assert_allclose(conflicts.distances(x, metric), want)


# Clique covers --------------------------------------------------------------


def check_cover(graph: np.ndarray) -> list[list[int]]:
    cliques = conflicts.clique_cover(graph)
    covered = np.zeros_like(graph)
    for clique in cliques:
        assert len(set(clique)) == len(clique) >= 2
        inside = graph[np.ix_(clique, clique)]
        assert inside.sum() == len(clique) * (len(clique) - 1)
        covered[np.ix_(clique, clique)] = True
    np.fill_diagonal(covered, False)
    np.testing.assert_array_equal(covered, graph)
    return cliques


@given(graph=graphs())
@properties
def test_clique_cover__covers_every_edge_by_cliques(graph: np.ndarray) -> None:
    assert len(check_cover(graph)) <= graph.sum() // 2


def test_clique_cover__known_graphs() -> None:
    assert check_cover(np.zeros((3, 3), bool)) == []
    assert check_cover(complete(6)) == [list(range(6))]
    assert len(check_cover(cycle(7))) == 7


def test_clique_cover__replaces_most_edges_of_the_paper_setting() -> None:
    x = np.random.default_rng(0).uniform(size=(300, 10))
    problem = pb.make_problem(x, 20, num_conflicts=3962)
    assert len(check_cover(np.asarray(problem.conflicts))) < 1000
