"""The cascade: a user reads an ordered list from the top until an arm satisfies.

An arm that is examined is clicked with probability rho' (attraction), and an arm that
is clicked satisfies with probability v'. Satisfaction ends the round with reward 1;
otherwise the user goes on to the next place with probability gamma, or leaves. With
w = rho' v',

    E[r] = sum_k w_{a_k} prod_{j<k} gamma (1 - w_{a_j}),

and of the orders of a set the one with descending w is best: exchanging neighbours
i, j changes the reward by a multiple of (1 - gamma)(w_i - w_j).

The clicks that a learner gets to see are float32[K]: 1 for an arm that was clicked, 0
for one that was passed over, -1 where nothing is known. After the last click nobody
knows how far the user read. Without any click the list counts as read to its end,
although the user may have left before, so learners from clicks think a little less of
arms that are far down (ALGORITHMS 9.0).

Source: paper, section "Experiments for cascading bandits"; ALGORITHMS 9.0, I-26.

Differs from the paper:
* the paper names Kveton et al. 2015, who have neither satisfaction nor gamma; its
  text, a dynamic Bayesian network with abandonment, is what is built here, for all
  policies alike (the authors' code has different simulators for them);
* the paper gives neither features nor conflicts: here features are uniform on
  [0, 1]^D and the pairs of smallest NED conflict, as many as give the density of the
  synthetic setting (437 of 4,950 pairs at L=100);
* rho' and v' do not depend on the features, because the paper draws them freely: a
  learner that models them by features has little to learn here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from msb_jax.envs.lists import ListConfig, check_chances, list_problem, list_truth
from msb_jax.envs.synthetic import GroundTruth
from msb_jax.problem import Problem
from msb_jax.rng import host_seed
from msb_jax.solvers.lists import best_list
from msb_jax.types import Env, Key, Outcome


@dataclass(frozen=True, kw_only=True)
class CascadingConfig(ListConfig):
    """The setting; sizes and gamma are the paper's."""

    gamma: float = 0.9  # chance to go on to the next place

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_gamma(self.gamma)


class CascadingInstance(NamedTuple):
    """One draw of the setting, on the host."""

    problem: Problem
    attraction: np.ndarray  # [L] rho'
    satisfaction: np.ndarray  # [L] v'
    gamma: float
    ground_truth: GroundTruth  # its action is ordered


class CascadingState(NamedTuple):
    """What the environment needs to answer. Stack states for several seeds."""

    problem: Problem
    attraction: jax.Array  # [L] float32
    satisfaction: jax.Array  # [L] float32
    gamma: jax.Array  # [] float32


def make_instance(config: CascadingConfig, seed: int) -> CascadingInstance:
    """Draw the instance of a seed and find its ground truth (host).

    Features, attraction and satisfaction have a stream of their own each.

    Args:
        seed: at least 0.
    """
    problem = list_problem(config, seed)
    attraction, satisfaction = (
        np.random.default_rng([seed, i]).uniform(size=config.num_arms) for i in (1, 2)
    )
    return instance_on(problem, attraction, satisfaction, config.gamma)


def instance_on(
    problem: Problem, attraction: ArrayLike, satisfaction: ArrayLike, gamma: float
) -> CascadingInstance:
    """Put a cascade on given arms, and find its ground truth (host).

    Args:
        problem: features and conflicts.
        attraction: [L], in [0, 1].
        satisfaction: [L], in [0, 1].
        gamma: in [0, 1].
    """
    _check_gamma(gamma)
    rho = check_chances(attraction, problem.num_arms, "attraction")
    v = check_chances(satisfaction, problem.num_arms, "satisfaction")

    def worth(values: Sequence[float]) -> float:
        total = 0.0
        for w in reversed(values):
            total = w + gamma * (1.0 - w) * total
        return total

    found = best_list(rho * v, np.asarray(problem.conflicts), problem.k, worth)
    truth = list_truth(found, 1.0)
    return CascadingInstance(problem, rho, v, gamma, truth)


def env_state(instance: CascadingInstance) -> CascadingState:
    """Turn an instance into the state of the environment."""
    return CascadingState(
        problem=instance.problem,
        attraction=jnp.asarray(instance.attraction, jnp.float32),
        satisfaction=jnp.asarray(instance.satisfaction, jnp.float32),
        gamma=jnp.asarray(instance.gamma, jnp.float32),
    )


def cascading(config: CascadingConfig) -> Env:
    """Make the environment of a setting.

    `reset` runs on the host, because instances come with a ground truth; it takes
    the bits of the key as the seed of `make_instance`. An experiment that wants
    numbered seeds calls `env_state(make_instance(config, seed))` instead.
    """

    def reset(key: Key) -> CascadingState:
        return env_state(make_instance(config, host_seed(key)))

    return Env(reset=reset, step=step, problem=lambda state: state.problem)


def expected_reward(worth: jax.Array, gamma: jax.Array) -> jax.Array:
    """Compute E[r] of a list: the w of its arms [..., K], top first -> [...]."""
    go_on = gamma * (1.0 - worth[..., :-1])
    reached = jnp.cumprod(go_on, axis=-1)  # [..., K - 1]
    return worth[..., 0] + jnp.sum(worth[..., 1:] * reached, axis=-1)


def step(
    key: Key, state: CascadingState, action: jax.Array
) -> tuple[CascadingState, Outcome]:
    """Show a list int32[K] to a user."""
    draws = jax.random.uniform(key, (3, action.shape[0]))
    attraction, satisfaction = state.attraction[action], state.satisfaction[action]
    is_attracted = draws[0] < attraction  # [K], if examined
    is_satisfied = is_attracted & (draws[1] < satisfaction)
    is_leaving = is_satisfied | (draws[2] >= state.gamma)
    # Examined: nobody has left at a place before.
    is_examined = jnp.cumsum(is_leaving) - is_leaving == 0
    is_clicked = is_examined & is_attracted
    outcome = Outcome(
        reward=jnp.any(is_examined & is_satisfied).astype(jnp.float32),
        mean_reward=expected_reward(attraction * satisfaction, state.gamma),
        clicks=visible_clicks(is_clicked),
    )
    return state, outcome


def visible_clicks(is_clicked: jax.Array) -> jax.Array:
    """Mark what a learner cannot know by -1: bool[K] -> float32[K]."""
    place = jnp.arange(is_clicked.shape[0])
    last = jnp.max(jnp.where(is_clicked, place, -1))
    is_known = (place <= last) | (last < 0)
    return jnp.where(is_known, is_clicked.astype(jnp.float32), -1.0)


def _check_gamma(gamma: float) -> None:
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be in [0, 1], got {gamma}.")
