"""report.html: one file that needs no network.

Everything that comes from flags, files or messages is escaped; figures travel as JSON
in which no tag can end.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from experiments.report_parts import (
    DASH,
    Entry,
    Figure,
    Part,
    Table,
    figure_csv,
    plain,
    reasons,
    table_csv,
)

TITLE = "Top-K bandits with conflicts: the paper's tables and figures, run again"
VERSIONS_SHOWN = ("msb_jax", "python", "jax", "numpy")


def make_page(
    parts: Sequence[Part],
    *,
    lead: Sequence[str],
    failures: Mapping[str, str],
    provenance: Mapping[str, Mapping[str, Any]],
) -> str:
    """Write the page.

    Args:
        parts: in order.
        lead: sentences at the top.
        failures: why units failed, by name.
        provenance: `done.json` of the finished units, by name.
    """
    figures = {f.key: plain(f) for part in parts for f in part.figures}
    links = "".join(f'<li><a href="#{p.key}">{escape(p.title)}</a></li>' for p in parts)
    body = "".join(_part(part, provenance) for part in parts)
    paragraphs = "".join(f'<p class="lead">{escape(text)}</p>' for text in lead)
    return f"""<!doctype html>
<html lang="en" data-theme="light">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(TITLE)}</title>
<style>
{_asset("report.css")}</style>
</head>
<body>
<header>
<h1>{escape(TITLE)}</h1>
{paragraphs}
<div class="tools"><button id="theme" type="button">Light or dark</button></div>
<nav aria-label="Contents"><ul>{links}</ul></nav>
{_failures(failures)}
</header>
<main>
{body}
</main>
<footer>Every figure carries the commands it was made with. Files of the runs are in
<code>units/</code> beside this page, figures for print in <code>figures/</code>.
<noscript>Curves need JavaScript; the same are in figures/.</noscript></footer>
<script type="application/json" id="figures">{embed(figures)}</script>
<script>
{_asset("report.js")}</script>
</body>
</html>
"""


def embed(value: Any) -> str:
    """Write JSON that can stand inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _asset(name: str) -> str:
    folder = resources.files("experiments") / "report_assets"
    return (folder / name).read_text(encoding="utf-8")


def _part(part: Part, provenance: Mapping[str, Mapping[str, Any]]) -> str:
    said = "".join(f"<li>{escape(text)}</li>" for text in part.sentences)
    sentences = f"<ul>{said}</ul>" if said else ""
    figures = "".join(_figure(figure, provenance) for figure in part.figures)
    tables = "".join(_table(table, provenance) for table in part.tables)
    return f"""<section id="{part.key}">
<h2>{escape(part.title)}</h2>
{sentences}{figures}{tables}
</section>
"""


def _table(table: Table, provenance: Mapping[str, Mapping[str, Any]]) -> str:
    head = "".join(f'<th scope="col">{escape(c)}</th>' for c in table.columns)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(_entry(entry, table.digits) for entry in entries)
        + "</tr>"
        for name, entries in table.rows
    )
    why = "".join(f'<p class="note">{escape(text)}</p>' for text in reasons(table))
    return f"""<div class="card" id="table-{table.key}">
<h3>{escape(table.title)}</h3>
<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>
<tbody>{rows}</tbody></table></div>
<p class="note">{escape(table.note)}</p>{why}
<div class="tools">{_download(table.key, table_csv(table))}</div>
{_provenance(table.units, provenance)}
</div>
"""


def _entry(entry: Entry, digits: int) -> str:
    ours = entry.ours
    printed = ""
    if entry.printed is not None:
        printed = f'<span class="paper">paper {entry.printed:g}</span>'
    if ours.mean is None:
        title = escape(ours.reason, quote=True)
        return f'<td class="empty" title="{title}">{DASH}{printed}</td>'
    error = ""
    if ours.error is not None:
        error = f" <small>± {ours.error:.{digits}f}</small>"
    return f"<td>{ours.mean:.{digits}f}{error}{printed}</td>"


def _figure(figure: Figure, provenance: Mapping[str, Mapping[str, Any]]) -> str:
    return f"""<div class="card" id="figure-{figure.key}">
<h3>{escape(figure.title)} <small>{escape(figure.y)}</small></h3>
<div data-figure="{figure.key}"></div>
<p class="note">{escape(figure.note)}</p>
<div class="tools">
<button type="button" data-log aria-pressed="false">Log scale</button>
{_download(figure.key, figure_csv(figure))}</div>
{_provenance(figure.units, provenance)}
</div>
"""


def _download(key: str, text: str) -> str:
    data = base64.b64encode(text.encode()).decode()
    return f'<a download="{key}.csv" href="data:text/csv;base64,{data}">CSV</a>'


def _provenance(
    names: Sequence[str], provenance: Mapping[str, Mapping[str, Any]]
) -> str:
    known = [provenance[name] for name in names if name in provenance]
    if not known:
        return ""
    commits = ", ".join(dict.fromkeys(done["commit"] for done in known))
    versions = ", ".join(
        f"{name} {known[-1]['versions'][name]}"
        for name in VERSIONS_SHOWN
        if name in known[-1]["versions"]
    )
    last = max(done["finished"] for done in known)
    lines = "".join(
        f"<li><code>{escape(done['command'])}</code> ({done['seconds']:g} s, "
        f"{escape(done['finished'])})</li>"
        for done in known
    )
    return (
        f"<details><summary>Commit {escape(commits)}; {escape(versions)}; "
        f"{escape(last)}; {len(known)} runs</summary><ul>{lines}</ul></details>"
    )


def _failures(failures: Mapping[str, str]) -> str:
    if not failures:
        return ""
    items = "".join(
        f"<li>{escape(name)}<pre>{escape(reason)}</pre></li>"
        for name, reason in failures.items()
    )
    return f'<div class="failed"><p>Units that failed:</p><ul>{items}</ul></div>'
