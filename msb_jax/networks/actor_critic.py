"""Actor and critic on sets, for deterministic policy gradients.

The actor maps a state (how often each arm stood in the learner's own sets) to a logit
an arm; `sum_to_k` makes of them numbers in (0, 1) with sum K, the proto-action. The
critic values any vector in [0, 1]^L beside a state, so that it has a gradient at the
proto-action; a set is its 0/1 vector. Networks are written for one state: `vmap` them.

Differs from the plain multilayer networks of Wolpertinger: each has a direct path (a
weight an arm in the critic, a bias an arm in the actor), which learns in tens of steps
what the deep path needs thousands for. The logits are free, so that the output can
reach 0 and 1 (the authors' sigmoid of a tanh stays within 0.27 and 0.73).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

Params = Any

# Halvings of the bracket of the shift; a differentiable Newton step follows.
_HALVINGS = 16
# Sigmoids this far out are 0 or 1 up to 1e-5.
_MAX_SHIFT = 12.0


class Actor(nn.Module):
    """State float32[L] -> logits float32[L], all 0 at the start.

    Attributes:
        num_arms: L.
        k: arms in a set.
        width: hidden units.
    """

    num_arms: int
    k: int
    width: int = 64

    @nn.compact
    def __call__(self, state: jax.Array) -> jax.Array:
        share = self.k * state  # of the own sets, those that hold the arm
        hidden = nn.tanh(nn.Dense(self.width)(share))
        return nn.Dense(self.num_arms, kernel_init=nn.initializers.zeros)(hidden)


class Critic(nn.Module):
    """State float32[L] and action float32[L] -> value float32[], 0 at the start.

    Attributes:
        num_arms: L.
        k: arms in a set.
        width: hidden units.
    """

    num_arms: int
    k: int
    width: int = 64

    @nn.compact
    def __call__(self, state: jax.Array, action: jax.Array) -> jax.Array:
        zeros = nn.initializers.zeros
        share = self.k * state
        # Embeddings of the arms, summed over the set.
        entered = nn.Dense(self.width)(action)
        hidden = nn.relu(entered + nn.Dense(self.width, use_bias=False)(share))
        hidden = nn.relu(nn.Dense(self.width)(hidden))
        deep = nn.Dense(1, kernel_init=zeros)(hidden)[0]
        weights = self.param("arms", zeros, (self.num_arms,))
        return deep + jnp.dot(action, weights)


class ActorNet(NamedTuple):
    """Any actor: how it starts, and its logits float32[L] at a state float32[L]."""

    init: Callable[[jax.Array], Params]
    logits: Callable[[Params, jax.Array], jax.Array]


def plain_actor(num_arms: int, k: int, width: int) -> ActorNet:
    """Wrap `Actor`."""
    net = Actor(num_arms, k, width)
    return ActorNet(
        init=lambda key: net.init(key, jnp.zeros((num_arms,))),
        logits=lambda params, state: evaluate(net, params, state),
    )


def evaluate(net: nn.Module, params: Params, *inputs: jax.Array) -> Any:
    """Apply a network."""
    return net.apply(params, *inputs)


def sum_to_k(logits: jax.Array, k: int) -> jax.Array:
    """Turn logits float32[L] into numbers in (0, 1) with sum k, by one common shift.

    The order of the arms stays. The shift is found by bisection, and the last, Newton
    step carries its derivative.
    """
    fixed = jax.lax.stop_gradient(logits)

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        is_above = jnp.sum(nn.sigmoid(fixed + middle)) > k
        return jnp.where(is_above, low, middle), jnp.where(is_above, middle, high)

    ends = (-jnp.max(fixed) - _MAX_SHIFT, -jnp.min(fixed) + _MAX_SHIFT)
    low, high = jax.lax.fori_loop(0, _HALVINGS, halve, ends)
    shift = 0.5 * (low + high)
    output = nn.sigmoid(logits + shift)
    slope = jax.lax.stop_gradient(jnp.sum(output * (1.0 - output)))
    newton = (k - jnp.sum(output)) / jnp.maximum(slope, 1e-3)
    return nn.sigmoid(logits + (shift + newton))
