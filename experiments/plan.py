"""Which units each table and figure of the paper is made of.

A section is a grid of cells; a cell is a policy of a unit. Sections share units: the
agent with its default settings is run once for all of them. `--only` names groups of
sections. Rows and columns are spelled as in `experiments.printed`.

Differs from the paper:
    * the budget `quick` has 60 arms, few rounds and two seeds, and leaves out cells
      whose program is long to compile (`Budget`);
    * logs are played with this project's settings for logs (new candidates every 8
      rounds, 2K random rounds), with several seeds, and as long as the log is;
    * without `--data` a generated log, `demo`, stands for all logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments import cascading
from experiments.budgets import BUDGETS, MAIN, MAIN_LOG
from experiments.flags import UsageError
from experiments.printed import FORMS, LAMBDAS, LOGS
from experiments.real_world import SEASONED
from experiments.units import Unit, make_unit, merge_seeds
from msb_jax.samplers.registry import DEFAULT

DEMO = "demo"
COTRAINING = ("all", "demonstrations", "sharing", "none")
GROUPS = (
    "synthetic",
    "baselines",
    "rates",
    "logs",
    "feedback",
    "lam",
    "single",
    "leave_one_out",
    "replay",
    "cotraining",
    "hyper",
    "cascading",
    "times",
)
# Logs of which the paper also has synthetic feedback; MovieLens with 100 arms and 730
# conflicts, if there is a file of that many arms.
FEEDBACK = ("movielens", "yahoo")
WIDE = "movielens100"
WIDE_CONFLICTS = 730


class Cell(NamedTuple):
    """Where the figures of a place in a table come from."""

    unit: Unit
    policy: str


Cells = dict[tuple[str, str], Cell]


class Section(NamedTuple):
    """A grid of cells.

    Attributes:
        name: of the section, unique.
        group: what `--only` calls it.
        cells: by row and column.
        missing: why a column that the paper has is empty.
    """

    name: str
    group: str
    cells: Mapping[tuple[str, str], Cell]
    missing: Mapping[str, str]

    @property
    def columns(self) -> list[str]:
        """Return the columns that are played, in order."""
        return list(dict.fromkeys(column for _, column in self.cells))

    @property
    def rows(self) -> list[str]:
        """Return the rows, in order."""
        return list(dict.fromkeys(row for row, _ in self.cells))


class Planner:
    """Makes the units of one budget and one folder of logs."""

    def __init__(self, budget: str, data: Path | None) -> None:
        """Look for the logs.

        Args:
            budget: a key of `BUDGETS`.
            data: folder of prepared logs, <name>.npz; none plays the demo log.
        """
        if budget not in BUDGETS:
            raise UsageError(f"--budget must be one of {', '.join(BUDGETS)}.")
        self.budget = BUDGETS[budget]
        self.paths: dict[str, Path | None] = {DEMO: None}
        self.missing: dict[str, str] = {}
        if data is not None:
            names = (*LOGS, WIDE)
            found = {n: data / f"{n}.npz" for n in names}
            self.paths = {n: p.resolve() for n, p in found.items() if p.exists()}
            if not self.paths:
                raise UsageError(
                    f"--data={data} has none of {', '.join(f'{n}.npz' for n in LOGS)}; "
                    "make them with python -m experiments.prepare."
                )
        where = "without --data" if data is None else "not in --data"
        for name in LOGS:
            if name not in self.paths:
                self.missing[name] = f"{name}.npz: {where}"
        self.logs = [name for name in self.paths if name != WIDE]
        self.some_logs = self.logs if self.budget.all_logs else self.logs[:1]

    def unit(self, column: str, policies: tuple[str, ...], **changed: Any) -> Unit:
        """Return the unit of some policies on a form or a log."""
        flags: dict[str, Any] = {"policies": policies}
        if column in FORMS:
            flags |= {**self.budget.synthetic, "form": column}
            return self._timed("synthetic", flags | changed)
        flags |= {**self.budget.logs, "dataset": column, "data": self.paths[column]}
        return self._timed("real_world", flags | changed)

    def _timed(self, module: str, flags: dict[str, Any]) -> Unit:
        """Make a unit with a guess of its seconds on one core.

        Compilation counts at `quick`, rounds at `paper`.
        """
        policies, samplers = flags["policies"], flags.get("samplers", DEFAULT)
        seconds = 10.0 + 10.0 * len(policies)
        seconds += 13.0 * len(samplers) if "master_slave" in policies else 0.0
        seconds *= 1.0 if "rounds" in flags else 10.0
        xla_flags = self.budget.xla_flags
        return make_unit(module, flags, xla_flags=xla_flags, seconds=seconds)

    def agent(self, column: str, **changed: Any) -> Cell:
        """Return the agent's cell, of the shared unit if nothing is changed."""
        policies = self.main(column) if not changed else ("master_slave",)
        return Cell(self.unit(column, policies, **changed), "master_slave")

    def main(self, column: str) -> tuple[str, ...]:
        """Return the policies of the shared unit."""
        return MAIN if column in FORMS else MAIN_LOG

    def samplers(self, column: str) -> tuple[str, ...]:
        """Return the agent's samplers, with the intervals of a log."""
        return DEFAULT if column in FORMS else SEASONED

    def section(
        self, name: str, cells: Mapping[tuple[str, str], Cell], group: str = ""
    ) -> Section:
        """Put cells under a name."""
        return Section(name, group or name, cells, self.missing)

    def play(self, name: str, columns: list[str]) -> Section:
        """Return the agent and its peer on some columns."""
        cells: Cells = {}
        for column in columns:
            unit = self.unit(column, self.main(column))
            cells |= {(p, column): Cell(unit, p) for p in self.main(column)}
        return self.section(name, cells)

    def baselines(self) -> Section:
        """Return all other policies, with the agent for comparison."""
        cells: Cells = {}
        for column in (*FORMS, *self.logs):
            is_form = column in FORMS
            others = self.budget.others if is_form else self.budget.others_log
            main = self.unit(column, self.main(column))
            rest = self.unit(column, others)
            cells |= {(p, column): Cell(main, p) for p in self.main(column)}
            cells |= {(p, column): Cell(rest, p) for p in others}
        return self.section("baselines", cells)

    def rates(self) -> Section:
        """Return the agent alone on all columns."""
        columns = (*FORMS, *self.logs)
        cells = {("master_slave", column): self.agent(column) for column in columns}
        return self.section("rates", cells)

    def feedback(self) -> Section:
        """Return the four forms on the arms of logs."""
        cells: Cells = {}
        for log in [n for n in FEEDBACK if n in self.paths] or self.logs[:1]:
            changed = dict(self.budget.feedback)
            path = self.paths[log]
            if log == "movielens" and WIDE in self.paths:
                path = self.paths[WIDE]
                changed["num_constraints"] = WIDE_CONFLICTS
            for form in FORMS:
                unit = self.unit(log, MAIN, feedback=form, **(changed | {"data": path}))
                cells |= {(p, f"{log} {form}"): Cell(unit, p) for p in MAIN}
        return self.section("feedback", cells)

    def lam(self, column: str, name: str) -> Section:
        """Return the sweep over lam on one column; the default agent's 5 is there."""
        budget, cells = self.budget, {}
        swept = budget.swept if column in FORMS else budget.swept_log
        others = budget.others if column in FORMS else budget.others_log
        for lam in LAMBDAS:
            unit = self.unit(column, swept, lam=float(lam), **budget.sweep)
            for policy in swept:
                if lam == "5" and not budget.sweep:
                    main = self.main(column)
                    unit = self.unit(column, main if policy in main else others)
                cells[policy, lam] = Cell(unit, policy)
        return self.section(name, cells, "lam")

    def single(self) -> Section:
        """Return the agent with one sampler at a time, and with all."""
        cells = {}
        for column in (*self.budget.forms, *self.some_logs):
            cells["all", column] = self.agent(column)
            for sampler in self.samplers(column):
                name = sampler.split(":")[0]
                cells[name, column] = self.agent(column, samplers=(sampler,))
        return self.section("single", cells)

    def leave_one_out(self) -> Section:
        """Return the agent without one sampler at a time, and with all."""
        cells = {}
        for column in (*self.budget.forms, *self.some_logs):
            cells["all", column] = self.agent(column)
            whole = self.samplers(column)
            for sampler in whole:
                rest = tuple(s for s in whole if s != sampler)
                name = sampler.split(":")[0]
                cells[f"no_{name}", column] = self.agent(column, samplers=rest)
        return self.section("leave_one_out", cells)

    def choices(self, flag: str, values: tuple[str, ...]) -> Section:
        """Return the agent with each value of a flag, the default first."""
        cells = {}
        for column in self.some_logs:
            cells[values[0], column] = self.agent(column)
            for value in values[1:]:
                cells[value, column] = self.agent(column, **{flag: value})
        return self.section(flag, cells)

    def hyper(self) -> Section:
        """Return the agent with each hyper-parameter changed by itself."""
        usual = {"n_es": 10, "n_c": 20, "n_D": 20, "n_re": 20, "f_in": 8}
        cells = {}
        logs = [n for n in FEEDBACK if n in self.logs] or self.logs
        for column in logs if self.budget.all_logs else logs[:1]:
            for name, values in self.budget.hyper.items():
                for value in values:
                    changed = {} if value == usual[name] else {name: value}
                    cells[f"{name}={value}", column] = self.agent(column, **changed)
        return self.section("hyper", cells)

    def cascading(self) -> Section:
        """Return lists that are read from the top."""
        policies = cascading.Config().policies
        flags = {**self.budget.cascading, "policies": policies}
        unit = make_unit("cascading", flags, xla_flags=self.budget.xla_flags)
        cells = {(p, "cascading"): Cell(unit, p) for p in policies}
        return self.section("cascading", cells)


