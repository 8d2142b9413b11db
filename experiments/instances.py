"""What the experiments with generated instances other than `synthetic` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import harness
from experiments.flags import flag
from experiments.progress import Progress
from experiments.run_flags import SAMPLERS_HELP, RunFlags
from experiments.synthetic import describe_truth
from msb_jax.envs.synthetic import GroundTruth
from msb_jax.problem import Problem, stack_problems
from msb_jax.rng import stream
from msb_jax.samplers.registry import PLAIN
from msb_jax.types import EnvStep, State


@dataclass(frozen=True, kw_only=True)
class InstanceFlags(RunFlags):
    """Flags of a run on generated instances."""

    rounds: int = flag(5000, "rounds, T")
    samplers: tuple[str, ...] = flag(PLAIN, SAMPLERS_HELP)
    n_re: int | None = flag(None, "random rounds at the start; not given or -1: 2L")

    def settle(
        self,
        num_arms: int,
        known: Mapping[str, Any],
        least: Mapping[str, float],
    ) -> None:
        """Fill in what the flags leave open, and say what is wrong with them.

        Args:
            num_arms: L.
            known: policies that can play here.
            least: lower limits of the subclass's own numbers.
        """
        if self.n_re is None or self.n_re == -1:
            object.__setattr__(self, "n_re", 2 * num_arms)
        self.check({"rounds": 1, "n_re": 0} | dict(least), known)


def put_side_by_side(
    config: Any,
    make: Callable[[int], tuple[State, Problem, GroundTruth]],
    env_step: EnvStep,
    title: str,
    progress: Progress,
) -> harness.Task:
    """Make the instance of every seed and put them side by side.

    Args:
        make: seed -> state of the environment, problem, ground truth.
    """
    seeds = range(config.seed, config.seed + config.num_seeds)
    progress.start("ground truth", config.num_seeds, unit="instance")
    made = []
    for seed in seeds:
        made.append(make(seed))
        progress.update(len(made))
    progress.stop()
    states, problems, truths = zip(*made, strict=True)
    return harness.Task(
        env_step=env_step,
        env_states=jax.tree.map(lambda *leaves: jnp.stack(leaves), *states),
        problems=stack_problems(problems),
        keys=jnp.stack([stream(jax.random.key(seed), "run") for seed in seeds]),
        ground_truth=[
            describe_truth(seed, truth)
            for seed, truth in zip(seeds, truths, strict=True)
        ],
        title=title,
        best_actions=np.stack([truth.action for truth in truths]),
    )
