"""Training of `rlfd`: its settings and state, and what a refresh does with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from msb_jax.baselines.checks import check_least, check_numbers
from msb_jax.baselines.random import check_constraints
from msb_jax.masters.history import masked_moments
from msb_jax.masters.training import Task, train_adam
from msb_jax.networks.attention import judge
from msb_jax.networks.pointer import (
    Codes,
    Pointer,
    align,
    encode,
    follow,
    path_log_prob,
    sample,
)
from msb_jax.problem import Problem, repair
from msb_jax.types import Key

Params = Any

_TOP = 3  # of the paths of a hill climb, those that may be trained on


@dataclass(frozen=True, kw_only=True)
class RLfDConfig:
    """Settings of `rlfd`."""

    constraints: str = "soft"
    lam: float = 5.0  # weight of the violation rate, with `penalise`
    penalise: bool = False  # learn from r - lam c instead of r
    n_re: int = 600  # random rounds at the start
    f_in: int = 20  # rounds between two refreshes
    coe: float = 0.5  # weight of the supervised loss
    hidden: int = 32
    heads: int = 2
    num_steps: int = 4  # gradient steps of a refresh
    batch_size: int = 4  # hill climbs of a step
    num_paths: int = 16  # samples of a hill climb
    learning_rate: float = 3e-3
    num_demonstrations: int = 8
    capacity: int = 1024  # rounds that the reward estimator remembers
    estimator_steps: int = 60  # of a refresh
    estimator_rate: float = 0.01

    def __post_init__(self) -> None:
        check_constraints(self.constraints)
        least = {"n_re": 0, "f_in": 1, "hidden": 1, "heads": 1, "num_steps": 0}
        least |= {"batch_size": 1, "num_paths": 1, "num_demonstrations": 1}
        least |= {"capacity": 2, "estimator_steps": 0}
        check_least(self, least)
        if self.hidden % self.heads:
            raise ValueError(
                f"hidden must be a multiple of heads, got {self.hidden} and "
                f"{self.heads}."
            )
        if not 0 <= self.coe <= 1:
            raise ValueError(f"coe must be in [0, 1], got {self.coe}.")
        check_numbers(self, "lam")
        for name in ("learning_rate", "estimator_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} must be a number > 0, got {getattr(self, name)}."
                )


class Learner(NamedTuple):
    """A network in training."""

    params: Params
    opt_state: Any


class RLfDState(NamedTuple):
    """The last rounds, the networks, and the actions of the coming block."""

    problem: Problem
    actions: jax.Array  # [C, K] int32, a ring
    rewards: jax.Array  # [C] less the price of conflicts with `penalise`
    told: jax.Array  # [] int32, rewards that were numbers
    asked: jax.Array  # [] int32
    actor: Learner
    estimator: Learner
    demonstrations: jax.Array  # [E, K] int32
    values: jax.Array  # [E] their rewards; -inf where there is none yet
    plan: jax.Array  # [f_in, K] int32
    turn: jax.Array  # [] int32, next row of the plan


def make_net(config: RLfDConfig, problem: Problem) -> Pointer:
    """Make the pointer network for a problem."""
    return Pointer(problem.num_arms, problem.k, config.hidden, config.heads)


def make_optimizer(config: RLfDConfig) -> optax.GradientTransformation:
    """Make the paper's Adam, with clipped gradients."""
    adam = optax.adam(config.learning_rate, b1=0.9, b2=0.98, eps=1e-8)
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


def forbidden_pairs(config: RLfDConfig, problem: Problem) -> jax.Array:
    """The pairs that the decoder avoids: bool[L, L]."""
    return problem.conflicts & (config.constraints == "hard")


def draw_paths(
    key: Key, config: RLfDConfig, state: RLfDState, codes: Codes, n: int
) -> jax.Array:
    """Draw n paths from the policy: int32[n, K]."""
    problem = state.problem
    net, forbidden = make_net(config, problem), forbidden_pairs(config, problem)
    noise = jax.random.gumbel(key, (n, problem.k, problem.num_arms))

    def draw(noise: jax.Array) -> jax.Array:
        return sample(net, state.actor.params, codes, forbidden, noise).path

    return jax.vmap(draw)(noise)


def mend(problem: Problem, path: jax.Array, fill: jax.Array) -> jax.Array:
    """Repair a path that got stuck; one without a conflict stays as it is.

    Args:
        path: int32[K].
        fill: float32[L] in [0, 1), the priority of the arms that are not on the path.
    """
    order = 1.0 + jnp.arange(problem.k, 0, -1, dtype=jnp.float32)
    return repair(problem, path, fill.at[path].set(order))


