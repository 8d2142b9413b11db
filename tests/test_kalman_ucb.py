"""The master that tracks tastes at two speeds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.agent.master_slave import MasterSlaveConfig, master_slave
from msb_jax.masters.kalman_ucb import (
    LEVEL_VARIANCE,
    MEMORY,
    KalmanUcbConfig,
    KalmanUcbState,
    kalman_ucb,
)
from msb_jax.problem import Problem, problem_from_conflicts, random_sets
from msb_jax.samplers.registry import PLAIN, make_samplers

L, K = 8, 3
ONE = KalmanUcbConfig(taus=(5.0,), slow=(0.3,), noise=(0.2,), static_noise=())
STILL = KalmanUcbConfig(taus=(), noise=(), slow=(1.0,), static_noise=(0.5,))


def small_problem() -> Problem:
    conflicts = np.zeros((L, L), bool)
    conflicts[[0, 1], [1, 0]] = True
    return problem_from_conflicts(conflicts, K)


def tell_all(
    config: KalmanUcbConfig, actions: jax.Array, rewards: np.ndarray
) -> KalmanUcbState:
    master = kalman_ucb(config)
    state = master.init(jax.random.key(0), small_problem())
    update = jax.jit(master.update)
    for action, reward in zip(actions, rewards, strict=True):
        state = update(jax.random.key(1), state, action, jnp.float32(reward))
    return state


def some_rounds(n: int, seed: int = 0) -> tuple[jax.Array, np.ndarray]:
    actions = random_sets(jax.random.key(seed), small_problem(), n)
    rewards = np.random.default_rng(seed).normal(size=n).astype(np.float32)
    return actions, rewards


@pytest.mark.parametrize("config", [ONE, STILL])
def test_belief__is_that_of_the_gaussian_process(config: KalmanUcbConfig) -> None:
    """k(S, t, S', t') = |S and S'| (slow + fast rho^|t - t'|) + the constant's."""
    actions, rewards = some_rounds(15)
    state = tell_all(config, actions, rewards)
    tests = random_sets(jax.random.key(9), small_problem(), 6)
    hot = np.zeros((15 + 6, L))
    for row, action in enumerate(np.concatenate([actions, tests])):
        hot[row, action] = 1.0
    when = np.concatenate([np.arange(15), np.full(6, 15)])
    gap = np.abs(when[:, None] - when[None, :])
    if config is ONE:
        time, noise = 0.3 + np.exp(-gap / 5.0), 0.2
    else:
        time, noise = np.ones_like(gap, float), 0.5
    kernel = (hot @ hot.T) * time + LEVEL_VARIANCE
    gram = kernel[:15, :15] + noise * np.eye(15)
    cross = kernel[:15, 15:]
    mean = cross.T @ np.linalg.solve(gram, rewards)
    cov = kernel[15:, 15:] - cross.T @ np.linalg.solve(gram, cross)
    # The unit of the variances: the mean squared one-step-ahead error.
    white = np.linalg.solve(np.linalg.cholesky(gram), rewards)
    weights = config.forget ** np.arange(14, -1, -1)
    unit = (weights @ white**2 + 1e-4) / (weights.sum() + 1.0)
    belief = kalman_ucb(config).belief(state, tests)
    np.testing.assert_allclose(belief.mean, mean, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(belief.cov, unit * cov, rtol=2e-2, atol=5e-3)
    assert float(belief.noise) == pytest.approx(unit * noise, rel=1e-3)


def test_update__a_lost_reward_lets_time_pass_and_teaches_nothing() -> None:
    actions, rewards = some_rounds(5)
    state = tell_all(ONE, actions, rewards)
    lost = kalman_ucb(ONE).update(
        jax.random.key(0), state, actions[0], jnp.float32(jnp.nan)
    )
    assert int(lost.history.rounds) == 5
    np.testing.assert_array_equal(lost.weight, state.weight)
    np.testing.assert_allclose(lost.mean[:, :L], state.mean[:, :L])
    rho = np.exp(-1.0 / 5.0)
    np.testing.assert_allclose(lost.mean[:, L:-1], rho * state.mean[:, L:-1], rtol=1e-5)


def test_bank__finds_out_whether_tastes_move() -> None:
    rng = np.random.default_rng(1)
    actions = random_sets(jax.random.key(2), small_problem(), 300)
    hot = np.zeros((300, L))
    hot[np.arange(300)[:, None], np.asarray(actions)] = 1.0
    still = hot @ rng.normal(size=L) + 0.1 * rng.normal(size=300)
    fast = np.zeros((300, L))
    rho = np.exp(-1.0 / 7.0)
    for t in range(1, 300):
        fast[t] = rho * fast[t - 1] + np.sqrt(1 - rho**2) * rng.normal(size=L)
    moving = np.sum(hot * fast, axis=1)
    config = KalmanUcbConfig(static_noise=(0.01, 1.0))
    moves = len(config.taus) * len(config.slow) * len(config.noise)

    def misfit(rewards: np.ndarray) -> np.ndarray:
        state = tell_all(config, actions, rewards)
        unit = (state.errors + 1e-4) / (state.weight + 1.0)
        return np.asarray(state.weight * jnp.log(unit) + state.log_sizes)

    assert np.argmin(misfit(still)) >= moves
    best = int(np.argmin(misfit(moving)))
    assert best < moves
    per_tau = len(config.slow) * len(config.noise)
    assert config.taus[best // per_tau] in (7.0, 15.0)


def test_master__follows_a_switch() -> None:
    rng = np.random.default_rng(0)
    actions = random_sets(jax.random.key(2), small_problem(), 240)
    hot = np.zeros((240, L))
    hot[np.arange(240)[:, None], np.asarray(actions)] = 1.0
    first = np.linspace(0.0, 1.0, L)
    theta = np.where(np.arange(240)[:, None] < 180, first, first[::-1])
    rewards = np.sum(hot * theta, axis=1) + 0.01 * rng.normal(size=240)
    state = tell_all(KalmanUcbConfig(), actions, rewards)
    worth = np.asarray(kalman_ucb().marginals(state))
    assert set(np.argsort(-worth)[:K]) == {0, 1, 2}


def test_refresh__keeps_the_last_rounds_and_their_present_values() -> None:
    actions, rewards = some_rounds(MEMORY + 10)
    state = tell_all(STILL, actions, rewards)
    master = kalman_ucb(STILL)
    fresh = master.refresh(jax.random.key(0), state)
    assert int(fresh.history.count) == MEMORY == int(fresh.history.absorbed)
    assert int(fresh.history.rounds) == MEMORY + 10
    np.testing.assert_array_equal(fresh.history.actions[0], actions[10])
    fitted = np.asarray(master.fitted(fresh))[:MEMORY]
    expected = np.asarray(master.belief(fresh, actions[10:]).mean)
    np.testing.assert_allclose(fitted, expected, rtol=1e-5, atol=1e-5)


def test_draws__have_the_mean_and_the_spread_of_the_belief() -> None:
    actions, rewards = some_rounds(10)
    state = tell_all(ONE, actions, rewards)
    master = kalman_ucb(ONE)
    arms = jnp.arange(L)
    draws = master.draws(jax.random.key(3), state, arms, 4000)
    model = master.quadratic(state, arms)
    assert not np.asarray(model.pair).any()
    tests = random_sets(jax.random.key(4), small_problem(), 5)
    values = np.asarray(draws.linear)[:, np.asarray(tests)].sum(axis=2)
    values += np.asarray(draws.offset)[:, None]
    belief = master.belief(state, tests)
    deviation = np.sqrt(np.diagonal(belief.cov))
    np.testing.assert_allclose(values.std(axis=0), deviation, rtol=0.06)
    np.testing.assert_allclose(
        values.mean(axis=0), belief.mean, atol=0.08 * deviation.max()
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"taus": (0.0,)}, "taus must be positive"),
        ({"slow": ()}, "bank of filters is empty"),
        ({"forget": 0.0}, "forget must be in"),
        ({"radius": -1.0}, "radius must not be negative"),
        ({"constraints": "some"}, "constraints must be one of"),
    ],
)
def test_config__says_what_is_wrong(settings: dict, sentence: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=sentence):
        KalmanUcbConfig(**settings)


