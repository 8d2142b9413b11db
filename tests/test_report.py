"""The report: one page without a network, nothing unescaped, dashes with reasons."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import report_html
from experiments.plan import Section
from experiments.report_markdown import (
    BEGIN,
    END,
    insert,
    make_markdown,
    make_tables,
)
from experiments.report_parts import (
    Entry,
    Figure,
    Panel,
    Part,
    Table,
    figure_csv,
    make_series,
    number,
    reasons,
    table_csv,
)
from experiments.report_plots import plot_figure
from experiments.report_verdicts import alone, exceeds_error, gains, helps
from experiments.results import Value, summarise

EVIL = "</script><script>alert(1)</script><img src=x onerror='x()'>|"
VOID = {"meta", "link", "br", "img", "input", "hr"}


def parts(text: str = "plain") -> list[Part]:
    rng = np.random.default_rng(0)
    lines = [
        make_series(f"{text} {i}", rng.random((3, 500)) * (i + 1), 20) for i in range(9)
    ]
    zero = make_series("zero", np.zeros((1, 500)), 20)
    figure = Figure(
        "curves",
        f"Curves {text}",
        "A note.",
        "round",
        "reward",
        [
            Panel("one", [*lines, zero], shaded=60),
            Panel("two", [zero]),
            Panel("none", [], reason=f"not run {text}"),
        ],
        ["u1"],
    )
    entries = [
        Entry(Value(0.5, 0.01), 0.4),
        Entry(Value(0.5), None),
        Entry(Value(None, reason=f"failed {text}"), 0.3),
    ]
    table = Table(
        "table", f"T {text}", "A note.", ["a", "b", text], [(text, entries)], ["u1"]
    )
    return [Part("part", f"Part {text}", [f"A sentence {text}."], [table], [figure])]


def page(text: str = "plain") -> str:
    done = {
        "commit": text,
        "command": f"python {text}",
        "versions": {"jax": text},
        "finished": "2026-01-01",
        "seconds": 1.5,
    }
    return report_html.make_page(
        parts(text), lead=[text], failures={text: text}, provenance={"u1": done}
    )


class Reader(HTMLParser):
    """Collects tags and attributes, and checks that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def test_page__parses_and_refers_to_nothing_outside() -> None:
    text = page()
    for _, attributes in read(text).tags:
        for name in ("src", "href", "action", "data", "poster"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "data:")), value
    rest = text.replace("http://www.w3.org/2000/svg", "")  # a name, never fetched
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|fetch\(|import\(", rest)


def test_page__escapes_everything() -> None:
    plain, evil = read(page()), read(page(EVIL))
    assert [tag for tag, _ in evil.tags] == [tag for tag, _ in plain.tags]
    assert not any("onerror" in attributes for _, attributes in evil.tags)


def test_embed__is_json_in_which_no_tag_can_end() -> None:
    text = report_html.embed({EVIL: "\u2028&"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {EVIL: "\u2028&"}
    with pytest.raises(ValueError):
        report_html.embed(float("nan"))


def test_page__offers_the_csv_that_it_shows() -> None:
    links = [a for tag, a in read(page()).tags if tag == "a" and "download" in a]
    texts = [
        base64.b64decode((a["href"] or "").partition(",")[2]).decode() for a in links
    ]
    (part,) = parts()
    assert texts == [figure_csv(part.figures[0]), table_csv(part.tables[0])]
    assert texts[1].splitlines()[1:] == [
        "plain,a,0.5,0.01,0.4,",
        "plain,b,0.5,,,",
        "plain,plain,,,0.3,failed plain",
    ]


def test_entries__show_ours_the_papers_and_why_there_is_none() -> None:
    text = page()
    assert "0.5000 <small>± 0.0100</small>" in text and "paper 0.4" in text
    assert 'title="failed plain">–<span class="paper">paper 0.3</span>' in text
    (part,) = parts()
    assert reasons(part.tables[0]) == ["– failed plain (plain, plain)"]
    assert number(Value(None, reason="x"), 3) == "–"
    assert summarise(np.array([1.0, np.nan]), "").reason == "not a number"


def test_markdown__has_the_same_entries() -> None:
    text = make_markdown(parts(), title="T", lead=["L"], failures={}, figures="f")
    assert "0.5000 ± 0.0100 (0.4)" in text
    assert "– (0.3)" in text and "– failed plain" in text
    assert "![Curves plain](f/curves.png)" in text
    evil = make_markdown(parts(EVIL), title="T", lead=[], failures={}, figures="f")
    (row,) = [x for x in evil.splitlines() if "0.5000 ±" in x]
    assert len(re.findall(r"(?<!\\)\|", row)) == 5


def test_insert__replaces_what_stands_between_the_markers() -> None:
    tables = make_tables(parts(), lead=["L"])
    assert "0.5000 ± 0.0100 (0.4)" in tables and "![" not in tables
    page = f"# Mine\n\n{BEGIN}\nold\n{END}\n\nrest\n"
    once = insert(page, tables)
    assert once is not None and "old" not in once
    assert once.startswith("# Mine\n") and once.endswith(f"{END}\n\nrest\n")
    assert insert(once, tables) == once
    assert insert("# Mine\n", tables) is None and insert(BEGIN, tables) is None


def test_plot_figure__writes_the_same_bytes_twice(tmp_path: Path) -> None:
    (part,) = parts()
    seen = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        plot_figure(tmp_path / name, part.figures[0])
        files = sorted((tmp_path / name).iterdir())
        assert [f.name for f in files] == ["curves.pdf", "curves.png"]
        seen.append([f.read_bytes() for f in files])
    assert seen[0] == seen[1]


def test_make_series__is_thin_and_keeps_the_ends() -> None:
    values = np.tile(np.arange(5000.0), (3, 1))
    series = make_series("a", values, 1)
    assert len(series.x) <= 160 and series.x[0] == 1 and series.x[-1] == 5000
    np.testing.assert_allclose(series.mean, np.array(series.x) - 1, rtol=1e-5)
    assert set(series.error) == {0.0}
    assert make_series("a", np.ones((1, 1)), 1).mean == [1.0]


@pytest.mark.parametrize(
    ("gain", "is_larger"),
    [
        (Value(0.2, 0.1), True),
        (Value(0.1, 0.1), False),
        (Value(-0.2, 0.1), False),
        (Value(0.1), False),
        (Value(None), False),
    ],
)
def test_exceeds_error__is_what_helping_means(gain: Value, is_larger: bool) -> None:
    assert exceeds_error(gain) is is_larger


CHROMIUM = next(
    (
        p
        for n in ("chromium", "chromium-browser", "google-chrome")
        if (p := shutil.which(n))
    ),
    None,
)
# Presses every button, and says in attributes of the page what it saw.
PRESS = """<script>
const root = document.documentElement;
root.dataset.before = root.dataset.theme;
document.getElementById("theme").click();
for (const place of document.querySelectorAll("[data-figure]")) {
  place.dataset.lines = place.querySelectorAll(".panel path").length;
  for (const box of place.querySelectorAll("input")) box.click();
  place.dataset.others = place.querySelectorAll(".panel path").length;
  const svg = place.querySelector(".panel svg");
  const area = svg.getBoundingClientRect();
  const at = { clientX: area.left + area.width / 2, clientY: area.top + 20 };
  svg.dispatchEvent(new PointerEvent("pointermove", at));
  place.dataset.tip = place.querySelector(".tip").textContent;
  place.parentElement.querySelector("button[data-log]").click();
}
root.dataset.wide = root.scrollWidth > root.clientWidth;
</script>"""


def browse(path: Path, folder: Path) -> tuple[str, str]:
    """Return the page as the browser has it, and what it complained about."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--enable-logging=stderr", "--window-size=1280,900"]
    command += [f"--user-data-dir={folder}", "--virtual-time-budget=5000"]
    command += ["--dump-dom", f"file://{path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(complaints)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_page__draws_and_toggles_in_a_browser(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page(EVIL).replace("</body>", PRESS + "</body>"))
    text, complaints = browse(path, tmp_path / "profile")
    assert complaints == ""
    tags = read_browser(text)
    (root,) = [a for tag, a in tags if tag == "html"]
    assert root["data-ready"] == "true" and root["data-errors"] == "0"
    assert {root["data-before"], root["data-theme"]} == {"light", "dark"}
    assert root["data-wide"] == "false"
    (figure,) = [a for _, a in tags if "data-figure" in a]
    assert figure["data-drawn"] == "3" and figure["data-scale"] == "log"
    assert figure["data-lines"] == "6"  # the others are switched off at first
    assert figure["data-others"] == "5"  # three more in one panel, zero in both
    assert "round 2" in (figure["data-tip"] or "")
    assert "±" in (figure["data-tip"] or "")


def read_browser(text: str) -> list[tuple[str, dict[str, str | None]]]:
    """Return the tags of a dumped page."""
    reader = HTMLParser()
    tags: list[tuple[str, dict[str, str | None]]] = []
    reader.handle_starttag = lambda tag, attrs: tags.append((tag, dict(attrs)))  # type: ignore[method-assign]
    reader.feed(text)
    return tags


class Told:
    """Stands in for `Results`: the rewards of each row, one a seed, and prices."""

    def __init__(
        self, rewards: dict[str, list[float]], price: dict[str, float] | None = None
    ) -> None:
        self.rewards = {row: np.array(values) for row, values in rewards.items()}
        self.price = price or {}

    def by_seed(self, cell: str, measure: str) -> np.ndarray:
        price = self.price.get(cell, 0.0) if measure == "composite" else 0.0
        return self.rewards[cell] - price

    def value(self, cell: str, measure: str) -> Value:
        return summarise(self.by_seed(cell, measure), "")

    def difference(self, cell: str, base: str, measure: str) -> Value:
        return summarise(self.by_seed(cell, measure) - self.by_seed(base, measure), "")


def section_of(rows: list[str]) -> Section:
    cells: Any = {(row, "linear"): row for row in rows}
    return Section("s", "s", cells, {})


def test_helps__says_which_part_helps_and_which_does_not() -> None:
    told: Any = Told(
        {
            "all": [1.0, 1.0],
            "no_solver": [0.5, 0.52],  # a clear loss
            "no_g2anet": [0.9, 1.2],  # within its standard error
            "no_cem_ppo": [1.1, 1.1],  # better without
        }
    )
    rows = ["all", "no_solver", "no_g2anet", "no_cem_ppo"]
    helped, useless = helps(told, section_of(rows), "all", lambda row: row[3:])
    assert "solver (+0.4900 ± 0.0100)" in helped and "g2anet" not in helped
    assert "no help is shown" in useless and "solver" not in useless
    assert "g2anet (-0.0500 ± 0.1500)" in useless and "cem_ppo (-0.1000" in useless


def test_helps__says_nothing_of_a_single_seed() -> None:
    told: Any = Told({"all": [1.0], "solver": [0.5]})
    section = section_of(["all", "solver"])
    assert helps(told, section, "all", str) == []
    assert alone(told, section, "all") == []


def test_alone__names_a_sampler_that_does_as_well() -> None:
    told: Any = Told({"all": [1.0, 1.0], "solver": [0.99, 1.02], "g2anet": [0.5, 0.6]})
    (sentence,) = alone(told, section_of(["all", "solver", "g2anet"]), "all")
    assert "solver (-0.0050 ± 0.0150)" in sentence and "g2anet" not in sentence


def test_gains__compare_the_reward_and_what_is_left_of_it() -> None:
    rows = ["master_slave", "bold", "shy", "oracle"]
    rewards = {"master_slave": [0.8, 0.82], "bold": [0.9, 0.91], "shy": [0.7, 0.7]}
    told: Any = Told(rewards | {"oracle": [1.0, 1.0]}, {"bold": 0.5})
    (sentence,) = gains(told, section_of(rows))
    first, second = sentence.split(". In r - lam c ")
    assert "is not shown to be ahead" in first and "bold: -10.5 %" in first
    assert "it is ahead of the best other, shy (+0.1100 ± 0.0100)." in second
