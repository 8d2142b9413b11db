"""All samplers by name, in the order in which proposals are credited.

A name may carry how often its sampler learns: "g2anet:4" learns at every fourth
refresh and proposes at each (the paper's adjustable interaction frequency).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msb_jax.samplers.base import Sampler, at_intervals
from msb_jax.samplers.cem_ppo import CemPpoConfig, cem_ppo
from msb_jax.samplers.clicks import ClicksConfig, clicks
from msb_jax.samplers.ddpg import DdpgConfig
from msb_jax.samplers.g2anet import G2ANetConfig, g2anet
from msb_jax.samplers.random_best import random_best
from msb_jax.samplers.solver import SolverConfig, solver
from msb_jax.samplers.teacher_student import teacher_student
from msb_jax.samplers.wolpertinger import WolpertingerConfig, wolpertinger

Settings = Mapping[str, Any]

SAMPLERS: dict[str, Callable[[Settings], Sampler]] = {
    "solver": lambda given: solver(_choose(SolverConfig, given)),
    "wolpertinger": lambda given: wolpertinger(
        WolpertingerConfig(learner=_choose(DdpgConfig, given))
    ),
    "g2anet": lambda given: g2anet(_choose(G2ANetConfig, given)),
    "cem_ppo": lambda given: cem_ppo(_choose(CemPpoConfig, given)),
    "random_best": lambda given: random_best(),
    "teacher_student": lambda given: teacher_student(),
    "clicks": lambda given: clicks(_choose(ClicksConfig, given)),
}

# What the agent uses unless told otherwise: all that need nothing but rewards.
DEFAULT = tuple(name for name in SAMPLERS if name != "clicks")
# Those without anything to train, which compile in seconds.
PLAIN = ("solver", "random_best", "teacher_student")

# What the paper's letters are called in the configs of the samplers.
FIELDS = {"n_c": "num_clusters", "n_D": "imitation_steps"}
# And what is called the same in both.
FIELDS |= {name: name for name in ("replay", "semantic", "off_policy", "target")}


def make_samplers(
    names: Sequence[str], settings: Settings | None = None
) -> tuple[Sampler, ...]:
    """Build samplers by name; an unknown or repeated name is a ValueError.

    Args:
        names: keys of `SAMPLERS`, each perhaps with ":n".
        settings: n_c (clusters of the replay buffer), n_D (steps of imitation),
            replay ("prioritized" or "uniform"), semantic (weight of the semantic
            loss), off_policy (whether g2anet learns from the others' sets) and target
            (what the sampler `clicks` counts); others are ignored.
    """
    given = {FIELDS[n]: v for n, v in (settings or {}).items() if n in FIELDS}
    parsed = [_parse(name) for name in names]
    plain = [name for name, _ in parsed]
    if len(set(plain)) != len(plain):
        raise ValueError(f"Every sampler may be named once, got {', '.join(names)}.")
    if not names:
        raise ValueError(f"Name at least one sampler of {', '.join(SAMPLERS)}.")
    return tuple(at_intervals(SAMPLERS[name](given), n) for name, n in parsed)


def _parse(text: str) -> tuple[str, int]:
    name, _, interval = text.partition(":")
    if name not in SAMPLERS:
        close = difflib.get_close_matches(name, SAMPLERS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"There is no sampler {name!r}: {hint}choose from {', '.join(SAMPLERS)}."
        )
    if interval and not (interval.isdecimal() and int(interval) > 0):
        raise ValueError(
            f"{text!r} should be a sampler's name, or its name and the refreshes "
            f"between two of its updates, such as {name}:4."
        )
    return name, int(interval or 1)


def _choose(config_class: type, given: Settings) -> Any:
    fields = {field.name for field in dataclasses.fields(config_class)}
    return config_class(**{n: v for n, v in given.items() if n in fields})
