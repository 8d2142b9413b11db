"""Teaching-learning-based optimisation on sets.

A teacher (one of the best sets known) and students (what the other samplers propose
now) exchange arms: B = topK(A + r o (T - A)), and C from two students, where the
worse one moves towards the better one.

Source: paper, "Teacher-student sampler"; Rao et al. 2011; ALGORITHMS 6.

Differs from the paper:
* r is a vector: with a scalar the result is always A or T (I-19);
* the branch that returns A in the paper lets the worse student move towards the
  better one instead, with gumbel noise to keep exploring (I-19);
* with hard constraints the children are repaired, arms of high value first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from msb_jax.problem import to_multi_hot
from msb_jax.samplers.base import (
    Context,
    Sampler,
    legalise,
    no_state,
    no_update,
    value_of,
)
from msb_jax.types import Key, State

# Gumbel noise on half of the student-student children.
NOISE = 0.5


def cross(key: Key, start: jax.Array, goal: jax.Array, k: int) -> jax.Array:
    """Move `start` towards `goal`: topK(start + r o (goal - start)).

    Args:
        start, goal: multi-hot float32[L].

    Returns:
        int32[K]; the common arms are kept and every arm is in one of the two.
    """
    pull = jax.random.uniform(key, start.shape)
    # Arms of neither set are at 0 and those of both at 1; ties at 0 lose.
    return jax.lax.top_k(start + pull * (goal - start), k)[1].astype(jnp.int32)


def teacher_student() -> Sampler:
    """Build the teacher-student sampler (second stage: it needs the others)."""

    def propose(key: Key, state: State, context: Context, n: int) -> jax.Array:
        del state
        view, peers = context.view, context.peers
        if peers is None:
            peers = view.elites
        k, num_arms = view.problem.k, view.problem.num_arms
        values = value_of(view, peers)
        keys = jax.random.split(key, 6)
        num_taught = n - n // 2
        teachers = view.elites[
            jax.random.randint(keys[0], (n,), 0, view.elites.shape[0])
        ]
        first = jax.random.randint(keys[1], (n,), 0, peers.shape[0])
        second = jax.random.randint(keys[2], (n,), 0, peers.shape[0])
        is_taught = jnp.arange(n) < num_taught
        is_worse = values[first] < values[second]
        start = jnp.where(is_worse | is_taught, first, second)
        goal = jnp.where(is_worse, second, first)
        target = jnp.where(is_taught[:, None], teachers, peers[goal])
        children = jax.vmap(cross, in_axes=(0, 0, 0, None))(
            jax.random.split(keys[3], n),
            to_multi_hot(peers[start], num_arms),
            to_multi_hot(target, num_arms),
            k,
        )
        noise = NOISE * jax.random.gumbel(keys[4], (n, num_arms))
        hot = to_multi_hot(children, num_arms)
        mutated = jax.lax.top_k(hot + noise, k)[1].astype(jnp.int32)
        children = jnp.where((is_taught | is_worse)[:, None], children, mutated)
        priority = jax.random.uniform(keys[5], (n, num_arms))
        return jax.vmap(legalise, in_axes=(None, 0, 0))(view, children, priority)

    return Sampler(
        name="teacher_student",
        init=no_state,
        propose=propose,
        update=no_update,
        is_second_stage=True,
    )
