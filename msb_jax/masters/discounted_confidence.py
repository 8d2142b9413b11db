"""How sure a network that forgets is of a set: g'Z^{-1} Z~ Z^{-1}g / m.

Z and Z~ are V and V~ of `discount` on the gradients g / sqrt(m) of the rounds, each
taken at the weights with which it was played. Two kinds, as in `confidence`:

* "exact"     by the Gram matrix of the rows that are kept. The ridge of a row is lam1
              over its weight; weights change with every round, so the Cholesky factor
              is made anew once a refresh (`settle`);
* "diagonal"  both matrices replaced by their diagonals, v and v~: recursions without
              rows, and the variance sum g^2 v~ / (m v^2).

Source: paper, appendix, discounted master; ALGORITHMS 1.2.

Differs from the paper: see `discount`. A full Z^{-1} is not offered: its update is not
of rank one any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from msb_jax.masters.confidence import (
    DiagonalState,
    confidence,
    dots,
    gram,
    grow_rows,
    norms,
    solve_upper,
    spread_squares,
    squares,
)
from msb_jax.masters.discount import overcount
from msb_jax.networks.ucb import Factors, flat_gradients

KINDS = ("exact", "diagonal")

State = Any


class DiscountedConfidence(NamedTuple):
    """One kind of confidence, as pure functions."""

    init: Callable[[int, int], State]  # capacity, K
    # (state, Factors, num_new, gamma): the first num_new rows, oldest first
    absorb: Callable[[State, Factors, jax.Array, jax.Array], State]
    # (state, first, weights [C]): let go of the rows before `first`, weigh the others
    settle: Callable[[State, jax.Array, jax.Array], State]
    variance: Callable[[State, Factors], jax.Array]  # [N]
    covariance: Callable[[State, Factors], jax.Array]  # [N, N]
    log_det: Callable[[State], jax.Array]  # [] log det(Z~ / lam1)
    grow: Callable[[State, int], State]  # raise the capacity


class WeightedState(NamedTuple):
    """Factored gradients of the rows kept, and the factor of their weighted Gram."""

    rows: Factors  # [C, ...]
    weights: jax.Array  # [C] 0 where there is no row
    upper: jax.Array  # [C, C] U with U'U = K + lam1 / weights, identity beyond
    num_rows: jax.Array  # [] int32


class DiagonalsState(NamedTuple):
    """The diagonals of Z and of Z~."""

    plain: DiagonalState
    squared: DiagonalState


def discounted_confidence(
    kind: str, *, num_arms: int, width: int, depth: int, lam1: float
) -> DiscountedConfidence:
    """Build one kind of confidence for networks of the given sizes; see `KINDS`."""
    if kind not in KINDS:
        raise ValueError(
            f"With a discount, confidence must be one of {', '.join(KINDS)}, "
            f"got {kind!r}."
        )
    if kind == "exact":
        return _exact(num_arms, width, depth, lam1)
    return _diagonal(num_arms, width, depth, lam1)


def _exact(num_arms: int, width: int, depth: int, lam1: float) -> DiscountedConfidence:
    plain = confidence("exact", num_arms=num_arms, width=width, depth=depth, lam1=lam1)

    def init(capacity: int, k: int) -> WeightedState:
        empty = plain.init(capacity, k)
        return WeightedState(
            rows=empty.rows,
            weights=jnp.zeros((capacity,)),
            upper=empty.upper,
            num_rows=empty.num_rows,
        )

    def absorb(
        state: WeightedState, new: Factors, num_new: jax.Array, gamma: jax.Array
    ) -> WeightedState:
        del gamma
        block = jnp.arange(new.actions.shape[0])
        capacity = state.weights.shape[0]
        place = jnp.where(block < num_new, state.num_rows + block, capacity)
        rows = jax.tree.map(
            lambda old, rows: old.at[place].set(rows, mode="drop"), state.rows, new
        )
        return state._replace(rows=rows, num_rows=state.num_rows + num_new)

    def noises(state: WeightedState) -> jax.Array:
        """Ridge of every row, 1 where there is none: [C]."""
        is_row = state.weights > 0
        return jnp.where(is_row, lam1 / jnp.where(is_row, state.weights, 1.0), 1.0)

    def inner(state: WeightedState) -> jax.Array:
        """Gram matrix of the rows, 0 where there is none: [C, C]."""
        is_row = state.weights > 0
        is_pair = is_row[:, None] & is_row[None, :]
        return jnp.where(is_pair, gram(state.rows, state.rows, num_arms, width), 0.0)

    def settle(
        state: WeightedState, first: jax.Array, weights: jax.Array
    ) -> WeightedState:
        size = weights.shape[0]
        source = jnp.minimum(jnp.arange(size) + first, size - 1)
        state = state._replace(
            rows=jax.tree.map(lambda leaf: leaf[source], state.rows),
            weights=weights,
            num_rows=state.num_rows - first,
        )
        full = inner(state) + jnp.diag(noises(state))
        return state._replace(upper=jnp.linalg.cholesky(full).T)

    def explained(state: WeightedState, new: Factors) -> jax.Array:
        """Columns whose products are taken off the prior covariance: [2C, N]."""
        cross = gram(state.rows, new, num_arms, width)
        cross = jnp.where((state.weights > 0)[:, None], cross, 0.0)
        v = solve_upper(state.upper, cross)
        solved = solve_triangular(state.upper, v, lower=False)
        extra = overcount(solved, noises(state), jnp.asarray(lam1))
        return jnp.concatenate([v, extra])

    def floor(state: WeightedState, norm: jax.Array) -> jax.Array:
        # Z is at most lam1 + trace and Z~ at least lam1: what is left where the
        # difference of nearly equal numbers says nothing any more.
        most = lam1 + jnp.sum(state.weights * norms(state.rows, width))
        return norm * lam1 / jnp.square(most)

    def variance(state: WeightedState, new: Factors) -> jax.Array:
        norm = norms(new, width)
        left = norm - jnp.sum(jnp.square(explained(state, new)), axis=0)
        return jnp.maximum(left / lam1, floor(state, norm))

    def covariance(state: WeightedState, new: Factors) -> jax.Array:
        prior = gram(new, new, num_arms, width)
        known = explained(state, new)
        cov = (prior - dots(known.T, known.T)) / lam1
        missing = floor(state, jnp.diagonal(prior)) - jnp.diagonal(cov)
        return cov + jnp.diag(jnp.maximum(missing, 0.0))

    def log_det(state: WeightedState) -> jax.Array:
        w = state.weights
        scaled = w[:, None] * inner(state) * w[None, :] / lam1
        lower = jnp.linalg.cholesky(scaled + jnp.eye(w.shape[0]))
        return 2.0 * jnp.sum(jnp.log(jnp.diagonal(lower)))

    def grow(state: WeightedState, capacity: int) -> WeightedState:
        old = state.weights.shape[0]
        if capacity <= old:
            return state
        rows, upper = grow_rows(state.rows, state.upper, capacity)
        weights = jnp.pad(state.weights, (0, capacity - old))
        return state._replace(rows=rows, weights=weights, upper=upper)

    return DiscountedConfidence(
        init, absorb, settle, variance, covariance, log_det, grow
    )


def _diagonal(
    num_arms: int, width: int, depth: int, lam1: float
) -> DiscountedConfidence:
    plain = confidence(
        "diagonal", num_arms=num_arms, width=width, depth=depth, lam1=lam1
    )

    def init(capacity: int, k: int) -> DiagonalsState:
        ridge = plain.init(capacity, k)
        return DiagonalsState(plain=ridge, squared=jax.tree.map(jnp.copy, ridge))

    def absorb(
        state: DiagonalsState, new: Factors, num_new: jax.Array, gamma: jax.Array
    ) -> DiagonalsState:
        square = squares(new, width)
        age = (num_new - 1 - jnp.arange(new.actions.shape[0])).astype(jnp.float32)

        def recur(diagonal: DiagonalState, rate: jax.Array) -> DiagonalState:
            """The recursion over num_new rounds at once."""
            keep = jnp.power(rate, num_new.astype(jnp.float32))
            weight = jnp.where(age >= 0, jnp.power(rate, jnp.maximum(age, 0.0)), 0.0)
            faded = jax.tree.map(lambda x: keep * (x - lam1) + lam1, diagonal)
            return spread_squares(faded, square, new.actions, weight)

        return DiagonalsState(
            plain=recur(state.plain, gamma),
            squared=recur(state.squared, jnp.square(gamma)),
        )

    def settle(
        state: DiagonalsState, first: jax.Array, weights: jax.Array
    ) -> DiagonalsState:
        del first, weights
        return state

    def inverse(state: DiagonalsState) -> DiagonalState:
        """The diagonal z~ / z^2, by layers."""
        return jax.tree.map(lambda z, t: t / jnp.square(z), state.plain, state.squared)

    def variance(state: DiagonalsState, new: Factors) -> jax.Array:
        square, inside = squares(new, width), inverse(state)
        arms = jnp.sum(inside.first[new.actions], axis=1)  # [N, m]
        total = jnp.sum(square.first * arms, axis=1) + square.last @ inside.last
        return total + jnp.tensordot(square.hidden, inside.hidden, axes=3)

    def covariance(state: DiagonalsState, new: Factors) -> jax.Array:
        inside = jnp.concatenate([x.reshape(-1) for x in inverse(state)])
        grads = flat_gradients(new, num_arms, width) / math.sqrt(width)
        scaled = grads * jnp.sqrt(inside)[None, :]
        return dots(scaled, scaled)

    def log_det(state: DiagonalsState) -> jax.Array:
        return plain.log_det(state.squared)

    return DiscountedConfidence(
        init, absorb, settle, variance, covariance, log_det, plain.grow
    )
