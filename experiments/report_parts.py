"""What a report consists of: parts with sentences, tables and figures.

Plain values only, so that `data.json`, the page, the Markdown and the CSV files are
all written from the same thing.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.plan import Cell, Section
from experiments.printed import Printed
from experiments.results import Results, Value
from msb_jax import metrics

MOST_POINTS = 160  # of a curve
DASH = "–"
LABELS = {
    "linear": "Syn (a) linear",
    "quadratic": "Syn (b) quadratic",
    "cubic": "Syn (c) cubic",
    "mixed": "Syn (d) mixed",
    "delicious": "Delicious",
    "lastfm": "LastFM",
    "movielens": "MovieLens",
    "yahoo": "Yahoo!",
    "demo": "demo log",
    "all": "all six",
}


class Entry(NamedTuple):
    """A place in a table: ours, and what the paper prints there."""

    ours: Value
    printed: float | None = None


class Table(NamedTuple):
    """Rows of entries."""

    key: str  # of the files
    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Entry]]]
    units: Sequence[str]  # names of the units it was made from
    digits: int = 4


class Series(NamedTuple):
    """A line with a band of one standard error."""

    name: str
    x: Sequence[float]
    mean: Sequence[float]
    error: Sequence[float]


class Panel(NamedTuple):
    """One pair of axes."""

    title: str
    series: Sequence[Series]
    reason: str = ""  # why there is nothing to see
    shaded: float = 0.0  # up to here the rounds are random


class Figure(NamedTuple):
    """Panels side by side, with one legend."""

    key: str
    title: str
    note: str
    x: str
    y: str
    panels: Sequence[Panel]
    units: Sequence[str]


class Part(NamedTuple):
    """A chapter of the report."""

    key: str
    title: str
    sentences: Sequence[str]
    tables: Sequence[Table]
    figures: Sequence[Figure]


def label(name: str) -> str:
    """Return how a row or column is called in the report."""
    return LABELS.get(name, name.replace("no_", "without ", 1))


def unit_names(cells: Sequence[Cell]) -> list[str]:
    """Return the names of the units of cells, each once."""
    return list(dict.fromkeys(cell.unit.name for cell in cells))


def make_table(
    results: Results,
    section: Section,
    measure: str,
    *,
    key: str,
    title: str,
    note: str = "",
    printed: Printed | None = None,
    scale: float = 1.0,
    digits: int = 4,
) -> Table:
    """Make a table of all rows and columns of a section and of the paper's table.

    Args:
        results: where the figures are.
        section: of the plan.
        measure: see `Results.by_seed`.
        key: of the files.
        title: above the table.
        note: below it.
        printed: the paper's figures.
        scale: our figures are multiplied with it.
        digits: after the point.
    """
    printed = printed or {}
    columns = list(dict.fromkeys([*(c for _, c in printed), *section.columns]))
    columns.sort(key=lambda column: column not in section.columns)  # empty ones last
    rows = list(dict.fromkeys([*section.rows, *(r for r, _ in printed)]))

    def entry(row: str, column: str) -> Entry:
        cell = section.cells.get((row, column))
        value = results.value(cell, measure, section.missing.get(column, ""))
        if value.mean is not None:
            error = None if value.error is None else scale * value.error
            value = Value(scale * value.mean, error)
        return Entry(value, printed.get((row, column)))

    return Table(
        key=key,
        title=title,
        note=note,
        columns=[label(c) for c in columns],
        rows=[(label(r), [entry(r, c) for c in columns]) for r in rows],
        units=unit_names(list(section.cells.values())),
        digits=digits,
    )


def make_series(name: str, values: np.ndarray, window: int) -> Series:
    """Average [B, T] values over the last rounds and over seeds, and thin them out."""
    smoothed = metrics.smooth(values, window)  # [B, T]
    seeds, rounds = smoothed.shape
    number = min(rounds, MOST_POINTS)
    index = np.unique(np.linspace(0, rounds - 1, number).round().astype(int))
    mean = smoothed.mean(axis=0)[index]
    error = np.zeros_like(mean)
    if seeds > 1:
        error = smoothed.std(axis=0, ddof=1)[index] / np.sqrt(seeds)
    return Series(
        name,
        x=(index + 1).tolist(),
        mean=[float(f"{v:.6g}") for v in mean],
        error=[float(f"{v:.3g}") for v in error],
    )


def shown(entry: Entry, digits: int) -> str:
    """Write an entry: ours ± error, and the paper's figure in brackets."""
    text = number(entry.ours, digits)
    return text if entry.printed is None else f"{text} ({entry.printed:g})"


def number(value: Value, digits: int) -> str:
    """Write a value, a dash where there is none."""
    if value.mean is None:
        return DASH
    text = f"{value.mean:.{digits}f}"
    return text if value.error is None else f"{text} ± {value.error:.{digits}f}"


def reasons(table: Table) -> list[str]:
    """Return why entries are empty, each reason once with its places."""
    places: dict[str, list[str]] = {}
    for row, entries in table.rows:
        for column, entry in zip(table.columns, entries, strict=True):
            if entry.ours.mean is None:
                places.setdefault(entry.ours.reason, []).append(f"{row}, {column}")
    return [
        f"{DASH} {reason} ({where[0] if len(where) == 1 else f'{len(where)} places'})"
        for reason, where in places.items()
    ]


def table_csv(table: Table) -> str:
    """Write a table as CSV, one line an entry."""
    lines: list[Sequence[Any]] = [
        ("row", "column", "mean", "standard_error", "paper", "reason")
    ]
    for row, entries in table.rows:
        for column, entry in zip(table.columns, entries, strict=True):
            ours = entry.ours
            lines.append(
                (row, column, ours.mean, ours.error, entry.printed, ours.reason)
            )
    return _csv(lines)


def figure_csv(figure: Figure) -> str:
    """Write the points of a figure as CSV."""
    lines: list[Sequence[Any]] = [("panel", "series", "x", "mean", "standard_error")]
    for panel in figure.panels:
        for series in panel.series:
            points = zip(series.x, series.mean, series.error, strict=True)
            lines += [(panel.title, series.name, *point) for point in points]
    return _csv(lines)


def plain(part: Any) -> Any:
    """Turn nested tuples into JSON values."""
    if hasattr(part, "_asdict"):
        return {name: plain(value) for name, value in part._asdict().items()}
    if isinstance(part, Mapping):
        return {name: plain(value) for name, value in part.items()}
    if isinstance(part, list | tuple):
        return [plain(value) for value in part]
    return part


def _csv(lines: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([["" if v is None else v for v in line] for line in lines])
    return text.getvalue()
