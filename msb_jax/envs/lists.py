"""What environments with ordered lists share: sizes, arms, conflicts, ground truth.

Arms have features uniform on [0, 1]^D, and the pairs of smallest NED conflict, as in
the synthetic setting and, unless a number is given, with its density.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from msb_jax.envs.synthetic import DENSITY, GroundTruth
from msb_jax.problem import Problem, make_problem
from msb_jax.solvers.lists import BestList


@dataclass(frozen=True, kw_only=True)
class ListConfig:
    """Arms and conflicts of a setting with ordered lists."""

    num_arms: int = 100
    k: int = 10
    feature_dim: int = 10
    num_constraints: int | None = None  # conflicting pairs; None: `DENSITY` of all

    def __post_init__(self) -> None:
        if self.num_arms < 1 or self.feature_dim < 1:
            raise ValueError("num_arms and feature_dim must be at least 1.")
        if not 1 <= self.k <= self.num_arms:
            raise ValueError(f"k must be in 1..{self.num_arms}, got {self.k}.")
        most = self.num_arms * (self.num_arms - 1) // 2
        if not 0 <= self.num_conflicts <= most:
            raise ValueError(
                f"num_constraints must be in 0..{most}, the pairs of {self.num_arms} "
                f"arms, got {self.num_constraints}; lower it or raise num_arms."
            )

    @property
    def num_conflicts(self) -> int:
        """Return M."""
        if self.num_constraints is not None:
            return self.num_constraints
        return int(DENSITY * self.num_arms * (self.num_arms - 1) / 2)


def list_problem(config: ListConfig, seed: int) -> Problem:
    """Draw the features of a seed; the nearest pairs conflict (host)."""
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}.")
    stream = np.random.default_rng([seed, 0])
    features = stream.uniform(size=(config.num_arms, config.feature_dim))
    return make_problem(
        features, config.k, metric="ned", num_conflicts=config.num_conflicts
    )


def check_chances(values: ArrayLike, num_arms: int, name: str) -> np.ndarray:
    """Return probabilities as float64[L], or say what is wrong with them."""
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (num_arms,):
        raise ValueError(f"{name} must have shape ({num_arms},), got {array.shape}.")
    if not ((array >= 0) & (array <= 1)).all():
        raise ValueError(f"{name} must hold probabilities in [0, 1].")
    return array


def list_truth(found: BestList, scale: float) -> GroundTruth:
    """Report the best list in units of the reward."""
    status = {"optimal": "optimal", "least_violation": "infeasible"}
    return GroundTruth(
        reward=found.value / scale,
        upper_bound=found.bound / scale,
        status=status.get(found.status, "best_found"),
        action=found.action,
    )
