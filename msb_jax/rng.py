"""Random keys by name, so that one part's draws do not depend on another's."""

from __future__ import annotations

import zlib

import jax


def stream(key: jax.Array, name: str) -> jax.Array:
    """Derive the child of `key` that belongs to `name`.

    Children of different names are independent, and adding or removing a part
    leaves every other part's draws as they were.

    Args:
        key: a typed key (`jax.random.key`), of any batch shape.
        name: any string; the same string always gives the same child.
    """
    fold = jax.random.fold_in
    for _ in range(key.ndim):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)
