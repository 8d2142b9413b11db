"""Flags that all experiments share: who plays, how often, with which settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.flags import flag
from msb_jax.agent.cotraining import KINDS
from msb_jax.agent.replay import KINDS as REPLAY
from msb_jax.baselines.random import CONSTRAINTS
from msb_jax.baselines.registry import MASTERS, POLICIES, check_name
from msb_jax.masters.discount import AUTO
from msb_jax.samplers.registry import DEFAULT, SAMPLERS, make_samplers

LEAST = {"num_seeds": 1, "seed": 0, "lam": 0, "f_in": 1, "n_es": 1, "n_c": 1, "n_D": 0}
LEAST |= {"semantic": 0}
SAMPLERS_HELP = (
    f"of the agent, some of {', '.join(SAMPLERS)}; NAME:n learns at every n-th refresh"
)


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Flags of policies, agent and files; a subclass adds those of its task."""

    policies: tuple[str, ...] = flag(
        ("master_slave", "lin_ts", "random"),
        f"who plays, separated by commas; all: {', '.join(POLICIES)}",
    )
    master: str = flag("ntk_ucb", "model of the agent", tuple(MASTERS))
    num_seeds: int = flag(3, "runs side by side; the paper has 10")
    seed: int = flag(0, "of the first run; the others follow")
    lam: float = flag(5.0, "price of the violation rate")
    constraints: str = flag("soft", "soft (scored) or hard (forbidden)", CONSTRAINTS)
    f_in: int = flag(20, "rounds between two refreshes")
    n_es: int = flag(10, "candidates of the agent for a round")
    samplers: tuple[str, ...] = flag(DEFAULT, SAMPLERS_HELP)
    cotraining: str = flag("all", f"{', '.join(KINDS)}", KINDS)
    replay: str = flag("prioritized", f"{', '.join(REPLAY)}", REPLAY)
    n_c: int = flag(20, "clusters of the replay buffer")
    n_D: int = flag(20, "steps of an imitation")
    semantic: float = flag(
        0.0, "weight of the semantic loss of g2anet and wolpertinger; 0: off"
    )
    off_policy: bool = flag(False, "g2anet learns from the others' sets, corrected")
    discount: str = flag(
        "1", "of ntk_ucb and neural_ucb: the weight of an older round, or auto"
    )
    out: str | None = flag(None, "folder; not given: results/<experiment>-<time>")
    resume: bool = flag(False, "continue the run in --out, or the latest of the flags")
    quick: bool = flag(False, "a small problem, about a minute; flags given still hold")

    def check(
        self, least: Mapping[str, float], known: Mapping[str, Any] = POLICIES
    ) -> None:
        """Say what is wrong with the flags, and write out `all` policies.

        Args:
            least: lower limits of the subclass's own numbers.
            known: policies that can play here.
        """
        if self.policies == ("all",):
            object.__setattr__(self, "policies", tuple(known))
        if not self.policies:
            raise ValueError(f"--policies must name some of {', '.join(known)}.")
        for name in self.policies:
            check_name(name, known, "policy")
        if len(set(self.policies)) < len(self.policies):
            raise ValueError("--policies names a policy twice.")
        check_name(self.master, MASTERS, "master")
        make_samplers(self.samplers)
        if self.discount != AUTO and not _is_share(self.discount):
            raise ValueError(
                f"--discount must be a number in (0, 1] or {AUTO}, got {self.discount}."
            )
        for name, bound in (LEAST | dict(least)).items():
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= bound):
                raise ValueError(f"--{name} must be at least {bound}, got {value}.")


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False
