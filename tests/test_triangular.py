"""Products and inverses of triangular factors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.masters.triangular import invert_lower, lift, lower_product


@pytest.mark.parametrize("size", [3, 256, 600])
def test_lower_product__is_the_product(size: int) -> None:
    keys = jax.random.split(jax.random.key(0))
    lower = jnp.tril(jax.random.normal(keys[0], (size, size)))
    columns = jax.random.normal(keys[1], (size, 4))
    counts = jnp.asarray([0, 1, min(257, size), size])
    is_row = jnp.arange(size)[None, :] < counts[:, None]  # [4, size]
    roots = jnp.where(is_row[:, :, None], lower[None], jnp.eye(size)[None])
    masked = columns[None] * is_row[:, :, None]
    many = jax.jit(jax.vmap(lower_product))(roots, masked, counts)
    for root, known, count, product in zip(roots, masked, counts, many, strict=True):
        np.testing.assert_allclose(product, root @ known, atol=1e-4)
        one = jax.jit(lower_product)(root, known, count)
        np.testing.assert_allclose(one, product, atol=1e-4)


@pytest.mark.parametrize("size", [1, 256, 700])
def test_invert_lower__is_the_inverse(size: int) -> None:
    noise = np.random.default_rng(0).normal(size=(size, size))
    factor = np.tril(noise, -1) / size + np.eye(size)
    inverse = np.asarray(invert_lower(jnp.asarray(factor, jnp.float32)))
    np.testing.assert_allclose(inverse @ factor, np.eye(size), atol=1e-5)
    np.testing.assert_array_equal(np.triu(inverse, 1), 0.0)


def test_lift__raises_small_eigenvalues_alone() -> None:
    vectors = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
    matrix = vectors @ np.diag([-1.0, 0.05, 0.5, 2.0]) @ vectors.T
    lifted = lift(jnp.asarray(matrix, jnp.float32), jnp.asarray(0.1))
    values = np.linalg.eigvalsh(np.asarray(lifted))
    np.testing.assert_allclose(values, [0.1, 0.1, 0.5, 2.0], atol=1e-5)
