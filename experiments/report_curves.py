"""The figures of the report, from the curves of units."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.plan import Section
from experiments.report_parts import (
    Figure,
    Panel,
    Series,
    label,
    make_series,
    unit_names,
)
from experiments.results import Results

TITLES = {
    "synthetic-reward": "Synthetic rewards",
    "synthetic-violation": "Synthetic rewards: violations",
    "logs-reward": "Logs",
    "logs-violation": "Logs: violations",
    "replay": "With and without prioritised replay",
    "cotraining": "With and without co-training",
    "cascading": "Cascading lists",
}
AXES = {
    "gt_fraction": "reward / ground truth",
    "reward": "reward",
    "violation": "violation rate",
}


def make_curves(
    results: Results,
    section: Section,
    columns: Sequence[str],
    measure: str,
    key: str,
) -> Figure:
    """Draw every row of a section over the rounds, one panel a column.

    Args:
        results: where the curves are.
        section: of the plan.
        columns: of the section.
        measure: gt_fraction or reward (the reward, over the ground truth where there
            is one), or violation.
        key: of the figure.
    """
    panels, window = [], 1
    for column in columns:
        lines, reason, warm_up = [], "not run", 0
        for row in section.rows:
            cell = section.cells.get((row, column))
            if cell is None:
                continue
            values = results.curve(cell, measure)
            if values is None:
                reason = results.reason(cell)
                continue
            window = max(1, min(100, values.shape[1] // 20))
            lines.append(make_series(row, values, window))
            ran = results.read(cell.unit)
            warm_up = 0 if ran is None else ran.warm_up
        panels.append(Panel(label(column), lines, "" if lines else reason, warm_up))
    cells = [cell for (_, c), cell in section.cells.items() if c in columns]
    return Figure(
        key,
        TITLES.get(key, key),
        f"Means of the last {window} rounds and over seeds; bands are one standard "
        "error, shaded rounds are random. The paper has this as a picture only.",
        "round",
        AXES[measure],
        panels,
        unit_names(cells),
    )


def make_rates(results: Results, section: Section) -> Figure:
    """Draw how often each sampler's set was played since the random rounds."""
    panels = []
    for column in section.columns:
        cell = section.cells["master_slave", column]
        ran = results.read(cell.unit)
        skip = 0 if ran is None else ran.warm_up
        lines = []
        for name, played in results.rates(cell).items():
            late = played[:, skip:] if played.shape[1] > skip else played
            line = make_series(name, late, late.shape[1])
            begin = played.shape[1] - late.shape[1]
            lines.append(line._replace(x=[x + begin for x in line.x]))
        panels.append(Panel(label(column), lines, results.reason(cell)))
    return Figure(
        "rates",
        "Average recommended rate",
        "Share of the rounds since the random ones in which the set that was played "
        "was the sampler's. A set that several propose counts for the first in the "
        "order of the legend. The paper has this as a picture only.",
        "round",
        "arr",
        panels,
        unit_names(list(section.cells.values())),
    )


def make_hyper_curves(results: Results, section: Section, measure: str) -> Figure:
    """Draw a measure over the values of each hyper-parameter, one panel each."""
    panels = []
    for name in dict.fromkeys(row.split("=")[0] for row in section.rows):
        rows = [row for row in section.rows if row.split("=")[0] == name]
        lines = [_by_value(results, section, rows, c, measure) for c in section.columns]
        lines = [line for line in lines if line.x]
        panels.append(Panel(name, lines, "" if lines else "not run"))
    return Figure(
        f"hyper-{measure}",
        f"Hyper-parameters: {AXES[measure]}",
        "One is changed at a time; bands are one standard error over seeds. The paper "
        "has this as a picture only.",
        "value",
        AXES[measure],
        panels,
        unit_names(list(section.cells.values())),
    )


def _by_value(
    results: Results, section: Section, rows: Sequence[str], column: str, measure: str
) -> Series:
    x, mean, error = [], [], []
    for row in rows:
        value = results.value(section.cells[row, column], measure)
        if value.mean is not None:
            x.append(float(row.split("=")[1]))
            mean.append(value.mean)
            error.append(value.error or 0.0)
    return Series(label(column), x, mean, error)
