"""Integer programs for the best K of L arms under a conflict graph (PySCIPOpt).

The paper's solver sampler asks for the best set under the first-order model
(Subproblem 1: maximise w'x) and under the second-order model (problem (5):
maximise x'Qx), x binary with sum K and x_i + x_j <= 1 on every conflict. NumPy in,
NumPy out; every model is built afresh with fixed seeds and limited by nodes, so
that the same input gives the same output whatever was solved before.

The linear program is solved on few arms, and the others are ruled out by proof.
With multipliers y_c >= 0 on the cliques, every set is worth at most

    sum_c y_c + (sum of the K largest r_i),   r_i = w_i - sum of y_c over c with i,

and at least r_(K) - r_j less than that if it contains j (r_(K) the K-th largest).
Multipliers come from the LP relaxation over the heaviest arms; arms that cannot be
in a set better than the incumbent are dropped; what is left open goes to branch and
bound. A price p on a conflicting pair fits in: then y_c <= p and cliques share no
edge, because a clique with s chosen arms has s(s-1)/2 >= s-1 conflicts. At L=300
with 3,962 conflicts and K=20 a solve takes 5 to 15 ms, and half of them end at the
relaxation; one model for all arms takes 20 to 50 ms.

The quadratic program is linearised row by row: y_i = x_i (Qx)_i with bounds that
know the cardinality and the conflicts.

Differs from the paper:
* SCIP takes the place of Gurobi (I-34);
* problem (5) keeps the linear term d'x, which the paper drops (I-1);
* where no K arms are free of conflicts (I-2, I-6) the set of least violation is
  returned, and among those the best one;
* conflicts may cost a penalty instead of being forbidden.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from msb_jax.solvers.conflict_graph import (
    ConflictGraph,
    check_numbers,
    climb,
    companions,
    insert,
    roam,
)
from msb_jax.solvers.scip_models import Found, branch, branch_quadratic, relax

T = TypeVar("T")

# Weights are mapped to [0, 1]; values closer than this are taken for equal.
_TOLERANCE = 1e-9
# Arms of the first relaxation, as a multiple of K.
_HEAVIEST = 5
# With more priced cliques than this the relaxation says nothing and a node takes
# seconds: then a walk of so many swaps takes the place of branch and bound.
_MOST_PRICED = 400
_NUM_STEPS = 500
# Nodes and seconds, once for each graph, for finding K arms without a conflict.
_FEASIBILITY_LIMITS = (1000, 60.0)


class Solution(NamedTuple):
    """The best set found and how sure that is."""

    action: np.ndarray  # [K] int32, sorted
    value: float  # the objective, penalty included where one was given
    bound: float  # no set is worth more; inf if unknown
    status: str  # optimal, node_limit, time_limit, arm_limit, least_violation
    violated: int  # conflicting pairs in the action


class LinearProgram:
    """Maximise w'x over the K-sets of one conflict graph, for many w."""

    def __init__(self, conflicts: ArrayLike, k: int) -> None:
        """Prepare the graph.

        Args:
            conflicts: bool[L, L], symmetric with an empty diagonal.
            k: arms in a set, 1..L.
        """
        self._graph = ConflictGraph(conflicts, k)

    @cached_property
    def _feasible(self) -> np.ndarray | None:
        return _find_feasible(self._graph)

    def solve(
        self,
        weights: ArrayLike,
        *,
        start: ArrayLike | None = None,
        penalty: float | None = None,
        node_limit: int = 2000,
        time_limit: float = 60.0,
        arm_limit: int = 600,
    ) -> Solution:
        """Find the best set (paper, Subproblem 1).

        Args:
            weights: [L].
            start: int[K], a set to improve upon.
            penalty: cost of one conflicting pair, instead of forbidding it.
            node_limit: of branch and bound.
            time_limit: seconds; a safety net that makes the result depend on the
                machine, and is reported in `status` when it binds.
            arm_limit: arms that may enter the search. Weights that follow the
                features of a large dense graph leave thousands open; then the
                best set on these arms is returned, and `status` says so.
        """
        graph, k = self._graph, self._graph.k
        w = check_numbers(weights, (graph.num_arms,), "weights")
        _check_penalty(penalty)
        warm = _check_start(start, graph.num_arms, k)
        span = float(np.ptp(w)) or 1.0
        unit = (w - w.min()) / span
        if penalty == 0.0 or not graph.conflicts.any():
            top = np.argsort(-unit, kind="stable")[:k]
            found = Found(top, float(unit[top].sum()), "optimal")
        else:
            # Weights in [0, 1]: no gain makes up for a pair that costs K + 1.
            price = None if penalty is None else min(penalty / span, k + 1.0)
            if penalty is None and self._feasible is None:
                price = k + 1.0
            limits = (node_limit, time_limit)
            found = self._search(unit, price, warm, limits, arm_limit)
        action = np.sort(found.chosen).astype(np.int32)
        violated = graph.violated(action)
        value = float(w[action].sum()) - (penalty or 0.0) * violated
        bound = found.bound * span + k * float(w.min())
        return _report(action, value, bound, found.status, violated, penalty)

    def _search(
        self,
        unit: np.ndarray,
        price: float | None,
        warm: np.ndarray | None,
        limits: tuple[int, float],
        arm_limit: int,
    ) -> Found:
        """Solve on the heaviest arms; add arms until the others are ruled out.

        Args:
            unit: [L] weights in [0, 1].
            price: of a conflicting pair; None forbids it.
        """
        graph, k = self._graph, self._graph.k
        is_hard = price is None
        cost = k + 1.0 if price is None else price

        def worth(chosen: np.ndarray) -> float:
            return float(unit[chosen].sum()) - cost * graph.violated(chosen)

        def ascend(chosen: np.ndarray) -> np.ndarray:
            return climb(graph.conflicts, -cost / 2.0, unit, chosen)

        first = insert(graph.conflicts, unit, cost, k)
        others = (warm, self._feasible if is_hard else None)
        starts = [first, *(s for s in others if s is not None)]
        best = max(map(ascend, starts), key=worth)
        is_in = np.zeros(graph.num_arms, dtype=bool)
        is_in[np.argsort(-unit, kind="stable")[: _HEAVIEST * k]] = True
        is_in[best] = True
        found: Found | None = None
        while True:
            arms = np.flatnonzero(is_in)
            rows = graph.rows(arms, is_hard)
            x, y = relax(unit[arms], rows, k, price)
            reduced = unit.copy()  # [L]
            for row, multiplier in zip(rows, y, strict=True):
                reduced[arms[row]] -= multiplier
            priority = 1e-3 * unit
            priority[arms] += x
            rounded = ascend(insert(graph.conflicts, priority, cost, k))
            best = max(best, rounded, key=worth)
            order = np.sort(reduced)[::-1]
            bound = float(y.sum() + order[:k].sum())
            if bound - worth(best) <= _TOLERANCE:
                return Found(best, bound, "optimal")
            is_open = reduced >= order[k - 1] + worth(best) - bound - _TOLERANCE
            is_last = arms.size >= arm_limit
            if found is None or is_last or not (is_open & ~is_in).any():
                inside = np.flatnonzero(is_open & is_in)
                rows = graph.rows(inside, is_hard)
                if not is_hard and len(rows) > _MOST_PRICED:
                    starts = [best]
                    if self._feasible is not None:
                        hard = self._search(unit, None, best, limits, arm_limit)
                        starts.append(hard.chosen)
                    slope = -cost / 2.0
                    ends = [
                        roam(graph.conflicts, slope, unit, s, _NUM_STEPS)
                        for s in starts
                    ]
                    return Found(max(ends, key=worth), bound, "node_limit")
                found = branch(unit[inside], rows, k, price, worth(best), limits)
                if found.chosen.size:
                    best = max(best, inside[found.chosen], key=worth)
                if found.status != "optimal":
                    return Found(best, bound, found.status)
                is_open = reduced >= order[k - 1] + worth(best) - bound - _TOLERANCE
            outside = np.flatnonzero(is_open & ~is_in)
            if not outside.size:
                return Found(best, worth(best), "optimal")
            if is_last:
                return Found(best, bound, "arm_limit")
            room = min(arms.size, arm_limit - arms.size)
            is_in[outside[np.argsort(-unit[outside], kind="stable")[:room]]] = True


