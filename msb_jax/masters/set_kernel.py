"""The neural tangent kernel of a bias-free ReLU network, on sets of K arms.

For K-hot inputs x/sqrt(K) the inner product of two inputs is the overlap of the two
sets divided by K, so every dot-product kernel is a table of K + 1 numbers. The
kernel used by the closed-form master is

    k = w_1 rho + w_2 rho^2 + w_3 ntk(rho),      rho = |S and S'| / K,

where `ntk` is the tangent kernel of the paper's network without its constant and
linear Taylor terms, scaled to 1 at rho = 1. The first two terms are what makes the
closed form as good as ridge regression where the reward is linear and as good as a
quadratic regression where it is quadratic; the data choose the weights. The constant
has no weight: it is estimated by generalised least squares (a flat prior).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from msb_jax.masters.kernel import Expansion, Kernel, PriorDraw
from msb_jax.problem import Problem, to_multi_hot
from msb_jax.types import Key


def tangent_kernel(rho: jax.Array, depth: int) -> jax.Array:
    """Neural tangent kernel of unit inputs with inner product `rho`.

    The infinite-width recursion of arc-cosine kernels (He-scaled layers, no biases).

    Args:
        rho: cosines in [0, 1], any shape.
        depth: number of weight matrices, at least 2.
    """
    covariance = jnp.clip(rho, 0.0, 1.0)
    tangent = covariance
    for _ in range(depth - 1):
        angle = jnp.arccos(covariance)
        sine = jnp.sqrt(jnp.maximum(1.0 - covariance * covariance, 0.0))
        derivative = (jnp.pi - angle) / jnp.pi
        covariance = jnp.clip((sine + covariance * (jnp.pi - angle)) / jnp.pi, 0.0, 1.0)
        tangent = covariance + tangent * derivative
    return tangent


def basis_tables(k: int, depth: int) -> jax.Array:
    """Tabulate the three terms over the overlaps 0..K: float32[3, K+1]."""
    rho = jnp.arange(k + 1, dtype=jnp.float32) / k
    ntk = tangent_kernel(rho, depth)
    # The slope at 0 is taken from the closed form at a small step, where float32
    # still resolves it; only the split between the terms depends on it.
    at_zero = tangent_kernel(jnp.zeros((1,)), depth)[0]
    step = 1e-2
    slope = (tangent_kernel(jnp.full((1,), step), depth)[0] - at_zero) / step
    curved = ntk - at_zero - slope * rho
    top = jnp.maximum(curved[-1], 1e-6)
    return jnp.stack([rho, rho * rho, curved / top])


def overlaps(actions: jax.Array, others: jax.Array, num_arms: int) -> jax.Array:
    """Count common arms of every pair of sets: int32[C, N].

    A gather-and-add over the K arms of each row of `actions`; nothing of size L but
    one indicator a column of `others`.

    Args:
        actions: int32[C, K].
        others: int32[N, K].
        num_arms: L.
    """
    num_others, k = others.shape
    # Bytes quarter the memory traffic, which is all that this costs.
    small = jnp.int8 if k <= 127 else jnp.int32
    marks = jnp.zeros((num_arms, num_others), small)
    marks = marks.at[others, jnp.arange(num_others)[:, None]].set(1)

    def add(total: jax.Array, arms: jax.Array) -> tuple[jax.Array, None]:
        return total + marks[arms], None

    start = jnp.zeros((actions.shape[0], num_others), small)
    total, _ = jax.lax.scan(add, start, actions.T)
    return total.astype(jnp.int32)


def quadratic_fit(table: jax.Array) -> jax.Array:
    """Fit c_0 + c_1 o + c_2 o^2 to a kernel table over the overlaps o = 0..K.

    Exact when the table is a polynomial of degree two. float32[3].
    """
    size = table.shape[0]
    rho = jnp.arange(size, dtype=jnp.float32) / max(size - 1, 1)
    order = min(size, 3)
    design = jnp.stack([rho**power for power in range(order)], axis=1)
    solution = jnp.linalg.lstsq(design, table)[0]
    scale = jnp.array([1.0, 1.0, 1.0])[:order] / float(max(size - 1, 1)) ** jnp.arange(
        order
    )
    return jnp.zeros((3,)).at[:order].set(solution * scale)


def set_kernel(depth: int, tangent: bool = True) -> Kernel:
    """Build the kernel on sets of K arms.

    Args:
        depth: weight matrices of the network whose limit is taken.
        tangent: False leaves the linear and the quadratic term alone.
    """

    def tables(problem: Problem) -> jax.Array:
        """The terms over the overlaps 0..K, 0 for an unused one: [3, K+1]."""
        all_terms = basis_tables(problem.k, depth)
        return all_terms if tangent else all_terms.at[2].set(0.0)

    def terms(problem: Problem, actions: jax.Array, others: jax.Array) -> jax.Array:
        return tables(problem)[:, overlaps(actions, others, problem.num_arms)]

    def value(
        problem: Problem, weights: jax.Array, actions: jax.Array, others: jax.Array
    ) -> jax.Array:
        counts = overlaps(actions, others, problem.num_arms)
        return (weights @ tables(problem))[counts]

    def own(problem: Problem, weights: jax.Array) -> jax.Array:
        return (weights @ tables(problem))[problem.k]

    def by_arm(
        problem: Problem, weights: jax.Array, actions: jax.Array, alpha: jax.Array
    ) -> jax.Array:
        """An input e_i has cosine 1/sqrt(K) with a set that holds arm i, else 0."""
        k = float(problem.k)
        fit = quadratic_fit(weights @ tables(problem))
        step = fit[1] * jnp.sqrt(k) + fit[2] * k
        rows = jnp.broadcast_to(alpha[:, None], actions.shape)
        sums = jnp.zeros((problem.num_arms,)).at[actions].add(rows)
        return fit[0] * jnp.sum(alpha) + step * sums

    def expand(
        problem: Problem, weights: jax.Array, actions: jax.Array, arms: jax.Array
    ) -> Expansion:
        fit = quadratic_fit(weights @ tables(problem))
        size = arms.shape[0]
        # Arms that are not asked for share one more column, which is dropped.
        column = jnp.full((problem.num_arms,), size, jnp.int32)
        column = column.at[arms].set(jnp.arange(size, dtype=jnp.int32))
        rows = to_multi_hot(column[actions], size + 1)[:, :size]
        return Expansion(fit[0], ((fit[1], rows),), ((fit[2], rows),))

    def draw(
        keys: Sequence[Key],
        problem: Problem,
        weights: jax.Array,
        model: Expansion,
        actions: jax.Array,
        arms: jax.Array,
        n: int,
    ) -> PriorDraw:
        del problem, weights, actions
        linear_key, pair_key = keys
        (slope, rows), (curve, _) = model.linear[0], model.square[0]
        size = arms.shape[0]
        linear = jax.random.normal(linear_key, (n, size))
        linear *= jnp.sqrt(jnp.maximum(slope, 0.0))
        pair = jax.random.normal(pair_key, (n, size, size))
        pair = 0.5 * (pair + pair.transpose(0, 2, 1))
        pair *= jnp.sqrt(jnp.maximum(curve, 0.0))
        values = jax.vmap(lambda q: jnp.sum((rows @ q) * rows, axis=1))(pair)
        return PriorDraw(linear, pair, values + linear @ rows.T)

    return Kernel(
        start=(0.0, -1.0, -2.0),
        prior=(0.0, 0.0, -1.0),
        terms=terms,
        value=value,
        own=own,
        by_arm=by_arm,
        expand=expand,
        draw=draw,
    )
