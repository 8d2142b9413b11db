"""The primal-dual Wolpertinger sampler learns, and the agent runs with all six."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import competence
from msb_jax import runner
from msb_jax.baselines.registry import make_policy
from msb_jax.problem import problem_from_conflicts, stack_problems
from msb_jax.samplers.registry import SAMPLERS, make_samplers
from msb_jax.types import Outcome


@pytest.mark.parametrize("demonstrations", [False, True])
def test_wolpertinger__learns_a_known_objective(demonstrations: bool) -> None:
    objective = competence.make_objective(3, form="linear", num_arms=20, k=4)
    (sampler,) = make_samplers(("wolpertinger",))

    @jax.jit
    def train(key: jax.Array) -> competence.Report:
        return competence.train(
            key, sampler, objective, refreshes=30, demonstrations=demonstrations
        )[1]

    report = train(jax.random.key(0))
    assert report.best > 0.97
    assert report.mean > report.random_mean + 0.15
    assert report.violation < 0.5 * report.random_violation


def test_agent__plays_with_all_six_samplers() -> None:
    settings = {"n_re": 12, "f_in": 6, "constraints": "hard", "lam": 5.0}
    policy = make_policy("master_slave", settings | {"samplers": tuple(SAMPLERS)})
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
    assert policy.origins == tuple(SAMPLERS)
    assert not curves.violations[:, 12:].any()
    assert set(np.unique(curves.producer)) <= set(range(len(SAMPLERS)))
    # The three best arms are free of conflicts.
    np.testing.assert_allclose(curves.mean_reward[:, -6:].max(), 24 / 9, rtol=1e-5)
