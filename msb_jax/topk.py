"""Gumbel top-K sampling from logits, and the probabilities of what it returns.

Adding independent Gumbel noise to L logits and taking the K largest is drawing K
arms one after the other without replacement, with weights w = exp(logits)
(Plackett-Luce). The probability of the ordered draw has a closed form. That of the
set is the sum over its K! orders, here in three ways: the paper's average over
random permutations, a subset dynamic program (exact, K <= 16), and an integral
over log time (accurate to rounding at any K). All are functions of one action,
differentiable in the logits and free of NaN: `vmap` them.

Differs from the paper:
* noise goes on logits, not on outputs in [0, 1], which would be sampled almost
  uniformly (ALGORITHMS 2.1);
* the paper's average of ordered probabilities estimates P(S) / K!, since the K!
  orders are disjoint events; log K! is added unless asked otherwise (2.3);
* where an exact set probability is affordable it replaces the average, whose log
  is biased down and noisy for peaked policies (2.2, 2.3).

A logit of -inf (a masked arm) counts as -1e30, which keeps every gradient finite.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

MAX_EXACT_K = 16

_LOG_HALF = -math.log(2.0)
_MASKED = -1e30
# The integrand is dropped where it is below exp(-40) of its peak.
_DROP = 40.0
# Halvings of the brackets around peak and window: 41 / 2^14 is well below the
# width of any window, which shrinks like 1 / sqrt(K).
_HALVINGS = 14


def gumbel_topk(key: jax.Array, logits: jax.Array, k: int) -> jax.Array:
    """Draw K distinct arms, int32[K] in the order of their draw.

    Args:
        logits: float[L].
        k: 1..L.
    """
    if logits.ndim != 1 or not 1 <= k <= logits.shape[0]:
        raise ValueError(
            f"gumbel_topk needs logits [L] and 1 <= k <= L, got {logits.shape}, k={k}."
        )
    noise = jax.random.gumbel(key, logits.shape, logits.dtype)
    return jax.lax.top_k(logits + noise, k)[1]


def gumbel_topk_batch(key: jax.Array, logits: jax.Array, k: int, n: int) -> jax.Array:
    """Draw n independent actions from the same logits, int32[n, K]."""
    keys = jax.random.split(key, n)
    return jax.vmap(gumbel_topk, in_axes=(0, None, None))(keys, logits, k)


def ordered_log_prob(logits: jax.Array, action: jax.Array) -> jax.Array:
    """Compute the Plackett-Luce log-probability of a draw in this very order.

    log P = sum_k [phi_{i_k} - log sum_{j not drawn before k} exp phi_j]. The sums
    are accumulated from the last draw backwards, so that nothing cancels.

    Args:
        logits: float[L].
        action: int32[K], distinct, in the order of the draw.

    Returns:
        float[].
    """
    chosen, rest = _split(logits, action)
    return _ordered(chosen, rest)


def set_log_prob_permutations(
    key: jax.Array,
    logits: jax.Array,
    action: jax.Array,
    num_permutations: int,
    scale_by_factorial: bool = True,
) -> jax.Array:
    """Estimate the log-probability of a set from random orders of it (the paper's).

    The mean of the ordered probabilities over uniform orders is P(S) / K!; that is
    what the paper calls the probability and what `scale_by_factorial=False` gives.
    With scaling, log K! is added and the estimate is of log P(S). The gradient is
    the same. At K = L the value is known and returned: log P(S) = 0.

    Args:
        logits: float[L].
        action: int32[K], distinct.
        num_permutations: orders to average over, at least 1.
        scale_by_factorial: add log K!.

    Returns:
        float[].
    """
    if num_permutations < 1:
        raise ValueError(f"num_permutations must be >= 1, got {num_permutations}.")
    chosen, rest = _split(logits, action)
    k = chosen.shape[0]
    log_orders = math.lgamma(k + 1)
    if rest is None:
        return jnp.full((), 0.0 if scale_by_factorial else -log_orders, chosen.dtype)
    noise = jax.random.uniform(key, (num_permutations, k))
    orders = jax.lax.top_k(noise, k)[1]  # uniform, a permutation in each row
    each = jax.vmap(_ordered, in_axes=(0, None))(chosen[orders], rest)
    mean = jax.nn.logsumexp(each) - math.log(num_permutations)
    return mean + log_orders if scale_by_factorial else mean


def set_log_prob_exact(logits: jax.Array, action: jax.Array) -> jax.Array:
    """Compute the log-probability of a set by dynamic programming over its subsets.

    F(B), the probability that the first |B| draws are the set B, is the sum over i
    in B of F(B without i) w_i / (W - w(B without i)). Cost below K^2 2^K.

    Args:
        logits: float[L].
        action: int32[K], distinct, K <= 16.

    Returns:
        float[].
    """
    chosen, rest = _split(logits, action)
    k = chosen.shape[0]
    if k > MAX_EXACT_K:
        raise ValueError(
            f"set_log_prob_exact costs 2^K and takes K <= {MAX_EXACT_K}, got K={k}; "
            "use set_log_prob_trapezoid."
        )
    if rest is None:
        return jnp.zeros((), chosen.dtype)
    masks = np.arange(1 << k)
    bits = 1 << np.arange(k)
    is_left = masks[:, None] & bits[None, :] == 0  # [2^K, K], a mask says who is gone
    weights = jnp.append(chosen, rest)[None, :]  # [1, K+1]
    is_left = np.pad(is_left, ((0, 0), (0, 1)), constant_values=True)
    left = jax.nn.logsumexp(weights, axis=1, where=is_left)  # [2^K]
    # Subsets by size, one row each; short rows are filled up with a subset of theirs.
    by_size = [masks[np.bitwise_count(masks) == size] for size in range(1, k + 1)]
    longest = max(row.size for row in by_size)
    rows = np.stack([np.resize(row, longest) for row in by_size])  # [K, longest]
    place = np.zeros(1 << k, dtype=np.int32)  # of a subset in its row
    for row in by_size:
        place[row] = np.arange(row.size)
    to_place, bit = jnp.asarray(place), jnp.asarray(bits, jnp.int32)

    def grow(prob: jax.Array, subsets: jax.Array) -> tuple[jax.Array, None]:
        before = subsets[:, None] ^ bit[None, :]  # [longest, K], without the last drawn
        terms = prob[to_place[before]] + chosen[None, :] - left[before]
        is_member = subsets[:, None] & bit[None, :] != 0
        return jax.nn.logsumexp(terms, axis=1, where=is_member), None

    start = jnp.zeros((longest,), chosen.dtype)
    return jax.lax.scan(grow, start, jnp.asarray(rows, jnp.int32))[0][0]


def set_log_prob_trapezoid(
    logits: jax.Array, action: jax.Array, num_nodes: int = 201
) -> jax.Array:
    """Compute the log-probability of a set as an integral over log time.

    Let every arm ring after an exponential time of rate w_i; the set is drawn when
    all its arms ring before the first of the others. With W_C the weight of the
    others, rho_i = phi_i - log W_C and time t = exp(z) / W_C,

        P(S) = int exp(z - e^z) prod_{i in S} (1 - exp(-e^{rho_i + z})) dz.

    The integrand is analytic and log-concave, so the trapezoid rule converges
    exponentially once it covers the peak. The peak has e^z = 1 + sum_i u_i /
    (e^{u_i} - 1) with u_i = e^{rho_i + z}, hence lies in [0, log(K+1)]; the ends
    are found from it by bisection. This holds for any spread of the weights,
    whereas a fixed window truncates the slow left tail of likely sets and is too
    coarse for large K. Accurate to 1e-10 in float64, 1e-5 relative in float32.

    Args:
        logits: float[L].
        action: int32[K], distinct.
        num_nodes: nodes of the rule, at least 2.

    Returns:
        float[].
    """
    if num_nodes < 2:
        raise ValueError(f"num_nodes must be >= 2, got {num_nodes}.")
    chosen, rest = _split(logits, action)
    if rest is None:
        return jnp.zeros((), chosen.dtype)
    rho = chosen - rest  # [K]
    # Any window that covers the peak gives the same value, so it needs no gradient.
    low, high = _window(jax.lax.stop_gradient(rho))
    step = (high - low) / (num_nodes - 1)
    z = low + step * jnp.arange(num_nodes, dtype=rho.dtype)  # [nodes]
    return jnp.log(step) + jax.nn.logsumexp(jax.vmap(_log_race, (None, 0))(rho, z))


def log1mexp(a: jax.Array) -> jax.Array:
    """Compute log(1 - exp(a)) for a < 0, accurate at both ends.

    The branch that is not taken sees a harmless argument, so that its gradient is
    finite (a NaN there would survive the `where`).
    """
    is_near = a > _LOG_HALF  # near 0
    near = jnp.log(-jnp.expm1(jnp.where(is_near, a, -1.0)))
    far = jnp.log1p(-jnp.exp(jnp.where(is_near, -1.0, a)))
    return jnp.where(is_near, near, far)


def _log_race(rho: jax.Array, z: jax.Array) -> jax.Array:
    """Return the log of the integrand at one z: [K], [] -> []."""
    y = rho + z[None]
    # log(1 - exp(-e^y)) is y - e^y / 2 where e^y is small and 0 where it is large;
    # both limits are taken before e^y under- or overflows.
    is_small = y < -18.0
    middle = log1mexp(-jnp.exp(jnp.clip(y, -18.0, 5.0)))
    small = y - 0.5 * jnp.exp(jnp.minimum(y, -18.0))
    return z - jnp.exp(z) + jnp.where(is_small, small, middle).sum()


def _window(rho: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Find where the integrand is above exp(-40) of its peak: [K] -> [], []."""
    slope = jax.grad(_log_race, argnums=1)

    def to_peak(_: int, bracket: jax.Array) -> jax.Array:
        middle = bracket.mean()
        is_left = slope(rho, middle) > 0
        return jnp.where(is_left, bracket.at[0].set(middle), bracket.at[1].set(middle))

    ends = jnp.asarray([0.0, math.log(rho.shape[0] + 1)], rho.dtype)
    peak = jax.lax.fori_loop(0, _HALVINGS, to_peak, ends).mean()
    floor = _log_race(rho, peak) - _DROP

    def to_edges(
        _: int, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        inside, outside = carry  # [2], [2]: left and right
        middle = 0.5 * (inside + outside)
        is_in = jax.vmap(_log_race, (None, 0))(rho, middle) > floor[None]
        return jnp.where(is_in, middle, inside), jnp.where(is_in, outside, middle)

    # At distance d the integrand has lost at least d - 1 on the left of the peak
    # and e^d - 1 - d on the right: 41 and 4 are beyond the drop.
    outside = peak + jnp.asarray([-_DROP - 1.0, 4.0], rho.dtype)
    inside = jnp.full((2,), peak)
    edges = jax.lax.fori_loop(0, _HALVINGS, to_edges, (inside, outside))[1]
    return edges[0], edges[1]


def _ordered(chosen: jax.Array, rest: jax.Array | None) -> jax.Array:
    """Return the ordered log-probability from the logits drawn, [K], and the rest."""
    if rest is None:  # the last draw is certain
        chosen, rest = chosen[:-1], chosen[-1]

    def draw(left: jax.Array, logit: jax.Array) -> tuple[jax.Array, jax.Array]:
        left = jnp.logaddexp(left, logit)
        return left, logit - left

    # A scan compiles faster and runs faster than an associative one at these sizes.
    return jax.lax.scan(draw, rest, chosen, reverse=True)[1].sum()


def _split(logits: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Return the logits of the action, [K], and the log weight outside it, [].

    The latter is None at K = L: there is nothing outside, and -inf would put NaN
    into gradients.
    """
    if logits.ndim != 1 or action.ndim != 1 or action.shape[0] < 1:
        raise ValueError(
            "Probabilities are of one action: logits [L] and action [K] with K >= 1, "
            f"got {logits.shape} and {action.shape}; use vmap for several."
        )
    if action.shape[0] > logits.shape[0]:
        raise ValueError(
            f"The action names {action.shape[0]} arms, but there are only "
            f"{logits.shape[0]} logits."
        )
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    logits = jnp.maximum(logits, _MASKED)
    if action.shape[0] == logits.shape[0]:
        return logits[action], None
    is_in = jnp.zeros(logits.shape, bool).at[action].set(True)
    rest = jax.nn.logsumexp(jnp.where(is_in, -jnp.inf, logits))
    return logits[action], rest
