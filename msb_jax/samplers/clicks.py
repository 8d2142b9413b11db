"""Lists by what was clicked: for environments that tell more than one number.

The paper's agent is told one number a list. Where a list also has clicks, this sampler
counts them by item and place and proposes lists by Thompson sampling; which of them is
played is still the master's decision. Item i in place p is clicked with probability
w_i kappa_p; kappa, with kappa_1 = 1, is found by alternating

    w_i = (1 + sum_p hits_ip) / (2 + sum_p kappa_p shown_ip),
    kappa_p = sum_i hits_ip / sum_i w_i shown_ip,

and a draw of w_i is that of a Beta posterior with the displays that were seen. A list
has the K items of largest draw in descending order; the first list is by the means.

Source: Chuklin, Markov and de Rijke 2015 (the model of places); the cascade of
ALGORITHMS 9.0, where what is below the last click is not known to be seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.clicks import check_target, credit
from msb_jax.problem import ORDERED, Problem
from msb_jax.samplers.base import Context, Sampler, View, legalise, no_update
from msb_jax.types import Key

_STEPS = 10  # of the alternation


@dataclass(frozen=True, kw_only=True)
class ClicksConfig:
    """Settings of the sampler."""

    target: str = "clicks"  # or reward: only what satisfied counts, see `credit`

    def __post_init__(self) -> None:
        check_target(self.target)


class ClicksState(NamedTuple):
    """Counts by item and place; sets have one place."""

    shown: jax.Array  # [items, places]
    hits: jax.Array  # [items, places]


def clicks(config: ClicksConfig = ClicksConfig()) -> Sampler:
    """Build the sampler that learns from clicks."""

    def init(key: Key, problem: Problem) -> ClicksState:
        del key
        zeros = jnp.zeros((_num_items(problem), _num_places(problem)))
        return ClicksState(shown=zeros, hits=zeros)

    def tell_clicks(
        state: ClicksState, action: jax.Array, reward: jax.Array, given: jax.Array
    ) -> ClicksState:
        num_items = state.shown.shape[0]
        item, place = action % num_items, action // num_items
        is_known, value = credit(given, reward, config.target)
        return ClicksState(
            shown=state.shown.at[item, place].add(is_known),
            hits=state.hits.at[item, place].add(value),
        )

    def propose(key: Key, state: ClicksState, context: Context, n: int) -> jax.Array:
        hits, seen = exposure(state)
        misses = jnp.maximum(seen - hits, 0.0)
        mean = (1.0 + hits) / (2.0 + hits + misses)
        draws = jax.random.beta(key, 1.0 + hits, 1.0 + misses, (n, *hits.shape))
        worth = draws.at[0].set(mean)
        return jax.vmap(best_list, (None, 0))(context.view, worth)

    return Sampler(
        name="clicks",
        init=init,
        propose=propose,
        update=no_update,
        tell_clicks=tell_clicks,
    )


def exposure(state: ClicksState) -> tuple[jax.Array, jax.Array]:
    """Count the clicks of the items [items], and how often these were seen [items]."""
    hits = jnp.sum(state.hits, axis=1)

    def rates(kappa: jax.Array) -> jax.Array:
        return (1.0 + hits) / (2.0 + state.shown @ kappa)

    def improve(kappa: jax.Array, nothing: None) -> tuple[jax.Array, None]:
        del nothing
        expected = rates(kappa) @ state.shown
        # One click that was expected keeps places of which nothing is known at 1.
        kappa = (1.0 + jnp.sum(state.hits, axis=0)) / (1.0 + expected)
        return jnp.minimum(kappa / kappa[0], 1.0), None

    start = jnp.ones(state.shown.shape[1])
    kappa, _ = jax.lax.scan(improve, start, None, length=_STEPS)
    return hits, state.shown @ kappa


def best_list(view: View, worth: jax.Array) -> jax.Array:
    """Put the items of most worth [items] in descending order, conflicts avoided.

    Returns:
        int32[K] arms of the view's problem.
    """
    problem = view.problem
    num_items, num_places = _num_items(problem), _num_places(problem)
    first = num_items * jnp.minimum(jnp.arange(problem.k), num_places - 1)
    items = jax.lax.top_k(worth, problem.k)[1]
    # Higher places first, so that a repair gives up the items of least worth.
    fading = 1.0 - jnp.arange(num_places) / (2.0 * num_places)
    priority = (fading[:, None] * worth[None, :]).reshape(-1)
    arms = legalise(view, (items + first).astype(jnp.int32), priority)
    items = arms % num_items
    items = items[jnp.argsort(-worth[items])]
    return (items + first).astype(jnp.int32)


def _num_places(problem: Problem) -> int:
    return problem.k if problem.space == ORDERED else 1


def _num_items(problem: Problem) -> int:
    return problem.num_arms // _num_places(problem)
