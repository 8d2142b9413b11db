"""The choice of kernel weights, noise and reward scale by marginal likelihood."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax.link import choose_origin, to_latent
from msb_jax.masters import evidence, set_kernel
from msb_jax.masters import history as hist
from msb_jax.problem import make_problem
from tests.reference import multi_hot

L, K, ROWS = 24, 4, 50
SETS = set_kernel.set_kernel(2)


def _set_terms(actions: jax.Array) -> jax.Array:
    features = np.random.default_rng(0).random((L, 3))
    return SETS.terms(make_problem(features, K), actions, actions)


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
    history = hist.new_history(128, K)._replace(
        actions=jnp.asarray(np.pad(actions, ((0, 8), (0, 0)))),
        rewards=jnp.asarray(np.pad(linear**3, (0, 8)), jnp.float32),
        count=jnp.asarray(120),
    )
    fit = jax.jit(
        functools.partial(
            evidence.fit_scales,
            terms=_set_terms,
            prior=SETS.prior,
            num_rows=120,
            num_steps=60,
            min_noise=5e-4,
            fit_power=True,
        )
    )
    scales = fit(history, start=evidence.start_scales(SETS.start))
    assert abs(float(scales.link.power) - 1 / 3) < 0.08
    weights = np.exp(np.asarray(scales.log_weights))
    assert weights[0] > 20 * weights[1:].sum()
