"""What the tests of the policies for ordered lists share."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax.baselines.registry import make_policy
from msb_jax.problem import Problem, problem_from_conflicts
from msb_jax.types import Policy

EDGES = np.array([[0, 1], [0, 2], [1, 2], [3, 4], [5, 6]])
L, K, D = 8, 3, 2


def small_problem(num_arms: int = L, k: int = K, edges: Any = EDGES) -> Problem:
    features = np.random.default_rng(0).uniform(size=(num_arms, D))
    return problem_from_conflicts(np.asarray(edges), k, features)


@cache
def policy_of(name: str, constraints: str, target: str = "clicks") -> Policy:
    """Make a policy once, so that tests share its compiled blocks."""
    return make_policy(name, {"constraints": constraints, "target": target})


def tell(policy: Policy, state: Any, action: Any, reward: Any, clicks: Any) -> Any:
    """Tell a round as the runner does where there are clicks."""
    key, action = jax.random.key(0), jnp.asarray(action, jnp.int32)
    reward, clicks = jnp.float32(reward), jnp.asarray(clicks, jnp.float32)
    if policy.tell_clicks is None:
        return policy.tell(key, state, action, reward)
    return policy.tell_clicks(key, state, action, reward, clicks)
