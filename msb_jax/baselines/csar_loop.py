"""The accept/reject loop of CSAR for one run, between two phases (host, float64).

A phase ends when all its pulls have been told. Then arms are estimated, some are
accepted or rejected for good, and the sets of the next phase are chosen. See
`csar` for the algorithm and for what differs from the paper.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from msb_jax.baselines.csar_design import (
    Design,
    decode,
    design_sets,
    indicators,
    least_squares,
    make_design,
    make_feasible,
)
from msb_jax.solvers.scip import LinearProgram

OUT, ACTIVE, ACCEPTED = 0, 1, 2
UNUSED = -(1 << 30)  # the target of a row that no phase uses
# One phase halves eps at most this many times more than planned.
_MOST_SKIPPED = 2
# Below this share of the range, arms count as equal and the loop ends.
_EQUAL = 1e-6
_MOST_PULLS = 1_000_000


def advance(run: Any, words: np.ndarray, config: Any, exploit: bool) -> Any:
    """Close a phase and open the next, or end the loop.

    Args:
        run: a `CsarState` of NumPy arrays.
        words: uint32[2], the randomness of the next design.
        config: a `CsarConfig`.
        exploit: accepted arms are in every pull (EST2).
    """
    k = run.problem.k
    if run.phase > 0:
        run = _fold(run)
        run = _judge(run, config, exploit)
    is_accepted, is_active = run.status == ACCEPTED, run.status == ACTIVE
    if is_accepted.sum() < k and is_accepted.sum() + is_active.sum() <= k:
        run = run._replace(status=np.where(is_active, ACCEPTED, run.status))
    if (run.status == ACCEPTED).sum() == k:
        action = np.flatnonzero(run.status == ACCEPTED)
        run = run._replace(is_done=np.bool_(True))
        return _set_pulls(run, action[None, :], np.ones(1, np.int64))
    run = run._replace(seed=words, phase=run.phase + 1)
    return _plan(run, config, exploit)


def decide(
    theta: np.ndarray,
    radius: np.ndarray,
    best: np.ndarray,
    others: np.ndarray,
    fixed: np.ndarray,
    conflicts: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Say which arms are surely in, and which surely out of, the best set.

    Without conflicts this is the test of the paper: accept i if theta_i leads the
    (k'+1)-th by the two radii, reject it if it trails the k'-th by them. With
    conflicts the same is asked of every swap that adds no violation. An arm that no
    single swap lets in would cost all arms that it conflicts with, less the best of
    the others in their places.

    Args:
        theta, radius: [L].
        best: the best set for the open places; `others`: the other active arms.
        fixed: the accepted arms.
        conflicts: bool[L, L].

    Returns:
        bool[|best|] accepted, bool[|others|] rejected.
    """
    whole = np.append(fixed, best)
    clash = conflicts[np.ix_(best, others)]
    more = conflicts[np.ix_(others, whole)].sum(axis=1)[None, :] - clash
    more = more - conflicts[np.ix_(best, whole)].sum(axis=1)[:, None]
    lead = theta[best][:, None] - radius[best][:, None]
    margin = np.where(more > 0, np.inf, lead - (theta + radius)[others][None, :])
    ranked = np.cumsum(np.append(0.0, np.sort(theta[others])[::-1]))
    for j in np.flatnonzero((more > 0).all(axis=0)):
        inside = np.flatnonzero(clash[:, j])
        if not inside.size or conflicts[others[j], fixed].any():
            continue  # excluded by the accepted arms
        loss = theta[best[inside]].sum() - theta[others[j]] - ranked[inside.size - 1]
        # As sure as one swap is with two radii: errors add up like a root.
        doubt = max(radius[best[inside]].max(), radius[others[j]])
        margin[inside, j] = loss - 2.0 * math.sqrt(inside.size) * doubt
    accept = margin.min(axis=1, initial=np.inf) > 0
    return accept, margin.min(axis=0, initial=np.inf) > 0


def _fold(run: Any) -> Any:
    """Add the phase to the sums that outlive it: noise, and rounds if they are kept."""
    used = run.target > UNUSED
    count = np.where(used, run.pulled, 0).astype(np.float64)
    run = run._replace(
        noise_sum=run.noise_sum + np.where(used, run.square, 0.0).sum(),
        noise_dof=run.noise_dof + np.maximum(count - 1.0, 0.0).sum(),
    )
    if not run.gram.size:
        return run
    shift = run.shift
    if run.rounds == 0:
        shift = (run.mean * count).sum() / count.sum()
    gap = count * np.where(used, run.mean - shift, 0.0)
    x = indicators(run.slots, run.status.size)
    return run._replace(
        gram=run.gram + x.T @ (count[:, None] * x),
        cross=run.cross + x.T @ gap,
        total=run.total + gap.sum(),
        rounds=run.rounds + count.sum(),
        shift=shift,
    )


