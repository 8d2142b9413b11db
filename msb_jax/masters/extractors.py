"""Quadratic models of a set function, for the solvers.

The paper (solver sampler, "Second-order information extractor") assumes
h'(x) = x'Qx + d'x + e and reads Q, d, e off the values b_i = h'(e_i),
o_ij = h'((e_i + e_j) / sqrt(2)) and e = h'(0):

    Q_ij = o_ij + sqrt(2)/4 (o_ii + o_jj) - (1 + sqrt(2))/2 (b_i + b_j) + sqrt(2)/2 e,
    Q_ii = (o_ii - sqrt(2) (b_i - e) - e) / (2 - sqrt(2)),    d_i = b_i - Q_ii - e.

`quadratic_from_function` is that, for any function. It looks at vectors of one and
two arms, far from sets of K arms, where a network has never seen data. The other way
(`fit_units`, `smooth_quadratic`) is the least-squares quadratic of every hidden unit
over the region where the good sets are.

All models are returned in units of the K-hot x: the network sees x / sqrt(K).

Differs from the paper (I-1):
* o_ii is h'(sqrt(2) e_i), the only reading under which the formulas are right;
* the model keeps the linear term d'x, which problem (5) drops, and the scale of the
  input, pair = Q / K and linear = d / sqrt(K). With the bias-free network Q_ii = 0
  and a linear h' has Q = 0: x'Qx alone would say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm

from msb_jax.networks import ucb
from msb_jax.types import Quadratic

_ROOT = math.sqrt(2.0)


def quadratic_from_function(
    h: Callable[[jax.Array], jax.Array], num_arms: int, k: int = 1
) -> Quadratic:
    """Apply the paper's second-order extractor to any function of an L-vector.

    Exact if h is quadratic: pair, linear and offset then reproduce h(x / sqrt(K)).

    Args:
        h: float32[L] -> float32[].
        num_arms: L.
        k: arms in an action, for the units of the result.
    """
    if num_arms < 1 or k < 1:
        raise ValueError(f"num_arms and k must be at least 1, got {num_arms} and {k}.")
    eye = jnp.eye(num_arms)

    def row(unit: jax.Array) -> jax.Array:
        return jax.vmap(h)((eye + unit[None, :]) / _ROOT)

    return quadratic_from_values(
        single=jax.vmap(h)(eye),
        pairs=jax.lax.map(row, eye),  # row by row: L^2 vectors would not fit
        zero=h(jnp.zeros((num_arms,))),
        k=k,
    )


def quadratic_from_values(
    single: jax.Array, pairs: jax.Array, zero: jax.Array, k: int
) -> Quadratic:
    """Solve for Q, d, e from the values of h'.

    Args:
        single: [L] b_i = h'(e_i).
        pairs: [L, L] o_ij = h'((e_i + e_j) / sqrt(2)); on the diagonal
            h'(sqrt(2) e_i).
        zero: [] e = h'(0).
        k: arms in an action.
    """
    double = jnp.diagonal(pairs)  # [L]
    side = _ROOT / 4.0 * double - (1.0 + _ROOT) / 2.0 * single
    matrix = pairs + side[:, None] + side[None, :] + _ROOT / 2.0 * zero
    diagonal = (double - _ROOT * (single - zero) - zero) / (2.0 - _ROOT)
    eye = jnp.eye(single.shape[0], dtype=bool)
    matrix = jnp.where(eye, jnp.diag(diagonal), matrix)
    return Quadratic(
        pair=matrix / k,
        linear=(single - diagonal - zero) / math.sqrt(k),
        offset=zero,
    )


class UnitFit(NamedTuple):
    """Quadratics level + slope (z - center) + curve (z - center)^2 of m units."""

    center: jax.Array  # [m]
    level: jax.Array  # [m]
    slope: jax.Array  # [m]
    curve: jax.Array  # [m]


def fit_units(rows: jax.Array, elites: jax.Array, spread: float) -> UnitFit:
    """Fit relu(v_j'x / sqrt(K)) by a quadratic of its input, near some sets.

    If the input of a unit is z ~ N(mu, sigma^2), the least-squares quadratic of
    relu(z) has slope Phi(mu / sigma) and curvature phi(mu / sigma) / (2 sigma) at mu
    (its Hermite expansion), and a weighted sum of these is the least-squares
    quadratic of the sum. mu and sigma come from the given sets, widened by what
    random swaps of a share `spread` of the arms would do.

    Args:
        rows: [L, m] first-layer weights v.
        elites: int32[E, K] sets around which the fit is made.
        spread: share of swapped arms, in (0, 1].
    """
    inputs = rows[elites].sum(axis=1) / math.sqrt(elites.shape[1])  # [E, m]
    center = inputs.mean(axis=0)
    variance = inputs.var(axis=0) + spread * rows.var(axis=0) + 1e-12
    deviation = jnp.sqrt(variance)
    slope = norm.cdf(center / deviation)
    density = norm.pdf(center / deviation)
    curve = density / (2.0 * deviation)
    level = center * slope + deviation * density - curve * variance
    return UnitFit(center=center, level=level, slope=slope, curve=curve)


def smooth_quadratic(
    fit: UnitFit, rows: jax.Array, outgoing: jax.Array, k: int
) -> Quadratic:
    """Add up the units: the quadratic nearest to sum_j u_j relu(v_j'x / sqrt(K)).

    Args:
        fit: of `fit_units`.
        rows: [A, m] first-layer weights of the arms that the model is wanted for.
        outgoing: [m] weights u of the units in the output.
        k: arms in an action.
    """
    weighted = rows * (outgoing * fit.curve)[None, :]
    tangent = fit.slope - 2.0 * fit.curve * fit.center
    constant = fit.level - fit.slope * fit.center + fit.curve * fit.center**2
    return Quadratic(
        pair=weighted @ rows.T / k,
        linear=rows @ (outgoing * tangent) / math.sqrt(k),
        offset=outgoing @ constant,
    )


class NetworkExtractor(NamedTuple):
    """A trained network and how it is to be read."""

    net: ucb.UcbNet
    params: ucb.Params
    k: int  # arms in an action
    sets: jax.Array  # [E, K] int32, around which the least-squares model fits
    spread: float  # of `fit_units`
    is_literal: bool  # the paper's values at one and two arms instead


def network_marginals(extractor: NetworkExtractor) -> jax.Array:
    """Return the first-order model of the network: float32[L].

    The paper's b_i = f(e_i), or what an arm adds to a set near the given ones.
    """
    net, params = extractor.net, extractor.params
    rows = ucb.first_weights(params)  # [L, m]
    if extractor.is_literal:
        return ucb.predict_entered(net, params, rows)
    if net.depth == 1:
        return math.sqrt(net.width / extractor.k) * rows[:, 0]
    outgoing = ucb.outgoing_weights(net, params, extractor.sets)
    fit = fit_units(rows, extractor.sets, extractor.spread)
    return rows @ (outgoing * fit.slope) / math.sqrt(extractor.k)


def network_quadratic(extractor: NetworkExtractor, arms: jax.Array) -> Quadratic:
    """Return the second-order model of the network on sets within arms int32[A]."""
    net, params, k = extractor.net, extractor.params, extractor.k
    rows = ucb.first_weights(params)  # [L, m]
    local = rows[arms]  # [A, m]
    if extractor.is_literal:

        def pairs_with(row: jax.Array) -> jax.Array:
            entered = (local + row[None, :]) / _ROOT
            return ucb.predict_entered(net, params, entered)

        single = ucb.predict_entered(net, params, local)
        pairs = jax.lax.map(pairs_with, local)
        return quadratic_from_values(single, pairs, jnp.zeros(()), k)
    if net.depth == 1:
        return Quadratic(
            pair=jnp.zeros((arms.shape[0], arms.shape[0])),
            linear=math.sqrt(net.width / k) * local[:, 0],
            offset=jnp.zeros(()),
        )
    outgoing = ucb.outgoing_weights(net, params, extractor.sets)
    fit = fit_units(rows, extractor.sets, extractor.spread)
    model = smooth_quadratic(fit, local, outgoing, k)
    if net.depth == 2:
        return model
    # Layers above were taken for linear: shift the model to their value on the sets.
    inputs = rows[extractor.sets].sum(axis=1) / math.sqrt(k)  # [E, m]
    average = outgoing @ (fit.level + fit.curve * inputs.var(axis=0))
    true = ucb.predict(net, params, extractor.sets).mean()
    return model._replace(offset=model.offset + true - average)
