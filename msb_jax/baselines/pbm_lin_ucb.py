"""LinUCB for the position-based model, from the scalar reward alone.

With kappa known, r = sum_l kappa_l theta_{a_l} + noise is linear in phi in R^L, phi_e =
kappa at the place of e and 0 outside the list. Ridge regression gives thetahat and
V^-1; the K largest thetahat_e + alpha sqrt((V^-1)_ee) are shown in descending order.

Source: ALGORITHMS 10.1; Li et al. 2010 (LinUCB).

Differs from the paper:
* the bound is one for each arm, not one for the list: maximising that of the list over
  placements is a quadratic program, and the arms' bounds add up to more;
* kappa_l = decay^(l-1), as in `envs.position_based`;
* hard constraints: a filter that skips arms in conflict with those above.

It needs no clicks, hence plays wherever lists are ordered. V^-1 is kept up to date by
the formula of Sherman and Morrison, L x L work a round.

Before the first round every arm has the bound alpha / sqrt(ridge), which must be above
what any arm adds to a reward, or arms that were never shown stay so. Share of the
optimum over 2,000 rounds, hard constraints, L=100, K=10, seeds 0 and 1:

    ridge, alpha    0.1, 0.3   0.003, 0.06   0.001, 0.06   0.0003, 0.03   0.0003, 0.01
    noise 0.1       0.900      0.941         0.964         0.974          0.919
    noise 0.5                  0.912         0.917         0.917          0.870
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.baselines.checks import check_numbers
from msb_jax.baselines.lists import rank_arms
from msb_jax.baselines.random import check_constraints, plan_nothing
from msb_jax.positions import check_decay, examination
from msb_jax.problem import Problem
from msb_jax.types import Key, Policy


@dataclass(frozen=True, kw_only=True)
class PbmLinUCBConfig:
    """Settings of `pbm_lin_ucb`."""

    constraints: str = "soft"
    decay: float = 0.9  # of being seen, from one place to the next
    ridge: float = 0.0003
    alpha: float = 0.03  # times the root of the diagonal of V^-1

    def __post_init__(self) -> None:
        check_constraints(self.constraints)
        check_decay(self.decay)
        check_numbers(self, "ridge", "alpha")
        if self.ridge == 0:
            raise ValueError("ridge must be above 0, or the first round has no answer.")


class PbmLinUCBState(NamedTuple):
    """The ridge regression."""

    problem: Problem
    inverse: jax.Array  # [L, L] of V = ridge I + sum of phi phi'
    cross: jax.Array  # [L] sum of r phi
    told: jax.Array  # [] int32


def pbm_lin_ucb(config: PbmLinUCBConfig) -> Policy:
    """Make the policy."""
    is_hard = config.constraints == "hard"

    def init(key: Key, problem: Problem) -> PbmLinUCBState:
        del key
        size = problem.num_arms
        return PbmLinUCBState(
            problem=problem,
            inverse=jnp.eye(size) / config.ridge,
            cross=jnp.zeros((size,)),
            told=jnp.zeros((), jnp.int32),
        )

    def ask(key: Key, state: PbmLinUCBState) -> tuple[PbmLinUCBState, jax.Array]:
        variance = jnp.maximum(jnp.diagonal(state.inverse), 0.0)  # rounding
        index = state.inverse @ state.cross + config.alpha * jnp.sqrt(variance)
        return state, rank_arms(key, state.problem, index, is_hard)

    def tell(
        key: Key, state: PbmLinUCBState, action: jax.Array, reward: jax.Array
    ) -> PbmLinUCBState:
        del key
        is_known = jnp.isfinite(reward)  # a lost answer teaches nothing
        kappa = jnp.asarray(examination(config.decay, action.shape[0]), jnp.float32)
        kappa = jnp.where(is_known, kappa, 0.0)
        hit = jnp.where(is_known, reward, 0.0)
        return state._replace(
            inverse=add_row(state.inverse, action, kappa),
            cross=state.cross.at[action].add(hit * kappa),
            told=state.told + is_known,
        )

    def origin(state: PbmLinUCBState) -> jax.Array:
        return jnp.zeros_like(state.told)

    return Policy(init, ask, tell, plan_nothing, origin, ("pbm_lin_ucb",))


def add_row(inverse: jax.Array, action: jax.Array, kappa: jax.Array) -> jax.Array:
    """Update V^-1 [L, L] for V + phi phi', phi = kappa [K] at the arms of the list."""
    image = inverse[:, action] @ kappa  # [L], V^-1 phi
    return inverse - jnp.outer(image, image) / (1.0 + kappa @ image[action])
