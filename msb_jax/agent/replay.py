"""Prioritised replay of transitions, in arrays of fixed capacity.

A batch has four parts, in this order: a third drawn by clusters of the actions (every
cluster gives its share), a sixth from the rows whose reward is more than two deviations
from the mean, a sixth from those whose violation is, and the rest from all rows.

Source: paper, "Primal-dual Wolpertinger sampler", experience replay (i)-(iii);
ALGORITHMS 3.1.

Differs from the paper:
* "a certain proportion" of a cluster is floor(B/3 n_g/n) rows, and what the floor
  leaves open is drawn from all rows (I-32);
* a part whose pool is empty is drawn from all rows; where all rows are equal up to
  rounding there is no outlier;
* clusters come from a few steps of k-means on the 0/1 vectors, once for all batches of
  a refresh (the authors' code uses Birch).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.types import Key

KINDS = ("prioritized", "uniform")
NUM_CLUSTERS = 20
CLUSTER_STEPS = 10
OUTLIER = 2.0  # deviations from the mean
# Deviations below this share of the mean are rounding.
_ROUNDING = 1e-5


class Transitions(NamedTuple):
    """Rows (s, a, r, c, s'); reward and violation stay apart."""

    actions: jax.Array  # [C, K] int32
    rewards: jax.Array  # [C]
    violations: jax.Array  # [C]
    states: jax.Array  # [C, L]
    next_states: jax.Array  # [C, L]


class Replay(NamedTuple):
    """A ring of transitions."""

    rows: Transitions
    is_row: jax.Array  # [C] bool, False where nothing was written yet
    place: jax.Array  # [] int32, where the next row goes


class Strata(NamedTuple):
    """Where the places of a batch are drawn from: slices of a list of rows."""

    rows: jax.Array  # [C'] int32
    start: jax.Array  # [B] int32, of the slice of each place
    size: jax.Array  # [B] int32


def new_replay(capacity: int, k: int, num_arms: int) -> Replay:
    """Allocate an empty ring."""
    return Replay(
        rows=Transitions(
            actions=jnp.zeros((capacity, k), jnp.int32),
            rewards=jnp.zeros((capacity,)),
            violations=jnp.zeros((capacity,)),
            states=jnp.zeros((capacity, num_arms)),
            next_states=jnp.zeros((capacity, num_arms)),
        ),
        is_row=jnp.zeros((capacity,), bool),
        place=jnp.zeros((), jnp.int32),
    )


def push(replay: Replay, rows: Transitions, is_new: jax.Array) -> Replay:
    """Write the rows marked by bool[N] over the oldest ones, in their order."""
    capacity = replay.is_row.shape[0]
    rank = jnp.cumsum(is_new.astype(jnp.int32)) - 1
    total = jnp.sum(is_new, dtype=jnp.int32)
    # Of more rows than the ring holds, the last ones are written.
    is_kept = is_new & (rank >= total - capacity)
    target = jnp.where(is_kept, (replay.place + rank) % capacity, capacity)
    return Replay(
        rows=jax.tree.map(
            lambda old, new: old.at[target].set(new, mode="drop"), replay.rows, rows
        ),
        is_row=replay.is_row.at[target].set(True, mode="drop"),
        place=(replay.place + total) % capacity,
    )


def join(replay: Replay, rows: Transitions, is_row: jax.Array) -> Replay:
    """Add rows behind the ring, for one refresh: they are drawn but not kept."""
    return Replay(
        rows=jax.tree.map(
            lambda one, other: jnp.concatenate([one, other]), replay.rows, rows
        ),
        is_row=jnp.concatenate([replay.is_row, is_row]),
        place=replay.place,
    )


def moments(values: jax.Array, is_row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and deviation of the rows; a deviation of 0 where it is but rounding.

    A value that is NaN or infinite does not count.
    """
    is_row = is_row & jnp.isfinite(values)
    total = jnp.maximum(jnp.sum(is_row), 1).astype(jnp.float32)
    mean = jnp.sum(jnp.where(is_row, values, 0.0)) / total
    gap = jnp.where(is_row, values - mean, 0.0)
    deviation = jnp.sqrt(jnp.sum(jnp.square(gap)) / total)
    return mean, jnp.where(deviation > _ROUNDING * jnp.abs(mean), deviation, 0.0)


def standardise(values: jax.Array, is_row: jax.Array) -> jax.Array:
    """Take off the mean of the rows and divide by their deviation: float32[C].

    Without a row, and where all rows are equal, it is 0.
    """
    mean, deviation = moments(values, is_row)
    is_varied = is_row & jnp.isfinite(values) & (deviation > 0)
    scale = jnp.where(deviation > 0, deviation, 1.0)
    return jnp.where(is_varied, (values - mean) / scale, 0.0)


def cluster(
    key: Key, vectors: jax.Array, is_row: jax.Array, num_clusters: int, num_steps: int
) -> jax.Array:
    """Group the rows of float32[C, L] by k-means, from random rows: int32[C].

    Both halves of a step are products of a [C, L] with a thin matrix.
    """
    noise = jnp.where(is_row, jax.random.uniform(key, is_row.shape), 2.0)
    count = jnp.maximum(jnp.sum(is_row, dtype=jnp.int32), 1)
    first = jnp.argsort(noise)[jnp.arange(num_clusters) % count]
    groups = jnp.arange(num_clusters)

    def nearest(centers: jax.Array) -> jax.Array:
        half_norm = 0.5 * jnp.sum(jnp.square(centers), axis=1)
        return jnp.argmax(vectors @ centers.T - half_norm[None, :], axis=1)

    def step(centers: jax.Array, _: None) -> tuple[jax.Array, None]:
        is_in = (nearest(centers)[:, None] == groups[None, :]) & is_row[:, None]
        weights = is_in.astype(jnp.float32)  # [C, G]
        size = jnp.sum(weights, axis=0)[:, None]
        mean = (weights.T @ vectors) / jnp.maximum(size, 1.0)
        return jnp.where(size > 0, mean, centers), None

    centers, _ = jax.lax.scan(step, vectors[first], None, length=num_steps)
    return nearest(centers).astype(jnp.int32)


def stratify(
    key: Key,
    replay: Replay,
    vectors: jax.Array,
    batch_size: int,
    kind: str,
    num_clusters: int = NUM_CLUSTERS,
) -> Strata:
    """Prepare the batches of a refresh.

    Args:
        key: of the clusters.
        replay: the rows.
        vectors: float32[C, L], their actions as 0/1 vectors.
        batch_size: B.
        kind: one of `KINDS`; with "uniform" every place is drawn from all rows.
        num_clusters: n_c.
    """
    is_row = replay.is_row
    capacity = is_row.shape[0]
    total = jnp.sum(is_row, dtype=jnp.int32)
    everything = (_members(is_row), jnp.zeros((), jnp.int32), total)
    if kind == "uniform":
        return Strata(everything[0], *_fill(everything[1:], batch_size))
    group = cluster(key, vectors, is_row, num_clusters, CLUSTER_STEPS)
    group = jnp.where(is_row, group, num_clusters)  # no row: last
    sizes = jnp.sum(group[:, None] == jnp.arange(num_clusters)[None, :], axis=0)
    lists, parts = [everything[0], jnp.argsort(group)], []
    third, sixth = batch_size // 3, batch_size // 6
    # The places of a cluster follow those of the one before; then come open ones.
    filled = jnp.cumsum(cluster_quotas(sizes, third))
    owner = jnp.searchsorted(filled, jnp.arange(third), side="right")
    first = capacity + jnp.cumsum(sizes) - sizes
    parts.append((jnp.append(first, 0)[owner], jnp.append(sizes, total)[owner]))
    for values in (replay.rows.rewards, replay.rows.violations):
        is_odd = is_row & (jnp.abs(standardise(values, is_row)) > OUTLIER)
        size = jnp.sum(is_odd, dtype=jnp.int32)
        start = jnp.where(size > 0, capacity * len(lists), 0)
        parts.append(_fill((start, jnp.where(size > 0, size, total)), sixth))
        lists.append(_members(is_odd))
    parts.append(_fill(everything[1:], batch_size - third - 2 * sixth))
    start, size = (jnp.concatenate(ends) for ends in zip(*parts, strict=True))
    return Strata(jnp.concatenate(lists), start.astype(jnp.int32), size)


def draw(key: Key, strata: Strata, num_batches: int) -> jax.Array:
    """Draw rows with replacement, the parts in the order above: int32[num, B].

    An empty replay gives rows that are none.
    """
    shape = (num_batches, strata.size.shape[0])
    size = strata.size[None, :]
    inside = jnp.floor(jax.random.uniform(key, shape) * size).astype(jnp.int32)
    # Rounding may lead to the end of the slice.
    inside = jnp.clip(inside, 0, jnp.maximum(size - 1, 0))
    return strata.rows[strata.start[None, :] + inside]


def cluster_quotas(sizes: jax.Array, places: int) -> jax.Array:
    """Give each cluster floor(places n_g / n) places: int32[G] -> int32[G]."""
    return places * sizes // jnp.maximum(jnp.sum(sizes), 1)


def _members(is_in: jax.Array) -> jax.Array:
    """List the marked rows first: bool[C] -> int32[C]."""
    return jnp.argsort(~is_in).astype(jnp.int32)


def _fill(piece: tuple[jax.Array, jax.Array], n: int) -> tuple[jax.Array, jax.Array]:
    """Give the same slice to n places."""
    start, size = piece
    return jnp.full((n,), start), jnp.full((n,), size)
