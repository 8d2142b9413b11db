"""What the neural master keeps, and what its network and its mean say of sets.

The mean is center + scale * linear part + weight * network; the weight is the scale,
times the share that the network has earned where there is a linear part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.masters import discount as forget
from msb_jax.masters import discounted_confidence as discounted
from msb_jax.masters import history as hist
from msb_jax.masters import ridge as linear
from msb_jax.masters.confidence import KINDS, MIN_RIDGE, confidence
from msb_jax.masters.scoring import check_constraints
from msb_jax.networks import ucb
from msb_jax.problem import Problem

CHOICES = {
    "confidence": KINDS,
    "radius_kind": ("constant", "theory"),
    "training": ("adam", "literal"),
    "extractor": ("least_squares", "paper"),
}


@dataclass(frozen=True, kw_only=True)
class NeuralUcbConfig:
    """Settings of the neural master."""

    width: int = 64  # m, even
    depth: int = 2  # D, number of weight matrices
    lam1: float = 1.0  # ridge of Z and of the training loss
    nu: float = 0.1  # exploration, in deviations of the rewards
    confidence: str = "exact"  # or "diagonal", "full"
    radius_kind: str = "constant"  # or "theory"
    norm_bound: float = 1.0  # S of the theoretical radius
    delta: float = 0.1  # failure probability of the theoretical radius
    training: str = "adam"  # or "literal"
    learning_rate: float | None = None  # None: 1e-2, literal 1 / (m (lam1 + t D))
    num_steps: int = 200  # training steps of a refresh, J
    batch_size: int = 64  # rounds in a step of Adam
    linear_part: bool = True
    fit_growth: float = 1.5  # choose the ridge anew after growth by this factor
    extractor: str = "least_squares"  # or "paper"
    extractor_sets: int = 32  # best played sets, around which it fits
    extractor_spread: float = 0.25  # share of arms swapped in that neighbourhood
    lam: float = 5.0  # price of the violation rate, soft constraints
    constraints: str = "soft"  # or "hard"
    capacity: int = 256  # rounds the history starts with
    block: int = 20  # rounds absorbed at once
    discount: float | str = 1.0  # weight of a round for each it is older, or "auto"
    memory: int = 384  # last rounds that count, with a discount
    min_weight: float = 1e-3  # and their least weight

    def __post_init__(self) -> None:
        ucb.check_sizes(1, self.width, self.depth)
        check_constraints(self.constraints, self.lam)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(choices)}, "
                    f"got {getattr(self, name)!r}."
                )
        for name in ("num_steps", "batch_size", "extractor_sets", "capacity", "block"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}."
                )
        if not MIN_RIDGE <= self.lam1 < math.inf:
            raise ValueError(f"lam1 must be at least {MIN_RIDGE}, got {self.lam1}.")
        if not 0 <= self.nu < math.inf or not 0 <= self.norm_bound < math.inf:
            raise ValueError(
                "nu and norm_bound must be finite and at least 0, got "
                f"{self.nu} and {self.norm_bound}."
            )
        if not 0 < self.delta < 1 or not 0 < self.extractor_spread <= 1:
            raise ValueError(
                "delta must lie in (0, 1) and extractor_spread in (0, 1], got "
                f"{self.delta} and {self.extractor_spread}."
            )
        if not 1 < self.fit_growth < math.inf:
            raise ValueError(f"fit_growth must be above 1, got {self.fit_growth}.")
        forget.check_discount(self.discount, self.memory, self.min_weight)
        if self.discount != 1.0 and self.confidence not in discounted.KINDS:
            raise ValueError(
                f"confidence={self.confidence!r} knows no discount; choose "
                f"{' or '.join(discounted.KINDS)}, or discount=1."
            )
        rate = 0.0 if self.learning_rate is None else self.learning_rate
        if self.learning_rate is not None and not 0 < rate < math.inf:
            raise ValueError(f"learning_rate must be positive, got {rate}.")
        is_theory = self.radius_kind == "theory" and self.training == "literal"
        if is_theory and rate * self.width * self.lam1 >= 1:
            raise ValueError(
                "radius_kind='theory' needs learning_rate * width * lam1 below 1; "
                "leave learning_rate out to have it chosen."
            )


class NeuralUcbState(NamedTuple):
    """Everything the neural master knows."""

    problem: Problem
    history: hist.History
    params: Any  # theta
    params_0: Any  # theta_0
    opt_state: Any
    confidence: Any
    ridge: linear.Ridge
    gate: linear.Gate
    center: jax.Array  # [] moments of the rewards at the last refresh
    scale: jax.Array  # []
    fitted: jax.Array  # [C] mean at the absorbed rounds, 0 beyond
    best: jax.Array  # [E, K] int32, the best of them
    fitted_at: jax.Array  # [] int32, rounds when the ridge was chosen
    tracker: Any = ()  # what chooses the discount, if it is "auto"


def network_for(config: NeuralUcbConfig, problem: Problem) -> ucb.UcbNet:
    """Choose the network by the size of the problem."""
    return ucb.UcbNet(problem.num_arms, config.width, config.depth)


def confidence_for(config: NeuralUcbConfig, problem: Problem) -> Any:
    """A `Confidence`, or with a discount a `DiscountedConfidence`."""
    build: Callable[..., Any] = confidence
    if config.discount != 1.0:
        build = discounted.discounted_confidence
    return build(
        config.confidence,
        num_arms=problem.num_arms,
        width=config.width,
        depth=config.depth,
        lam1=config.lam1,
    )


def step_size(config: NeuralUcbConfig, count: jax.Array) -> jax.Array:
    """Return eta: as given, or the largest that is stable for t rounds."""
    if config.learning_rate is not None:
        return jnp.asarray(config.learning_rate, jnp.float32)
    # The curvature of the loss is at most m lam1 + sum_s |g_s|^2, |g|^2 about m D.
    return 1.0 / (config.width * (config.lam1 + config.depth * count))


def weigh(config: NeuralUcbConfig, state: NeuralUcbState) -> jax.Array:
    """Weights of the absorbed rows, 0 beyond: [C]."""
    gamma = forget.present(config.discount, state.tracker)
    capacity = state.history.rewards.shape[0]
    return forget.row_weights(state.history.absorbed, capacity, gamma)


def network(
    config: NeuralUcbConfig, state: NeuralUcbState, actions: jax.Array
) -> jax.Array:
    """Evaluate the network, in standardised units: [N]."""
    net = network_for(config, state.problem)
    return ucb.predict(net, state.params, actions)


def gradients(
    config: NeuralUcbConfig, state: NeuralUcbState, actions: jax.Array
) -> ucb.Factors:
    """Take the gradients of the network in its parameters, factored."""
    net = network_for(config, state.problem)
    return ucb.factors(net, state.params, actions)


def weight(config: NeuralUcbConfig, state: NeuralUcbState) -> jax.Array:
    """Return what a unit of the network's output is worth in rewards: []."""
    if not config.linear_part:
        return state.scale
    return state.scale * linear.share(state.gate)


def mean(
    config: NeuralUcbConfig, state: NeuralUcbState, actions: jax.Array
) -> jax.Array:
    """Expect the rewards of sets: [N]."""
    straight = state.center + state.scale * linear.predict(state.ridge, actions)
    return straight + weight(config, state) * network(config, state, actions)
