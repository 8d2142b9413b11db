"""The discounted peer, the diagonal confidence and the oracle."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.tables import paired_table
from msb_jax import runner
from msb_jax.baselines import lin_ts as lin_ts_lib
from msb_jax.baselines.d_lin_ts import DLinTSConfig, d_lin_ts
from msb_jax.baselines.lin_ts import LinTSConfig, lin_ts
from msb_jax.baselines.oracle import oracle
from msb_jax.baselines.registry import make_policy
from msb_jax.problem import make_problem, problem_from_conflicts, stack_problems
from msb_jax.samplers.registry import PLAIN
from msb_jax.types import Outcome, Policy

L, K = 8, 3
SETTINGS = {"lam": 5.0, "constraints": "hard", "n_re": 8, "f_in": 4, "n_es": 3}
SETTINGS |= {"samplers": PLAIN}


def problem_of(num_arms: int = L, k: int = K) -> Any:
    return problem_from_conflicts(np.array([[0, 1]]), k, num_arms=num_arms)


def test_d_lin_ts__posterior_weighs_rounds_by_age() -> None:
    gamma, rounds = 0.9, 30
    policy = d_lin_ts(DLinTSConfig(gamma=gamma))
    state = policy.init(jax.random.key(0), problem_of())
    rng = np.random.default_rng(0)
    x, reward = np.zeros((rounds, L)), rng.normal(size=rounds).astype(np.float32)
    for t in range(rounds):
        action = rng.permutation(L)[:K].astype(np.int32)
        x[t, action] = 1.0
        state = policy.tell(jax.random.key(t), state, jnp.asarray(action), reward[t])
    noise_var, prior_var = 0.04, 0.3
    run = jax.device_get(state)._replace(
        noise_var=np.float32(noise_var),
        prior_var=np.float32(prior_var),
        fitted=np.int32(rounds),
    )
    _, draws = lin_ts_lib._sample(run, np.vstack([np.zeros(L), np.eye(L)]), gamma)
    weight = gamma ** np.arange(rounds)[::-1]
    centred = x - weight @ x / weight.sum()
    gap = reward - weight @ reward / weight.sum()
    precision = (centred.T * weight) @ centred / noise_var + np.eye(L) / prior_var
    mean = np.linalg.solve(precision, (centred.T * weight) @ gap / noise_var)
    np.testing.assert_allclose(draws[0], mean, atol=1e-4)
    root = draws[1:] - draws[0]
    np.testing.assert_allclose(root.T @ root, np.linalg.inv(precision), atol=1e-4)


def test_d_lin_ts__survives_two_sets_for_thousands_of_rounds() -> None:
    """What is left of the sums after centring is then mostly rounding."""
    num_arms, k, gamma = 60, 20, 0.999
    policy = d_lin_ts(DLinTSConfig(gamma=gamma))
    rng = np.random.default_rng(0)
    worth = rng.random(num_arms)
    actions = np.stack([rng.permutation(num_arms)[:k] for _ in range(9000)])
    actions[100:] = actions[np.arange(8900) % 2]
    rewards = jnp.asarray(worth[actions].sum(1), jnp.float32)

    def tell(state: Any, pair: Any) -> tuple[Any, None]:
        return policy.tell(jax.random.key(0), state, *pair), None

    state = policy.init(jax.random.key(0), problem_of(num_arms, k))
    pairs = (jnp.asarray(actions, jnp.int32), rewards)
    state = jax.jit(lambda s, p: jax.lax.scan(tell, s, p)[0])(state, pairs)
    _, draws = lin_ts_lib._sample(
        jax.device_get(state), rng.normal(size=(4, num_arms)), gamma
    )
    assert np.isfinite(draws).all()


def test_d_lin_ts__without_discount_is_lin_ts() -> None:
    problem = problem_of()
    states = []
    for policy in (d_lin_ts(DLinTSConfig(gamma=1.0)), lin_ts(LinTSConfig())):
        state = policy.init(jax.random.key(0), problem)
        for t in range(5):
            action = jnp.array([t, t + 1, t + 3], jnp.int32)
            state = policy.tell(jax.random.key(t), state, action, jnp.float32(0.1 * t))
        states.append(state)
    jax.tree.map(np.testing.assert_array_equal, *states)


def late_reward(policy: Policy, rounds: int = 800) -> float:
    """Mean reward of the last quarter where the worth of the arms turns round."""
    worth = jnp.linspace(0.0, 1.0, 12)

    def step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, Outcome]:
        now = jnp.where(state < rounds // 2, worth, worth[::-1])
        mean = jnp.sum(now[action])
        return state + 1, Outcome(mean + 0.05 * jax.random.normal(key), mean)

    curves = runner.run(
        policy,
        step,
        jnp.zeros((1,), jnp.int32),
        stack_problems([problem_of(12)]),
        jax.random.split(jax.random.key(0), 1),
        rounds=rounds,
        f_in=4,
    )
    return float(curves.mean_reward[:, -rounds // 4 :].mean())


def test_d_lin_ts__follows_a_change_that_lin_ts_misses() -> None:
    common = {"n_re": 24, "f_in": 4}
    assert late_reward(d_lin_ts(DLinTSConfig(gamma=0.97, **common))) > 2.3
    assert late_reward(lin_ts(LinTSConfig(**common))) < 2.0


@pytest.mark.parametrize("gamma", [0.0, 1.1, float("nan")])
def test_d_lin_ts_config__refuses_bad_discounts(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma must be in"):
        DLinTSConfig(gamma=gamma)


def test_lin_ts__learns_nothing_from_a_lost_answer() -> None:
    policy = lin_ts(LinTSConfig())
    state = policy.init(jax.random.key(0), problem_of())
    action = jnp.arange(K, dtype=jnp.int32)
    told = policy.tell(jax.random.key(1), state, action, jnp.float32(jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, told, state)


def test_oracle__plays_the_best_set_of_its_own_problem() -> None:
    rng = np.random.default_rng(0)
    problems = stack_problems(
        [make_problem(rng.random((L, 4)), K, num_conflicts=3) for _ in range(3)]
    )
    best = np.array([[0, 1, 2], [2, 3, 4], [5, 6, 7]])
    policy = make_policy("oracle", {"truth": (problems, best)})
    keys = jax.random.split(jax.random.key(0), 3)
    states = jax.vmap(policy.init)(keys, problems)
    np.testing.assert_array_equal(states.action, best)
    one = jax.tree.map(lambda leaf: leaf[1], problems)
    state = oracle(problems, best).init(jax.random.key(1), one)
    np.testing.assert_array_equal(policy.ask(jax.random.key(2), state)[1], best[1])


def test_oracle__needs_a_ground_truth() -> None:
    with pytest.raises(ValueError, match="oracle needs a ground truth"):
        make_policy("oracle", SETTINGS)


def test_neural_diag__has_the_samplers_of_the_agent_and_a_diagonal() -> None:
    policy = make_policy("neural_diag", SETTINGS)
    assert policy.origins == make_policy("master_slave", SETTINGS).origins
    state = policy.init(jax.random.key(0), problem_of())
    exact = make_policy("master_slave", SETTINGS | {"master": "neural_ucb"})
    other = exact.init(jax.random.key(0), problem_of())
    shapes = [jax.tree.map(jnp.shape, s.master.confidence) for s in (state, other)]
    assert shapes[0] != shapes[1]


def test_paired_table__counts_seeds_and_differences() -> None:
    def entry(values: list[float], pairs: list[float]) -> dict[str, Any]:
        net = (np.array(values) - 0.1 * np.array(pairs)).tolist()
        by_seed = {"gt_fraction": values, "composite_mean": net}
        return {"by_seed": by_seed | {"violated_pairs": pairs}}

    ours = entry([0.9, 0.8, 0.7], [0.0, 0.0, 0.0])
    text = paired_table(
        {"master_slave": ours, "other": entry([0.8, 0.9, 0.6], [1.0, 2.0, 3.0])}
    )
    row = [cell.strip() for cell in text.splitlines()[-1].strip("|").split("|")]
    differences = ["-0.0333 ± 0.0667", "2 of 3", "-0.2333 ± 0.0882", "+2.00 ± 0.58"]
    assert row == ["other", *differences]
    rounded = entry([0.9 - 1e-8, 0.8 - 1e-8, 0.7], [0.0, 0.0, 0.0])
    assert "0 of 3" in paired_table({"master_slave": ours, "same": rounded})
    assert paired_table({"master_slave": ours}) == ""
    assert paired_table({"other": ours, "more": ours}) == ""
