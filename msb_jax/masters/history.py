"""The rounds a master has seen, in arrays of fixed capacity.

Rows [0, absorbed) are inside the master's linear algebra, rows [absorbed, count)
were appended since the last refresh. The capacity is raised on the host between
refreshes (`grow`): every size compiles once, and nothing is ever overwritten.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Below this deviation rewards count as constant and are only centred.
MIN_DEVIATION = 1e-6


class History(NamedTuple):
    """Played actions and their rewards."""

    actions: jax.Array  # [C, K] int32, rows >= count hold arm 0
    rewards: jax.Array  # [C] float32, 0 beyond count
    count: jax.Array  # type: ignore[assignment]  # [] int32; hides tuple.count
    absorbed: jax.Array  # [] int32


def new_history(capacity: int, k: int) -> History:
    """Allocate an empty history of `capacity` rows."""
    return History(
        actions=jnp.zeros((capacity, k), jnp.int32),
        rewards=jnp.zeros((capacity,), jnp.float32),
        count=jnp.zeros((), jnp.int32),
        absorbed=jnp.zeros((), jnp.int32),
    )


def append(history: History, action: jax.Array, reward: jax.Array) -> History:
    """Add one round. Past the capacity only `count` moves (the agent reports it).

    A reward that is NaN or infinite is not an observation: the round is left out.
    """
    reward = jnp.asarray(reward, jnp.float32)
    is_number = jnp.isfinite(reward)
    row = jnp.where(is_number, history.count, history.rewards.shape[0])
    return history._replace(
        actions=history.actions.at[row].set(action.astype(jnp.int32), mode="drop"),
        rewards=history.rewards.at[row].set(reward, mode="drop"),
        count=history.count + is_number.astype(jnp.int32),
    )


def valid_rows(history: History, upto: jax.Array) -> jax.Array:
    """Mark the rows below `upto`: float32[C]."""
    return (jnp.arange(history.rewards.shape[0]) < upto).astype(jnp.float32)


def moments(history: History) -> tuple[jax.Array, jax.Array]:
    """Running mean and deviation of all rewards seen, for standardisation."""
    return masked_moments(history.rewards, valid_rows(history, history.count))


def masked_moments(values: jax.Array, is_row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and deviation of the real rows; a deviation of 1 where all are equal."""
    total = jnp.maximum(jnp.sum(is_row), 1.0)
    mean = jnp.sum(values * is_row) / total
    deviation = jnp.sqrt(jnp.sum(jnp.square(values - mean) * is_row) / total)
    return mean, jnp.where(deviation > MIN_DEVIATION, deviation, 1.0)


def is_first(history: History) -> jax.Array:
    """Mark the first row of every distinct set of the history: bool[C]."""
    # A sum of one random 32-bit number an arm identifies a set whatever its order.
    mixed = history.actions.astype(jnp.uint32) + jnp.uint32(1)
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(multiplier)
    code = jnp.sum(mixed ^ (mixed >> 16), axis=1, dtype=jnp.uint32)
    order = jnp.argsort(code, stable=True)
    ordered = code[order]
    is_new = jnp.concatenate([jnp.ones((1,), bool), ordered[1:] != ordered[:-1]])
    return jnp.zeros(code.shape, bool).at[order].set(is_new)


def grow(history: History, capacity: int) -> History:
    """Raise the capacity to `capacity` rows (a no-op if it is there already)."""
    extra = capacity - history.rewards.shape[0]
    if extra <= 0:
        return history
    return history._replace(
        actions=jnp.pad(history.actions, ((0, extra), (0, 0))),
        rewards=jnp.pad(history.rewards, (0, extra)),
    )


def next_capacity(count: int, slack: int) -> int:
    """Choose the capacity for `count` rows and `slack` more.

    The ladder 256, 512, 768, 1280, 2048, 3072, 4096, ... has few steps, because each
    size is compiled once, and small ones, because doubling would waste memory.
    """
    need = count + slack
    for size in (256, 512, 768, 1280, 2048):
        if need <= size:
            return size
    return -(-need // 1024) * 1024
