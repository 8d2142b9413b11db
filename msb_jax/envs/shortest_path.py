"""The shortest path through a grid whose delays are unknown.

A traveller goes from the upper left to the lower right corner, to the right or down at
every crossing; an edge takes a delay uniform on [0, 1], and what comes back is one
number, the time that the whole path took. The reward is the time saved against an edge
of delay 1 everywhere, in units of the best path's:

    r = (K - sum of delays + noise) / (K - the least sum),      K = edges of a path.

Source: paper, supplement, "Other O-CCOPs". It names the problem and gives no setting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax.envs.synthetic import GroundTruth
from msb_jax.problem import Problem
from msb_jax.spaces.paths import grid_edges, maximise, path_problem
from msb_jax.types import Key, Outcome


@dataclass(frozen=True, kw_only=True)
class ShortestPathConfig:
    """The setting."""

    rows: int = 10
    columns: int = 10
    noise_std: float = 0.1  # of the time of a path, in units of the largest delay

    def __post_init__(self) -> None:
        if min(self.rows, self.columns) < 1 or self.rows * self.columns < 2:
            raise ValueError(
                f"A grid needs two nodes, got {self.rows} x {self.columns}."
            )
        if not (math.isfinite(self.noise_std) and self.noise_std >= 0):
            raise ValueError(f"noise_std must be at least 0, got {self.noise_std}.")


class ShortestPathState(NamedTuple):
    """What the environment needs to answer. Stack states for several seeds."""

    problem: Problem
    delays: jax.Array  # [L]; 1 for the fillers of a shorter path
    scale: jax.Array  # [] time that the best path saves
    noise_std: jax.Array  # []


class PathInstance(NamedTuple):
    """One draw of the setting."""

    state: ShortestPathState
    ground_truth: GroundTruth


def make_instance(config: ShortestPathConfig, seed: int) -> PathInstance:
    """Draw the delays of a seed and find the shortest path (host)."""
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}.")
    last = config.rows * config.columns - 1
    problem = path_problem(grid_edges(config.rows, config.columns), 0, last)
    num_edges = problem.structure.tails.shape[0]
    delays = np.ones(problem.num_arms)
    delays[:num_edges] = np.random.default_rng([seed, 0]).uniform(size=num_edges)
    best = np.asarray(jax.jit(maximise)(problem, jnp.asarray(1.0 - delays)))
    scale = problem.k - float(delays[best].sum())
    state = ShortestPathState(
        problem=problem,
        delays=jnp.asarray(delays, jnp.float32),
        scale=jnp.asarray(scale, jnp.float32),
        noise_std=jnp.asarray(config.noise_std, jnp.float32),
    )
    return PathInstance(state, GroundTruth(1.0, 1.0, "optimal", best))


def step(
    key: Key, state: ShortestPathState, action: jax.Array
) -> tuple[ShortestPathState, Outcome]:
    """Travel along a path int32[K]."""
    saved = state.problem.k - jnp.sum(state.delays[action])
    noise = state.noise_std * jax.random.normal(key, ())
    return state, Outcome((saved + noise) / state.scale, saved / state.scale)
