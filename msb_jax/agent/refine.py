"""The master improves candidates on its own bound.

What a sampler proposes is good under the model's mean, or under a draw of it; the
master plays by the upper confidence bound, which is neither. From the candidates of
highest bound a short search exchanges arms, as `gp_ucb` does, and the best sets that it
has scored take the places of the worse half.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from msb_jax.samplers.base import View, all_places, scene_of, to_local
from msb_jax.sets import first_copies
from msb_jax.solvers.bound_search import Terrain, climb, distinct
from msb_jax.solvers.local_search import hollow
from msb_jax.spaces import space_of
from msb_jax.types import Key

NUM_STARTS = 12  # candidates that a search starts from
NUM_STEPS = 4  # exchanges of each
NUM_SWAPS = 16  # scored for each of these
# Rows of history up to which there are as many. A score costs the square of the rows,
# and whoever knows so many sets has less to gain from one more look.
MANY_ROWS = 2048


def refine(
    key: Key,
    score: Callable[[jax.Array], jax.Array],
    view: View,
    actions: jax.Array,
    is_own: jax.Array,
    num_rows: int = 0,
) -> jax.Array:
    """Replace the worse half of some candidates by better ones: int32[N, K].

    Args:
        key: of the exchanges tried.
        score: sets [n, K] -> upper bound less the price of conflicts [n].
        view: the model, which chooses the exchanges worth a look.
        actions: int32[N, K], all candidates.
        is_own: bool[N], those that may be replaced.
        num_rows: of the history that a score looks at.
    """
    size = actions.shape[0]
    totals = jnp.where(is_own, score(actions), -jnp.inf)
    starts = distinct(actions, totals, min(NUM_STARTS, size))
    scene = scene_of(view, all_places(view))
    terrain = Terrain(hollow(view.model), scene.forbidden, view.reach)
    near = space_of(view.problem).neighbours
    sets, values = climb(
        key,
        lambda local: score(view.arms[local]),
        terrain,
        to_local(view, starts, all_places(view)),
        num_steps=NUM_STEPS,
        num_swaps=max(1, NUM_SWAPS * MANY_ROWS // max(num_rows, MANY_ROWS)),
        neighbours=lambda key, terrain, action, n: near(key, scene, terrain, action, n),
    )
    sets = view.arms[sets]
    rank = jnp.argsort(jnp.argsort(-totals))
    kept = (jnp.sum(is_own) + 1) // 2
    is_replaced = is_own & (rank >= kept)
    # What the pool has already need not be put in again.
    first = first_copies(jnp.concatenate([actions, sets]))[size:]
    is_there = (first < size) & ~is_replaced[jnp.minimum(first, size - 1)]
    better = distinct(sets, jnp.where(is_there, -jnp.inf, values), size)
    place = jnp.clip(rank - kept, 0, size - 1)
    return jnp.where(is_replaced[:, None], better[place], actions).astype(jnp.int32)
