"""The linear part of a master: ridge regression on K-hot sets, in closed form.

A set S is the vector x = 1_S / sqrt(K) and its standardised reward y = w'x + noise
with w ~ N(0, s^2 / rho I). The L x L matrix of joint counts is kept (exact in
float32 below 2^24 rounds), so a refit costs one Cholesky factor of size L however
long the history is. The ridge rho is chosen by marginal likelihood: it has to follow
the noise, which is a hundred times larger in one problem than in another.

What stands on top of the linear part (the network) has to earn its place: its
forecasts of the rounds to come are compared with what the linear part left
unexplained, and only the share that came true is added (`Gate`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from msb_jax.problem import to_multi_hot

# Ridges tried by the fit; the middle one is where it starts.
RIDGES = tuple(4.0**power for power in range(-5, 6))
# Share of the past that a gate keeps at every block of rounds.
GATE_MEMORY = 0.9
# Forecasts worth this much energy are assumed half right before the first round.
GATE_PRIOR = 1.0


class Ridge(NamedTuple):
    """Counts, coefficients and scale of the linear part."""

    counts: jax.Array  # [L, L] rounds that held both arms
    lower: jax.Array  # [L, L] Cholesky factor of X'X + rho I at the last refit
    weights: jax.Array  # [L] w
    log_ridge: jax.Array  # [] log rho
    noise: jax.Array  # [] s^2, in standardised units


class Gate(NamedTuple):
    """How far forecasts of the residual came true."""

    agreement: jax.Array  # [] discounted sum of forecast * outcome
    energy: jax.Array  # [] discounted sum of forecast^2


def new_ridge(num_arms: int) -> Ridge:
    """Start with no rounds and rho = 1."""
    return Ridge(
        counts=jnp.zeros((num_arms, num_arms)),
        lower=jnp.eye(num_arms),
        weights=jnp.zeros((num_arms,)),
        log_ridge=jnp.zeros(()),
        noise=jnp.ones(()),
    )


def absorb(ridge: Ridge, actions: jax.Array, num_new: jax.Array) -> Ridge:
    """Count the first `num_new` of the actions int32[b, K]."""
    is_new = jnp.arange(actions.shape[0]) < num_new
    x = jnp.where(is_new[:, None], to_multi_hot(actions, ridge.weights.shape[0]), 0.0)
    return ridge._replace(counts=ridge.counts + x.T @ x)


def recount(ridge: Ridge, actions: jax.Array, weights: jax.Array) -> Ridge:
    """Count rows int32[C, K] anew, each with its weight [C]."""
    x = to_multi_hot(actions, ridge.weights.shape[0])
    return ridge._replace(counts=x.T @ (weights[:, None] * x))


def refit(
    ridge: Ridge,
    actions: jax.Array,
    targets: jax.Array,
    count: jax.Array,
    *,
    fit: bool,
    weights: jax.Array | None = None,
) -> Ridge:
    """Solve for the weights.

    Args:
        actions: int32[C, K], the rounds that `counts` has seen.
        targets: float32[C], standardised rewards, 0 beyond `count`.
        count: int32[].
        fit: choose rho among `RIDGES` first; static.
        weights: float32[C], of the rows as `recount` got them; None is 1 each.
    """
    num_arms, k = ridge.weights.shape[0], actions.shape[1]
    weighted, total = targets, count.astype(jnp.float32)
    if weights is not None:
        weighted, total = weights * targets, jnp.sum(weights)
    scatter = jnp.broadcast_to(weighted[:, None], actions.shape) / math.sqrt(k)
    moment = jnp.zeros((num_arms,)).at[actions].add(scatter)  # X'y
    energy = jnp.sum(weighted * targets)
    num = jnp.maximum(total, 1.0)

    def solve(log_ridge: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        rho = jnp.exp(log_ridge) * jnp.eye(num_arms)
        lower = jnp.linalg.cholesky(ridge.counts / k + rho)
        half = solve_triangular(lower, moment, lower=True)
        # Of the residual float32 leaves 1e-6 of the energy unsure.
        noise = jnp.maximum(energy - half @ half, 1e-6 * (energy + 1.0)) / num
        return lower, half, noise

    def misfit(log_ridge: jax.Array) -> jax.Array:
        lower, _, noise = solve(log_ridge)
        log_det = 2.0 * jnp.sum(jnp.log(jnp.diagonal(lower))) - num_arms * log_ridge
        return 0.5 * (num * jnp.log(noise) + log_det)

    log_ridge = ridge.log_ridge
    if fit:
        tried = jnp.log(jnp.array(RIDGES))
        log_ridge = tried[jnp.argmin(jax.lax.map(misfit, tried))]
    lower, half, noise = solve(log_ridge)
    return ridge._replace(
        lower=lower,
        weights=solve_triangular(lower, half, lower=True, trans=1),
        log_ridge=log_ridge,
        noise=noise,
    )


def predict(ridge: Ridge, actions: jax.Array) -> jax.Array:
    """Evaluate w'x at actions int32[N, K]: float32[N]."""
    return ridge.weights[actions].sum(axis=-1) / math.sqrt(actions.shape[-1])


def draw_deviations(key: jax.Array, ridge: Ridge, n: int) -> jax.Array:
    """Draw n posterior deviations of w from its mean: float32[n, L]."""
    normal = jax.random.normal(key, (ridge.weights.shape[0], n))
    unit = solve_triangular(ridge.lower, normal, lower=True, trans=1)
    return jnp.sqrt(ridge.noise) * unit.T


def new_gate() -> Gate:
    """Start without evidence."""
    return Gate(agreement=jnp.zeros(()), energy=jnp.zeros(()))


def compare(
    gate: Gate,
    forecasts: jax.Array,
    outcomes: jax.Array,
    num_new: jax.Array,
    memory: jax.Array | float = GATE_MEMORY,
) -> Gate:
    """Take in the first `num_new` of a block of forecasts and outcomes, [b] each.

    `memory` is the share of the past that is kept.
    """
    is_new = jnp.arange(forecasts.shape[0]) < num_new
    keep = jnp.where(num_new > 0, memory, 1.0)
    hits = jnp.where(is_new, forecasts * outcomes, 0.0)
    squares = jnp.where(is_new, jnp.square(forecasts), 0.0)
    return Gate(
        agreement=keep * gate.agreement + jnp.sum(hits),
        energy=keep * gate.energy + jnp.sum(squares),
    )


def share(gate: Gate) -> jax.Array:
    """Return the least-squares factor on the forecasts, within [0, 1]: []."""
    agreement = gate.agreement + 0.5 * GATE_PRIOR
    return jnp.clip(agreement / (gate.energy + GATE_PRIOR), 0.0, 1.0)
