"""The agent with all six samplers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax import runner
from msb_jax.baselines.registry import make_policy
from msb_jax.problem import problem_from_conflicts, stack_problems
from msb_jax.samplers.registry import DEFAULT
from msb_jax.types import Outcome


def test_agent__plays_with_all_six_samplers() -> None:
    settings = {"n_re": 12, "f_in": 6, "constraints": "hard", "lam": 5.0}
    policy = make_policy("master_slave", settings | {"samplers": DEFAULT})
    edges = np.array([[0, 1], [2, 3], [4, 5]])
    problem = problem_from_conflicts(edges, 3, num_arms=10)

    def step(key: jax.Array, state: jax.Array, action: jax.Array) -> tuple:
        mean = state[action].sum()
        return state, Outcome(mean + 0.01 * jax.random.normal(key), mean)

    curves = runner.run(
        policy,
        step,
        jnp.linspace(0.0, 1.0, 10)[None],
        stack_problems([problem]),
        jax.random.split(jax.random.key(0), 1),
        rounds=36,
        f_in=6,
    )
    assert policy.origins == DEFAULT
    assert not curves.violations[:, 12:].any()
    assert set(np.unique(curves.producer)) <= set(range(len(DEFAULT)))
    # The three best arms are free of conflicts.
    np.testing.assert_allclose(curves.mean_reward[:, -6:].max(), 24 / 9, rtol=1e-5)
