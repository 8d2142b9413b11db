"""Lists of sets int32[N, K], and the copies in them.

Sets are told apart by two sums of one pseudo-random 32-bit number an arm, which do not
depend on the order of the arms; that two different sets agree in both is as good as
impossible.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def first_copies(actions: jax.Array, tags: jax.Array | None = None) -> jax.Array:
    """For every row, the first row that holds the same set: int32[N].

    Args:
        actions: int32[N, K].
        tags: integers [N]; rows with different ones are never the same.
    """
    size = actions.shape[0]
    codes = [_codes(actions, salt) for salt in (1, 0x9E3779B9)]
    if tags is not None:
        codes.append(tags.astype(jnp.uint32))
    order = jnp.lexsort(codes)
    ordered = jnp.stack(codes)[:, order]
    is_new = jnp.any(ordered[:, 1:] != ordered[:, :-1], axis=0)
    group = jnp.cumsum(jnp.pad(is_new, (1, 0)).astype(jnp.int32))
    first = jnp.full((size,), size, jnp.int32).at[group].min(order.astype(jnp.int32))
    return jnp.zeros((size,), jnp.int32).at[order].set(first[group])


def copies_last(actions: jax.Array) -> jax.Array:
    """Move repetitions of a set to the end, and keep the order otherwise: [N, K]."""
    is_copy = first_copies(actions) != jnp.arange(actions.shape[0])
    return actions[jnp.argsort(is_copy, stable=True)]


def best_distinct(actions: jax.Array, values: jax.Array, n: int) -> jax.Array:
    """Return the n best of the sets [N, K], copies of a set last: int32[n, K]."""
    return copies_last(actions[jnp.argsort(-values)])[:n]


def _codes(actions: jax.Array, salt: int) -> jax.Array:
    """Hash sets [N, K] to numbers that do not depend on the order: uint32[N]."""
    mixed = actions.astype(jnp.uint32) + jnp.uint32(salt)
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(multiplier)
    return jnp.sum(mixed ^ (mixed >> 16), axis=1, dtype=jnp.uint32)
