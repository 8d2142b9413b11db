"""What the tests of the actor-critic learner and of its sampler share."""

from __future__ import annotations

import numpy as np

from msb_jax.problem import Problem, make_problem

L, K = 12, 3


def small_problem(num_conflicts: int = 12) -> Problem:
    features = np.random.default_rng(0).random((L, 3))
    return make_problem(features, K, metric="ned", num_conflicts=num_conflicts)