def test_memory__is_that_of_the_chosen_filter() -> None:
    actions, rewards = some_rounds(5)
    moving = tell_all(ONE, actions, rewards)
    assert ONE.taus == (5.0,)
    memory = kalman_ucb(ONE).memory
    assert memory is not None and float(memory(moving)) == pytest.approx(10.0)
    still = kalman_ucb(STILL).memory
    assert still is not None and np.isinf(still(tell_all(STILL, actions, rewards)))


@pytest.mark.parametrize(("size", "k"), [(2, 1), (3, 3), (1, 1)])
def test_agent__tiny_problems_where_everything_conflicts(size: int, k: int) -> None:
    problem = problem_from_conflicts(~np.eye(size, dtype=bool), k)
    agent = master_slave(
        kalman_ucb(KalmanUcbConfig(constraints="hard", block=4)),
        make_samplers(PLAIN),
        MasterSlaveConfig(n_re=4, f_in=4, n_es=3, num_draws=2, constraints="hard"),
    )
    state = agent.init(jax.random.key(0), problem)
    ask, tell = jax.jit(agent.ask), jax.jit(agent.tell)
    for t in range(12):
        keys = jax.random.split(jax.random.key(t), 3)
        state = agent.refresh(keys[0], state) if t % 4 == 0 else state
        state, action = ask(keys[1], state)
        assert len(set(np.asarray(action).tolist())) == k
        state = tell(keys[2], state, action, jnp.float32(action[0]))
    if size == 2:
        assert np.asarray(action).tolist() == [1]


