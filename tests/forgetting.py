"""What the tests of the masters that forget share."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from msb_jax.masters.neural_ucb import NeuralUcbConfig, neural_ucb
from msb_jax.masters.ntk_ucb import NtkUcbConfig, ntk_ucb
from msb_jax.problem import Problem, problem_from_conflicts
from msb_jax.types import Master
from tests.reference import multi_hot

L, K = 12, 3
EDGES = np.array([[0, 1], [2, 3], [4, 5]])
NTK: dict[str, Any] = {"block": 10, "fit_rows": 64, "fit_steps": 15, "memory": 60}
NEURAL: dict[str, Any] = {
    "width": 8,
    "num_steps": 20,
    "batch_size": 16,
    "capacity": 64,
    "block": 10,
    "extractor_sets": 4,
    "memory": 60,
}
KEY = functools.partial(jax.random.key, 0)


def small_problem() -> Problem:
    return problem_from_conflicts(EDGES, K, num_arms=L)


def distinct_sets(n: int, seed: int) -> np.ndarray:
    """Distinct random sets: int32[n, K]."""
    rng = np.random.default_rng(seed)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < n:
        found[tuple(np.sort(rng.permutation(L)[:K]).tolist())] = None
    return np.array(list(found), np.int32)


def random_rounds(
    n: int, switch: int | None = None, noise: float = 0.1
) -> tuple[np.ndarray, np.ndarray]:
    """Random sets, and rewards whose weights are reversed at a round."""
    rng = np.random.default_rng(3)
    worth = np.sort(rng.random(L))
    sets = np.stack([rng.permutation(L)[:K] for _ in range(n)]).astype(np.int32)
    hot = multi_hot(sets, L)
    late = np.arange(n) >= (n if switch is None else switch)
    rewards = np.where(late, hot @ worth[::-1], hot @ worth)
    return sets, (1.0 + rewards + noise * rng.normal(size=n)).astype(np.float32)


@functools.cache
def compiled_master(name: str, **changes: Any) -> Master:
    if name == "ntk":
        master = ntk_ucb(NtkUcbConfig(**(NTK | changes)))
    else:
        master = neural_ucb(NeuralUcbConfig(**(NEURAL | changes)))
    return master._replace(
        refresh=jax.jit(master.refresh, static_argnames="fit"),
        belief=jax.jit(master.belief),
        score=jax.jit(master.score),
        fitted=jax.jit(master.fitted),
        radius=jax.jit(master.radius),
    )


@functools.partial(jax.jit, static_argnums=0)
def tell(master: Master, state: Any, sets: jax.Array, rewards: jax.Array) -> Any:
    def one(state: Any, told: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        return master.update(KEY(), state, *told), None

    return jax.lax.scan(one, state, (sets, rewards))[0]


def learn(master: Master, sets: np.ndarray, rewards: np.ndarray, cuts: int = 1) -> Any:
    """Tell the rounds, with a refresh after each of `cuts` equal parts."""
    state = master.init(KEY(), small_problem())
    for part in np.split(np.arange(len(sets)), cuts):
        state = tell(master, state, sets[part], rewards[part])
        state = master.refresh(KEY(), state, fit=True)
    return state