def _judge(run: Any, config: Any, exploit: bool) -> Any:
    """Estimate the arms, then accept and reject."""
    k = run.problem.k
    if run.gram.size:
        theta, variance = least_squares(run.gram, run.cross, run.total, run.rounds)
        theta = theta + run.shift / k
        is_seen = np.diag(run.gram) > 0
    else:
        design = _design(run, exploit)
        used = run.target > UNUSED
        theta = decode(design, run.mean[used], run.theta.astype(np.float64))
        weakest = run.pulled[used].min()
        variance = np.full(theta.size, 1.0 / (design.half * weakest))
        is_seen = np.isfinite(theta)
    active = np.flatnonzero((run.status == ACTIVE) & is_seen)
    fixed = np.flatnonzero(run.status == ACCEPTED)
    if active.size + fixed.size < k:  # conflicts keep the others out of all pulls
        active = np.flatnonzero(run.status == ACTIVE)
    eps, scale = float(run.eps), float(run.scale)
    if run.phase == 1:
        scale = float(np.ptp(theta[active]))
        eps = scale / 2.0
    is_known = np.isfinite(variance)
    radius = np.full(theta.size, np.inf)
    radius[is_known] = np.sqrt(_factor(run, config) * variance[is_known])
    reached = _typical(radius[active])
    for _ in range(_MOST_SKIPPED):
        eps = eps / 2.0 if reached <= eps / 2.0 else eps
    conflicts = np.asarray(run.problem.conflicts)
    if config.constraints == "soft":
        conflicts = np.zeros_like(conflicts)
    best = _best(theta, active, fixed, conflicts, k - fixed.size)
    others = np.setdiff1d(active, best)
    radius = np.maximum(radius, eps)
    accept, reject = decide(theta, radius, best, others, fixed, conflicts)
    status = run.status.copy()
    status[np.setdiff1d(np.flatnonzero(status == ACTIVE), active)] = OUT
    is_last = eps <= _EQUAL * scale
    status[best if is_last else best[accept]] = ACCEPTED
    status[others[reject]] = OUT
    theta = np.where(np.isfinite(theta), theta, run.theta)
    return run._replace(theta=theta, status=status, eps=eps, scale=scale)


def _best(
    theta: np.ndarray,
    active: np.ndarray,
    fixed: np.ndarray,
    conflicts: np.ndarray,
    places: int,
) -> np.ndarray:
    """Return the best set for the open places."""
    free = active[~conflicts[np.ix_(active, fixed)].any(axis=1)]
    arms = free if free.size >= places else active
    inner = conflicts[np.ix_(arms, arms)]
    return arms[LinearProgram(inner, places).solve(theta[arms]).action]


def _plan(run: Any, config: Any, exploit: bool) -> Any:
    """Choose the sets of the phase and how often each is pulled."""
    size, k = run.status.size, run.problem.k
    base = np.flatnonzero((run.status == ACCEPTED) & exploit)
    rng = np.random.default_rng([*run.seed.tolist(), 1])
    if size >= 2 * k:
        design = _design(run, exploit)
        sets, lead = design_sets(design), np.repeat(design.groups.ravel(), 2)
    else:
        lead = np.tile(rng.permutation(np.setdiff1d(np.arange(size), base)), 2)
        score = rng.uniform(size=(lead.size, size))
        score[:, base] = 3.0
        score[np.arange(lead.size), lead] = 2.0
        sets = np.sort(np.argsort(-score, axis=1)[:, :k], axis=1)
    if config.constraints == "hard":
        first = (run.status == ACTIVE) + 4.0 * np.isin(np.arange(size), base)
        capacity = run.slots.shape[0]
        sets = make_feasible(rng, run.problem, sets, lead, first, capacity)
    pulls = 1
    if run.phase > 1:
        wanted = (float(run.eps) / 2.0) ** 2
        run = run._replace(eps=float(run.eps) / 2.0)
        # Variance that one unit of noise may leave.
        allowed = wanted / max(_factor(run, config), 1e-30)
        pulls = _count_pulls(run, sets, allowed, exploit)
    targets = np.full(len(sets), pulls)
    if run.phase == 1:
        targets[: config.num_pilot] += 1
    return _set_pulls(run, sets, targets)


def _count_pulls(run: Any, sets: np.ndarray, allowed: float, exploit: bool) -> int:
    """Return m, the pulls of each set that bring the variance down to `allowed`."""
    if not run.gram.size:
        pulls = math.ceil(1.0 / (_design(run, exploit).half * allowed))
        return min(max(pulls, 1), _MOST_PULLS)
    x = indicators(sets, run.status.size)
    active = run.status == ACTIVE
    pulls, step = 1, x.T @ x
    while pulls < _MOST_PULLS:
        gram, rounds = run.gram + pulls * step, run.rounds + pulls * len(sets)
        variance = least_squares(gram, np.zeros(len(gram)), 0.0, rounds)[1]
        if _typical(variance[active]) <= allowed:
            break
        pulls = max(pulls + 1, int(1.4 * pulls))
    return pulls


def _factor(run: Any, config: Any) -> float:
    """Return what turns var(theta) for unit noise into a squared radius."""
    noise_var = float(run.noise_sum) / max(float(run.noise_dof), 1.0)
    delta = 6.0 * config.delta / (math.pi * int(run.phase)) ** 2
    log_term = math.log(2.0 * run.status.size / delta)
    return config.m_scale * 2.0 * noise_var * log_term


def _typical(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else math.inf


def _design(run: Any, exploit: bool) -> Design:
    """Make the design of the phase; the seed is in the state, so it comes out again."""
    rng = np.random.default_rng(run.seed.tolist())
    base = np.flatnonzero((run.status == ACCEPTED) & exploit)
    active = np.flatnonzero(run.status == ACTIVE)
    # Arms that stand in are played too: the best of them, as far as is known.
    order = np.argsort(-np.nan_to_num(run.theta, nan=-np.inf), kind="stable")
    outside = order[~np.isin(order, np.append(active, base))]
    return make_design(rng, active, outside, base, run.problem.k)


def _set_pulls(run: Any, sets: np.ndarray, targets: np.ndarray) -> Any:
    """Write the pulls of a phase into the state."""
    count = len(sets)
    target = np.full_like(run.target, UNUSED)
    target[:count] = targets
    slots = np.array(run.slots)
    slots[:count] = sets
    zeros = {n: np.zeros_like(getattr(run, n)) for n in _PER_PHASE}
    return run._replace(slots=slots, target=target, **zeros)


_PER_PHASE = ("asked", "pulled", "mean", "square")
