"""G2ANet: which arms matter to each other, and how much; and a critic of sets.

Every arm is an agent with an observation o_i. Two stages of attention tell arm i what
the others mean to it:

    h_i = relu(W_e o_i + b) + e_i                  encoder; e_i is learned, 0 at first
    m_ij in {0, 1}                                 hard attention, from [h_i; h_j; C_ij]
    a_ij = softmax_{j != i}(q_i . k_j / sqrt(H))   soft attention
    x_i = sum_j m_ij a_ij v_j                      what i hears of the others
    phi_i = W_o [h_i; x_i]                         one logit per arm

C_ij is 1 if the two arms conflict. The hard stage is a bidirectional LSTM along j
("lstm", the paper's), a pairwise network on the same input, which does not depend on
the order of the arms ("mlp"), or left out ("none").

Source: paper, "G2ANet sampler" and its appendix; Liu et al. 2020; ALGORITHMS 4.

Differs from the paper:
* the mask multiplies the weights after the softmax and they are not renormalised;
  the printed formula has it inside the exponent, where a cut edge keeps the weight
  exp(0) (I-17);
* the mask is a straight-through sample: exactly 0 or 1 forwards, the gradient of the
  gumbel-softmax backwards;
* with two outcomes a softmax is the sigmoid of the difference of the logits, and the
  difference of two gumbel variables is logistic, so only differences are formed;
* the conflict C_ij is an input of the hard stage; the paper names no inputs (I-17);
* the sequence of the LSTM has a step j = i, whose output is not used;
* one scalar logit per arm instead of out_i in [0, 1] (I-16): out_i = sigmoid(phi_i).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

Params = Any

HARD_STAGES = ("mlp", "lstm", "none")

# Stands for -inf without its gradients.
_CUT = -1e30


class Scene(NamedTuple):
    """What the network sees of A arms."""

    arms: jax.Array  # [A] int32, their numbers: rows of the embedding
    inputs: jax.Array  # [A, F]
    conflicts: jax.Array  # [A, A] float32, 1 where two arms conflict


def check_stage(hard: str) -> None:
    """Raise ValueError unless there is such a hard attention."""
    if hard not in HARD_STAGES:
        raise ValueError(f"hard must be one of {', '.join(HARD_STAGES)}, got {hard!r}.")


def mask_noise(key: jax.Array, size: int) -> jax.Array:
    """Draw the noise of the hard attention between A arms: float32[A, A]."""
    return jax.random.logistic(key, (size, size))


def straight_through(
    logits: jax.Array, noise: jax.Array, temperature: jax.Array
) -> jax.Array:
    """Decide with noise between 1 and 0; keep the gradient of the soft decision.

    Args:
        logits: float[...], the logit of 1 less that of 0.
        noise: float[...], the difference of two gumbel variables.
        temperature: float[] of the soft decision.

    Returns:
        float[...], 0 or 1.
    """
    noisy = logits + noise
    soft = jax.nn.sigmoid(noisy / temperature)
    return (noisy > 0).astype(soft.dtype) + (soft - jax.lax.stop_gradient(soft))


def attend(
    queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Weigh the other arms, cut the edges of the mask, and sum their values.

    Args:
        queries, keys, values: float[A, H].
        mask: float[A, A], 0 where arm i does not listen to arm j.

    Returns:
        The weights [A, A], 0 on the diagonal, and their sums of values [A, H].
    """
    size, width = queries.shape
    is_other = ~jnp.eye(size, dtype=bool)
    scores = queries @ keys.T / math.sqrt(width)
    soft = jax.nn.softmax(jnp.where(is_other, scores, _CUT), axis=1)
    weights = jnp.where(is_other, soft, 0.0) * mask
    return weights, weights @ values


class G2ANet(nn.Module):
    """The policy: one logit per arm.

    Attributes:
        num_arms: L, rows of the embedding.
        hidden: H, the size of h, x and of the hard stage.
        hard: one of `HARD_STAGES`.
    """

    num_arms: int
    hidden: int = 16
    hard: str = "mlp"

    def setup(self) -> None:
        check_stage(self.hard)
        zeros = nn.initializers.zeros
        self.embedding = self.param("embedding", zeros, (self.num_arms, self.hidden))
        self.encoder = nn.Dense(self.hidden)
        self.query = nn.Dense(self.hidden, use_bias=False)
        self.key = nn.Dense(self.hidden, use_bias=False)
        self.value = nn.Dense(self.hidden)
        self.out = nn.Dense(1)
        if self.hard != "none":
            stage: Any = PairMlp if self.hard == "mlp" else PairLstm
            self.pairs = stage(self.hidden)

    def __call__(
        self, scene: Scene, noise: jax.Array, temperature: jax.Array
    ) -> jax.Array:
        """Compute the logits [A]; noise [A, A] is that of `mask_noise`."""
        h = self.encode(scene)
        return self.decide(h, self.listen(h, self.cut(h, scene, noise, temperature)))

    def encode(self, scene: Scene) -> jax.Array:
        """Compute h: [A, H]."""
        return nn.relu(self.encoder(scene.inputs)) + self.embedding[scene.arms]

    def cut(
        self, h: jax.Array, scene: Scene, noise: jax.Array, temperature: jax.Array
    ) -> jax.Array:
        """Draw the mask of the hard attention: [A, A]."""
        if self.hard == "none":
            return jnp.ones_like(noise)
        return straight_through(self.pairs(h, scene.conflicts), noise, temperature)

    def listen(self, h: jax.Array, mask: jax.Array) -> jax.Array:
        """Compute x, what each arm hears of the others: [A, H]."""
        return attend(self.query(h), self.key(h), nn.relu(self.value(h)), mask)[1]

    def decide(self, h: jax.Array, x: jax.Array) -> jax.Array:
        """Compute the logits from h and x: [A]."""
        return self.out(jnp.concatenate([h, x], axis=1))[:, 0]


