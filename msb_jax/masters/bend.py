"""A kernel that may also bend along its own linear part.

Beside what arms add, and what pairs of them add independently of one another, a reward
may grow faster or slower the better a set is: (theta'x)^2 is linear in theta'x near the
random sets and well above that line at the best ones. To a kernel of independent
pairs this is a coincidence of all pairs of good arms, which it does not expect. One
more term says it with one unknown: with s_i the worth of arm i by itself,

    k(A, B) + w g(A) g(B),   g(A) = (sum of s_i over A)^2.

The slopes s are those of the posterior mean at the last fit, less their mean; the
likelihood chooses w, and 0 leaves the kernel as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from msb_jax.masters.kernel import Expansion, Kernel, PriorDraw
from msb_jax.problem import Problem
from msb_jax.rng import stream
from msb_jax.types import Key

# Logarithm of the weight before the first fit, and where it is expected.
START, PRIOR = -2.0, -1.0
TINY = 1e-12


def find_slope(
    actions: jax.Array, alpha: jax.Array, is_row: jax.Array, num_arms: int
) -> jax.Array:
    """What arms add by themselves, less the mean, in units of the farthest row: [L].

    Args:
        actions: int32[C, K], the history.
        alpha: [C], coefficients of the posterior mean; 0 where there is no row.
        is_row: [C], the rows whose distance from a random set counts.
        num_arms: L.

    Returns:
        Slopes that add up to 1 or -1 at the row farthest from a random set; all 0 where
        nothing differs.
    """
    rows = jnp.broadcast_to(alpha[:, None], actions.shape)
    sums = jnp.zeros((num_arms,)).at[actions].add(rows)
    sums -= jnp.mean(sums)
    far = jnp.max(jnp.abs(jnp.sum(sums[actions], axis=1)) * is_row)
    is_flat = ~(far > TINY)
    return jnp.where(is_flat, 0.0, sums / jnp.where(is_flat, 1.0, far))


def bent(kernel: Kernel, slope: jax.Array) -> Kernel:
    """Give a kernel one more term, along slopes [L]; its weight comes last."""

    def rise(actions: jax.Array) -> jax.Array:
        return jnp.sum(slope[actions], axis=1)  # [N]

    def term(actions: jax.Array, others: jax.Array) -> jax.Array:
        return jnp.square(rise(actions))[:, None] * jnp.square(rise(others))[None, :]

    def terms(problem: Problem, actions: jax.Array, others: jax.Array) -> jax.Array:
        former = kernel.terms(problem, actions, others)
        return jnp.concatenate([former, term(actions, others)[None]])

    def value(
        problem: Problem, weights: jax.Array, actions: jax.Array, others: jax.Array
    ) -> jax.Array:
        former = kernel.value(problem, weights[:-1], actions, others)
        return former + weights[-1] * term(actions, others)

    def own(problem: Problem, weights: jax.Array, actions: jax.Array) -> jax.Array:
        former = kernel.own(problem, weights[:-1], actions)
        return former + weights[-1] * rise(actions) ** 4

    def by_arm(
        problem: Problem, weights: jax.Array, actions: jax.Array, alpha: jax.Array
    ) -> jax.Array:
        """As without the bend, which gives good arms more and changes no order."""
        return kernel.by_arm(problem, weights[:-1], actions, alpha)

    def expand(
        problem: Problem, weights: jax.Array, actions: jax.Array, arms: jax.Array
    ) -> Expansion:
        model = kernel.expand(problem, weights[:-1], actions, arms)
        rows = rise(actions)[:, None] * slope[arms][None, :]
        return model._replace(square=(*model.square, (weights[-1], rows)))

    def draw(
        keys: Sequence[Key],
        problem: Problem,
        weights: jax.Array,
        model: Expansion,
        actions: jax.Array,
        arms: jax.Array,
        n: int,
    ) -> PriorDraw:
        former = kernel.draw(keys, problem, weights[:-1], model, actions, arms, n)
        size = jax.random.normal(stream(keys[0], "bend"), (n,)) * jnp.sqrt(weights[-1])
        pair = slope[arms][:, None] * slope[arms][None, :]
        values = jnp.square(rise(actions))
        return former._replace(
            pair=former.pair + size[:, None, None] * pair[None],
            values=former.values + size[:, None] * values[None, :],
        )

    return Kernel(
        start=(*kernel.start, START),
        prior=(*kernel.prior, PRIOR),
        terms=terms,
        value=value,
        own=own,
        by_arm=by_arm,
        expand=expand,
        draw=draw,
    )
