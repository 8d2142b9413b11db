"""The formulas of the cascade policies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.baselines import cascade_lsb as lsb
from msb_jax.baselines.cascade_hybrid import CascadeHybridConfig, cascade_hybrid
from msb_jax.baselines.cascade_kl_ucb import bernoulli_kl, kl_bound
from msb_jax.baselines.cascade_lsb import CascadeLSBConfig, cascade_lsb
from msb_jax.envs.cascading import visible_clicks
from msb_jax.problem import problem_from_conflicts
from tests.list_policies import D, K, L, policy_of, small_problem, tell

# CascadeKL-UCB


def test_bernoulli_kl__of_equal_chances_is_zero() -> None:
    p = jnp.array([0.0, 0.3, 1.0])
    np.testing.assert_allclose(bernoulli_kl(p, p), 0.0, atol=1e-7)
    expected = 0.3 * np.log(0.3 / 0.6) + 0.7 * np.log(0.7 / 0.4)
    assert bernoulli_kl(jnp.float32(0.3), jnp.float32(0.6)) == pytest.approx(expected)
    assert bernoulli_kl(jnp.float32(0.5), jnp.float32(1.0)) == np.inf


def test_kl_bound__closed_forms() -> None:
    count = jnp.array([1.0, 3.0, 20.0, 500.0])
    threshold = jnp.float32(5.0)
    zero = kl_bound(jnp.zeros(4), count, threshold)
    np.testing.assert_allclose(zero, 1.0 - np.exp(-5.0 / count), rtol=1e-5)
    np.testing.assert_array_equal(kl_bound(jnp.ones(4), count, threshold), 1.0)
    # Never shown, and no threshold yet.
    assert kl_bound(jnp.zeros(1), jnp.zeros(1), threshold) == 1.0
    rate = jnp.array([0.2, 0.5, 0.9, 0.0])
    flat = kl_bound(rate, count, jnp.float32(0.0))
    np.testing.assert_allclose(flat, rate, atol=1e-3)


def test_kl_bound__solves_the_equation_and_falls_with_the_count() -> None:
    count = jnp.array([2.0, 5.0, 30.0, 200.0, 1e4, 1e7])
    rate = jnp.full((6,), 0.4)
    bound = kl_bound(rate, count, jnp.float32(6.0))
    assert (np.diff(bound) < 0).all()
    assert (bound >= rate).all()
    assert bound[-1] == pytest.approx(0.4, abs=2e-3)
    gaps = count * bernoulli_kl(rate, bound)
    np.testing.assert_allclose(gaps[:4], 6.0, rtol=1e-3)


def test_cascade_kl_ucb__counts_what_was_read() -> None:
    policy = policy_of("cascade_kl_ucb", "soft")
    state = policy.init(jax.random.key(0), small_problem())
    state = tell(policy, state, [5, 2, 7], 0.0, [0.0, 1.0, -1.0])
    state = tell(policy, state, [2, 7, 5], 0.0, [0.0, 0.0, 0.0])
    np.testing.assert_array_equal(state.read, [0, 0, 2, 0, 0, 2, 0, 1])
    np.testing.assert_array_equal(state.hits, [0, 0, 1, 0, 0, 0, 0, 0])
    assert int(state.told) == 2


# CascadeLSB and CascadeHybrid


def lsb_state(k: int = K) -> lsb.LinearCascadeState:
    policy = cascade_lsb(CascadeLSBConfig())
    return policy.init(jax.random.key(0), small_problem(k=k))


def test_lsb__gains_add_up_to_the_coverage_of_the_list() -> None:
    state = lsb_state()
    action = jnp.array([4, 0, 6])
    gains = lsb.list_rows(state, action)  # [K, D]
    topics = np.asarray(state.topics)[np.asarray(action)]
    coverage = 1.0 - np.prod(1.0 - topics, axis=0)
    np.testing.assert_allclose(gains.sum(axis=0), coverage, rtol=1e-5)
    # The rows of the search are those of the list.
    left = jnp.ones((D,))
    for place, arm in enumerate(action.tolist()):
        np.testing.assert_allclose(
            lsb.rows_of(state, left)[arm], gains[place], rtol=1e-5
        )
        left = left * (1.0 - state.topics[arm])


def test_lsb__a_topic_that_is_covered_gains_nothing() -> None:
    state = lsb_state()
    state = state._replace(topics=state.topics.at[1].set(jnp.array([1.0, 0.0])))
    gains = lsb.list_rows(state, jnp.array([1, 2, 3]))
    np.testing.assert_array_equal(gains[1:, 0], 0.0)
    assert (gains[1:, 1] > 0).all()


def test_lsb__posterior_equals_the_explicit_one() -> None:
    sigma = 0.3
    policy = cascade_lsb(CascadeLSBConfig(sigma=sigma))
    state = policy.init(jax.random.key(0), small_problem())
    precision, moment = np.eye(D), np.zeros(D)
    rng = np.random.default_rng(2)
    for _ in range(20):
        action = rng.permutation(L)[:K]
        clicks = np.asarray(visible_clicks(jnp.asarray(rng.random(K) < 0.4)))
        rows = np.asarray(lsb.list_rows(state, jnp.asarray(action)), np.float64)
        for row, click in zip(rows, clicks, strict=True):
            if click >= 0:
                precision += np.outer(row, row) / sigma**2
                moment += row * click
        state = tell(policy, state, action, 0.0, clicks)
    theta, cov = lsb.posterior(state, sigma)
    np.testing.assert_allclose(cov, np.linalg.inv(precision), rtol=1e-3, atol=1e-6)
    expected = np.linalg.solve(precision, moment) / sigma**2
    np.testing.assert_allclose(theta, expected, rtol=1e-3)


def test_lsb__one_place_is_lin_ucb() -> None:
    policy = cascade_lsb(CascadeLSBConfig(alpha=0.8, sigma=1.0))
    state = policy.init(jax.random.key(0), small_problem(k=1))
    x = np.asarray(state.topics, np.float64)
    v, b = np.eye(D), np.zeros(D)
    rng = np.random.default_rng(3)
    ask = jax.jit(policy.ask)
    for t in range(30):
        state, action = ask(jax.random.key(t), state)
        inverse = np.linalg.inv(v)
        width = np.sqrt(np.einsum("ld,de,le->l", x, inverse, x))
        bound = x @ inverse @ b + 0.8 * width
        assert bound[int(action[0])] == pytest.approx(bound.max(), abs=1e-5)
        click = float(rng.random() < 0.5)
        state = tell(policy, state, action, click, [click])
        v += np.outer(x[int(action[0])], x[int(action[0])])
        b += x[int(action[0])] * click


def test_lsb__topics_are_in_the_unit_interval() -> None:
    signed = np.array([[-1.0, 0.2, 3.0], [1.0, 0.4, 3.0], [0.0, 0.3, 3.0]])
    free = np.zeros((3, 3), bool)
    topics = lsb.topics_of(problem_from_conflicts(free, 2, signed), "x")
    expected = [[0.0, 0.2, 0.0], [1.0, 0.4, 0.0], [0.5, 0.3, 0.0]]
    np.testing.assert_allclose(topics, expected, rtol=1e-6)
    with pytest.raises(ValueError, match="cascade_lsb needs arms with features"):
        lsb.topics_of(problem_from_conflicts(free, 2), "cascade_lsb")


def test_hybrid__without_relevance_is_lsb() -> None:
    hybrid = cascade_hybrid(CascadeHybridConfig(alpha=0.8))
    plain = cascade_lsb(CascadeLSBConfig(alpha=0.8, sigma=1.0))
    one = hybrid.init(jax.random.key(0), small_problem())
    one = one._replace(relevance=jnp.zeros_like(one.relevance))
    two = plain.init(jax.random.key(0), small_problem())
    rng = np.random.default_rng(5)
    ask_hybrid, ask_plain = jax.jit(hybrid.ask), jax.jit(plain.ask)
    for t in range(20):
        one, action = ask_hybrid(jax.random.key(t), one)
        two, same = ask_plain(jax.random.key(t), two)
        np.testing.assert_array_equal(action, same)
        clicks = rng.integers(0, 2, K)
        one = tell(hybrid, one, action, 0.0, clicks)
        two = tell(plain, two, action, 0.0, clicks)
    assert float(one.cross[:D].sum()) > 0


def test_hybrid__equals_block_elimination() -> None:
    """The formulas of LinUCB-hybrid (ALGORITHMS 9.3), in float64."""
    policy = cascade_hybrid(CascadeHybridConfig())
    state = policy.init(jax.random.key(0), small_problem())
    a_x, a_z, cross = np.eye(D), np.eye(D), np.zeros((D, D))  # cross: B, X by Z
    b_x, b_z = np.zeros(D), np.zeros(D)
    rng = np.random.default_rng(4)
    for _ in range(25):
        action, clicks = rng.permutation(L)[:K], rng.integers(0, 2, K)
        rows = np.asarray(lsb.list_rows(state, jnp.asarray(action)), np.float64)
        z, x = rows[:, :D], rows[:, D:]
        a_z += cross.T @ np.linalg.solve(a_x, cross)
        b_z += cross.T @ np.linalg.solve(a_x, b_x)
        a_x, cross, b_x = a_x + x.T @ x, cross + x.T @ z, b_x + x.T @ clicks
        a_z += z.T @ z - cross.T @ np.linalg.solve(a_x, cross)
        b_z += z.T @ clicks - cross.T @ np.linalg.solve(a_x, b_x)
        state = tell(policy, state, action, 0.0, clicks)
    beta = np.linalg.solve(a_z, b_z)
    theta = np.linalg.solve(a_x, b_x - cross @ beta)
    found, cov = lsb.posterior(state, 1.0)
    np.testing.assert_allclose(found, np.append(beta, theta), rtol=2e-3, atol=2e-4)
    rows = np.asarray(lsb.rows_of(state, jnp.array([0.7, 0.4])), np.float64)
    inv_x, inv_z = np.linalg.inv(a_x), np.linalg.inv(a_z)
    mixed = inv_x @ cross @ inv_z  # [X, Z]
    for row in rows:
        z, x = row[:D], row[D:]
        s = z @ inv_z @ z - 2 * x @ mixed @ z + x @ inv_x @ x
        s += x @ mixed @ cross.T @ inv_x @ x
        expected = z @ beta + x @ theta + 0.5 * np.sqrt(s)
        row32 = jnp.asarray(row, jnp.float32)[None]
        score = lsb.upper_bounds(row32, found, cov, 0.5)[0]
        assert score == pytest.approx(expected, rel=1e-3)


def test_hybrid__without_topics_is_linear_in_the_relevance() -> None:
    hybrid = cascade_hybrid(CascadeHybridConfig(alpha=0.5))
    state = hybrid.init(jax.random.key(0), small_problem())
    state = state._replace(topics=jnp.zeros_like(state.topics))
    x = np.asarray(state.relevance, np.float64)
    v, b = np.eye(D), np.zeros(D)
    ask = jax.jit(hybrid.ask)
    for t in range(10):
        state, action = ask(jax.random.key(t), state)
        inverse = np.linalg.inv(v)
        bound = x @ inverse @ b
        bound = bound + 0.5 * np.sqrt(np.einsum("ld,de,le->l", x, inverse, x))
        shown = bound[np.asarray(action)]
        np.testing.assert_allclose(shown, np.sort(bound)[::-1][:K], atol=1e-5)
        state = tell(hybrid, state, action, 0.0, [1.0, 0.0, 1.0])
        rows = x[np.asarray(action)]
        v, b = v + rows.T @ rows, b + rows.T @ np.array([1.0, 0.0, 1.0])
