"""Quadratic models: exact where they must be, near where they fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.masters import extractors
from msb_jax.networks import ucb
from msb_jax.networks.ucb import UcbNet
from msb_jax.types import Quadratic
from tests.reference import all_sets, multi_hot

L, K, WIDTH = 6, 3, 8
SETS = np.array(list(all_sets(L, K)), np.int32)
ARMS = jnp.arange(L, dtype=jnp.int32)


def _value(model: Quadratic, sets: np.ndarray) -> np.ndarray:
    x = multi_hot(sets, len(model.linear))
    pairs = np.einsum("ni,ij,nj->n", x, np.asarray(model.pair, np.float64), x)
    return pairs + x @ np.asarray(model.linear, np.float64) + float(model.offset)


def _trained(depth: int, num_arms: int = L, width: int = WIDTH) -> tuple:
    """Return a network far from theta_0, jitted in one piece."""
    net = UcbNet(num_arms, width, depth)

    @jax.jit
    def draw(key: jax.Array) -> ucb.Params:
        start, noise = jax.random.split(key)
        params = ucb.init_params(start, net)
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(noise, len(leaves))
        moved = [
            leaf + 0.3 * jax.random.normal(k, leaf.shape)
            for leaf, k in zip(leaves, keys, strict=True)
        ]
        return jax.tree.unflatten(tree, moved)

    return net, draw(jax.random.key(0))


def _extractor(net: UcbNet, params: ucb.Params, **changes) -> tuple:
    fields = {"k": K, "sets": jnp.asarray(SETS), "spread": 0.25, "is_literal": False}
    return extractors.NetworkExtractor(net=net, params=params, **(fields | changes))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_quadratic_from_function__is_exact_on_quadratics(k):
    rng = np.random.default_rng(k)
    matrix = rng.normal(size=(L, L))
    matrix = (matrix + matrix.T).astype(np.float32)
    slope = rng.normal(size=L).astype(np.float32)
    constant = 0.7

    def h(x: jax.Array) -> jax.Array:
        return x @ (matrix @ x) + slope @ x + constant

    model = jax.jit(lambda: extractors.quadratic_from_function(h, L, k))()
    np.testing.assert_allclose(model.pair, matrix / k, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(model.linear, slope / np.sqrt(k), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(model.offset, constant, rtol=1e-5)
    sets = np.array(list(all_sets(L, k)), np.int32)
    x = multi_hot(sets, L) / np.sqrt(k)
    expected = np.einsum("ni,ij,nj->n", x, matrix, x) + x @ slope + constant
    np.testing.assert_allclose(_value(model, sets), expected, rtol=1e-3, atol=1e-4)


def test_quadratic_from_function__has_no_pairs_on_linear_homogeneous_functions():
    slope = jnp.arange(1.0, L + 1)
    model = extractors.quadratic_from_function(lambda x: slope @ x, L, K)
    np.testing.assert_allclose(model.pair, 0.0, atol=1e-5)
    np.testing.assert_allclose(model.linear, slope / np.sqrt(K), rtol=1e-5)


@pytest.mark.parametrize("depth", [1, 2])
def test_network_quadratic__literal_is_the_function_extractor(depth):
    net, params = _trained(depth)
    extractor = _extractor(net, params, is_literal=True)
    own = jax.jit(lambda: extractors.network_quadratic(extractor, ARMS))()

    def h(x: jax.Array) -> jax.Array:
        return net.apply(params, x, method="at_vector")

    other = jax.jit(lambda: extractors.quadratic_from_function(h, L, K))()
    np.testing.assert_allclose(own.pair, other.pair, atol=1e-4)
    np.testing.assert_allclose(own.linear, other.linear, rtol=1e-4, atol=1e-4)
    # The bias-free network is homogeneous: no diagonal, no constant (I-1).
    np.testing.assert_allclose(np.diagonal(own.pair), 0.0, atol=1e-4)
    np.testing.assert_allclose(own.offset, 0.0, atol=1e-6)
    single = extractors.network_marginals(extractor)
    np.testing.assert_allclose(own.linear * np.sqrt(K), single, rtol=1e-4, atol=1e-4)


def test_fit_units__is_the_least_squares_quadratic_of_a_relu():
    """Against a weighted regression on a fine grid of the Gaussian, in float64."""
    rows = jnp.array([[0.9, -0.2], [0.1, 0.5], [-0.4, 0.3], [0.2, -0.6]])
    sets = jnp.array([[0, 1], [0, 2], [1, 2]], jnp.int32)
    fit = jax.jit(lambda: extractors.fit_units(rows, sets, 0.5))()
    table = np.asarray(rows, np.float64)
    inputs = table[np.asarray(sets)].sum(axis=1) / np.sqrt(2)
    for unit in range(2):
        mu = inputs[:, unit].mean()
        sigma = np.sqrt(inputs[:, unit].var() + 0.5 * table[:, unit].var())
        z = np.linspace(-9, 9, 200_001) * sigma + mu
        root = np.exp(-0.25 * ((z - mu) / sigma) ** 2)
        design = np.stack([(z - mu) ** p for p in range(3)], axis=1) * root[:, None]
        best = np.linalg.lstsq(design, np.maximum(z, 0) * root, rcond=None)[0]
        got = [fit.level[unit], fit.slope[unit], fit.curve[unit]]
        np.testing.assert_allclose(got, best, rtol=1e-4)
        np.testing.assert_allclose(fit.center[unit], mu, rtol=1e-5)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_network_quadratic__follows_the_network_near_the_sets(depth):
    net, params = _trained(depth)
    extractor = _extractor(net, params)
    look = jax.jit(
        lambda: (
            ucb.predict(net, params, jnp.asarray(SETS)),
            extractors.network_quadratic(extractor, ARMS),
            extractors.network_marginals(extractor),
        )
    )
    true, model, marginals = jax.tree.map(np.asarray, look())
    value = _value(model, SETS)
    assert np.corrcoef(value, true)[0, 1] > 0.9
    assert abs(value.mean() - true.mean()) < 0.2 * true.std()
    # First order: the slope of the second-order model at the mean of the sets.
    center = multi_hot(SETS, L).mean(axis=0)
    slope = model.linear + 2 * model.pair @ center
    np.testing.assert_allclose(marginals, slope, rtol=1e-3, atol=1e-4)
    assert np.allclose(model.pair, model.pair.T, atol=1e-6)


def test_network_quadratic__on_some_arms_is_the_part_of_the_whole():
    net, params = _trained(2)
    extractor = _extractor(net, params)
    look = jax.jit(lambda arms: extractors.network_quadratic(extractor, arms))
    whole = look(ARMS)
    some = np.array([4, 0, 3], np.int32)
    part = look(some)
    np.testing.assert_allclose(part.pair, whole.pair[some][:, some], rtol=1e-5)
    np.testing.assert_allclose(part.linear, whole.linear[some], rtol=1e-5)
    np.testing.assert_allclose(part.offset, whole.offset, rtol=1e-5)


def test_quadratic_from_function__refuses_sizes_below_one():
    with pytest.raises(ValueError, match="at least 1"):
        extractors.quadratic_from_function(jnp.sum, 0)
