"""The choice of kernel weights, noise and reward scale by marginal likelihood."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax.link import Link, choose_origin, to_latent
from msb_jax.masters import evidence, set_kernel
from msb_jax.masters import history as hist
from msb_jax.problem import make_problem
from tests.reference import multi_hot

L, K, ROWS = 24, 4, 50
SETS = set_kernel.set_kernel(2)


def _set_terms(actions: jax.Array) -> jax.Array:
    features = np.random.default_rng(0).random((L, 3))
    return SETS.terms(make_problem(features, K), actions, actions)


def _rows(
    actions: np.ndarray, rewards: Any, plays: Any = 1.0, scatter: Any = 0.0
) -> hist.History:
    """A history of 120 merged rows, with room for eight more."""
    history = hist.new_history(128, K)
    return history._replace(
        actions=history.actions.at[:120].set(actions),
        rewards=history.rewards.at[:120].set(rewards),
        plays=history.plays.at[:120].set(plays),
        scatter=history.scatter.at[:120].set(scatter),
        count=jnp.asarray(120),
    )


def _fit(history: hist.History, *, fit_power: bool) -> evidence.Scales:
    fit = functools.partial(
        evidence.fit_scales,
        terms=_set_terms,
        prior=SETS.prior,
        num_rows=120,
        num_steps=90,
        min_noise=5e-4,
        fit_power=fit_power,
    )
    return jax.jit(fit)(history, start=evidence.start_scales(SETS.start))


def _noise(scales: evidence.Scales) -> float:
    """Variance of a round, in units of the reward."""
    return float(np.exp(scales.log_noise) * scales.deviation**2)


def test_evidence__gradient_equals_finite_differences() -> None:
    rng = np.random.default_rng(0)
    actions = np.stack([rng.permutation(L)[:K] for _ in range(ROWS)])
    rewards = 3.0 + multi_hot(actions, L) @ rng.random(L)
    counts = set_kernel.overlaps(jnp.asarray(actions), jnp.asarray(actions), L)
    grams = set_kernel.basis_tables(K, 2)[:, counts]
    is_row = jnp.ones((ROWS,)).at[-3:].set(0.0)
    grams = grams * (is_row[:, None] * is_row[None, :])[None]
    plays = jnp.asarray(rng.integers(1, 90, ROWS), jnp.float32)
    origin = choose_origin(jnp.asarray(rewards), is_row)

    def targets(power: jax.Array) -> jax.Array:
        latent = to_latent(origin._replace(power=power), jnp.asarray(rewards))
        return (latent - latent.mean()) * is_row

    params = jnp.asarray([*(rng.normal(size=4) - 1.0), 0.7], jnp.float32)
    call = jax.jit(
        lambda p: evidence.negative_evidence(
            p, grams, targets, is_row, plays, 1e-3, SETS.prior
        )
    )
    _, gradient = call(params)
    for i in range(5):
        step = np.zeros(5, np.float32)
        step[i] = 1e-2
        high, _ = call(params + step)
        low, _ = call(params - step)
        np.testing.assert_allclose(
            gradient[i], (high - low) / 2e-2, rtol=0.02, atol=0.02
        )


def test_evidence__looks_at_old_rows_and_at_the_newest() -> None:
    history = hist.new_history(300, K)._replace(count=jnp.asarray(250))
    rows, is_row = evidence.fit_rows(history, 64)
    assert np.asarray(is_row).all()
    assert len(set(np.asarray(rows).tolist())) == 64
    assert set(range(218, 250)) <= set(np.asarray(rows).tolist())
    assert min(np.asarray(rows)) == 0
    rows, is_row = evidence.fit_rows(history._replace(count=jnp.asarray(40)), 64)
    assert np.asarray(rows)[:40].tolist() == list(range(40))
    assert np.asarray(is_row).sum() == 40


def test_fit_scales__finds_the_scale_on_which_a_cubic_is_linear() -> None:
    rng = np.random.default_rng(4)
    actions = np.stack([rng.permutation(L)[:K] for _ in range(120)]).astype(np.int32)
    linear = multi_hot(actions, L) @ (0.2 + rng.random(L))
    history = _rows(actions, (linear**3).astype(np.float32))
    scales = _fit(history, fit_power=True)
    assert abs(float(scales.link.power) - 1 / 3) < 0.08
    weights = np.exp(np.asarray(scales.log_weights))
    assert weights[0] > 20 * weights[1:].sum()


def test_repeats_evidence__slope_equals_finite_differences() -> None:
    at = functools.partial(evidence.repeats_evidence, number=40.0, squares=3.0)
    for log_noise in (-6.0, -3.0):
        _, slope = at(jnp.asarray(log_noise))
        high, _ = at(jnp.asarray(log_noise + 1e-2))
        low, _ = at(jnp.asarray(log_noise - 1e-2))
        assert slope < -1.0
        np.testing.assert_allclose(slope, (high - low) / 2e-2, rtol=1e-2)


def test_repeats_evidence__asks_for_no_less_noise_than_there_is() -> None:
    least = np.log(3.0 / 40.0)  # the mean square
    at = functools.partial(evidence.repeats_evidence, number=40.0, squares=3.0)
    for log_noise in (least, least + 0.1, 0.5):
        value, slope = at(jnp.asarray(log_noise, jnp.float32))
        np.testing.assert_allclose(value, at(jnp.asarray(least))[0], rtol=1e-5)
        np.testing.assert_allclose(slope, 0.0, atol=1e-4)
    for number in (0.0, 40.0):  # no rounds of a known set, or no noise in them
        told = evidence.repeats_evidence(jnp.asarray(-3.0), number, jnp.asarray(0.0))
        assert np.isfinite(told).all() and told[1] == 0.0


def test_repeats__are_counted_on_the_latent_scale() -> None:
    history = hist.new_history(4, K)._replace(
        rewards=jnp.asarray([2.0, 1.0, 3.0, 0.0]),
        plays=jnp.asarray([5.0, 1.0, 0.25, 1.0]),
        scatter=jnp.asarray([8.0, 0.0, 0.0, 0.0]),
        count=jnp.asarray(3),
    )
    link = Link(power=jnp.asarray(0.5), shift=jnp.zeros(()), unit=jnp.ones(()))
    number, squares = evidence.repeats(history, link, jnp.asarray(2.0))
    assert float(number) == 4.0  # a row that counts less than a round repeats nothing
    np.testing.assert_allclose(squares, 8.0 * (2.0**-0.5 / 2.0) ** 2, rtol=1e-6)


def test_fit_scales__tells_noise_from_what_is_peculiar_to_a_set() -> None:
    # What looks good is played again, as long as it does: means alone mislead.
    rng = np.random.default_rng(6)
    actions = np.stack([rng.permutation(L)[:K] for _ in range(120)]).astype(np.int32)
    worth = multi_hot(actions, L) @ rng.random(L)
    noise_std = 1.0
    told = [[w + noise_std * rng.normal()] for w in worth]
    for _ in range(400):
        best = max(told, key=lambda rounds: np.mean(rounds) + 1.0 / len(rounds) ** 0.5)
        best.append(worth[told.index(best)] + noise_std * rng.normal())
    history = _rows(
        actions,
        np.array([np.mean(x) for x in told], np.float32),
        np.array([len(x) for x in told], np.float32),
        np.array([np.var(x) * len(x) for x in told], np.float32),
    )
    scales = _fit(history, fit_power=False)
    assert 0.8 < _noise(scales) / noise_std**2 < 1.2
    # Without the scatter of the rounds a set's own term takes a part of the noise.
    alone = _rows(actions, history.rewards[:120])
    assert _noise(_fit(alone, fit_power=False)) / noise_std**2 < 0.7


def test_fit_scales__clicks_on_good_sets_have_less_noise_than_others() -> None:
    rng = np.random.default_rng(8)
    actions = np.stack([rng.permutation(L)[:K] for _ in range(120)]).astype(np.int32)
    chance = np.where(np.arange(120) < 110, rng.uniform(0.3, 0.7, 120), 0.97)
    plays = np.where(np.arange(120) < 110, 1, 60)
    clicks = rng.binomial(plays, chance)
    rate = (clicks / plays).astype(np.float32)
    scatter = (clicks * (1 - clicks / plays)).astype(np.float32)
    history = _rows(actions, rate, plays.astype(np.float32), scatter)
    seen = float(history.scatter.sum()) / (10 * 59)
    assert seen < 0.05  # of sets that were played again
    assert _noise(_fit(history, fit_power=False)) > 0.12  # of the others: 0.2 to 0.25