class QuadraticProgram:
    """Maximise x'Qx + d'x over the K-sets of one conflict graph."""

    def __init__(self, conflicts: ArrayLike, k: int) -> None:
        """Prepare the graph.

        Args:
            conflicts: bool[L, L], symmetric with an empty diagonal.
            k: arms in a set, 1..L.
        """
        self._graph = ConflictGraph(conflicts, k)

    @cached_property
    def _feasible(self) -> np.ndarray | None:
        return _find_feasible(self._graph)

    def solve(
        self,
        pair: ArrayLike,
        linear: ArrayLike,
        *,
        start: ArrayLike | None = None,
        penalty: float | None = None,
        node_limit: int = 100,
        time_limit: float = 30.0,
    ) -> Solution:
        """Find a good set and a bound on the best one (paper, problem (5)).

        Args:
            pair: [L, L], need not be symmetric; its diagonal counts for x_i alone.
            linear: [L].
            start: int[K], a set to improve upon.
            penalty: cost of one conflicting pair, instead of forbidding it.
            node_limit: of branch and bound.
            time_limit: seconds; a safety net, reported in `status` when it binds.
        """
        graph, k, size = self._graph, self._graph.k, self._graph.num_arms
        q = check_numbers(pair, (size, size), "pair")
        d = check_numbers(linear, (size,), "linear")
        _check_penalty(penalty)
        warm = _check_start(start, size, k)
        q = (q + q.T) / 2.0
        d = d + np.diag(q)
        np.fill_diagonal(q, 0.0)
        scale = max(float(np.abs(q).max()), float(np.abs(d).max())) or 1.0
        q, d = q / scale, d / scale
        is_hard = penalty is None and self._feasible is not None
        # Entries in [-1, 1]: two sets differ by less than that.
        most = 2.0 * k * (k + 1)
        price = most if penalty is None else min(penalty / scale, most)
        priced = q - price / 2.0 * graph.conflicts
        found = self._search(q, d, priced, is_hard, warm, (node_limit, time_limit))
        action = np.sort(found.chosen).astype(np.int32)
        violated = graph.violated(action)
        value = scale * _quadratic_value(q, d, action) - (penalty or 0.0) * violated
        bound = scale * found.bound
        return _report(action, value, bound, found.status, violated, penalty)

    def _search(
        self,
        q: np.ndarray,
        d: np.ndarray,
        priced: np.ndarray,
        is_hard: bool,
        warm: np.ndarray | None,
        limits: tuple[int, float],
    ) -> Found:
        """Climb from the starts, then let SCIP improve or bound the best.

        Args:
            q, d: [L, L] with an empty diagonal, and [L].
            priced: [L, L], q less what conflicts cost; what is maximised unless
                conflicts are forbidden.
        """
        graph, k, size = self._graph, self._graph.k, self._graph.num_arms

        def worth(chosen: np.ndarray) -> float:
            return _quadratic_value(priced, d, chosen)

        rows = np.sort(priced, axis=1)[:, ::-1][:, : k - 1].sum(axis=1)
        first = np.argsort(-(rows + d), kind="stable")[:k]
        others = (warm, self._feasible if is_hard else None)
        starts = [first, *(s for s in others if s is not None)]
        best = max((climb(priced, 1.0, d, s) for s in starts), key=worth)
        q = q if is_hard else priced
        _, high, is_out = companions(graph, q, is_hard)
        crude = float(np.sort(np.where(is_out, -np.inf, high + d))[-k:].sum())
        if k == size or crude - worth(best) <= _TOLERANCE:
            return Found(best, worth(best), "optimal")
        found = branch_quadratic(graph, q, d, is_hard, best, limits)
        if found.chosen.size:
            best = max(best, found.chosen, key=worth)
        bound = max(min(crude, found.bound), worth(best))
        return Found(best, bound, found.status)


