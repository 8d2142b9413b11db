"""Recommend sets for your own reward function, one ask and one tell a round.

Run: python examples/ask_tell.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax.agent.master_slave import MasterSlaveConfig, master_slave
from msb_jax.masters.ntk_ucb import NtkUcbConfig, ntk_ucb
from msb_jax.problem import make_problem, violated_pairs
from msb_jax.samplers.registry import make_samplers

F_IN = 10  # rounds between two refreshes


def clicks(shown: np.ndarray, taste: np.ndarray, rng: np.random.Generator) -> float:
    """Your system goes here: one number for the whole set."""
    return float(np.tanh(taste[shown].sum() / 3.0) + 0.02 * rng.normal())


def main(rounds: int = 150) -> list[float]:
    rng = np.random.default_rng(0)
    features = rng.random((40, 5))  # 40 items
    taste = rng.random(40)  # unknown to the agent
    problem = make_problem(features, k=5, num_conflicts=60)  # 60 pairs too alike

    agent = master_slave(
        ntk_ucb(NtkUcbConfig(constraints="hard", block=F_IN)),
        make_samplers(["solver", "random_best", "teacher_student"]),
        MasterSlaveConfig(n_re=60, f_in=F_IN, constraints="hard"),
    )
    ask, tell = jax.jit(agent.ask), jax.jit(agent.tell)
    state = agent.init(jax.random.key(0), problem)
    rewards = []
    for t in range(rounds):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(1), t), 3)
        if t % F_IN == 0:
            state = agent.refresh(keys[0], state)
        state, action = ask(keys[1], state)
        reward = clicks(np.asarray(action), taste, rng)
        state = tell(keys[2], state, action, jnp.asarray(reward))
        rewards.append(reward)
    print(f"first 50 rounds: {np.mean(rewards[:50]):.3f}")
    print(f"last 50 rounds:  {np.mean(rewards[-50:]):.3f}")
    print(f"conflicts in the last set: {int(violated_pairs(problem, action))}")
    return rewards


if __name__ == "__main__":
    main()
