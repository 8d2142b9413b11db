"""Top-K off-policy correction: learning from sets that another sampler drew.

A policy pi over arms draws K of them independently, so that an arm stands in the slate
with probability alpha(a) = 1 - (1 - pi(a))^K. Let arms come from another distribution
beta. The gradient of sum_a alpha(a) R(a) is then the mean over a ~ beta of

    (pi(a) / beta(a)) lambda_K(a) R(a) grad log pi(a),    lambda_K = K (1 - pi)^(K-1),

where lambda_K = d alpha / d pi: an arm that is all but certain to be in the slate is
not pushed further. The ratio is capped, for a small bias and a bounded variance.

Source: Chen et al. 2019; ALGORITHMS 10.3. The paper does not use it; it is an option.

Differs from Chen et al.:
* beta is no second head of the network: it is counted, the share of the producing
  sampler's sets in a pool that hold the arm, over K, and at least `FLOOR`;
* the K arms of a set share its R, and the loss is the mean over sets and arms.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from msb_jax.problem import to_multi_hot
from msb_jax.samplers.base import Context

CAP = math.exp(3.0)  # of the importance ratio
FLOOR = 1e-3  # of beta


def topk_weight(pi: jax.Array, k: int) -> jax.Array:
    """Compute lambda_K = K (1 - pi)^(K-1): float[...] -> float[...]."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}.")
    return k * (1.0 - pi) ** (k - 1)


def capped_ratio(pi: jax.Array, beta: jax.Array, cap: float = CAP) -> jax.Array:
    """Compute min(pi / beta, cap) with beta at least `FLOOR`: float[...]."""
    return jnp.minimum(pi / jnp.maximum(beta, FLOOR), cap)


def behaviour(actions: jax.Array, origin: jax.Array, num_arms: int) -> jax.Array:
    """Estimate beta of the arms of sets from all sets of the same producer.

    Args:
        actions: int32[N, K].
        origin: int32[N], the producer of each set.
        num_arms: L.

    Returns:
        float32[N, K]. Over all arms, the beta of a producer has sum 1 (before the
        floor).
    """
    is_same = (origin[:, None] == origin[None, :]).astype(jnp.float32)
    share = is_same @ to_multi_hot(actions, num_arms)  # [N, L]
    share /= jnp.sum(is_same, axis=1, keepdims=True)
    beta = jnp.take_along_axis(share, actions, axis=1) / actions.shape[1]
    return jnp.maximum(beta, FLOOR)


def off_policy_loss(
    log_pi: jax.Array,
    beta: jax.Array,
    returns: jax.Array,
    is_known: jax.Array,
    cap: float = CAP,
) -> jax.Array:
    """Compute -mean sg[min(pi / beta, cap) lambda_K R] log pi over the known arms.

    Args:
        log_pi: float[N, K], log-probabilities of the arms of sets.
        beta: float[N, K], see `behaviour`.
        returns: float[N], R of each set.
        is_known: bool[N, K], which arms count; without any the loss is 0.
        cap: of the ratio.

    Returns:
        float[].
    """
    pi = jnp.exp(log_pi)
    weights = capped_ratio(pi, beta, cap) * topk_weight(pi, log_pi.shape[1])
    weights = jax.lax.stop_gradient(weights * returns[:, None])
    terms = jnp.where(is_known, weights * log_pi, 0.0)
    return -jnp.sum(terms) / jnp.maximum(jnp.sum(is_known), 1)


def foreign_loss(
    logits: jax.Array, arms: jax.Array, context: Context, returns: jax.Array
) -> jax.Array:
    """Compute the loss of a softmax policy on the pool's sets by other samplers.

    Args:
        logits: float[A] of the policy.
        arms: int32[A], the arms that they belong to; others of a set do not count.
        context: has the pool, and says who the learner is.
        returns: float[N], of the pool's sets.

    Returns:
        float[].
    """
    actions, origin = context.view.pool, context.view.pool_origin  # [N, K], [N]
    size, num_arms = arms.shape[0], context.view.problem.num_arms
    place = jnp.full((num_arms,), size, jnp.int32).at[arms].set(jnp.arange(size))
    places = place[actions]  # [N, K]
    is_foreign = (origin >= 0) & (origin != context.origin)
    is_known = is_foreign[:, None] & (places < size)
    log_pi = jax.nn.log_softmax(logits)[jnp.minimum(places, size - 1)]
    beta = behaviour(actions, origin, num_arms)
    return off_policy_loss(log_pi, beta, returns, is_known)
