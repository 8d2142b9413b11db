"""Ordered lists: a user reads from the top until an item satisfies.

    python -m experiments.cascading

Defaults are the paper's cascade (100 items, lists of 10, gamma 0.9, 5,000 rounds). The
agent is told the reward alone, 1 or 0; the cascade baselines are told the clicks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments import harness
from experiments.flags import flag
from experiments.instances import InstanceFlags, put_side_by_side
from experiments.progress import Progress
from msb_jax.baselines.registry import CASCADE_POLICIES
from msb_jax.envs import cascading as env

# A reward of 0 or 1 has no other scale to be seen on, and is mostly noise: with the
# radius of the other experiments the agent would explore placements for ever.
SETTINGS = {"is_ordered": True, "fit_power": False, "radius": 0.5, "explore": 0.0}
QUICK = {"num_arms": 30, "k": 5, "rounds": 600, "num_seeds": 2}


@dataclass(frozen=True, kw_only=True)
class Config(InstanceFlags):
    """Flags of the experiment; defaults are the paper's, where it has them."""

    policies: tuple[str, ...] = flag(
        ("master_slave", "cascade_kl_ucb", "cascade_lsb", "cascade_hybrid", "random"),
        f"who plays; all: {', '.join(CASCADE_POLICIES)}",
    )
    num_arms: int = flag(100, "items, L")
    k: int = flag(10, "places of a list, K")
    gamma: float = flag(0.9, "chance to go on to the next place")
    feature_dim: int = flag(10, "features of an item, D")
    target: str = flag(
        "reward",
        "what the cascade baselines learn from clicks: that an item is clicked, or "
        "that it satisfies (its click was the last one and the reward 1)",
        ("clicks", "reward"),
    )
    num_constraints: int | None = flag(
        None, "conflicting pairs, M; not given or -1: the paper's density, 0: none"
    )

    def __post_init__(self) -> None:
        count = None if self.num_constraints == -1 else self.num_constraints
        object.__setattr__(self, "num_constraints", count)
        self.settle(self.num_arms, CASCADE_POLICIES, {"num_arms": 1, "k": 1})
        self.setting()

    def setting(self) -> env.CascadingConfig:
        """Return the part of the config that the environment knows."""
        return env.CascadingConfig(
            num_arms=self.num_arms,
            k=self.k,
            gamma=self.gamma,
            feature_dim=self.feature_dim,
            num_constraints=self.num_constraints,
        )


def prepare(config: Config, folder: Path, progress: Progress) -> harness.Task:
    """Make the instances; each takes a second at most and none is stored."""
    del folder
    setting = config.setting()

    def make(seed: int) -> tuple:
        instance = env.make_instance(setting, seed)
        return env.env_state(instance), instance.problem, instance.ground_truth

    title = (
        f"Cascade: lists of {config.k} of {config.num_arms} items, "
        f"{setting.num_conflicts} conflicts, {config.constraints} constraints"
    )
    return put_side_by_side(config, make, env.step, title, progress)


EXPERIMENT = harness.Experiment(
    name="cascading",
    config_class=Config,
    label=lambda config: "cascading",
    prepare=prepare,
    quick=QUICK,
    settings=lambda config: SETTINGS,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment and return the exit code."""
    return harness.main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(main())
