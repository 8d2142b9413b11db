"""Wolpertinger architecture on real rewards.

Deterministic policy gradients with a choice by the critic among the sets nearest to
the proto-action, as in `pdwa` but without a dual variable: the feedback is r, or with
`penalise` r - lam c.

Source: Dulac-Arnold et al. 2015; paper, experiments; ALGORITHMS 3.1, I-28.

Differs from the paper: see `pdwa` and `actor_critic`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msb_jax.baselines.actor_critic import ActorCriticConfig, actor_critic
from msb_jax.baselines.checks import check_numbers
from msb_jax.baselines.pdwa import SwapConfig, nearest_by_critic
from msb_jax.baselines.planned import plan_of, planned
from msb_jax.types import Policy


@dataclass(frozen=True, kw_only=True)
class WolpertingerConfig(ActorCriticConfig):
    """Settings of `wolpertinger`."""

    lam: float = 5.0  # price of the violation rate, with `penalise`
    penalise: bool = False  # the feedback is r - lam c (I-28)
    swaps: SwapConfig = field(default_factory=lambda: SwapConfig(bonus=0.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "lam")


def wolpertinger(config: WolpertingerConfig) -> Policy:
    """Make the policy of the Wolpertinger architecture."""
    propose = nearest_by_critic(config.swaps, config.constraints == "hard")
    lam = config.lam if config.penalise else 0.0
    learner = actor_critic(config, propose, lam=lam)
    return planned("wolpertinger", learner, plan_of(config))
