"""Swap search over K-sets for a quadratic objective, in JAX.

Maximises x'Qx + d'x over K-hot x by exchanging one chosen arm for another, with a
short tabu list so that the search leaves local optima and with the usual aspiration
rule (a tabu move is allowed when it beats the best value so far). A dense quadratic
integer program at L=300 is out of reach of an exact solver; this finds better sets
in a hundredth of the time (ALGORITHMS I-34), and a thousand searches run as one
program. Nothing here is random: the searches differ by their starts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.types import Quadratic

FORBIDDEN = -1e30


class _Walk(NamedTuple):
    action: jax.Array  # [K] where the walk is
    is_in: jax.Array  # [L] bool
    slope: jax.Array  # [L] d + 2Qx: what an arm is worth beside the others
    clashes: jax.Array  # [L] int32, conflicts of each arm with the set
    value: jax.Array  # []
    tabu_until: jax.Array  # [L] int32
    best_action: jax.Array  # [K]
    best_value: jax.Array  # []


def hollow(model: Quadratic) -> Quadratic:
    """Move the diagonal of Q into d, which is the same on 0/1 vectors."""
    diagonal = jnp.diagonal(model.pair, axis1=-2, axis2=-1)
    eye = jnp.eye(model.pair.shape[-1], dtype=model.pair.dtype)
    return model._replace(
        pair=model.pair - diagonal[..., None, :] * eye,
        linear=model.linear + diagonal,
    )


def penalise(model: Quadratic, conflicts: jax.Array, price: jax.Array) -> Quadratic:
    """Charge `price` for every conflicting pair: n(x) = x'Cx / 2 is quadratic."""
    return model._replace(
        pair=model.pair - 0.5 * price * conflicts.astype(model.pair.dtype)
    )


def evaluate(model: Quadratic, action: jax.Array) -> jax.Array:
    """Value of one set under the model, from K x K gathers."""
    block = model.pair[action][:, action]
    return jnp.sum(block) + jnp.sum(model.linear[action]) + model.offset


def swap_gains(
    model: Quadratic, conflicts: jax.Array, action: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gain of every single swap of a set.

    Args:
        model: a `hollow` quadratic.
        conflicts: bool[L, L]; all False when conflicts are allowed.
        action: int32[K].

    Returns:
        gains float32[K, L] for taking position i out and arm j in, and bool[K, L]
        for the swaps that add a new arm without making a conflict.
    """
    num_arms = model.linear.shape[0]
    is_in = jnp.zeros((num_arms,), bool).at[action].set(True)
    slope = model.linear + 2.0 * jnp.sum(model.pair[action], axis=0)
    clashes = jnp.sum(conflicts[action], axis=0, dtype=jnp.int32)
    return _gains(model, conflicts, action, is_in, slope, clashes)


def _gains(
    model: Quadratic,
    conflicts: jax.Array,
    action: jax.Array,
    is_in: jax.Array,
    slope: jax.Array,
    clashes: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    gains = slope[None, :] - slope[action][:, None] - 2.0 * model.pair[action]
    left = clashes[None, :] - conflicts[action].astype(jnp.int32)
    # A swap may not make things worse: in a feasible set it must stay feasible,
    # and from an infeasible start the walk can only descend in violations.
    own = clashes[action][:, None]
    return gains, (left <= own) & ~is_in[None, :]


def tabu_search(
    model: Quadratic,
    conflicts: jax.Array,
    starts: jax.Array,
    *,
    num_steps: int,
    tenure: int = 8,
) -> tuple[jax.Array, jax.Array]:
    """Improve every start by `num_steps` best swaps with a tabu list.

    Args:
        model: the objective, [L, L] and [L].
        conflicts: bool[L, L], pairs that may not be made; all False for none.
        starts: int32[N, K]; a feasible start stays feasible, an infeasible one never
            gains a conflict.
        num_steps: swaps tried from each start.
        tenure: steps for which a moved arm may not move again.

    Returns:
        The best set of each walk int32[N, K] and its value float32[N].
    """
    model = hollow(model)
    num_arms = model.linear.shape[0]
    k = starts.shape[1]
    tenure = min(tenure, max(0, (num_arms - k) // 2))
    cells = jnp.arange(k * num_arms, dtype=jnp.int32).reshape(k, num_arms)

    def step(walk: _Walk, t: jax.Array) -> tuple[_Walk, None]:
        gains, allowed = _gains(
            model, conflicts, walk.action, walk.is_in, walk.slope, walk.clashes
        )
        is_free = (walk.tabu_until[None, :] <= t) & (
            walk.tabu_until[walk.action][:, None] <= t
        )
        is_record = walk.value + gains > walk.best_value
        gains = jnp.where(allowed & (is_free | is_record), gains, FORBIDDEN)
        gain = jnp.max(gains)
        # The first argmax, by a reduction that vectorises where argmax does not.
        flat = jnp.min(jnp.where(gains == gain, cells, cells.size))
        position, arm = flat // num_arms, flat % num_arms
        moves = gain > FORBIDDEN
        out = walk.action[position]
        # Without a legal swap the arm is exchanged for itself.
        arm = jnp.where(moves, arm, out)
        gain = jnp.where(moves, gain, 0.0)
        action = walk.action.at[position].set(arm.astype(jnp.int32))
        value = walk.value + gain
        is_best = value > walk.best_value
        clashes = walk.clashes + conflicts[arm].astype(jnp.int32)
        new = _Walk(
            action=action,
            is_in=walk.is_in.at[out].set(False).at[arm].set(True),
            slope=walk.slope + 2.0 * (model.pair[arm] - model.pair[out]),
            clashes=clashes - conflicts[out].astype(jnp.int32),
            value=value,
            tabu_until=walk.tabu_until.at[out]
            .set(t + 1 + tenure)
            .at[arm]
            .set(t + 1 + tenure // 2),
            best_action=jnp.where(is_best, action, walk.best_action),
            best_value=jnp.where(is_best, value, walk.best_value),
        )
        return new, None

    def search(start: jax.Array) -> tuple[jax.Array, jax.Array]:
        is_in = jnp.zeros((num_arms,), bool).at[start].set(True)
        value = evaluate(model, start)
        walk = _Walk(
            action=start,
            is_in=is_in,
            slope=model.linear + 2.0 * jnp.sum(model.pair[start], axis=0),
            clashes=jnp.sum(conflicts[start], axis=0, dtype=jnp.int32),
            value=value,
            tabu_until=jnp.zeros((num_arms,), jnp.int32),
            best_action=start,
            best_value=value,
        )
        walk, _ = jax.lax.scan(step, walk, jnp.arange(num_steps, dtype=jnp.int32))
        # The walk's value is a running sum; the answer is evaluated afresh.
        return walk.best_action, evaluate(model, walk.best_action)

    return jax.vmap(search)(starts.astype(jnp.int32))
