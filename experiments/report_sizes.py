"""Tables that are no means over seeds: sizes of the logs, and times."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from experiments import printed
from experiments.plan import Section
from experiments.printed import FORMS, LOGS
from experiments.report_parts import Entry, Part, Table, label, unit_names
from experiments.results import Results, Value
from msb_jax.data.demo import demo_log
from msb_jax.data.format import load_log

ROUNDS = 5000  # of the paper's times


def log_sizes(section: Section) -> Table:
    """Count the logs as they are played."""
    columns = list(
        dict.fromkeys([*section.columns, *(c for _, c in printed.LOG_SIZES)])
    )
    sizes = {}
    for (_, column), cell in section.cells.items():
        path = dict(cell.unit.flags).get("data")
        log = demo_log() if path is None else load_log(path)
        sizes[column] = (len(log.user_ids), len(log.item_vectors), log.log_users.size)

    def entry(row: str, column: str, index: int) -> Entry:
        value = Value(None, reason=section.missing.get(column, ""))
        if column in sizes:
            value = Value(float(sizes[column][index]))
        return Entry(value, printed.LOG_SIZES.get((row, column)))

    return Table(
        key="log-sizes",
        title="Sizes of the logs",
        note="Our items are the arms played, clusters of the items of a raw log.",
        columns=[label(c) for c in columns],
        rows=[
            (row, [entry(row, column, index) for column in columns])
            for index, row in enumerate(("users", "items", "rows"))
        ],
        units=[],
        digits=0,
    )


def make_times(plan: Mapping[str, Section], results: Results) -> Part:
    """Return the part with the times, which no two runs share."""
    section = plan["times"]
    entries = []
    for row in section.rows:
        line = []
        for kind, columns in (("synthetic", FORMS), ("logs", (*LOGS, "demo"))):
            found = [
                minutes[0]
                for c in columns
                if (cell := section.cells.get((row, c))) is not None
                and (minutes := results.by_seed(cell, "seconds_per_round")) is not None
            ]
            value = Value(None, reason="not run")
            if found:
                every = np.array(found) * ROUNDS / 60
                spread = float(every.std(ddof=1)) if every.size > 1 else None
                value = Value(float(every.mean()), spread)
            line.append(Entry(value, printed.MINUTES.get((row, kind))))
        entries.append((label(row), line))
    table = Table(
        key="times",
        title="Minutes that 5,000 rounds of one seed take",
        note="Wall time without compilation, seeds side by side; ± is the deviation "
        "between problems. Sizes are those of this budget, machines differ, and the "
        "paper used six processes: read the order, not the minutes.",
        columns=["synthetic", "logs"],
        rows=entries,
        units=unit_names(list(section.cells.values())),
        digits=2,
    )
    return Part("times", "Elapsed time", [], [table], [])
