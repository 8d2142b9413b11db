"""Swap search over K-sets for an objective that is dear to evaluate.

An upper confidence bound is not quadratic, and the deviation of one set costs a product
with the whole history: there is no time to look at all K (L - K) exchanges of an arm.
So `walk` first goes far on the posterior mean alone, and `climb` goes on from there. A
step of it scores a few exchanges: half those of highest optimistic gain (the gain
of the posterior mean, which is exact and cheap, plus a random share of what is unknown
of the arm that comes in) and half random ones. It moves to the best if that is better.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.sets import first_copies
from msb_jax.solvers.local_search import swap_gains, tabu_search
from msb_jax.types import Key, Quadratic

Search = Callable[[Quadratic, jax.Array, int], tuple[jax.Array, jax.Array]]


class Terrain(NamedTuple):
    """What the choice of exchanges looks at."""

    model: Quadratic  # [L, L] hollow: the posterior mean less the price of conflicts
    forbidden: jax.Array  # [L, L] bool
    reach: jax.Array  # [L] what may be gained by not knowing an arm


def walk(
    key: Key,
    terrain: Terrain,
    starts: jax.Array,
    num_steps: int,
    search: Search | None = None,
) -> jax.Array:
    """Walk from every start on the quadratic model, with a random bonus on the arms.

    Args:
        starts: int32[W, K].
        num_steps: exchanges of a walker, with a tabu list.
        search: another search, model, starts and steps -> sets and values.

    Returns:
        int32[W, K], the best set of every walker under its own bonus.
    """
    shape = (starts.shape[0], terrain.reach.shape[0])
    bonus = terrain.reach[None, :] * jax.random.uniform(key, shape)

    def exchange(
        model: Quadratic, starts: jax.Array, num_steps: int
    ) -> tuple[jax.Array, jax.Array]:
        return tabu_search(model, terrain.forbidden, starts, num_steps=num_steps)

    find = search or exchange

    def one(bonus: jax.Array, start: jax.Array) -> jax.Array:
        model = terrain.model._replace(linear=terrain.model.linear + bonus)
        return find(model, start[None], num_steps)[0][0]

    return jax.vmap(one)(bonus, starts)


def climb(
    key: Key,
    score: Callable[[jax.Array], jax.Array],
    terrain: Terrain,
    starts: jax.Array,
    *,
    num_steps: int,
    num_swaps: int,
    neighbours: Callable[[Key, Terrain, jax.Array, int], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Improve every start by its best exchange, `num_steps` times.

    Args:
        score: sets int32[N, K] -> what is maximised, float32[N].
        terrain: how promising exchanges are told from others.
        starts: int32[W, K].
        num_steps: of every walker.
        num_swaps: exchanges scored in a step of a walker.
        neighbours: other sets near one, instead of its `exchanges`.

    Returns:
        All sets that were scored int32[N, K] and their scores float32[N].
    """
    num_walkers, k = starts.shape
    rows = jnp.arange(num_walkers)
    look = jax.vmap(neighbours or exchanges, (0, None, 0, None))

    def step(carry: Any, key: Key) -> tuple[Any, Any]:
        walkers, values = carry  # [W, K], [W]
        keys = jax.random.split(key, num_walkers)
        swaps = look(keys, terrain, walkers, num_swaps)  # [W, S, K]
        totals = score(swaps.reshape(-1, k)).reshape(num_walkers, num_swaps)
        best = jnp.argmax(totals, axis=1)
        is_up = totals[rows, best] > values
        walkers = jnp.where(is_up[:, None], swaps[rows, best], walkers)
        values = jnp.where(is_up, totals[rows, best], values)
        return (walkers, values), (swaps, totals)

    values = score(starts)
    keys = jax.random.split(key, num_steps)
    _, (tried, totals) = jax.lax.scan(step, (starts, values), keys)
    actions = jnp.concatenate([starts, tried.reshape(-1, k)])
    return actions, jnp.concatenate([values, totals.reshape(-1)])


def exchanges(key: Key, terrain: Terrain, action: jax.Array, n: int) -> jax.Array:
    """Choose n single exchanges of the set int32[K], without repetition: int32[n, K].

    A place for which there is no allowed exchange repeats the set.
    """
    gains, is_allowed = swap_gains(terrain.model, terrain.forbidden, action)  # [K, L]
    num_arms = gains.shape[1]
    chance = jax.random.uniform(key, (gains.shape[0] + 1, num_arms))
    hope = terrain.reach * chance[-1]
    promise = jnp.where(is_allowed, gains + hope[None, :], -jnp.inf).reshape(-1)
    chance = jnp.where(is_allowed, chance[:-1], -jnp.inf).reshape(-1)
    number = min(n, promise.shape[0])
    _, first = jax.lax.top_k(promise, number - number // 2)
    # The random half leaves out what the first has.
    value, second = jax.lax.top_k(chance.at[first].set(-jnp.inf), number // 2)
    cells = jnp.concatenate([first, second])
    is_real = jnp.isfinite(jnp.concatenate([promise[first], value]))

    def apply(cell: jax.Array, is_real: jax.Array) -> jax.Array:
        place, arm = cell // num_arms, (cell % num_arms).astype(jnp.int32)
        return jnp.where(is_real, action.at[place].set(arm), action)

    sets = jax.vmap(apply)(cells, is_real)
    return jnp.concatenate([sets, jnp.tile(action, (n - number, 1))])


def distinct(actions: jax.Array, values: jax.Array, n: int) -> jax.Array:
    """The n distinct sets of [N, K] of highest value, the best in empty places."""
    return actions[distinct_rows(actions, values, n)]


def distinct_rows(actions: jax.Array, values: jax.Array, n: int) -> jax.Array:
    """Where the n distinct sets of [N, K] of highest value are: int32[n]."""
    size = actions.shape[0]
    is_first = first_copies(actions) == jnp.arange(size)
    values = jnp.where(is_first, values, -jnp.inf)
    values = jnp.pad(values, (0, max(n - size, 0)), constant_values=-jnp.inf)
    top, rows = jax.lax.top_k(values, n)
    return jnp.where(jnp.isfinite(top), rows, rows[0])
