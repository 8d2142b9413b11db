"""Semantic loss: how far independent choices are from "K arms and no conflict".

Let every arm i be chosen by itself with probability p_i. The semantic loss is minus the
log of the probability that the choice satisfies the constraints,

    L(p) = -log sum_{x allowed} prod_{x_i = 1} p_i prod_{x_i = 0} (1 - p_i).

Each group of arms that share no conflict with the others is a polynomial in z, whose
coefficient of z^s is the probability that s of its arms, and no two that conflict, are
chosen. The coefficient of z^K of their product is the probability wanted. Without
conflicts every arm is a group, (1 - p_i) + p_i z, and the product is the dynamic
program of the Poisson-binomial distribution. All of it is in logarithms. Three losses:

* `log_exactly_k`, exactly K arms, exact, O(LK);
* `log_joint`, exactly K arms and no conflict, exact where every connected part of the
  conflict graph has at most `MAX_NODES` arms: the host lists its independent sets;
* `practical_loss`, for any graph and inside of compiled programs: the first one, and a
  clause -log(1 - p_i p_j) for each conflict. Clauses are exact for conflicts that share
  no arm, and count what they share more than once otherwise.

Source: Xu et al. 2018; ALGORITHMS 10.2.

Differs from the paper, which names the loss as future work, and from Xu et al.:
* polynomials and lists of sets take the place of compiled circuits;
* probabilities below `FLOOR` count as `FLOOR` but keep their gradient, so that values
  and gradients are finite at 0 and 1, and the loss of an allowed 0/1 vector is 0;
* by default every clause counts once, so that their sum is about the number of
  conflicting pairs; the weight of their mean is an argument.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse.csgraph import connected_components

from msb_jax.problem import Problem

MAX_NODES = 20  # arms of a connected part that is enumerated
MAX_MODELS = 1 << 20  # independent sets of all parts together
FLOOR = 1e-6

# Stands for the log of 0 without its gradients.
_NEVER = -1e30


class Plan(NamedTuple):
    """What the host has found out about a problem: a constant of compiled programs.

    Parts are the connected components of the conflict graph, models their independent
    sets of at most K arms. Without an exact loss there are none.
    """

    k: int
    conflicts: np.ndarray  # [L, L] bool
    obstacle: str | None  # a sentence: why the joint loss is not exact
    nodes: np.ndarray  # [G, W] int32, the arms of each part; L fills a row up
    part: np.ndarray  # [S] int32, of each model
    is_in: np.ndarray  # [S, W] bool, which arms of its part a model holds


def make_plan(problem: Problem) -> Plan:
    """Enumerate the independent sets of the parts of the conflict graph (host)."""
    graph, k = np.asarray(problem.conflicts), problem.k
    number, label = connected_components(graph, directed=False)
    parts = [np.flatnonzero(label == i) for i in range(number)]
    plan = Plan(
        k=k,
        conflicts=graph,
        obstacle=None,
        nodes=np.zeros((0, 1), np.int32),
        part=np.zeros((0,), np.int32),
        is_in=np.zeros((0, 1), bool),
    )
    width = max(part.size for part in parts)
    if width > MAX_NODES:
        return plan._replace(
            obstacle=f"A connected part of the conflict graph has {width} arms, but "
            f"only parts of up to {MAX_NODES} are enumerated; use practical_loss."
        )
    models: list[np.ndarray] = []
    for part in parts:
        models.append(_independent_sets(graph[np.ix_(part, part)], k))
        if sum(map(len, models)) > MAX_MODELS:
            return plan._replace(
                obstacle=f"The conflict graph has more than {MAX_MODELS} independent "
                "sets to enumerate; use practical_loss."
            )
    if sum(sets.sum(axis=1).max() for sets in models) < k:
        return plan._replace(
            obstacle=f"No {k} arms are free of conflicts, so that the exact loss is "
            "infinite everywhere; use practical_loss."
        )
    fill = graph.shape[0]
    return plan._replace(
        nodes=np.stack([_widen(part, width, fill) for part in parts]).astype(np.int32),
        part=np.repeat(np.arange(number, dtype=np.int32), [len(m) for m in models]),
        is_in=np.concatenate([_widen(sets, width, False) for sets in models]),
    )


def log_exactly_k(p: jax.Array, k: int) -> jax.Array:
    """Compute the log-probability that exactly k of independent arms are chosen.

    Args:
        p: float[L] in [0, 1].
        k: 0..L.

    Returns:
        float[].
    """
    _check(p, k)
    return _exactly_k(_log(p), _log1m(p), k)


def inclusion(p: jax.Array, k: int) -> jax.Array:
    """Compute P(x_i = 1 | exactly k arms are chosen) of every arm: float[L] -> [L].

    The probability of k arms is linear in each p_i if 1 - p_i is kept, so this is the
    derivative of its log in log p_i. The sum over the arms is k.
    """
    _check(p, k)
    return jax.grad(_exactly_k)(_log(p), _log1m(p), k)


def clause_loss(p: jax.Array, conflicts: jax.Array) -> jax.Array:
    """Sum -log(1 - p_i p_j) over the conflicts: float[L], bool[L, L] -> []."""
    clauses = -_log1m(p[:, None] * p[None, :])
    return 0.5 * jnp.sum(jnp.where(conflicts, clauses, 0.0))


def log_joint(plan: Plan, p: jax.Array) -> jax.Array:
    """Compute the log-probability of exactly K arms without a conflict.

    Args:
        plan: one without an obstacle; another one is a ValueError.
        p: float[L] in [0, 1].

    Returns:
        float[].
    """
    if plan.obstacle is not None:
        raise ValueError(plan.obstacle)
    _check(p, plan.k, plan.conflicts.shape[0])
    rows = plan.nodes[plan.part]  # [S, W]
    # The arm L is in no set, and that is certain.
    chosen, left = jnp.append(_log(p), 0.0)[rows], jnp.append(_log1m(p), 0.0)[rows]
    weights = jnp.sum(jnp.where(plan.is_in, chosen, left), axis=1)  # [S]
    return _product(_by_size(plan, weights), plan.k)[plan.k]


def practical_loss(
    p: jax.Array, conflicts: jax.Array, k: int, clause_weight: float | None = None
) -> jax.Array:
    """Compute -log P(exactly k arms) + clause_weight x mean clause loss.

    Args:
        p: float[L] in [0, 1].
        conflicts: bool[L, L] (or 0 and 1), may be traced.
        k: 0..L; sets of one arm hold no pair and need no clause.
        clause_weight: of the mean over the conflicts; None: their number, which makes
            it a sum.

    Returns:
        float[].
    """
    loss = -log_exactly_k(p, k)
    if k < 2:
        return loss
    is_edge = conflicts > 0
    clauses = clause_loss(p, is_edge)
    if clause_weight is not None:
        clauses *= clause_weight / jnp.maximum(0.5 * jnp.sum(is_edge), 1.0)
    return loss + clauses


def semantic_loss(
    plan: Plan, p: jax.Array, clause_weight: float | None = None
) -> jax.Array:
    """Compute the exact loss where the plan has one, else the practical one: [].

    Args:
        plan: of `make_plan`.
        p: float[L] in [0, 1].
        clause_weight: see `practical_loss`.
    """
    if plan.obstacle is None:
        return -log_joint(plan, p)
    conflicts = jnp.asarray(plan.conflicts)
    return practical_loss(p, conflicts, plan.k, clause_weight)


def _exactly_k(log_p: jax.Array, log_q: jax.Array, k: int) -> jax.Array:
    """The coefficient k of the product of q_i + p_i z, in logs: [L], [L] -> []."""
    return _product(jnp.stack([log_q, log_p], axis=1), k)[k]


def _product(polynomials: jax.Array, k: int) -> jax.Array:
    """Multiply polynomials given by the logs of their coefficients.

    float[G, W + 1] -> float[k + 1], the coefficients up to z^k.
    """
    width = polynomials.shape[1]

    def multiply(carry: jax.Array, factor: jax.Array) -> tuple[jax.Array, None]:
        padded = jnp.pad(carry, (width - 1, 0), constant_values=_NEVER)
        # Row s is the carry times z^s: [W + 1, k + 1].
        shifted = jnp.stack([padded[width - 1 - s :][: k + 1] for s in range(width)])
        return jax.nn.logsumexp(shifted + factor[:, None], axis=0), None

    start = jnp.full((k + 1,), _NEVER, polynomials.dtype).at[0].set(0.0)
    return jax.lax.scan(multiply, start, polynomials)[0]


def _by_size(plan: Plan, weights: jax.Array) -> jax.Array:
    """Sum exp(weights) of the models of equal part and size: [S] -> log [G, W + 1]."""
    number, width = plan.nodes.shape
    cells = plan.part * (width + 1) + plan.is_in.sum(axis=1)  # [S]
    size = number * (width + 1)
    is_cell = np.bincount(cells, minlength=size) > 0
    top = jax.ops.segment_max(jax.lax.stop_gradient(weights), cells, size)
    top = jnp.where(is_cell, top, 0.0)
    total = jax.ops.segment_sum(jnp.exp(weights - top[cells]), cells, size)
    logs = top + jnp.log(jnp.where(is_cell, total, 1.0))
    return jnp.where(is_cell, logs, _NEVER).reshape(number, width + 1)


def _independent_sets(graph: np.ndarray, most: int) -> np.ndarray:
    """List the sets of at most `most` nodes without an edge: [n, n] -> bool[S, n]."""
    sets = np.zeros((1, graph.shape[0]), bool)
    for node in range(graph.shape[0]):
        is_open = ~sets[:, graph[node]].any(axis=1) & (sets.sum(axis=1) < most)
        more = sets[is_open]
        more[:, node] = True
        sets = np.concatenate([sets, more])
    return sets


def _widen(rows: np.ndarray, width: int, fill: int | bool) -> np.ndarray:
    """Fill the last axis up to a width."""
    gap = [(0, 0)] * (rows.ndim - 1) + [(0, width - rows.shape[-1])]
    return np.pad(rows, gap, constant_values=fill)


def _log(x: jax.Array) -> jax.Array:
    """The log of x in [0, 1], at least that of `FLOOR`; its slope is never 0."""
    return jnp.log(x + jax.lax.stop_gradient(jnp.maximum(FLOOR - x, 0.0)))


def _log1m(x: jax.Array) -> jax.Array:
    """The log of 1 - x in the same way."""
    return jnp.log1p(-x + jax.lax.stop_gradient(jnp.maximum(x - (1.0 - FLOOR), 0.0)))


def _check(p: jax.Array, k: int, num_arms: int | None = None) -> None:
    """Raise ValueError unless p has a probability an arm, and k of them exist."""
    if p.ndim != 1 or p.shape[0] != (num_arms or p.shape[0]):
        raise ValueError(
            "The semantic loss is of one vector p [L] with a probability for each of "
            f"{num_arms or 'the'} arms, got shape {p.shape}; use vmap for several."
        )
    if not 0 <= k <= p.shape[0]:
        raise ValueError(f"k must be in 0..{p.shape[0]}, got {k}.")
