"""A pointer network that chooses K of L arms, one after the other.

Encoder: every arm is a node with its features and a learned embedding; two blocks of
multi-head self-attention and a feed-forward layer, each with a residual and layer
normalisation. There are no positions: permuting the arms permutes the codes e_j.

Decoder: an LSTM whose first input and state are learned; at step k its input is the
code of the arm chosen last and its output h the query. With d the intra-decoder
attention (a weighted mean of the earlier outputs, 0 at the first step):

    p = softmax_j(v_g' tanh(W_g e_j + U_g h + D_g d))     one glimpse, q = sum_j p_j e_j
    u_j = v_p' tanh(W_p e_j + U_p q + D_p d)              the logits

Chosen arms are masked, and so are arms that are forbidden beside a chosen one, unless
this would leave nothing to choose.

Source: Gong et al. 2019 (exact-K recommendation); Vinyals et al. 2015; ALGORITHMS 7.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

Params = Any

# Stands for -inf without its gradients.
_CUT = -1e30


class Codes(NamedTuple):
    """What the decoder sees of the arms."""

    nodes: jax.Array  # [L, H] e_j
    glimpse: jax.Array  # [L, H] W_g e_j
    pointer: jax.Array  # [L, H] W_p e_j


class Decoding(NamedTuple):
    """K steps of the decoder."""

    path: jax.Array  # [K] int32, the arms in the order of choice
    log_probs: jax.Array  # [K, L] of every step, _CUT where masked
    is_open: jax.Array  # [K, L] bool, the arms that could be chosen


class _Memory(NamedTuple):
    cell: Any  # of the LSTM
    outputs: jax.Array  # [K, H] h of the earlier steps, 0 beyond
    step: jax.Array  # [] int32


class Pointer(nn.Module):
    """Encoder and one step of the decoder.

    Attributes:
        num_arms: L.
        k: arms in a set.
        hidden: H, a multiple of `heads`.
        heads: of the self-attention.
        blocks: of the encoder.
    """

    num_arms: int
    k: int
    hidden: int = 32
    heads: int = 2
    blocks: int = 2

    def setup(self) -> None:
        normal, width = nn.initializers.normal(1.0), self.hidden
        self.embedding = self.param("embedding", normal, (self.num_arms, width))
        self.encoder = Encoder(width, self.heads, self.blocks)
        self.lstm = nn.OptimizedLSTMCell(width)
        self.first = self.param("first", normal, (width,))
        self.start_cell = self.param("start_cell", normal, (width,))
        self.start_output = self.param("start_output", normal, (width,))
        self.intra = nn.Dense(width, use_bias=False)
        self.glimpse_nodes, self.pointer_nodes = nn.Dense(width), nn.Dense(width)
        self.glimpse, self.pointer = _Additive(width), _Additive(width)

    def __call__(self, features: jax.Array) -> jax.Array:
        """Touch every parameter, for `init`: the logits of the first step, [L]."""
        codes = self.encode(features)
        is_open = jnp.ones((self.num_arms,), bool)
        return self.step(codes, self.start(), self.first, is_open)[1]

    def encode(self, features: jax.Array) -> Codes:
        """Encode the arms, with features [L, D]."""
        nodes = self.encoder(jnp.concatenate([features, self.embedding], axis=1))
        return Codes(nodes, self.glimpse_nodes(nodes), self.pointer_nodes(nodes))

    def start(self) -> _Memory:
        """Return the memory before the first step."""
        return _Memory(
            cell=(self.start_cell, self.start_output),
            outputs=jnp.zeros((self.k, self.hidden)),
            step=jnp.zeros((), jnp.int32),
        )

    def first_input(self) -> jax.Array:
        """Return the input of the first step: [H]."""
        return self.first

    def step(
        self, codes: Codes, memory: _Memory, previous: jax.Array, is_open: jax.Array
    ) -> tuple[_Memory, jax.Array]:
        """Read the code of the last arm [H]; return the logits of the next, [L]."""
        cell, output = self.lstm(memory.cell, previous)
        scores = memory.outputs @ self.intra(output)
        is_past = jnp.arange(self.k) < memory.step
        weights = nn.softmax(jnp.where(is_past, scores, _CUT))
        past = jnp.where(is_past, weights, 0.0) @ memory.outputs
        seen = self.glimpse(codes.glimpse, output, past)
        query = nn.softmax(jnp.where(is_open, seen, _CUT)) @ codes.nodes
        logits = self.pointer(codes.pointer, query, past)
        outputs = memory.outputs.at[memory.step].set(output)
        return _Memory(cell, outputs, memory.step + 1), logits


class Encoder(nn.Module):
    """Self-attention without positions: inputs [L, F] -> codes [L, H]."""

    hidden: int
    heads: int
    blocks: int

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        nodes = nn.LayerNorm()(nn.Dense(self.hidden)(inputs))
        for _ in range(self.blocks):
            attention = nn.MultiHeadDotProductAttention(self.heads)
            nodes = nn.LayerNorm()(nodes + attention(nodes))
            inner = nn.relu(nn.Dense(4 * self.hidden)(nodes))
            nodes = nn.LayerNorm()(nodes + nn.Dense(self.hidden)(inner))
        return nodes


class _Additive(nn.Module):
    """Additive attention: v' tanh(node + U query + D past) for every node."""

    width: int

    @nn.compact
    def __call__(
        self, nodes: jax.Array, query: jax.Array, past: jax.Array
    ) -> jax.Array:
        shift = nn.Dense(self.width, use_bias=False, name="query")(query)
        shift += nn.Dense(self.width, use_bias=False, name="past")(past)
        last = self.param("last", nn.initializers.normal(0.1), (self.width,))
        return jnp.tanh(nodes + shift[None, :]) @ last


