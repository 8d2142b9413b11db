"""Forgetting: a round that is s rounds old counts gamma^s.

Discounted ridge regression on features a with rewards r has

    V_t  = gamma V_{t-1} + a a' + (1 - gamma) lam1 I       = sum gamma^s a a' + lam1 I
    V~_t = gamma^2 V~_{t-1} + a a' + (1 - gamma^2) lam1 I  = sum gamma^2s a a' + lam1 I
    b_t  = gamma b_{t-1} + r a

the mean V^-1 b and, as old rounds are no noisier than new ones, the covariance
V^-1 V~ V^-1 in units of the noise. Nothing of the size of the features is needed: with
G the Gram matrix of the rows, k their kernel with the candidates, w the weights of the
rows, D = noise / w and B = (G + D)^-1 k, it is

    K** - k'B - B'(D - noise) B,

the posterior covariance less what taking old rows for noisy ones has added.

Source: paper, appendix, discounted master; Russac, Vernade, Cappe 2019; ALGORITHMS 1.2.

Differs from the paper:
* V~ is discounted by gamma^2, where the paper prints gamma and the authors of D-LinUCB
  start from V (ALGORITHMS 1.2);
* weights are gamma^(t-i), never gamma^-i, which overflows; the log det of the radius
  is that of V~ / lam1 in the same scaling, or it would be negative (I-15);
* rows of little weight are let go;
* "auto" chooses gamma by how well linear models predict the next round. The model of a
  master may be curved; what it forgets is chosen by its linear part.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_factor, cho_solve

from msb_jax.masters.history import History
from msb_jax.problem import to_multi_hot

AUTO = "auto"
# What "auto" chooses from, ascending.
DISCOUNTS = (0.9, 0.95, 0.98, 0.99, 0.995, 1.0)
# Ridge of the linear models that "auto" compares, with the features 1_S / sqrt(K).
RIDGE = 0.1
# Weight of an older prediction error, a round.
ERROR_MEMORY = 0.99
# Errors this close count as equal.
TIE = 0.01


class Recursions(NamedTuple):
    """Sums of a discounted ridge regression."""

    gram: jax.Array  # [p, p] V
    squared: jax.Array  # [p, p] V~
    moment: jax.Array  # [p] b


class Tracker(NamedTuple):
    """Linear models with every discount of the grid, and how well they predict."""

    models: Recursions  # [G, ...] of p = L + 1 features
    errors: jax.Array  # [G] discounted sum of squared one-step-ahead errors
    level: jax.Array  # [] the first reward
    seen: jax.Array  # [] int32, rounds


def check_discount(discount: float | str, memory: int, min_weight: float) -> None:
    """Raise ValueError unless these are settings that a master can take."""
    is_number = isinstance(discount, float | int)
    if discount != AUTO and not (is_number and 0 < float(discount) <= 1):
        raise ValueError(
            f"discount must be a number in (0, 1] or {AUTO!r}, got {discount!r}."
        )
    if memory < 1:
        raise ValueError(f"memory must be at least 1 row, got {memory}.")
    if not 0 < min_weight < 1:
        raise ValueError(f"min_weight must be in (0, 1), got {min_weight}.")


def start_recursions(size: int, lam1: float) -> Recursions:
    """Begin without a round: V = V~ = lam1 I, b = 0."""
    ridge = lam1 * jnp.eye(size)
    return Recursions(gram=ridge, squared=ridge, moment=jnp.zeros((size,)))


def update_recursions(
    state: Recursions,
    features: jax.Array,
    reward: jax.Array,
    gamma: jax.Array | float,
    lam1: float,
) -> Recursions:
    """Take in one round.

    Args:
        state: the sums so far.
        features: [p].
        reward: [].
        gamma: the discount; 1 is ridge regression.
        lam1: the ridge.
    """
    outer = features[:, None] * features[None, :]
    ridge = lam1 * jnp.eye(features.shape[0], dtype=features.dtype)
    square = gamma * gamma
    return Recursions(
        gram=gamma * state.gram + outer + (1.0 - gamma) * ridge,
        squared=square * state.squared + outer + (1.0 - square) * ridge,
        moment=gamma * state.moment + reward * features,
    )


def row_weights(count: jax.Array, capacity: int, gamma: jax.Array | float) -> jax.Array:
    """Weights gamma^(count - 1 - i) of the rows i < count, 0 beyond: float32[C]."""
    age = (count - 1 - jnp.arange(capacity)).astype(jnp.float32)
    weights = jnp.power(jnp.asarray(gamma, jnp.float32), jnp.maximum(age, 0.0))
    return jnp.where(age >= 0, weights, 0.0)


def num_kept(gamma: jax.Array | float, memory: int, min_weight: float) -> jax.Array:
    """How many of the last rows are kept: those of weight `min_weight`, int32[]."""
    rate = -jnp.log(jnp.asarray(gamma, jnp.float32))
    # Below 1e-9 the discount is 1, and float32 would count to infinity.
    rows = 1.0 - math.log(min_weight) / jnp.maximum(rate, 1e-9)
    return jnp.minimum(jnp.floor(rows), memory).astype(jnp.int32)


def overcount(solved: jax.Array, noises: jax.Array, noise: jax.Array) -> jax.Array:
    """A root R of what old rows add to the covariance by counting as noisy ones.

    Args:
        solved: [C, N] B = (G + D)^-1 k, 0 where there is no row.
        noises: [C] the diagonal D.
        noise: [] of a row of weight 1.

    Returns:
        [C, N] R with R'R = B'(D - noise) B.
    """
    return jnp.sqrt(jnp.maximum(noises - noise, 0.0))[:, None] * solved


def new_tracker(num_arms: int) -> Tracker:
    """Begin without a round."""
    number = len(DISCOUNTS)
    one = start_recursions(num_arms + 1, RIDGE)
    return Tracker(
        models=jax.tree.map(lambda leaf: jnp.stack([leaf] * number), one),
        errors=jnp.zeros((number,)),
        level=jnp.zeros(()),
        seen=jnp.zeros((), jnp.int32),
    )


def track(tracker: Tracker, action: jax.Array, reward: jax.Array) -> Tracker:
    """Predict one round by every model, then take it in: O(L^3).

    Args:
        tracker: the models.
        action: int32[K].
        reward: [].
    """
    num_arms = tracker.models.moment.shape[1] - 1
    hot = to_multi_hot(action, num_arms) / math.sqrt(action.shape[0])
    features = jnp.append(hot, 1.0)
    level = jnp.where(tracker.seen > 0, tracker.level, reward)

    def one(model: Recursions, gamma: jax.Array) -> tuple[Recursions, jax.Array]:
        weights = cho_solve(cho_factor(model.gram, lower=True), model.moment)
        error = reward - level - features @ weights
        model = update_recursions(model, features, reward - level, gamma, RIDGE)
        return model, jnp.square(error)

    models, errors = jax.vmap(one)(tracker.models, jnp.array(DISCOUNTS))
    return Tracker(
        models=models,
        errors=ERROR_MEMORY * tracker.errors + errors,
        level=level,
        seen=tracker.seen + 1,
    )


def track_history(tracker: Any, history: History) -> Any:
    """Take in the rows that wait in a history; without a tracker, nothing."""
    if not tracker:
        return tracker
    end = jnp.minimum(history.count, history.rewards.shape[0])

    def take(i: jax.Array, tracker: Tracker) -> Tracker:
        return track(tracker, history.actions[i], history.rewards[i])

    return jax.lax.fori_loop(history.absorbed, end, take, tracker)


def choose(errors: jax.Array) -> jax.Array:
    """The discount of least error [G]; of equals the one that forgets least: []."""
    # A model whose algebra broke down has no say.
    errors = jnp.where(jnp.isfinite(errors), errors, jnp.inf)
    is_best = errors <= (1.0 + TIE) * jnp.min(errors)
    return jnp.max(jnp.where(is_best, jnp.array(DISCOUNTS), 0.0))


def present(discount: float | str, tracker: Any) -> jax.Array:
    """The discount of now: as given, or what the tracker chooses: []."""
    if discount == AUTO:
        return choose(tracker.errors)
    return jnp.asarray(float(discount), jnp.float32)


def memory(discount: float | str, tracker: Any) -> jax.Array:
    """Rounds that count in all, sum of gamma^s: []."""
    return 1.0 / jnp.maximum(1.0 - present(discount, tracker), 1e-9)
