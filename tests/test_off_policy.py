"""The top-K off-policy correction: its weights, its gradient, and G2ANet with it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.competence import Objective, known_view
from msb_jax import off_policy as lib
from msb_jax.problem import problem_from_conflicts
from msb_jax.samplers.base import Context
from msb_jax.samplers.g2anet import G2ANetConfig, g2anet
from msb_jax.types import Quadratic

LOGITS = jnp.asarray([0.3, -0.5, 1.2, 0.0, -1.0])
RETURNS = jnp.asarray([1.0, -2.0, 0.5, 3.0, 0.0])


@pytest.mark.parametrize("k", [1, 2, 16])
def test_topk_weight__is_the_derivative_of_being_in_the_slate(k: int) -> None:
    pi = jnp.asarray([0.0, 0.01, 0.3, 0.9, 1.0])
    slope = jax.vmap(jax.grad(lambda x: 1.0 - (1.0 - x) ** k))(pi)
    np.testing.assert_allclose(lib.topk_weight(pi, k), slope, rtol=1e-5, atol=1e-7)


def test_topk_weight__has_its_limits() -> None:
    ends = lib.topk_weight(jnp.asarray([0.0, 1e-6, 1.0]), 16)
    np.testing.assert_allclose(ends, [16.0, 16.0, 0.0], rtol=1e-4)
    np.testing.assert_array_equal(lib.topk_weight(jnp.linspace(0, 1, 5), 1), 1.0)
    with pytest.raises(ValueError, match="k must be at least 1"):
        lib.topk_weight(jnp.ones(()), 0)


def test_capped_ratio__is_capped_and_beta_has_a_floor() -> None:
    pi = jnp.asarray([0.2, 0.9, 0.9, 0.01])
    beta = jnp.asarray([0.4, 0.01, 0.0, 0.0])
    ratio = lib.capped_ratio(pi, beta)
    np.testing.assert_allclose(ratio, [0.5, np.e**3, np.e**3, 10.0], rtol=1e-5)
    np.testing.assert_allclose(lib.capped_ratio(pi, beta, 2.0), [0.5, 2.0, 2.0, 2.0])


def _mean_gradient(k: int, cap: float) -> jax.Array:
    """The mean of the gradient over arms drawn from beta, one by one."""
    beta = jnp.asarray([0.1, 0.3, 0.05, 0.35, 0.2])

    def one(logits: jax.Array, arm: jax.Array) -> jax.Array:
        # A slate of k copies of an arm has the mean of its k equal terms.
        log_pi = jnp.full((1, k), jax.nn.log_softmax(logits)[arm])
        rows = (jnp.full((1, k), beta[arm]), RETURNS[arm][None])
        return lib.off_policy_loss(log_pi, *rows, jnp.ones((1, k), bool), cap)

    each = jax.jit(jax.vmap(jax.grad(one), in_axes=(None, 0)))
    return beta @ each(LOGITS, jnp.arange(5))


@pytest.mark.parametrize("k", [1, 4])
def test_off_policy_loss__has_the_gradient_of_what_slates_are_worth(k: int) -> None:
    """At K = 1 this is importance sampling: the gradient of sum pi R."""

    def worth(logits: jax.Array) -> jax.Array:
        return jnp.sum((1.0 - (1.0 - jax.nn.softmax(logits)) ** k) * RETURNS)

    want = jax.grad(worth)(LOGITS)
    np.testing.assert_allclose(-_mean_gradient(k, 1e9), want, rtol=1e-4, atol=1e-5)
    # Arm 2 has pi / beta near 10, so a cap of 2 is felt.
    assert np.abs(_mean_gradient(k, 2.0) + want).max() > 0.02


def test_off_policy_loss__counts_known_arms_only() -> None:
    log_pi = jnp.log(jnp.asarray([[0.2, 0.3], [0.1, 0.4]]))
    beta = jnp.full((2, 2), 0.5)
    is_known = jnp.asarray([[True, False], [False, False]])
    loss = lib.off_policy_loss(log_pi, beta, jnp.asarray([3.0, jnp.nan]), is_known)
    np.testing.assert_allclose(loss, -(0.4 * 2 * 0.8 * 3.0) * np.log(0.2), rtol=1e-5)
    none = jnp.zeros((2, 2), bool)
    assert lib.off_policy_loss(log_pi, beta, jnp.ones(2), none) == 0


def test_behaviour__is_the_share_of_the_producers_sets_over_k() -> None:
    actions = jnp.asarray([[0, 1], [0, 2], [3, 1], [0, 3]], jnp.int32)
    beta = lib.behaviour(actions, jnp.asarray([1, 1, 2, 1], jnp.int32), 5)
    third = 1 / 3
    want = np.asarray([[1, third], [1, third], [1, 1], [1, third]]) / 2
    np.testing.assert_allclose(beta, want, rtol=1e-6)
    # One of 1,000 sets of a producer, K = 2: below the floor.
    many = jnp.tile(jnp.asarray([[0, 1]], jnp.int32), (1000, 1)).at[7].set([2, 3])
    rare = lib.behaviour(many, jnp.zeros((1000,), jnp.int32), 5)[7]
    np.testing.assert_allclose(rare, lib.FLOOR)


def _context(pool: Any, origin: Any, pair: np.ndarray = np.zeros((12, 12))) -> Context:
    """Arms of which pairs are worth something, and a pool; the learner is number 2."""
    size = pair.shape[0]
    problem = problem_from_conflicts(np.zeros((size, size), bool), 3)
    model = Quadratic(
        pair=jnp.asarray(pair, jnp.float32),
        linear=jnp.asarray(np.random.default_rng(0).random(size), jnp.float32),
        offset=jnp.zeros(()),
    )
    view = jax.jit(known_view)(Objective(problem, model, jnp.ones(())), 0.0)._replace(
        pool=jnp.asarray(pool, jnp.int32), pool_origin=jnp.asarray(origin, jnp.int32)
    )
    return Context(view, origin=2)


def test_foreign_loss__leaves_out_own_sets_and_arms_out_of_sight() -> None:
    arms = jnp.asarray([1, 4, 5, 9], jnp.int32)
    logits = jnp.asarray([0.5, -0.2, 0.1, 0.9])
    gains = jnp.asarray([2.0, 7.0, 9.0])
    pool = [[5, 1, 0], [4, 5, 9], [1, 4, 5]]
    run = jax.jit(lib.foreign_loss)
    loss = run(logits, arms, _context(pool, [1, 2, -1]), gains)
    log_pi = jax.nn.log_softmax(logits)[jnp.asarray([[2, 0]])]  # of arms 5 and 1
    pi = np.exp(log_pi)
    weights = pi / (1 / 3) * 3 * (1 - pi) ** 2 * 2.0
    np.testing.assert_allclose(loss, -np.mean(weights * log_pi), rtol=1e-5)
    nobody = run(logits, arms, _context(pool, [2, 2, -1]), gains)
    assert nobody == 0


def test_foreign_loss__wants_good_sets_and_shuns_bad_ones() -> None:
    context = _context([[5, 1, 0], [5, 1, 2]], [1, 1])
    arms = jnp.arange(12, dtype=jnp.int32)
    slope = jax.jit(jax.grad(lib.foreign_loss))
    for sign in (1.0, -1.0):
        gains = jnp.full((2,), sign)
        ahead = -sign * np.asarray(slope(jnp.zeros((12,)), arms, context, gains))
        assert ahead[[0, 1, 2, 5]].min() > 0
        assert np.delete(ahead, [0, 1, 2, 5]).max() < 0


@pytest.mark.slow
def test_g2anet__learns_from_the_sets_of_the_others() -> None:
    """Pairs of three of sixty arms pay; its own sets rarely hold one, the others do."""
    best = np.asarray([3, 27, 50])
    pair = np.zeros((60, 60))
    pair[np.ix_(best, best)] = 2.0 * (1.0 - np.eye(3))
    context = _context(np.tile(best, (6, 1)), [1] * 6, pair)

    def hits(*, is_on: bool) -> float:
        sampler = g2anet(G2ANetConfig(hidden=4, batch=16, off_policy=is_on))
        update, shares = jax.jit(sampler.update), []
        for seed in range(3):
            state = sampler.init(jax.random.key(seed), context.view.problem)
            for t in range(2):
                state = update(jax.random.key(10 * seed + t), state, context)
            actions = sampler.propose(jax.random.key(99), state, context, 90)
            shares.append(np.isin(actions, best).mean())
        return float(np.mean(shares))

    with_it, without = hits(is_on=True), hits(is_on=False)
    assert with_it > 1.5 * without, (with_it, without)
