"""Triangular factors of a growing history, by products of blocks.

The inverse of a Cholesky factor is kept instead of the factor: products with it run at
full speed on every kind of device, triangular solves do not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

# Rows that are worked on at once.
BLOCK = 256


def lift(matrix: jax.Array, least: jax.Array) -> jax.Array:
    """Raise the eigenvalues of a small symmetric matrix to `least`.

    A Schur complement is at least the noise; rounding may say otherwise.
    """
    values, vectors = jnp.linalg.eigh(0.5 * (matrix + matrix.T))
    return (vectors * jnp.maximum(values, least)[None, :]) @ vectors.T


def lower_product(root: jax.Array, columns: jax.Array, count: jax.Array) -> jax.Array:
    """Multiply a lower triangular matrix with columns that are 0 from `count` on.

    By blocks of rows, without what is 0: half of the work in a full history, and
    less where there is room left.

    Args:
        root: [C, C], the identity from row `count` on.
        columns: [C, N].
        count: [] int32.
    """
    size, parts = root.shape[0], []

    def part(start: int, end: int) -> jax.Array:
        return jax.lax.cond(
            start < count,
            lambda root, columns: root[start:end, :end] @ columns[:end],
            lambda root, columns: jnp.zeros_like(columns[start:end]),
            root,
            columns,
        )

    for start in range(0, size, BLOCK):
        parts.append(part(start, min(start + BLOCK, size)))
    return jnp.concatenate(parts)


def invert_lower(factor: jax.Array) -> jax.Array:
    """Invert a lower triangular matrix by halves, so that most of it is products."""
    size = factor.shape[0]
    if size <= BLOCK:
        return solve_triangular(factor, jnp.eye(size), lower=True)
    half = -(-size // (2 * BLOCK)) * BLOCK
    first = invert_lower(factor[:half, :half])
    last = invert_lower(factor[half:, half:])
    below = -last @ (factor[half:, :half] @ first)
    upper = jnp.zeros((half, size - half), factor.dtype)
    return jnp.block([[first, upper], [below, last]])
