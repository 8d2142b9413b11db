"""`experiments.reproduce` with the real plan's places and three tiny units in them.

python -m tests.tiny_reproduce --out=FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import plan, reproduce
from experiments.plan import Cell, Section
from experiments.units import Unit, make_unit

TINY = {"num_arms": 12, "k": 3, "n_re": 4, "f_in": 5, "rounds": 40, "num_seeds": 2}
POLICIES = ("random", "oracle")


def tiny_units() -> list[Unit]:
    """Return two forms and a log, played by policies that learn nothing."""
    forms = [
        make_unit("synthetic", TINY | {"policies": POLICIES, "form": form})
        for form in ("linear", "cubic")
    ]
    log = {"policies": POLICIES, "rounds": 30, "num_seeds": 2, "lam": 1.0}
    return [*forms, make_unit("real_world", log)]


def tiny_plan(budget: str, data: Path | None) -> dict[str, Section]:
    """Put tiny units into all places of the plan."""
    forms, log = tiny_units()[:2], tiny_units()[2]
    sections = {}
    for name, section in plan.make_plan(budget, data).items():
        cells = {}
        for number, (key, cell) in enumerate(section.cells.items()):
            unit = log if cell.unit.module == "real_world" else forms[number % 2]
            cells[key] = Cell(unit, POLICIES[key[0] == "master_slave"])
        sections[name] = section._replace(cells=cells)
    return sections


def main(argv: Sequence[str]) -> int:
    """Run the command with the tiny plan."""
    reproduce.make_plan = tiny_plan
    return reproduce.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