class PairMlp(nn.Module):
    """One hidden layer on [h_i; h_j; C_ij], to one logit a pair."""

    hidden: int

    @nn.compact
    def __call__(self, h: jax.Array, conflicts: jax.Array) -> jax.Array:
        """Compute the logits of the edges: [A, H], [A, A] -> [A, A]."""
        parts = _PairInput(self.hidden, name="input")(h)
        last = self.param("last", nn.initializers.normal(1.0), (self.hidden,))
        bias = self.param("bias", nn.initializers.zeros, ())
        # The first layer is a sum of a part of i, one of j and one of the pair, and
        # one unit at a time keeps the [A, A] arrays in the cache.
        logits = jnp.broadcast_to(bias[None, None], conflicts.shape)
        for unit in range(self.hidden):
            own, other, edge = (part[..., unit] for part in parts)
            layer = own[:, None] + other[None, :] + edge[None, None] * conflicts
            scale = last[unit][None, None] / math.sqrt(self.hidden)
            logits = logits + scale * nn.relu(layer)
        return logits


class PairLstm(nn.Module):
    """For each i a bidirectional LSTM along j, and one logit a step."""

    hidden: int

    @nn.compact
    def __call__(self, h: jax.Array, conflicts: jax.Array) -> jax.Array:
        """Compute the logits of the edges: [A, H], [A, A] -> [A, A]."""
        bias = self.param("bias", nn.initializers.zeros, ())
        forwards = self._run("forwards", h, conflicts, is_reverse=False)
        backwards = self._run("backwards", h, conflicts, is_reverse=True)
        return forwards + backwards + bias[None, None]

    def _run(
        self, name: str, h: jax.Array, conflicts: jax.Array, *, is_reverse: bool
    ) -> jax.Array:
        """Pass along j for all i at once: this direction's part of the logits."""
        width = self.hidden
        own, other, edge = _PairInput(4 * width, name=f"{name}_input")(h)
        init = nn.initializers.orthogonal()
        recurrent = self.param(f"{name}_recurrent", init, (width, 4 * width))
        last = self.param(f"{name}_last", nn.initializers.normal(1.0), (width,))

        def step(
            carry: tuple[jax.Array, jax.Array], pair: tuple[jax.Array, jax.Array]
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            cell, out = carry  # [A, H]
            other_j, conflicts_j = pair  # [4H], [A]
            gates = own + other_j[None, :] + conflicts_j[:, None] * edge[None, :]
            gates = gates + out @ recurrent
            keep, write, show, new = jnp.split(gates, 4, axis=1)
            # Plus one: an untrained cell forgets slowly.
            cell = nn.sigmoid(keep + 1.0) * cell + nn.sigmoid(write) * jnp.tanh(new)
            out = nn.sigmoid(show) * jnp.tanh(cell)
            return (cell, out), out @ last

        start = jnp.zeros_like(h)
        steps = (other, conflicts.T)
        _, logits = jax.lax.scan(step, (start, start), steps, reverse=is_reverse)
        return logits.T  # [A, A] from [j, i]


class _PairInput(nn.Module):
    """A linear layer on [h_i; h_j; C_ij], as its three parts."""

    width: int

    @nn.compact
    def __call__(self, h: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the parts of i [A, W], of j [A, W] and of the conflict [W]."""
        own = nn.Dense(self.width, name="own")(h)
        other = nn.Dense(self.width, use_bias=False, name="other")(h)
        edge = self.param("edge", nn.initializers.normal(1.0), (self.width,))
        return own, other, edge


class SetCritic(nn.Module):
    """A model of what a set is worth: a linear part and one hidden layer.

    It is 0 everywhere before it has learned.

    Attributes:
        num_arms: L.
        width: size of an arm's embedding and of the layer.
    """

    num_arms: int
    width: int = 16

    @nn.compact
    def __call__(self, action: jax.Array) -> jax.Array:
        """Value one set int32[K]: float32[]."""
        zeros, normal = nn.initializers.zeros, nn.initializers.normal(1.0)
        linear = self.param("linear", zeros, (self.num_arms,))
        embedding = self.param("embedding", normal, (self.num_arms, self.width))
        total = jnp.sum(embedding[action], axis=0) / math.sqrt(action.shape[0])
        hidden = nn.relu(nn.Dense(self.width)(total))
        return jnp.sum(linear[action]) + nn.Dense(1, kernel_init=zeros)(hidden)[0]


class Nets(NamedTuple):
    """Parameters of a policy and of its critic."""

    actor: Params
    critic: Params


def init_nets(key: jax.Array, net: G2ANet, num_inputs: int) -> Nets:
    """Start a policy that sees F inputs per arm, and a critic of the same arms."""
    actor_key, critic_key = jax.random.split(key)
    one, first = jnp.ones((1, 1)), jnp.zeros((1,), jnp.int32)
    scene = Scene(arms=first, inputs=jnp.ones((1, num_inputs)), conflicts=one)
    return Nets(
        actor=net.init(actor_key, scene, one, jnp.ones(())),
        critic=SetCritic(net.num_arms).init(critic_key, first),
    )


def judge(critic: Params, actions: jax.Array) -> jax.Array:
    """Value sets int32[n, K] by the critic: float32[n]."""
    net: Any = SetCritic(critic["params"]["linear"].shape[0])
    return jax.vmap(lambda action: net.apply(critic, action))(actions)
