"""Choose kernel weights and noise by marginal likelihood.

The scales decide how far a closed-form learner gets: with fixed ones it stops well
short of the optimum on quadratic rewards. The likelihood of a Gaussian process with
kernel sum_i w_i T_i is smooth in log w, so a few dozen Adam steps on a few hundred
rows are enough, warm-started from the last fit. The unknown constant of the reward is
integrated out (restricted likelihood).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.scipy.linalg import solve_triangular

from msb_jax.masters import history as hist
from msb_jax.masters.set_kernel import overlaps

# A wide Gaussian prior on the logarithms keeps unused terms from drifting away.
PRIOR_MEAN = (0.0, 0.0, -1.0, -3.0)
PRIOR_DEVIATION = 3.0
LEARNING_RATE = 0.15


def fit_rows(history: hist.History, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Choose the rows to look at: half spread over the past, half the latest.

    Returns:
        int32[num_rows] row numbers and float32[num_rows] which of them are real.
    """
    half = num_rows // 2
    position = jnp.arange(num_rows)
    spread = position * jnp.maximum(history.count - half, 0) // max(num_rows - half, 1)
    latest = history.count - num_rows + position
    rows = jnp.where(position < num_rows - half, spread, latest)
    rows = jnp.where(history.count <= num_rows, position, rows)
    is_row = (rows < history.count).astype(jnp.float32)
    return jnp.minimum(rows, history.rewards.shape[0] - 1), is_row


def noise_floor(weights: jax.Array, min_noise: float) -> jax.Array:
    """The least noise variance: a share of the kernel's own variance.

    In float32 a pivot of the Cholesky factor carries an error of some 1e-6 of the
    kernel's variance; noise below a few hundred times that cannot be resolved.
    """
    return min_noise * jnp.sum(weights)


def negative_evidence(
    logs: jax.Array,
    grams: jax.Array,
    targets: jax.Array,
    is_row: jax.Array,
    min_noise: float,
) -> tuple[jax.Array, jax.Array]:
    """Negative log restricted likelihood and its gradient in the logarithms.

    Args:
        logs: [4] logarithms of the three weights and of the noise.
        grams: [3, n, n] the kernel terms.
        targets: [n] standardised rewards, 0 where there is no row.
        is_row: [n].
        min_noise: see `noise_floor`.
    """
    scales = jnp.exp(logs)
    size = targets.shape[0]
    gram = jnp.einsum("i,inm->nm", scales[:-1], grams)
    noise = scales[-1] + noise_floor(scales[:-1], min_noise)
    diagonal = jnp.where(is_row > 0, noise, 1.0)
    factor = jnp.linalg.cholesky(gram + jnp.diag(diagonal))
    root = solve_triangular(factor, jnp.eye(size), lower=True)
    inverse = root.T @ root
    ones = inverse @ is_row
    level = jnp.maximum(is_row @ ones, 1e-12)  # 1'K^-1 1
    projected = inverse - ones[:, None] * ones[None, :] / level
    alpha = projected @ targets
    value = 0.5 * targets @ alpha + jnp.sum(jnp.log(jnp.diagonal(factor)))
    value += 0.5 * jnp.log(level)
    # d/dw = (tr(P T) - a'Ta) / 2, and every weight also lifts the noise floor.
    slack = projected - alpha[:, None] * alpha[None, :]
    noise_slope = 0.5 * jnp.sum(jnp.diagonal(slack) * is_row)
    slopes = 0.5 * jnp.einsum("nm,inm->i", slack, grams) + min_noise * noise_slope
    gradient = jnp.concatenate([slopes, noise_slope[None]]) * scales
    pull = (logs - jnp.array(PRIOR_MEAN)) / PRIOR_DEVIATION
    value += 0.5 * jnp.sum(pull * pull)
    return value, gradient + pull / PRIOR_DEVIATION


def fit_weights(
    history: hist.History,
    tables: jax.Array,
    num_arms: int,
    log_weights: jax.Array,
    log_noise: jax.Array,
    *,
    num_rows: int,
    num_steps: int,
    min_noise: float,
) -> tuple[jax.Array, jax.Array]:
    """Fit the three weights and the noise, from the given start.

    Args:
        history: all rounds; at most `num_rows` of them are looked at.
        tables: [3, K+1] kernel terms over the overlaps.
        num_arms: L.
        log_weights: [3] start.
        log_noise: [] start.

    Returns:
        New log_weights [3] and log_noise [].
    """
    mean, deviation = hist.moments(history)
    num_rows = min(num_rows, history.rewards.shape[0])
    rows, is_row = fit_rows(history, num_rows)
    actions = history.actions[rows]
    counts = overlaps(actions, actions, num_arms)
    grams = tables[:, counts] * (is_row[:, None] * is_row[None, :])[None]
    targets = (history.rewards[rows] - mean) / deviation * is_row
    optimizer = optax.adam(LEARNING_RATE)
    start = jnp.concatenate([log_weights, log_noise[None]])

    def step(
        carry: tuple[jax.Array, optax.OptState], _: None
    ) -> tuple[tuple[jax.Array, optax.OptState], None]:
        logs, optimizer_state = carry
        _, gradient = negative_evidence(logs, grams, targets, is_row, min_noise)
        # A factorisation that failed in float32 must not poison the weights.
        gradient = jnp.where(jnp.isfinite(gradient), gradient, 0.0)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state)
        logs = jnp.clip(logs + updates, -12.0, 5.0)
        return (logs, optimizer_state), None

    (logs, _), _ = jax.lax.scan(
        step, (start, optimizer.init(start)), None, length=num_steps
    )
    return logs[:-1], logs[-1]
