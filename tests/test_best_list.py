"""The exact search for the best ordered list, against enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from msb_jax.solvers.lists import Worth, best_list

KAPPA = (1.0, 0.7, 0.5, 0.2, 0.1)


def cascade(values: Sequence[float]) -> float:
    total, reached = 0.0, 1.0
    for w in values:
        total += reached * w
        reached *= 0.9 * (1.0 - w)
    return total


def positions(values: Sequence[float]) -> float:
    return sum(k * v for k, v in zip(KAPPA, values, strict=False))


def random_graph(rng: np.random.Generator, size: int, density: float) -> np.ndarray:
    upper = np.triu(rng.uniform(size=(size, size)) < density, 1)
    return upper | upper.T


def enumerate_lists(
    values: np.ndarray, graph: np.ndarray, k: int, worth: Worth
) -> tuple[int, float]:
    """Fewest conflicts, and the best worth of all ordered lists that have so few."""
    lists = list(itertools.permutations(range(values.size), k))
    clashes = [int(graph[np.ix_(s, s)].sum()) // 2 for s in lists]
    least = min(clashes)
    fit = (s for s, n in zip(lists, clashes, strict=True) if n == least)
    return least, max(worth([values[arm] for arm in s]) for s in fit)


@pytest.mark.parametrize("worth", [cascade, positions])
@pytest.mark.parametrize(
    ("size", "k", "density"),
    [
        (7, 4, 0.3),
        (7, 3, 0.7),
        (6, 4, 0.8),  # conflicts cannot be avoided
        (7, 4, 0.0),
        (6, 4, 1.0),
        (5, 5, 0.4),
        (2, 1, 1.0),
        (1, 1, 0.0),
    ],
)
def test_best_list__equals_enumeration(
    size: int, k: int, density: float, worth: Worth
) -> None:
    for seed in range(4):
        rng = np.random.default_rng([seed, size, k])
        values = rng.uniform(size=size)
        graph = random_graph(rng, size, density)
        least, best = enumerate_lists(values, graph, k, worth)
        found = best_list(values, graph, k, worth)
        assert found.violated == least
        assert found.value == pytest.approx(best, abs=1e-12)
        assert found.bound == found.value
        assert found.status == ("least_violation" if least else "optimal")
        shown = values[found.action]
        assert (np.diff(shown) <= 0).all()
        assert worth(shown.tolist()) == pytest.approx(found.value, abs=1e-12)
        assert found.action.dtype == np.int32


def test_best_list__equal_values_still_give_distinct_arms() -> None:
    graph = random_graph(np.random.default_rng(0), 6, 0.3)
    found = best_list(np.full(6, 0.5), graph, 3, cascade)
    assert len(set(found.action.tolist())) == 3
    assert found.violated == 0


def test_best_list__says_when_it_stops_early() -> None:
    rng = np.random.default_rng(3)
    values, graph = rng.uniform(size=30), random_graph(rng, 30, 0.4)
    proven = best_list(values, graph, 5, positions)
    cut = best_list(values, graph, 5, positions, node_limit=0)
    assert proven.status == "optimal"
    assert cut.status == "node_limit"
    assert cut.value <= proven.value <= cut.bound


def test_best_list__proves_the_default_size() -> None:
    rng = np.random.default_rng(4)
    values, graph = rng.uniform(size=100), random_graph(rng, 100, 0.0883)
    found = best_list(values, graph, 10, cascade)
    assert found.status == "optimal"
    assert found.violated == 0
    # The greedy list is no better, and no list is above that without conflicts.
    greedy: list[int] = []
    for arm in np.argsort(-values):
        if len(greedy) < 10 and not graph[arm, greedy].any():
            greedy.append(int(arm))
    top = cascade(np.sort(values)[::-1][:10].tolist())
    assert cascade(values[greedy].tolist()) - 1e-12 <= found.value <= top


def test_best_list__refuses_bad_values() -> None:
    with pytest.raises(ValueError, match="values must have shape"):
        best_list(np.ones(3), np.zeros((4, 4), bool), 2, cascade)
    with pytest.raises(ValueError, match=r"k must be in 1\.\.4"):
        best_list(np.ones(4), np.zeros((4, 4), bool), 5, cascade)
