"""The synthetic environment: instances, rewards and ground truths."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.conflicts import distances
from msb_jax.envs.synthetic import (
    FORMS,
    Instance,
    SyntheticConfig,
    env_state,
    make_instance,
    synthetic,
)
from msb_jax.problem import random_sets, violation_rate
from tests.test_scip import enumerate_best

SMALL = {"num_arms": 12, "k": 3, "num_constraints": 14}
MIDDLE = {"num_arms": 50, "k": 6, "num_constraints": 100}
QUADRATIC_FORMS = ("quadratic", "mixed")


def small(form: str, **changes: int | float) -> SyntheticConfig:
    return SyntheticConfig(form=form, **{**SMALL, **changes})


def raw(form: str, instance: Instance, action: np.ndarray) -> float:
    """h of the paper, float64."""
    x = np.zeros(instance.theta.size)
    x[action] = 1.0
    line = instance.theta @ x
    square = x @ instance.pair @ x if form in QUADRATIC_FORMS else 0.0
    return {
        "linear": line,
        "quadratic": square,
        "cubic": line**3,
        "mixed": line**2 + square,
    }[form]


def objective(form: str, instance: Instance) -> tuple[np.ndarray, np.ndarray]:
    """The x'Qx + d'x that h is a power of."""
    zeros = np.zeros((instance.theta.size, instance.theta.size))
    if form in ("linear", "cubic"):
        return zeros, instance.theta
    square = np.outer(instance.theta, instance.theta) if form == "mixed" else zeros
    return instance.pair + square, zeros[0]


@pytest.fixture(scope="module")
def instances() -> dict[str, Instance]:
    return {form: make_instance(small(form), 5) for form in FORMS}


@pytest.mark.parametrize("form", FORMS)
def test_step__mean_reward_equals_the_formula(
    form: str, instances: dict[str, Instance]
) -> None:
    instance = instances[form]
    config = small(form)
    state = env_state(instance)
    sets = random_sets(jax.random.key(0), instance.problem, 50)
    keys = jax.random.split(jax.random.key(1), 50)
    step = jax.jit(jax.vmap(synthetic(config).step, in_axes=(0, None, 0)))
    _, outcome = step(keys, state, sets)
    expected = [raw(form, instance, a) / instance.scale for a in np.asarray(sets)]
    np.testing.assert_allclose(outcome.mean_reward, expected, rtol=1e-6)
    assert outcome.reward.dtype == outcome.mean_reward.dtype == jnp.float32


@pytest.mark.parametrize("form", FORMS)
def test_ground_truth__equals_enumeration(
    form: str, instances: dict[str, Instance]
) -> None:
    instance = instances[form]
    graph = np.asarray(instance.problem.conflicts)
    pair, linear = objective(form, instance)
    power = 3 if form == "cubic" else 1
    best, clashes = enumerate_best(graph, 3, pair, linear)
    most, _ = enumerate_best(np.zeros_like(graph), 3, pair, linear)
    truth = instance.ground_truth
    assert clashes == 0
    assert truth.status == "optimal"
    np.testing.assert_allclose(instance.scale, most**power, rtol=1e-9)
    np.testing.assert_allclose(truth.reward, (best / most) ** power, rtol=1e-9)
    np.testing.assert_allclose(truth.upper_bound, truth.reward, rtol=1e-6)
    np.testing.assert_allclose(
        raw(form, instance, truth.action) / instance.scale, truth.reward, rtol=1e-9
    )
    assert not graph[np.ix_(truth.action, truth.action)].any()
    assert truth.action.dtype == np.int32


@pytest.mark.parametrize("form", QUADRATIC_FORMS)
def test_ground_truth__of_a_larger_problem_is_bounded(form: str) -> None:
    config = SyntheticConfig(form=form, **MIDDLE)
    instance = make_instance(config, 1)
    truth = instance.ground_truth
    graph = np.asarray(instance.problem.conflicts)
    assert not graph[np.ix_(truth.action, truth.action)].any()
    assert truth.reward <= truth.upper_bound <= 1.0
    assert truth.upper_bound < 1.06 * truth.reward
    assert truth.status in ("best_found", "optimal")
    # No feasible swap is better.
    for place in range(config.k):
        for arm in np.setdiff1d(np.arange(config.num_arms), truth.action):
            other = truth.action.copy()
            other[place] = arm
            if not graph[np.ix_(other, other)].any():
                value = raw(form, instance, other) / instance.scale
                assert value <= truth.reward + 1e-9


@pytest.mark.parametrize("form", FORMS)
def test_ground_truth__of_an_infeasible_graph_has_least_violation(form: str) -> None:
    config = small(form, num_constraints=66)
    instance = make_instance(config, 2)
    truth = instance.ground_truth
    pair, linear = objective(form, instance)
    best, clashes = enumerate_best(np.zeros((12, 12), bool), 3, pair, linear)
    assert clashes == 0
    assert truth.status == "infeasible"
    power = 3 if form == "cubic" else 1
    # Every set violates three pairs, so the best of all is the ground truth.
    np.testing.assert_allclose(truth.reward * instance.scale, best**power, rtol=1e-9)


def test_make_instance__has_exactly_the_wanted_conflicts() -> None:
    for num_constraints in (0, 1, 700):
        config = SyntheticConfig(
            form="linear", num_arms=80, k=4, num_constraints=num_constraints
        )
        problem = make_instance(config, 3).problem
        graph = np.asarray(problem.conflicts)
        assert np.triu(graph).sum() == num_constraints == int(problem.num_conflicts)
    gaps = distances(np.asarray(problem.features), "ned")
    upper = np.triu_indices(80, 1)
    is_edge = graph[upper]
    # float32 features move a distance by a few units in the seventh digit.
    assert gaps[upper][is_edge].max() <= gaps[upper][~is_edge].min() + 1e-6
    assert np.asarray(problem.features).min() >= 0.0
    assert np.asarray(problem.features).max() <= 1.0


def test_make_instance__is_reproducible_and_shares_what_forms_share() -> None:
    one, two = (make_instance(small("mixed"), 7) for _ in range(2))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a, b)
    other = make_instance(small("mixed"), 8)
    assert (one.theta != other.theta).all()
    linear = make_instance(small("linear"), 7)
    np.testing.assert_array_equal(linear.theta, one.theta)
    np.testing.assert_array_equal(linear.problem.conflicts, one.problem.conflicts)
    quadratic = make_instance(small("quadratic"), 7)
    np.testing.assert_array_equal(quadratic.pair, one.pair)
    np.testing.assert_array_equal(one.pair, one.pair.T)
    assert one.theta.min() >= 0.0
    assert one.theta.max() <= 0.5
    assert one.pair.min() >= 0.0
    assert one.pair.max() <= 0.5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_arms", "k", "edges"), [(2, 1, 1), (2, 2, 1), (3, 3, 0)])
def test_make_instance__tiny_sizes(
    form: str, num_arms: int, k: int, edges: int
) -> None:
    config = SyntheticConfig(form=form, num_arms=num_arms, k=k, num_constraints=edges)
    instance = make_instance(config, 0)
    truth = instance.ground_truth
    np.testing.assert_allclose(truth.reward, 1.0, rtol=1e-9)
    assert truth.status == ("infeasible" if k == num_arms == 2 else "optimal")
    np.testing.assert_allclose(
        raw(form, instance, truth.action), instance.scale, rtol=1e-9
    )


def test_state__of_many_arms_has_no_square_of_its_own() -> None:
    config = SyntheticConfig(form="cubic", num_arms=1500, num_constraints=3962)
    instance = make_instance(config, 0)
    assert env_state(instance).pair.shape == (0, 0)
    assert instance.ground_truth.status == "optimal"
    graph = np.asarray(instance.problem.conflicts)
    best = instance.ground_truth.action
    assert not graph[np.ix_(best, best)].any()


def test_step__noise_has_the_stated_deviation(instances: dict[str, Instance]) -> None:
    config = small("linear", noise_std=0.3)
    state = env_state(instances["linear"])
    action = jnp.asarray(instances["linear"].ground_truth.action)
    keys = jax.random.split(jax.random.key(3), 4000)
    step = jax.vmap(synthetic(config).step, in_axes=(0, None, None))
    _, outcome = step(keys, state, action)
    noise = np.asarray(outcome.reward - outcome.mean_reward, np.float64)
    noise = noise * instances["linear"].scale / 0.3
    # 4,000 draws: the mean has error 0.0158, the deviation 0.0112.
    assert abs(noise.mean()) < 5 * 0.0158
    assert abs(noise.std() - 1.0) < 5 * 0.0112
    silent = synthetic(small("linear", noise_std=0.0)).step
    _, quiet = silent(jax.random.key(4), state, action)
    assert quiet.reward == quiet.mean_reward


@pytest.mark.parametrize("form", ["cubic", "mixed"])
def test_step__stacked_seeds_equal_one_by_one(form: str) -> None:
    config = small(form)
    env = synthetic(config)
    states = [env_state(make_instance(config, seed)) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    actions = jnp.asarray([[0, 1, 2], [3, 9, 4], [11, 5, 0]], jnp.int32)
    keys = jax.random.split(jax.random.key(5), 3)
    again = jax.random.clone(keys)
    new, together = jax.jit(jax.vmap(env.step))(keys, stacked, actions)
    assert jax.tree.structure(new) == jax.tree.structure(stacked)
    for i, state in enumerate(states):
        _, alone = env.step(again[i], state, actions[i])
        np.testing.assert_allclose(together.reward[i], alone.reward, rtol=1e-6)
        np.testing.assert_allclose(
            together.mean_reward[i], alone.mean_reward, rtol=1e-6
        )
    assert env.problem(states[0]).k == config.k


def test_reset__draws_by_key_on_the_host() -> None:
    env = synthetic(small("linear"))
    one, two, other = (env.reset(jax.random.key(s)) for s in (1, 1, 2))
    np.testing.assert_array_equal(one.theta, two.theta)
    assert (one.theta != other.theta).all()
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(env.reset)(jax.random.key(1))


@pytest.mark.parametrize("form", FORMS)
def test_step__lowers_for_every_platform(
    form: str, instances: dict[str, Instance]
) -> None:
    step = jax.jit(synthetic(small(form)).step)
    # Exporting does not run anything, and a typed key has no public wire format.
    keyless = jax.jit(
        lambda data, state, action: step(jax.random.wrap_key_data(data), state, action)
    )
    arguments = (
        jax.random.key_data(jax.random.key(0)),
        env_state(instances[form]),
        jnp.arange(3, dtype=jnp.int32),
    )
    platforms = ("cpu", "cuda", "tpu")
    exported = jax.export.export(keyless, platforms=platforms)(*arguments)
    assert exported.platforms == platforms


def test_random_sets__violate_as_often_as_chance_says() -> None:
    config = SyntheticConfig(form="linear", num_arms=40, k=8, num_constraints=200)
    problem = make_instance(config, 4).problem
    sets = random_sets(jax.random.key(6), problem, 4000)
    rates = np.asarray(violation_rate(problem, sets), np.float64)
    expected = 8 * 7 / (40 * 39)
    error = rates.std() / np.sqrt(rates.size)
    assert abs(rates.mean() - expected) < 5 * error


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"form": "square"}, "form must be one of"),
        ({"k": 0}, r"k must be in 1\.\.300"),
        ({"k": 301}, r"k must be in 1\.\.300"),
        ({"num_arms": 10, "k": 2, "num_constraints": 46}, r"0\.\.45, the pairs of 10"),
        ({"num_constraints": -1}, "num_constraints must be in"),
        ({"noise_std": -0.1}, "noise_std must be at least 0"),
        ({"noise_std": float("nan")}, "noise_std must be at least 0"),
        ({"feature_dim": 0}, "feature_dim must be at least 1"),
    ],
)
def test_config__rejects_bad_values(changes: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SyntheticConfig(**changes)


def test_make_instance__rejects_a_negative_seed() -> None:
    with pytest.raises(ValueError, match="seed must be at least 0"):
        make_instance(small("linear"), -1)
