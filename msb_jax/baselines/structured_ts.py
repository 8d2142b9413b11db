"""Thompson sampling that knows the structure of its problem.

Where the reward is linear in known features phi of an action, one Gaussian over the
weights is all that there is to learn: every round has weights drawn from it and plays
the best action under them. The draws of a block of rounds are made at its refresh, with
what the rounds before have told. These are the peers of the agent on other problems:

* `path_ts`: phi marks the edges of a path; the best path is a dynamic program;
* `coverage_ts`: phi marks the elements that the sets cover; the best choice is the
  greedy one, which gains at least 1 - 1/e of the optimum and mostly nearly all of it.

Both know more of the reward than the agent, which knows neither that it is linear nor
in what. A weight is expected at the mean reward divided by the mean number of marks;
noise and prior are in units of the mean reward and of that weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from msb_jax.baselines.checks import check_least, check_numbers
from msb_jax.parallel import map_seeds, one_or_many
from msb_jax.problem import PATHS, Problem, to_multi_hot
from msb_jax.spaces.paths import maximise
from msb_jax.types import Key, Policy


@dataclass(frozen=True, kw_only=True)
class StructuredTsConfig:
    """Settings of the peers."""

    f_in: int = 20  # rounds between two refreshes
    ts_scale: float = 0.3  # of the draws, in posterior deviations
    ts_noise: float = 0.02  # deviation of a reward, in units of the mean reward
    ts_prior: float = 1.0  # deviation of a weight, in units of the expected one

    def __post_init__(self) -> None:
        check_least(self, {"f_in": 1})
        check_numbers(self, "ts_scale", "ts_noise", "ts_prior")
        if not self.ts_noise or not self.ts_prior:
            raise ValueError("ts_noise and ts_prior must be positive.")


class StructuredTsState(NamedTuple):
    """The rounds so far, as sums, and the weights of the coming ones."""

    problem: Problem
    weights: jax.Array  # [f_in, F] draws
    asked: jax.Array  # [] int32
    gram: jax.Array  # [F, F] sum of phi phi'
    moment: jax.Array  # [F] sum of phi r
    total: jax.Array  # [F] sum of phi
    rounds: jax.Array  # []
    sum_reward: jax.Array  # []


def path_ts(config: StructuredTsConfig) -> Policy:
    """Make the peer for paths."""

    def features(problem: Problem, action: jax.Array) -> jax.Array:
        if problem.space != PATHS:
            raise ValueError("path_ts needs a problem whose actions are paths.")
        return to_multi_hot(action, problem.num_arms)

    return _structured(config, "path_ts", features, maximise)


def coverage_ts(config: StructuredTsConfig) -> Policy:
    """Make the peer for maximum coverage; features say what a set holds."""

    def features(problem: Problem, action: jax.Array) -> jax.Array:
        return jnp.max(problem.features[action], axis=0)

    return _structured(config, "coverage_ts", features, greedy_cover)


def greedy_cover(problem: Problem, weights: jax.Array) -> jax.Array:
    """Take the set that adds most, K times: int32[K].

    Args:
        weights: [n] of the elements; those below 0 count as 0.
    """
    weights = jnp.maximum(weights, 0.0)

    def add(
        carry: tuple[jax.Array, jax.Array], nothing: None
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        del nothing
        missing, is_out = carry  # [n], [L]
        gains = problem.features @ (weights * missing)
        best = jnp.argmax(jnp.where(is_out, gains, -jnp.inf)).astype(jnp.int32)
        missing = missing * (1.0 - problem.features[best])
        return (missing, is_out.at[best].set(False)), best

    start = (jnp.ones_like(weights), jnp.ones((problem.num_arms,), bool))
    return jax.lax.scan(add, start, None, length=problem.k)[1]


def _structured(
    config: StructuredTsConfig,
    name: str,
    features: Callable[[Problem, jax.Array], jax.Array],
    best: Callable[[Problem, jax.Array], jax.Array],
) -> Policy:
    """Make the policy.

    Args:
        features: problem, action [K] -> phi [F].
        best: problem, weights [F] -> the action [K] of most weight.
    """

    def init(key: Key, problem: Problem) -> StructuredTsState:
        del key
        some = jnp.arange(problem.k, dtype=jnp.int32)
        size = jax.eval_shape(features, problem, some).shape[0]
        zero = jnp.zeros(())
        return StructuredTsState(
            problem=problem,
            weights=jnp.ones((config.f_in, size)),
            asked=jnp.zeros((), jnp.int32),
            gram=jnp.zeros((size, size)),
            moment=jnp.zeros((size,)),
            total=jnp.zeros((size,)),
            rounds=zero,
            sum_reward=zero,
        )

    def plan(key: Key, state: StructuredTsState) -> StructuredTsState:
        """Draw the weights of the coming rounds from the posterior."""
        size = state.total.shape[0]
        level = jnp.abs(state.sum_reward) / jnp.maximum(state.rounds, 1.0)
        level = jnp.where(level > 0, level, 1.0)
        expected = state.sum_reward / jnp.maximum(jnp.sum(state.total), 1.0)
        prior = config.ts_prior * jnp.where(expected != 0, jnp.abs(expected), 1.0)
        noise = jnp.square(config.ts_noise * level)
        precision = state.gram / noise + jnp.eye(size) / jnp.square(prior)
        factor = jnp.linalg.cholesky(precision)
        pull = (state.moment - expected * jnp.sum(state.gram, axis=1)) / noise
        white = solve_triangular(factor, pull, lower=True)
        noises = config.ts_scale * jax.random.normal(key, (size, config.f_in))
        white = white[:, None] + noises
        drawn = solve_triangular(factor.T, white, lower=False)
        return state._replace(weights=expected + drawn.T)

    def ask(key: Key, state: StructuredTsState) -> tuple[StructuredTsState, jax.Array]:
        del key
        weights = state.weights[state.asked % config.f_in]
        return state._replace(asked=state.asked + 1), best(state.problem, weights)

    def tell(
        key: Key, state: StructuredTsState, action: jax.Array, reward: jax.Array
    ) -> StructuredTsState:
        del key
        phi = features(state.problem, action)
        return state._replace(
            gram=state.gram + phi[:, None] * phi[None, :],
            moment=state.moment + reward * phi,
            total=state.total + phi,
            rounds=state.rounds + 1.0,
            sum_reward=state.sum_reward + reward,
        )

    def origin(state: StructuredTsState) -> jax.Array:
        del state
        return jnp.zeros((), jnp.int32)

    refresh = one_or_many(map_seeds(plan, in_turn=True))
    return Policy(init, ask, tell, refresh, origin, (name,))
