"""The candidates of the coming rounds, and exact updates of the belief over them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.link import identity_link, to_latent
from msb_jax.types import Belief

# Pace of the running mean of squared errors, and what a single one counts at most.
SURPRISE_RATE = 0.05
MAX_SURPRISE = 100.0


class Pool(NamedTuple):
    """The candidates of the coming rounds and what the master thinks of them."""

    actions: jax.Array  # [N, K] int32, arms ascending
    pairs: jax.Array  # [N] int32, conflicting pairs
    origin: jax.Array  # [N] int32, number of the sampler that proposes it
    producer: jax.Array  # [N] int32, of the one that found it; see `find_producers`
    belief: Belief | None  # None: a live master is asked anew in every round


def empty_pool(size: int, k: int, *, is_live: bool = False) -> Pool:
    """A pool without candidates, for a master that is live or not."""
    none = jnp.zeros((size,), jnp.int32)
    nothing = Belief(
        mean=jnp.zeros((size,)),
        cov=jnp.zeros((size, size)),
        noise=jnp.ones(()),
        link=identity_link(),
    )
    return Pool(
        # No set has arm -1: nothing that is told matches the empty pool.
        actions=jnp.full((size, k), -1, jnp.int32),
        pairs=none,
        origin=none,
        producer=none,
        belief=None if is_live else nothing,
    )


class Elites(NamedTuple):
    """The best distinct sets played so far, and who found them."""

    actions: jax.Array  # [E, K] int32, arms ascending
    producer: jax.Array  # [E] int32


def renew_elites(
    elites: Elites, pool: Pool, best: jax.Array, random_origin: jax.Array
) -> Elites:
    """Say of the best sets [E, K] of today who found them.

    One that was known keeps its producer; a new one was played from the last pool, or
    at random.
    """

    def who(action: jax.Array) -> jax.Array:
        is_known = jnp.all(elites.actions == action[None, :], axis=1)
        is_pool = jnp.all(pool.actions == action[None, :], axis=1)
        new = jnp.where(
            jnp.any(is_pool), pool.producer[jnp.argmax(is_pool)], random_origin
        )
        return jnp.where(jnp.any(is_known), elites.producer[jnp.argmax(is_known)], new)

    best = jnp.sort(best, axis=1)
    return Elites(best, jax.vmap(who)(best))


def find_producers(elites: Elites, actions: jax.Array, origin: jax.Array) -> jax.Array:
    """Who found each candidate [N, K]: its proposer, unless it is a known elite.

    Samplers re-emit the best sets of all (I-23); the credit for those belongs to the
    one that proposed them when they were new.
    """
    same = jnp.all(actions[:, None, :] == elites.actions[None, :, :], axis=2)  # [N, E]
    return jnp.where(
        jnp.any(same, axis=1), elites.producer[jnp.argmax(same, axis=1)], origin
    )


def condition(belief: Belief, is_played: jax.Array, reward: jax.Array) -> Belief:
    """Condition the belief on one reward.

    Args:
        is_played: bool[N], the candidates that are the set played: none, one, or
            several equal ones.
        reward: [].
    """
    row = jnp.argmax(is_played)
    column = belief.cov[:, row]
    gain = column / (column[row] + belief.noise)
    error = to_latent(belief.link, reward) - belief.mean[row]
    gain = jnp.where(jnp.any(is_played), gain, 0.0)
    error = jnp.where(jnp.any(is_played), error, 0.0)
    return belief._replace(
        mean=belief.mean + gain * error,
        cov=belief.cov - gain[:, None] * column[None, :],
    )


def observe(
    surprise: jax.Array, belief: Belief, is_played: jax.Array, reward: jax.Array
) -> jax.Array:
    """Track whether errors are as large as the belief expects them to be.

    A running mean of squared standardised errors, 1 for a calibrated belief. A set
    that is known already says nothing of the model, so a round counts by the share of
    the expected error that is not noise.
    """
    row = jnp.argmax(is_played)
    variance = belief.cov[row, row] + belief.noise
    error = to_latent(belief.link, reward) - belief.mean[row]
    share = jnp.clip(belief.cov[row, row] / variance, 0.0, 1.0)
    weight = jnp.where(jnp.any(is_played), SURPRISE_RATE * share, 0.0)
    squared = jnp.minimum(jnp.square(error) / variance, MAX_SURPRISE)
    squared = jnp.where(jnp.any(is_played), squared, surprise)
    return surprise + weight * (squared - surprise)
