"""The kernel term that bends, against the definition and float64 formulas."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.masters import evidence
from msb_jax.masters.bend import bent, find_slope
from msb_jax.masters.kernel import combine
from msb_jax.masters.ntk_ucb import NtkUcbConfig, NtkUcbState, ntk_ucb
from msb_jax.masters.set_kernel import basis_tables, set_kernel
from msb_jax.problem import Problem, make_problem, random_sets
from msb_jax.solvers.local_search import evaluate
from msb_jax.types import Master
from tests.reference import gaussian_process, multi_hot

L, K, BLOCK = 24, 4, 10
SLOPE = np.linspace(-0.5, 0.5, L).astype(np.float32)
WEIGHTS = jnp.asarray([0.5, 0.3, 0.0, 0.7])
PLAIN = set_kernel(2)
BENT = bent(PLAIN, jnp.asarray(SLOPE))


@functools.cache
def _problem(num_arms: int = L, k: int = K) -> Problem:
    features = np.random.default_rng(0).random((num_arms, 3))
    return make_problem(features, k, metric="ned", num_conflicts=20)


def _sets(n: int, seed: int = 5) -> jax.Array:
    return random_sets(jax.random.key(seed), _problem(), n)


def _value(a: np.ndarray, b: np.ndarray, table: np.ndarray, curve: float) -> float:
    rise = SLOPE[a].astype(float).sum() ** 2 * SLOPE[b].astype(float).sum() ** 2
    return table[len(set(a) & set(b))] + curve * rise


def test_bent__value_own_and_terms_are_the_definition() -> None:
    sets, others = np.asarray(_sets(7)), np.asarray(_sets(5, seed=6))
    table = np.asarray(WEIGHTS[:3] @ basis_tables(K, 2), float)
    expected = [[_value(a, b, table, 0.7) for b in others] for a in sets]
    value = BENT.value(_problem(), WEIGHTS, sets, others)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    terms = BENT.terms(_problem(), sets, others)
    assert terms.shape == (4, 7, 5)
    np.testing.assert_allclose(jnp.tensordot(WEIGHTS, terms, 1), expected, rtol=1e-5)
    own = [_value(a, a, table, 0.7) for a in sets]
    np.testing.assert_allclose(BENT.own(_problem(), WEIGHTS, sets), own, rtol=1e-5)
    assert len(BENT.start) == len(BENT.prior) == 4


def test_bent__without_a_slope_is_the_kernel_it_was() -> None:
    flat, sets = bent(PLAIN, jnp.zeros((L,))), _sets(6)
    former = PLAIN.value(_problem(), WEIGHTS[:3], sets, sets)
    np.testing.assert_array_equal(flat.value(_problem(), WEIGHTS, sets, sets), former)
    own = PLAIN.own(_problem(), WEIGHTS[:3], sets)
    np.testing.assert_array_equal(flat.own(_problem(), WEIGHTS, sets), own)


def test_bent__expansion_is_the_kernel_as_a_quadratic_model() -> None:
    rows, sets = _sets(9), _sets(8, seed=7)
    arms = jnp.arange(L, dtype=jnp.int32)
    alpha = jax.random.normal(jax.random.key(3), (9,))
    model = combine(BENT.expand(_problem(), WEIGHTS, rows, arms), alpha)
    expected = alpha @ BENT.value(_problem(), WEIGHTS, rows, sets)
    values = jax.vmap(lambda a: evaluate(model, a))(sets)
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


def test_find_slope__is_what_arms_add_in_units_of_the_farthest_row() -> None:
    actions = jnp.asarray([[0, 1], [0, 2], [3, 4], [5, 5]], jnp.int32)
    alpha = jnp.asarray([1.0, 2.0, -3.0, 0.0])
    is_row = jnp.asarray([1.0, 1.0, 1.0, 0.0])
    slope = np.asarray(find_slope(actions, alpha, is_row, 6))
    # Sums 3 1 2 -3 -3 0, whose mean is 0; the third row is the farthest, at -6.
    np.testing.assert_allclose(slope, np.array([3, 1, 2, -3, -3, 0]) / 6, rtol=1e-6)


@pytest.mark.parametrize("alpha", [np.zeros(3), np.ones(3)])
def test_find_slope__is_0_where_nothing_differs(alpha: np.ndarray) -> None:
    actions = jnp.asarray([[0, 1], [1, 2], [0, 2]], jnp.int32)
    slope = find_slope(actions, jnp.asarray(alpha, jnp.float32), jnp.ones((3,)), 3)
    np.testing.assert_array_equal(slope, np.zeros(3))


def _curved(
    master: Master, rows: int, fits: int
) -> tuple[NtkUcbState, np.ndarray, np.ndarray]:
    """A master told (theta'x)^2 of random sets, and sets that are far better."""
    rng = np.random.default_rng(2)
    num_arms, k = 60, 6
    theta = rng.random(num_arms)
    actions = np.stack([rng.permutation(num_arms)[:k] for _ in range(rows)])
    rewards = np.square(theta[actions].sum(1)) + 0.05 * rng.normal(size=rows)
    state = master.grow(master.init(jax.random.key(0), _problem(60, 6)), rows + 40)
    told = (jnp.asarray(actions, jnp.int32), jnp.asarray(rewards, jnp.float32))

    def tell(state: NtkUcbState, pair: tuple) -> tuple[NtkUcbState, None]:
        return master.update(jax.random.key(1), state, *pair), None

    state = jax.jit(lambda s, p: jax.lax.scan(tell, s, p)[0])(state, told)
    refit = jax.jit(functools.partial(master.refresh, fit=True))
    for i in range(fits):
        state = refit(jax.random.key(i), state)
    good = np.argsort(theta)[-12:]
    best = np.stack([rng.permutation(good)[:k] for _ in range(40)]).astype(np.int32)
    return state, best, np.square(theta[best].sum(1))


def test_master__bends_from_the_second_fit_on() -> None:
    master = ntk_ucb(NtkUcbConfig(block=BLOCK, fit_rows=64, fit_steps=5))
    first, _, _ = _curved(master, 60, 1)
    assert not np.any(first.slope)
    second, _, _ = _curved(master, 60, 2)
    far = np.abs(np.asarray(second.slope)[np.asarray(second.history.actions)].sum(1))
    assert far[:60].max() == pytest.approx(1.0, rel=1e-4)


def test_master__foresees_what_lies_beyond_the_sets_it_has_seen() -> None:
    """Without the power of the reward, which would explain this very form too."""
    errors = {}
    for bend in (False, True):
        config = NtkUcbConfig(block=BLOCK, fit_rows=256, bend=bend, fit_power=False)
        master = ntk_ucb(config)
        state, best, truth = _curved(master, 250, 4)
        score = jax.jit(master.score)(state, jnp.asarray(best))
        errors[bend] = float(np.sqrt(np.mean(np.square(score.mean - truth))))
    assert errors[True] < 0.5 * errors[False]


def test_master__belief_and_draws_with_a_bend_are_the_textbook_posterior() -> None:
    master = ntk_ucb(NtkUcbConfig(block=BLOCK, fit_rows=64))
    rng = np.random.default_rng(1)
    actions = np.stack([rng.permutation(L)[:K] for _ in range(40)]).astype(np.int32)
    rewards = (3.0 + rng.normal(size=40)).astype(np.float32)
    state = master.init(jax.random.key(0), _problem())
    scales = evidence.start_scales(BENT.start)
    scales = scales._replace(log_weights=jnp.asarray([0.0, -1.0, -30.0, 0.5]))
    state = state._replace(scales=scales, slope=jnp.asarray(SLOPE))
    for action, reward in zip(actions, rewards, strict=True):
        state = master.update(jax.random.key(1), state, jnp.asarray(action), reward)
    for _ in range(4):
        state = jax.jit(master.refresh)(jax.random.key(2), state)
    sets = np.asarray(_sets(6))
    table = np.asarray(jnp.exp(scales.log_weights[:3]) @ basis_tables(K, 2), float)
    curve = float(np.exp(scales.log_weights[3]))

    def gram(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
        rise = [
            np.square(multi_hot(x, L) @ SLOPE.astype(float)) for x in (rows, others)
        ]
        shared = np.rint(multi_hot(rows, L) @ multi_hot(others, L).T).astype(int)
        # A flat prior on the constant is the limit of a large variance of it.
        return table[shared] + curve * np.outer(*rise) + 1e4

    noise = float(evidence.row_noise(scales, jnp.ones(())))
    mean, cov = gaussian_process(
        gram(actions, actions), gram(actions, sets), gram(sets, sets), rewards, noise
    )
    belief = jax.jit(master.belief)(state, jnp.asarray(sets))
    np.testing.assert_allclose(belief.mean, mean, rtol=1e-3)
    np.testing.assert_allclose(belief.cov, cov, atol=1e-3 * np.abs(cov).max())
    score = jax.jit(master.score)(state, jnp.asarray(sets))
    np.testing.assert_allclose(score.bonus, 3.0 * np.sqrt(np.diagonal(cov)), rtol=1e-2)
    n = 400
    arms = jnp.arange(L, dtype=jnp.int32)
    models = jax.jit(master.draws, static_argnums=3)(jax.random.key(7), state, arms, n)
    values = jax.vmap(lambda m: jax.vmap(lambda a: evaluate(m, a))(sets))(models)
    deviation = np.sqrt(np.diagonal(belief.cov))
    error = (values.mean(0) - belief.mean) / (deviation / np.sqrt(n))
    assert np.abs(error).max() < 5
    # The standard error of a sample deviation is sigma / sqrt(2n).
    spread = (values.std(0) / deviation - 1) * np.sqrt(2 * n)
    assert np.abs(spread).max() < 5


@pytest.mark.parametrize("settings", [{"bend": False}, {"discount": 0.98}])
def test_master__does_not_bend_if_told_so_or_with_a_discount(settings: dict) -> None:
    state = ntk_ucb(NtkUcbConfig(**settings)).init(jax.random.key(0), _problem())
    assert state.scales.log_weights.shape == (3,)
