"""Gumbel top-K: draws against probabilities, probabilities against enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msb_jax import topk

exact = jax.jit(topk.set_log_prob_exact)
trapezoid = jax.jit(topk.set_log_prob_trapezoid)
ordered = jax.jit(topk.ordered_log_prob)
SET_METHODS = [pytest.param(exact, id="exact"), pytest.param(trapezoid, id="trapezoid")]
ALL_METHODS = [*SET_METHODS, pytest.param(ordered, id="ordered")]
LogProb = Callable[[jax.Array, jax.Array], jax.Array]
# Most tests use six arms, three of them chosen, to share what is compiled here.
with_grad: dict[LogProb, Any] = {
    m: jax.jit(jax.value_and_grad(m)) for m in (exact, trapezoid, ordered)
}
LOGITS = np.asarray([0.5, -2.0, 1.0, 0.0, 3.0, -0.5], np.float32)


ALL_SETS = np.asarray(list(itertools.combinations(range(6), 3)), np.int32)  # [20, 3]
ALL_ORDERS = np.asarray(list(itertools.permutations(range(6), 3)), np.int32)


def tabulate(method: LogProb, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return probability and score of every action under LOGITS: [n], [n, L]."""
    rows = [with_grad[method](jnp.asarray(LOGITS), jnp.asarray(a)) for a in actions]
    values, grads = zip(*rows, strict=True)
    return np.exp(np.asarray(values, np.float64)), np.asarray(grads, np.float64)


def slow_ordered(logits: np.ndarray, action: tuple[int, ...]) -> float:
    """Multiply the K draws out in float64."""
    weights, total = np.exp(np.asarray(logits, np.float64)), 1.0
    for i in action:
        total *= weights[i] / weights.sum()
        weights[i] = 0.0
    return total


def slow_set(logits: np.ndarray, action: np.ndarray) -> float:
    """Sum the ordered probabilities over all K! orders."""
    orders = itertools.permutations([int(i) for i in action])
    return sum(slow_ordered(logits, order) for order in orders)


def fine_integral(logits: np.ndarray, action: np.ndarray) -> float:
    """Integrate the race over a very wide and very fine grid in float64."""
    is_in = np.zeros(logits.size, bool)
    is_in[action] = True
    rho = logits[is_in] - np.logaddexp.reduce(logits[~is_in])
    z = np.linspace(-60.0, 12.0, 40_001)
    log_g = z - np.exp(z)
    for r in rho:
        u = np.exp(np.minimum(r + z, 6.0))
        log_g += np.where(
            r + z < -30.0, r + z, np.log(-np.expm1(-np.maximum(u, 1e-30)))
        )
    return float(np.logaddexp.reduce(log_g) + np.log(z[1] - z[0]))


@pytest.mark.parametrize("method", SET_METHODS)
def test_set_log_prob__worked_values(method: LogProb) -> None:
    logits = jnp.log(jnp.asarray([1.0, 2.0, 3.0]))
    got = [float(jnp.exp(method(logits, jnp.asarray(s)))) for s in ((0, 1), (2, 0))]
    got.append(float(jnp.exp(method(logits, jnp.asarray((1, 2))))))
    np.testing.assert_allclose(got, [3 / 20, 4 / 15, 7 / 12], rtol=2e-6)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_log_prob__one_arm_is_softmax(method: LogProb) -> None:
    logits = jnp.asarray([0.3, -1.0, 2.0, 0.0])
    got = [float(method(logits, jnp.asarray([i]))) for i in range(4)]
    np.testing.assert_allclose(got, jax.nn.log_softmax(logits), rtol=2e-6)


def test_ordered_log_prob__equals_multiplied_out_draws() -> None:
    got, _ = tabulate(ordered, ALL_ORDERS)
    want = [slow_ordered(LOGITS, tuple(o)) for o in ALL_ORDERS.tolist()]
    np.testing.assert_allclose(got, want, rtol=5e-6)
    assert got.sum() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("method", SET_METHODS)
def test_set_log_prob__equals_sum_over_orders_and_adds_up_to_one(
    method: LogProb,
) -> None:
    got, _ = tabulate(method, ALL_SETS)
    np.testing.assert_allclose(got, [slow_set(LOGITS, s) for s in ALL_SETS], rtol=1e-5)
    assert got.sum() == pytest.approx(1.0, abs=1e-5)


