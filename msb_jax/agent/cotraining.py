"""Samplers teach each other: learning from demonstrations and sharing samples.

Demonstrations. A* is the candidate with the best surrogate value of the last L_2
rounds. A sampler that has stopped improving, and whose proposals are worth less than
A*, takes n_D cross-entropy steps of its real-valued output towards A* (`imitate`).

Sharing. Samplers see what the others proposed and what was really played; without it
(`private_view`) a sampler sees its own proposals alone.

Source: paper, "Co-training"; ALGORITHMS I-21.

Differs from the paper:
* a sampler has converged when the deviation of its recent averages is below a share of
  the range that its averages have had, not below an absolute number (I-21);
* A* is the best by the surrogate of today, of the best candidates of each refresh in
  the last L_2 = 2L rounds (I-21).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.samplers.base import View, value_of

WINDOW = 5  # refreshes whose averages say whether a sampler still improves
TOLERANCE = 0.05  # of the range of the averages

KINDS = ("all", "demonstrations", "sharing", "none")


class CoTrainingState(NamedTuple):
    """What has been seen of the candidates and of the samplers."""

    best: jax.Array  # [W2, K] int32, the best candidate of each of the last refreshes
    averages: jax.Array  # [S, WINDOW] newest last; NaN where there was none
    low: jax.Array  # [S] least average so far
    high: jax.Array  # [S]


def init_cotraining(number: int, window: int, k: int) -> CoTrainingState:
    """Start with nothing seen.

    Args:
        number: of samplers, S.
        window: refreshes in L_2 rounds.
        k: arms of an action.
    """
    return CoTrainingState(
        best=jnp.full((window, k), -1, jnp.int32),
        averages=jnp.full((number, WINDOW), jnp.nan, jnp.float32),
        low=jnp.full((number,), jnp.inf, jnp.float32),
        high=jnp.full((number,), -jnp.inf, jnp.float32),
    )


def observe_pool(
    state: CoTrainingState, view: View, averages: jax.Array
) -> CoTrainingState:
    """Note the best candidate of the last pool, and each sampler's average [S]."""
    top = view.pool[jnp.argmax(value_of(view, view.pool))]
    return CoTrainingState(
        best=jnp.roll(state.best, -1, axis=0).at[-1].set(top),
        averages=jnp.roll(state.averages, -1, axis=1).at[:, -1].set(averages),
        low=jnp.minimum(state.low, averages),
        high=jnp.maximum(state.high, averages),
    )


def demonstration(state: CoTrainingState, view: View) -> tuple[jax.Array, jax.Array]:
    """A* and its value: int32[K], []."""
    is_set = state.best[:, 0] >= 0
    values = jnp.where(is_set, value_of(view, jnp.maximum(state.best, 0)), -jnp.inf)
    return state.best[jnp.argmax(values)], jnp.max(values)


def has_converged(state: CoTrainingState, value: jax.Array) -> jax.Array:
    """Who should learn from a demonstration of this value: bool[S]."""
    deviation = jnp.std(state.averages, axis=1)  # NaN before WINDOW refreshes
    is_still = deviation < TOLERANCE * (state.high - state.low)
    return is_still & (state.averages[:, -1] < value)


def private_view(view: View, origin: int | jax.Array) -> View:
    """Hide from a sampler what others proposed and what was played."""
    is_own = view.pool_origin == origin
    order = jnp.argsort(~is_own, stable=True)
    size, count = order.shape[0], jnp.maximum(jnp.sum(is_own), 1)
    own = view.pool[order[jnp.arange(size) % count]]
    values = value_of(view, own)
    top, rows = jax.lax.top_k(values, min(size, view.elites.shape[0]))
    rows = jnp.resize(rows, (view.elites.shape[0],))
    return view._replace(
        pool=own,
        pool_origin=jnp.where(jnp.any(is_own), origin, -1) + jnp.zeros_like(order),
        elites=own[rows],
        elite_values=jnp.resize(top, view.elite_values.shape),
        is_played=jnp.zeros_like(view.is_played),
    )
