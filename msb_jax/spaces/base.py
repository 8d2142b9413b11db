"""What a combinatorial problem has to say of its actions.

An action is always K distinct arms, int32[K]; a space says which K arms make one, and
how to find good ones. Everything in it is pure JAX and works for one run.

Searches look at A of the L arms; what they see of the problem is a `Scene`. Pairs are
`forbidden` there when no action may hold both arms: because of the space itself
(`exclusions`), or because they conflict and constraints are hard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.problem import Problem
from msb_jax.solvers.bound_search import Terrain
from msb_jax.types import Key, Quadratic

# Where a search cannot look at all arms, one in so many is there by chance: an arm
# whose first rounds were unlucky would never be looked at again.
GUESTS = 4
_ABOVE_ALL = 1e30  # less than infinite


class Scene(NamedTuple):
    """What a search may move among."""

    problem: Problem
    arms: jax.Array  # [A] int32, sorted: local arm a is arm arms[a]
    forbidden: jax.Array  # [A, A] bool


class Space(NamedTuple):
    """A family of actions. `actions` are local to the scene, where there is one."""

    # key, problem, n -> random actions [n, K], with few conflicts
    random: Callable[[Key, Problem, int], jax.Array]
    # problem, any K arms, priority [L] -> the action [K] most like them
    repair: Callable[[Problem, jax.Array, jax.Array], jax.Array]
    # scene, model, starts [N, K], steps -> better actions [N, K] and values [N]
    search: Callable[[Scene, Quadratic, jax.Array, int], tuple[jax.Array, jax.Array]]
    # key, scene, terrain, action [K], n -> actions near it [n, K]
    neighbours: Callable[[Key, Scene, Terrain, jax.Array, int], jax.Array]
    # key, scene, hollow model, action [K], n -> the best actions near it [n, K]
    best_neighbours: Callable[[Key, Scene, Quadratic, jax.Array, int], jax.Array]
    # key, problem, worth [L], number -> the arms that a search looks at, sorted; those
    # of infinite worth are among them
    shortlist: Callable[[Key, Problem, jax.Array, int], jax.Array]
    # problem, arms [A] -> the same problem with these arms alone
    restrict: Callable[[Problem, jax.Array], Problem]
    # problem -> pairs that no action may hold [L, L]; None: there are none
    exclusions: Callable[[Problem], jax.Array] | None = None
    # problem, worth [L] -> the action [K] of most worth, in JAX; None: the conflict
    # graph is all there is to know, and SCIP finds it (`solvers.scip`)
    maximise: Callable[[Problem, jax.Array], jax.Array] | None = None


def invite(key: Key, worth: jax.Array, size: int) -> jax.Array:
    """Choose arms of infinite worth, random ones, and those of most worth.

    Args:
        key: of the random ones, one in `GUESTS` if not all arms are chosen.
        worth: [L].
        size: how many, at most L.

    Returns:
        int32[size], sorted.
    """
    number = size // GUESTS if size < worth.shape[0] else 0
    chance = jax.random.uniform(key, worth.shape)
    guests = jax.lax.top_k(jnp.where(jnp.isinf(worth), -1.0, chance), number)[1]
    worth = worth.at[guests].max(_ABOVE_ALL)
    return jnp.sort(jax.lax.top_k(worth, size)[1]).astype(jnp.int32)
