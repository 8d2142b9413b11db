"""PBM-UCB: upper bounds on what is liked, when lower places are seen less.

An arm at place l is clicked with probability kappa_l theta, kappa known. With S clicks
in N displays, of which Nt = sum of kappa were seen in expectation,

    U = S / Nt + sqrt(N / Nt) sqrt(delta_t / (2 Nt)),   delta_t = log t + 3 log log t,

and the K largest U are shown in descending order, equal ones in random order; an arm
that was never shown comes first. With kappa = 1 it is UCB1 with that delta_t.

Source: Lagree et al. 2016; ALGORITHMS 10.1.

Differs from the paper:
* kappa_l = decay^(l-1), as in `envs.position_based`;
* hard constraints: a filter that skips arms in conflict with those above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.baselines.checks import check_numbers
from msb_jax.baselines.lists import click_policy, log_round, rank_arms
from msb_jax.baselines.random import check_constraints
from msb_jax.positions import check_decay, examination
from msb_jax.problem import Problem
from msb_jax.types import Key, Policy


@dataclass(frozen=True, kw_only=True)
class PbmUCBConfig:
    """Settings of `pbm_ucb`."""

    constraints: str = "soft"
    decay: float = 0.9  # of being seen, from one place to the next
    extra: float = 3.0  # times log log t

    def __post_init__(self) -> None:
        check_constraints(self.constraints)
        check_decay(self.decay)
        check_numbers(self, "extra")


class PbmUCBState(NamedTuple):
    """Counts of the arms."""

    problem: Problem
    clicks: jax.Array  # [L] S
    shown: jax.Array  # [L] N
    seen: jax.Array  # [L] Nt
    told: jax.Array  # [] int32


def pbm_ucb(config: PbmUCBConfig) -> Policy:
    """Make the policy."""
    is_hard = config.constraints == "hard"

    def init(key: Key, problem: Problem) -> PbmUCBState:
        del key
        zeros = jnp.zeros((problem.num_arms,))
        none = jnp.zeros((), jnp.int32)
        return PbmUCBState(problem, clicks=zeros, shown=zeros, seen=zeros, told=none)

    def ask(key: Key, state: PbmUCBState) -> tuple[PbmUCBState, jax.Array]:
        index = pbm_bound(
            state.clicks, state.shown, state.seen, log_round(state.told, config.extra)
        )
        return state, rank_arms(key, state.problem, index, is_hard)

    def tell_clicks(
        key: Key,
        state: PbmUCBState,
        action: jax.Array,
        reward: jax.Array,
        clicks: jax.Array,
    ) -> PbmUCBState:
        del key, reward
        is_known = clicks >= 0
        kappa = jnp.asarray(examination(config.decay, action.shape[0]), jnp.float32)
        hits = jnp.where(is_known, clicks, 0.0)
        return state._replace(
            clicks=state.clicks.at[action].add(hits),
            shown=state.shown.at[action].add(is_known.astype(jnp.float32)),
            seen=state.seen.at[action].add(jnp.where(is_known, kappa, 0.0)),
            told=state.told + 1,
        )

    return click_policy("pbm_ucb", init, ask, tell_clicks)


def pbm_bound(
    clicks: jax.Array, shown: jax.Array, seen: jax.Array, delta: jax.Array
) -> jax.Array:
    """Compute U of the arms from S, N and Nt [L] and delta_t []: [L].

    Arms that were never shown get the largest float.
    """
    some = jnp.where(shown > 0, seen, 1.0)
    bound = clicks / some + jnp.sqrt(shown / some) * jnp.sqrt(delta / (2.0 * some))
    return jnp.where(shown > 0, bound, jnp.finfo(bound.dtype).max)
