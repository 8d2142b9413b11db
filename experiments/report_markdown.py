"""report.md: the tables as Markdown, with the paper's figures in brackets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.report_parts import Part, Table, reasons, shown
from experiments.tables import markdown_table

# Between these lines of a page stand the tables of a report.
BEGIN = "<!-- tables of experiments.reproduce -->"
END = "<!-- end of the tables -->"


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
        lines += _heading(part, "##")
        for figure in part.figures:
            lines += [f"### {figure.title}", ""]
            lines += [f"![{figure.title}]({figures}/{figure.key}.png)", ""]
            lines += [figure.note, ""]
        lines += _tables(part, "###")
    return "\n".join(lines)


def make_tables(parts: Sequence[Part], *, lead: Sequence[str]) -> str:
    """Write the tables alone, for a page that has headings of its own."""
    lines = [text for sentence in lead for text in (sentence, "")]
    for part in parts:
        if part.tables:
            lines += [*_heading(part, "###"), *_tables(part, "####")]
    return "\n".join(lines)


def insert(page: str, text: str) -> str | None:
    """Put a text between the markers of a page; None if it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        return None
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"


def _heading(part: Part, mark: str) -> list[str]:
    lines = [f"{mark} {part.title}", ""]
    lines += [f"* {sentence}" for sentence in part.sentences]
    return [*lines, ""] if part.sentences else lines


def _tables(part: Part, mark: str) -> list[str]:
    lines = []
    for table in part.tables:
        lines += [f"{mark} {table.title}", "", write_table(table), ""]
        lines += [text + "\n" for text in (table.note, *reasons(table)) if text]
    return lines


def write_table(table: Table) -> str:
    """Write the entries: ours ± standard error (paper's)."""
    rows = [
        [_cell(name), *(shown(entry, table.digits) for entry in entries)]
        for name, entries in table.rows
    ]
    return markdown_table(["", *map(_cell, table.columns)], rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
