"""The rounds a master has seen, in arrays of fixed capacity.

Rows [0, absorbed) are inside the master's linear algebra, rows [absorbed, count)
were appended since the last refresh. A round is a row at first; `merge` makes one row
of all rounds that played the same set, with their mean reward, number and scatter. The
capacity is raised on the host between refreshes (`grow`): every size compiles once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax.sets import first_copies

# Below this deviation rewards count as constant and are only centred.
MIN_DEVIATION = 1e-6
# Rounds that may be told between two refreshes, at the least.
MIN_SLACK = 128


class History(NamedTuple):
    """Played actions and their rewards."""

    actions: jax.Array  # [C, K] int32, rows >= count hold arm 0
    rewards: jax.Array  # [C] float32, mean of the row's rounds; 0 beyond count
    plays: jax.Array  # [C] float32, rounds of the row; 1 beyond count
    scatter: jax.Array  # [C] float32, squares about the mean summed over the rounds
    count: jax.Array  # type: ignore[assignment]  # [] int32 rows; hides tuple.count
    absorbed: jax.Array  # [] int32 rows
    rounds: jax.Array  # [] int32, rounds told


def new_history(capacity: int, k: int) -> History:
    """Allocate an empty history of `capacity` rows."""
    return History(
        actions=jnp.zeros((capacity, k), jnp.int32),
        rewards=jnp.zeros((capacity,), jnp.float32),
        plays=jnp.ones((capacity,), jnp.float32),
        scatter=jnp.zeros((capacity,), jnp.float32),
        count=jnp.zeros((), jnp.int32),
        absorbed=jnp.zeros((), jnp.int32),
        rounds=jnp.zeros((), jnp.int32),
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
        rounds=history.rounds + is_number.astype(jnp.int32),
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


def leaders(history: History) -> jax.Array:
    """For every row, the first row that holds the same set: int32[C].

    A row that is not real leads itself.
    """
    rows = jnp.arange(history.rewards.shape[0], dtype=jnp.int32)
    is_row = rows < history.count
    return first_copies(history.actions, jnp.where(is_row, 0, rows + 1))


def is_first(history: History) -> jax.Array:
    """Mark the first row of every distinct set of the history: bool[C]."""
    return leaders(history) == jnp.arange(history.rewards.shape[0])


def merge(history: History) -> History:
    """Make one row of all rows with the same set, in the order of the first ones.

    Mean, number and scatter are all that Gaussian rounds of a set tell.
    """
    size = history.rewards.shape[0]
    leader = leaders(history)
    is_row = jnp.arange(size) < history.count
    is_kept = is_row & (leader == jnp.arange(size))
    place = jnp.cumsum(is_kept.astype(jnp.int32)) - 1
    target = jnp.where(is_row, place[leader], size)
    own = jnp.where(is_kept, place, size)
    plays = jnp.zeros((size,)).at[target].add(history.plays, mode="drop")
    total = jnp.zeros((size,))
    total = total.at[target].add(history.plays * history.rewards, mode="drop")
    rewards = jnp.where(plays > 0, total / jnp.where(plays > 0, plays, 1.0), 0.0)
    aside = history.rewards - rewards[jnp.minimum(target, size - 1)]
    scatter = history.scatter + history.plays * jnp.square(aside)
    actions = jnp.zeros_like(history.actions)
    return history._replace(
        actions=actions.at[own].set(history.actions, mode="drop"),
        rewards=rewards,
        plays=jnp.where(plays > 0, plays, 1.0),
        scatter=jnp.zeros((size,)).at[target].add(scatter, mode="drop"),
        count=jnp.sum(is_kept, dtype=jnp.int32),
        absorbed=jnp.zeros((), jnp.int32),
    )


def keep_last(history: History, n: jax.Array | int) -> History:
    """Let go of all rows but the last n."""
    size = history.rewards.shape[0]
    first = jnp.maximum(history.count - n, 0)
    count = history.count - first
    is_row = jnp.arange(size) < count
    rows = jnp.minimum(jnp.arange(size) + first, size - 1)
    return history._replace(
        actions=jnp.where(is_row[:, None], history.actions[rows], 0),
        rewards=jnp.where(is_row, history.rewards[rows], 0.0),
        plays=jnp.where(is_row, history.plays[rows], 1.0),
        scatter=jnp.where(is_row, history.scatter[rows], 0.0),
        count=count,
        absorbed=jnp.maximum(history.absorbed - first, 0),
    )


def grow(history: History, capacity: int) -> History:
    """Raise the capacity to `capacity` rows (a no-op if it is there already)."""
    extra = capacity - history.rewards.shape[0]
    if extra <= 0:
        return history
    return history._replace(
        actions=jnp.pad(history.actions, ((0, extra), (0, 0))),
        rewards=jnp.pad(history.rewards, (0, extra)),
        plays=jnp.pad(history.plays, (0, extra), constant_values=1.0),
        scatter=jnp.pad(history.scatter, (0, extra)),
    )


def slack(f_in: int) -> int:
    """Rounds that may be told between two refreshes of a policy."""
    return max(2 * f_in, MIN_SLACK)


def make_room(
    grow: Callable[[Any, int], Any], learned: Any, slack: int, warm_up: int
) -> Any:
    """Raise the capacity of the histories of all runs where it is short (host).

    Args:
        grow: `Master.grow`.
        learned: states of the master, every leaf [B, ...].
        slack: rounds that may be told before the next call.
        warm_up: random rounds still to come.
    """
    history = learned.history
    count = int(np.max(np.asarray(history.count)))
    capacity = history.rewards.shape[-1]
    if count > capacity:
        rounds = int(np.max(np.asarray(history.rounds)))
        raise ValueError(
            f"{rounds} rounds were told but there was room for {capacity}: call "
            f"refresh at least every {slack} rounds."
        )
    if count + slack <= capacity:
        return learned
    # The whole warm-up at once: a larger history costs nothing before it ends.
    capacity = next_capacity(count, max(slack, min(warm_up + slack, 4096)))
    return jax.vmap(lambda state: grow(state, capacity))(learned)


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
