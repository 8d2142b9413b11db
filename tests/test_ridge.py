"""The linear part and its gate, and the composite score."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.masters import ridge as linear
from msb_jax.masters.scoring import total_score
from tests.reference import multi_hot

L, K, ROWS, CAPACITY = 8, 3, 30, 40


@functools.cache
def _fitted(noise: float, *, fit: bool) -> tuple[linear.Ridge, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    sets = np.stack([rng.permutation(L)[:K] for _ in range(CAPACITY)]).astype(np.int32)
    sets[ROWS:] = 0
    x = multi_hot(sets[:ROWS], L) / np.sqrt(K)
    y = np.zeros(CAPACITY, np.float32)
    y[:ROWS] = x @ rng.normal(size=L) + noise * rng.normal(size=ROWS)

    @jax.jit
    def run() -> linear.Ridge:
        ridge = linear.new_ridge(L)
        ridge = linear.absorb(ridge, jnp.asarray(sets[:25]), jnp.asarray(25))
        # Only the first five of the second block are rounds.
        ridge = linear.absorb(ridge, jnp.asarray(sets[25:]), jnp.asarray(5))
        return linear.refit(ridge, sets, jnp.asarray(y), jnp.asarray(ROWS), fit=fit)

    return jax.tree.map(np.asarray, run()), x, y[:ROWS].astype(np.float64)


def _evidence(x: np.ndarray, y: np.ndarray, rho: float) -> float:
    cov = np.eye(len(y)) + x @ x.T / rho
    noise = y @ np.linalg.solve(cov, y) / len(y)
    return -0.5 * (len(y) * np.log(noise) + np.linalg.slogdet(cov)[1])


@pytest.mark.parametrize("noise", [0.05, 2.0])
def test_refit__is_ridge_regression_with_the_ridge_of_most_evidence(noise):
    ridge, x, y = _fitted(noise, fit=True)
    rho = float(np.exp(ridge.log_ridge))
    best = max(linear.RIDGES, key=lambda r: _evidence(x, y, r))
    np.testing.assert_allclose(rho, best, rtol=1e-5)
    expected = np.linalg.solve(x.T @ x + rho * np.eye(L), x.T @ y)
    np.testing.assert_allclose(ridge.weights, expected, rtol=1e-3, atol=1e-4)
    cov = np.eye(len(y)) + x @ x.T / rho
    np.testing.assert_allclose(
        ridge.noise, y @ np.linalg.solve(cov, y) / len(y), rtol=1e-3
    )


def test_refit__keeps_the_ridge_unless_asked():
    ridge, x, y = _fitted(0.05, fit=False)
    assert float(ridge.log_ridge) == 0.0
    expected = np.linalg.solve(x.T @ x + np.eye(L), x.T @ y)
    np.testing.assert_allclose(ridge.weights, expected, rtol=1e-3, atol=1e-4)


def test_draw_deviations__have_the_posterior_covariance():
    """20,000 draws; entries within 5 standard errors of s^2 (X'X + rho I)^-1."""
    ridge, x, _ = _fitted(2.0, fit=True)
    n = 20_000
    draws = jax.jit(lambda k: linear.draw_deviations(k, ridge, n))(jax.random.key(0))
    got = np.asarray(draws, np.float64)
    rho = float(np.exp(ridge.log_ridge))
    cov = float(ridge.noise) * np.linalg.inv(x.T @ x + rho * np.eye(L))
    scale = np.sqrt((cov**2 + np.outer(np.diag(cov), np.diag(cov))) / n)
    assert np.all(np.abs(got.T @ got / n - cov) < 5 * scale)


def test_gate__opens_for_what_comes_true_and_closes_for_what_does_not():
    rng = np.random.default_rng(1)
    compare = jax.jit(linear.compare)
    forecasts = rng.normal(size=(20, 10)).astype(np.float32)
    noise = rng.normal(size=(20, 10)).astype(np.float32)
    shares = {}
    for truth in (0.0, 0.5, 1.0):
        gate = linear.new_gate()
        assert float(linear.share(gate)) == 0.5
        for row in range(20):
            outcomes = truth * forecasts[row] + 0.3 * noise[row]
            gate = compare(gate, forecasts[row], outcomes, jnp.asarray(10))
        shares[truth] = float(linear.share(gate))
    # The error of the share is 0.3 / sqrt(sum of squares), about 0.03; 5 of them.
    for truth, got in shares.items():
        assert abs(got - truth) < 0.15
    same = compare(gate, forecasts[0], forecasts[0], jnp.asarray(0))
    assert float(same.agreement) == float(gate.agreement)
    assert float(same.energy) == float(gate.energy)


def test_total_score__soft_subtracts_the_priced_rate():
    mean, bonus = jnp.array([1.0, 2.0]), jnp.array([0.5, 0.25])
    pairs, rate = jnp.array([0, 3]), jnp.array([0.0, 0.3])
    total = total_score(mean, bonus, pairs, rate, lam=5.0, constraints="soft")
    np.testing.assert_allclose(total, [1.5, 0.75], rtol=1e-6)


def test_total_score__hard_orders_by_conflicts_then_by_upper_bound():
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 6, size=50)
    mean = rng.normal(size=50).astype(np.float32) * 7.0
    total = np.asarray(
        total_score(
            jnp.asarray(mean),
            jnp.zeros(50),
            jnp.asarray(pairs),
            jnp.asarray(pairs / 9.0),
            lam=5.0,
            constraints="hard",
            scale=7.0,
        )
    )
    expected = sorted(range(50), key=lambda i: (pairs[i], -mean[i]))
    np.testing.assert_array_equal(np.argsort(-total, kind="stable"), expected)
    assert np.isfinite(total).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"constraints": "firm"}, "soft, hard"), ({"lam": -1.0}, "at least 0")],
)
def test_total_score__refuses_with_a_sentence(changes, message):
    zeros = jnp.zeros(1)
    settings = {"lam": 1.0, "constraints": "soft"} | changes
    with pytest.raises(ValueError, match=message):
        total_score(zeros, zeros, zeros, zeros, **settings)