def test_agent__plays_by_what_the_master_thinks_now() -> None:
    """Between two refreshes too, and without a joint belief over the pool."""
    master = kalman_ucb(KalmanUcbConfig(lam=0.0, block=8))
    config = MasterSlaveConfig(n_re=8, f_in=8, n_es=4, num_draws=2, lam=0.0)
    agent = master_slave(master, make_samplers(PLAIN), config)
    state = agent.init(jax.random.key(0), small_problem())
    ask, tell = jax.jit(agent.ask), jax.jit(agent.tell)
    tops = []
    for t in range(24):
        keys = jax.random.split(jax.random.key(t), 3)
        state = agent.refresh(keys[0], state) if t % 8 == 0 else state
        assert state.pool.belief is None
        pool = state.pool.actions
        state, action = ask(keys[1], state)
        if t >= 8:
            belief = master.belief(state.master, pool)
            bound = belief.mean + 3.0 * np.sqrt(np.diagonal(belief.cov))
            tops.append(np.asarray(action).tolist())
            row = np.flatnonzero((pool == action[None, :]).all(axis=1))[0]
            assert bound[row] >= bound.max() - 1e-4
        # What it plays is worth nothing, so that it must go on to another set.
        reward = jnp.float32(action[0]) if t < 8 else jnp.float32(-1.0)
        state = tell(keys[2], state, action, reward)
    assert len({tuple(top) for top in tops[:8]}) > 1


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_master__lowers_for_accelerators(platform: str) -> None:
    master = kalman_ucb(ONE)
    state = master.init(jax.random.key(0), small_problem())
    actions = random_sets(jax.random.key(1), small_problem(), 4)
    for function, args in (
        (master.update, (jax.random.key(0), state, actions[0], jnp.float32(0.5))),
        (master.belief, (state, actions)),
        (master.refresh, (jax.random.key(0), state)),
    ):
        made = jax.export.export(jax.jit(function), platforms=[platform])(*args)
        assert made.platforms == (platform,)