def solve_many(jobs: Sequence[Callable[[], T]], workers: int | None = None) -> list[T]:
    """Run jobs in threads and return their results in the order of the jobs.

    SCIP releases the interpreter lock while it solves. A job owns its programs:
    two jobs must not share one.

    Args:
        jobs: functions without arguments.
        workers: threads; as many as the machine has processors by default.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}.")
    count = min(len(jobs), workers or os.cpu_count() or 1)
    if count <= 1:
        return [_attempt(job, i, len(jobs)) for i, job in enumerate(jobs)]
    with ThreadPoolExecutor(count) as pool:
        futures = [
            pool.submit(_attempt, job, i, len(jobs)) for i, job in enumerate(jobs)
        ]
        return [future.result() for future in futures]


def _find_feasible(graph: ConflictGraph) -> np.ndarray | None:
    """Return K arms without a conflict; None if none exists or was found."""
    zeros = np.zeros(graph.num_arms)
    sparse = 1.0 - graph.conflicts.mean(axis=1)
    start = insert(graph.conflicts, sparse, 1.0, graph.k)
    chosen = climb(graph.conflicts, -0.5, zeros, start)
    if graph.violated(chosen):
        chosen = roam(graph.conflicts, -0.5, zeros, chosen, _NUM_STEPS)
    if graph.violated(chosen):
        rows = graph.rows(np.arange(graph.num_arms), True)
        chosen = branch(zeros, rows, graph.k, None, -1.0, _FEASIBILITY_LIMITS).chosen
    return chosen if chosen.size else None


def _quadratic_value(q: np.ndarray, d: np.ndarray, chosen: np.ndarray) -> float:
    return float(q[np.ix_(chosen, chosen)].sum() + d[chosen].sum())


def _report(
    action: np.ndarray,
    value: float,
    bound: float,
    status: str,
    violated: int,
    penalty: float | None,
) -> Solution:
    """Say what the search has shown: a proof makes the value its own bound."""
    is_proven = status == "optimal"
    if penalty is None and violated:
        bound = value if is_proven else np.inf
        return Solution(action, value, bound, "least_violation", violated)
    return Solution(action, value, value if is_proven else bound, status, violated)


def _attempt(job: Callable[[], T], index: int, count: int) -> T:
    try:
        return job()
    except Exception as error:
        raise RuntimeError(f"Job {index + 1} of {count} failed: {error}") from error


def _check_penalty(penalty: float | None) -> None:
    if penalty is not None and not (np.isfinite(penalty) and penalty >= 0):
        raise ValueError(f"penalty must be None or a number >= 0, got {penalty}.")


def _check_start(start: ArrayLike | None, num_arms: int, k: int) -> np.ndarray | None:
    if start is None:
        return None
    array = np.asarray(start)
    is_set = array.shape == (k,) and np.unique(array).size == k
    if not is_set or array.min() < 0 or array.max() >= num_arms:
        raise ValueError(f"start must be {k} distinct arms in 0..{num_arms - 1}.")
    return array.astype(int)
