"""What the tests of the attention network and of the G2ANet sampler share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.competence import Objective, known_view
from msb_jax.networks.attention import init_nets
from msb_jax.problem import make_problem
from msb_jax.samplers.base import Sampler, View
from msb_jax.samplers.g2anet import G2ANetConfig, g2anet
from msb_jax.types import Quadratic

F, H = 3, 4
L, K = 12, 3
CONFIG = G2ANetConfig(num_steps=2, batch=16, hidden=H)
start_nets = jax.jit(init_nets, static_argnums=(1, 2))


def small_problem(num_arms: int = L, k: int = K) -> Any:
    features = np.random.default_rng(0).random((num_arms, 2))
    return make_problem(features, k, metric="ned", num_conflicts=num_arms)


def random_view(problem: Any, seed: int = 0, *, is_hard: bool = False) -> View:
    rng = np.random.default_rng(seed)
    size = problem.num_arms
    pair = 0.2 * rng.normal(size=(size, size))
    model = Quadratic(
        pair=jnp.asarray((pair + pair.T) / 2, jnp.float32),
        linear=jnp.asarray(rng.normal(size=size), jnp.float32),
        offset=jnp.zeros(()),
    )
    view = known_view(Objective(problem, model, jnp.ones(())))
    if is_hard:
        view = view._replace(
            model=model,
            forbidden=problem.conflicts,
            pair_price=jnp.full((), jnp.inf, jnp.float32),
        )
    return view


@functools.cache
def small_sampler(**settings: Any) -> Sampler:
    """A small sampler; its functions are compiled once for all tests."""
    sampler = g2anet(dataclasses.replace(CONFIG, **settings))
    assert sampler.imitate is not None
    return sampler._replace(
        init=jax.jit(sampler.init),
        update=jax.jit(sampler.update),
        propose=jax.jit(sampler.propose, static_argnums=3),
        imitate=jax.jit(sampler.imitate),
    )
