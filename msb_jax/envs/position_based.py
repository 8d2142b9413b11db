"""The position-based model: an arm at a place is clicked if it is seen and liked.

Arm e at place l is clicked with probability kappa_l theta_e, independently of the rest
of the list: kappa_l, that the place is seen, falls from kappa_1 = 1 and is known to
all; theta_e, that the arm is liked, is what there is to learn. The learner gets

    r = (sum_l kappa_l theta_{a_l} + eps) / h_max,

with h_max the best list without conflicts, and next to it the clicks, float32[K] of 0
and 1. By rearrangement the order of descending theta is best for any set.

Source: Lagree et al. 2016 (clicks); paper, appendix "Cascading bandits and
position-based bandits" (one scalar for the list); ALGORITHMS 10.1.

Differs from the paper:
* the paper gives no numbers: kappa_l = decay^(l-1), theta uniform on [0, 1], the
  sizes and conflicts of the cascade;
* units and noise are those of the synthetic setting (I-9, I-10).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from msb_jax.envs.lists import ListConfig, check_chances, list_problem, list_truth
from msb_jax.envs.synthetic import GroundTruth
from msb_jax.positions import check_decay, examination
from msb_jax.problem import Problem
from msb_jax.rng import host_seed
from msb_jax.solvers.lists import best_list
from msb_jax.types import Env, Key, Outcome


@dataclass(frozen=True, kw_only=True)
class PositionBasedConfig(ListConfig):
    """The setting."""

    decay: float = 0.9  # of being seen, from one place to the next
    noise_std: float = 0.1  # of the scalar, in units of sum kappa theta

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay(self.decay)
        if not (math.isfinite(self.noise_std) and self.noise_std >= 0):
            raise ValueError(f"noise_std must be at least 0, got {self.noise_std}.")


class PositionBasedInstance(NamedTuple):
    """One draw of the setting, on the host."""

    problem: Problem
    theta: np.ndarray  # [L]
    kappa: np.ndarray  # [K]
    scale: float  # h_max
    noise_std: float
    ground_truth: GroundTruth  # its action is ordered


class PositionBasedState(NamedTuple):
    """What the environment needs to answer. Stack states for several seeds."""

    problem: Problem
    theta: jax.Array  # [L] float32
    kappa: jax.Array  # [K] float32
    scale: jax.Array  # [] float32
    noise_std: jax.Array  # [] float32


def make_instance(config: PositionBasedConfig, seed: int) -> PositionBasedInstance:
    """Draw the instance of a seed and find its ground truth (host).

    Args:
        seed: at least 0.
    """
    problem = list_problem(config, seed)
    theta = np.random.default_rng([seed, 1]).uniform(size=config.num_arms)
    kappa = examination(config.decay, config.k)
    return instance_on(problem, theta, kappa, config.noise_std)


def instance_on(
    problem: Problem, theta: ArrayLike, kappa: ArrayLike, noise_std: float
) -> PositionBasedInstance:
    """Put the model on given arms, and find its ground truth (host).

    Args:
        problem: features and conflicts.
        theta: [L], in [0, 1], not all zero.
        kappa: [K], in [0, 1], not rising, first 1.
        noise_std: in units of sum kappa theta.
    """
    liked = check_chances(theta, problem.num_arms, "theta")
    seen = check_chances(kappa, problem.k, "kappa")
    if seen[0] != 1 or (np.diff(seen) > 0).any():
        raise ValueError("kappa must start at 1 and must not rise.")
    if not liked.any():
        raise ValueError("theta must not be zero for all arms: no list would be best.")

    def worth(values: Sequence[float]) -> float:
        return float(np.dot(seen, values))

    scale = worth(np.sort(liked)[::-1][: problem.k].tolist())
    found = best_list(liked, np.asarray(problem.conflicts), problem.k, worth)
    truth = list_truth(found, scale)
    return PositionBasedInstance(problem, liked, seen, scale, noise_std, truth)


def env_state(instance: PositionBasedInstance) -> PositionBasedState:
    """Turn an instance into the state of the environment."""
    return PositionBasedState(
        problem=instance.problem,
        theta=jnp.asarray(instance.theta, jnp.float32),
        kappa=jnp.asarray(instance.kappa, jnp.float32),
        scale=jnp.asarray(instance.scale, jnp.float32),
        noise_std=jnp.asarray(instance.noise_std, jnp.float32),
    )


def position_based(config: PositionBasedConfig) -> Env:
    """Make the environment of a setting, with a `reset` as that of `cascading`."""

    def reset(key: Key) -> PositionBasedState:
        return env_state(make_instance(config, host_seed(key)))

    return Env(reset=reset, step=step, problem=lambda state: state.problem)


def step(
    key: Key, state: PositionBasedState, action: jax.Array
) -> tuple[PositionBasedState, Outcome]:
    """Show a list int32[K] to a user."""
    noise_key, click_key = jax.random.split(key)
    chance = state.kappa * state.theta[action]  # [K]
    noise = state.noise_std * jax.random.normal(noise_key)
    outcome = Outcome(
        reward=(chance.sum() + noise) / state.scale,
        mean_reward=chance.sum() / state.scale,
        clicks=jax.random.bernoulli(click_key, chance).astype(jnp.float32),
    )
    return state, outcome
