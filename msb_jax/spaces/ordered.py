"""Ordered lists: K of L items, each in a place of its own.

A list is a set of K placements. Placement (p, i), item i in place p, is arm p L + i, so
that the sorted arms of an action are the list from its first place on. Two placements
exclude each other when they have the place or the item in common, and conflict when
their items do; a violation is counted once for every pair of items, as for sets.

With that a list is a set under a conflict graph, and all that works for sets works for
lists: the greedy repair, the tabu search, the integer program. What sets do not have
are transpositions, in which two items change places.

Source: paper, supplement, "Cascading bandits and position-based bandits".

Differs from the paper: an action is an L x K placement, because a K x K matrix cannot
name L items, and the program has a row for every place and every item (ALGORITHMS 9.0).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from msb_jax.problem import ORDERED, Problem, random_feasible_sets
from msb_jax.problem import repair as repair_set
from msb_jax.solvers import local_search
from msb_jax.solvers.bound_search import Terrain
from msb_jax.spaces import subsets
from msb_jax.spaces.base import Scene, Space, invite
from msb_jax.types import Key, Quadratic


def placement_problem(problem: Problem) -> Problem:
    """The problem of ordering what a problem on sets chooses.

    Args:
        problem: K of L items, with features and conflicts of the items.

    Returns:
        K of K L placements.
    """
    k, num_items = problem.k, problem.num_arms
    place = jnp.repeat(jnp.arange(k), num_items)
    item = jnp.tile(jnp.arange(num_items), k)
    same_place = place[:, None] == place[None, :]
    same_item = item[:, None] == item[None, :]
    depth = place[:, None].astype(jnp.float32) / k
    features = jnp.concatenate([jnp.tile(problem.features, (k, 1)), depth], axis=1)
    conflicts = jnp.tile(problem.conflicts, (k, k))
    return dataclasses.replace(
        problem,
        features=features,
        conflicts=conflicts & ~same_place,
        space=ORDERED,
        structure=same_place != same_item,  # in the very same placement both are
    )


def encode(problem: Problem, items: jax.Array) -> jax.Array:
    """Turn a list of items int32[..., K] into its placements."""
    num_items = problem.num_arms // problem.k
    first = num_items * jnp.arange(problem.k, dtype=jnp.int32)
    return items + jnp.broadcast_to(first, items.shape)


def decode(problem: Problem, action: jax.Array) -> jax.Array:
    """Turn placements int32[..., K] into the list of items, first place first."""
    return jnp.sort(action, axis=-1) % (problem.num_arms // problem.k)


def exclusions(problem: Problem) -> jax.Array:
    """Placements with one place or one item: bool[L, L]."""
    return problem.structure


def transpositions(scene: Scene, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Let every two items change places.

    Args:
        action: int32[K], local.

    Returns:
        int32[K (K - 1) / 2, K] local actions, and which of them the scene has the arms
        for; the others repeat the action.
    """
    k, num_arms = action.shape[0], scene.problem.num_arms
    num_items = num_arms // k
    local = jnp.full((num_arms,), -1, jnp.int32)
    local = local.at[scene.arms].set(jnp.arange(scene.arms.shape[0], dtype=jnp.int32))
    arms = scene.arms[action]
    place, item = arms // num_items, arms % num_items
    first, second = jnp.triu_indices(k, 1)
    new_first = local[place[first] * num_items + item[second]]
    new_second = local[place[second] * num_items + item[first]]
    is_there = (new_first >= 0) & (new_second >= 0)

    def apply(
        i: jax.Array, j: jax.Array, a: jax.Array, b: jax.Array, is_there: jax.Array
    ) -> jax.Array:
        return jnp.where(is_there, action.at[i].set(a).at[j].set(b), action)

    actions = jax.vmap(apply)(first, second, new_first, new_second, is_there)
    return actions, is_there


def search(
    scene: Scene, model: Quadratic, starts: jax.Array, num_steps: int
) -> tuple[jax.Array, jax.Array]:
    """Exchange items with a tabu list, then let items change places while it helps."""
    found, _ = subsets.search(scene, model, starts, num_steps)

    def improve(action: jax.Array, nothing: None) -> tuple[jax.Array, None]:
        del nothing
        tried, _ = transpositions(scene, action)
        tried = jnp.concatenate([action[None], tried])
        values = jax.vmap(local_search.evaluate, (None, 0))(model, tried)
        return tried[jnp.argmax(values)], None

    def one(action: jax.Array) -> jax.Array:
        return jax.lax.scan(improve, action, None, length=action.shape[0])[0]

    found = jax.vmap(one)(found)
    return found, jax.vmap(local_search.evaluate, (None, 0))(model, found)


def neighbours(
    key: Key, scene: Scene, terrain: Terrain, action: jax.Array, n: int
) -> jax.Array:
    """Exchange an item, or in a quarter of the cases let two change places."""
    number = n // 4 if action.shape[0] > 1 else 0
    swap_key, turn_key = jax.random.split(key)
    swapped = subsets.neighbours(swap_key, scene, terrain, action, n - number)
    if not number:
        return swapped
    turned, is_there = transpositions(scene, action)
    chance = jax.random.uniform(turn_key, is_there.shape)
    rows = jnp.argsort(jnp.where(is_there, -chance, 1.0))[:number]
    rows = jnp.resize(rows, (number,))
    return jnp.concatenate([swapped, turned[rows]])


def best_neighbours(
    key: Key, scene: Scene, model: Quadratic, action: jax.Array, n: int
) -> jax.Array:
    """The exchanges and transpositions of most gain."""
    swapped = subsets.best_neighbours(key, scene, model, action, n)
    if action.shape[0] == 1:
        return swapped
    turned, _ = transpositions(scene, action)
    tried = jnp.concatenate([swapped, turned])
    values = jax.vmap(local_search.evaluate, (None, 0))(model, tried)
    return tried[jax.lax.top_k(values, n)[1]]


def shortlist(key: Key, problem: Problem, worth: jax.Array, size: int) -> jax.Array:
    """All placements of the items of most worth, and of some by chance.

    So that items may change places.
    """
    k, num_items = problem.k, problem.num_arms // problem.k
    best = jnp.max(worth.reshape(k, num_items), axis=0)
    number = min(num_items, max(size // k, 2 * k))
    items = invite(key, best, number)
    first = num_items * jnp.arange(k, dtype=jnp.int32)
    return (first[:, None] + items[None, :]).reshape(-1)


def restrict(problem: Problem, arms: jax.Array) -> Problem:
    """Leave the other placements out."""
    part = subsets.restrict(problem, arms)
    return dataclasses.replace(part, structure=problem.structure[arms][:, arms])


def random(key: Key, problem: Problem, n: int) -> jax.Array:
    """Put items into places in random order; a list comes first, then conflicts."""
    return random_feasible_sets(key, _priced(problem), n)


def repair(problem: Problem, action: jax.Array, priority: jax.Array) -> jax.Array:
    """Keep placements in order of priority, and fill the places that are left."""
    return repair_set(_priced(problem), action, priority)


def _priced(problem: Problem) -> Problem:
    """Let an excluded pair count more than any number of conflicts."""
    broken = problem.k * problem.k
    costs = problem.conflicts + broken * problem.structure.astype(jnp.int32)
    return dataclasses.replace(problem, conflicts=costs)


SPACE = Space(
    random=random,
    repair=repair,
    search=search,
    neighbours=neighbours,
    best_neighbours=best_neighbours,
    shortlist=shortlist,
    restrict=restrict,
    exclusions=exclusions,
)
