"""Discounted linear Thompson sampling: `lin_ts` that forgets.

A round that is s rounds old counts gamma^s, so that arms not played for a while go
back to the prior and are tried again. The peer for users whose taste drifts; on a
stationary problem the forgetting only costs.

Source: Russac, Vernade, Cappe 2019 (discounted linear bandits); Kim, Tewari 2020 (the
Thompson version).

Differs from the paper:
* the draw has the covariance of the discounted likelihood, V^-1, not V^-1 V~ V^-1 with
  V~ discounted by gamma^2, which is smaller: it explores a little more;
* variances, number of draws and scale are those of `lin_ts`.

gamma was not tuned on a stationary problem, where 1 is best: 0.999 remembers a
thousand rounds, a fifth of the paper's runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from msb_jax.baselines.lin_ts import LinTSConfig, lin_ts
from msb_jax.types import Policy


@dataclass(frozen=True, kw_only=True)
class DLinTSConfig(LinTSConfig):
    """Settings of `d_lin_ts`."""

    gamma: float = 0.999


def d_lin_ts(config: DLinTSConfig) -> Policy:
    """Make the policy that plays the optima of draws of discounted linear weights."""
    return lin_ts(config)._replace(origins=("d_lin_ts",))
