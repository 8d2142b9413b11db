"""Primal-dual G2ANet on real rewards.

`pdwa` with the attention network as its actor, and sets drawn from the actor's logits
by gumbel top-K instead of chosen near the proto-action. The actor climbs the critic's
gradient at the proto-action; the feedback is r - lam2 c.

Source: paper, baselines, "Primal-dual G2ANet"; Liu et al. 2020; ALGORITHMS 4.

Differs from the paper (see `actor_critic` and `networks/attention.py` too):
* of the two training rules of I-17 it follows the critic's gradient, as the text of
  this baseline says ("the only differences");
* a deterministic policy gradient wants a deterministic actor, so the hard attention
  takes the likelier of its two decisions, without noise;
* gumbel noise goes on logits, not on out_i in [0, 1] (I-16);
* an arm's inputs are its features, its conflicts and its share in the sets played.

The network looks at all pairs of arms: its cost grows with L^2.
Not tuned: the actor has half the steps of `pdwa`'s, for their cost, and a higher rate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from msb_jax.baselines.actor_critic import (
    ActorCriticConfig,
    ActorCriticState,
    DualConfig,
    actor_critic,
    dual_of,
)
from msb_jax.baselines.planned import Proposals, plan_of, planned
from msb_jax.networks.actor_critic import ActorNet, Params
from msb_jax.networks.attention import G2ANet, check_stage, init_nets
from msb_jax.problem import Problem
from msb_jax.samplers.cem_ppo import draw
from msb_jax.samplers.ddpg import Ddpg, DdpgConfig
from msb_jax.samplers.g2anet import TAU_START, describe
from msb_jax.types import Key, Policy

# One state a step for the actor: states differ little, and the network is large.
_LEARNER = DdpgConfig(num_steps=20, actor_batch=1, actor_rate=1e-2)


@dataclass(frozen=True, kw_only=True)
class Pdg2anetConfig(ActorCriticConfig):
    """Settings of `pdg2anet`."""

    learner: DdpgConfig = _LEARNER
    hard: str = "mlp"  # hard attention; or "lstm" (the paper's, slow), or "none"
    hidden: int = 8  # size of the encodings
    dual: DualConfig = field(default_factory=DualConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stage(self.hard)
        if self.hidden < 1:
            raise ValueError(f"hidden must be at least 1, got {self.hidden}.")


def pdg2anet(config: Pdg2anetConfig) -> Policy:
    """Make the policy of the primal-dual G2ANet."""
    learner = actor_critic(
        config,
        draw_sets,
        dual=dual_of(config.dual, config.constraints),
        actor_of=lambda problem: attention_actor(config, problem),
    )
    return planned("pdg2anet", learner, plan_of(config))


def attention_actor(config: Pdg2anetConfig, problem: Problem) -> ActorNet:
    """Let the attention network look at all arms of a problem."""
    num_arms, dim = problem.features.shape
    net: Any = G2ANet(num_arms, config.hidden, config.hard)
    arms = jnp.arange(num_arms, dtype=jnp.int32)

    def logits(params: Params, state: jax.Array) -> jax.Array:
        scene = describe(problem, arms, problem.features, problem.k * state)
        calm = jnp.zeros((num_arms, num_arms))
        return net.apply(params, scene, calm, jnp.asarray(TAU_START))

    return ActorNet(init=lambda key: init_nets(key, net, dim + 2).actor, logits=logits)


def draw_sets(
    key: Key, functions: Ddpg, state: ActorCriticState, problem: Problem, n: int
) -> Proposals:
    """Draw n sets by gumbel top-K on the actor's logits."""
    proto = functions.proto(state.learner, state.usage)
    return Proposals(*draw(key, jnp.tile(proto[None, :], (n, 1)), problem.k))
