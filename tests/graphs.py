"""Conflict graphs for tests: any one, the known ones, and a count of their pairs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

NUM_ARMS = 9
properties = settings(deadline=None, max_examples=25, derandomize=True, database=None)


@st.composite
def graphs(draw: Any, num_arms: int = NUM_ARMS) -> np.ndarray:
    pairs = list(itertools.combinations(range(num_arms), 2))
    edges = draw(st.sets(st.sampled_from(pairs)))
    graph = np.zeros((num_arms, num_arms), bool)
    for i, j in edges:
        graph[i, j] = graph[j, i] = True
    return graph


def cycle(num_arms: int) -> np.ndarray:
    graph = np.zeros((num_arms, num_arms), bool)
    for i in range(num_arms):
        graph[i, (i + 1) % num_arms] = graph[(i + 1) % num_arms, i] = True
    return graph


def complete(num_arms: int) -> np.ndarray:
    return ~np.eye(num_arms, dtype=bool)


def count_pairs(graph: np.ndarray, action: Any) -> int:
    return sum(bool(graph[i, j]) for i, j in itertools.combinations(list(action), 2))
