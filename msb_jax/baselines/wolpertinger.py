"""Wolpertinger architecture on real rewards.

Deterministic policy gradients with a choice by the critic among the sets nearest to
the proto-action, as in `pdwa` but without a dual variable: the feedback is r, or with
`penalise` r - lam c.

Source: Dulac-Arnold et al. 2015; paper, experiments; ALGORITHMS 3.1, I-28.

Differs from the paper: see `pdwa` and `actor_critic`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msb_jax.baselines.actor_critic import actor_critic, parts_of
from msb_jax.baselines.pdwa import SwapConfig, nearest_by_critic
from msb_jax.baselines.planned import check_lam, plan_of, planned
from msb_jax.samplers.ddpg import DdpgConfig
from msb_jax.types import Policy


@dataclass(frozen=True, kw_only=True)
class WolpertingerConfig:
    """Settings of `wolpertinger`."""

    constraints: str = "soft"
    lam: float = 5.0  # price of the violation rate, with `penalise`
    penalise: bool = False  # the feedback is r - lam c (I-28)
    n_re: int = 600  # random rounds at the start
    f_in: int = 20  # rounds between two refreshes
    learner: DdpgConfig = field(default_factory=DdpgConfig)
    replay: str = "prioritized"  # or "uniform"
    n_c: int = 20  # clusters of the prioritised one
    capacity: int = 2000  # rounds kept
    length_epoch: int = 100  # rounds between two changes of the state
    swaps: SwapConfig = field(default_factory=lambda: SwapConfig(bonus=0.0))

    def __post_init__(self) -> None:
        plan_of(self)
        parts_of(self)
        check_lam(self.lam)


def wolpertinger(config: WolpertingerConfig) -> Policy:
    """Make the policy of the Wolpertinger architecture."""
    propose = nearest_by_critic(config.swaps, config.constraints == "hard")
    lam = config.lam if config.penalise else 0.0
    learner = actor_critic(*parts_of(config), propose, lam=lam)
    return planned("wolpertinger", learner, plan_of(config))