def init_pointer(key: jax.Array, net: Pointer, features: jax.Array) -> Params:
    """Start the network on arms with features [L, D]."""
    return net.init(key, features)


def encode(net: Pointer, params: Params, features: jax.Array) -> Codes:
    """Encode arms with features [L, D]."""
    codes: Any = net.apply(params, features, method="encode")
    return Codes(*codes)


def sample(
    net: Pointer, params: Params, codes: Codes, forbidden: jax.Array, noise: jax.Array
) -> Decoding:
    """Choose the arms of highest noisy logit, one after the other.

    Args:
        forbidden: bool[L, L], pairs that are avoided; all False for none.
        noise: float32[K, L]; standard gumbel noise makes it a sample of the policy, 0
            the greedy choice.
    """

    def choose(log_probs: jax.Array, noise: jax.Array) -> jax.Array:
        return jnp.argmax(log_probs + noise).astype(jnp.int32)

    return _decode(net, params, codes, forbidden, noise, choose)


def follow(
    net: Pointer, params: Params, codes: Codes, forbidden: jax.Array, path: jax.Array
) -> Decoding:
    """Decode along a given path int32[K] (teacher forcing)."""
    return _decode(net, params, codes, forbidden, path, lambda log_probs, arm: arm)


def path_log_prob(decoding: Decoding) -> jax.Array:
    """Log-probability of the path: []."""
    rows = jnp.arange(decoding.path.shape[0])
    return jnp.sum(decoding.log_probs[rows, decoding.path])


def align(decoding: Decoding, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Give every step the first arm of `target` that is open there.

    Args:
        target: int32[K], a demonstration.

    Returns:
        Labels int32[K], and bool[K]: False where no arm of the target is open.
    """
    is_open = decoding.is_open[:, target]  # [K, K]
    return target[jnp.argmax(is_open, axis=1)], jnp.any(is_open, axis=1)


def _decode(
    net: Pointer,
    params: Params,
    codes: Codes,
    forbidden: jax.Array,
    inputs: jax.Array,
    choose: Any,
) -> Decoding:
    """Scan the decoder; `choose` maps log-probabilities and an input to an arm."""
    num_arms = forbidden.shape[0]

    def step(carry: Any, given: jax.Array) -> Any:
        memory, previous, is_chosen, clashes = carry
        is_free = ~(is_chosen | clashes)
        is_open = jnp.where(jnp.any(is_free), is_free, ~is_chosen)
        out: Any = net.apply(params, codes, memory, previous, is_open, method="step")
        memory, logits = out
        log_probs = nn.log_softmax(jnp.where(is_open, logits, _CUT))
        arm = choose(log_probs, given)
        is_chosen = is_chosen.at[arm].set(True)
        carry = memory, codes.nodes[arm], is_chosen, clashes | forbidden[arm]
        return carry, (arm, log_probs, is_open)

    none = jnp.zeros((num_arms,), bool)
    memory = net.apply(params, method="start")
    first = net.apply(params, method="first_input")
    _, steps = jax.lax.scan(step, (memory, first, none, none), inputs)
    return Decoding(*steps)
