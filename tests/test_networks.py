"""The network: zero at the start, gathered first layer, factored gradients."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from msb_jax.networks import ucb
from msb_jax.networks.ucb import UcbNet
from tests.reference import multi_hot

L, K = 7, 3
SETS = np.array(list(itertools.combinations(range(L), K)), np.int32)
DENSE = (multi_hot(SETS, L) / np.sqrt(K)).astype(np.float32)


class Views(NamedTuple):
    """One network seen in every way, at theta_0 or at moved weights."""

    params: ucb.Params
    by_rows: np.ndarray
    by_vectors: np.ndarray
    by_entered: np.ndarray
    scaled: np.ndarray  # at 2.5 times the vectors
    gradients: np.ndarray  # by autodiff
    flat: np.ndarray  # by factors
    factors: ucb.Factors


@functools.cache
def _views(width: int, depth: int, *, is_moved: bool) -> Views:
    net = UcbNet(L, width, depth)

    @jax.jit
    def look(key: jax.Array) -> Views:
        start, noise = jax.random.split(key)
        flat, unravel = ravel_pytree(ucb.init_params(start, net))
        step = 0.3 * jax.random.normal(noise, flat.shape) * is_moved
        params = unravel(flat + step)
        grads = jax.vmap(jax.grad(net.apply), in_axes=(None, 0))(params, SETS)
        factors = ucb.factors(net, params, jnp.asarray(SETS))
        entered = jnp.asarray(DENSE) @ ucb.first_weights(params)
        return Views(
            params=params,
            by_rows=ucb.predict(net, params, SETS),
            by_vectors=ucb.predict_vectors(net, params, DENSE),
            by_entered=ucb.predict_entered(net, params, entered),
            scaled=ucb.predict_vectors(net, params, 2.5 * DENSE),
            gradients=jax.vmap(lambda g: ravel_pytree(g)[0])(grads),
            flat=ucb.flat_gradients(factors, L, width),
            factors=factors,
        )

    return jax.tree.map(np.asarray, look(jax.random.key(0)))


@pytest.mark.parametrize(("width", "depth"), [(8, 2), (8, 4), (2, 2), (8, 1)])
def test_ucb_net__is_exactly_zero_at_the_start_with_a_gradient(width, depth):
    views = _views(width, depth, is_moved=False)
    np.testing.assert_array_equal(views.by_rows, 0.0)
    assert np.linalg.norm(views.gradients, axis=1).max() > 0.1


def test_factors__wide_network_has_gradient_norm_near_depth():
    """|g|^2 / m tends to D for a unit input: the scale of the confidence."""
    net = UcbNet(12, 4096, 3)

    @jax.jit
    def parts(key: jax.Array) -> ucb.Factors:
        params = ucb.init_params(key, net)
        sets = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)
        return ucb.factors(net, params, sets)

    grads = jax.tree.map(np.asarray, parts(jax.random.key(0)))
    below = np.square(grads.activations).sum(axis=2)  # |a_1|^2, |a_2|^2
    above = np.square(grads.deltas).sum(axis=2) / 4096  # |delta_1|^2, |delta_2|^2
    norms = above[:, 0] + below[:, 0] * above[:, 1] + below[:, 1]
    np.testing.assert_allclose(norms, 3.0, rtol=0.15)


@pytest.mark.parametrize(("width", "depth"), [(8, 2), (8, 4), (8, 1)])
def test_num_parameters__equals_the_ravelled_size(width, depth):
    size = _views(width, depth, is_moved=False).gradients.shape[1]
    assert size == ucb.num_parameters(L, width, depth)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_predict__all_ways_in_agree(depth):
    views = _views(8, depth, is_moved=True)
    assert np.abs(views.by_rows).max() > 0.1
    np.testing.assert_allclose(views.by_vectors, views.by_rows, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(views.by_entered, views.by_rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_predict_vectors__is_positively_homogeneous(depth):
    views = _views(8, depth, is_moved=True)
    np.testing.assert_allclose(
        views.scaled, 2.5 * views.by_vectors, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_flat_gradients__equal_autodiff(depth):
    views = _views(8, depth, is_moved=True)
    np.testing.assert_allclose(views.flat, views.gradients, rtol=1e-4, atol=1e-5)


def test_first_layer__folds_the_doubled_input_isometrically():
    """f and <g, g'> equal those of W_1 = [A B] on the doubled vector [x; x]/sqrt 2."""
    views = _views(8, 2, is_moved=True)
    folded = views.params["params"]["first"].astype(np.float64)  # [L, m]
    last = views.params["params"]["last"].astype(np.float64).reshape(-1)
    skew = np.random.default_rng(0).normal(size=folded.shape)
    both = np.concatenate([folded + skew, folded - skew]) / np.sqrt(2)  # [2L, m]
    doubled = np.concatenate([DENSE, DENSE], axis=1) / np.sqrt(2)
    hidden = np.maximum(doubled @ both, 0.0)
    np.testing.assert_allclose(
        views.by_rows, np.sqrt(8) * hidden @ last, rtol=1e-4, atol=1e-5
    )
    delta = np.sqrt(8) * last[None, :] * (hidden > 0)
    first = np.einsum("ni,nj->nij", doubled, delta).reshape(len(SETS), -1)
    full = np.concatenate([first, np.sqrt(8) * hidden], axis=1)
    own = views.gradients
    np.testing.assert_allclose(own @ own.T, full @ full.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("depth", [2, 4])
def test_outgoing_weights__are_the_mean_slope_above_the_first_layer(depth):
    views = _views(8, depth, is_moved=True)
    net = UcbNet(L, 8, depth)
    weights = jax.jit(lambda p, s: ucb.outgoing_weights(net, p, s))
    row = int(np.count_nonzero(views.factors.deltas[:, 0], axis=1).argmax())
    mean = weights(views.params, SETS[row : row + 1])
    # delta_1 is the same slope where the unit is on, and 0 where it is off.
    is_on = views.factors.activations[row, 0] > 0
    assert is_on.sum() >= 2
    np.testing.assert_allclose(
        np.where(is_on, mean, 0.0), views.factors.deltas[row, 0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(("width", "depth"), [(3, 2), (0, 2), (4, 0)])
def test_check_sizes__refuses_what_makes_no_network(width, depth):
    with pytest.raises(ValueError, match="must be"):
        ucb.check_sizes(L, width, depth)
