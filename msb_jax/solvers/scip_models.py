"""The models that SCIP solves: relaxation, linear and quadratic program.

The only file that imports pyscipopt. Every model is built afresh, quiet, on one
thread, with the solver's fixed seeds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyscipopt

from msb_jax.solvers.conflict_graph import ConflictGraph, companions

_STATUS = {
    "optimal": "optimal",
    "infeasible": "optimal",
    "nodelimit": "node_limit",
    "timelimit": "time_limit",
}


class Found(NamedTuple):
    chosen: np.ndarray  # [K]
    bound: float
    status: str


def relax(
    w: np.ndarray, rows: list[list[int]], k: int, price: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Solve max w'x - price sum_c t_c with sum_{i in c} x_i - t_c <= 1 in [0, 1]^n.

    Returns:
        x [n], and multipliers [rows] in [0, price], on which a bound may rest
        whatever the solver's tolerance; zeros if the solver fails.
    """
    size, count = w.size, len(rows)
    slacks = 0 if price is None else count
    lp = pyscipopt.LP("relaxation", "maximize")
    lp.addCols(
        [[] for _ in range(size + slacks)],
        objs=w.tolist() + [-(price or 0.0)] * slacks,
        lbs=[0.0] * (size + slacks),
        ubs=[1.0] * size + [float(k)] * slacks,
    )
    entries = [[(i, 1.0) for i in row] for row in rows]
    for c in range(slacks):
        entries[c].append((size + c, -1.0))
    lp.addRows(
        [[(i, 1.0) for i in range(size)], *entries],
        lhss=[float(k)] + [-lp.infinity()] * count,
        rhss=[float(k)] + [1.0] * count,
    )
    lp.solve(dual=False)
    if not lp.isOptimal():
        return np.zeros(size), np.zeros(count)
    y = np.array(lp.getDual()[1:])
    ceiling = np.inf if price is None else price
    return np.array(lp.getPrimal()[:size]), np.clip(y, 0.0, ceiling)


def branch(
    w: np.ndarray,
    rows: list[list[int]],
    k: int,
    price: float | None,
    floor: float,
    limits: tuple[int, float],
) -> Found:
    """Look for a set worth more than `floor` by branch and bound.

    A clique with s chosen arms costs s(s-1)/2 pairs, the largest of the lines
    t s - t(t+1)/2 over t = 1, 2, ...

    Returns:
        The set (empty if there is none), a bound on all sets, and the status.
    """
    model = _new_model(limits, pyscipopt.SCIP_PARAMSETTING.OFF)
    total = pyscipopt.quicksum
    x = [model.addVar(vtype="B", obj=float(v)) for v in w]
    model.setMaximize()
    model.addCons(total(x) == k)
    for row in rows:
        inside = total(x[i] for i in row)
        if price is None:
            model.addCons(inside <= 1)
            continue
        pairs = model.addVar(obj=-price)
        for t in range(1, min(len(row), k)):
            model.addCons(t * inside - pairs <= t * (t + 1) / 2)
    model.setObjlimit(floor)
    found = _run(model, x, k)
    return found._replace(bound=max(found.bound, floor))


def branch_quadratic(
    graph: ConflictGraph,
    q: np.ndarray,
    d: np.ndarray,
    is_hard: bool,
    start: np.ndarray,
    limits: tuple[int, float],
) -> Found:
    """Improve `start` under x'Qx + d'x by branch and bound.

    Row by row, y_i = x_i (Qx)_i is the largest y_i with y_i <= high_i x_i and
    y_i <= (Qx)_i - least_i (1 - x_i), where high_i bounds (Qx)_i from above if x_i = 1
    and least_i from below if x_i = 0.

    Args:
        q: [L, L], symmetric with an empty diagonal.
        d: [L].
        is_hard: conflicts are forbidden.
        start: int[K], feasible.

    Returns:
        The best set, a bound on all sets, and the status.
    """
    size, k = graph.num_arms, graph.k
    low, high, is_out = companions(graph, q, is_hard)
    least = np.sort(q, axis=1)[:, :k].sum(axis=1)
    model = _new_model(limits, pyscipopt.SCIP_PARAMSETTING.FAST)
    total = pyscipopt.quicksum
    x = [
        model.addVar(vtype="B", obj=float(v), ub=0.0 if out else 1.0)
        for v, out in zip(d, is_out, strict=True)
    ]
    y = [
        model.addVar(lb=min(float(lo), 0.0), ub=max(float(up), 0.0), obj=1.0)
        for lo, up in zip(low, high, strict=True)
    ]
    model.setMaximize()
    model.addCons(total(x) == k)
    for clique in graph.rows(np.arange(size), True) if is_hard else []:
        model.addCons(total(x[i] for i in clique) <= 1)
    for i in range(size):
        inner = total(float(q[i, j]) * x[j] for j in np.flatnonzero(q[i]))
        model.addCons(y[i] <= float(high[i]) * x[i])
        model.addCons(y[i] - inner <= -float(least[i]) * (1 - x[i]))
    is_chosen = np.isin(np.arange(size), start)
    products = np.where(is_chosen, q @ is_chosen, 0.0)
    hint = model.createSol()
    for i in range(size):
        model.setSolVal(hint, x[i], float(is_chosen[i]))
        model.setSolVal(hint, y[i], float(products[i]))
    model.addSol(hint)
    return _run(model, x, k)


def _new_model(limits: tuple[int, float], heuristics: int) -> pyscipopt.Model:
    """Make a quiet model on one thread, with what was measured to be fast.

    Separation costs more than it brings on both programs; heuristics only pay
    where the incumbent is not nearly optimal from the start.
    """
    model = pyscipopt.Model()
    model.hideOutput()
    model.setPresolve(pyscipopt.SCIP_PARAMSETTING.FAST)
    model.setHeuristics(heuristics)
    model.setSeparating(pyscipopt.SCIP_PARAMSETTING.OFF)
    model.setParam("lp/threads", 1)
    model.setParam("limits/nodes", limits[0])
    model.setParam("limits/time", limits[1])
    # An interrupt belongs to the program around, not to the solver.
    model.setParam("misc/catchctrlc", False)
    return model


def _run(model: pyscipopt.Model, x: list[pyscipopt.Variable], k: int) -> Found:
    """Solve and read the K chosen arms (none without a solution)."""
    model.optimizeNogil()
    status = model.getStatus()
    if status not in _STATUS:
        raise RuntimeError(f"SCIP stopped with status {status!r}; check the weights.")
    chosen = np.zeros(0, dtype=int)
    if model.getNSols():
        values = np.array([model.getVal(v) for v in x])
        chosen = np.sort(np.argsort(-values, kind="stable")[:k])
    # Without a set above the floor the floor is the bound; the caller knows it.
    bound = -np.inf if status == "infeasible" else float(model.getDualbound())
    return Found(chosen, bound, _STATUS[status])
