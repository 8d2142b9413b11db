"""The policies for ordered lists: the protocol, and that they learn."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax import runner
from msb_jax.baselines.cascade_hybrid import CascadeHybridConfig
from msb_jax.baselines.cascade_kl_ucb import CascadeKLUCBConfig
from msb_jax.baselines.cascade_lsb import CascadeLSBConfig
from msb_jax.baselines.lists import fill_places, log_round, rank_arms
from msb_jax.baselines.pbm_lin_ucb import PbmLinUCBConfig
from msb_jax.baselines.pbm_ucb import PbmUCBConfig
from msb_jax.baselines.registry import LIST_POLICIES, POLICIES, make_policy
from msb_jax.clicks import credit
from msb_jax.envs import cascading, position_based
from msb_jax.envs.cascading import CascadingConfig, visible_clicks
from msb_jax.envs.position_based import PositionBasedConfig
from msb_jax.problem import (
    problem_from_conflicts,
    stack_problems,
    violated_pairs,
)
from msb_jax.types import Outcome, Policy
from tests.list_policies import K, L, policy_of, small_problem, tell

NAMES = tuple(LIST_POLICIES)
CLICKED = tuple(name for name in NAMES if name != "pbm_lin_ucb")
B = 2
SIZES = {"num_arms": 20, "k": 4, "num_constraints": 20, "feature_dim": 5}


@pytest.mark.parametrize("constraints", ["soft", "hard"])
@pytest.mark.parametrize("name", NAMES)
def test_policy__keeps_the_protocol(name: str, constraints: str) -> None:
    policy = policy_of(name, constraints)
    problem = small_problem()
    state = policy.init(jax.random.key(0), problem)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    ask = jax.jit(policy.ask)
    learn = jax.jit(lambda *args: tell(policy, *args))
    rng = np.random.default_rng(1)
    for t in range(12):
        state = policy.refresh(jax.random.key(100 + t), state)
        state, action = ask(jax.random.key(t), state)
        assert action.shape == (K,)
        assert action.dtype == jnp.int32
        assert len(set(action.tolist())) == K
        assert set(action.tolist()) <= set(range(L))
        if constraints == "hard":
            assert int(violated_pairs(problem, action)) == 0
        assert int(policy.origin(state)) == 0
        clicks = rng.integers(-1, 2, K).astype(np.float32)
        state = learn(state, action, np.float32(t % 2), clicks)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == shapes
    assert ask._cache_size() == learn._cache_size() == 1
    assert policy.origins == (name,)


@pytest.mark.parametrize("name", ["cascade_kl_ucb", "cascade_hybrid", "pbm_lin_ucb"])
@pytest.mark.parametrize(
    ("num_arms", "k", "edges"),
    [
        (1, 1, np.zeros((0, 2), int)),
        (2, 1, [[0, 1]]),
        (4, 4, [[0, 1]]),
        (4, 2, list(itertools.combinations(range(4), 2))),
    ],
)
def test_policy__tiny_problems(name: str, num_arms: int, k: int, edges: Any) -> None:
    policy = policy_of(name, "hard")
    state = policy.init(jax.random.key(0), small_problem(num_arms, k, edges))

    @jax.jit
    def play(key: jax.Array, state: Any) -> Any:
        state, action = policy.ask(key, state)
        return tell(policy, state, action, 1.0, [1.0] * k), action

    for t in range(4):
        state, action = play(jax.random.key(t), state)
        assert len(set(action.tolist())) == k
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("name", NAMES)
def test_policy__a_lost_answer_teaches_nothing(name: str) -> None:
    policy = policy_of(name, "soft")
    state = policy.init(jax.random.key(0), small_problem())
    state = tell(policy, state, [0, 1, 2], 1.0, [0.0, 1.0, -1.0])
    lost = tell(policy, state, [3, 4, 5], np.nan, [np.nan] * K)
    for field in set(state._fields) - {"problem", "told"}:
        np.testing.assert_array_equal(getattr(lost, field), getattr(state, field))


@pytest.mark.parametrize("name", CLICKED)
def test_run__says_that_a_policy_needs_clicks(name: str) -> None:
    def no_clicks(key: jax.Array, state: Any, action: jax.Array) -> Any:
        mean = state[action].sum()
        return state, Outcome(mean + jax.random.normal(key), mean)

    with pytest.raises(ValueError, match=f"{name} learns from clicks, and this envi"):
        runner.run(
            policy_of(name, "soft"),
            no_clicks,
            jnp.ones((B, L)),
            stack_problems([small_problem()] * B),
            jax.random.split(jax.random.key(0), B),
            rounds=4,
            f_in=2,
        )


def test_registry__list_policies_are_not_among_all() -> None:
    assert not set(LIST_POLICIES) & set(POLICIES)
    with pytest.raises(ValueError, match="did you mean 'cascade_lsb'"):
        make_policy("cascade_lbs", {})


@pytest.mark.parametrize(
    ("config", "bad"),
    [
        (CascadeKLUCBConfig, {"constraints": "firm"}),
        (CascadeKLUCBConfig, {"extra": -1.0}),
        (CascadeKLUCBConfig, {"target": "sales"}),
        (CascadeLSBConfig, {"constraints": "firm"}),
        (CascadeLSBConfig, {"alpha": -1.0}),
        (CascadeLSBConfig, {"sigma": 0.0}),
        (CascadeHybridConfig, {"target": "sales"}),
        (PbmUCBConfig, {"decay": 0.0}),
        (PbmUCBConfig, {"extra": float("nan")}),
        (PbmLinUCBConfig, {"ridge": 0.0}),
        (PbmLinUCBConfig, {"alpha": float("inf")}),
    ],
)
def test_configs__refuse_bad_values(config: Callable[..., Any], bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        config(**bad)


def test_rank_arms__soft_is_the_top_in_order() -> None:
    index = jnp.array([0.1, 0.9, 0.5, 0.7, 0.2, 0.3, 0.0, 0.4])
    action = rank_arms(jax.random.key(0), small_problem(), index, False)
    np.testing.assert_array_equal(action, [1, 3, 2])


def test_rank_arms__hard_skips_conflicts() -> None:
    # 0, 1, 2 conflict with each other, and so do 3 and 4.
    index = jnp.arange(L, 0, -1).astype(jnp.float32)
    action = rank_arms(jax.random.key(0), small_problem(), index, True)
    np.testing.assert_array_equal(action, [0, 3, 5])


def test_rank_arms__without_a_way_out_adds_the_fewest_conflicts() -> None:
    problem = small_problem(4, 3, [[0, 1], [0, 2], [0, 3], [1, 2]])
    index = jnp.array([0.9, 0.8, 0.7, 0.6])
    action = rank_arms(jax.random.key(0), problem, index, True)
    # Nothing fits beside 0; all add one conflict, then 3 (two of them) and not 2.
    np.testing.assert_array_equal(action, [0, 1, 3])


def test_rank_arms__equal_arms_come_by_lot() -> None:
    keys = jax.random.split(jax.random.key(1), 400)
    draw = jax.jit(
        jax.vmap(lambda key: rank_arms(key, small_problem(), jnp.ones(L), False))
    )
    first = np.bincount(np.asarray(draw(keys))[:, 0], minlength=L) / 400
    error = np.sqrt(1 / L * (1 - 1 / L) / 400)
    assert np.abs(first - 1 / L).max() < 5 * error


def test_fill_places__equals_rank_arms_when_nothing_depends_on_the_arms_above() -> None:
    index = jax.random.uniform(jax.random.key(2), (L,))
    for is_hard in (False, True):
        action = fill_places(
            small_problem(),
            jnp.zeros(()),
            lambda above: index,
            lambda above, arm: above,
            is_hard,
        )
        same = rank_arms(jax.random.key(0), small_problem(), index, is_hard)
        np.testing.assert_array_equal(action, same)


@pytest.mark.parametrize(
    ("clicks", "reward", "target", "known", "value"),
    [
        ([0, 1, 0, 1, -1], 1.0, "clicks", [1, 1, 1, 1, 0], [0, 1, 0, 1, 0]),
        ([0, 1, 0, 1, -1], 1.0, "reward", [1, 1, 1, 1, 0], [0, 0, 0, 1, 0]),
        ([0, 1, 0, 1, -1], 0.0, "reward", [1, 1, 1, 1, 0], [0, 0, 0, 0, 0]),
        ([0, 0, 0, 0, 0], 0.0, "clicks", [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
        ([np.nan] * 5, 1.0, "clicks", [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
        ([0, 1, -1, -1, -1], np.nan, "reward", [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
    ],
)
def test_credit__of_hand_made_rounds(
    clicks: list, reward: float, target: str, known: list, value: list
) -> None:
    found = credit(jnp.array(clicks, jnp.float32), jnp.float32(reward), target)
    np.testing.assert_array_equal(found[0], np.array(known, np.float32))
    np.testing.assert_array_equal(found[1], np.array(value, np.float32))


def test_log_round__is_clipped_at_the_start() -> None:
    assert log_round(jnp.int32(0), 3.0) == log_round(jnp.int32(1), 3.0) == 0.0
    t = 1000
    expected = np.log(t) + 3 * np.log(np.log(t))
    assert log_round(jnp.int32(t - 1), 3.0) == pytest.approx(expected, rel=1e-5)


def coverage_step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, Outcome]:
    """The model of CascadeLSB: clicks come from topics that are not covered yet."""
    topics, theta = state
    x = topics[action]
    left = jnp.cumprod(jnp.concatenate([jnp.ones_like(x[:1]), 1.0 - x[:-1]]), axis=0)
    chance = (left * x) @ theta
    is_attracted = jax.random.uniform(key, action.shape) < chance
    is_first = jnp.cumsum(is_attracted) - is_attracted == 0
    mean = 1.0 - jnp.prod(1.0 - chance)
    clicks = visible_clicks(is_attracted & is_first)
    return state, Outcome(is_attracted.any().astype(jnp.float32), mean, clicks)


def coverage_setting() -> dict[str, Any]:
    """Half of the arms are about a topic that nobody likes."""
    rng = np.random.default_rng(9)
    features = np.zeros((20, 4))
    features[np.arange(20), np.arange(20) % 4] = rng.uniform(0.5, 1.0, 20)
    problem = problem_from_conflicts(np.zeros((20, 20), bool), 4, features)
    theta = jnp.array([0.5, 0.0, 0.45, 0.0])
    return {
        "env_step": coverage_step,
        "env_states": (problem.features, theta),
        "problems": problem,
    }


def list_setting(name: str) -> tuple[dict[str, Any], float]:
    """Draw a small instance that a policy is made for; also return its best reward."""
    if name.startswith("pbm"):
        config = PositionBasedConfig(**SIZES)
        instance: Any = position_based.make_instance(config, 2)
        step, state = position_based.step, position_based.env_state(instance)
    else:
        instance = cascading.make_instance(CascadingConfig(**SIZES), 2)
        step, state = cascading.step, cascading.env_state(instance)
    setting = {"env_step": step, "env_states": state, "problems": instance.problem}
    return setting, instance.ground_truth.reward


def late_reward(policy: Policy, setting: dict[str, Any], rounds: int = 1000) -> Any:
    """Play and return the mean rewards and violations of the last fifth."""
    stacked = jax.tree.map(
        lambda leaf: jnp.stack([leaf] * B),
        {name: setting[name] for name in ("env_states", "problems")},
    )
    keys = jax.random.split(jax.random.key(0), B)
    curves = runner.run(
        policy, setting["env_step"], **stacked, keys=keys, rounds=rounds, f_in=50
    )
    late = rounds - rounds // 5
    return curves.mean_reward[:, late:].mean(), curves.violations


@pytest.mark.parametrize(
    ("name", "target", "constraints", "share"),
    [
        ("cascade_kl_ucb", "clicks", "soft", 0.7),
        ("cascade_kl_ucb", "reward", "hard", 0.9),
        ("cascade_hybrid", "reward", "hard", 0.7),
        ("pbm_ucb", "clicks", "hard", 0.8),
        ("pbm_lin_ucb", "clicks", "hard", 0.8),
    ],
)
def test_policy__learns(name: str, target: str, constraints: str, share: float) -> None:
    """It goes much of the way from random lists to the best one."""
    setting, best = list_setting(name)
    policy = policy_of(name, constraints, target)
    reward, violations = late_reward(policy, setting)
    floor, _ = late_reward(policy_of("random", constraints), setting, rounds=200)
    assert reward > floor + share * (best - floor)
    if constraints == "hard":
        assert (violations == 0).all()


@pytest.mark.parametrize("name", ["cascade_lsb", "cascade_hybrid"])
def test_linear_cascade__learns_which_topics_are_liked(name: str) -> None:
    setting = coverage_setting()
    policy = make_policy(name, {"alpha": 0.3, "sigma": 0.5})
    reward, _ = late_reward(policy, setting)
    floor, _ = late_reward(policy_of("random", "soft"), setting, rounds=200)
    liked = jnp.array(list(itertools.permutations(range(0, 20, 2), 4)))
    means = jax.jit(jax.vmap(coverage_step, in_axes=(None, None, 0)))
    outcomes = means(jax.random.key(0), setting["env_states"], liked)[1]
    best = float(outcomes.mean_reward.max())
    assert reward > floor + 0.9 * (best - floor)


@pytest.mark.parametrize("name", ["cascade_kl_ucb", "cascade_hybrid", "pbm_ucb"])
def test_policy__runs_of_a_batch_equal_one_by_one(name: str) -> None:
    setting, _ = list_setting(name)
    policy = policy_of(name, "hard")
    keys = jax.random.split(jax.random.key(4), B)

    def play(chosen: jax.Array) -> runner.Curves:
        size = chosen.shape[0]
        stacked = jax.tree.map(
            lambda leaf: jnp.stack([leaf] * size),
            {n: setting[n] for n in ("env_states", "problems")},
        )
        step = setting["env_step"]
        return runner.run(policy, step, **stacked, keys=chosen, rounds=30, f_in=10)

    together = play(keys)
    assert (together.reward[0] != together.reward[1]).any()
    for b in range(B):
        alone = play(keys[b : b + 1])
        np.testing.assert_allclose(alone.reward[0], together.reward[b], rtol=1e-5)
        np.testing.assert_allclose(
            alone.mean_reward[0], together.mean_reward[b], rtol=1e-5
        )


@pytest.mark.parametrize("name", NAMES)
def test_policy__block_lowers_for_every_platform(name: str) -> None:
    setting, _ = list_setting(name)
    init, play = runner._compiled(policy_of(name, "hard"), setting["env_step"])
    problems, states = jax.tree.map(
        lambda leaf: jnp.stack([leaf] * B), (setting["problems"], setting["env_states"])
    )

    def block(data: jax.Array) -> Any:
        keys = jax.random.wrap_key_data(data)
        state = init(keys, problems)
        return play(state, states, keys, problems, 0, 4)[2]

    data = jax.random.key_data(jax.random.split(jax.random.key(0), B))
    platforms = ("cpu", "cuda", "tpu")
    exported = jax.export.export(jax.jit(block), platforms=platforms)
    assert exported(data).platforms == platforms
