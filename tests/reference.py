"""Float64 NumPy re-derivations that the JAX code is compared with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np


def multi_hot(actions: np.ndarray, num_arms: int) -> np.ndarray:
    """K-hot rows: [N, L]."""
    rows = np.zeros((len(actions), num_arms))
    np.put_along_axis(rows, np.asarray(actions, int), 1.0, axis=1)
    return rows


def gaussian_process(
    gram: np.ndarray,
    cross: np.ndarray,
    own: np.ndarray,
    targets: np.ndarray,
    noise: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Posterior mean [N] and covariance [N, N] by the textbook formula."""
    inverse = np.linalg.inv(gram + noise * np.eye(len(gram)))
    return cross.T @ inverse @ targets, own - cross.T @ inverse @ cross


def all_sets(num_arms: int, k: int) -> Iterator[tuple[int, ...]]:
    """Every K-set."""
    return itertools.combinations(range(num_arms), k)


def best_set(
    pair: np.ndarray, linear: np.ndarray, conflicts: np.ndarray, k: int
) -> tuple[tuple[int, ...], float]:
    """Maximise x'Qx + d'x over the K-sets without a conflict, by enumeration."""
    best, best_value = (), -np.inf
    for chosen in all_sets(len(linear), k):
        index = list(chosen)
        if conflicts[np.ix_(index, index)].any():
            continue
        value = pair[np.ix_(index, index)].sum() + linear[index].sum()
        if value > best_value:
            best, best_value = chosen, value
    return best, best_value
