"""CascadeHybrid: clicks from coverage gains and from relevance, one ridge for both.

An arm is clicked with probability z'beta + x'theta: z is what it adds to the coverage
of the arms above (as in `cascade_lsb`), x a feature that they leave alone. Places are
filled from the top by the largest estimate plus alpha times its deviation. The
original is LinUCB-hybrid with block elimination, which is ridge regression on [z; x]
with V = I + sum of rows row'; that is what is computed here, equal to rounding.

Source: Li, Feng, de Rijke 2020; ALGORITHMS 9.3.

Differs from the paper:
* their user clicks once; here all places up to the last click count as read, and all
  places if there was no click (ALGORITHMS 9.0);
* topics and relevance are the same features of the arms: there are no others;
* `target="reward"` learns what satisfies, see `cascade_kl_ucb`;
* hard constraints: a filter that skips arms in conflict with those above.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from msb_jax.baselines.cascade_lsb import CascadeLSBConfig, linear_cascade
from msb_jax.problem import Problem
from msb_jax.types import Policy


@dataclass(frozen=True, kw_only=True)
class CascadeHybridConfig(CascadeLSBConfig):
    """Settings of `cascade_hybrid`."""

    alpha: float = 1.0
    sigma: float = 1.0


def cascade_hybrid(config: CascadeHybridConfig) -> Policy:
    """Make the policy."""

    def relevance_of(problem: Problem) -> jax.Array:
        return problem.features

    return linear_cascade("cascade_hybrid", relevance_of, config)
