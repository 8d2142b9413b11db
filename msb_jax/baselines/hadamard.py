"""Hadamard matrices of the orders that designs for K-sets need.

A Hadamard matrix has entries +1 and -1 and orthogonal rows; its order is 1, 2 or a
multiple of 4. Built here by doubling (Sylvester) from the matrices of Paley:
order q + 1 for a prime q = 3 mod 4 (I) and 2 (q + 1) for a prime q = 1 mod 4 (II).
All multiples of 4 up to 48 exist in this way; 52 is the first that does not.

Source: ALGORITHMS 8.3. Differs from the paper: the authors' code cuts a block out of
the next power of two, which is neither orthogonal nor balanced (8.4).
"""

from __future__ import annotations

import functools

import numpy as np


@functools.cache
def _build(order: int) -> np.ndarray | None:
    """Return a normalised matrix that must not be written to, or None."""
    if order == 1:
        return np.ones((1, 1), np.int8)
    if order % 2 or (order > 2 and order % 4):
        return None
    matrix = None
    if (half := _build(order // 2)) is not None:
        matrix = np.kron(np.array([[1, 1], [1, -1]], np.int8), half)
    elif _is_prime(order - 1):
        matrix = _paley_one(order - 1)
    elif order // 2 % 4 == 2 and _is_prime(order // 2 - 1):
        matrix = _paley_two(order // 2 - 1)
    return None if matrix is None else _normalise(matrix)


def hadamard(order: int) -> np.ndarray:
    """Build a Hadamard matrix whose first row and first column are ones.

    All rows but the first then hold as many +1 as -1.

    Args:
        order: 1, 2 or a multiple of 4 that the constructions reach.

    Returns:
        int8[order, order].
    """
    matrix = _build(order) if order >= 1 else None
    if matrix is None:
        why = "no Hadamard matrix has this order"
        if order >= 4 and order % 4 == 0:
            why = "neither doubling nor Paley's constructions on primes reach it"
        near = f"; the next lower one is {largest_order(order)}" if order > 0 else ""
        raise ValueError(f"Cannot build a Hadamard matrix of {order=}: {why}{near}.")
    return matrix.copy()


def largest_order(limit: int) -> int:
    """Return the largest order not above `limit` that `hadamard` can build."""
    if limit < 1:
        raise ValueError(f"The least order is 1, got limit={limit}.")
    return next(n for n in range(limit, 0, -1) if _build(n) is not None)


def _is_prime(number: int) -> bool:
    if number < 2:
        return False
    return all(number % d for d in range(2, int(number**0.5) + 1))


def _jacobsthal(q: int) -> np.ndarray:
    """Return chi(i - j) for an odd prime q: 0, or whether i - j is a square mod q."""
    chi = np.full(q, -1, np.int8)
    chi[np.arange(1, q) ** 2 % q] = 1
    chi[0] = 0
    index = np.arange(q)
    return chi[(index[:, None] - index[None, :]) % q]


def _border(q: int, sign: int) -> np.ndarray:
    """Put a row of ones and a column of `sign` around the Jacobsthal matrix."""
    core = np.zeros((q + 1, q + 1), np.int8)
    core[0, 1:] = 1
    core[1:, 0] = sign
    core[1:, 1:] = _jacobsthal(q)
    return core


def _paley_one(q: int) -> np.ndarray:
    """Add I to the skew conference matrix of order q + 1; q = 3 mod 4."""
    return _border(q, -1) + np.eye(q + 1, dtype=np.int8)


def _paley_two(q: int) -> np.ndarray:
    """Blow up the symmetric conference matrix of order q + 1; q = 1 mod 4."""
    on = np.array([[1, 1], [1, -1]], np.int8)
    off = np.array([[1, -1], [-1, -1]], np.int8)
    return np.kron(_border(q, 1), on) + np.kron(np.eye(q + 1, dtype=np.int8), off)


def _normalise(matrix: np.ndarray) -> np.ndarray:
    matrix = matrix * matrix[:1, :]
    return matrix * matrix[:, :1]
