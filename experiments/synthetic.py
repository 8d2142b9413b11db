"""The main experiment: learn the best K of L arms of a synthetic problem.

    python -m experiments.synthetic --form=cubic

Defaults are the paper's synthetic setting (L=300, K=20, 3,962 conflicts, 5,000
rounds) with three seeds. Every seed is an instance of its own: features, conflicts,
weights and ground truth. Policies are told noisy rewards in units of the largest
reward that any set has.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import harness
from experiments.flags import UsageError, flag
from experiments.progress import Progress
from experiments.run_flags import RunFlags
from msb_jax.atomic import atomic_file
from msb_jax.envs import synthetic as env
from msb_jax.envs.synthetic import DENSITY, FORMS, GroundTruth, Instance
from msb_jax.problem import (
    independence_check,
    problem_from_conflicts,
    stack_problems,
)
from msb_jax.rng import stream
from msb_jax.samplers.registry import PLAIN

INSTANCES = "instances.npz"
QUICK = {
    "num_arms": 60,
    "k": 6,
    "rounds": 600,
    "num_seeds": 2,
    "samplers": PLAIN,  # to train the others takes longer than the whole run
}


@dataclass(frozen=True, kw_only=True)
class Config(RunFlags):
    """Flags of the experiment; defaults are the paper's, where it has them."""

    form: str = flag("cubic", f"reward: {', '.join(FORMS)}", FORMS)
    rounds: int = flag(5000, "rounds, T")
    num_arms: int = flag(300, "arms, L")
    k: int = flag(20, "arms in an action, K")
    num_constraints: int | None = flag(
        None, "conflicting pairs, M; not given or -1: the paper's density (3962)"
    )
    feature_dim: int = flag(10, "features of an arm, D")
    noise_std: float = flag(0.1, "noise of a reward, before scaling")
    n_re: int | None = flag(None, "random rounds at the start; not given or -1: 2L")

    def __post_init__(self) -> None:
        pairs = max(0, self.num_arms * (self.num_arms - 1) // 2)
        count, warm_up = self.num_constraints, self.n_re
        if count is None or count == -1:
            count = round(DENSITY * pairs)
        if warm_up is None or warm_up == -1:
            warm_up = 2 * self.num_arms
        object.__setattr__(self, "num_constraints", count)
        object.__setattr__(self, "n_re", warm_up)
        if self.form not in FORMS:
            raise ValueError(f"--form must be one of {', '.join(FORMS)}.")
        least = {"rounds": 1, "num_arms": 1, "k": 1, "feature_dim": 1, "noise_std": 0}
        self.check(least | {"n_re": 0, "num_constraints": 0})
        if self.k > self.num_arms:
            raise ValueError(
                f"--k={self.k} is more than there are arms (--num_arms="
                f"{self.num_arms}); an action is K of the L arms."
            )
        if count > pairs:
            raise ValueError(
                f"--num_constraints={count} is more than the {pairs} pairs of "
                f"{self.num_arms} arms."
            )

    def setting(self) -> env.SyntheticConfig:
        """Return the part of the config that the environment knows."""
        names = [field.name for field in dataclasses.fields(env.SyntheticConfig)]
        return env.SyntheticConfig(**{name: getattr(self, name) for name in names})


def prepare(config: Config, folder: Path, progress: Progress) -> harness.Task:
    """Make the instances and their ground truths, or read them from the folder."""
    seeds = range(config.seed, config.seed + config.num_seeds)
    instances = make_instances(config, seeds, folder / INSTANCES, progress)
    notes = []
    for seed, instance in zip(seeds, instances, strict=True):
        if (sentence := independence_check(instance.problem)) is not None:
            notes.append(f"Seed {seed}: {sentence}")
            progress.say(f"warning: {notes[-1]}")
    return make_task(config, instances, notes)


def make_task(
    config: Config, instances: Sequence[Instance], notes: Sequence[str] = ()
) -> harness.Task:
    """Put the instances of the seeds side by side."""
    seeds = range(config.seed, config.seed + config.num_seeds)
    states = [env.env_state(instance) for instance in instances]
    return harness.Task(
        env_step=env.synthetic(config.setting()).step,
        env_states=jax.tree.map(lambda *leaves: jnp.stack(leaves), *states),
        problems=stack_problems([instance.problem for instance in instances]),
        keys=jnp.stack([stream(jax.random.key(seed), "run") for seed in seeds]),
        ground_truth=[
            describe_truth(seed, instance.ground_truth)
            for seed, instance in zip(seeds, instances, strict=True)
        ],
        title=f"Synthetic, {config.form}: {config.k} of {config.num_arms} arms, "
        f"{config.constraints} constraints",
        notes=notes,
        best_actions=np.stack([instance.ground_truth.action for instance in instances]),
    )


def describe_truth(seed: int, truth: GroundTruth) -> dict[str, Any]:
    """Return the entry of a seed in summary.json."""
    bound = float(truth.upper_bound)
    return {
        "seed": seed,
        "reward": float(truth.reward),
        "upper_bound": bound if math.isfinite(bound) else None,
        "status": truth.status,
    }


def make_instances(
    config: Config, seeds: Sequence[int], path: Path | None, progress: Progress
) -> list[Instance]:
    """Return one instance a seed; those that the file holds are not made again.

    Without a path nothing is read or stored.
    """
    stored = _read(path) if path is not None and path.exists() else {}
    missing = [seed for seed in seeds if f"{seed}/status" not in stored]
    if missing:
        progress.start("ground truth", len(missing), unit="instance")
    for done, seed in enumerate(missing, 1):
        stored |= _pack(seed, env.make_instance(config.setting(), seed))
        if path is not None:
            with atomic_file(path) as file:
                np.savez_compressed(file, **stored)
        progress.update(done)
    progress.stop()
    return [_unpack(seed, config.k, stored) for seed in seeds]


def _read(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as raw, np.load(raw) as file:
            return dict(file)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(
            f"{path} cannot be read ({error}); remove it to make it again."
        ) from None


def _pack(seed: int, instance: Instance) -> dict[str, Any]:
    fields = {
        "features": instance.problem.features,
        "conflicts": instance.problem.conflicts,
        "theta": instance.theta,
        "pair": instance.pair,
        "scale": instance.scale,
        **instance.ground_truth._asdict(),
    }
    return {f"{seed}/{name}": np.asarray(value) for name, value in fields.items()}


def _unpack(seed: int, k: int, stored: dict[str, Any]) -> Instance:
    def get(name: str) -> np.ndarray:
        return stored[f"{seed}/{name}"]

    return Instance(
        problem=problem_from_conflicts(get("conflicts"), k, get("features")),
        theta=get("theta"),
        pair=get("pair"),
        scale=float(get("scale")),
        ground_truth=GroundTruth(
            reward=float(get("reward")),
            upper_bound=float(get("upper_bound")),
            status=str(get("status")),
            action=get("action"),
        ),
    )


EXPERIMENT = harness.Experiment(
    name="synthetic",
    config_class=Config,
    label=lambda config: f"synthetic-{config.form}",
    prepare=prepare,
    quick=QUICK,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment and return the exit code."""
    return harness.main(EXPERIMENT, argv)


if __name__ == "__main__":
    sys.exit(main())
