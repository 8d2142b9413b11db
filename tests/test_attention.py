"""The attention network of G2ANet: who hears whom, and what there is to train."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.networks import attention
from msb_jax.networks.attention import G2ANet, Scene, mask_noise
from tests.g2anets import F, H, L, start_nets

A = 6
ONE = jnp.ones(())


def _scene(seed: int = 0) -> Scene:
    keys = jax.random.split(jax.random.key(seed), 2)
    upper = jnp.triu(jax.random.bernoulli(keys[0], 0.4, (A, A)), 1)
    return Scene(
        arms=jnp.arange(A),
        inputs=jax.random.normal(keys[1], (A, F)),
        conflicts=(upper | upper.T).astype(jnp.float32),
    )


def _net(hard: str) -> tuple[G2ANet, Any]:
    """A network whose arms have different embeddings."""
    net = G2ANet(A, H, hard)
    params = start_nets(jax.random.key(1), net, F).actor
    noise = jax.random.normal(jax.random.key(2), (A, H))
    params["params"]["embedding"] = noise
    return net, params


def _permuted(scene: Scene, order: np.ndarray) -> Scene:
    conflicts = scene.conflicts[order][:, order]
    return Scene(scene.arms[order], scene.inputs[order], conflicts)


def _plain_weights(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    scores = np.exp(queries @ keys.T / np.sqrt(H))
    np.fill_diagonal(scores, 0.0)
    return scores / scores.sum(axis=1, keepdims=True)


def test_attend__without_cuts_is_plain_attention() -> None:
    q, k, v = np.random.default_rng(0).normal(size=(3, A, H)).astype(np.float32)
    weights, heard = jax.jit(attention.attend)(q, k, v, np.ones((A, A), np.float32))
    np.testing.assert_allclose(weights, _plain_weights(q, k), atol=1e-6)
    np.testing.assert_allclose(heard, _plain_weights(q, k) @ v, atol=1e-5)


def test_attend__cuts_after_the_softmax() -> None:
    q, k, v = np.random.default_rng(0).normal(size=(3, A, H)).astype(np.float32)
    mask = (np.random.default_rng(1).random((A, A)) < 0.5).astype(np.float32)
    weights = np.asarray(jax.jit(attention.attend)(q, k, v, mask)[0])
    assert (weights[mask == 0] == 0).all()
    # What is kept has the weight it had: nothing is renormalised.
    np.testing.assert_allclose(weights, mask * _plain_weights(q, k), atol=1e-6)


def test_g2anet__with_all_edges_cut_hears_nothing() -> None:
    net, params = _net("mlp")
    scene = _scene()

    @jax.jit
    def run(inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = net.apply(params, scene._replace(inputs=inputs), method="encode")
        x = net.apply(params, h, jnp.zeros((A, A)), method="listen")
        return x, net.apply(params, h, x, method="decide")

    heard, logits = run(scene.inputs)
    assert not np.asarray(heard).any()
    # Noise that forbids every edge does the same to the whole network.
    silent = jax.jit(net.apply)(params, scene, jnp.full((A, A), -1e9), ONE)
    np.testing.assert_allclose(silent, logits, atol=1e-6)
    other = run(scene.inputs.at[0].add(1.0))[1]
    np.testing.assert_allclose(other[1:], logits[1:], atol=1e-6)
    assert abs(other[0] - logits[0]) > 1e-3


def test_g2anet__hears_the_others_otherwise() -> None:
    net, params = _net("none")
    scene = _scene()
    run = jax.jit(lambda s: net.apply(params, s, jnp.zeros((A, A)), ONE))
    moved = scene._replace(inputs=scene.inputs.at[0].add(1.0))
    assert np.abs(np.asarray(run(scene) - run(moved)))[1:].min() > 1e-5


@pytest.mark.parametrize("hard", ["none", "mlp"])
def test_g2anet__permuted_arms_give_permuted_logits(hard: str) -> None:
    net, params = _net(hard)
    scene, order = _scene(), np.array([3, 0, 5, 1, 4, 2])
    noise = mask_noise(jax.random.key(3), A)
    run = jax.jit(lambda s, n: net.apply(params, s, n, ONE))
    permuted = run(_permuted(scene, order), noise[order][:, order])
    np.testing.assert_allclose(permuted, run(scene, noise)[order], atol=1e-5)


@pytest.mark.parametrize(("hard", "sees_others"), [("mlp", False), ("lstm", True)])
def test_hard_attention__lstm_reads_the_whole_sequence_in_both_directions(
    hard: str, sees_others: bool
) -> None:
    stage: Any = attention.PairLstm(H) if hard == "lstm" else attention.PairMlp(H)
    h = jax.random.normal(jax.random.key(0), (A, H))
    conflicts = _scene().conflicts
    params = jax.jit(stage.init)(jax.random.key(1), h, conflicts)
    slopes = jax.jit(jax.grad(lambda *x: stage.apply(params, *x)[0, 2], (0, 1)))
    edge, by_conflict = slopes(h, conflicts)
    moves = np.abs(np.asarray(edge)).sum(axis=1)
    assert moves[0] > 0
    assert moves[2] > 0
    others = moves[[1, 3, 4, 5]]
    assert (others > 0).all() if sees_others else not others.any()
    assert by_conflict[0, 2] != 0


def test_straight_through__is_a_gumbel_softmax_of_two_logits() -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    logits = jax.random.normal(keys[0], (50, 2))
    gumbel = jax.random.gumbel(keys[1], (50, 2))
    tau = jnp.asarray(0.5)

    def by_differences(logits: jax.Array) -> jax.Array:
        gap, noise = logits[:, 1] - logits[:, 0], gumbel[:, 1] - gumbel[:, 0]
        return attention.straight_through(gap, noise, tau)

    hard = np.asarray(by_differences(logits))
    assert set(hard.tolist()) == {0.0, 1.0}
    np.testing.assert_array_equal(hard, np.argmax(logits + gumbel, axis=1))
    weights = jnp.linspace(-1.0, 1.0, 50)
    ours = jax.grad(lambda x: weights @ by_differences(x))(logits)
    soft = jax.grad(lambda x: weights @ jax.nn.softmax((x + gumbel) / tau)[:, 1])
    np.testing.assert_allclose(ours, soft(logits), atol=1e-6)


@pytest.mark.parametrize("hard", ["mlp", "lstm"])
def test_g2anet__trains_the_hard_attention(hard: str) -> None:
    net, params = _net(hard)
    scene, noise = _scene(), mask_noise(jax.random.key(3), A)
    grads = jax.jit(
        jax.grad(lambda p: jnp.sum(jnp.square(net.apply(p, scene, noise, ONE))))
    )(params)
    for leaf in jax.tree.leaves(grads["params"]["pairs"]):
        assert np.isfinite(leaf).all()
        assert np.abs(leaf).max() > 0


def test_critic__is_nothing_at_first_and_knows_no_order() -> None:
    critic = start_nets(jax.random.key(0), G2ANet(L, H), F).critic
    action = jnp.asarray([[2, 5, 7], [7, 2, 5]], jnp.int32)
    assert not np.asarray(attention.judge(critic, action)).any()
    noisy = jax.tree.map(
        lambda leaf: leaf + jnp.linspace(0.1, 1.0, leaf.size).reshape(leaf.shape),
        critic,
    )
    values = attention.judge(noisy, action)
    assert values[0] != 0
    np.testing.assert_allclose(values[0], values[1], rtol=1e-5)
