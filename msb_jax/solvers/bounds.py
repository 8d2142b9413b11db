"""Upper bounds and an independent model of the integer programs (cvxpy).

The dense quadratic program over K of 300 arms cannot be solved to optimality, so a
ground truth found by search needs a bound beside it. Two are computed, and the
smaller one holds:

1. Rows. x'Qx + d'x = sum_i x_i (d_i + (Qx)_i) with (Qx)_i at most the sum of the
   K-1 largest entries of row i among the arms that do not conflict with i; then a
   linear program over the clique rows. Exact for K = 1 and K = L.
2. Spectrum. For every K-hot x and every v, x'(K diag(v) - (v1' + 1v')/2)x = 0; an
   entry of Q off the diagonal may be raised, and on a conflict it may be anything.
   With M what comes of Q by such changes, x'Qx <= x'Mx <= K lambda_max(M). Minimising
   over the changes is the dual of the doubly non-negative relaxation; a fixed number
   of steps of an alternating direction method finds changes that are nearly best,
   and the bound holds wherever it stops, because lambda_max is computed at the end.

At L=300, K=20 and uniform Q the rows give about 168, the spectrum 133 after a second,
and search finds 129 (SCIP's own bound after a minute is 179).

Differs from the paper: the paper has no bounds; its ground truth is whatever Gurobi
returns (I-34).
"""

from __future__ import annotations

import cvxpy as cp
import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array

from msb_jax.conflicts import clique_cover
from msb_jax.solvers.conflict_graph import ConflictGraph, check_numbers, companions

# An eigendecomposition costs about L^3; this many make a second or so at L=300.
_EIGEN_WORK = 80 * 300**3
_MOST_STEPS = 100
# Above, not even one decomposition is worth its time.
_MOST_ARMS = 2000
# Above, the linear program over the rows does without the cliques.
_MOST_COVERED = 1000


def linear_program_cvxpy(
    conflicts: ArrayLike, k: int, weights: ArrayLike
) -> tuple[np.ndarray, float]:
    """Solve max w'x over feasible K-sets by an independent model.

    One row for every conflicting pair, no reductions, and another solver where one
    is installed: a cross-check of `scip.LinearProgram`.

    Args:
        conflicts: bool[L, L].
        weights: [L].

    Returns:
        The set int32[K], sorted, and its value.
    """
    graph = ConflictGraph(conflicts, k)
    w = check_numbers(weights, (graph.num_arms,), "weights")
    x = cp.Variable(graph.num_arms, boolean=True)
    rules = [cp.sum(x) == k]
    first, second = np.nonzero(np.triu(graph.conflicts))
    if first.size:
        rules.append(x[first] + x[second] <= 1)
    program = cp.Problem(cp.Maximize(w @ x), rules)
    program.solve(solver=cp.HIGHS if "HIGHS" in cp.installed_solvers() else cp.SCIP)
    if program.status != cp.OPTIMAL or x.value is None:
        raise ValueError(
            f"No {k} arms are free of conflicts; lower K or the number of conflicts."
        )
    action = np.sort(np.argsort(-x.value, kind="stable")[:k]).astype(np.int32)
    return action, float(w[action].sum())


