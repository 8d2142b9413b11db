"""Which sets CSAR pulls to learn what single arms are worth, and how it decodes them.

The estimators of Rejwan & Mansour 2020 (ALGORITHMS 8.1, 8.3), on the host in float64.
Arms go into groups of h, a Hadamard order. Row i >= 2 of the matrix splits a group
into two halves of h/2 arms; with Z_i the difference of their mean rewards, Z_1 the sum
over two arbitrary halves, theta = H'Z / h. Without noise and with additive rewards
this is exact; with one noise of variance s^2 a pull and m pulls a set it has
variance s^2 / (m h/2).

Every pull holds the same *common* arms too: the accepted ones (EST2), and a filler
where h/2 is short of the places. Common arms cancel in Z_i, i >= 2, and shift all
estimates of the group alike through Z_1.

Differs from the paper:
* a filler makes any number of places work. If it has to come from the arms that are
  to be estimated, these get an extra group with another filler, which is shifted so
  that the arms in both designs agree on average;
* the last group is filled up with distinct arms: those outside the contest, then
  those of other groups, whose two estimates are averaged;
* where the sets were changed (`least_squares`), nothing is decoded: the weights are
  fitted to the sets that were really played.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from msb_jax.baselines.hadamard import hadamard, largest_order
from msb_jax.problem import Problem, random_feasible_sets, repair, violated_pairs
from msb_jax.solvers.scip import LinearProgram

# A variance, for unit noise, above any that is left where rounds tell arms apart.
_UNKNOWN = 1e4
# Feasible sets to choose from where the repair of a pull fails.
_NUM_SPARE = 64

_repair = jax.jit(jax.vmap(repair, in_axes=(None, 0, 0)))
_violated = jax.jit(violated_pairs)
_random_feasible = jax.jit(random_feasible_sets, static_argnames="n")


class Design(NamedTuple):
    """Groups of arms, and the arms that are in every pull of a group."""

    groups: np.ndarray  # [G, h]
    common: np.ndarray  # [G, places that are not decoded]
    num_extra: int  # arms, the first of the last group, that fill the other groups

    @property
    def half(self) -> int:
        """Return h/2, the arms of a group in one pull."""
        return self.groups.shape[1] // 2


def make_design(
    rng: np.random.Generator,
    active: np.ndarray,
    outside: np.ndarray,
    base: np.ndarray,
    k: int,
) -> Design:
    """Group the arms at random.

    Args:
        active: the arms to estimate.
        outside: other arms that may stand in, the most welcome first.
        base: arms that are in every pull; in neither of the two above.
        k: arms in a pull. `active` and `outside` must hold 2 (k - |base|) arms.
    """
    places = k - base.size
    if active.size + outside.size < 2 * places:
        raise ValueError(
            f"A design for {places} places needs {2 * places} arms, got "
            f"{active.size + outside.size}."
        )
    order = largest_order(2 * places)
    short = places - order // 2
    own, spare = rng.permutation(active), outside
    is_inside = spare.size < short
    filler, own = (own[:short], own[short:]) if is_inside else (spare[:short], own)
    spare = spare if is_inside else spare[short:]
    num_short = -own.size % order or (order if own.size == 0 else 0)
    last = own[own.size - (own.size % order) :]
    others = rng.permutation(np.setdiff1d(own, last))
    filled = np.concatenate([own, np.append(spare, others)[:num_short]])
    groups = filled.reshape(-1, order)
    common = np.tile(np.append(base, filler), (len(groups), 1))
    if not (is_inside and short):
        return Design(groups, common, 0)
    known = rng.permutation(np.unique(filled))[: order - short]
    extra = np.append(filler, known)
    rest = np.setdiff1d(np.append(own, spare), extra)
    stand_in = np.append(base, rng.permutation(rest)[:short])
    return Design(np.vstack([groups, extra]), np.vstack([common, stand_in]), short)


def design_sets(design: Design) -> np.ndarray:
    """List the pulls: of every group, of every row of H, the + and the - half.

    Returns:
        int32[G * h * 2, K], each set in ascending order.
    """
    order, half = design.groups.shape[1], design.half
    signs = hadamard(order)
    signs[0, half:] = -1  # the first row's two halves, which its Z adds up
    plus = np.stack([np.flatnonzero(row > 0) for row in signs])  # [h, h/2]
    minus = np.stack([np.flatnonzero(row < 0) for row in signs])
    index = np.stack([plus, minus], axis=1)  # [h, 2, h/2]
    halves = design.groups[:, index]  # [G, h, 2, h/2]
    shape = (*halves.shape[:3], design.common.shape[1])
    common = np.broadcast_to(design.common[:, None, None, :], shape)
    sets = np.concatenate([halves, common], axis=-1)
    return np.sort(sets.reshape(-1, sets.shape[-1]), axis=1).astype(np.int32)


def decode(design: Design, means: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """Estimate the arms of the groups from the mean rewards of the pulls.

    Args:
        means: [G * h * 2], in the order of `design_sets`.
        theta: [L], earlier estimates, NaN where there are none. Those of the common
            arms are taken off, so that estimates are of the arms' own worth; where
            one is missing, all estimates are shifted by the same amount.

    Returns:
        float64[L], NaN for arms outside the groups.
    """
    num_groups, order = design.groups.shape
    pair = np.asarray(means, np.float64).reshape(num_groups, order, 2)
    z = pair[..., 0] - pair[..., 1]  # [G, h]
    z[:, 0] = pair[:, 0].sum(axis=1)
    filler_is_new = design.num_extra > 0
    num_base = design.common.shape[1] - design.num_extra
    known = design.common[0, :num_base] if filler_is_new else design.common[0]
    worth = theta[known].sum()
    z[:, 0] -= 2.0 * worth if np.isfinite(worth) else 0.0
    each = z @ hadamard(order).astype(np.float64) / order  # [G, h]
    total, count = np.zeros(theta.size), np.zeros(theta.size)
    plain = slice(0, num_groups - filler_is_new)
    np.add.at(total, design.groups[plain], each[plain])
    np.add.at(count, design.groups[plain], 1.0)
    found = np.divide(total, count, out=np.full(theta.size, np.nan), where=count > 0)
    if filler_is_new:
        extra, last = design.groups[-1], each[-1]
        filler, shared = np.split(extra, [design.num_extra])
        shift = (found[shared] - last[design.num_extra :]).mean()
        found[filler] = last[: design.num_extra] + shift
        # All are too high by 2 theta(F) / h, the filler's own arms included.
        whole = found[filler].sum() / (1.0 + 2.0 * filler.size / order)
        found -= 2.0 * whole / order
    return found


def least_squares(
    gram: np.ndarray, cross: np.ndarray, total: float, count: float
) -> tuple[np.ndarray, np.ndarray]:
    """Fit r = mu + theta'x to the rounds that were played.

    Only differences of weights are determined, as every x has K ones; the weights
    returned add up to the mean reward of a set of average arms.

    Args:
        gram: [L, L] sum of xx'.
        cross: [L] sum of r x.
        total: sum of r.
        count: rounds.

    Returns:
        theta [L] and var(theta_j) [L] for noise of variance 1. A direction that no
        round tells apart gets weight 0, and the arms in it an infinite variance.
    """
    counts = np.diag(gram)
    mean = total / count
    centred = gram - np.outer(counts, counts) / count
    # Arms that are in no round or in all of them are like nothing else: leave them out.
    varied = np.flatnonzero(np.diag(centred) > 1e-9)
    theta, variance = np.zeros(counts.size), np.full(counts.size, np.inf)
    if varied.size:
        centred, size = centred[np.ix_(varied, varied)], varied.size
        unit = float(np.trace(centred)) / size
        even = np.full((size, size), 1.0 / size)  # projects on the constant
        inverse = np.linalg.inv(centred + unit * (even + 1e-9 * np.eye(size)))
        theta[varied] = inverse @ (cross - mean * counts)[varied]
        theta[varied] -= theta[varied].mean()
        left = np.diag(inverse) - 1.0 / (size * unit)
        variance[varied] = np.where(left < _UNKNOWN, left, np.inf)
    arms_in_set = counts.sum() / count
    return theta + mean / max(arms_in_set, 1.0), variance


def indicators(sets: np.ndarray, num_arms: int) -> np.ndarray:
    """Turn sets int[N, K] into float64[N, L] of zeros and ones."""
    x = np.zeros((len(sets), num_arms))
    np.put_along_axis(x, np.asarray(sets, np.int64), 1.0, axis=1)
    return x


def make_feasible(
    rng: np.random.Generator,
    problem: Problem,
    sets: np.ndarray,
    lead: np.ndarray,
    first: np.ndarray,
    capacity: int,
) -> np.ndarray:
    """Replace arms so that no conflicts are left, if that is possible.

    Args:
        sets: int[N, K].
        lead: int[N], an arm of each row's group that its set keeps before others, so
            that no arm is left out by chance.
        first: [L], arms with a higher number enter first; by chance among equals.
        capacity: at least N. Work is filled up to it, so that all phases of a run
            share one compilation.
    """
    count, size = len(sets), first.size
    priority = rng.uniform(size=(capacity, size)) + first[None, :]
    priority[np.arange(count), lead] += 2.0
    padded = np.resize(sets, (capacity, problem.k)).astype(np.int32)
    sets = np.array(_repair(problem, padded, priority.astype(np.float32)))
    bad = np.asarray(_violated(problem, sets))[:count]
    sets = sets[:count]
    if bad.any():
        key = jax.random.key(int(rng.integers(1 << 31)))
        spare = np.asarray(_random_feasible(key, problem, n=_NUM_SPARE))
        conflicts = np.asarray(problem.conflicts)
        calm = LinearProgram(conflicts, problem.k).solve(np.zeros(size)).action
        spare = np.vstack([spare, calm[None, :]])
        clashes = np.asarray(_violated(problem, spare))
        spare = rng.permutation(spare[clashes == clashes.min()])
        worse = np.flatnonzero(bad > clashes.min())
        sets[worse] = spare[np.arange(worse.size) % len(spare)]
    return np.sort(sets, axis=1)
