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

from msb_jax.problem import Problem
from msb_jax.solvers.bound_search import Terrain
from msb_jax.types import Key, Quadratic


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
    # problem, worth [L], number -> the arms that a search looks at, sorted
    shortlist: Callable[[Problem, jax.Array, int], jax.Array]
    # problem, arms [A] -> the same problem with these arms alone
    restrict: Callable[[Problem, jax.Array], Problem]
    # problem -> pairs that no action may hold [L, L]; None: there are none
    exclusions: Callable[[Problem], jax.Array] | None = None
    # problem, worth [L] -> the action [K] of most worth, in JAX; None: the conflict
    # graph is all there is to know, and SCIP finds it (`solvers.scip`)
    maximise: Callable[[Problem, jax.Array], jax.Array] | None = None
