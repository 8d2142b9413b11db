"""A kernel on ordered lists: who stands in both, and how far up.

An ordered list is a set of K placements (see `spaces.ordered`); with p_A(i) the place
of item i in list A the kernel is built of sums over the items of both lists,

    rho_h(A, B) = sum_i h(p_A(i), p_B(i)) / sum_p h(p, p),

for three h: 1 (an item is worth the same everywhere), d^p d^q (its worth fades from
place to place, as where a reader may leave), and [p = q] (every placement has a worth
of its own). The terms are the three rho_h and the squares of the first two; each is
positive semidefinite, and the data choose the weights.

Differs from the paper: its master reads the L x K placement as a flat vector, which is
the third h alone and has to learn every item once for each place.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from msb_jax.masters.kernel import Expansion, Kernel, PriorDraw
from msb_jax.masters.set_kernel import overlaps
from msb_jax.problem import Problem
from msb_jax.types import Key

# d: what an item is worth a place further down, in the second term.
FADING = 0.6


def place_kernels(k: int) -> jax.Array:
    """The three h on pairs of places, scaled so that a list meets itself in 1.

    float32[3, K, K].
    """
    fading = FADING ** jnp.arange(k, dtype=jnp.float32)
    faded = fading[:, None] * fading[None, :]
    alike = jnp.ones((k, k)) / k
    return jnp.stack([alike, faded / jnp.sum(fading * fading), jnp.eye(k) / k])


def list_kernel() -> Kernel:
    """Build the kernel on ordered lists."""

    def terms(problem: Problem, actions: jax.Array, others: jax.Array) -> jax.Array:
        num_items = problem.num_arms // problem.k
        common = overlaps(actions % num_items, others % num_items, num_items)
        agreed = overlaps(actions, others, problem.num_arms)
        faded = _faded_overlaps(problem, actions, others)
        alike, placed = common / problem.k, agreed / problem.k
        return jnp.stack([alike, faded, placed, alike * alike, faded * faded])

    def value(
        problem: Problem, weights: jax.Array, actions: jax.Array, others: jax.Array
    ) -> jax.Array:
        return jnp.einsum("s,scn->cn", weights, terms(problem, actions, others))

    def own(problem: Problem, weights: jax.Array) -> jax.Array:
        del problem
        return jnp.sum(weights)

    def expand(
        problem: Problem, weights: jax.Array, actions: jax.Array, arms: jax.Array
    ) -> Expansion:
        shapes = place_kernels(problem.k)
        linear = jnp.einsum("s,spq->pq", weights[:3], shapes)
        one = jnp.ones(())
        return Expansion(
            constant=jnp.zeros(()),
            linear=((one, _placed_rows(problem, linear, actions, arms)),),
            square=tuple(
                (weights[3 + i], _placed_rows(problem, shapes[i], actions, arms))
                for i in range(2)
            ),
        )

    def by_arm(
        problem: Problem, weights: jax.Array, actions: jax.Array, alpha: jax.Array
    ) -> jax.Array:
        """What a placement adds, the others left out."""
        arms = jnp.arange(problem.num_arms, dtype=jnp.int32)
        model = expand(problem, weights, actions, arms)
        worth = sum(weight * (alpha @ rows) for weight, rows in model.linear)
        for weight, rows in model.square:
            worth += weight * (alpha @ (rows * rows))
        return jnp.asarray(worth)

    def draw(
        keys: Sequence[Key],
        problem: Problem,
        weights: jax.Array,
        model: Expansion,
        actions: jax.Array,
        arms: jax.Array,
        n: int,
    ) -> PriorDraw:
        """Draw the linear part; the squares stay at their mean."""
        del model
        k, num_items = problem.k, problem.num_arms // problem.k
        cov = jnp.einsum("s,spq->pq", weights[:3], place_kernels(k))
        root = jnp.linalg.cholesky(cov + 1e-6 * jnp.trace(cov) * jnp.eye(k))
        worth = jax.random.normal(keys[0], (n, num_items, k)) @ root.T  # [n, items, K]
        worth = worth.transpose(0, 2, 1).reshape(n, problem.num_arms)
        size = arms.shape[0]
        return PriorDraw(
            linear=worth[:, arms],
            pair=jnp.zeros((n, size, size)),
            values=jnp.sum(worth[:, actions], axis=2),
        )

    return Kernel(
        start=(0.0, 0.0, -1.0, -2.0, -2.0),
        prior=(0.0, 0.0, -1.0, -1.0, -1.0),
        terms=terms,
        value=value,
        own=own,
        by_arm=by_arm,
        expand=expand,
        draw=draw,
    )


def _faded_overlaps(
    problem: Problem, actions: jax.Array, others: jax.Array
) -> jax.Array:
    """The second rho of every pair of lists: float32[C, N]."""
    num_items, count = problem.num_arms // problem.k, others.shape[0]
    fading = FADING ** jnp.arange(problem.k, dtype=jnp.float32)
    fading = fading / jnp.sqrt(jnp.sum(fading * fading))
    marks = jnp.zeros((num_items, count))
    columns = jnp.arange(count)[:, None]
    marks = marks.at[others % num_items, columns].set(fading[others // num_items])

    def add(total: jax.Array, arms: jax.Array) -> tuple[jax.Array, None]:
        weight = fading[arms // num_items]
        return total + weight[:, None] * marks[arms % num_items], None

    start = jnp.zeros((actions.shape[0], count))
    return jax.lax.scan(add, start, actions.T)[0]


def _placed_rows(
    problem: Problem, shape: jax.Array, actions: jax.Array, arms: jax.Array
) -> jax.Array:
    """h(p_A(i), q) for every list A and arm (q, i), 0 without the item: [C, A]."""
    num_items = problem.num_arms // problem.k
    rows = jnp.arange(actions.shape[0])[:, None]
    places = jnp.full((actions.shape[0], num_items), problem.k, jnp.int32)
    places = places.at[rows, actions % num_items].set(actions // num_items)
    padded = jnp.pad(shape, ((0, 1), (0, 0)))
    return padded[places[:, arms % num_items], (arms // num_items)[None, :]]
