"""Conflict graphs as NumPy arrays on the host: distances, edges, cliques.

A graph is a symmetric bool[L, L] with an empty diagonal. `problem` makes one of
distances or of a list of edges; the programs of the solvers cover it by cliques.

Differs from the paper:
* `ned_abs` normalises by absolute values, so that it also means something on
  signed features, where the printed formula changes sign (ALGORITHMS 11).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

METRICS = ("ned", "ned_abs", "euclidean")

# Entries of one block of the distance matrix: small enough to stay in the cache.
_BLOCK = 1 << 16


def distances(features: ArrayLike, metric: str) -> np.ndarray:
    """Compute all pairwise distances of the rows.

    `ned` is the paper's normalised distance sum|a-b| / (sum a + sum b), `ned_abs`
    the same with sum|a| + sum|b| below the line, `euclidean` the usual one. 0/0,
    which only two zero rows can give, is 0.

    Args:
        features: [L, D].
        metric: one of `METRICS`.

    Returns:
        float64[L, L], symmetric with a zero diagonal.
    """
    x = np.asarray(features, dtype=np.float64)  # [L, D]
    check_features(x, metric)
    num_arms, dim = x.shape
    total = np.zeros((num_arms, num_arms))
    rows = max(1, _BLOCK // num_arms)
    for start in range(0, num_arms, rows):
        block = total[start : start + rows]  # a view
        for d in range(dim):
            gap = x[start : start + rows, d, None] - x[None, :, d]
            block += gap * gap if metric == "euclidean" else np.abs(gap)
    if metric == "euclidean":
        return np.sqrt(total)
    size = np.abs(x).sum(axis=1)  # equals sum a for the non-negative rows of `ned`
    below = size[:, None] + size[None, :]
    ratio = np.divide(total, below, out=np.zeros_like(total), where=below > 0)
    return np.minimum(ratio, 1.0)  # rounding may lead beyond


def check_features(x: np.ndarray, metric: str) -> None:
    """Raise unless the rows of x are features that the metric can be taken of."""
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}.")
    if x.ndim != 2 or x.shape[0] < 1:
        raise ValueError(f"features must have shape [L, D], got {x.shape}.")
    with np.errstate(over="ignore"):
        is_bad = ~np.isfinite(x.astype(np.float32)).all(axis=1)
    if is_bad.any():
        raise ValueError(
            f"Arm {np.flatnonzero(is_bad)[0]} has a feature that is NaN, infinite or "
            "beyond float32; clean the features first."
        )
    if metric == "ned" and (x < 0).any():
        raise ValueError(
            "metric='ned' needs non-negative features; use metric='ned_abs' for "
            "signed ones."
        )


def adjacency(edges: np.ndarray, num_arms: int | None) -> np.ndarray:
    """Turn an edge list int[M, 2] into an adjacency bool[L, L]."""
    if edges.size == 0:
        edges = np.zeros((0, 2), dtype=np.int64)
    if edges.shape[1:] != (2,) or not np.issubdtype(edges.dtype, np.integer):
        raise ValueError(
            "conflicts must be a bool matrix [L, L] or an integer edge list [M, 2], "
            f"got {edges.dtype} of shape {edges.shape}."
        )
    if num_arms is None:
        raise ValueError("An edge list needs num_arms or features to know L.")
    if ((edges < 0) | (edges >= num_arms)).any():
        raise ValueError(f"The edge list names an arm outside 0..{num_arms - 1}.")
    if (edges[:, 0] == edges[:, 1]).any():
        raise ValueError("The edge list has an arm that conflicts with itself.")
    graph = np.zeros((num_arms, num_arms), dtype=bool)
    graph[edges[:, 0], edges[:, 1]] = True
    return graph | graph.T


def clique_cover(conflicts: ArrayLike) -> list[list[int]]:
    """Cover every conflicting pair by a clique, greedily (host).

    A row sum_{i in clique} x_i <= 1 is stronger than the edges it replaces, and a
    few cliques replace many edges. A clique grows by the arm that covers most of
    what is uncovered, until it is maximal.

    bool[L, L] -> sorted lists of at least two arms.
    """
    graph = np.asarray(conflicts, dtype=bool)
    uncovered = graph.copy()
    cliques = []
    for arm in range(graph.shape[0]):
        near = np.flatnonzero(graph[arm])
        among = graph[np.ix_(near, near)]
        fresh = uncovered[np.ix_(near, near)]
        to_arm = uncovered[arm, near]
        while to_arm.any():
            is_open = np.ones(near.size, dtype=bool)
            gain = to_arm.astype(np.int64)
            inside: list[int] = []
            while is_open.any():
                best = int(np.where(is_open, gain, -1).argmax())
                inside.append(best)
                is_open &= among[best]
                gain += fresh[best]
            fresh[np.ix_(inside, inside)] = False
            to_arm[inside] = False
            clique = sorted([arm, *near[inside].tolist()])
            uncovered[np.ix_(clique, clique)] = False
            cliques.append(clique)
    return cliques


def largest_independent(graph: np.ndarray, k: int, tries: int, seed: int) -> np.ndarray:
    """Return the largest of `tries` minimum-degree independent sets, up to K arms."""
    rng = np.random.default_rng(seed)
    best = np.zeros(0, dtype=np.int32)
    for attempt in range(tries):
        # Noise below one breaks ties of the degree; above, it leaves the greedy path.
        noise = rng.uniform(0.0, (0.99, 3.0)[attempt % 2], size=graph.shape[0])
        degree = graph.sum(axis=1, dtype=np.int64)
        is_open = np.ones(graph.shape[0], dtype=bool)
        chosen: list[int] = []
        while is_open.any() and len(chosen) < k:
            arm = int(np.where(is_open, degree + noise, np.inf).argmin())
            chosen.append(arm)
            closed = is_open & graph[arm]
            is_open &= ~closed
            is_open[arm] = False
            degree = degree - graph[closed].sum(axis=0)
        if len(chosen) > best.size:
            best = np.array(chosen, dtype=np.int32)
        if best.size == k:
            break
    return best


def clique_partition_size(graph: np.ndarray) -> int:
    """Split the arms into cliques, first fit by falling degree; return how many."""
    cliques: list[np.ndarray] = []  # arms that fit in every clique, bool[L] each
    for arm in np.argsort(-graph.sum(axis=1), kind="stable"):
        fitting = next((c for c in cliques if c[arm]), None)
        if fitting is None:
            cliques.append(graph[arm].copy())
        else:
            fitting &= graph[arm]
    return len(cliques)
