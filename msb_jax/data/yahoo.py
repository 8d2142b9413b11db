"""Read the raw Yahoo! R6A log: what the front page showed, and what was clicked.

A line is one visit: `time article click |user 2:... 1:1 |article 2:... 1:1 |...`, with
the article that was shown, and all that could have been. Days of millions of lines are
read line by line. A few broken lines are dropped and counted; a file with more broken
lines than good ones is refused.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from msb_jax.data.raw import integers, nonzero

DAYS = "ydata-fp-td-clicks-v1_0.*"
SOURCE = f"ask Yahoo! Webscope for R6A and unpack its day files {DAYS}"

_TOO_MANY = 1000  # broken lines after which a file may be given up
_MOST_ENTRIES = 100_000  # different texts of articles that are kept at once
_FEATURES = ("2", "3", "4", "5", "6")


class ClickLog(NamedTuple):
    """Clicks of a Yahoo! log, oldest first, and the articles with whole features."""

    clicks: np.ndarray  # [N] int64, the article of each click
    articles: np.ndarray  # [A] int64, ascending
    features: np.ndarray  # [A, 5] float64, means over the rows
    shown: np.ndarray  # [A] int64, rows that displayed the article
    sources: dict[str, str]  # sha256 by file name
    counts: dict[str, int]


def read_yahoo(
    path: str | Path, on_read: Callable[[int, int], None] | None = None
) -> ClickLog:
    """Read the clicks of Yahoo! R6A, line by line.

    An entry of an article that lacks one of its six features is dropped.

    Args:
        path: a day file, plain or .gz, or a folder of day files.
        on_read: told the bytes read so far and the bytes in all, now and then.

    Raises:
        FileNotFoundError: there is no day file.
        ValueError: a file is damaged or something else, or nothing is clicked.
    """
    paths = _find_yahoo(Path(path))
    counts, shown = Counter[str](), Counter[int]()
    entries, sums = Counter[bytes](), dict[int, np.ndarray]()
    times, clicks = array("q"), array("q")
    total, before = sum(p.stat().st_size for p in paths), 0
    if on_read is not None:
        on_read(0, total)
    for day in paths:
        good = bad = 0
        for number, line, position in _lines(day):
            if on_read is not None and number % 10_000 == 0:
                on_read(before + position, total)
            if not line.strip():
                counts["blank lines"] += 1
                continue
            head, *parts = line.rstrip(b"\r\n").split(b"|")
            row = integers(head.split())
            is_row = len(row) == 3 and row[2] in (0, 1)
            if not (is_row and parts and parts[0].startswith(b"user")):
                bad += 1
                if bad == 1:
                    first = number
                if bad > _TOO_MANY and bad > good:
                    break
                continue
            good += 1
            shown[row[1]] += 1
            entries.update(map(bytes.strip, parts[1:]))
            if len(entries) > _MOST_ENTRIES:
                _add_entries(entries, sums, counts)
            if row[2]:
                times.append(row[0])
                clicks.append(row[1])
        if bad > good:
            raise ValueError(
                f"{day} does not look like a day of Yahoo! R6A: line {first} is not "
                "'time article click |user ... |article 2:... 1:1'."
            )
        if not good:
            raise ValueError(f"{day} is empty.")
        counts["rows read"] += good + bad
        counts["malformed lines, dropped"] += bad
        before += day.stat().st_size
    _add_entries(entries, sums, counts)
    if not clicks:
        raise ValueError(f"{path} has no row with a click (third column 1).")
    if not sums:
        raise ValueError(f"{path} has no article with all six features 1 to 6.")
    counts["rows with a click"] = len(clicks)
    articles = np.array(sorted(sums), np.int64)
    added = np.stack([sums[a] for a in articles.tolist()])  # [A, 6]
    return ClickLog(
        clicks=np.array(clicks)[np.argsort(np.array(times), kind="stable")],
        articles=articles,
        features=added[:, 1:] / added[:, :1],
        shown=np.array([shown[a] for a in articles.tolist()], np.int64),
        sources={p.name: _sha256(p) for p in paths},
        counts=nonzero(counts),
    )


def _find_yahoo(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"There is no {path}; {SOURCE} there.")
    found = sorted(p for p in path.glob(DAYS) if p.is_file())
    # A day that is there twice, plain and packed, counts once.
    days = [p for p in found if p.suffix != ".gz" or p.with_suffix("") not in found]
    if not days:
        raise FileNotFoundError(f"{path} has no {DAYS}; {SOURCE} there.")
    return days


def _lines(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """Yield the number of a line, the line, and the position in the (packed) file."""
    number = 0
    opened: Any = gzip.open if path.suffix == ".gz" else nullcontext
    with open(path, "rb") as raw, opened(raw) as file:
        try:
            while line := file.readline(1 << 20):
                number += 1
                yield number, line, raw.tell()
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise ValueError(
                f"{path} is damaged or cut short after line {number}; download it "
                "again."
            ) from None


def _add_entries(
    entries: Counter[bytes], sums: dict[int, np.ndarray], counts: Counter[str]
) -> None:
    """Add the features of each article, [1 + 5] with the number of entries first.

    The text of an article is nearly always the same, so that each is parsed once.
    """
    for entry, times in entries.items():
        try:
            name, *cells = entry.decode("latin-1").split()
            (article,) = integers([name.encode()])
            pairs = dict(cell.split(":", 1) for cell in cells)
            float(pairs["1"])
            row = np.array([1.0, *(float(pairs[f]) for f in _FEATURES)])
        except (KeyError, ValueError):
            row = np.array([np.nan])
        if not np.isfinite(row).all():
            counts["malformed articles, dropped"] += times
        else:
            sums[article] = sums.get(article, np.zeros(6)) + times * row
    entries.clear()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
