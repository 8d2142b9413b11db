"""The actor-critic learner: its output, its price, its target, and what it learns."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.agent import replay as rp
from msb_jax.networks.actor_critic import sum_to_k
from msb_jax.problem import Problem, problem_from_conflicts, to_multi_hot
from msb_jax.samplers.ddpg import (
    Ddpg,
    DdpgConfig,
    Learner,
    clash_matrix,
    critic_target,
    ddpg,
    dual_step,
    relative_violation,
)
from tests.actor_critics import K, L, small_problem
from tests.reference import all_sets, multi_hot

# The output of the actor.


def test_sum_to_k__has_sum_k_and_keeps_the_order() -> None:
    logits = 5.0 * jax.random.normal(jax.random.key(0), (20, L))
    for k in (1, K, L - 1):
        output = np.asarray(jax.vmap(lambda x, k=k: sum_to_k(x, k))(logits))
        np.testing.assert_allclose(output.sum(axis=1), k, atol=1e-3)
        assert (np.argsort(output) == np.argsort(logits)).mean() > 0.95
        assert output.min() >= 0
        assert output.max() <= 1


def test_sum_to_k__reaches_zero_and_one() -> None:
    logits = jnp.where(jnp.arange(L) < K, 20.0, -20.0)
    np.testing.assert_allclose(sum_to_k(logits, K), jnp.arange(L) < K, atol=1e-3)
    np.testing.assert_allclose(sum_to_k(logits, L), np.ones(L), atol=1e-3)


def test_sum_to_k__has_the_gradient_of_the_shifted_sigmoid() -> None:
    logits = np.random.default_rng(0).normal(size=L)
    weights = np.random.default_rng(1).normal(size=L)
    grad = jax.grad(lambda x: jnp.dot(sum_to_k(x, K), jnp.asarray(weights)))(
        jnp.asarray(logits, jnp.float32)
    )
    output = np.asarray(sum_to_k(jnp.asarray(logits, jnp.float32), K), float)
    slope = output * (1 - output)
    # The shift moves so that the sum stays: d shift = -slope.dx / sum slope.
    want = slope * (weights - (slope @ weights) / slope.sum())
    np.testing.assert_allclose(grad, want, atol=1e-4)


# The dual variable and the critic's target.


def test_dual_step__settles_where_the_constraint_holds() -> None:
    # max x with x <= alpha on [0, 1]: the best response is x = 1 while lam2 < 1.
    alpha, eta = 0.3, 0.01

    def step(lam2: jax.Array, _: None) -> tuple[jax.Array, Any]:
        x = (lam2 < 1.0).astype(jnp.float32)
        return dual_step(lam2, x, alpha, eta, 100.0), (x, lam2)

    _, (x, lam2) = jax.lax.scan(step, jnp.zeros(()), None, length=4000)
    assert abs(float(jnp.mean(x[1000:])) - alpha) < 0.01
    np.testing.assert_allclose(lam2[1000:], 1.0, atol=2 * eta)


def test_dual_step__stays_within_its_bounds() -> None:
    assert float(dual_step(jnp.asarray(0.1), jnp.asarray(0.0), 0.5, 1.0, 9.0)) == 0.0
    assert float(dual_step(jnp.asarray(8.9), jnp.asarray(1.0), 0.5, 1.0, 9.0)) == 9.0


def test_critic_target__of_one_step_is_the_composite_feedback() -> None:
    r, c = jnp.asarray([1.0, -2.0]), jnp.asarray([0.5, 3.0])
    np.testing.assert_allclose(critic_target(r, c, 2.0), [0.0, -8.0])
    ahead = jnp.asarray([10.0, 20.0])
    np.testing.assert_allclose(critic_target(r, c, 2.0, 0.5, ahead), [5.0, 2.0])


def test_relative_violation__is_one_for_random_sets_and_x_W_x() -> None:
    problem = small_problem()
    sets = np.array(list(all_sets(L, K)), np.int32)
    rates = np.asarray(relative_violation(problem, jnp.asarray(sets)))
    np.testing.assert_allclose(rates.mean(), 1.0, rtol=1e-5)
    hot, clash = multi_hot(sets, L), np.asarray(clash_matrix(problem), float)
    np.testing.assert_allclose(rates, np.einsum("ni,ij,nj->n", hot, clash, hot), 1e-4)


# The learner, on all sets of a small problem.

SIZE, PICK = 7, 2
ROWS = np.array(list(all_sets(SIZE, PICK)), np.int32)
WORTH = np.array([0.1, 0.9, 0.3, 0.8, 0.2, 0.7, 0.0])
START = jnp.full((SIZE,), 1.0 / SIZE)
FAST = DdpgConfig(width=16, num_steps=150, batch_size=24, actor_rate=5e-3)


def _pair_problem() -> Problem:
    """The two best arms, 1 and 3, conflict."""
    return problem_from_conflicts(np.array([[1, 3], [2, 4]]), PICK, num_arms=SIZE)


def _rows(rewards: np.ndarray) -> rp.Replay:
    problem, n = _pair_problem(), len(ROWS)
    states = jnp.tile(START[None, :], (n, 1))
    rows = rp.Transitions(
        actions=jnp.asarray(ROWS),
        rewards=jnp.asarray(rewards, jnp.float32),
        violations=relative_violation(problem, jnp.asarray(ROWS)),
        states=states,
        next_states=states,
    )
    empty = rp.new_replay(n + 9, PICK, SIZE)
    return rp.push(empty, rows, jnp.ones((n,), bool))


@functools.cache
def _ddpg(config: DdpgConfig) -> tuple[Ddpg, Any]:
    learner = ddpg(config, SIZE, PICK)
    return learner, jax.jit(learner.learn)


def _learn(config: DdpgConfig, replay: rp.Replay, lam2: float, calls: int) -> Learner:
    own, learn = _ddpg(config)
    learner = own.init(jax.random.key(0))
    clash = clash_matrix(_pair_problem())
    for i in range(calls):
        learner = learn(jax.random.key(i), learner, replay, jnp.asarray(lam2), clash)
    return learner


def _values(config: DdpgConfig, learner: Learner, lam2: float) -> np.ndarray:
    own, _ = _ddpg(config)
    violations = relative_violation(_pair_problem(), jnp.asarray(ROWS))
    value = own.value(learner, START, jnp.asarray(ROWS), violations, jnp.asarray(lam2))
    return np.asarray(value)


def _chosen(config: DdpgConfig, learner: Learner) -> list[int]:
    proto = _ddpg(config)[0].proto(learner, START)
    return sorted(jax.lax.top_k(proto, PICK)[1].tolist())


def _standard(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / values.std()


def test_ddpg__starts_at_value_zero_and_the_centre() -> None:
    own, _ = _ddpg(FAST)
    learner = own.init(jax.random.key(0))
    assert not _values(FAST, learner, 0.0).any()
    np.testing.assert_allclose(own.proto(learner, START), PICK / SIZE, atol=1e-4)


@pytest.mark.parametrize("kind", rp.KINDS)
def test_learn__finds_values_and_the_best_set(kind: str) -> None:
    config = DdpgConfig(
        width=16, num_steps=150, batch_size=24, actor_rate=5e-3, replay=kind
    )
    rewards = WORTH[ROWS].sum(axis=1)
    learner = _learn(config, _rows(rewards), 0.0, 4)
    error = _values(config, learner, 0.0) - _standard(rewards)
    assert np.abs(error).max() < 0.15
    assert _chosen(config, learner) == [1, 3]


def test_learn__lam2_acts_on_rows_stored_before() -> None:
    rewards = WORTH[ROWS].sum(axis=1)
    replay = _rows(rewards)
    learner = _learn(FAST, replay, 3.0, 4)
    want = _standard(rewards) - 3.0 * np.asarray(replay.rows.violations[: len(ROWS)])
    assert np.abs(_values(FAST, learner, 3.0) - want).max() < 0.15
    # Arms 1 and 3 conflict: the best pair at this price is 1 and 5.
    assert _chosen(FAST, learner) == [1, 5]


def test_learn__is_free_of_offset_and_unit_of_the_reward() -> None:
    rewards = WORTH[ROWS].sum(axis=1)
    one = _learn(FAST, _rows(rewards), 0.5, 1)
    other = _learn(FAST, _rows(1e-3 * rewards + 0.02), 0.5, 1)
    own, _ = _ddpg(FAST)
    np.testing.assert_allclose(
        own.proto(one, START), own.proto(other, START), atol=0.02
    )
    np.testing.assert_allclose(
        _values(FAST, one, 0.5), _values(FAST, other, 0.5), atol=0.05
    )


def test_learn__leaves_out_rewards_that_are_not_numbers() -> None:
    rewards = WORTH[ROWS].sum(axis=1)
    rewards[4] = np.nan
    learner = _learn(FAST, _rows(rewards), 0.0, 2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(learner))
    assert _chosen(FAST, learner) == [1, 3]


def test_learn__from_nothing_changes_nothing() -> None:
    own, learn = _ddpg(FAST)
    start = own.init(jax.random.key(0))
    empty = rp.new_replay(len(ROWS) + 9, PICK, SIZE)
    clash = clash_matrix(_pair_problem())
    after = learn(jax.random.key(1), start, empty, jnp.ones(()), clash)
    for one, other in zip(jax.tree.leaves(start), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(one, other)


def test_learn__discount_adds_the_value_of_what_follows() -> None:
    config = DdpgConfig(
        width=16, num_steps=150, batch_size=24, actor_rate=5e-3, discount=0.5
    )
    rewards = WORTH[ROWS].sum(axis=1)
    learner = _learn(config, _rows(rewards), 0.0, 6)
    # For ever the best set z: Q = r + gamma z / (1 - gamma), with gamma = 1/2.
    standard = _standard(rewards)
    error = _values(config, learner, 0.0) - (standard + standard.max())
    assert np.abs(error).max() < 0.4


def test_imitate__moves_the_output_to_the_set() -> None:
    own, _ = _ddpg(FAST)
    imitate = jax.jit(own.imitate)
    action = jnp.asarray([2, 6], jnp.int32)
    goal = np.asarray(to_multi_hot(action, SIZE))
    learner = own.init(jax.random.key(0))
    losses = []
    for _ in range(12):
        output = np.clip(np.asarray(own.proto(learner, START)), 1e-4, 1 - 1e-4)
        losses.append(-(goal * np.log(output) + (1 - goal) * np.log1p(-output)).mean())
        learner = imitate(learner, START, action)
    assert losses[1] < losses[0] - 0.05
    assert losses[-1] < 0.1 * losses[0]
    assert _chosen(FAST, learner) == [2, 6]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"width": 0}, "width must be positive"),
        ({"actor_rate": 0.0}, "actor_rate must be positive"),
        ({"entropy": -1.0}, "entropy must not be negative"),
        ({"tau": 2.0}, "tau must be in"),
        ({"discount": 1.0}, "discount must be in"),
        ({"replay": "newest"}, "replay must be one of prioritized"),
    ],
)
def test_ddpg_config__explains_what_is_wrong(settings: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DdpgConfig(**settings)
