"""Maximum coverage: the k of L sets that cover most of what is wanted.

There are n elements; set i holds each of them with a chance of its own, and an element
has a weight uniform on [0, 1] that nobody knows. Who holds what is known: row i of the
problem's features says which elements are in set i. What comes back is one number, the
weight of all elements that the k sets cover together, in units of the best choice's,
with noise. Covering more never hurts, so that at most k sets are exactly k.

Source: paper, supplement, "Other O-CCOPs". It names the problem and gives no setting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pyscipopt import Model, quicksum

from msb_jax.envs.synthetic import GroundTruth
from msb_jax.problem import Problem, problem_from_conflicts
from msb_jax.types import Key, Outcome

# Branch and bound of the ground truth.
_NODES, _SECONDS = 2000, 60.0


@dataclass(frozen=True, kw_only=True)
class MaxCoverageConfig:
    """The setting."""

    num_arms: int = 100  # sets, L
    k: int = 10  # sets that may be chosen
    num_elements: int = 200
    share: float = 0.06  # of the elements that a set holds, on average
    noise_std: float = 0.1  # of the weight covered, in units of the largest weight

    def __post_init__(self) -> None:
        if self.num_arms < 1 or self.num_elements < 1:
            raise ValueError("num_arms and num_elements must be at least 1.")
        if not 1 <= self.k <= self.num_arms:
            raise ValueError(f"k must be in 1..{self.num_arms}, got {self.k}.")
        if not 0 < self.share <= 0.5:
            raise ValueError(f"share must lie in (0, 0.5], got {self.share}.")
        if not (math.isfinite(self.noise_std) and self.noise_std >= 0):
            raise ValueError(f"noise_std must be at least 0, got {self.noise_std}.")


class MaxCoverageState(NamedTuple):
    """What the environment needs to answer. Stack states for several seeds."""

    problem: Problem
    weights: jax.Array  # [n] of the elements
    scale: jax.Array  # [] the most that can be covered
    noise_std: jax.Array  # []


class CoverageInstance(NamedTuple):
    """One draw of the setting."""

    state: MaxCoverageState
    ground_truth: GroundTruth


def make_instance(config: MaxCoverageConfig, seed: int) -> CoverageInstance:
    """Draw the sets and weights of a seed and find the best choice (host)."""
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}.")
    streams = [np.random.default_rng([seed, i]) for i in range(2)]
    chances = streams[0].uniform(0.0, 2.0 * config.share, size=(config.num_arms, 1))
    shape = (config.num_arms, config.num_elements)
    members = streams[0].uniform(size=shape) < chances
    weights = streams[1].uniform(size=config.num_elements)
    nothing = np.zeros((config.num_arms, config.num_arms), bool)
    problem = problem_from_conflicts(nothing, config.k, members.astype(np.float64))
    action, value, bound, is_proven = best_cover(members, weights, config.k)
    scale = value or 1.0  # sets may be empty
    truth = GroundTruth(
        reward=value / scale,
        upper_bound=bound / scale,
        status="optimal" if is_proven else "best_found",
        action=action,
    )
    state = MaxCoverageState(
        problem=problem,
        weights=jnp.asarray(weights, jnp.float32),
        scale=jnp.asarray(scale, jnp.float32),
        noise_std=jnp.asarray(config.noise_std, jnp.float32),
    )
    return CoverageInstance(state, truth)


def best_cover(
    members: np.ndarray, weights: np.ndarray, k: int
) -> tuple[np.ndarray, float, float, bool]:
    """Choose k sets that cover the most weight, by integer programming (host).

    Args:
        members: bool[L, n].
        weights: [n], at least 0.

    Returns:
        int32[k], what it covers, what no choice can exceed, and whether that is proven.
    """
    num_sets, num_elements = members.shape
    model = Model()
    model.hideOutput()
    model.setParam("limits/nodes", _NODES)
    model.setParam("limits/time", _SECONDS)
    x = [model.addVar(vtype="B") for _ in range(num_sets)]
    y = [model.addVar(lb=0.0, ub=1.0) for _ in range(num_elements)]
    model.addCons(quicksum(x) == k)
    for element in range(num_elements):
        holders = np.flatnonzero(members[:, element])
        model.addCons(y[element] <= quicksum(x[i] for i in holders))
    model.setObjective(
        quicksum(w * v for w, v in zip(weights, y, strict=True)), "maximize"
    )
    model.optimize()
    values = np.array([model.getVal(v) for v in x])
    chosen = np.sort(np.argsort(-values, kind="stable")[:k]).astype(np.int32)
    value = float(weights[members[chosen].any(axis=0)].sum())
    is_proven = model.getStatus() == "optimal"
    bound = value if is_proven else float(model.getDualbound())
    return chosen, value, bound, is_proven


def covered(problem: Problem, action: jax.Array) -> jax.Array:
    """Which elements the sets of an action cover: float32[n]."""
    return jnp.max(problem.features[action], axis=0)


def step(
    key: Key, state: MaxCoverageState, action: jax.Array
) -> tuple[MaxCoverageState, Outcome]:
    """Choose k sets int32[k]."""
    value = state.weights @ covered(state.problem, action)
    noise = state.noise_std * jax.random.normal(key, ())
    return state, Outcome((value + noise) / state.scale, value / state.scale)
