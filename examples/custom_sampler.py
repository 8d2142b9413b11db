"""Plug a sampler of your own into the agent.

Run: python examples/custom_sampler.py
"""

from __future__ import annotations

import jax
import numpy as np

from msb_jax import runner
from msb_jax.agent.master_slave import MasterSlaveConfig, master_slave
from msb_jax.envs.synthetic import SyntheticConfig, env_state, make_instance, synthetic
from msb_jax.masters.ntk_ucb import NtkUcbConfig, ntk_ucb
from msb_jax.problem import stack_problems
from msb_jax.samplers.base import Context, Sampler, legalise, no_state, no_update
from msb_jax.samplers.random_best import random_best


def greedy_marginals() -> Sampler:
    """Propose noisy greedy sets on the master's marginals."""

    def propose(key: jax.Array, state: tuple, context: Context, n: int) -> jax.Array:
        del state
        view = context.view
        worth = view.marginals
        noise = 0.3 * worth.std() * jax.random.gumbel(key, (n, worth.shape[0]))
        noisy = worth[None, :] + noise
        sets = jax.lax.top_k(noisy, view.problem.k)[1]
        return jax.vmap(legalise, in_axes=(None, 0, 0))(view, sets, noisy)

    return Sampler("greedy_marginals", no_state, propose, no_update)


def main(rounds: int = 200) -> float:
    config = SyntheticConfig(form="linear", num_arms=40, k=5, num_constraints=60)
    instance = make_instance(config, seed=0)
    agent = master_slave(
        ntk_ucb(NtkUcbConfig(constraints="hard")),
        [greedy_marginals(), random_best()],
        MasterSlaveConfig(n_re=80, constraints="hard"),
    )
    curves = runner.run(
        agent,
        synthetic(config).step,
        jax.tree.map(lambda leaf: leaf[None], env_state(instance)),
        stack_problems([instance.problem]),
        jax.random.split(jax.random.key(0), 1),
        rounds=rounds,
        f_in=20,
    )
    fraction = curves.mean_reward[0, -40:].mean() / instance.ground_truth.reward
    shares = np.bincount(curves.origin[0, 80:], minlength=2) / (rounds - 80)
    print(f"last 40 rounds: {fraction:.3f} of the optimum")
    print(f"plays by sampler: {dict(zip(agent.origins, shares.tolist(), strict=True))}")
    return float(fraction)


if __name__ == "__main__":
    main()
