"""The master's network: bias-free ReLU layers on sets, with factored gradients.

The paper's network (appendix, "Details of master model") is

    f(x; W) = sqrt(m) W_D relu(W_{D-1} ... relu(W_1 x)),     ||x|| = 1,

with m hidden units and block-antisymmetric initial weights: W_l = blockdiag(W, W),
entries N(0, 4/m), and W_D = (w', -w'), entries N(0, 2/m). The two halves cancel at
theta_0, so the untrained network is exactly 0 while its gradient is not. They
cancel only if both halves see the same input, so the input is the doubled vector
[x; x] / sqrt(2).

An action of K arms is the input x = 1_S / sqrt(K). It never becomes an L-vector:
the first layer gathers K rows, whatever L is.

A layer's gradient is the outer product of what leaves it backwards (delta_l) and
what enters it (a_{l-1}). So for any two inputs, even at different weights,

    <g(x; W), g(x'; W')> = sum_l (a_{l-1} . a'_{l-1}) (delta_l . delta'_l),

and a gradient is kept as its `Factors`: 2 (D-1) m numbers instead of p.

Differs from the paper:
* the doubled input is folded into the first layer: both halves of W_1 = [A B] meet
  the same x, so only V = (A + B) / sqrt(2) is stored. The map is an isometry of
  gradients (A - B never moves), and L need not be even;
* p = m L + (D-2) m^2 + m; the printed formula counts one m^2 too many;
* D = 1 (a linear model, W_1 = 0 at the start) is allowed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from msb_jax.problem import to_multi_hot

Params = Any


class Factors(NamedTuple):
    """Gradients of the network's output at N actions, factored by layer."""

    actions: jax.Array  # [N, K] int32, stands for a_0 = 1_S / sqrt(K)
    activations: jax.Array  # [N, D-1, m] a_1 .. a_{D-1}
    deltas: jax.Array  # [N, D-1, m] delta_1 .. delta_{D-1}; delta_D is sqrt(m)


