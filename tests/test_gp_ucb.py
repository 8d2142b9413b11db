"""GP-UCB on sets: its posterior, its search, and what it learns."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax import runner
from msb_jax.baselines import gp_ucb as lib
from msb_jax.baselines.gp_ucb import GpUcbConfig, gp_ucb
from msb_jax.masters.evidence import row_noise
from msb_jax.masters.ntk_ucb import NtkUcbState
from msb_jax.problem import Problem, problem_from_conflicts, stack_problems
from msb_jax.solvers import bound_search
from msb_jax.types import Master, Outcome

L, K = 8, 3
EDGES = np.array([[0, 1], [0, 2], [1, 2], [3, 4], [5, 6]])
HARD = GpUcbConfig(constraints="hard", lam=2.0, num_swaps=8, beta=2.0)
SOFT = dataclasses.replace(HARD, constraints="soft")
ALL = np.array(list(itertools.combinations(range(L), K)), np.int32)
IS_FEASIBLE = np.array(
    [not any(set(edge) <= set(s) for edge in EDGES.tolist()) for s in ALL.tolist()]
)


def make_problem(num_arms: int = L, k: int = K, edges: Any = EDGES) -> Problem:
    return problem_from_conflicts(np.asarray(edges), k, num_arms=num_arms)


@functools.cache
def compiled(config: GpUcbConfig) -> tuple[Master, Any, Any, Any]:
    """The Gaussian process, and its update, fit and search under jit."""
    master = lib.make_master(config)
    fit = jax.jit(functools.partial(master.refresh, fit=True))
    look = jax.jit(lambda key, state: lib.search(key, config, master, state))
    return master, jax.jit(master.update), fit, look


def learned(config: GpUcbConfig, num_rounds: int = 12, seed: int = 0) -> NtkUcbState:
    """A Gaussian process that has seen random rounds of a cubic reward."""
    rng = np.random.default_rng(seed)
    worth = rng.uniform(size=L)
    master, update, fit, _ = compiled(config)
    state = master.init(jax.random.key(0), make_problem())
    for t, row in enumerate(rng.integers(0, len(ALL), num_rounds)):
        reward = worth[ALL[row]].sum() ** 3 + 0.1 * rng.normal()
        action = jnp.asarray(ALL[row])
        state = update(jax.random.key(t), state, action, jnp.float32(reward))
    return fit(jax.random.key(2), state)


def dense_posterior(state: NtkUcbState, sets: np.ndarray) -> Any:
    """Mean and variance at sets [N, K] from their definitions, in float64."""
    scales = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.scales)
    count = int(state.history.count)
    rows = np.asarray(state.history.actions)[:count]
    plays = np.asarray(state.history.plays)[:count]
    noise = np.asarray(row_noise(state.scales, jnp.asarray(plays)), np.float64)
    weights = np.exp(scales.log_weights[:2])

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        one = np.zeros((len(a), L))
        other = np.zeros((len(b), L))
        np.put_along_axis(one, a, 1.0, axis=1)
        np.put_along_axis(other, b, 1.0, axis=1)
        rho = one @ other.T / K
        return weights[0] * rho + weights[1] * rho**2

    inverse = np.linalg.inv(kernel(rows, rows) + np.diag(noise))
    rewards = np.asarray(state.history.rewards, np.float64)[:count]
    level = inverse.sum()
    constant = inverse.sum(axis=0) @ rewards / level
    cross = kernel(rows, sets)  # [n, N]
    mean = constant + cross.T @ inverse @ (rewards - constant)
    cov = kernel(sets, sets) - cross.T @ inverse @ cross
    doubt = 1.0 - inverse.sum(axis=0) @ cross
    cov += doubt[:, None] * doubt[None, :] / level
    return mean, scales.deviation**2 * cov


def test_posterior__equals_the_dense_one() -> None:
    state = learned(HARD)
    assert float(state.scales.link.power) == 1.0
    belief = jax.jit(compiled(HARD)[0].belief)(state, jnp.asarray(ALL))
    mean, cov = dense_posterior(state, ALL)
    scale = float(np.diag(cov).max())
    np.testing.assert_allclose(belief.mean, mean, atol=1e-3 * np.sqrt(scale))
    np.testing.assert_allclose(belief.cov, cov, atol=1e-3 * scale)


def test_quadratic__is_the_posterior_mean_of_every_set() -> None:
    state = learned(HARD)
    terrain = lib.survey(HARD, compiled(HARD)[0], state)
    mean, cov = dense_posterior(state, ALL)
    model = jax.tree.map(np.asarray, terrain.model)
    values = [model.pair[np.ix_(s, s)].sum() + model.linear[s].sum() for s in ALL]
    values = np.array(values) + model.offset
    np.testing.assert_allclose(values, mean, atol=1e-3 * np.sqrt(np.diag(cov).max()))


@pytest.mark.parametrize("constraints", ["soft", "hard"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_search__finds_the_optimum_of_the_bound(constraints: str, seed: int) -> None:
    config = HARD if constraints == "hard" else SOFT
    state = learned(config, seed=seed)
    found = compiled(config)[3](jax.random.key(3), state)
    mean, cov = dense_posterior(state, ALL)
    bound = mean + 2.0 * np.sqrt(np.diag(cov))
    pairs = np.array(
        [sum(set(edge) <= set(s) for edge in EDGES.tolist()) for s in ALL.tolist()]
    )
    bound -= np.where(constraints == "hard", 1e6, 2.0 / len(EDGES)) * pairs
    best = ALL[np.argmax(bound)]
    assert sorted(found[0].tolist()) == best.tolist()
    assert constraints == "soft" or IS_FEASIBLE[np.argmax(bound)]


def test_exchanges__are_distinct_allowed_single_swaps() -> None:
    terrain = lib.survey(HARD, compiled(HARD)[0], learned(HARD))
    action = jnp.array([0, 3, 7], jnp.int32)
    sets = np.sort(
        bound_search.exchanges(jax.random.key(4), terrain, action, 30), axis=1
    )
    feasible = {tuple(s) for s in ALL[IS_FEASIBLE].tolist()}
    near = {s for s in feasible if len(set(s) & {0, 3, 7}) == 2}
    # All neighbours, and the set itself where there are no more.
    assert {tuple(s) for s in sets.tolist()} == near | {(0, 3, 7)}
    few = np.sort(bound_search.exchanges(jax.random.key(5), terrain, action, 6), axis=1)
    assert len({tuple(s) for s in few.tolist()} & near) == 6


def test_distinct__keeps_the_best_of_every_set() -> None:
    actions = jnp.array([[0, 1], [1, 0], [2, 3], [4, 5]], jnp.int32)
    values = jnp.array([1.0, 1.0, 3.0, 2.0])
    found = bound_search.distinct(actions, values, 5)
    assert found.tolist() == [[2, 3], [4, 5], [0, 1], [2, 3], [2, 3]]


def cubic_step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, Outcome]:
    mean = (state[action].sum()) ** 3
    return state, Outcome(mean + 0.05 * jax.random.normal(key), mean)


def play(config: GpUcbConfig, problem: Problem, worth: np.ndarray, rounds: int) -> Any:
    return runner.run(
        gp_ucb(config),
        cubic_step,
        jnp.asarray(worth, jnp.float32)[None],
        stack_problems([problem]),
        jax.random.split(jax.random.key(0), 1),
        rounds=rounds,
        f_in=config.f_in,
    )


def test_gp_ucb__learns_a_cubic_reward_without_conflicts() -> None:
    rng = np.random.default_rng(5)
    worth = rng.permutation(np.linspace(0.0, 1.0, 20))
    edges = [[i, i + 1] for i in range(19)]
    problem = make_problem(20, 4, edges)
    config = GpUcbConfig(constraints="hard", n_re=20, f_in=10)
    curves = play(config, problem, worth, 160)
    assert (curves.violations == 0).all()
    best = max(
        worth[list(s)].sum() ** 3
        for s in itertools.combinations(range(20), 4)
        if min(np.diff(s)) > 1
    )
    assert curves.mean_reward[0, :20].mean() < 0.5 * best
    assert curves.mean_reward[0, -30:].mean() > 0.98 * best


def test_gp_ucb__a_block_does_not_repeat_what_it_has_learned() -> None:
    config = GpUcbConfig(n_re=6, f_in=6, beta=3.0)
    policy = gp_ucb(config)
    state = policy.init(jax.random.key(0), make_problem())
    for t in range(6):
        state, action = policy.ask(jax.random.key(10 + t), state)
        reward = jnp.float32(action.sum())
        state = policy.tell(jax.random.key(20 + t), state, action, reward)
    state = policy.refresh(jax.random.key(1), state)
    before = np.diagonal(np.asarray(state.pool.belief.cov))
    state, action = policy.ask(jax.random.key(2), state)
    told = policy.tell(jax.random.key(3), state, action, jnp.float32(-5.0))
    after = np.diagonal(np.asarray(told.pool.belief.cov))
    assert (after <= before + 1e-6).all()
    assert after.sum() < before.sum()
    _, second = policy.ask(jax.random.key(4), told)
    assert sorted(second.tolist()) != sorted(action.tolist())
    # A lost answer leaves everything as it was.
    lost = policy.tell(jax.random.key(5), state, action, jnp.float32(jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, lost, state)


@pytest.mark.parametrize(
    ("num_arms", "k", "edges"),
    [
        (2, 1, [[0, 1]]),
        (4, 4, list(itertools.combinations(range(4), 2))),
    ],
)
def test_gp_ucb__tiny_problems(num_arms: int, k: int, edges: Any) -> None:
    config = GpUcbConfig(constraints="hard", n_re=4, f_in=4, num_steps=2)
    worth = np.linspace(0.0, 1.0, num_arms)
    curves = play(config, make_problem(num_arms, k, edges), worth, 28)
    best = np.sort(worth)[-k:].sum() ** 3
    assert curves.mean_reward[0, -4:].max() == pytest.approx(best, rel=1e-5)


def test_gp_ucb__refuses_more_rounds_than_there_is_room_for() -> None:
    policy = gp_ucb(GpUcbConfig())
    state = policy.init(jax.random.key(0), make_problem())
    history = state.master.history._replace(count=jnp.int32(10_000))
    state = state._replace(master=state.master._replace(history=history))
    with pytest.raises(ValueError, match="call refresh at least every"):
        policy.refresh(jax.random.key(1), state)


@pytest.mark.parametrize(
    "bad",
    [
        {"constraints": "firm"},
        {"n_re": -1},
        {"f_in": 0},
        {"beta": -1.0},
        {"lam": float("nan")},
        {"num_swaps": 0},
        {"pool_size": 0},
    ],
)
def test_gp_ucb_config__refuses_bad_values(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        GpUcbConfig(**bad)
