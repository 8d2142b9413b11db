"""Forgetting: the recursions, their Gram form, and what masters make of them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.masters import discount as forget
from msb_jax.masters import evidence, set_kernel
from msb_jax.masters import history as hist
from msb_jax.masters.discounted_confidence import discounted_confidence
from msb_jax.masters.neural_ucb import NeuralUcbConfig
from msb_jax.masters.ntk_ucb import NtkUcbConfig
from msb_jax.networks import ucb
from tests.forgetting import (
    KEY,
    K,
    L,
    compiled_master,
    distinct_sets,
    learn,
    random_rounds,
    small_problem,
    tell,
)
from tests.reference import multi_hot

ROWS = 40
GAMMA, LAM1 = 0.9, 0.7
ALMOST_ONE = 0.9999999


def _direct(rows: np.ndarray, gamma: float) -> np.ndarray:
    """lam1 I + sum of gamma^age a a'."""
    weights = gamma ** np.arange(len(rows))[::-1]
    return rows.T @ (weights[:, None] * rows) + LAM1 * np.eye(rows.shape[1])


def _recursions(rows: np.ndarray, rewards: np.ndarray, gamma: float) -> Any:
    state = forget.start_recursions(rows.shape[1], LAM1)

    def one(state: Any, told: Any) -> tuple[Any, None]:
        return forget.update_recursions(state, *told, gamma, LAM1), None

    return jax.lax.scan(one, state, (jnp.asarray(rows), jnp.asarray(rewards)))[0]


@pytest.mark.parametrize("gamma", [GAMMA, 1.0])
def test_recursions__equal_the_direct_sums(gamma: float) -> None:
    rng = np.random.default_rng(0)
    rows, rewards = rng.normal(size=(30, 4)), rng.normal(size=30)
    with jax.enable_x64(True):
        state = _recursions(rows, rewards, gamma)
        weights = gamma ** np.arange(30)[::-1]
        np.testing.assert_allclose(state.gram, _direct(rows, gamma), atol=1e-6)
        np.testing.assert_allclose(state.squared, _direct(rows, gamma**2), atol=1e-6)
        moment = rows.T @ (weights * rewards)
        np.testing.assert_allclose(state.moment, moment, atol=1e-6)
        if gamma == 1.0:
            np.testing.assert_array_equal(state.gram, state.squared)


def test_recursions__of_a_constant_action_have_a_limit() -> None:
    state = _recursions(np.eye(2, dtype=np.float32)[[0] * 300], np.ones(300), GAMMA)
    np.testing.assert_allclose(state.gram[0, 0], LAM1 + 1 / (1 - GAMMA), rtol=1e-5)
    limit = LAM1 + 1 / (1 - GAMMA**2)
    np.testing.assert_allclose(state.squared[0, 0], limit, rtol=1e-5)
    # What is never seen stays at the prior, whatever is forgotten.
    np.testing.assert_allclose(state.squared[1, 1], LAM1, rtol=1e-5)


def test_row_weights__fall_with_the_age_of_a_row() -> None:
    weights = forget.row_weights(jnp.asarray(3), 5, 0.5)
    np.testing.assert_allclose(weights, [0.25, 0.5, 1.0, 0.0, 0.0])
    np.testing.assert_array_equal(forget.row_weights(jnp.asarray(0), 2, 0.5), [0, 0])


@pytest.mark.parametrize(
    ("gamma", "rows"), [(0.5, 10), (0.9, 66), (0.99, 100), (1.0, 100)]
)
def test_num_kept__ends_at_the_least_weight_or_at_the_memory(
    gamma: float, rows: int
) -> None:
    assert int(forget.num_kept(gamma, 100, 1e-3)) == rows
    assert rows == 100 or gamma ** (rows - 1) >= 1e-3 > gamma**rows


def test_overcount__turns_the_posterior_into_the_sandwich() -> None:
    rng = np.random.default_rng(1)
    rows, new = rng.normal(size=(25, 4)), rng.normal(size=(6, 4))
    weights = np.asarray(forget.row_weights(jnp.asarray(25), 25, GAMMA), float)
    v, squared = _direct(rows, GAMMA), _direct(rows, GAMMA**2)
    sandwich = np.linalg.inv(v) @ squared @ np.linalg.inv(v)
    noises = LAM1 / weights
    solved = np.linalg.solve(rows @ rows.T + np.diag(noises), rows @ new.T)
    root = forget.overcount(
        jnp.asarray(solved, jnp.float32), jnp.asarray(noises, jnp.float32), LAM1
    )
    cov = new @ new.T - new @ rows.T @ solved - np.asarray(root.T @ root)
    np.testing.assert_allclose(cov / LAM1, new @ sandwich @ new.T, atol=1e-5)