def test_set_log_prob_permutations__paper_average_is_p_over_k_factorial() -> None:
    logits, action, n = jnp.asarray(LOGITS), jnp.asarray([4, 0, 1]), 4000
    estimate = jax.jit(topk.set_log_prob_permutations, static_argnums=(3, 4))
    plain = float(estimate(jax.random.key(3), logits, action, n, False))
    scaled = float(estimate(jax.random.key(3), logits, action, n, True))
    assert scaled - plain == pytest.approx(math.log(6), abs=1e-6)
    orders = itertools.permutations(action.tolist())
    each = np.asarray([slow_ordered(LOGITS, o) for o in orders])
    error = each.std() / math.sqrt(n)
    assert error > 0
    truth = math.exp(float(with_grad[exact](logits, action)[0]))
    assert each.mean() == pytest.approx(truth / 6, rel=1e-5)
    assert abs(math.exp(plain) - truth / 6) < 5 * error


def test_set_log_prob_permutations__gradient_ignores_the_factorial() -> None:
    action = jnp.asarray([4, 0, 1])

    @jax.jit
    def grads(logits: jax.Array) -> list[jax.Array]:
        grad = jax.grad(topk.set_log_prob_permutations, argnums=1)
        keys = [jax.random.key(0), jax.random.key(0)]
        return [grad(keys[i], logits, action, 8, bool(i)) for i in (0, 1)]

    plain, scaled = grads(jnp.asarray(LOGITS))
    np.testing.assert_array_equal(plain, scaled)
    assert np.abs(plain).max() > 0.1


@pytest.mark.parametrize("method", ALL_METHODS)
def test_log_prob__expected_score_is_zero(method: LogProb) -> None:
    prob, score = tabulate(method, ALL_ORDERS if method is ordered else ALL_SETS)
    assert np.abs(score).max() > 0.1
    np.testing.assert_allclose(prob @ score, np.zeros(6), atol=1e-6)


@pytest.mark.parametrize(("num_arms", "k"), [(6, 3), (20, 8)])
def test_trapezoid__equals_dynamic_program_in_float64(num_arms: int, k: int) -> None:
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        for scale in (0.5, 2.0, 8.0):
            logits = jnp.asarray(rng.normal(0.0, scale, num_arms))
            action = jnp.asarray(rng.permutation(num_arms)[:k])
            got, want = float(trapezoid(logits, action)), float(exact(logits, action))
            assert abs(got - want) < 1e-10


@given(
    logits=st.lists(st.floats(-20.0, 20.0), min_size=6, max_size=6),
    order=st.permutations(range(6)),
)
@settings(deadline=None, max_examples=40, derandomize=True, database=None)
def test_trapezoid__equals_dynamic_program_at_any_spread(
    logits: list[float], order: list[int]
) -> None:
    with jax.enable_x64(True):
        phi, action = jnp.asarray(logits), jnp.asarray(order[:3])
        assert abs(float(trapezoid(phi, action) - exact(phi, action))) < 1e-10


@pytest.mark.parametrize(("num_arms", "k"), [(2, 1), (300, 20), (400, 200)])
def test_trapezoid__uniform_weights_give_one_over_the_binomial(
    num_arms: int, k: int
) -> None:
    want = -math.log(math.comb(num_arms, k))
    with jax.enable_x64(True):
        got = float(trapezoid(jnp.zeros(num_arms), jnp.arange(k)))
    assert abs(got - want) < 1e-10
    if (num_arms, k) == (300, 20):
        assert abs(got + 71.0925136432) < 1e-10


@pytest.mark.parametrize("case", ["likely", "cliff", "two_scales", "unlikely"])
def test_trapezoid__window_follows_the_weights(case: str) -> None:
    # 60 arms: the integrand has a slow left tail (likely), a steep edge beside a
    # broad peak (cliff), structure at two scales, or a narrow peak (unlikely).
    rng = np.random.default_rng(1)
    chosen = {
        "likely": rng.uniform(5.0, 25.0, 60),
        "cliff": np.full(60, 3.0),
        "two_scales": np.repeat([-12.0, 12.0], 30),
        "unlikely": rng.uniform(-30.0, -10.0, 60),
    }[case]
    logits = np.concatenate([chosen, np.log(np.full(20, 1 / 20))])
    with jax.enable_x64(True):
        got = float(trapezoid(jnp.asarray(logits), jnp.arange(60)))
    assert abs(got - fine_integral(logits, np.arange(60))) < 1e-9


