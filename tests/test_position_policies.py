"""The formulas of the position-based policies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax.baselines.pbm_lin_ucb import PbmLinUCBConfig, pbm_lin_ucb
from msb_jax.baselines.pbm_ucb import pbm_bound
from msb_jax.baselines.registry import make_policy
from msb_jax.positions import examination
from tests.list_policies import K, L, small_problem, tell


def test_pbm_bound__equals_the_formula() -> None:
    found = pbm_bound(
        jnp.array([2.0, 0.0, 0.0]),
        jnp.array([5.0, 4.0, 0.0]),
        jnp.array([3.5, 4.0, 0.0]),
        jnp.float32(6.0),
    )
    first = 2 / 3.5 + np.sqrt(5 / 3.5) * np.sqrt(6 / (2 * 3.5))
    np.testing.assert_allclose(found[:2], [first, np.sqrt(6 / 8)], rtol=1e-5)
    assert np.isfinite(found[2])
    assert found[2] > 1e30  # never shown: first


def test_pbm_ucb__with_all_places_seen_is_ucb_on_the_top_k() -> None:
    policy = make_policy("pbm_ucb", {"decay": 1.0, "extra": 0.0})
    state = policy.init(jax.random.key(0), small_problem())
    rng = np.random.default_rng(6)
    shown, hits = np.zeros(L), np.zeros(L)
    ask = jax.jit(policy.ask)
    for t in range(40):
        state, action = ask(jax.random.key(t), state)
        chosen = np.asarray(action)
        if shown.min() > 0:
            ucb = hits / shown + np.sqrt(np.log(t + 1) / (2 * shown))
            np.testing.assert_allclose(ucb[chosen], np.sort(ucb)[::-1][:K], rtol=1e-4)
        clicks = rng.integers(0, 2, K)
        state = tell(policy, state, action, 0.0, clicks)
        shown[chosen] += 1
        hits[chosen] += clicks
    assert shown.min() > 0
    np.testing.assert_array_equal(state.shown, state.seen)


def test_pbm_ucb__sees_lower_places_less() -> None:
    policy = make_policy("pbm_ucb", {"decay": 0.5})
    state = policy.init(jax.random.key(0), small_problem())
    state = tell(policy, state, [3, 0, 6], 0.0, [1.0, 0.0, 1.0])
    np.testing.assert_allclose(state.seen, [0.5, 0, 0, 1, 0, 0, 0.25, 0])
    np.testing.assert_allclose(state.shown, [1, 0, 0, 1, 0, 0, 1, 0])
    np.testing.assert_allclose(state.clicks, [0, 0, 0, 1, 0, 0, 1, 0])


def test_pbm_lin_ucb__recovers_theta_from_independent_rounds() -> None:
    decay, ridge = 0.6, 1e-5
    policy = pbm_lin_ucb(PbmLinUCBConfig(decay=decay, ridge=ridge))
    state = policy.init(jax.random.key(0), small_problem())
    rng = np.random.default_rng(7)
    theta, kappa = rng.uniform(size=L), examination(decay, K)
    learn = jax.jit(policy.tell)
    phi = np.zeros((L, L))
    for t in range(L):  # the list wanders through the arms
        action = (t + np.arange(K)) % L
        phi[t, action] = kappa
        reward = jnp.float32(kappa @ theta[action])
        key = jax.random.key(t)
        state = learn(key, state, jnp.asarray(action, jnp.int32), reward)
    assert np.linalg.matrix_rank(phi) == L
    np.testing.assert_allclose(state.inverse @ state.cross, theta, atol=2e-2)
    np.testing.assert_allclose(np.linalg.solve(phi, phi @ theta), theta)


def test_pbm_lin_ucb__inverse_equals_the_explicit_one() -> None:
    policy = pbm_lin_ucb(PbmLinUCBConfig(decay=0.6, ridge=0.1))
    state = policy.init(jax.random.key(0), small_problem())
    learn = jax.jit(policy.tell)
    rng = np.random.default_rng(8)
    v, b = 0.1 * np.eye(L), np.zeros(L)
    for t in range(60):
        action, reward = rng.permutation(L)[:K], rng.normal()
        phi = np.zeros(L)
        phi[action] = 0.6 ** np.arange(K)
        v, b = v + np.outer(phi, phi), b + reward * phi
        key = jax.random.key(t)
        action = jnp.asarray(action, jnp.int32)
        state = learn(key, state, action, jnp.float32(reward))
    np.testing.assert_allclose(state.inverse, np.linalg.inv(v), atol=1e-4)
    np.testing.assert_allclose(state.cross, b, atol=1e-4)
