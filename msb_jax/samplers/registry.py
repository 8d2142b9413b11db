"""All samplers by name, in the order in which proposals are credited."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from msb_jax.samplers.base import Sampler
from msb_jax.samplers.random_best import random_best
from msb_jax.samplers.solver import solver
from msb_jax.samplers.teacher_student import teacher_student

SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "solver": solver,
    "random_best": random_best,
    "teacher_student": teacher_student,
}


def make_samplers(names: Sequence[str]) -> tuple[Sampler, ...]:
    """Build samplers by name; an unknown or repeated name is a ValueError."""
    for name in names:
        if name not in SAMPLERS:
            close = difflib.get_close_matches(name, SAMPLERS, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(
                f"There is no sampler {name!r}: {hint}"
                f"choose from {', '.join(SAMPLERS)}."
            )
    if len(set(names)) != len(names):
        raise ValueError(f"Every sampler may be named once, got {', '.join(names)}.")
    if not names:
        raise ValueError(f"Name at least one sampler of {', '.join(SAMPLERS)}.")
    return tuple(SAMPLERS[name]() for name in names)
