"""CascadeKL-UCB: the arms of largest upper bound on their click rate, best first.

Every arm keeps what, the share of clicks in the T times it was read, and

    U = max{q in [what, 1]: T kl(what, q) <= log t + 3 log log t},

kl that of Bernoulli variables, found by bisection; U = 1 while T = 0. The K largest U
are shown in descending order, equal ones in random order.

Source: Kveton et al. 2015; ALGORITHMS 9.1.

Differs from the paper:
* their user clicks once; here all places up to the last click count as read, and all
  places if there was no click (ALGORITHMS 9.0);
* `target="reward"` learns w = rho' v' instead of rho': of the clicks of a round the
  last one counts, if the reward was 1. The environment is not the one that the
  algorithm was made for, and what attracts is not always what satisfies;
* hard constraints: a filter that skips arms in conflict with those above.

Written from the paper: the authors' code uses the true w, one bisection step, and
credits clicks to the wrong arms (ALGORITHMS 9.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.baselines.checks import check_numbers
from msb_jax.baselines.lists import click_policy, log_round, rank_arms
from msb_jax.baselines.random import check_constraints
from msb_jax.clicks import check_target, credit
from msb_jax.problem import Problem
from msb_jax.types import Key, Policy

_HALVINGS = 40


@dataclass(frozen=True, kw_only=True)
class CascadeKLUCBConfig:
    """Settings of `cascade_kl_ucb`."""

    constraints: str = "soft"
    extra: float = 3.0  # times log log t in the threshold
    target: str = "clicks"  # or reward

    def __post_init__(self) -> None:
        check_constraints(self.constraints)
        check_numbers(self, "extra")
        check_target(self.target)


class CascadeKLUCBState(NamedTuple):
    """Counts of the arms."""

    problem: Problem
    read: jax.Array  # [L] T, times that an arm was read
    hits: jax.Array  # [L] what T
    told: jax.Array  # [] int32


def cascade_kl_ucb(config: CascadeKLUCBConfig) -> Policy:
    """Make the policy."""
    is_hard = config.constraints == "hard"

    def init(key: Key, problem: Problem) -> CascadeKLUCBState:
        del key
        zeros = jnp.zeros((problem.num_arms,))
        none = jnp.zeros((), jnp.int32)
        return CascadeKLUCBState(problem=problem, read=zeros, hits=zeros, told=none)

    def ask(key: Key, state: CascadeKLUCBState) -> tuple[CascadeKLUCBState, jax.Array]:
        rate = state.hits / jnp.maximum(state.read, 1.0)
        index = kl_bound(rate, state.read, log_round(state.told, config.extra))
        return state, rank_arms(key, state.problem, index, is_hard)

    def tell_clicks(
        key: Key,
        state: CascadeKLUCBState,
        action: jax.Array,
        reward: jax.Array,
        clicks: jax.Array,
    ) -> CascadeKLUCBState:
        del key
        is_known, value = credit(clicks, reward, config.target)
        return state._replace(
            read=state.read.at[action].add(is_known),
            hits=state.hits.at[action].add(value),
            told=state.told + 1,
        )

    return click_policy("cascade_kl_ucb", init, ask, tell_clicks)


def kl_bound(rate: jax.Array, count: jax.Array, threshold: jax.Array) -> jax.Array:
    """Compute the largest q in [rate, 1] with count kl(rate, q) <= threshold.

    Args:
        rate: [L], in [0, 1].
        count: [L]; where it is 0 the bound is 1.
        threshold: [], at least 0.

    Returns:
        float32[L].
    """

    def halve(
        _: int, bracket: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        is_inside = count * bernoulli_kl(rate, middle) <= threshold
        return jnp.where(is_inside, middle, low), jnp.where(is_inside, high, middle)

    # At rate 1, and at count 0, all of [rate, 1] is inside.
    bracket = (rate, jnp.ones_like(rate))
    return jax.lax.fori_loop(0, _HALVINGS, halve, bracket)[1]


def bernoulli_kl(p: jax.Array, q: jax.Array) -> jax.Array:
    """Compute kl(p, q) of Bernoulli variables, with 0 log 0 = 0."""
    return jax.scipy.special.rel_entr(p, q) + jax.scipy.special.rel_entr(1 - p, 1 - q)
