"""Choose kernel weights and noise by marginal likelihood.

The scales decide how far a closed-form learner gets: with fixed ones it stops well
short of the optimum on quadratic rewards. The likelihood of a Gaussian process with
kernel sum_i w_i T_i is smooth in log w, so a few dozen Adam steps on a few hundred
rows are enough, warm-started from the last fit. The unknown constant of the reward is
integrated out (restricted likelihood), and the power of the `link` is fitted along.

A row holds the mean of all rounds of a set. How these scatter about it says how much
noise there is at least. The means alone say less than that: a term of the kernel under
which distinct sets have little in common looks like noise, and which sets were played
again, because they had looked good, makes the noise look smaller than it is.

Rows may count less than one round (`discount`): the likelihood of a row of weight w is
taken to the power w. As a function of the kernel that is a row of noise 1 / w; but it
brings w / 2 of the logarithm of the noise, not a half, or old rows would be evidence
that there is no noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.scipy.linalg import solve_triangular

from msb_jax.link import (
    MAX_POWER,
    MIN_POWER,
    Link,
    choose_origin,
    identity_link,
    latent_slope,
    to_latent,
)
from msb_jax.masters import history as hist

# A wide Gaussian prior on the logarithms; of the weights beside the first it only keeps
# large ones down.
PRIOR_NOISE, PRIOR_POWER = -3.0, 1.0
PRIOR_DEVIATION, POWER_DEVIATION = 3.0, 0.2
LEARNING_RATE = 0.15
# More rounds of one set than this do not make its mean surer: float32 could not tell.
MAX_PLAYS = 30.0
# Keeps divisions by what is zero before the first round finite.
TINY = 1e-12


def fit_rows(history: hist.History, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Choose rows to look at: half spread over the past, half the latest.

    The rows must be distinct sets (`history.merge`): with the noise held above its
    floor, hundreds of copies of one set would outvote everything else.

    Returns:
        int32[num_rows] row numbers and float32[num_rows] which of them are real.
    """
    count = history.count
    half = num_rows // 2
    position = jnp.arange(num_rows)
    spread = position * jnp.maximum(count - half, 0) // max(num_rows - half, 1)
    latest = count - num_rows + position
    chosen = jnp.where(position < num_rows - half, spread, latest)
    chosen = jnp.where(count <= num_rows, position, chosen)
    is_row = (chosen < count).astype(jnp.float32)
    return jnp.clip(chosen, 0, history.rewards.shape[0] - 1), is_row


def noise_floor(weights: jax.Array, min_noise: jax.Array | float) -> jax.Array:
    """The least noise variance of a round: a share of the kernel's own variance.

    In float32 a pivot of the Cholesky factor carries an error of some 1e-7 of the
    largest eigenvalue, which is the kernel's variance times the rows that are alike;
    noise below that cannot be resolved.
    """
    return min_noise * jnp.sum(weights)


class Scales(NamedTuple):
    """What the likelihood chooses."""

    log_weights: jax.Array  # [S] of the kernel terms, in units of deviation^2
    log_noise: jax.Array  # [] of one round
    floor: jax.Array  # [] added to the noise
    link: Link
    center: jax.Array  # [] of the latent values
    deviation: jax.Array  # [] their unit


def row_noise(scales: Scales, plays: jax.Array) -> jax.Array:
    """Noise variance of mean rewards over so many rounds, floor included."""
    total = jnp.exp(scales.log_noise) + scales.floor
    return total / jnp.minimum(plays, MAX_PLAYS)


def start_scales(log_weights: Sequence[float]) -> Scales:
    """Scales before the first fit."""
    return Scales(
        log_weights=jnp.array(log_weights, jnp.float32),
        log_noise=jnp.array(-2.0, jnp.float32),
        floor=jnp.array(1e-2, jnp.float32),
        link=identity_link(),
        center=jnp.zeros(()),
        deviation=jnp.ones(()),
    )


