"""Random sets, and the best set ever played.

Source: paper, "Random sampler with keeping the best elite sample in history".

Differs from the paper:
* the best set is the one with the highest expected reward less its price under the
  master, not the highest true reward, which a learner cannot see (ALGORITHMS 1.1);
* with hard constraints the random sets are feasible ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from msb_jax.samplers.base import Context, Sampler, legal_sets, no_state, no_update
from msb_jax.types import Key, State


def random_best() -> Sampler:
    """Build the random sampler."""

    def propose(key: Key, state: State, context: Context, n: int) -> jax.Array:
        del state
        best = context.view.elites[:1]
        if n == 1:
            return best
        return jnp.concatenate([best, legal_sets(key, context.view, n - 1)])

    return Sampler(name="random_best", init=no_state, propose=propose, update=no_update)
