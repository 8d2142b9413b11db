"""Training of the master's network: the paper's gradient steps, or Adam.

Both minimise the paper's loss (appendix, "Details of master model")

    sum_s (f(x_s; theta) - r_s)^2 / 2 + m lam1 ||theta - theta_0||^2 / 2,

where with a discount every round has its weight gamma^(t - s) in the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from msb_jax.types import Key

Params = Any


class Task(NamedTuple):
    """What the network is to learn; `predict` maps params and [N, K] to [N]."""

    predict: Callable[[Params, jax.Array], jax.Array]
    actions: jax.Array  # [C, K] int32
    targets: jax.Array  # [C] 0 beyond num_rows
    num_rows: jax.Array  # [] int32
    anchor: Params  # theta_0
    pull: float  # m lam1
    weights: jax.Array | None = None  # [C] of the rows, 0 beyond; None: 1 each


def total_weight(task: Task) -> jax.Array:
    """The rows, each with its weight: []."""
    if task.weights is None:
        return task.num_rows.astype(jnp.float32)
    return jnp.sum(task.weights)


def train_literal(task: Task, eta: jax.Array, num_steps: int) -> Params:
    """Run J steps of gradient descent from theta_0 on all rounds, as printed."""
    is_row = jnp.arange(task.targets.shape[0]) < task.num_rows

    def loss(params: Params) -> jax.Array:
        error = task.predict(params, task.actions) - task.targets
        square = jnp.square(error)
        if task.weights is not None:
            square = task.weights * square
        fit = jnp.sum(jnp.where(is_row, square, 0.0))
        return 0.5 * (fit + task.pull * _moved(task, params))

    def step(params: Params, _: None) -> tuple[Params, None]:
        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - eta * g, params, grads), None

    return jax.lax.scan(step, task.anchor, None, length=num_steps)[0]


def train_adam(
    key: Key,
    task: Task,
    optimizer: optax.GradientTransformation,
    params: Params,
    opt_state: Any,
    shape: tuple[int, int],
) -> tuple[Params, Any]:
    """Run Adam from the given weights, on the same loss divided by the rounds.

    Args:
        shape: number of steps, rounds drawn (with replacement) for each; a round is
            drawn as often as it counts.
    """
    if task.weights is None:
        batches = jax.random.randint(key, shape, 0, jnp.maximum(task.num_rows, 1))
    else:
        ends = jnp.cumsum(task.weights)
        spot = ends[-1] * jax.random.uniform(key, shape)
        batches = jnp.searchsorted(ends, spot, side="right")
        # Rounding may lead beyond the last row.
        batches = jnp.clip(batches, 0, jnp.maximum(task.num_rows - 1, 0))
    rounds = jnp.maximum(total_weight(task), 1.0)

    def loss(params: Params, rows: jax.Array) -> jax.Array:
        error = task.predict(params, task.actions[rows]) - task.targets[rows]
        fit = jnp.mean(jnp.square(error))
        return 0.5 * (fit + task.pull / rounds * _moved(task, params))

    def step(carry: tuple[Params, Any], rows: jax.Array) -> tuple[Any, None]:
        params, opt_state = carry
        grads = jax.grad(loss)(params, rows)
        steps, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, steps), opt_state), None

    return jax.lax.scan(step, (params, opt_state), batches)[0]


def _moved(task: Task, params: Params) -> jax.Array:
    """Compute ||theta - theta_0||^2."""
    gaps = jax.tree.map(lambda p, q: jnp.sum(jnp.square(p - q)), params, task.anchor)
    return jax.tree.reduce(jnp.add, gaps)