def test_set_log_prob__float32_is_close_to_float64() -> None:
    rng = np.random.default_rng(2)
    for scale in (1.0, 5.0, 30.0):
        logits = rng.normal(0.0, scale, 6).astype(np.float32)
        action = rng.permutation(6)[:3]
        with jax.enable_x64(True):
            want = float(exact(jnp.asarray(logits, jnp.float64), jnp.asarray(action)))
        for method in (exact, trapezoid):
            got, _ = with_grad[method](jnp.asarray(logits), jnp.asarray(action))
            assert got.dtype == jnp.float32
            assert float(got) == pytest.approx(want, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_log_prob__gradient_equals_finite_differences(method: LogProb) -> None:
    step = 1e-5
    with jax.enable_x64(True):
        logits = jnp.asarray([0.5, -3.0, 4.0, 0.0, 1.5, -1.0])
        action = jnp.asarray([2, 1, 5])
        got = np.asarray(with_grad[method](logits, action)[1])
        for i in range(6):
            up, down = logits.at[i].add(step), logits.at[i].add(-step)
            slope = float(method(up, action) - method(down, action)) / (2 * step)
            assert got[i] == pytest.approx(slope, abs=1e-8)
        assert abs(got.sum()) < 1e-12  # a common shift of the logits changes nothing


EXTREMES = {
    "high": [80.0] * 3 + [-80.0] * 3,
    "low": [-80.0] * 3 + [80.0] * 3,
    "mixed": [100.0, 0.0, -100.0, 50.0, 0.0, -50.0],
    "lone": [100.0] + [0.0] * 4 + [-100.0],
    "equal": [80.0] * 6,
    "masked": [0.0, 1.0, 2.0, -math.inf, 0.5, -math.inf],
    "all_others_masked": [0.0, 1.0, 2.0] + [-math.inf] * 3,
}


@pytest.mark.parametrize("method", ALL_METHODS)
@pytest.mark.parametrize("name", EXTREMES)
def test_log_prob__extreme_logits_give_finite_values_and_gradients(
    method: LogProb, name: str
) -> None:
    logits = jnp.asarray(EXTREMES[name])
    for action in ((0, 1, 2), (2, 4, 5)):
        value, grad = with_grad[method](logits, jnp.asarray(action))
        assert np.isfinite(float(value))
        assert float(value) < 1e-5
        assert np.isfinite(grad).all()
        # A score is bounded: each arm's is at most 1 up and K down.
        assert np.abs(grad).max() < 3.001


def test_trapezoid__extreme_logits_have_the_right_value() -> None:
    for logits in EXTREMES.values():
        for action in ((0, 1, 2), (2, 4, 5)):
            phi, a = jnp.asarray(logits), jnp.asarray(action)
            got, want = (float(with_grad[m](phi, a)[0]) for m in (trapezoid, exact))
            assert got == pytest.approx(want, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("logits", [[0.3], [100.0, -100.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
def test_set_log_prob__all_arms_have_probability_one(logits: list[float]) -> None:
    phi = jnp.asarray(logits)
    action = jnp.arange(len(logits))[::-1]

    def by_permutations(phi: jax.Array, action: jax.Array) -> jax.Array:
        return topk.set_log_prob_permutations(jax.random.key(0), phi, action, 3)

    methods = (topk.set_log_prob_exact, topk.set_log_prob_trapezoid, by_permutations)
    for method in methods:
        value, grad = jax.value_and_grad(method)(phi, action)
        assert float(value) == 0.0
        np.testing.assert_array_equal(grad, np.zeros(len(logits)))
    order, grad = jax.value_and_grad(topk.ordered_log_prob)(phi, action)
    assert float(order) <= 0.0
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("method", ALL_METHODS)
def test_log_prob__relabelling_arms_changes_nothing(method: LogProb) -> None:
    rng = np.random.default_rng(4)
    names = rng.permutation(6)
    renamed = np.empty_like(LOGITS)
    renamed[names] = LOGITS
    action = np.asarray([5, 2, 0])
    value, grad = with_grad[method](jnp.asarray(LOGITS), jnp.asarray(action))
    other, moved = with_grad[method](jnp.asarray(renamed), jnp.asarray(names[action]))
    assert float(value) == pytest.approx(float(other), abs=1e-5)
    np.testing.assert_allclose(grad, np.asarray(moved)[names], atol=1e-5)


def test_gumbel_topk__frequencies_match_probabilities() -> None:
    n = 20_000
    draw = jax.jit(topk.gumbel_topk_batch, static_argnums=(2, 3))
    draws = np.asarray(draw(jax.random.key(7), jnp.asarray(LOGITS), 3, n))
    for table, method, rows in (
        (ALL_ORDERS, ordered, draws),
        (ALL_SETS, exact, np.sort(draws, axis=1)),
    ):
        prob, _ = tabulate(method, table)
        hit = (rows[:, None, :] == table[None]).all(axis=2)
        error = np.sqrt(prob * (1 - prob) / n)
        assert np.all(np.abs(hit.mean(axis=0) - prob) < 5 * error)


def test_gumbel_topk__batch_is_the_vmapped_single_draw() -> None:
    logits = jnp.linspace(-1.0, 1.0, 6)
    batch = topk.gumbel_topk_batch(jax.random.key(1), logits, 6, 4)
    keys = jax.random.split(jax.random.key(1), 4)
    single = [topk.gumbel_topk(keys[i], logits, 6) for i in range(4)]
    assert batch.dtype == jnp.int32
    np.testing.assert_array_equal(batch, jnp.stack(single))
    np.testing.assert_array_equal(np.sort(batch, axis=1), np.tile(np.arange(6), (4, 1)))


def test_gumbel_topk__follows_overwhelming_logits_in_order() -> None:
    logits = jnp.asarray([0.0, 300.0, 100.0, 200.0, -math.inf])
    action = topk.gumbel_topk(jax.random.key(0), logits, 3)
    assert action.tolist() == [1, 3, 2]


def test_log1mexp__is_accurate_with_finite_gradient() -> None:
    a = np.asarray([-1e-30, -1e-6, -0.1, -0.6931, -0.6932, -2.0, -30.0, -200.0])
    got = topk.log1mexp(jnp.asarray(a, jnp.float32))
    near, far = a[:3], a[3:]
    want = np.concatenate([np.log(-np.expm1(near)), np.log1p(-np.exp(far))])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-30)
    grad = jax.vmap(jax.grad(topk.log1mexp))(jnp.asarray(a, jnp.float32))
    np.testing.assert_allclose(grad, -1 / np.expm1(-a), rtol=1e-5, atol=1e-30)


def test_set_log_prob_trapezoid__lowers_for_every_platform() -> None:
    grad = jax.jit(jax.vmap(jax.grad(topk.set_log_prob_trapezoid), (None, 0)))
    logits, actions = jnp.zeros(6), jnp.zeros((2, 3), jnp.int32)
    platforms = ("cpu", "cuda", "tpu")
    assert jax.export.export(grad, platforms=platforms)(logits, actions).platforms == (
        platforms
    )


def test_topk__bad_input_gets_a_sentence() -> None:
    logits, key = jnp.zeros(20), jax.random.key(0)
    for k in (0, 21):
        with pytest.raises(ValueError, match="1 <= k <= L"):
            topk.gumbel_topk(key, logits, k)
    with pytest.raises(ValueError, match="use set_log_prob_trapezoid"):
        topk.set_log_prob_exact(logits, jnp.arange(17))
    with pytest.raises(ValueError, match="only 20 logits"):
        topk.ordered_log_prob(logits, jnp.zeros(21, jnp.int32))
    with pytest.raises(ValueError, match="use vmap for several"):
        topk.set_log_prob_trapezoid(logits, jnp.zeros((2, 3), jnp.int32))
    with pytest.raises(ValueError, match="num_nodes must be >= 2"):
        topk.set_log_prob_trapezoid(logits, jnp.arange(3), num_nodes=1)
    with pytest.raises(ValueError, match="num_permutations must be >= 1"):
        topk.set_log_prob_permutations(key, logits, jnp.arange(3), 0)
