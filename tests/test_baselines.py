"""The policies for comparison, and what every policy of the registry must keep."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from msb_jax import runner
from msb_jax.baselines import lin_ts as lin_ts_lib
from msb_jax.baselines.lin_ts import LinTSConfig, lin_ts
from msb_jax.baselines.random import RandomConfig, random
from msb_jax.baselines.registry import POLICIES, check_name, make_policy
from msb_jax.problem import (
    Problem,
    problem_from_conflicts,
    stack_problems,
    violated_pairs,
)
from msb_jax.types import Outcome, Policy

PLAIN = ("random", "lin_ts", "d_lin_ts", "csar_est1", "csar_est2", "gtkr")
LEARNED = ("gp_ucb", "rlfd", "wolpertinger", "pdwa", "pdg2anet", "cem_ppo")
NAMES = (
    *PLAIN,
    *(pytest.param(name, marks=pytest.mark.slow) for name in LEARNED),
)
SETTINGS = {"lam": 5.0, "constraints": "hard", "n_re": 10, "f_in": 4, "n_es": 3}
EDGES = np.array([[0, 1], [0, 2], [1, 2], [3, 4], [5, 6]])
L, K, B = 8, 3, 2


def make_problem(num_arms: int = L, k: int = K, edges: Any = EDGES) -> Problem:
    return problem_from_conflicts(np.asarray(edges), k, num_arms=num_arms)


def linear_step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, Outcome]:
    mean = state[action].sum()
    return state, Outcome(mean + 0.01 * jax.random.normal(key), mean)


def play(
    policy: Policy, problem: Problem, worth: np.ndarray, rounds: int, f_in: int = 4
) -> runner.Curves:
    return runner.run(
        policy,
        linear_step,
        jnp.stack([jnp.asarray(worth, jnp.float32)] * B),
        stack_problems([problem] * B),
        jax.random.split(jax.random.key(0), B),
        rounds=rounds,
        f_in=f_in,
    )


def best_value(worth: np.ndarray, problem: Problem, price: float) -> float:
    """Brute force: the best worth minus price times conflicting pairs."""
    graph = np.asarray(problem.conflicts)
    return max(
        sum(worth[i] for i in s)
        - price * sum(graph[i, j] for i, j in itertools.combinations(s, 2))
        for s in itertools.combinations(range(worth.size), problem.k)
    )


@pytest.mark.parametrize("constraints", ["soft", "hard"])
@pytest.mark.parametrize("name", NAMES)
def test_policy__keeps_the_protocol(name: str, constraints: str) -> None:
    policy = make_policy(name, SETTINGS | {"constraints": constraints})
    state = policy.init(jax.random.key(0), make_problem())
    ask, tell = jax.jit(policy.ask), jax.jit(policy.tell)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    for t in range(14):
        key = jax.random.key(t)
        if t % 4 == 0:
            state = policy.refresh(jax.random.fold_in(key, 7), state)
        ask_key, tell_key = jax.random.split(key)
        state, action = ask(ask_key, state)
        assert action.shape == (K,)
        assert action.dtype == jnp.int32
        assert len(set(action.tolist())) == K
        assert set(action.tolist()) <= set(range(L))
        if constraints == "hard":
            assert int(violated_pairs(make_problem(), action)) == 0
        assert 0 <= int(policy.origin(state)) < len(policy.origins)
        state = tell(tell_key, state, action, jnp.float32(t))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == shapes
    assert ask._cache_size() == tell._cache_size() == 1


@pytest.mark.parametrize("name", NAMES)
def test_policy__refresh_of_a_batch_equals_one_by_one(name: str) -> None:
    policy = make_policy(name, SETTINGS)
    problems = stack_problems([make_problem(), make_problem(edges=EDGES[:2])])
    keys = jax.random.split(jax.random.key(1), B)
    states = jax.vmap(policy.init)(jax.random.split(jax.random.key(2), B), problems)
    tell = jax.jit(jax.vmap(policy.tell))
    for t, arms in enumerate(itertools.combinations(range(5), K)):
        tell_keys = jax.random.split(jax.random.key(t), B)
        reward = jnp.array([0.1 * sum(arms), 0.3 * arms[0]])
        states = tell(tell_keys, states, jnp.array([arms] * B), reward)
    if not name.startswith(("random", "csar")):
        # One run is beyond its random rounds, one not quite.
        clock = "round" if name == "gp_ucb" else "asked"
        states = states._replace(**{clock: jnp.array([12, 8])})
    together = policy.refresh(keys, states)
    if name.endswith("lin_ts"):
        np.testing.assert_array_equal(
            np.asarray(together.is_model), [[True] * 4, [False, False, True, True]]
        )
    again = jax.random.split(jax.random.key(1), B)
    for b in range(B):
        one = jax.tree.map(lambda leaf, b=b: leaf[b], states)
        alone = policy.refresh(again[b], one)
        same = jax.tree.map(lambda leaf, b=b: leaf[b], together)
        jax.tree.map(np.testing.assert_array_equal, alone, same)


def test_random__soft_plays_every_arm_equally_often() -> None:
    policy = random(RandomConfig(constraints="soft"))
    state = policy.init(jax.random.key(0), make_problem())
    keys = jax.random.split(jax.random.key(4), 4000)
    actions = jax.jit(jax.vmap(lambda key: policy.ask(key, state)[1]))(keys)
    share = np.bincount(np.asarray(actions).ravel(), minlength=L) / 4000
    error = np.sqrt(K / L * (1 - K / L) / 4000)
    assert np.abs(share - K / L).max() < 5 * error


def test_random__hard_plays_no_conflict() -> None:
    curves = play(
        random(RandomConfig(constraints="hard")), make_problem(), np.ones(L), 40
    )
    assert (curves.violations == 0).all()
    soft = play(random(RandomConfig()), make_problem(), np.ones(L), 40)
    assert (soft.violations > 0).any()


WORTH = np.array([0.9, 0.8, 0.7, 0.6, 0.55, 0.3, 0.2, 0.1])


def test_lin_ts__hard_finds_the_constrained_optimum() -> None:
    policy = lin_ts(LinTSConfig(constraints="hard", n_re=10, f_in=4))
    problem = make_problem()
    curves = play(policy, problem, WORTH, 60)
    assert (curves.violations == 0).all()
    best = best_value(WORTH, problem, 100.0)
    np.testing.assert_allclose(curves.mean_reward[:, -8:], best, rtol=1e-5)


def test_lin_ts__soft_finds_the_optimum_of_the_composite_reward() -> None:
    problem = make_problem()
    # A pair costs 0.25: the best set holds one, neither none nor the most.
    lam = 1.25
    policy = lin_ts(LinTSConfig(constraints="soft", lam=lam, n_re=10, f_in=4))
    curves = play(policy, problem, WORTH, 60)
    composite = curves.mean_reward - lam * curves.violations / len(EDGES)
    best = best_value(WORTH, problem, lam / len(EDGES))
    np.testing.assert_allclose(composite[:, -8:], best, rtol=1e-5)
    assert (curves.violations[:, -8:] == 1).all()


def test_lin_ts__first_rounds_are_random_whatever_the_block() -> None:
    for n_re, told, expected in (
        (7, 4, [False, False, False, True]),
        (7, 8, [True] * 4),
        (0, 1, [False] * 4),  # one reward is not enough for a line
        (0, 2, [True] * 4),
    ):
        policy = lin_ts(LinTSConfig(n_re=n_re, f_in=4))
        state = policy.init(jax.random.key(0), make_problem())
        for t in range(told):
            state, action = policy.ask(jax.random.key(90), state)
            reward = jnp.float32(np.cos(t))
            state = policy.tell(jax.random.key(91), state, action, reward)
        state = policy.refresh(jax.random.key(5), state)
        assert state.is_model.tolist() == expected


@pytest.mark.parametrize(
    ("num_arms", "k", "edges", "constraints"),
    [
        (1, 1, np.zeros((0, 2), int), "hard"),
        (2, 1, [[0, 1]], "soft"),
        (4, 4, [[0, 1]], "hard"),
        (4, 2, list(itertools.combinations(range(4), 2)), "hard"),
        (5, 2, np.zeros((0, 2), int), "soft"),
    ],
)
def test_lin_ts__tiny_problems(
    num_arms: int, k: int, edges: Any, constraints: str
) -> None:
    policy = lin_ts(LinTSConfig(constraints=constraints, n_re=4, f_in=4))
    problem = make_problem(num_arms, k, edges)
    worth = np.linspace(0.0, 1.0, num_arms)
    curves = play(policy, problem, worth, 24)
    assert np.isfinite(curves.reward).all()
    best = best_value(worth, problem, 5.0 / max(len(edges), 1))
    price = 5.0 / max(len(edges), 1)
    last = curves.mean_reward[:, -4:] - price * curves.violations[:, -4:]
    np.testing.assert_allclose(last, best, rtol=1e-5, atol=1e-6)


def test_lin_ts__survives_rewards_that_are_all_equal() -> None:
    policy = lin_ts(LinTSConfig(n_re=4, f_in=4))
    problem = make_problem()
    state = policy.init(jax.random.key(0), problem)
    for t in range(12):
        if t % 4 == 0:
            state = policy.refresh(jax.random.key(t), state)
        state, action = policy.ask(jax.random.key(100), state)
        state = policy.tell(jax.random.key(101), state, action, jnp.float32(0.5))
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state))
    assert state.is_model.all()


def history(num_rounds: int) -> tuple[np.ndarray, np.ndarray, Any]:
    """Tell a policy random rounds; return X [n, L], r [n] and its state."""
    rng = np.random.default_rng(0)
    policy = lin_ts(LinTSConfig())
    state = policy.init(jax.random.key(0), make_problem())
    tell = jax.jit(policy.tell)
    x = np.zeros((num_rounds, L))
    reward = np.zeros(num_rounds, np.float32)
    for t in range(num_rounds):
        action = rng.permutation(L)[:K].astype(np.int32)
        x[t, action] = 1.0
        reward[t] = 2.0 + x[t] @ WORTH + 0.2 * rng.normal()
        key = jax.random.key(t)
        state = tell(key, state, jnp.asarray(action), jnp.asarray(reward[t]))
    return x, reward.astype(np.float64), jax.device_get(state)


def test_lin_ts__posterior_equals_the_explicit_one() -> None:
    x, reward, state = history(40)
    noise_var, prior_var = 0.04, 0.3
    state = state._replace(
        noise_var=np.float32(noise_var),
        prior_var=np.float32(prior_var),
        fitted=np.int32(40),
    )
    _, draws = lin_ts_lib._sample(state, np.vstack([np.zeros(L), np.eye(L)]), 1.0)
    centred = x - x.mean(axis=0)
    precision = centred.T @ centred / noise_var + np.eye(L) / prior_var
    mean = np.linalg.solve(precision, centred.T @ (reward - reward.mean()) / noise_var)
    np.testing.assert_allclose(draws[0], mean, atol=1e-4)
    # Unit normals give a root of the covariance.
    root = draws[1:] - draws[0]
    np.testing.assert_allclose(root.T @ root, np.linalg.inv(precision), atol=1e-5)


def test_lin_ts__fit_maximises_the_marginal_likelihood() -> None:
    x, reward, _ = history(60)
    centred, gap = x - x.mean(axis=0), reward - reward.mean()
    noise_var, prior_var = 0.0, 0.0
    for _ in range(40):
        noise_var, prior_var = lin_ts_lib._fit(
            centred.T @ centred,
            centred.T @ gap,
            float(gap @ gap),
            60,
            (noise_var, prior_var),
            1e-9,
        )
    basis = np.linalg.svd(np.ones((1, 60)))[2][1:]  # [n - 1, n], orthogonal to 1

    def minus_log_likelihood(log_vars: np.ndarray) -> float:
        noise, prior = np.exp(log_vars)
        cov = basis @ (noise * np.eye(60) + prior * x @ x.T) @ basis.T
        y = basis @ reward
        return float(np.linalg.slogdet(cov)[1] + y @ np.linalg.solve(cov, y))

    found = optimize.minimize(minus_log_likelihood, np.log([0.1, 0.1]))
    np.testing.assert_allclose([noise_var, prior_var], np.exp(found.x), rtol=1e-2)
    assert noise_var == pytest.approx(0.04, rel=0.5)


def test_registry__unknown_names_get_the_nearest_one() -> None:
    assert {"master_slave", *PLAIN, *LEARNED} <= set(POLICIES)
    with pytest.raises(ValueError, match=r"did you mean 'lin_ts'.*choose from master"):
        make_policy("lints", SETTINGS)
    with pytest.raises(ValueError, match="There is no master 'xyz': choose from a, b"):
        check_name("xyz", ("a", "b"), "master")


def test_registry__policies_take_the_settings_they_know() -> None:
    policy = make_policy("lin_ts", SETTINGS | {"f_in": 5, "no_such_setting": 1})
    state = policy.init(jax.random.key(0), make_problem())
    assert state.plan.shape == (5, K)


@pytest.mark.parametrize(
    "bad",
    [
        {"constraints": "firm"},
        {"n_re": -1},
        {"f_in": 0},
        {"num_draws": 0},
        {"lam": -1.0},
        {"lam": float("nan")},
        {"scale": -0.1},
    ],
)
def test_lin_ts_config__refuses_bad_values(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        LinTSConfig(**bad)


def test_random_config__refuses_bad_values() -> None:
    with pytest.raises(ValueError, match="soft or hard"):
        RandomConfig(constraints="firm")


@pytest.mark.parametrize("name", NAMES)
def test_policy__block_lowers_for_every_platform(name: str) -> None:
    policy = make_policy(name, SETTINGS)
    init, play = runner._compiled(policy, linear_step)
    problems = stack_problems([make_problem()] * B)

    def block(data: jax.Array, worth: jax.Array) -> Any:
        keys = jax.random.wrap_key_data(data)
        state = init(keys, problems)
        state, _, record = play(state, worth, keys, problems, 0, 4)
        return record

    data = jax.random.key_data(jax.random.split(jax.random.key(0), B))
    platforms = ("cpu", "cuda", "tpu")
    exported = jax.export.export(jax.jit(block), platforms=platforms)
    assert exported(data, jnp.ones((B, L))).platforms == platforms
