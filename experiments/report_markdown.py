"""report.md: the tables as Markdown, with the paper's figures in brackets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.report_parts import Part, Table, reasons, shown
from experiments.tables import markdown_table


def make_markdown(
    parts: Sequence[Part],
    *,
    title: str,
    lead: Sequence[str],
    failures: Mapping[str, str],
    figures: str,
) -> str:
    """Write the report.

    Args:
        parts: in order.
        title: of the page.
        lead: sentences at the top.
        failures: why units failed, by name.
        figures: folder of the .png files, relative to the report.
    """
    lines = [f"# {title}", ""]
    for sentence in lead:
        lines += [sentence, ""]
    if failures:
        lines += ["Units that failed:", ""]
        for name, reason in failures.items():
            lines += [f"* {name}", "", *(f"      {x}" for x in reason.split("\n")), ""]
    for part in parts:
        lines += [f"## {part.title}", ""]
        lines += [f"* {sentence}" for sentence in part.sentences]
        lines += [""] if part.sentences else []
        for figure in part.figures:
            lines += [f"### {figure.title}", ""]
            lines += [f"![{figure.title}]({figures}/{figure.key}.png)", ""]
            lines += [figure.note, ""]
        for table in part.tables:
            lines += [f"### {table.title}", "", write_table(table), ""]
            lines += [text + "\n" for text in (table.note, *reasons(table)) if text]
    return "\n".join(lines)


def write_table(table: Table) -> str:
    """Write the entries: ours ± standard error (paper's)."""
    rows = [
        [_cell(name), *(shown(entry, table.digits) for entry in entries)]
        for name, entries in table.rows
    ]
    return markdown_table(["", *map(_cell, table.columns)], rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
