"""The linear part of a master: ridge regression on K-hot sets, in closed form.

A set S is the vector x = 1_S / sqrt(K) and its standardised reward y = w'x + noise
with w ~ N(0, s^2 / rho I). The L x L matrix of joint counts is kept (exact in
float32 below 2^24 rounds), so a refit costs one Cholesky factor of size L however
long the history is. The ridge rho is moved by one step of a line search on the
marginal likelihood at every refit: it has to follow the noise, which is a hundred
times larger in one problem than in another.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from msb_jax.problem import to_multi_hot

MIN_RIDGE, MAX_RIDGE = 1e-3, 1e3
# Factors tried on the ridge at every refit.
STEPS = (0.25, 1.0, 4.0)


class Ridge(NamedTuple):
    """Counts, coefficients and scale of the linear part."""

    counts: jax.Array  # [L, L] rounds that held both arms
    weights: jax.Array  # [L] w
    log_ridge: jax.Array  # [] log rho
    noise: jax.Array  # [] s^2, in standardised units


def new_ridge(num_arms: int) -> Ridge:
    """Start with no rounds and rho = 1."""
    return Ridge(
        counts=jnp.zeros((num_arms, num_arms)),
        weights=jnp.zeros((num_arms,)),
        log_ridge=jnp.zeros(()),
        noise=jnp.ones(()),
    )


def absorb(ridge: Ridge, actions: jax.Array, num_new: jax.Array) -> Ridge:
    """Count the first `num_new` of the actions int32[b, K]."""
    is_new = jnp.arange(actions.shape[0]) < num_new
    x = jnp.where(is_new[:, None], to_multi_hot(actions, ridge.weights.shape[0]), 0.0)
    return ridge._replace(counts=ridge.counts + x.T @ x)


def refit(
    ridge: Ridge, actions: jax.Array, targets: jax.Array, count: jax.Array
) -> Ridge:
    """Solve for the weights, and move the ridge one step.

    Args:
        actions: int32[C, K], the rounds that `counts` has seen.
        targets: float32[C], standardised rewards, 0 beyond `count`.
        count: int32[].
    """
    num_arms, k = ridge.weights.shape[0], actions.shape[1]
    scatter = jnp.broadcast_to(targets[:, None], actions.shape) / math.sqrt(k)
    moment = jnp.zeros((num_arms,)).at[actions].add(scatter)  # X'y
    energy = jnp.sum(jnp.square(targets))
    num = jnp.maximum(count.astype(jnp.float32), 1.0)

    def fit(log_ridge: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        lower = _factor(ridge, log_ridge, k)
        half = solve_triangular(lower, moment, lower=True)
        # The residual never vanishes: float32 leaves 1e-6 of the energy unsure.
        left = jnp.maximum(energy - half @ half, 1e-6 * energy)
        noise = jnp.maximum(left, 1e-6) / num
        log_det = 2.0 * jnp.sum(jnp.log(jnp.diagonal(lower))) - num_arms * log_ridge
        weights = solve_triangular(lower, half, lower=True, trans=1)
        return 0.5 * (num * jnp.log(noise) + log_det), weights, noise

    bounds = math.log(MIN_RIDGE), math.log(MAX_RIDGE)
    tried = jnp.clip(ridge.log_ridge + jnp.log(jnp.array(STEPS)), *bounds)
    misfit, weights, noise = jax.vmap(fit)(tried)
    best = jnp.argmin(misfit)
    return ridge._replace(
        weights=weights[best], log_ridge=tried[best], noise=noise[best]
    )


def predict(ridge: Ridge, actions: jax.Array) -> jax.Array:
    """Evaluate w'x at actions int32[N, K]: float32[N]."""
    return ridge.weights[actions].sum(axis=-1) / math.sqrt(actions.shape[-1])


def draw_noise(key: jax.Array, ridge: Ridge, k: int, n: int) -> jax.Array:
    """Draw n posterior deviations of w from its mean: float32[n, L]."""
    lower = _factor(ridge, ridge.log_ridge, k)
    normal = jax.random.normal(key, (ridge.weights.shape[0], n))
    unit = solve_triangular(lower, normal, lower=True, trans=1)
    return jnp.sqrt(ridge.noise) * unit.T


def _factor(ridge: Ridge, log_ridge: jax.Array, k: int) -> jax.Array:
    """Compute the lower factor of X'X + rho I, [L, L]."""
    eye = jnp.eye(ridge.weights.shape[0])
    return jnp.linalg.cholesky(ridge.counts / k + jnp.exp(log_ridge) * eye)