def negative_evidence(
    params: jax.Array,
    grams: jax.Array,
    targets: Callable[[jax.Array], jax.Array],
    is_row: jax.Array,
    plays: jax.Array,
    min_noise: jax.Array,
    prior: Sequence[float],
) -> tuple[jax.Array, jax.Array]:
    """Negative log restricted likelihood and its gradient.

    Args:
        params: [S + 2] logarithms of the weights and of the noise; the power.
        grams: [S, n, n] the kernel terms.
        targets: power -> [n] latent rewards, 0 where there is no row.
        is_row: [n].
        plays: [n] rounds of a row, or its weight if below 1.
        min_noise: see `noise_floor`.
        prior: [S] where the logarithms of the weights are expected.
    """
    scales, power = jnp.exp(params[:-1]), params[-1]
    gram = jnp.einsum("i,inm->nm", scales[:-1], grams)
    missing = jnp.sum(is_row * (1.0 - jnp.minimum(plays, 1.0)))
    plays = jnp.minimum(plays, MAX_PLAYS)
    one_round = scales[-1] + noise_floor(scales[:-1], min_noise)
    noise = one_round / plays
    diagonal = jnp.where(is_row > 0, noise, 1.0)
    factor = jnp.linalg.cholesky(gram + jnp.diag(diagonal))
    root = solve_triangular(factor, jnp.eye(is_row.shape[0]), lower=True)
    inverse = root.T @ root
    ones = inverse @ is_row
    level = jnp.maximum(is_row @ ones, TINY)  # 1'K^-1 1
    projected = inverse - ones[:, None] * ones[None, :] / level

    def misfit(power: jax.Array) -> jax.Array:
        latent = targets(power)
        return 0.5 * latent @ (projected @ latent)

    alpha = projected @ targets(power)
    misfit_value, power_slope = jax.value_and_grad(misfit)(power)
    value = misfit_value + jnp.sum(jnp.log(jnp.diagonal(factor)))
    value += 0.5 * jnp.log(level) - 0.5 * missing * jnp.log(one_round)
    # d/dw = (tr(P T) - a'Ta) / 2, and every weight also lifts the noise floor.
    slack = projected - alpha[:, None] * alpha[None, :]
    noise_slope = 0.5 * jnp.sum(jnp.diagonal(slack) * is_row / plays)
    noise_slope -= 0.5 * missing / one_round
    slopes = 0.5 * jnp.einsum("nm,inm->i", slack, grams) + min_noise * noise_slope
    gradient = jnp.concatenate([slopes, noise_slope[None]]) * scales
    gradient = jnp.concatenate([gradient, power_slope[None]])
    spread = jnp.full(params.shape, PRIOR_DEVIATION).at[-1].set(POWER_DEVIATION)
    pull = (params - jnp.array([*prior, PRIOR_NOISE, PRIOR_POWER])) / spread
    # A term beside the first may vanish if the rewards have no use for it: the little
    # that a pull would leave of it is doubt that no round ever takes away.
    pull = pull.at[1 : len(prior)].max(0.0)
    return value + 0.5 * jnp.sum(pull * pull), gradient + pull / spread