def fit_estimator(
    key: Key,
    config: RLfDConfig,
    optimizer: optax.GradientTransformation,
    state: RLfDState,
) -> Learner:
    """Fit the reward estimator to standardised rewards of the ring."""
    num_rows = jnp.minimum(state.told, config.capacity)
    is_row = (jnp.arange(config.capacity) < num_rows).astype(jnp.float32)
    mean, deviation = masked_moments(state.rewards, is_row)
    params = state.estimator.params
    task = Task(
        predict=judge,
        actions=state.actions,
        targets=(state.rewards - mean) / deviation * is_row,
        num_rows=num_rows,
        anchor=jax.tree.map(jnp.zeros_like, params),
        pull=1.0,
    )
    shape = (config.estimator_steps, 128)
    return Learner(
        *train_adam(key, task, optimizer, params, state.estimator.opt_state, shape)
    )


def best_sets(state: RLfDState) -> tuple[jax.Array, jax.Array]:
    """The best distinct rounds of all: rewards [E] and sets [E, K].

    Every row of the ring that was a demonstration before is left out, so that none is
    there twice; a place that cannot be filled repeats the best.
    """
    size, capacity = state.values.shape[0], state.rewards.shape[0]
    is_row = jnp.arange(capacity) < state.told
    same = jnp.all(
        jnp.sort(state.actions, axis=1)[:, None, :]
        == jnp.sort(state.demonstrations, axis=1)[None, :, :],
        axis=2,
    )
    is_known = jnp.any(same & jnp.isfinite(state.values)[None, :], axis=1)
    rewards = jnp.where(is_row & ~is_known, state.rewards, -jnp.inf)
    values, places = jax.lax.top_k(jnp.concatenate([state.values, rewards]), size)
    sets = jnp.concatenate([state.demonstrations, state.actions])[places]
    is_set = jnp.isfinite(values)
    return values, jnp.where(is_set[:, None], sets, sets[:1])


def train_actor(
    key: Key,
    config: RLfDConfig,
    optimizer: optax.GradientTransformation,
    state: RLfDState,
) -> RLfDState:
    """Run `num_steps` steps on the total loss."""
    problem = state.problem
    net, forbidden = make_net(config, problem), forbidden_pairs(config, problem)

    def loss(
        params: Params, paths: jax.Array, rewards: jax.Array, targets: jax.Array
    ) -> jax.Array:
        codes = encode(net, params, problem.features)

        def one(path: jax.Array, reward: jax.Array, target: jax.Array) -> jax.Array:
            decoding = follow(net, params, codes, forbidden, path)
            labels, is_label = align(decoding, target)
            costs = -decoding.log_probs[jnp.arange(problem.k), labels]
            supervised = jnp.sum(jnp.where(is_label, costs, 0.0))
            policy = -reward * path_log_prob(decoding)
            return (1.0 - config.coe) * policy + config.coe * supervised

        return jnp.mean(jax.vmap(one)(paths, rewards, targets))

    def step(state: RLfDState, key: Key) -> tuple[RLfDState, None]:
        path_key, pick_key, target_key = jax.random.split(key, 3)
        params, opt_state = state.actor
        codes = encode(net, params, problem.features)
        paths, rewards = climb(path_key, pick_key, config, state, codes)
        picks = jax.random.randint(
            target_key, (config.batch_size,), 0, config.num_demonstrations
        )
        grads = jax.grad(loss)(params, paths, rewards, state.demonstrations[picks])
        moves, opt_state = optimizer.update(grads, opt_state, params)
        return state._replace(
            actor=Learner(optax.apply_updates(params, moves), opt_state)
        ), None

    return jax.lax.scan(step, state, jax.random.split(key, config.num_steps))[0]


def climb(
    path_key: Key, pick_key: Key, config: RLfDConfig, state: RLfDState, codes: Codes
) -> tuple[jax.Array, jax.Array]:
    """Draw `num_paths` paths for each place of a batch; keep a random one of the top.

    Returns:
        Paths int32[batch, K] and their R float32[batch].
    """
    groups, size = config.batch_size, config.num_paths
    paths = draw_paths(path_key, config, state, codes, groups * size)
    estimates = judge(state.estimator.params, paths).reshape(groups, size)
    _, order = jax.lax.top_k(estimates, min(_TOP, size))
    picks = jax.random.randint(pick_key, (groups,), 0, order.shape[1])
    rows = jnp.arange(groups)
    chosen = order[rows, picks]
    rewards = 2.0 * jax.nn.sigmoid(estimates[rows, chosen]) - 1.0
    return paths.reshape(groups, size, -1)[rows, chosen], rewards
