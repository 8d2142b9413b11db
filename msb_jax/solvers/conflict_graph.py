"""The conflict graph as the solvers see it: cliques, simple search, row bounds.

NumPy only. Shared by the integer programs and the bounds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from msb_jax.conflicts import clique_cover

# Gains below this are rounding.
_TOLERANCE = 1e-9
# Up to here cliques are found once for the whole graph, above for each part.
_WHOLE_GRAPH = 1000


class ConflictGraph:
    """A conflict graph with its cliques, which are found once."""

    def __init__(self, conflicts: ArrayLike, k: int) -> None:
        graph = np.array(conflicts, dtype=bool)
        if graph.ndim != 2 or graph.shape[0] != graph.shape[1] or not graph.size:
            raise ValueError(f"conflicts must have shape [L, L], got {graph.shape}.")
        if graph.diagonal().any() or (graph != graph.T).any():
            raise ValueError(
                "conflicts must be symmetric with an empty diagonal; make it so first."
            )
        if not 1 <= k <= graph.shape[0]:
            raise ValueError(f"k must be in 1..{graph.shape[0]}, got {k}.")
        self.conflicts = graph
        self.k = int(k)
        self.num_arms = graph.shape[0]
        self._cliques: dict[bool, list[list[int]]] = {}

    def violated(self, chosen: np.ndarray) -> int:
        """Count the conflicting pairs of a set."""
        return int(self.conflicts[np.ix_(chosen, chosen)].sum()) // 2

    def rows(self, arms: np.ndarray, is_hard: bool) -> list[list[int]]:
        """Return the cliques among `arms`, as positions in `arms`.

        Forbidden conflicts are covered by large cliques; conflicts with a price
        are split into cliques that share no edge, so that each counts once.
        """
        find = clique_cover if is_hard else split_edges
        if self.num_arms > _WHOLE_GRAPH:
            return find(self.conflicts[np.ix_(arms, arms)])
        if is_hard not in self._cliques:
            self._cliques[is_hard] = find(self.conflicts)
        place = {int(arm): i for i, arm in enumerate(arms)}
        local = ([place[i] for i in c if i in place] for c in self._cliques[is_hard])
        unique = {tuple(c) for c in local if len(c) > 1}
        return [list(c) for c in sorted(unique)]


def insert(
    conflicts: np.ndarray, priority: np.ndarray, cost: float, k: int
) -> np.ndarray:
    """Take K arms one by one, each the best after the conflicts it adds."""
    left = priority.astype(np.float64)
    chosen = []
    for _ in range(k):
        arm = int(left.argmax())
        chosen.append(arm)
        left = left - cost * conflicts[arm]
        left[arm] = -np.inf
    return np.array(chosen)


def climb(
    q: np.ndarray, factor: float, d: np.ndarray, chosen: np.ndarray
) -> np.ndarray:
    """Swap one arm at a time, the best swap first, while factor*x'Qx + d'x grows.

    Args:
        q: [L, L], symmetric with an empty diagonal.
    """
    chosen = chosen.copy()
    while True:
        slope = 2.0 * factor * q[chosen].sum(axis=0) + d  # [L]
        change = slope[None, :] - slope[chosen][:, None] - 2.0 * factor * q[chosen]
        change[:, chosen] = -np.inf
        place, arm = np.unravel_index(change.argmax(), change.shape)
        if not change[place, arm] > _TOLERANCE:
            return chosen
        chosen[place] = arm


def roam(
    q: np.ndarray,
    factor: float,
    d: np.ndarray,
    chosen: np.ndarray,
    num_steps: int,
    tenure: int = 8,
) -> np.ndarray:
    """Go on swapping beyond the local optimum; return the best set on the way.

    As `climb`, but the best swap is made even if it loses, and the two arms of a
    swap stay where they are for a while.
    """
    best = chosen = chosen.copy()
    gain = most = 0.0
    free_at = np.zeros(d.size, dtype=int)
    for step in range(num_steps):
        slope = 2.0 * factor * q[chosen].sum(axis=0) + d  # [L]
        change = slope[None, :] - slope[chosen][:, None] - 2.0 * factor * q[chosen]
        change[:, chosen] = -np.inf
        is_tabu = (free_at > step)[None, :] | (free_at[chosen] > step)[:, None]
        change[is_tabu & (gain + change <= most + _TOLERANCE)] = -np.inf
        place, arm = np.unravel_index(change.argmax(), change.shape)
        if change[place, arm] == -np.inf:
            continue
        gain += float(change[place, arm])
        free_at[chosen[place]] = step + 1 + tenure
        free_at[arm] = step + 1 + tenure // 2
        chosen = chosen.copy()
        chosen[place] = arm
        if gain > most + _TOLERANCE:
            best, most = chosen, gain
    return best


def split_edges(conflicts: np.ndarray) -> list[list[int]]:
    """Split the edges into cliques without a common edge, greedily."""
    left = conflicts.copy()
    cliques = []
    for arm in range(left.shape[0]):
        while left[arm].any():
            clique, fitting = [arm], left[arm].copy()
            while fitting.any():
                options = np.flatnonzero(fitting)
                inside = left[np.ix_(options, options)].sum(axis=1)
                best = int(options[inside.argmax()])
                clique.append(best)
                fitting &= left[best]
            left[np.ix_(clique, clique)] = False
            cliques.append(sorted(clique))
    return cliques


def companions(
    graph: ConflictGraph, q: np.ndarray, is_hard: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bound (Qx)_i over the K-sets that contain i, by i's K-1 companions.

    Args:
        q: [L, L], symmetric with an empty diagonal.
        is_hard: conflicting arms cannot be companions.

    Returns:
        Lower and upper bounds [L], and bool[L] for the arms without K-1 companions,
        which are in no feasible set (their bounds are 0).
    """
    is_allowed = ~np.eye(graph.num_arms, dtype=bool)
    if is_hard:
        is_allowed &= ~graph.conflicts
    count = graph.k - 1
    is_out = is_allowed.sum(axis=1) < count
    low = np.sort(np.where(is_allowed, q, np.inf), axis=1)[:, :count].sum(axis=1)
    high = -np.sort(np.where(is_allowed, -q, np.inf), axis=1)[:, :count].sum(axis=1)
    return np.where(is_out, 0.0, low), np.where(is_out, 0.0, high), is_out


def check_numbers(values: ArrayLike, shape: tuple[int, ...], name: str) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}.")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has an entry that is NaN or infinite; clean it.")
    return array
