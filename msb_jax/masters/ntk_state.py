"""What the closed-form master keeps, and the linear algebra on it.

The rounds are rows of a Gram matrix K; `root` is the inverse of the Cholesky factor of
K + s I, so that every solve is a matrix product. With R = root, whitened columns are
R k(history, actions), and their products are what the history explains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.link import to_latent
from msb_jax.masters import discount as forget
from msb_jax.masters import history as hist
from msb_jax.masters.evidence import TINY, Scales, row_noise
from msb_jax.masters.kernel import Kernel
from msb_jax.masters.list_kernel import list_kernel
from msb_jax.masters.set_kernel import set_kernel
from msb_jax.masters.triangular import lower_product
from msb_jax.problem import ORDERED, Problem

KernelOf = Callable[[Problem], Kernel]


@dataclass(frozen=True, kw_only=True)
class NtkUcbConfig:
    """Settings of the closed-form master."""

    depth: int = 2  # weight matrices of the network whose limit is taken
    radius: float = 3.0  # of the confidence, in posterior deviations
    # Rounds for unknown sets: a share of so many over t for each exchange of an arm.
    explore: float = 0.018  # 0: never widen
    lam: float = 5.0  # price of the violation rate (soft constraints)
    constraints: str = "soft"  # or "hard"
    block: int = 20  # rows absorbed at once
    fit_rows: int = 512  # rows the marginal likelihood looks at
    fit_steps: int = 30
    fit_growth: float = 1.2  # refit when the rounds have grown by this factor
    fit_rounds: int = 256  # or by so many
    fit_power: bool = True  # False: model the reward itself
    tangent: bool = True  # False: the linear and the quadratic term alone
    min_noise: float = 5e-4  # share of the kernel's variance; keeps float32 safe
    many_rows: int = 1024  # beyond these the share grows with the rows
    discount: float | str = 1.0  # weight of a round for each it is older, or "auto"
    memory: int = 384  # last rounds that count, with a discount
    min_weight: float = 1e-3  # and their least weight

    def __post_init__(self) -> None:
        if self.depth < 2:
            raise ValueError(f"depth must be at least 2, got {self.depth}.")
        if self.radius < 0 or self.explore < 0:
            raise ValueError(
                "radius and explore must not be negative, got "
                f"{self.radius} and {self.explore}."
            )
        if self.constraints not in ("soft", "hard"):
            raise ValueError(
                f"constraints must be 'soft' or 'hard', got {self.constraints!r}."
            )
        if self.block < 1 or self.fit_rows < 8 or self.fit_growth <= 1:
            raise ValueError(
                "block must be >= 1, fit_rows >= 8 and fit_growth > 1, got "
                f"{self.block}, {self.fit_rows} and {self.fit_growth}."
            )
        if self.fit_rounds < 1 or self.many_rows < 1:
            raise ValueError(
                "fit_rounds and many_rows must be positive, got "
                f"{self.fit_rounds} and {self.many_rows}."
            )
        if not 0 < self.min_noise < 1:
            raise ValueError(f"min_noise must be in (0, 1), got {self.min_noise}.")
        forget.check_discount(self.discount, self.memory, self.min_weight)


class NtkUcbState(NamedTuple):
    """Everything the closed-form master knows."""

    problem: Problem
    history: hist.History
    root: jax.Array  # [C, C] inverse Cholesky factor of K + noise; identity beyond
    whitened: jax.Array  # [C, 2] root times (standardised latent rewards, ones)
    scales: Scales
    fitted_at: jax.Array  # [] int32, rounds told at the last fit of the weights
    num_fits: jax.Array  # [] int32
    stretch: jax.Array  # [] log of what the radius is widened by
    tracker: Any = ()  # what chooses the discount, if it is "auto"


def kernel_for(config: NtkUcbConfig) -> KernelOf:
    """Choose a kernel by the kind of the problem: lists have one of their own."""
    sets, lists = set_kernel(config.depth, config.tangent), list_kernel()

    def kernel_of(problem: Problem) -> Kernel:
        return lists if problem.space == ORDERED else sets

    return kernel_of


def kernel_values(
    kernel_of: KernelOf, state: NtkUcbState, actions: jax.Array, others: jax.Array
) -> jax.Array:
    """Kernel values of every pair: [C, N]."""
    weights = jnp.exp(state.scales.log_weights)
    return kernel_of(state.problem).value(state.problem, weights, actions, others)


def diagonal(state: NtkUcbState, is_row: jax.Array) -> jax.Array:
    """Noise of the rows of the history, 1 where there is none: [C]."""
    noise = row_noise(state.scales, state.history.plays)
    return jnp.where(is_row > 0, noise, 1.0)


def fresh_noise(state: NtkUcbState) -> jax.Array:
    """Noise of one round: []."""
    return row_noise(state.scales, jnp.ones(()))


def standardised(state: NtkUcbState, rewards: jax.Array) -> jax.Array:
    """Rewards on the latent scale, centred and in units of their deviation."""
    scales = state.scales
    return (to_latent(scales.link, rewards) - scales.center) / scales.deviation


def whiten(state: NtkUcbState, columns: jax.Array) -> jax.Array:
    """Apply root to columns [C, N] that are 0 beyond the rows of the history."""
    return lower_product(state.root, columns, state.history.absorbed)


def cross_columns(
    kernel_of: KernelOf, state: NtkUcbState, actions: jax.Array
) -> jax.Array:
    """Whitened kernel columns, root k(history, actions): [C, N]."""
    is_row = hist.valid_rows(state.history, state.history.absorbed)
    values = kernel_values(kernel_of, state, state.history.actions, actions)
    return whiten(state, values * is_row[:, None])


def solution(state: NtkUcbState, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Take the least-squares constant out of whitened columns [C, N].

    Returns:
        The columns without it [C, N] and the constants [N].
    """
    ones = state.whitened[:, 1]
    level = ones @ columns / jnp.maximum(ones @ ones, TINY)
    return columns - ones[:, None] * level[None, :], level


def target(
    state: NtkUcbState,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whitened residual [C] in units of the deviation; constant; deviation."""
    residual, level = solution(state, state.whitened[:, :1])
    scales = state.scales
    constant = scales.center + scales.deviation * level[0]
    return residual[:, 0], constant, scales.deviation


def unwhiten(state: NtkUcbState, rows: jax.Array) -> jax.Array:
    """Apply root' to rows [N, C]; a product from the left reads root in order."""
    return rows @ state.root


def coefficients(state: NtkUcbState) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(K + s I)^-1 applied to the residual; the constant; the deviation."""
    residual, constant, deviation = target(state)
    return unwhiten(state, residual[None, :])[0], constant, deviation


def doubt(state: NtkUcbState, v: jax.Array) -> jax.Array:
    """Deviation that comes from not knowing the constant: [N]."""
    ones = state.whitened[:, 1]
    return (1.0 - v.T @ ones) / jnp.sqrt(jnp.maximum(ones @ ones, TINY))
