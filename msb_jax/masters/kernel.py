"""What the closed-form master asks of a kernel on actions.

A kernel is a sum of terms, each of them 1 where an action meets itself, whose weights
the data choose. Beside its values the samplers need its quadratic part: on 0/1 vectors
x the kernel with a row of the history is, nearly or exactly,

    constant + sum_i a_i (R_i x) + sum_j b_j (S_j x)^2,

which turns the posterior mean into a model x'Qx + d'x + e.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.problem import Problem
from msb_jax.types import Key, Quadratic


class Expansion(NamedTuple):
    """The quadratic part of the kernel between C rows and 0/1 vectors of A arms."""

    constant: jax.Array  # []
    linear: tuple[tuple[jax.Array, jax.Array], ...]  # weights [] and rows [C, A]
    square: tuple[tuple[jax.Array, jax.Array], ...]


class PriorDraw(NamedTuple):
    """Functions drawn from the prior of the quadratic part."""

    linear: jax.Array  # [n, A]
    pair: jax.Array  # [n, A, A]
    values: jax.Array  # [n, C] at the rows


class Kernel(NamedTuple):
    """A kernel on the actions of a problem. `weights` are [S], one a term."""

    start: tuple[float, ...]  # logarithms of the weights before the first fit
    prior: tuple[float, ...]  # and where they are expected
    # problem, actions [C, K], others [N, K] -> the terms [S, C, N]
    terms: Callable[[Problem, jax.Array, jax.Array], jax.Array]
    # problem, weights, actions, others -> their weighted sum [C, N]
    value: Callable[[Problem, jax.Array, jax.Array, jax.Array], jax.Array]
    # problem, weights -> [] of an action with itself
    own: Callable[[Problem, jax.Array], jax.Array]
    # problem, weights, actions [C, K], coefficients [C] -> worth of arms alone [L]
    by_arm: Callable[[Problem, jax.Array, jax.Array, jax.Array], jax.Array]
    # problem, weights, actions [C, K], arms [A]
    expand: Callable[[Problem, jax.Array, jax.Array, jax.Array], Expansion]
    # keys of the linear and of the pair part, problem, weights, expansion,
    # actions [C, K], arms [A], number
    draw: Callable[
        [Sequence[Key], Problem, jax.Array, Expansion, jax.Array, jax.Array, int],
        PriorDraw,
    ]


def combine(model: Expansion, coefficients: jax.Array) -> Quadratic:
    """Weigh the rows of an expansion by coefficients [C] and add them up."""
    parts = [weight * (coefficients @ rows) for weight, rows in model.linear]
    pairs = [
        weight * (rows.T @ (coefficients[:, None] * rows))
        for weight, rows in model.square
    ]
    return Quadratic(
        pair=sum(pairs[1:], pairs[0]),
        linear=sum(parts[1:], parts[0]),
        offset=model.constant * jnp.sum(coefficients),
    )