def test_belief__of_ntk_is_the_sandwich_in_feature_space() -> None:
    """With a kernel of degree one, whose features are the arms and a constant."""
    master = compiled_master("ntk", discount=GAMMA, memory=30)
    sets, rewards = random_rounds(ROWS)
    state = tell(master, master.init(KEY(), small_problem()), sets, rewards)
    scales = state.scales._replace(log_weights=jnp.asarray([0.0, -30.0, -30.0]))
    state = master.refresh(KEY(), state._replace(scales=scales))
    assert int(state.history.count) == 30 and int(state.history.rounds) == ROWS
    noise = float(evidence.row_noise(state.scales, jnp.ones(())))
    # A prior variance of 1e4 stands for a constant that may be anything.
    linear = float(set_kernel.basis_tables(K, 2)[0, K]) ** 0.5
    features = [
        np.c_[linear * multi_hot(s, L) / K**0.5, np.full(len(s), 100.0)]
        for s in (sets[-30:], distinct_sets(8, 5))
    ]
    weights = GAMMA ** np.arange(30)[::-1]
    v, squared = (
        features[0].T @ (w[:, None] * features[0]) + noise * np.eye(L + 1)
        for w in (weights, weights**2)
    )
    spread = np.linalg.solve(v, features[1].T)
    mean = spread.T @ features[0].T @ (weights * rewards[-30:])
    belief = master.belief(state, distinct_sets(8, 5))
    np.testing.assert_allclose(belief.mean, mean, rtol=1e-3)
    cov = noise * spread.T @ squared @ spread
    np.testing.assert_allclose(belief.cov, cov, atol=2e-3 * np.abs(cov).max())
    score = master.score(state, distinct_sets(8, 5))
    width = master.radius(state) * np.sqrt(np.diagonal(cov))
    np.testing.assert_allclose(score.bonus, width, rtol=5e-3)
    again = master.belief(state, sets[-8:]).mean
    np.testing.assert_allclose(master.fitted(state)[22:30], again, rtol=1e-4)


@pytest.mark.parametrize("fit", [False, True])
def test_ntk__almost_without_discount_is_the_stationary_master(fit: bool) -> None:
    rewards = random_rounds(ROWS)[1]
    beliefs = []
    for discount in (ALMOST_ONE, 1.0):
        master = compiled_master("ntk", discount=discount)
        state = master.init(KEY(), small_problem())
        for part in np.split(np.arange(ROWS), 4):
            state = tell(master, state, distinct_sets(ROWS, 1)[part], rewards[part])
            state = master.refresh(KEY(), state, fit=fit)
        beliefs.append(master.belief(state, distinct_sets(8, 5)))
    _close(beliefs)


def _close(beliefs: list[Any], rtol: float = 2e-3) -> None:
    one, other = beliefs
    np.testing.assert_allclose(one.mean, other.mean, rtol=rtol)
    size = float(jnp.max(jnp.abs(other.cov)))
    np.testing.assert_allclose(one.cov, other.cov, atol=rtol * size)
    np.testing.assert_allclose(one.noise, other.noise, rtol=rtol)


@pytest.mark.parametrize("confidence", ["exact", "diagonal"])
def test_neural__almost_without_discount_is_the_stationary_master(
    confidence: str,
) -> None:
    sets, rewards = random_rounds(ROWS)
    changes = {"confidence": confidence, "radius_kind": "theory"}
    changes["linear_part"] = confidence == "exact"
    beliefs, radii = [], []
    for discount in (ALMOST_ONE, 1.0):
        # Batches of Adam are drawn in another way with weights.
        master = compiled_master(
            "neural", discount=discount, training="literal", **changes
        )
        state = learn(master, sets, rewards, cuts=2)
        beliefs.append(master.belief(state, distinct_sets(8, 5)))
        radii.append(master.radius(state))
    _close(beliefs)
    np.testing.assert_allclose(*radii, rtol=1e-3)