def repeats(
    history: hist.History, link: Link, deviation: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What the rounds of a set tell beside their mean, in all rows.

    Returns:
        Rounds beside the first one of each row [], and the squares of all rounds about
        the mean of their row [], on the latent scale and in units of `deviation`.
    """
    is_row = hist.valid_rows(history, history.count)
    slope = latent_slope(link, history.rewards) / deviation
    number = jnp.sum(is_row * jnp.maximum(history.plays - 1.0, 0.0))
    return number, jnp.sum(is_row * history.scatter * jnp.square(slope))


def repeats_evidence(
    log_noise: jax.Array, number: jax.Array, squares: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Negative log likelihood of the scatter, and its slope in `log_noise`.

    Beyond the noise that the scatter shows it is flat: sets that are played again are
    good ones, and the noise of others may be larger, as that of clicks is. The floor
    of the noise has no part in it: it is for float32, and must not be pushed down, and
    the weights with it, where there is less noise than that.
    """
    least = jnp.log(jnp.maximum(squares, TINY) / jnp.maximum(number, 1.0))
    log_noise = jnp.minimum(log_noise, least)
    ratio = squares * jnp.exp(-log_noise)
    value = 0.5 * (number * log_noise + ratio)
    return value, 0.5 * jnp.minimum(number - ratio, 0.0)


def fit_scales(
    history: hist.History,
    terms: Callable[[jax.Array], jax.Array],
    start: Scales,
    prior: Sequence[float],
    *,
    num_rows: int,
    num_steps: int,
    min_noise: jax.Array,
    fit_power: bool,
) -> Scales:
    """Fit weights, noise and power, from the given start.

    Args:
        history: merged rounds; of at most `num_rows` rows the means are looked at.
        terms: actions [n, K] -> kernel terms of every pair [S, n, n].
        start: of the last fit.
        prior: [S] where the logarithms of the weights are expected.
        num_rows, num_steps: rows looked at and Adam steps.
        min_noise: see `noise_floor`.
        fit_power: False keeps the identity link.
    """
    num_rows = min(num_rows, history.rewards.shape[0])
    rows, is_row = fit_rows(history, num_rows)
    actions, rewards = history.actions[rows], history.rewards[rows]
    plays = history.plays[rows]
    grams = terms(actions) * (is_row[:, None] * is_row[None, :])[None]
    every = hist.valid_rows(history, history.count) * jnp.minimum(history.plays, 1.0)
    # The unit must be the geometric mean of the very rows whose likelihood is taken:
    # this is what makes likelihoods of different powers comparable.
    origin = choose_origin(rewards, is_row * jnp.minimum(plays, 1.0))
    _, deviation = hist.masked_moments(history.rewards, every)

    def targets(power: jax.Array) -> jax.Array:
        latent = to_latent(origin._replace(power=power), rewards)
        return (
            (latent - jnp.sum(latent * is_row) / jnp.sum(is_row)) * is_row / deviation
        )

    optimizer = optax.adam(LEARNING_RATE)
    params = jnp.concatenate(
        [start.log_weights, start.log_noise[None], start.link.power[None]]
    )
    size = len(prior)
    low = jnp.array([-12.0] * size + [-16.0, MIN_POWER])
    high = jnp.array([5.0] * size + [3.0, MAX_POWER])
    # The power moves on a scale of tenths, the logarithms on one of units.
    pace = jnp.array([1.0] * (size + 1) + [0.3 if fit_power else 0.0])

    def step(
        carry: tuple[jax.Array, optax.OptState], nothing: None
    ) -> tuple[tuple[jax.Array, optax.OptState], None]:
        del nothing
        params, optimizer_state = carry
        _, gradient = negative_evidence(
            params, grams, targets, is_row, plays, min_noise, prior
        )
        told = repeats(history, origin._replace(power=params[-1]), deviation)
        gradient = gradient.at[size].add(repeats_evidence(params[size], *told)[1])
        # A factorisation that failed in float32 must not poison the weights.
        gradient = jnp.where(jnp.isfinite(gradient), gradient, 0.0)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state)
        params = jnp.clip(params + pace * updates, low, high)
        return (params, optimizer_state), None

    (params, _), _ = jax.lax.scan(
        step, (params, optimizer.init(params)), None, length=num_steps
    )
    link = origin._replace(power=params[-1])
    latent_center, _ = hist.masked_moments(to_latent(link, history.rewards), every)
    return Scales(
        log_weights=params[:-2],
        log_noise=params[-2],
        floor=noise_floor(jnp.exp(params[:-2]), min_noise),
        link=link,
        center=latent_center,
        deviation=deviation,
    )
