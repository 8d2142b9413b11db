"""The environments with ordered lists: cascade and position-based model."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.envs import cascading, position_based
from msb_jax.envs.cascading import CascadingConfig, expected_reward, visible_clicks
from msb_jax.envs.position_based import PositionBasedConfig
from msb_jax.positions import examination
from msb_jax.problem import problem_from_conflicts
from msb_jax.types import Outcome

NUM_USERS = 40_000
LIBRARIES: dict[str, Any] = {"cascading": cascading, "position_based": position_based}
CONFIGS = {"cascading": CascadingConfig, "position_based": PositionBasedConfig}
SMALL = {"num_arms": 7, "k": 3, "num_constraints": 8}
NAMES = tuple(LIBRARIES)

_steps = {
    name: jax.jit(jax.vmap(lib.step, in_axes=(0, None, None)))
    for name, lib in LIBRARIES.items()
}


def show(name: str, instance: Any, action: list[int]) -> Outcome:
    """Show one list to many users; every leaf [NUM_USERS, ...]."""
    keys = jax.random.split(jax.random.key(3), NUM_USERS)
    state = LIBRARIES[name].env_state(instance)
    return jax.device_get(_steps[name](keys, state, jnp.asarray(action, jnp.int32))[1])


def assert_mean(samples: np.ndarray, expected: float) -> None:
    """At most 5 standard errors apart."""
    samples = np.asarray(samples, np.float64)
    error = max(samples.std() / np.sqrt(samples.size), 1e-6)
    assert abs(samples.mean() - expected) < 5 * error


def cascade_on(
    attraction: list[float], satisfaction: list[float], k: int, gamma: float = 0.9
) -> cascading.CascadingInstance:
    free = np.zeros((len(attraction), len(attraction)), bool)
    problem = problem_from_conflicts(free, k)
    return cascading.instance_on(problem, attraction, satisfaction, gamma)


def test_expected_reward__of_the_worked_example() -> None:
    worth = np.array([0.2, 0.5, 0.3])
    orders = list(itertools.permutations(range(3)))
    values = expected_reward(jnp.asarray(worth[np.array(orders)]), jnp.float32(0.9))
    best = int(np.argmax(values))
    np.testing.assert_array_equal(worth[list(orders[best])], [0.5, 0.3, 0.2])
    assert values[best] == pytest.approx(0.6917, abs=1e-5)
    assert sorted(values)[-2] < values[best] - 1e-4


def test_expected_reward__without_leaving_is_that_of_kveton() -> None:
    worth = np.random.default_rng(0).uniform(size=(5, 4))
    expected = 1.0 - np.prod(1.0 - worth, axis=1)
    found = expected_reward(jnp.asarray(worth), jnp.float32(1.0))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_expected_reward__of_one_place_is_the_arms_own() -> None:
    assert expected_reward(jnp.array([0.3]), jnp.float32(0.9)) == pytest.approx(0.3)


def test_cascading__mean_reward_is_the_share_of_satisfied_users() -> None:
    instance = cascade_on([0.6, 0.9, 0.3, 0.8], [0.5, 0.3, 0.9, 0.6], 4)
    for action in ([2, 0, 3, 1], [1, 3, 0, 2]):
        outcome = show("cascading", instance, action)
        assert set(np.unique(outcome.reward)) == {0.0, 1.0}
        assert_mean(outcome.reward, float(outcome.mean_reward[0]))


def test_cascading__clicks_have_the_chances_of_the_model() -> None:
    rho, v, gamma = np.array([0.6, 0.9, 0.3]), np.array([0.5, 0.3, 0.9]), 0.9
    outcome = show("cascading", cascade_on(rho.tolist(), v.tolist(), 3), [1, 2, 0])
    order = [1, 2, 0]
    reached = np.cumprod([1.0, *(gamma * (1 - (rho * v)[order[:2]]))])
    for place, arm in enumerate(order):
        is_clicked = outcome.clicks[:, place] == 1
        assert_mean(is_clicked, reached[place] * rho[arm])


def test_cascading__clicks_say_no_more_than_a_learner_can_know() -> None:
    outcome = show("cascading", cascade_on([0.5] * 4, [0.4] * 4, 4), [0, 1, 2, 3])
    clicks = outcome.clicks
    assert set(np.unique(clicks)) == {-1.0, 0.0, 1.0}
    has_click = (clicks == 1).any(axis=1)
    assert (clicks[~has_click] == 0).all()
    last = 3 - np.argmax(clicks[:, ::-1] == 1, axis=1)
    after = np.arange(4)[None, :] > last[:, None]
    np.testing.assert_array_equal((clicks == -1)[has_click], after[has_click])
    assert has_click[outcome.reward == 1].all()
    # A user who was satisfied clicked last on what satisfied.
    assert 0 < (outcome.reward == 1).mean() < has_click.mean()


def test_visible_clicks__of_hand_made_rounds() -> None:
    for is_clicked, expected in (
        ([False, False, False], [0, 0, 0]),
        ([True, False, False], [1, -1, -1]),
        ([True, False, True], [1, 0, 1]),
        ([False, True, False], [0, 1, -1]),
    ):
        seen = visible_clicks(jnp.array(is_clicked))
        np.testing.assert_array_equal(seen, np.array(expected, np.float32))


def test_cascading__gamma_zero_reads_one_place() -> None:
    instance = cascade_on([0.5, 1.0], [0.5, 1.0], 2, gamma=0.0)
    outcome = show("cascading", instance, [0, 1])
    assert (outcome.clicks[:, 1] <= 0).all()
    assert_mean(outcome.reward, 0.25)
    np.testing.assert_allclose(outcome.mean_reward, 0.25)


def test_position_based__reward_and_clicks_have_the_stated_means() -> None:
    config = PositionBasedConfig(**SMALL, decay=0.7, noise_std=0.3)
    instance = position_based.make_instance(config, 1)
    action = [4, 0, 6]
    outcome = show("position_based", instance, action)
    chance = 0.7 ** np.arange(3) * instance.theta[action]
    np.testing.assert_allclose(
        outcome.mean_reward, chance.sum() / instance.scale, rtol=1e-5
    )
    assert_mean(outcome.reward, chance.sum() / instance.scale)
    deviation = 0.3 / instance.scale
    # The standard error of a deviation is its 1 / sqrt(2 n).
    spread = np.std(outcome.reward, dtype=np.float64)
    assert abs(spread / deviation - 1) < 5 / np.sqrt(2 * NUM_USERS)
    assert set(np.unique(outcome.clicks)) == {0.0, 1.0}
    for place in range(3):
        assert_mean(outcome.clicks[:, place], chance[place])


def test_position_based__the_best_list_without_conflicts_is_worth_one() -> None:
    config = PositionBasedConfig(num_arms=9, k=4, num_constraints=0)
    instance = position_based.make_instance(config, 0)
    best = np.argsort(-instance.theta)[:4]
    np.testing.assert_array_equal(instance.ground_truth.action, best)
    assert instance.ground_truth.reward == pytest.approx(1.0)
    outcome = show("position_based", instance, best.tolist())
    np.testing.assert_allclose(outcome.mean_reward, 1.0, rtol=1e-6)


def test_examination__falls_from_one() -> None:
    np.testing.assert_allclose(examination(0.5, 3), [1.0, 0.5, 0.25])
    np.testing.assert_array_equal(examination(1.0, 3), np.ones(3))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "sizes",
    [
        SMALL,
        SMALL | {"num_constraints": 0},
        SMALL | {"num_constraints": 21},  # everything conflicts
        {"num_arms": 5, "k": 5, "num_constraints": 3},
        {"num_arms": 2, "k": 1, "num_constraints": 1},
        {"num_arms": 1, "k": 1, "feature_dim": 1},
    ],
)
def test_ground_truth__equals_the_best_mean_reward_of_all_lists(
    name: str, sizes: dict[str, int]
) -> None:
    lib = LIBRARIES[name]
    config = CONFIGS[name](**sizes)
    for seed in range(3):
        instance = lib.make_instance(config, seed)
        size, k = config.num_arms, config.k
        lists = np.array(list(itertools.permutations(range(size), k)), np.int32)
        graph = np.asarray(instance.problem.conflicts)
        clashes = graph[lists[:, :, None], lists[:, None, :]].sum(axis=(1, 2)) // 2
        state = lib.env_state(instance)
        play = jax.jit(jax.vmap(lib.step, in_axes=(None, None, 0)))
        means = np.asarray(play(jax.random.key(0), state, lists)[1].mean_reward)
        is_calm = clashes == clashes.min()
        truth = instance.ground_truth
        assert truth.reward == pytest.approx(means[is_calm].max(), rel=1e-5)
        assert truth.upper_bound == truth.reward
        assert truth.status == ("infeasible" if clashes.min() else "optimal")
        same = (lists == truth.action).all(axis=1)
        assert clashes[same] == clashes.min()
        assert means[same] == pytest.approx(truth.reward, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_make_instance__default_size_is_proven(name: str) -> None:
    instance = LIBRARIES[name].make_instance(CONFIGS[name](), 0)
    assert int(instance.problem.num_conflicts) == 437
    assert instance.problem.k == 10
    assert instance.ground_truth.status == "optimal"
    assert 0.9 < instance.ground_truth.reward <= 1.0


@pytest.mark.parametrize("name", NAMES)
def test_make_instance__is_reproducible_with_streams_of_its_own(name: str) -> None:
    make, config = LIBRARIES[name].make_instance, CONFIGS[name]
    one, two = (make(config(**SMALL), 4) for _ in range(2))
    other = make(config(**SMALL), 5)
    freer = make(config(**SMALL | {"num_constraints": 0, "feature_dim": 3}), 4)
    field = "attraction" if name == "cascading" else "theta"
    np.testing.assert_array_equal(getattr(one, field), getattr(two, field))
    np.testing.assert_array_equal(getattr(one, field), getattr(freer, field))
    assert (getattr(one, field) != getattr(other, field)).all()
    np.testing.assert_array_equal(one.ground_truth.action, two.ground_truth.action)


@pytest.mark.parametrize("name", NAMES)
def test_step__stacked_seeds_equal_one_by_one(name: str) -> None:
    lib = LIBRARIES[name]
    instances = [lib.make_instance(CONFIGS[name](**SMALL), s) for s in range(3)]
    states = [lib.env_state(i) for i in instances]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    actions = jnp.array([[0, 1, 2], [3, 6, 4], [5, 2, 0]], jnp.int32)
    keys = jax.random.split(jax.random.key(1), 3)
    together = jax.jit(jax.vmap(lib.step))(keys, stacked, actions)[1]
    again = jax.random.split(jax.random.key(1), 3)
    step = jax.jit(lib.step)
    for b in range(3):
        alone = step(again[b], states[b], actions[b])[1]
        jax.tree.map(
            lambda one, all_, b=b: np.testing.assert_allclose(one, all_[b], rtol=1e-5),
            alone,
            together,
        )


@pytest.mark.parametrize("name", NAMES)
def test_env__resets_on_the_host_and_hands_out_the_problem(name: str) -> None:
    env = getattr(LIBRARIES[name], name)(CONFIGS[name](**SMALL))
    one, two, other = (env.reset(jax.random.key(s)) for s in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert (one.problem.features != other.problem.features).any()
    assert env.problem(one).k == 3
    outcome = env.step(jax.random.key(0), one, jnp.arange(3, dtype=jnp.int32))[1]
    assert outcome.clicks.shape == (3,)
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(env.reset)(jax.random.key(1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"k": 0}, r"k must be in 1\.\.100"),
        ({"k": 101}, r"k must be in 1\.\.100"),
        ({"num_arms": 10, "k": 2, "num_constraints": 46}, r"0\.\.45, the pairs of 10"),
        ({"num_constraints": -1}, "num_constraints must be in"),
        ({"feature_dim": 0}, "feature_dim must be at least 1"),
    ],
)
def test_config__rejects_bad_sizes(name: str, changes: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        CONFIGS[name](**changes)


def test_config__rejects_bad_chances() -> None:
    for gamma in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="gamma must be in"):
            CascadingConfig(gamma=gamma)
    for decay in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="decay must be in"):
            PositionBasedConfig(decay=decay)
    with pytest.raises(ValueError, match="noise_std must be at least 0"):
        PositionBasedConfig(noise_std=-1.0)


def test_instance_on__rejects_what_is_no_model() -> None:
    problem = problem_from_conflicts(np.zeros((3, 3), bool), 2)
    with pytest.raises(ValueError, match=r"attraction must have shape \(3,\)"):
        cascading.instance_on(problem, [0.5] * 4, [0.5] * 3, 0.9)
    with pytest.raises(ValueError, match="satisfaction must hold probabilities"):
        cascading.instance_on(problem, [0.5] * 3, [0.5, 2.0, 0.1], 0.9)
    with pytest.raises(ValueError, match="gamma must be in"):
        cascading.instance_on(problem, [0.5] * 3, [0.5] * 3, 1.5)
    for kappa in ([0.9, 0.5], [1.0, 0.5, 0.7]):
        wide = problem_from_conflicts(np.zeros((3, 3), bool), len(kappa))
        with pytest.raises(ValueError, match="kappa must start at 1"):
            position_based.instance_on(wide, [0.5] * 3, kappa, 0.1)
    with pytest.raises(ValueError, match="theta must not be zero"):
        position_based.instance_on(problem, [0.0] * 3, [1.0, 0.5], 0.1)
    with pytest.raises(ValueError, match="seed must be at least 0"):
        cascading.make_instance(CascadingConfig(**SMALL), -1)


@pytest.mark.parametrize("name", NAMES)
def test_step__lowers_for_every_platform(name: str) -> None:
    lib = LIBRARIES[name]
    state = lib.env_state(lib.make_instance(CONFIGS[name](**SMALL), 0))
    step = jax.jit(
        lambda data, action: lib.step(jax.random.wrap_key_data(data), state, action)
    )
    data = jax.random.key_data(jax.random.key(0))
    platforms = ("cpu", "cuda", "tpu")
    action = jnp.arange(3, dtype=jnp.int32)
    exported = jax.export.export(step, platforms=platforms)(data, action)
    assert exported.platforms == platforms
