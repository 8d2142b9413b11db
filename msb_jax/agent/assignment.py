"""How many candidates each sampler may put into the pool.

Samplers whose last candidates had high surrogate values get more places: a softmax
over the standardised averages, rounded by largest remainder, at least one place each.
Samplers of the second stage (teacher-student) learn from the others' proposals and
have a fixed share.

Source: paper, "Sample assignment"; ALGORITHMS I-22.

Differs from the paper:
* averages are standardised before the softmax; raw ones make it uniform (I-22);
* the average is that of the better half of the candidates: a sampler is asked for
  good sets, and whoever also explores should not lose its places for it;
* teacher-student is not part of the softmax (I-22).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from msb_jax.sets import copies_last


def better_half(values: jax.Array, origin: jax.Array, number: int) -> jax.Array:
    """Mark the better half of each sampler's candidates, the middle one too: bool[N].

    Args:
        values: [N] of the candidates.
        origin: [N] who proposed them; anything else than 0..number-1 counts for none.
        number: of samplers.
    """
    order = jnp.argsort(-values)
    is_own = origin[order][None, :] == jnp.arange(number)[:, None]  # [number, N]
    rank = jnp.cumsum(is_own, axis=1)
    is_better = is_own & (2 * rank <= jnp.sum(is_own, axis=1)[:, None] + 1)
    return jnp.zeros(values.shape, bool).at[order].set(jnp.any(is_better, axis=0))


def average_scores(values: jax.Array, origin: jax.Array, number: int) -> jax.Array:
    """Mean value of the better half of each sampler's candidates: [number].

    Args:
        values: [N] of the candidates.
        origin: [N] who proposed them; anything else than 0..number-1 counts for none.
        number: of samplers.

    Returns:
        The averages; a sampler without candidates gets the mean of the others.
    """
    order = jnp.argsort(-values)
    ranked, owner = values[order], origin[order]
    is_own = owner[None, :] == jnp.arange(number)[:, None]  # [number, N]
    is_better = is_own & better_half(ranked, owner, number)[None, :]
    kept = jnp.sum(is_better, axis=1)
    sums = jnp.sum(jnp.where(is_better, ranked[None, :], 0.0), axis=1)
    means = sums / jnp.maximum(kept, 1)
    known = jnp.maximum(jnp.sum(kept > 0), 1)
    return jnp.where(kept > 0, means, jnp.sum(jnp.where(kept > 0, means, 0.0)) / known)


def assign(scores: jax.Array, total: int) -> jax.Array:
    """Share `total` places by a softmax over the standardised scores.

    Args:
        scores: [S]; equal ones get equal shares.
        total: at least S.

    Returns:
        int32[S], each at least 1, with sum `total`.
    """
    number = scores.shape[0]
    if total < number:
        raise ValueError(f"{total} places are too few for {number} samplers.")
    gap = scores - jnp.mean(scores)
    spread = jnp.sqrt(jnp.mean(jnp.square(gap)))
    # Rounding of equal scores is not a difference.
    is_equal = spread <= 1e-6 * jnp.max(jnp.abs(scores))
    z = jnp.where(is_equal, 0.0, gap / jnp.where(is_equal, 1.0, spread))
    quota = (total - number) * jax.nn.softmax(z)
    whole = jnp.floor(quota).astype(jnp.int32)
    left = total - number - jnp.sum(whole)
    rank = jnp.argsort(jnp.argsort(whole.astype(quota.dtype) - quota, stable=True))
    return 1 + whole + (rank < left).astype(jnp.int32)


def elites_first(actions: jax.Array, values: jax.Array) -> jax.Array:
    """Order a learner's proposals: its best, and between them those as they were drawn.

    Whoever has few places is represented by good sets, but not by these alone.

    Args:
        actions: int32[n, K].
        values: [n].

    Returns:
        int32[n, K], without copies as far as there are other sets.
    """
    n = actions.shape[0]
    order = jnp.stack([jnp.argsort(-values), jnp.arange(n)], axis=1).reshape(-1)
    return copies_last(actions[order])[:n]


def assemble(
    proposals: jax.Array, counts: jax.Array, total: int
) -> tuple[jax.Array, jax.Array]:
    """Take the first `counts[i]` proposals of each sampler.

    Args:
        proposals: int32[S, n, K].
        counts: int32[S], none above n.
        total: the sum of the counts.

    Returns:
        int32[total, K] and int32[total], the number of the sampler.
    """
    slot = jnp.arange(total)
    ends = jnp.cumsum(counts)
    owner = jnp.searchsorted(ends, slot, side="right").astype(jnp.int32)
    row = slot - (ends - counts)[owner]
    return proposals[owner, row], owner
