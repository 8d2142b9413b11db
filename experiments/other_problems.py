"""The same agent on other combinatorial problems.

    python -m experiments.other_problems --problem=shortest_path

`shortest_path`: the quickest way through a grid of unknown delays, told the time of the
whole path. `max_coverage`: k sets that cover the most, told the weight of all that is
covered. `position_based`: lists whose places are seen with falling chance, told the sum
of what is liked where it is seen.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from experiments import harness
from experiments.flags import flag
from experiments.instances import InstanceFlags, put_side_by_side
from experiments.progress import Progress
from msb_jax.baselines.registry import (
    COVERAGE_POLICIES,
    PATH_POLICIES,
    POSITION_POLICIES,
)
from msb_jax.envs import max_coverage, position_based, shortest_path
from msb_jax.types import EnvStep

QUICK = {"grid": 5, "num_arms": 30, "k": 5, "rounds": 400, "num_seeds": 2}


class Kind(NamedTuple):
    """A problem, the policies that can play it and those that do by default."""

    policies: Mapping[str, Any]
    default: tuple[str, ...]


KINDS = {
    "shortest_path": Kind(PATH_POLICIES, ("master_slave", "path_ts", "random")),
    "max_coverage": Kind(
        COVERAGE_POLICIES, ("master_slave", "coverage_ts", "lin_ts", "random")
    ),
    "position_based": Kind(
        POSITION_POLICIES, ("master_slave", "pbm_ucb", "pbm_lin_ucb", "random")
    ),
}


@dataclass(frozen=True, kw_only=True)
class Config(InstanceFlags):
    """Flags of the experiment."""

    problem: str = flag("shortest_path", f"{', '.join(KINDS)}", tuple(KINDS))
    policies: tuple[str, ...] = flag(
        (), "who plays; not given: the agent, the problem's own peers and random"
    )
    grid: int = flag(10, "nodes of a side (shortest_path)")
    num_arms: int = flag(100, "sets or items, L (the other problems)")
    k: int = flag(10, "sets or places, K (the other problems)")
    num_constraints: int = flag(0, "conflicting pairs (position_based)")
    decay: float = flag(0.9, "of being seen, place by place (position_based)")
    noise_std: float = flag(0.1, "noise of a reward, before scaling")

    def __post_init__(self) -> None:
        if self.problem not in KINDS:
            raise ValueError(f"--problem must be one of {', '.join(KINDS)}.")
        kind = KINDS[self.problem]
        if not self.policies:
            object.__setattr__(self, "policies", kind.default)
        arms = self.num_arms
        if self.problem == "shortest_path":
            arms = 2 * self.grid * (self.grid - 1)
        least = {"grid": 2, "num_arms": 1, "k": 1, "noise_std": 0}
        self.settle(arms, kind.policies, least | {"num_constraints": 0})
        self.setting()

    def setting(self) -> Any:
        """Return the part of the config that the environment knows."""
        if self.problem == "shortest_path":
            return shortest_path.ShortestPathConfig(
                rows=self.grid, columns=self.grid, noise_std=self.noise_std
            )
        if self.problem == "max_coverage":
            return max_coverage.MaxCoverageConfig(
                num_arms=self.num_arms, k=self.k, noise_std=self.noise_std
            )
        return position_based.PositionBasedConfig(
            num_arms=self.num_arms,
            k=self.k,
            num_constraints=self.num_constraints,
            decay=self.decay,
            noise_std=self.noise_std,
        )


def prepare(config: Config, folder: Path, progress: Progress) -> harness.Task:
    """Make the instances; each takes a few seconds at most and none is stored."""
    del folder
    setting = config.setting()

    def make_plain(seed: int) -> tuple:
        module = shortest_path if config.problem == "shortest_path" else max_coverage
        instance = module.make_instance(setting, seed)
        return instance.state, instance.state.problem, instance.ground_truth

    def make_lists(seed: int) -> tuple:
        instance = position_based.make_instance(setting, seed)
        state = position_based.env_state(instance)
        return state, instance.problem, instance.ground_truth

    choose = f"{config.k} of {config.num_arms}"
    kinds: dict[str, tuple[Any, EnvStep, str]] = {
        "shortest_path": (
            make_plain,
            shortest_path.step,
            f"Shortest path, {config.grid} x {config.grid} nodes",
        ),
        "max_coverage": (
            make_plain,
            max_coverage.step,
            f"Maximum coverage, {choose} sets",
        ),
        "position_based": (
            make_lists,
            position_based.step,
            f"Position-based: lists of {choose} items, "
            f"{config.num_constraints} conflicts, {config.constraints} constraints",
        ),
    }
    make, step, title = kinds[config.problem]
    return put_side_by_side(config, make, step, title, progress)


EXPERIMENT = harness.Experiment(
    name="other_problems",
    config_class=Config,
    label=lambda config: config.problem,
    prepare=prepare,
    quick=QUICK,
    settings=lambda config: {"is_ordered": config.problem == "position_based"},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment and return the exit code."""
    return harness.main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(main())
