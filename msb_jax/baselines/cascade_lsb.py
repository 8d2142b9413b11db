"""CascadeLSB: lists that cover many topics, by ridge regression on coverage gains.

Arms have topics x in [0, 1]^D, and a list covers topic d to 1 - prod(1 - x_d). What an
arm adds to the coverage of the arms above is Delta = x prod(1 - x of those above), and
it is clicked with probability Delta'theta, theta unknown. Places are filled from the
top by the largest

    Delta'thetahat + alpha sqrt(Delta' M^-1 Delta),
    M = I + sum Delta Delta' / sigma^2,   thetahat = M^-1 sum Delta click / sigma^2,

with sums over the places that were read.

`linear_cascade` is this for any rows [Delta; relevance]; `cascade_hybrid` uses it too.

Source: Hiranandani et al. 2020; ALGORITHMS 9.2.

Differs from the paper:
* their user clicks once; here all places up to the last click count as read, and all
  places if there was no click (ALGORITHMS 9.0);
* topics are the features of the arms; a coordinate that leaves [0, 1] is mapped there
  from its least and largest value;
* `target="reward"` learns what satisfies, see `cascade_kl_ucb`;
* hard constraints: a filter that skips arms in conflict with those above.

The defaults sigma=0.1, alpha=0.8 are those of the simulator of Li, Feng, de Rijke 2020,
not tuned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.baselines.checks import check_numbers
from msb_jax.baselines.lists import click_policy, fill_places
from msb_jax.baselines.random import check_constraints
from msb_jax.clicks import check_target, credit
from msb_jax.problem import Problem
from msb_jax.types import Key, Policy


@dataclass(frozen=True, kw_only=True)
class CascadeLSBConfig:
    """Settings of `cascade_lsb`."""

    constraints: str = "soft"
    alpha: float = 0.8  # times the deviation of the prediction
    sigma: float = 0.1  # deviation of the noise
    target: str = "clicks"  # or reward

    def __post_init__(self) -> None:
        check_constraints(self.constraints)
        check_numbers(self, "alpha", "sigma")
        check_target(self.target)
        if self.sigma == 0:
            raise ValueError("sigma must be above 0: it is the noise of a click.")


class LinearCascadeState(NamedTuple):
    """Sums over the places that were read; P = D + X columns in a row."""

    problem: Problem
    topics: jax.Array  # [L, D] in [0, 1]
    relevance: jax.Array  # [L, X], that the arms above leave alone
    gram: jax.Array  # [P, P] sum of rows row'
    cross: jax.Array  # [P] sum of rows times clicks
    told: jax.Array  # [] int32


def cascade_lsb(config: CascadeLSBConfig) -> Policy:
    """Make the policy."""

    def no_relevance(problem: Problem) -> jax.Array:
        return jnp.zeros((problem.num_arms, 0))

    return linear_cascade("cascade_lsb", no_relevance, config)


def linear_cascade(
    name: str,
    relevance_of: Callable[[Problem], jax.Array],
    config: CascadeLSBConfig,
) -> Policy:
    """Make the policy that is linear in the rows [Delta; relevance].

    Args:
        relevance_of: the columns [L, X] next to the coverage gain.
    """
    is_hard = config.constraints == "hard"

    def init(key: Key, problem: Problem) -> LinearCascadeState:
        del key
        topics = topics_of(problem, name)
        relevance = relevance_of(problem)
        size = topics.shape[1] + relevance.shape[1]
        return LinearCascadeState(
            problem=problem,
            topics=topics,
            relevance=relevance,
            gram=jnp.zeros((size, size)),
            cross=jnp.zeros((size,)),
            told=jnp.zeros((), jnp.int32),
        )

    def ask(
        key: Key, state: LinearCascadeState
    ) -> tuple[LinearCascadeState, jax.Array]:
        del key
        theta, cov = posterior(state, config.sigma)

        def scores(left: jax.Array) -> jax.Array:
            rows = rows_of(state, left)  # [L, P]
            return upper_bounds(rows, theta, cov, config.alpha)

        def take(left: jax.Array, arm: jax.Array) -> jax.Array:
            return left * (1.0 - state.topics[arm])

        nothing = jnp.ones((state.topics.shape[1],))
        return state, fill_places(state.problem, nothing, scores, take, is_hard)

    def tell_clicks(
        key: Key,
        state: LinearCascadeState,
        action: jax.Array,
        reward: jax.Array,
        clicks: jax.Array,
    ) -> LinearCascadeState:
        del key
        is_known, value = credit(clicks, reward, config.target)
        rows = list_rows(state, action)  # [K, P]
        return state._replace(
            gram=state.gram + rows.T @ (is_known[:, None] * rows),
            cross=state.cross + value @ rows,
            told=state.told + 1,
        )

    return click_policy(name, init, ask, tell_clicks)


def topics_of(problem: Problem, name: str) -> jax.Array:
    """Return the features as topics in [0, 1], or say that there are none: [L, D]."""
    x = problem.features
    if x.shape[-1] == 0:
        raise ValueError(f"{name} needs arms with features, and these have none.")
    low, high = x.min(axis=0), x.max(axis=0)  # [D]
    is_outside = ((low < 0) | (high > 1))[None, :]
    unit = (x - low[None, :]) / jnp.where(high > low, high - low, 1.0)[None, :]
    return jnp.where(is_outside, unit, x)


def rows_of(state: LinearCascadeState, left: jax.Array) -> jax.Array:
    """Return the rows of all arms, [L, P], when `left` [D] is not covered yet."""
    return jnp.concatenate([left[None, :] * state.topics, state.relevance], axis=1)


def list_rows(state: LinearCascadeState, action: jax.Array) -> jax.Array:
    """Return the rows of a list int32[K] in its order, [K, P]."""
    topics = state.topics[action]
    left = jnp.cumprod(1.0 - topics[:-1], axis=0)
    left = jnp.concatenate([jnp.ones_like(topics[:1]), left])
    return jnp.concatenate([left * topics, state.relevance[action]], axis=1)


def posterior(state: LinearCascadeState, sigma: float) -> tuple[jax.Array, jax.Array]:
    """Compute thetahat [P] and M^-1 [P, P].

    From sigma^2 M, whose entries float32 adds up without loss for longer.
    """
    size = state.cross.shape[0]
    precision = state.gram + sigma**2 * jnp.eye(size)
    inverse = jax.scipy.linalg.cho_solve(
        jax.scipy.linalg.cho_factor(precision), jnp.eye(size)
    )
    return inverse @ state.cross, sigma**2 * inverse


def upper_bounds(
    rows: jax.Array, theta: jax.Array, cov: jax.Array, alpha: float
) -> jax.Array:
    """Compute row'theta + alpha sqrt(row' cov row) of rows [N, P], [N]."""
    variance = jnp.sum((rows @ cov) * rows, axis=1)
    return rows @ theta + alpha * jnp.sqrt(jnp.maximum(variance, 0.0))