def quadratic_upper_bound(
    conflicts: ArrayLike,
    k: int,
    pair: ArrayLike,
    linear: ArrayLike,
    *,
    num_steps: int | None = None,
) -> float:
    """Bound x'Qx + d'x from above over all feasible K-sets.

    Args:
        conflicts: bool[L, L]; all False bounds the unconstrained maximum.
        pair: [L, L], need not be symmetric; its diagonal counts for x_i alone.
        linear: [L].
        num_steps: of the alternating direction method; chosen by L if None, so that
            a bound takes a second or two. More steps give a tighter bound.

    Returns:
        The bound; -inf when the relaxation shows that no feasible set exists.
    """
    graph = ConflictGraph(conflicts, k)
    size = graph.num_arms
    q = check_numbers(pair, (size, size), "pair")
    d = check_numbers(linear, (size,), "linear")
    q = (q + q.T) / 2.0
    d = d + np.diag(q)
    np.fill_diagonal(q, 0.0)
    bound = _row_bound(graph, q, d)
    if num_steps is None:
        num_steps = min(_MOST_STEPS, _EIGEN_WORK // size**3)
    if 1 < k < size <= _MOST_ARMS and np.isfinite(bound):
        bound = min(bound, _spectral_bound(graph, q, d, num_steps))
    return bound


def _row_bound(graph: ConflictGraph, q: np.ndarray, d: np.ndarray) -> float:
    """Bound by the best K-1 companions of every arm (bound 1 of the module)."""
    k = graph.k
    _, high, is_out = companions(graph, q, is_hard=True)
    worth = np.where(is_out, 0.0, high + d)  # [L]
    if is_out.sum() > graph.num_arms - k:
        return -np.inf
    crude = float(np.sort(np.where(is_out, -np.inf, worth))[-k:].sum())
    if graph.num_arms > _MOST_COVERED or not graph.conflicts.any():
        return crude
    cliques = clique_cover(graph.conflicts)
    rows = np.repeat(np.arange(len(cliques)), [len(c) for c in cliques])
    columns = np.concatenate([np.array(c) for c in cliques])
    cover = csr_array(
        (np.ones(rows.size), (rows, columns)), shape=(len(cliques), graph.num_arms)
    )
    x = cp.Variable(graph.num_arms)
    rules = [cp.sum(x) == k, cover @ x <= 1, x >= 0, x <= np.where(is_out, 0.0, 1.0)]
    program = cp.Problem(cp.Maximize(worth @ x), rules)
    program.solve(solver=cp.HIGHS if "HIGHS" in cp.installed_solvers() else None)
    if program.status == cp.INFEASIBLE:
        return -np.inf
    # The multipliers make a bound whatever the tolerance of the solver.
    y = np.maximum(rules[1].dual_value, 0.0)
    reduced = np.where(is_out, -np.inf, worth - cover.T @ y)
    return min(crude, float(y.sum() + np.sort(reduced)[-k:].sum()))


def _spectral_bound(
    graph: ConflictGraph, q: np.ndarray, d: np.ndarray, num_steps: int
) -> float:
    """Bound by the largest eigenvalue of a changed Q (bound 2 of the module).

    With S = tI - M positive semidefinite and N the raised entries, the dual is
    min K t subject to C + N + S = A*(t, u), C = Q + diag(d), where
    A*(t, u) = tI + sum_i u_i (K e_i e_i' - (e_i 1' + 1 e_i') / 2), u = -v. The
    primal iterate X plays the part of xx'.
    """
    size, k = graph.num_arms, graph.k
    c = q + np.diag(d)
    # What u can take up is taken off before the scale is read.
    means = c.mean(axis=0)
    centred = c - means[:, None] - means[None, :] + means.mean()
    scale = float(centred[~np.eye(size, dtype=bool)].std()) or 1.0
    c = c / scale
    gram = np.full((size + 1, size + 1), 0.5)
    gram[0, :] = gram[:, 0] = k - 1.0
    gram[0, 0] = size
    gram[1:, 1:] += np.eye(size) * (size / 2.0 + k * k - 2.0 * k)
    inverse = np.linalg.inv(gram)
    diagonal = np.arange(size)

    def traces(matrix: np.ndarray) -> np.ndarray:  # A, of a symmetric matrix
        own = matrix.diagonal()
        return np.concatenate([[own.sum()], k * own - matrix.sum(axis=1)])

    def adjoint(y: np.ndarray) -> np.ndarray:  # A*
        matrix = -(y[1:, None] + y[None, 1:]) / 2.0
        matrix[diagonal, diagonal] += y[0] + k * y[1:]
        return matrix

    def bound(raised: np.ndarray, y: np.ndarray) -> float:
        changed = c + raised - adjoint(np.concatenate([[0.0], y[1:]]))
        return k * float(np.linalg.eigvalsh(changed)[-1])

    target = np.zeros(size + 1)
    target[0] = k
    x = np.full((size, size), k * (k - 1.0) / (size * (size - 1.0)))
    x[diagonal, diagonal] = k / size
    raised, slack = np.zeros((2, size, size))
    step = k / size
    y = inverse @ traces(c)
    best = bound(raised, y)
    for i in range(1, num_steps + 1):
        y = inverse @ (traces(c + raised + slack) + (traces(x) - target) / step)
        rest = adjoint(y) - c
        raised = rest - slack - x / step
        raised = np.where(graph.conflicts, raised, np.maximum(raised, 0.0))
        raised[diagonal, diagonal] = 0.0
        middle = rest - raised - x / step
        values, vectors = np.linalg.eigh(middle)
        is_up = values > 0.0
        slack = (vectors[:, is_up] * values[is_up]) @ vectors[:, is_up].T
        gap = rest - raised - slack
        x = x - 1.6 * step * gap
        if i % 10 == 0:
            # Keep the two residuals of a size: a longer step favours the dual.
            dual = np.linalg.norm(gap) / (1.0 + np.linalg.norm(c))
            primal = np.linalg.norm(traces(x) - target) / (1.0 + k)
            primal += np.linalg.norm(np.minimum(x, 0.0)) / (1.0 + np.linalg.norm(x))
            step *= 1.0 / 1.5 if primal > 3.0 * dual else 1.0
            step *= 1.5 if dual > 3.0 * primal else 1.0
        if i % 20 == 0 or i == num_steps:
            best = min(best, bound((raised + raised.T) / 2.0, y))
    # Rounding in an eigenvalue is some 1e-13 of the norm.
    return scale * (best + 1e-11 * k * (1.0 + float(np.linalg.norm(c))))
