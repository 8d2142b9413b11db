"""The confidence in three forms, against explicit inverses in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from msb_jax import networks
from msb_jax.masters.confidence import (
    KINDS,
    Confidence,
    confidence,
    exact_confidence,
    gram,
)
from msb_jax.networks import Factors, UcbNet

L, K, WIDTH = 9, 3, 6


def _sets(n: int, seed: int) -> jax.Array:
    noise = jax.random.uniform(jax.random.key(seed), (n, L))
    return jax.lax.top_k(noise, K)[1]


def _params(depth: int, seed: int) -> networks.Params:
    net = UcbNet(L, WIDTH, depth)
    params = networks.init_params(jax.random.key(0), net)
    flat, unravel = ravel_pytree(params)
    noise = jax.random.normal(jax.random.key(seed), flat.shape)
    return unravel(flat + 0.2 * noise)


def _rows(depth: int, n: int, seed: int) -> Factors:
    """Gradients at n sets, every one at weights of its own."""
    net = UcbNet(L, WIDTH, depth)
    sets = _sets(n, seed)
    parts = [
        networks.factors(net, _params(depth, 100 * seed + row), sets[row : row + 1])
        for row in range(n)
    ]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def _make(kind: str, depth: int = 2, lam1: float = 0.3) -> Confidence:
    return confidence(kind, num_arms=L, width=WIDTH, depth=depth, lam1=lam1)


def _flat(rows: Factors) -> np.ndarray:
    flat = networks.flat_gradients(rows, L, WIDTH)
    return np.asarray(flat, np.float64) / np.sqrt(WIDTH)


def _matrix(rows: Factors, lam1: float) -> np.ndarray:
    flat = _flat(rows)
    return lam1 * np.eye(flat.shape[1]) + flat.T @ flat


def _absorb(trust: Confidence, rows: Factors, block: int, capacity: int = 32):
    state = trust.init(capacity, K)
    absorb = jax.jit(trust.absorb)
    n = rows.actions.shape[0]
    for start in range(0, n, block):
        take = np.minimum(start + np.arange(block), n - 1)  # the rest is ignored
        part = jax.tree.map(lambda x, take=take: x[take], rows)
        state = absorb(state, part, jnp.asarray(min(block, n - start), jnp.int32))
    return state


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_gram__equals_products_of_flat_gradients(depth):
    a, b = _rows(depth, 4, 1), _rows(depth, 5, 2)
    expected = _flat(a) @ _flat(b).T
    np.testing.assert_allclose(gram(a, b, L, WIDTH), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["exact", "full"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_confidence__equals_the_explicit_inverse(kind, depth):
    rows, new = _rows(depth, 14, 3), _rows(depth, 6, 4)
    trust = _make(kind, depth)
    state = _absorb(trust, rows, block=5)
    flat = _flat(new)
    expected = flat @ np.linalg.inv(_matrix(rows, 0.3)) @ flat.T
    np.testing.assert_allclose(
        trust.variance(state, new), np.diagonal(expected), rtol=1e-4
    )
    np.testing.assert_allclose(
        trust.covariance(state, new), expected, rtol=1e-4, atol=1e-4
    )
    log_det = np.linalg.slogdet(_matrix(rows, 0.3) / 0.3)[1]
    np.testing.assert_allclose(trust.log_det(state), log_det, rtol=1e-4)


def test_exact__holds_at_a_long_history():
    """600 rounds at L = 40 stay within 1e-4 of float64, relative."""
    net = UcbNet(40, 16, 2)
    params = networks.init_params(jax.random.key(0), net)
    noise = jax.random.uniform(jax.random.key(1), (620, 40))
    rows = networks.factors(net, params, jax.lax.top_k(noise, 5)[1])
    old = jax.tree.map(lambda x: x[:600], rows)
    new = jax.tree.map(lambda x: x[600:], rows)
    trust = confidence("exact", num_arms=40, width=16, depth=2, lam1=0.1)

    def take(state, block):
        return trust.absorb(state, block, jnp.asarray(20, jnp.int32)), None

    blocks = jax.tree.map(lambda x: x.reshape(30, 20, *x.shape[1:]), old)
    state = jax.jit(lambda s, b: jax.lax.scan(take, s, b)[0])(
        trust.init(600, 5), blocks
    )
    flat = np.asarray(networks.flat_gradients(old, 40, 16), np.float64) / 4.0
    at = np.asarray(networks.flat_gradients(new, 40, 16), np.float64) / 4.0
    matrix = 0.1 * np.eye(flat.shape[1]) + flat.T @ flat
    expected = np.einsum("np,pn->n", at, np.linalg.solve(matrix, at.T))
    np.testing.assert_allclose(trust.variance(state, new), expected, rtol=1e-4)


def test_diagonal__equals_its_definition():
    for depth in (1, 2, 3):
        rows, new = _rows(depth, 7, 5), _rows(depth, 4, 6)
        trust = _make("diagonal", depth)
        state = _absorb(trust, rows, block=3)
        diagonal = np.diagonal(_matrix(rows, 0.3))
        expected = (_flat(new) / diagonal) @ _flat(new).T
        np.testing.assert_allclose(
            trust.variance(state, new), np.diagonal(expected), rtol=1e-4
        )
        np.testing.assert_allclose(
            trust.covariance(state, new), expected, rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(
            trust.log_det(state), np.log(diagonal / 0.3).sum(), rtol=1e-4
        )


def test_confidence__kinds_agree_on_disjoint_supports():
    """At D = 1 a gradient lives on the arms of its set; one arm each is diagonal."""
    net = UcbNet(4, 2, 1)
    params = networks.init_params(jax.random.key(0), net)
    rows = networks.factors(net, params, jnp.array([[0], [1], [1], [3]], jnp.int32))
    new = networks.factors(net, params, jnp.arange(4, dtype=jnp.int32)[:, None])
    values = []
    for kind in KINDS:
        trust = confidence(kind, num_arms=4, width=2, depth=1, lam1=0.5)
        state = trust.absorb(trust.init(8, 1), rows, jnp.asarray(4, jnp.int32))
        values.append(np.asarray(trust.covariance(state, new)))
    expected = np.diag(1.0 / (0.5 + np.array([1.0, 2.0, 0.0, 1.0])))
    for value in values:
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def test_exact__linear_network_is_lin_ucb():
    rows, new = _rows(1, 8, 7), _rows(1, 5, 8)
    trust = _make("exact", depth=1)
    state = _absorb(trust, rows, block=4)
    x = np.zeros((8, L))
    np.put_along_axis(x, np.asarray(rows.actions), 1.0 / np.sqrt(K), axis=1)
    at = np.zeros((5, L))
    np.put_along_axis(at, np.asarray(new.actions), 1.0 / np.sqrt(K), axis=1)
    design = 0.3 * np.eye(L) + x.T @ x
    expected = np.einsum("nl,ln->n", at, np.linalg.solve(design, at.T))
    np.testing.assert_allclose(trust.variance(state, new), expected, rtol=1e-4)


@pytest.mark.parametrize("kind", ["exact", "full"])
def test_confidence__one_play_shrinks_b_to_b_over_root_of_one_plus_b_squared(kind):
    trust = _make(kind)
    state = _absorb(trust, _rows(2, 5, 9), block=5)
    row = _rows(2, 1, 10)
    before = float(jnp.sqrt(trust.variance(state, row))[0])
    state = trust.absorb(state, row, jnp.asarray(1, jnp.int32))
    after = float(jnp.sqrt(trust.variance(state, row))[0])
    assert before > 0.3
    np.testing.assert_allclose(after, before / np.sqrt(1 + before**2), rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_absorb__in_chunks_equals_at_once(kind):
    rows, new = _rows(2, 11, 11), _rows(2, 4, 12)
    trust = _make(kind)
    once = trust.variance(_absorb(trust, rows, block=11), new)
    chunks = trust.variance(_absorb(trust, rows, block=4), new)
    np.testing.assert_allclose(chunks, once, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_absorb__of_no_rows_changes_nothing(kind):
    trust = _make(kind)
    state = _absorb(trust, _rows(2, 5, 13), block=5)
    same = trust.absorb(state, _rows(2, 3, 14), jnp.asarray(0, jnp.int32))
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(same), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-6)


def test_exact__fills_its_capacity_and_grows():
    rows, new = _rows(2, 10, 15), _rows(2, 4, 16)
    trust = _make("exact")
    tight = _absorb(trust, rows, block=4, capacity=10)
    wide = _absorb(trust, rows, block=4, capacity=32)
    expected = trust.variance(wide, new)
    np.testing.assert_allclose(trust.variance(tight, new), expected, rtol=1e-5)
    grown = trust.grow(tight, 24)
    np.testing.assert_allclose(trust.variance(grown, new), expected, rtol=1e-5)
    more = trust.absorb(grown, new, jnp.asarray(4, jnp.int32))
    expected = trust.variance(trust.absorb(wide, new, jnp.asarray(4, jnp.int32)), new)
    np.testing.assert_allclose(trust.variance(more, new), expected, rtol=1e-4)
    assert trust.grow(more, 8).upper.shape == (24, 24)


def test_exact__endless_replay_keeps_a_positive_width():
    """Where float32 has no digits left, the bound of the largest eigenvalue holds."""
    row = _rows(2, 1, 17)
    trust = _make("exact", lam1=1e-3)
    many = jax.tree.map(lambda x: jnp.repeat(x, 20, axis=0), row)
    state = trust.init(400, K)
    absorb = jax.jit(trust.absorb)
    for _ in range(20):
        state = absorb(state, many, jnp.asarray(20, jnp.int32))
    norm = float(np.sum(_flat(row) ** 2))
    variance = float(trust.variance(state, row)[0])
    assert np.isfinite(np.asarray(state.upper)).all()
    assert variance >= 0.99 * norm / (1e-3 + 400 * norm)
    np.testing.assert_allclose(trust.covariance(state, row)[0, 0], variance, rtol=1e-3)


def test_exact_confidence__of_any_model_equals_the_explicit_inverse():
    def model(params: dict, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ params["w"] + params["b"])
        return hidden @ params["v"]

    def draw(key: jax.Array) -> dict:
        first, second, third = jax.random.split(key, 3)
        return {
            "w": jax.random.normal(first, (4, 5)),
            "b": jax.random.normal(second, (5,)),
            "v": jax.random.normal(third, (5,)),
        }

    params = draw(jax.random.key(0))
    history_params = jax.vmap(draw)(jax.random.split(jax.random.key(1), 12))
    history = jax.random.normal(jax.random.key(2), (12, 4))
    candidates = jax.random.normal(jax.random.key(3), (6, 4))

    def flat(at: dict, x: jax.Array) -> np.ndarray:
        return np.asarray(ravel_pytree(jax.grad(model)(at, x))[0], np.float64)

    new = np.stack([flat(params, x) for x in candidates])
    for own in (None, history_params):
        seen = np.stack(
            [
                flat(params if own is None else jax.tree.map(lambda p: p[i], own), x)  # noqa: B023
                for i, x in enumerate(history)
            ]
        )
        matrix = 0.2 * np.eye(new.shape[1]) + seen.T @ seen / 5
        expected = np.einsum("np,pn->n", new, np.linalg.solve(matrix, new.T)) / 5
        width = exact_confidence(
            model,
            params,
            history,
            candidates,
            lam1=0.2,
            width=5,
            history_params=own,
        )
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
