"""The main case: every K arms make an action, and conflicts are all that matters."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from msb_jax.problem import Problem, random_feasible_sets, repair
from msb_jax.solvers import bound_search, local_search
from msb_jax.solvers.bound_search import Terrain
from msb_jax.spaces.base import Scene, Space, invite
from msb_jax.types import Key, Quadratic


def search(
    scene: Scene, model: Quadratic, starts: jax.Array, num_steps: int
) -> tuple[jax.Array, jax.Array]:
    """Exchange arms, with a tabu list."""
    return local_search.tabu_search(model, scene.forbidden, starts, num_steps=num_steps)


def neighbours(
    key: Key, scene: Scene, terrain: Terrain, action: jax.Array, n: int
) -> jax.Array:
    """Exchange one arm, half of the time where it promises most."""
    del scene
    return bound_search.exchanges(key, terrain, action, n)


def best_neighbours(
    key: Key, scene: Scene, model: Quadratic, action: jax.Array, n: int
) -> jax.Array:
    """The single exchanges of most gain; the set itself where there are too few."""
    del key
    gains, allowed = local_search.swap_gains(model, scene.forbidden, action)
    gains = jnp.where(allowed, gains, local_search.FORBIDDEN).reshape(-1)
    size = scene.arms.shape[0]
    gain, cells = jax.lax.top_k(gains, min(n, gains.shape[0]))
    swapped = jax.vmap(lambda cell: action.at[cell // size].set(cell % size))(cells)
    is_legal = gain > local_search.FORBIDDEN
    single = jnp.where(is_legal[:, None], swapped, action[None])
    return jnp.concatenate([single, jnp.tile(action, (n - single.shape[0], 1))])


def shortlist(key: Key, problem: Problem, worth: jax.Array, size: int) -> jax.Array:
    """The arms of most worth, and some by chance: int32[size], sorted."""
    del problem
    return invite(key, worth, size)


def restrict(problem: Problem, arms: jax.Array) -> Problem:
    """Leave the other arms out."""
    return dataclasses.replace(
        problem,
        features=problem.features[arms],
        conflicts=problem.conflicts[arms][:, arms],
    )


SPACE = Space(
    random=random_feasible_sets,
    repair=repair,
    search=search,
    neighbours=neighbours,
    best_neighbours=best_neighbours,
    shortlist=shortlist,
    restrict=restrict,
)
