"""Assemble the report from whatever is finished.

data.json       all tables and figures; the same after any interruption
csv/            the same, one file each
figures/        PNG and PDF
times.json      times and provenance, which differ between runs
report.html     everything, in one file
report.md       everything, with pictures from figures/
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import files
from experiments.plan import Section
from experiments.report_html import TITLE, make_page
from experiments.report_markdown import insert, make_markdown, make_tables
from experiments.report_parts import Part, figure_csv, plain, table_csv
from experiments.report_plots import plot_figure
from experiments.report_sections import make_parts
from experiments.report_sizes import make_times
from experiments.results import Results
from experiments.units import Unit, failure

DATA, TIMES, PAGE, TEXT = "data.json", "times.json", "report.html", "report.md"
CSV, FIGURES = "csv", "figures"


def write_report(
    root: Path,
    plan: Mapping[str, Section],
    *,
    budget: str,
    command: str,
    tables: Path | None = None,
) -> Path:
    """Write all files of the report and return the page.

    Args:
        root: folder of all results.
        plan: all sections.
        budget: the name of the budget.
        command: what was typed.
        tables: a Markdown page that has the markers of `report_markdown`; it gets
            the tables between them.
    """
    results = Results(root)
    parts = make_parts(plan, results)
    times = make_times(plan, results)
    units = list(dict.fromkeys(c.unit for s in plan.values() for c in s.cells.values()))
    provenance = _provenance(results, units)
    failed = {unit.name: failure(unit.folder(root)) for unit in units}
    failures = {name: reason for name, reason in failed.items() if reason}
    lead = _lead(budget, len(provenance), len(units))
    for folder in (root / CSV, root / FIGURES):
        folder.mkdir(parents=True, exist_ok=True)
    _tidy(root)
    files.write_json(root / DATA, {"budget": budget, "parts": plain(parts)})
    _write_csv(root / CSV, parts)
    for part in parts:
        for figure in part.figures:
            plot_figure(root / FIGURES, figure)
    files.write_json(
        root / TIMES,
        {"command": command, "parts": plain([times]), "units": provenance},
    )
    whole = [*parts, times]
    text = make_markdown(
        whole, title=TITLE, lead=lead, failures=failures, figures=FIGURES
    )
    files.write_text(root / TEXT, text)
    page = make_page(
        whole,
        lead=[*lead, f"Made by: {command}"],
        failures=failures,
        provenance=provenance,
    )
    files.write_text(root / PAGE, page)
    if tables is not None:
        text = make_tables(whole, lead=lead)
        copy = insert(tables.read_text(encoding="utf-8"), text)
        if copy is None:  # changed since the flags were checked
            raise OSError(f"{tables} has lost the lines that the tables go between")
        files.write_text(tables, copy)
    return root / PAGE


def _tidy(root: Path) -> None:
    """Remove temporary files (see `atomic_file`) that a killed process left."""
    left = [path for name in (CSV, FIGURES) for path in (root / name).glob(".*")]
    for name in (DATA, TIMES, PAGE, TEXT):
        left += root.glob(f".{name}.*")
    for path in left:
        path.unlink(missing_ok=True)


def _write_csv(folder: Path, parts: Sequence[Part]) -> None:
    for part in parts:
        for table in part.tables:
            files.write_text(folder / f"{table.key}.csv", table_csv(table))
        for figure in part.figures:
            files.write_text(folder / f"{figure.key}.csv", figure_csv(figure))


def _provenance(
    results: Results, units: Sequence[Unit]
) -> dict[str, Mapping[str, Any]]:
    found = {unit.name: results.read(unit) for unit in units}
    return {name: ran.done for name, ran in found.items() if ran is not None}


def _lead(budget: str, finished: int, total: int) -> list[str]:
    sizes = {
        "quick": "Small sizes (6 of 60 arms, 300 rounds, two seeds): standard errors "
        "are rough, and the order of policies may change at full size. Programs are "
        "compiled without optimisation, so that times are longer than they need be. "
        "In the sweep over lam the agent has only the samplers that train nothing.",
        "paper": "The paper's sizes: 20 of 300 arms, 5,000 rounds, ten seeds.",
    }
    lines = [
        "What the paper prints stands beside what this code gives. Where the two "
        "cannot be of one unit, a note says so.",
        f"Budget {budget}. {sizes.get(budget, '')}",
    ]
    if finished < total:
        lines.append(
            f"{finished} of {total} runs are finished; the rest is empty. The same "
            "command without --only runs it."
        )
    return lines
