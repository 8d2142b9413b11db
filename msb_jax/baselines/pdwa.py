"""Primal-dual Wolpertinger architecture on real rewards (PDWA).

An actor proposes a point of [0, 1]^L, rare arms get a small bonus, the K largest
entries are the nearest set, and of neighbours of that set the critic picks what is
played. Both learn from the rounds played, with feedback r - lam2 c; lam2 is the dual
variable of RCPO and rises while the policy violates more than alpha.

Source: paper, baselines, "Primal-dual Wolpertinger architecture"; Dulac-Arnold et al.
2015; Tessler et al. 2018; ALGORITHMS 3.

Differs from the paper (see `actor_critic` too):
* a block of f_in rounds plays the best distinct neighbours, in random order: a
  deterministic policy that plays one set again and again learns nothing new.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from msb_jax.baselines.actor_critic import (
    ActorCriticConfig,
    ActorCriticState,
    DualConfig,
    Propose,
    actor_critic,
    dual_of,
)
from msb_jax.baselines.planned import Proposals, plan_of, planned
from msb_jax.problem import Problem, repair
from msb_jax.samplers.ddpg import Ddpg
from msb_jax.samplers.wolpertinger import (
    NEIGHBOURS,
    liked_best,
    neighbours,
    wanted,
)
from msb_jax.types import Key, Policy


@dataclass(frozen=True, kw_only=True)
class SwapConfig:
    """The way from a proto-action to sets."""

    neighbours: str = "random"  # swaps of the nearest set, or "exact": in their order
    num_candidates: int = 16  # neighbours a round that the critic chooses from
    max_swaps: int = 2  # of a neighbour, 1 at the least
    bonus: float = 0.005  # c_u, for rarely played arms

    def __post_init__(self) -> None:
        if self.neighbours not in NEIGHBOURS:
            raise ValueError(
                f"neighbours must be one of {', '.join(NEIGHBOURS)}, got "
                f"{self.neighbours!r}."
            )
        for name, least in (("num_candidates", 1), ("max_swaps", 1), ("bonus", 0)):
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")


@dataclass(frozen=True, kw_only=True)
class PdwaConfig(ActorCriticConfig):
    """Settings of `pdwa`."""

    swaps: SwapConfig = field(default_factory=SwapConfig)
    dual: DualConfig = field(default_factory=DualConfig)


def pdwa(config: PdwaConfig) -> Policy:
    """Make the policy of the primal-dual Wolpertinger architecture."""
    propose = nearest_by_critic(config.swaps, config.constraints == "hard")
    dual = dual_of(config.dual, config.constraints)
    learner = actor_critic(config, propose, dual=dual)
    return planned("pdwa", learner, plan_of(config))


def nearest_by_critic(config: SwapConfig, is_hard: bool) -> Propose:
    """Propose the neighbours of the proto-action that the critic likes best."""

    def propose(
        key: Key, functions: Ddpg, state: ActorCriticState, problem: Problem, n: int
    ) -> Proposals:
        swap_key, order_key = jax.random.split(key)
        proto = wanted(functions, state, problem.k, config.bonus)
        size = n * config.num_candidates
        actions = neighbours(swap_key, config, proto, problem.k, size)
        if is_hard:
            # Before the critic looks, so that it judges what would be played.
            actions = jax.vmap(repair, in_axes=(None, 0, None))(problem, actions, proto)
        best = liked_best(functions, state, problem, actions, n)
        best = jax.random.permutation(order_key, best)
        return Proposals(best, jnp.tile(proto[None, :], (n, 1)))

    return propose
