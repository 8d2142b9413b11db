"""The sampler that learns from clicks, and the agent that has it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax import runner
from msb_jax.baselines.registry import make_policy
from msb_jax.envs import cascading
from msb_jax.problem import (
    problem_from_conflicts,
    stack_problems,
    violated_pairs,
)
from msb_jax.samplers.clicks import ClicksConfig, ClicksState, clicks, exposure
from msb_jax.spaces.ordered import decode, placement_problem
from msb_jax.types import Outcome

ITEMS, K = 12, 4
SETTINGS = {"n_re": 300, "constraints": "hard", "is_ordered": True, "target": "reward"}
SETTINGS |= {"fit_power": False, "radius": 0.5, "explore": 0.0}


def test_exposure__tells_places_from_items() -> None:
    """Expected clicks of known rates are taken apart again."""
    rng = np.random.default_rng(0)
    rates, kappa = rng.uniform(0.1, 0.9, ITEMS), np.array([1.0, 0.7, 0.4, 0.2])
    shown = rng.integers(1000, 9000, (ITEMS, K)).astype(float)
    state = ClicksState(
        shown=jnp.asarray(shown, jnp.float32),
        hits=jnp.asarray(shown * rates[:, None] * kappa, jnp.float32),
    )
    hits, seen = exposure(state)
    np.testing.assert_allclose(seen, shown @ kappa, rtol=0.03)
    np.testing.assert_allclose(hits / seen, rates, rtol=0.03)


def test_clicks__counts_by_item_and_place() -> None:
    problem = placement_problem(
        problem_from_conflicts(np.zeros((ITEMS, ITEMS), bool), K)
    )
    sampler = clicks(ClicksConfig(target="reward"))
    assert sampler.tell_clicks is not None
    state = sampler.init(jax.random.key(0), problem)
    action = jnp.array([5, ITEMS + 2, 2 * ITEMS + 7, 3 * ITEMS + 1])
    clicked = jnp.array([1.0, 1.0, -1.0, -1.0])  # unknown below the last click
    state = sampler.tell_clicks(state, action, jnp.ones(()), clicked)
    np.testing.assert_array_equal(np.argwhere(state.shown), [[2, 1], [5, 0]])
    np.testing.assert_array_equal(np.argwhere(state.hits), [[2, 1]])
    lost = sampler.tell_clicks(state, action, jnp.array(jnp.nan), clicked * jnp.nan)
    np.testing.assert_array_equal(lost.shown, state.shown)


@pytest.mark.slow
def test_agent__proposes_by_clicks() -> None:
    """After random rounds what it proposes is near the best list on the average."""
    config = cascading.CascadingConfig(num_arms=30, k=K, num_constraints=40)
    instance = cascading.make_instance(config, 1)
    env = cascading.env_state(instance)
    agent = make_policy("master_slave", SETTINGS | {"samplers": ("clicks:2",)})
    assert agent.tell_clicks is not None
    ask, tell = jax.jit(agent.ask), jax.jit(agent.tell_clicks)
    state, rewards = agent.init(jax.random.key(0), instance.problem), []
    for t in range(SETTINGS["n_re"]):
        keys = jax.random.split(jax.random.key(t), 4)
        state = agent.refresh(keys[0], state) if t % 20 == 0 else state
        state, action = ask(keys[1], state)
        _, outcome = cascading.step(keys[2], env, action)
        state = tell(keys[3], state, action, outcome.reward, outcome.clicks)
        rewards.append(float(outcome.mean_reward))
    state = agent.refresh(jax.random.key(-1), state)
    lists = decode(state.problem, state.inner.pool.actions)
    keys = jax.random.split(jax.random.key(7), len(lists))
    _, outcomes = jax.vmap(cascading.step, (0, None, 0))(keys, env, lists)
    best = instance.ground_truth.reward
    assert float(outcomes.mean_reward.mean()) > 0.95 * best
    assert np.mean(rewards) < 0.8 * best
    assert not np.asarray(violated_pairs(instance.problem, lists)).any()


def test_agent__with_clicks_says_where_there_are_none() -> None:
    def step(key: jax.Array, state: Any, action: jax.Array) -> Any:
        mean = state[action].sum()
        return state, Outcome(mean + jax.random.normal(key), mean)

    problem = problem_from_conflicts(np.zeros((ITEMS, ITEMS), bool), K)
    agent = make_policy("master_slave", {"samplers": ("clicks",)})
    with pytest.raises(ValueError, match="sampler clicks learns from clicks, and"):
        runner.run(
            agent,
            step,
            jnp.ones((1, ITEMS)),
            stack_problems([problem]),
            jax.random.split(jax.random.key(0), 1),
            rounds=4,
            f_in=2,
        )