class UcbNet(nn.Module):
    """The paper's network for sets of L arms.

    Attributes:
        num_arms: L.
        width: m, even.
        depth: D, the number of weight matrices.
    """

    num_arms: int
    width: int = 64
    depth: int = 2

    def setup(self) -> None:
        check_sizes(self.num_arms, self.width, self.depth)
        half = self.width // 2
        if self.depth == 1:
            zeros = nn.initializers.zeros
            self.first = self.param("first", zeros, (self.num_arms, 1))
            return
        # Rows (w_i, w_i) / sqrt(2) of the folded V: variance 4/m halved.
        self.first = self.param("first", _twice(2.0), (self.num_arms, self.width))
        shape = (self.depth - 2, 2, half, 2, half)  # blocks [from, to] of W_l
        self.hidden = self.param("hidden", _block_diagonal(4.0), shape)
        self.last = self.param("last", _antisymmetric(2.0), (2, half))

    def __call__(self, action: jax.Array) -> jax.Array:
        """Evaluate one action int32[K]: float32[]."""
        return self.output(self.enter(action))

    def at_vector(self, x: jax.Array) -> jax.Array:
        """Evaluate any vector float32[L], not normalised: float32[]."""
        return self.output(x @ self.first)

    def enter(self, action: jax.Array) -> jax.Array:
        """Compute W_1 x of one action by gathering K rows: float32[m]."""
        rows = self.first[action]  # [K, m]
        return rows.sum(axis=0) / math.sqrt(action.shape[-1])

    def output(self, entered: jax.Array) -> jax.Array:
        """Finish the pass from W_1 x, float32[m]: float32[]."""
        if self.depth == 1:
            return math.sqrt(self.width) * entered[0]
        *_, top = self._forward(entered)
        return self._last(top)

    def factors(self, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return a_1..a_{D-1} and delta_1..delta_{D-1} of one action: [D-1, m]."""
        activations = self._forward(self.enter(action))
        if not activations:
            empty = jnp.zeros((0, self.width))
            return empty, empty
        scale = math.sqrt(self.width)
        delta = scale * self.last.reshape(-1) * (activations[-1] > 0)
        deltas = [delta]
        for index in range(self.depth - 3, -1, -1):
            weights = self.hidden[index].reshape(self.width, self.width)
            delta = (weights @ delta) * (activations[index] > 0)
            deltas.append(delta)
        return jnp.stack(activations), jnp.stack(deltas[::-1])

    def _forward(self, entered: jax.Array) -> list[jax.Array]:
        """Return the activations a_1 .. a_{D-1}, float32[m] each."""
        if self.depth == 1:
            return []
        activations = [nn.relu(entered)]
        for index in range(self.depth - 2):
            # By blocks, so that both halves add up in the same order and cancel.
            halves = activations[-1].reshape(2, -1)  # [2, m/2]
            parts = jnp.einsum("bi,bicj->bcj", halves, self.hidden[index])
            activations.append(nn.relu(parts.sum(axis=0).reshape(-1)))
        return activations

    def _last(self, top: jax.Array) -> jax.Array:
        """Apply W_D to a_{D-1}, float32[m]: float32[]."""
        # u.w + v.z = ((u-v).(w-z) + (u+v).(w+z)) / 2: at the start u = v and w = -z,
        # so that both terms are 0 whatever the order of the additions.
        (u, v), (w, z) = top.reshape(2, -1), self.last
        products = (u - v) * (w - z) + (u + v) * (w + z)
        return 0.5 * math.sqrt(self.width) * jnp.sum(products)


def check_sizes(num_arms: int, width: int, depth: int) -> None:
    """Raise ValueError unless the sizes make a network."""
    if num_arms < 1:
        raise ValueError(f"num_arms must be at least 1, got {num_arms}.")
    if width < 2 or width % 2:
        raise ValueError(f"width must be even and at least 2, got {width}.")
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}.")


def num_parameters(num_arms: int, width: int, depth: int) -> int:
    """Count the parameters: p = m L + (D-2) m^2 + m, or L if D = 1."""
    if depth == 1:
        return num_arms
    return width * num_arms + (depth - 2) * width**2 + width


def init_params(key: jax.Array, net: UcbNet) -> Params:
    """Draw theta_0."""
    return net.init(key, jnp.zeros((1,), jnp.int32))


def predict(net: UcbNet, params: Params, actions: jax.Array) -> jax.Array:
    """Evaluate f at actions int32[N, K]: float32[N]."""
    return _map(net, params, actions, "__call__")


def predict_vectors(net: UcbNet, params: Params, x: jax.Array) -> jax.Array:
    """Evaluate f at any vectors float32[N, L]: float32[N]."""
    return _map(net, params, x, "at_vector")


def predict_entered(net: UcbNet, params: Params, entered: jax.Array) -> jax.Array:
    """Evaluate f from given W_1 x, float32[N, m]: float32[N]."""
    return _map(net, params, entered, "output")


def first_weights(params: Params) -> jax.Array:
    """Return the folded first layer as rows per arm: float32[L, m]."""
    return params["params"]["first"]


def outgoing_weights(net: UcbNet, params: Params, actions: jax.Array) -> jax.Array:
    """Return the mean of df / da_1 over actions int32[N, K]: float32[m], D >= 2."""
    if net.depth == 2:
        return math.sqrt(net.width) * params["params"]["last"].reshape(-1)
    above = factors(net, params, actions).deltas[:, 1].mean(axis=0)
    return params["params"]["hidden"][0].reshape(net.width, net.width) @ above


def factors(net: UcbNet, params: Params, actions: jax.Array) -> Factors:
    """Return the factored gradients of f at actions int32[N, K]."""
    activations, deltas = _map(net, params, actions, "factors")
    return Factors(actions=actions, activations=activations, deltas=deltas)


def _map(net: UcbNet, params: Params, rows: jax.Array, method: str) -> Any:
    """Apply a method of the network to every row."""
    return jax.vmap(lambda row: net.apply(params, row, method=method))(rows)


def first_deltas(grads: Factors, width: int) -> jax.Array:
    """Return delta_1 of every gradient: float32[N, m], or [N, 1] if D = 1."""
    if grads.deltas.shape[1]:
        return grads.deltas[:, 0]
    return jnp.full((grads.actions.shape[0], 1), math.sqrt(width))


def flat_gradients(grads: Factors, num_arms: int, width: int) -> jax.Array:
    """Multiply the factors out: float32[N, p], in the order of `ravel_pytree`."""
    num, k = grads.actions.shape
    x = to_multi_hot(grads.actions, num_arms) / math.sqrt(k)  # [N, L]
    first = x[:, :, None] * first_deltas(grads, width)[:, None, :]
    parts = [first.reshape(num, -1)]
    if grads.deltas.shape[1]:
        below, above = grads.activations[:, :-1], grads.deltas[:, 1:]  # [N, D-2, m]
        hidden = below[:, :, :, None] * above[:, :, None, :]
        parts.append(hidden.reshape(num, -1))
        parts.append(math.sqrt(width) * grads.activations[:, -1])
    return jnp.concatenate(parts, axis=1)


def _twice(variance: float) -> Any:
    """Make an initialiser of rows (w, w), entries N(0, variance / m)."""

    def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        rows, width = shape
        w = jax.random.normal(key, (rows, width // 2)) * math.sqrt(variance / width)
        return jnp.concatenate([w, w], axis=1)

    return init


def _block_diagonal(variance: float) -> Any:
    """Make an initialiser of blockdiag(W, W), entries N(0, variance / m)."""

    def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        layers, _, half, _, _ = shape
        w = jax.random.normal(key, (layers, half, half))
        w = w * math.sqrt(variance / (2 * half))
        eye = jnp.eye(2)[None, :, None, :, None]
        return w[:, None, :, None, :] * eye  # [D-2, 2, m/2, 2, m/2]

    return init


def _antisymmetric(variance: float) -> Any:
    """Make an initialiser of (w, -w), entries N(0, variance / m)."""

    def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        half = shape[1]
        w = jax.random.normal(key, (half,)) * math.sqrt(variance / (2 * half))
        return jnp.stack([w, -w])

    return init
