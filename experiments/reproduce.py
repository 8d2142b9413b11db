"""Every table and figure of the paper by one command.

    python -m experiments.reproduce --budget=quick

Runs the units of the plan that are not finished yet (experiments.units), on as many
workers as asked for, and writes the report from all that are. The same command goes on
where an earlier one stopped, however it was stopped.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments import files, flags, harness, units
from experiments.budgets import BUDGETS
from experiments.flags import UsageError, flag
from experiments.plan import GROUPS, Section, make_plan, units_of
from experiments.progress import Progress
from experiments.report import write_report
from experiments.report_markdown import BEGIN, END, insert
from experiments.units import FAILED, Unit
from experiments.workers import Outcome, import_ray, parse_workers, run_units

REPORT = "report"
MOST_WORKERS = 4  # unless asked for more; a worker takes up to 3 GB


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of the command."""

    budget: str = flag("quick", f"how much: {', '.join(BUDGETS)}", tuple(BUDGETS))
    only: tuple[str, ...] = flag(
        GROUPS, f"some of {', '.join(GROUPS)}; {REPORT}: only write the report"
    )
    data: str | None = flag(
        None, "folder of prepared logs, <name>.npz; not given: a generated log"
    )
    out: str | None = flag(None, "folder; not given: results/reproduce-<budget>")
    workers: str | None = flag(
        None, "processes, or ray:N, or ray://ADDRESS; not given: one a core, up to 4"
    )
    tables: str | None = flag(
        None, f"a Markdown page to put the tables into, after its line {BEGIN}"
    )

    def __post_init__(self) -> None:
        known = (*GROUPS, REPORT)
        if wrong := [name for name in self.only if name not in known]:
            raise ValueError(
                f"--only={wrong[0]} is unknown; choose from {', '.join(known)}."
            )
        if not self.only:
            raise ValueError(f"--only must name some of {', '.join(known)}.")
        if self.out is None:
            object.__setattr__(self, "out", f"results/reproduce-{self.budget}")
        if self.workers is None:
            number = min(os.cpu_count() or 1, MOST_WORKERS)
            object.__setattr__(self, "workers", str(number))


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, write the report and return the exit code.

    Returns:
        0; 1 if units failed; 2 for a command line that cannot be followed; 130 after
        Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        given = flags.parse(Config, argv)
        if given.pop("help", False):
            print(flags.usage(Config, "python -m experiments.reproduce"))
            return 0
        config = Config(**given)
        workers = parse_workers(config.workers or "1")
        if workers.is_ray:
            import_ray()
        data = None if config.data is None else Path(config.data)
        plan = make_plan(config.budget, data)
        tables = _page(config.tables)
        root = Path(config.out or "").resolve()
        root.mkdir(parents=True, exist_ok=True)
    except (UsageError, ValueError, OSError) as error:
        return flags.fail(str(error))
    command = shlex.join(["python", "-m", "experiments.reproduce", *argv])
    failures: dict[str, str] = {}
    caught: list[int] = []
    with Progress() as progress:
        try:
            with harness.deferred_signals(caught):
                _run(config, plan, root, progress, failures, caught)
        except (UsageError, OSError) as error:
            return flags.fail(str(error))
        except KeyboardInterrupt:
            caught.append(caught[0] if caught else 2)
        progress.stop()
        try:
            page = write_report(
                root, plan, budget=config.budget, command=command, tables=tables
            )
        except OSError as error:
            return flags.fail(f"The report cannot be written: {error}.")
        progress.say(f"Report: {page}")
        for name, reason in failures.items():
            progress.say(f"failed: {name}\n{reason}")
        if caught:
            progress.say("Interrupted; the same command goes on.")
            return 128 + caught[0]
    return 1 if failures else 0


def _page(name: str | None) -> Path | None:
    """Return the page that gets the tables, if it can have them."""
    if name is None:
        return None
    path = Path(name)
    if insert(path.read_text(encoding="utf-8"), "") is None:
        raise UsageError(
            f"--tables={name} needs a line {BEGIN} and one {END} below it; the tables "
            "go between them."
        )
    return path


def _run(
    config: Config,
    plan: dict[str, Section],
    root: Path,
    progress: Progress,
    failures: dict[str, str],
    caught: list[int],
) -> None:
    """Run the units of the groups that are asked for and not finished."""
    wanted = units_of(plan, config.only)
    if not wanted:
        return
    todo = [u for u in wanted if not units.is_finished(u.folder(root))]
    todo = units.apart(todo)
    finished = len(wanted) - len(todo)
    progress.say(f"{len(wanted)} units, {finished} of them finished already.")
    if not todo:
        return
    # Counted in guessed seconds, because units differ much.
    progress.start("units", round(sum(u.seconds for u in todo)), unit="guessed second")
    work = 0.0

    def report(unit: Unit, outcome: Outcome) -> None:
        nonlocal work, finished
        work += unit.seconds
        if outcome.is_done:
            finished += 1
        elif outcome.reason:
            failures[unit.name] = outcome.reason
            files.write_text(unit.folder(root) / FAILED, outcome.reason + "\n")
            progress.say(f"failed: {unit.command}")
        note = f"{finished} of {len(wanted)} units finished, last {unit.name}"
        progress.update(round(work), note)

    workers = parse_workers(config.workers or "1")
    run_units(todo, root, workers, report, caught)


if __name__ == "__main__":
    sys.exit(main())