@pytest.mark.parametrize("confidence", ["exact", "diagonal"])
def test_discounted_confidence__is_that_of_the_matrices(confidence: str) -> None:
    width, depth, kept, gamma = 4, 3, 20, 0.8
    sizes = {"num_arms": L, "width": width, "depth": depth}
    trust = discounted_confidence(confidence, **sizes, lam1=LAM1)
    absorb, settle = jax.jit(trust.absorb), jax.jit(trust.settle)
    net = ucb.UcbNet(L, width, depth)
    params = ucb.init_params(KEY(), net)
    factors = jax.jit(functools.partial(ucb.factors, net))
    rows, new = (
        factors(params, jnp.asarray(distinct_sets(*n))) for n in ((25, 1), (6, 5))
    )
    state, rate = trust.init(32, K), jnp.asarray(gamma)
    for start, num in ((0, 10), (10, 10), (20, 5)):  # the last block is a part
        index = jnp.minimum(jnp.arange(start, start + 10), 24)
        block = jax.tree.map(lambda leaf, i=index: leaf[i], rows)
        state = absorb(state, block, jnp.asarray(num), rate)
    if confidence == "diagonal":
        kept = 25  # it has no rows to let go of
    weights = forget.row_weights(jnp.asarray(kept), 32, rate)
    state = settle(state, jnp.asarray(25 - kept), weights)
    state = trust.grow(state, 40)
    phi, at = (
        np.asarray(ucb.flat_gradients(g, L, width), float) / width**0.5
        for g in (rows, new)
    )
    z, squared = _direct(phi[-kept:], gamma), _direct(phi[-kept:], gamma**2)
    if confidence == "diagonal":
        z, squared = np.diag(np.diag(z)), np.diag(np.diag(squared))
    inverse = np.linalg.inv(z)
    cov = at @ inverse @ squared @ inverse @ at.T
    got = jax.jit(trust.covariance)(state, new)
    np.testing.assert_allclose(got, cov, atol=1e-5 * np.abs(cov).max())
    variance = jax.jit(trust.variance)(state, new)
    np.testing.assert_allclose(variance, np.diag(cov), rtol=1e-4)
    log_det = np.linalg.slogdet(squared / LAM1)[1]
    np.testing.assert_allclose(jax.jit(trust.log_det)(state), log_det, rtol=1e-4)


def test_evidence__old_rows_do_not_hide_the_noise() -> None:
    """120 rows of which 33 count: taken for noisy ones they would say a quarter."""
    sets, rewards = random_rounds(120, noise=0.4)
    kernel = set_kernel.set_kernel(2)
    tables = set_kernel.basis_tables(K, 2).at[1:].set(0.0)
    weights = forget.row_weights(jnp.asarray(120), 128, 0.97)
    empty = hist.new_history(128, K)
    history = empty._replace(
        actions=empty.actions.at[:120].set(sets),
        rewards=empty.rewards.at[:120].set(rewards),
        plays=jnp.where(weights > 0, weights, 1.0),
        count=jnp.asarray(120),
    )

    @jax.jit
    def fit(history: hist.History) -> jax.Array:
        settings = {"num_rows": 128, "num_steps": 60, "min_noise": 5e-4}
        scales = evidence.fit_scales(
            history,
            lambda actions: tables[:, set_kernel.overlaps(actions, actions, L)],
            evidence.start_scales(kernel.start),
            kernel.prior,
            **settings,
            fit_power=False,
        )
        return scales.deviation**2 * evidence.row_noise(scales, jnp.ones(()))

    assert 0.5 * 0.4**2 < float(fit(history)) < 2 * 0.4**2


@pytest.mark.parametrize("make", [NtkUcbConfig, NeuralUcbConfig])
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"discount": 0.0}, "discount"),
        ({"discount": 1.5}, "discount"),
        ({"discount": float("nan")}, "discount"),
        ({"discount": "some"}, "discount"),
        ({"memory": 0}, "memory"),
        ({"min_weight": 0.0}, "min_weight"),
    ],
)
def test_config__rejects_bad_values_in_a_sentence(
    make: Any, change: dict, word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        make(**change)


def test_config__full_confidence_knows_no_discount() -> None:
    with pytest.raises(ValueError, match="discount"):
        NeuralUcbConfig(confidence="full", discount=0.99)
    with pytest.raises(ValueError, match="discount"):
        discounted_confidence("full", num_arms=L, width=4, depth=2, lam1=1.0)
    assert NeuralUcbConfig(confidence="full").discount == 1.0
