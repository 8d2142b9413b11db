"""The network: zero at the start, gathered first layer, factored gradients."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from msb_jax import networks
from msb_jax.networks import UcbNet
from msb_jax.problem import to_multi_hot

L, K = 7, 3


def _net(width: int, depth: int, seed: int = 0) -> tuple[UcbNet, networks.Params]:
    net = UcbNet(L, width, depth)
    return net, networks.init_params(jax.random.key(seed), net)


def _perturbed(params: networks.Params, seed: int) -> networks.Params:
    flat, unravel = ravel_pytree(params)
    return unravel(flat + 0.3 * jax.random.normal(jax.random.key(seed), flat.shape))


def _all_sets() -> jax.Array:
    return jnp.array(list(itertools.combinations(range(L), K)), jnp.int32)


def _gradients(net: UcbNet, params: networks.Params, sets: jax.Array) -> np.ndarray:
    grad = jax.vmap(jax.grad(net.apply), in_axes=(None, 0))(params, sets)
    return np.asarray(jax.vmap(lambda g: ravel_pytree(g)[0])(grad))


@pytest.mark.parametrize(("width", "depth"), [(8, 2), (6, 3), (10, 4), (2, 2), (4, 1)])
def test_ucb_net__is_exactly_zero_at_the_start_with_a_gradient(width, depth):
    net, params = _net(width, depth)
    sets = _all_sets()
    output = jax.jit(networks.predict, static_argnums=0)(net, params, sets)
    np.testing.assert_array_equal(np.asarray(output), 0.0)
    norms = np.linalg.norm(_gradients(net, params, sets), axis=1)
    assert norms.max() > 0.1


def test_ucb_net__wide_network_has_gradient_norm_near_depth():
    # |g|^2 / m tends to D for a unit input: the scale of the confidence.
    net = UcbNet(20, 2048, 3)
    params = networks.init_params(jax.random.key(0), net)
    sets = jax.vmap(lambda k: jax.random.permutation(k, 20)[:5])(
        jax.random.split(jax.random.key(1), 16)
    )
    grads = networks.factors(net, params, sets)
    inner = np.asarray(networks.flat_gradients(grads, 20, 2048))
    norms = np.sum(inner**2, axis=1) / 2048
    np.testing.assert_allclose(norms.mean(), 3.0, rtol=0.1)


@pytest.mark.parametrize(("width", "depth"), [(8, 2), (6, 3), (4, 5), (4, 1)])
def test_num_parameters__equals_the_ravelled_size(width, depth):
    _, params = _net(width, depth)
    assert ravel_pytree(params)[0].size == networks.num_parameters(L, width, depth)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_predict__gathered_rows_agree_with_the_dense_vector(depth):
    net, params = _net(8, depth)
    params = _perturbed(params, 1)
    sets = _all_sets()
    dense = to_multi_hot(sets, L) / jnp.sqrt(K)
    by_rows = networks.predict(net, params, sets)
    assert np.abs(np.asarray(by_rows)).max() > 0.1
    np.testing.assert_allclose(
        by_rows, networks.predict_vectors(net, params, dense), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(
        networks.predict_entered(net, params, dense @ networks.first_weights(params)),
        by_rows,
        rtol=1e-5,
        atol=1e-5,
    )


def test_predict_vectors__is_positively_homogeneous():
    net, params = _net(8, 3)
    params = _perturbed(params, 2)
    x = jax.random.normal(jax.random.key(3), (5, L))
    once = networks.predict_vectors(net, params, x)
    twice = networks.predict_vectors(net, params, 2.5 * x)
    np.testing.assert_allclose(twice, 2.5 * once, rtol=1e-5, atol=1e-6)
    zero = networks.predict_vectors(net, params, jnp.zeros((1, L)))
    np.testing.assert_array_equal(np.asarray(zero), 0.0)


def test_first_layer__folds_the_doubled_input_isometrically():
    """f and <g, g'> equal those of W_1 = [A B] on the doubled vector [x; x]/sqrt 2."""
    net, params = _net(6, 2)
    params = _perturbed(params, 4)
    sets = _all_sets()[:6]
    folded = np.asarray(networks.first_weights(params), np.float64)  # [L, m]
    skew = np.random.default_rng(0).normal(size=folded.shape)
    upper, lower = (folded + skew) / np.sqrt(2), (folded - skew) / np.sqrt(2)
    last = np.asarray(params["params"]["last"], np.float64).reshape(-1)
    x = np.asarray(to_multi_hot(sets, L), np.float64) / np.sqrt(K)
    doubled = np.concatenate([x, x], axis=1) / np.sqrt(2)
    hidden = np.maximum(doubled @ np.concatenate([upper, lower]), 0.0)
    np.testing.assert_allclose(
        networks.predict(net, params, sets),
        np.sqrt(6) * hidden @ last,
        rtol=1e-5,
        atol=1e-6,
    )
    delta = np.sqrt(6) * last[None, :] * (hidden > 0)
    first = np.einsum("ni,nj->nij", doubled, delta).reshape(len(x), -1)
    full = np.concatenate([first, np.sqrt(6) * hidden], axis=1)
    own = _gradients(net, params, sets)
    np.testing.assert_allclose(own @ own.T, full @ full.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_flat_gradients__equal_autodiff(depth):
    net, params = _net(6, depth)
    params = _perturbed(params, 5)
    sets = _all_sets()[::5]
    factored = networks.factors(net, params, sets)
    np.testing.assert_allclose(
        networks.flat_gradients(factored, L, 6),
        _gradients(net, params, sets),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("depth", [2, 3])
def test_outgoing_weights__are_the_mean_slope_above_the_first_layer(depth):
    net, params = _net(6, depth)
    params = _perturbed(params, 6)
    sets = _all_sets()[::7]
    rows = networks.first_weights(params)
    entered = rows[sets].sum(axis=1) / jnp.sqrt(K)

    def above(active: jax.Array) -> jax.Array:
        return net.apply(params, active, method="output")

    # An active first layer is the identity, so its slope is that of what follows.
    slopes = jax.vmap(jax.grad(above))(jnp.maximum(entered, 1e-6))
    np.testing.assert_allclose(
        networks.outgoing_weights(net, params, sets),
        slopes.mean(axis=0),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize(("width", "depth"), [(3, 2), (0, 2), (4, 0)])
def test_check_sizes__refuses_what_makes_no_network(width, depth):
    with pytest.raises(ValueError, match="must be"):
        networks.check_sizes(L, width, depth)
