"""The confidence in three forms, against explicit inverses in float64."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from msb_jax.masters.confidence import (
    KINDS,
    Confidence,
    confidence,
    exact_confidence,
    gram,
)
from msb_jax.networks import ucb
from msb_jax.networks.ucb import Factors, UcbNet
from tests.reference import multi_hot

L, K, WIDTH, RIDGE = 9, 3, 6, 0.3
SEEN, NEW, BLOCK = 13, 5, 5


class Report(NamedTuple):
    """All that a confidence says of some gradients."""

    variance: jax.Array
    covariance: jax.Array
    log_det: jax.Array


@functools.cache
def _pool(depth: int) -> Factors:
    """SEEN + NEW gradients, every one at weights of its own."""
    net = UcbNet(L, WIDTH, depth)

    def one(key: jax.Array, action: jax.Array) -> Factors:
        start, noise = jax.random.split(key)
        flat, unravel = ravel_pytree(ucb.init_params(start, net))
        step = 0.2 * jax.random.normal(noise, flat.shape)
        return ucb.factors(net, unravel(flat + step), action[None])

    rng = np.random.default_rng(depth)
    sets = np.stack([rng.permutation(L)[:K] for _ in range(SEEN + NEW)])
    keys = jax.random.split(jax.random.key(depth), SEEN + NEW)
    grads = jax.jit(jax.vmap(one))(keys, sets.astype(np.int32))
    return jax.tree.map(lambda x: np.asarray(x)[:, 0], grads)


def _part(rows: Factors, index: Any) -> Factors:
    return jax.tree.map(lambda x: x[index], rows)


def _seen(depth: int = 2) -> Factors:
    return _part(_pool(depth), slice(0, SEEN))


def _new(depth: int = 2) -> Factors:
    return _part(_pool(depth), slice(SEEN, None))


@functools.cache
def _make(kind: str, depth: int = 2, lam1: float = RIDGE) -> Any:
    """Return the confidence with its functions compiled, and a compiled report."""
    trust = confidence(kind, num_arms=L, width=WIDTH, depth=depth, lam1=lam1)

    @jax.jit
    def report(state: Any, rows: Factors) -> Report:
        return Report(
            trust.variance(state, rows),
            trust.covariance(state, rows),
            trust.log_det(state),
        )

    return trust._replace(absorb=jax.jit(trust.absorb)), report


def _absorb(trust: Confidence, rows: Factors, block: int, capacity: int = 24) -> Any:
    state = trust.init(capacity, K)
    n = rows.actions.shape[0]
    for start in range(0, n, block):
        take = np.minimum(start + np.arange(block), n - 1)  # what is over is ignored
        state = trust.absorb(state, _part(rows, take), np.int32(min(block, n - start)))
    return state


def _flat(rows: Factors) -> np.ndarray:
    """Multiply the factors out in float64, divided by sqrt(m): [N, P]."""
    n, depth = rows.actions.shape[0], rows.deltas.shape[1] + 1
    x = multi_hot(rows.actions, L) / np.sqrt(K)
    if depth == 1:
        return x
    outer = [x[:, :, None] * rows.deltas[:, 0][:, None, :]]
    for layer in range(1, depth - 1):
        below, above = rows.activations[:, layer - 1], rows.deltas[:, layer]
        outer.append(below[:, :, None] * above[:, None, :].astype(np.float64))
    outer.append(np.sqrt(WIDTH) * rows.activations[:, -1])
    flat = np.concatenate([part.reshape(n, -1) for part in outer], axis=1)
    return flat / np.sqrt(WIDTH)


def _matrix(rows: Factors) -> np.ndarray:
    flat = _flat(rows)
    return RIDGE * np.eye(flat.shape[1]) + flat.T @ flat


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_gram__equals_products_of_flat_gradients(depth):
    products = jax.jit(lambda a, b: gram(a, b, L, WIDTH))(_seen(depth), _new(depth))
    expected = _flat(_seen(depth)) @ _flat(_new(depth)).T
    np.testing.assert_allclose(products, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "depth"),
    [("exact", 1), ("exact", 2), ("exact", 3), ("full", 1), ("full", 2)],
)
def test_confidence__equals_the_explicit_inverse(kind, depth):
    trust, report = _make(kind, depth)
    got = report(_absorb(trust, _seen(depth), BLOCK), _new(depth))
    flat, matrix = _flat(_new(depth)), _matrix(_seen(depth))
    expected = flat @ np.linalg.inv(matrix) @ flat.T
    np.testing.assert_allclose(got.variance, np.diagonal(expected), rtol=1e-4)
    np.testing.assert_allclose(got.covariance, expected, rtol=1e-4, atol=1e-4)
    log_det = np.linalg.slogdet(matrix / RIDGE)[1]
    np.testing.assert_allclose(got.log_det, log_det, rtol=1e-4)


def test_exact__holds_at_a_long_history():
    """600 rounds at L = 40 stay within 1e-4 of float64, relative."""
    net = UcbNet(40, 16, 2)
    trust = confidence("exact", num_arms=40, width=16, depth=2, lam1=0.1)

    @jax.jit
    def run(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights, draw = jax.random.split(key)
        params = ucb.init_params(weights, net)
        sets = jax.lax.top_k(jax.random.uniform(draw, (620, 40)), 5)[1]
        rows = ucb.factors(net, params, sets)
        blocks = jax.tree.map(lambda x: x[:600].reshape(30, 20, *x.shape[1:]), rows)

        def take(state: Any, block: Factors) -> tuple[Any, None]:
            return trust.absorb(state, block, jnp.asarray(20)), None

        state, _ = jax.lax.scan(take, trust.init(600, 5), blocks)
        variance = trust.variance(state, jax.tree.map(lambda x: x[600:], rows))
        return variance, ucb.flat_gradients(rows, 40, 16)

    variance, flat = run(jax.random.key(0))
    flat = np.asarray(flat, np.float64) / 4.0
    seen, new = flat[:600], flat[600:]
    matrix = 0.1 * np.eye(flat.shape[1]) + seen.T @ seen
    expected = np.einsum("np,pn->n", new, np.linalg.solve(matrix, new.T))
    np.testing.assert_allclose(variance, expected, rtol=1e-4)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_diagonal__equals_its_definition(depth):
    trust, report = _make("diagonal", depth)
    got = report(_absorb(trust, _seen(depth), BLOCK), _new(depth))
    diagonal = np.diagonal(_matrix(_seen(depth)))
    expected = (_flat(_new(depth)) / diagonal) @ _flat(_new(depth)).T
    np.testing.assert_allclose(got.variance, np.diagonal(expected), rtol=1e-4)
    np.testing.assert_allclose(got.covariance, expected, rtol=1e-4, atol=1e-5)
    log_det = np.log(diagonal / RIDGE).sum()
    np.testing.assert_allclose(got.log_det, log_det, rtol=1e-4)


def test_confidence__kinds_agree_on_disjoint_supports():
    """At D = 1 a gradient lives on the arms of its set; disjoint sets are diagonal
    to one another, and so are the matrices as long as no set repeats an arm."""
    empty = np.zeros((3, 0, WIDTH), np.float32)
    sets = np.arange(L, dtype=np.int32).reshape(3, K)
    rows = Factors(sets, empty, empty)
    values = {}
    for kind in KINDS:
        trust, report = _make(kind, 1)
        state = _absorb(trust, _part(rows, [0, 1, 1]), BLOCK)
        values[kind] = np.asarray(report(state, rows).covariance)
    off = ~np.eye(3, dtype=bool)
    for kind in KINDS:
        np.testing.assert_allclose(values[kind][off], 0.0, atol=1e-6)
    plays = np.array([1.0, 2.0, 0.0])
    np.testing.assert_allclose(np.diag(values["exact"]), 1 / (RIDGE + plays), rtol=1e-5)
    np.testing.assert_allclose(values["full"], values["exact"], rtol=1e-4, atol=1e-6)
    # The diagonal of Z holds a K-th of a play on each of the K arms of the set.
    np.testing.assert_allclose(
        np.diag(values["diagonal"]), 1 / (RIDGE + plays / K), rtol=1e-5
    )


def test_confidence__full_equals_diagonal_for_single_arms():
    empty = np.zeros((3, 0, 2), np.float32)
    rows = Factors(np.array([[0], [1], [1]], np.int32), empty, empty)
    for kind in KINDS:
        trust = confidence(kind, num_arms=2, width=2, depth=1, lam1=0.5)

        @jax.jit
        def cov(rows: Factors, trust: Confidence = trust) -> jax.Array:
            state = trust.absorb(trust.init(4, 1), rows, jnp.asarray(3))
            return trust.covariance(state, _part(rows, jnp.array([0, 1])))

        expected = np.diag([1 / 1.5, 1 / 2.5])
        np.testing.assert_allclose(cov(rows), expected, rtol=1e-5, atol=1e-6)


def test_exact__linear_network_is_lin_ucb():
    trust, report = _make("exact", 1)
    got = report(_absorb(trust, _seen(1), BLOCK), _new(1))
    x = multi_hot(_seen(1).actions, L) / np.sqrt(K)
    at = multi_hot(_new(1).actions, L) / np.sqrt(K)
    design = RIDGE * np.eye(L) + x.T @ x
    expected = np.einsum("nl,ln->n", at, np.linalg.solve(design, at.T))
    np.testing.assert_allclose(got.variance, expected, rtol=1e-4)


@pytest.mark.parametrize("kind", ["exact", "full"])
def test_confidence__one_play_shrinks_b_to_b_over_root_of_one_plus_b_squared(kind):
    trust, report = _make(kind)
    state = _absorb(trust, _seen(), BLOCK)
    before = np.sqrt(report(state, _new()).variance[0])
    played = trust.absorb(state, _part(_new(), [0] * BLOCK), np.int32(1))
    after = np.sqrt(report(played, _new()).variance[0])
    assert before > 0.3
    np.testing.assert_allclose(after, before / np.sqrt(1 + before**2), rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_absorb__in_chunks_equals_at_once(kind):
    trust, report = _make(kind)
    once = report(_absorb(trust, _seen(), SEEN), _new())
    chunks = report(_absorb(trust, _seen(), BLOCK), _new())
    np.testing.assert_allclose(chunks.variance, once.variance, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_absorb__of_no_rows_changes_nothing(kind):
    trust, _ = _make(kind)
    state = _absorb(trust, _seen(), BLOCK)
    same = trust.absorb(state, _new(), np.int32(0))
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(same), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-6)


def test_exact__fills_its_capacity_and_grows():
    trust, report = _make("exact")
    wide = _absorb(trust, _seen(), BLOCK, capacity=24)
    tight = _absorb(trust, _seen(), BLOCK, capacity=SEEN)
    expected = report(wide, _new()).variance
    np.testing.assert_allclose(report(tight, _new()).variance, expected, rtol=1e-5)
    grown = trust.grow(tight, 24)
    np.testing.assert_allclose(report(grown, _new()).variance, expected, rtol=1e-5)
    more = [trust.absorb(state, _new(), np.int32(NEW)) for state in (wide, grown)]
    np.testing.assert_allclose(
        report(more[1], _seen()).variance, report(more[0], _seen()).variance, rtol=1e-5
    )
    assert trust.grow(grown, 8).upper.shape == (24, 24)


def test_exact__endless_replay_keeps_a_positive_width():
    """Where float32 has no digits left, the bound of the largest eigenvalue holds."""
    trust, report = _make("exact", 2, 1e-3)
    row = _part(_new(), [0] * 20)
    state = trust.init(400, K)
    for _ in range(20):
        state = trust.absorb(state, row, np.int32(20))
    assert np.isfinite(np.asarray(state.upper)).all()
    norm = float(np.sum(_flat(row)[0] ** 2))
    got = report(state, row)
    assert got.variance[0] >= 0.99 * norm / (1e-3 + 400 * norm)
    np.testing.assert_allclose(got.covariance[0, 0], got.variance[0], rtol=1e-3)


@pytest.mark.parametrize("is_moving", [False, True])
def test_exact_confidence__of_any_model_equals_the_explicit_inverse(is_moving):
    def model(params: dict, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]

    rng = np.random.default_rng(0)

    def draw(*lead: int) -> dict:
        shapes = {"w": (4, 5), "b": (5,), "v": (5,)}
        return {
            name: rng.normal(size=(*lead, *shape)).astype(np.float32)
            for name, shape in shapes.items()
        }

    params, moving = draw(), draw(12)
    history = rng.normal(size=(12, 4)).astype(np.float32)
    candidates = rng.normal(size=(6, 4)).astype(np.float32)
    if not is_moving:
        moving = {k: np.repeat(v[None], 12, axis=0) for k, v in params.items()}

    @jax.jit
    def run() -> tuple[jax.Array, jax.Array, jax.Array]:
        width = exact_confidence(
            model,
            params,
            history,
            candidates,
            lam1=0.2,
            width=5,
            history_params=moving if is_moving else None,
        )
        grad = jax.vmap(lambda p, x: ravel_pytree(jax.grad(model)(p, x))[0])
        still = {k: np.repeat(v[None], 6, axis=0) for k, v in params.items()}
        return width, grad(moving, history), grad(still, candidates)

    width, seen, new = (np.asarray(x, np.float64) for x in run())
    matrix = 0.2 * np.eye(new.shape[1]) + seen.T @ seen / 5
    expected = np.einsum("np,pn->n", new, np.linalg.solve(matrix, new.T)) / 5
    np.testing.assert_allclose(np.square(width), expected, rtol=1e-4)


def test_exact_confidence__without_history_is_the_prior_width():
    def model(params: jax.Array, x: jax.Array) -> jax.Array:
        return params @ x

    width = exact_confidence(
        model, jnp.ones((2,)), jnp.zeros((0, 2)), jnp.array([[3.0, 4.0]]), lam1=0.25
    )
    np.testing.assert_allclose(width, [10.0], rtol=1e-6)


def test_confidence__refuses_with_a_sentence():
    with pytest.raises(ValueError, match="one of exact"):
        confidence("none", num_arms=3, width=2, depth=2, lam1=1.0)
    with pytest.raises(ValueError, match="lam1 must be at least"):
        confidence("exact", num_arms=3, width=2, depth=2, lam1=0.0)
    with pytest.raises(ValueError, match="use confidence='exact'"):
        confidence("full", num_arms=1000, width=64, depth=2, lam1=1.0)
    with pytest.raises(ValueError, match="lam1 must be at least"):
        exact_confidence(
            jnp.dot, jnp.ones(2), jnp.ones((1, 2)), jnp.ones((1, 2)), lam1=0
        )