def make_plan(budget: str, data: Path | None = None) -> dict[str, Section]:
    """Return all sections by name, in the order of the report."""
    p = Planner(budget, data)
    lam_log = "delicious" if "delicious" in p.logs else p.logs[0]
    sections = [
        p.play("synthetic", list(FORMS)),
        p.baselines(),
        p.rates(),
        p.play("logs", p.logs),
        p.feedback(),
        p.lam("linear", "lam_linear"),
        p.lam(lam_log, "lam_log"),
        p.single(),
        p.leave_one_out(),
        p.choices("replay", ("prioritized", "uniform")),
        p.choices("cotraining", COTRAINING),
        p.hyper(),
        p.cascading(),
    ]
    # Times are those of units that others run.
    of = {s.name: s for s in sections}
    timed = {
        (f"only_{row}" if row != "all" else "master_slave", column): cell
        for (row, column), cell in of["single"].cells.items()
    }
    timed |= {key: c for key, c in of["baselines"].cells.items() if key[0] != "oracle"}
    sections.append(p.section("times", timed))
    return {section.name: section for section in sections}


def units_of(plan: Mapping[str, Section], only: tuple[str, ...]) -> list[Unit]:
    """Return the units of some groups, each once, in the order of the plan."""
    return merge_seeds(
        cell.unit
        for section in plan.values()
        if section.group in only
        for cell in section.cells.values()
    )
