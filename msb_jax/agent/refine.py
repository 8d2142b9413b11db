"""The master improves candidates on its own bound.

What a sampler proposes is good under the model's mean, or under a draw of it; the
master plays by the upper confidence bound, which is neither. From the best candidates
of each sampler a short search exchanges arms, as `gp_ucb` does, and the best sets that
were found take the places of everyone's worse half: whoever proposes where others do
not look has the credit for what is found there, and sees it among its candidates when
it learns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from msb_jax.agent.assignment import better_half
from msb_jax.samplers.base import View, all_places, scene_of, to_local
from msb_jax.sets import first_copies
from msb_jax.solvers.bound_search import Terrain, climb, distinct, distinct_rows
from msb_jax.solvers.local_search import hollow
from msb_jax.spaces import space_of
from msb_jax.types import Key

NUM_STEPS = 16  # exchanges of each
NUM_SWAPS = 16  # scored for each of these
# Rows of history up to which there are as many. A score costs the square of the rows,
# and whoever knows so many sets has less to gain from one more look.
MANY_ROWS = 2048


def refine(
    key: Key,
    score: Callable[[jax.Array], jax.Array],
    view: View,
    actions: jax.Array,
    origin: jax.Array,
    num_starts: Sequence[int],
    num_rows: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Replace the worse half of the samplers' candidates by the best that is found.

    Args:
        key: of the exchanges tried.
        score: sets [n, K] -> upper bound less the price of conflicts [n].
        view: the model, which chooses the exchanges worth a look.
        actions: int32[N, K], all candidates.
        origin: int32[N], the sampler of each.
        num_starts: of each sampler; whoever has none keeps what it proposed.
        num_rows: of the history that a score looks at.

    Returns:
        int32[N, K], and int32[N], the sampler of each: of a set that was found, the one
        from whose candidate the search started.
    """
    size = actions.shape[0]
    values = score(actions)
    own = {
        sampler: jnp.where(origin == sampler, values, -jnp.inf)
        for sampler, number in enumerate(num_starts)
        if number > 0
    }
    starts = [distinct(actions, own[s], min(num_starts[s], size)) for s in own]
    if not starts:
        return actions, origin
    scene = scene_of(view, all_places(view))
    terrain = Terrain(hollow(view.model), scene.forbidden, view.reach)
    near = space_of(view.problem).neighbours
    found, worth = climb(
        key,
        lambda local: score(view.arms[local]),
        terrain,
        to_local(view, jnp.concatenate(starts), all_places(view)),
        num_steps=NUM_STEPS,
        num_swaps=max(1, NUM_SWAPS * MANY_ROWS // max(num_rows, MANY_ROWS)),
        neighbours=lambda key, terrain, action, n: near(key, scene, terrain, action, n),
    )
    found = view.arms[found]
    walkers = [s for s, x in zip(own, starts, strict=True) for _ in range(len(x))]
    owner = _owners(jnp.array(walkers, jnp.int32), worth.shape[0])
    is_replaced = (jnp.array(num_starts) > 0)[origin]
    is_replaced &= ~better_half(values, origin, len(num_starts))
    # What the pool has already need not be put in again.
    first = first_copies(jnp.concatenate([actions, found]))[size:]
    is_there = (first < size) & ~is_replaced[jnp.minimum(first, size - 1)]
    rows = distinct_rows(found, jnp.where(is_there, -jnp.inf, worth), size)
    row = rows[jnp.maximum(jnp.cumsum(is_replaced) - 1, 0)]
    actions = jnp.where(is_replaced[:, None], found[row], actions)
    return actions.astype(jnp.int32), jnp.where(is_replaced, owner[row], origin)


def _owners(walkers: jax.Array, number: int) -> jax.Array:
    """Whose walker scored each of the sets that `climb` returns: int32[number].

    It returns the starts, and then for every step the exchanges of each walker.
    """
    num_swaps = (number // walkers.shape[0] - 1) // NUM_STEPS
    tried = jnp.tile(jnp.repeat(walkers, num_swaps), NUM_STEPS)
    return jnp.concatenate([walkers, tried])
