"""Families of actions by name: sets, ordered lists, paths.

A space joins by one line here, and by a function of its module that makes a `Problem`
with that name.
"""

from __future__ import annotations

import dataclasses

import jax

from msb_jax.problem import ORDERED, PATHS, SUBSETS, Problem, random_sets
from msb_jax.spaces import ordered, paths, subsets
from msb_jax.spaces.base import Scene, Space
from msb_jax.types import Key

SPACES: dict[str, Space] = {
    SUBSETS: subsets.SPACE,
    ORDERED: ordered.SPACE,
    PATHS: paths.SPACE,
}

__all__ = ["SPACES", "Scene", "Space", "forbidden_pairs", "legal_actions", "space_of"]


def space_of(problem: Problem) -> Space:
    """The space of a problem."""
    return SPACES[problem.space]


def forbidden_pairs(problem: Problem, is_hard: bool) -> jax.Array:
    """Pairs that no action may hold: bool[L, L]."""
    forbidden = problem.conflicts & is_hard
    exclusions = space_of(problem).exclusions
    return forbidden if exclusions is None else forbidden | exclusions(problem)


def legal_actions(key: Key, problem: Problem, n: int, is_hard: bool) -> jax.Array:
    """Draw n random actions [n, K] that hold no forbidden pair where that succeeds."""
    if problem.space == SUBSETS and not is_hard:
        return random_sets(key, problem, n)
    legal = dataclasses.replace(problem, conflicts=forbidden_pairs(problem, is_hard))
    return space_of(problem).random(key, legal, n)
