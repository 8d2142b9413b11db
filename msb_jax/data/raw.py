"""Read the raw HetRec 2011 logs as they are published.

LastFM, Delicious and MovieLens: who tagged which item with what, and when. Tab
separated with one header line and no quoting; columns count by their position.

A few broken lines are dropped and counted; a file with more broken lines than good
ones is refused. Rows may come in any order and more than once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

TAGS = "tags.dat"
TRUNCATED = "truncated last line, dropped"
TAGGED = {  # times in milliseconds are preferred to dates
    "lastfm": ("user_taggedartists-timestamps.dat", "user_taggedartists.dat"),
    "delicious": ("user_taggedbookmarks-timestamps.dat", "user_taggedbookmarks.dat"),
    "movielens": ("user_taggedmovies-timestamps.dat", "user_taggedmovies.dat"),
}
SOURCES = {
    name: f"download {archive}.zip from files.grouplens.org/datasets/hetrec2011/ "
    "and unpack it"
    for name, archive in (
        ("lastfm", "hetrec2011-lastfm-2k"),
        ("delicious", "hetrec2011-delicious-2k"),
        ("movielens", "hetrec2011-movielens-2k-v2"),
    )
}
# Times outside are wrong, but their rows count: see `read_tagged`.
EARLIEST, LATEST = np.array(["2000-01-01", "2012-01-01"], "M8[ms]").astype(np.int64)

_INT64_MAX = 2**63 - 1


class TaggedLog(NamedTuple):
    """Rows of a HetRec log, oldest first."""

    dataset: str
    users: np.ndarray  # [N] int64
    items: np.ndarray  # [N] int64
    tags: np.ndarray  # [N] int64
    times: np.ndarray  # [N] int64, milliseconds since 1970
    tag_texts: dict[int, str]
    sources: dict[str, str]  # sha256 by file name
    counts: dict[str, int]


def read_tagged(folder: str | Path, dataset: str) -> TaggedLog:
    """Read a HetRec log and the texts of its tags.

    Rows with a time before 2000 or after 2011 are kept and counted: they belong to
    the published numbers of rows, and stand first or last in the order of time. Rows
    of the same time stay in the order of the file.

    Args:
        folder: holds the files of the unpacked archive.
        dataset: one of `TAGGED`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not what its name says.
    """
    if dataset not in TAGGED:
        raise ValueError(f"dataset must be one of {', '.join(TAGGED)}, got {dataset}.")
    path = _find_tagged(Path(folder), dataset)
    tags_path = path.with_name(TAGS)
    if not tags_path.is_file():
        raise FileNotFoundError(
            f"{tags_path} is missing; it holds the texts of the tags: "
            f"{SOURCES[dataset]}."
        )
    data, counts = path.read_bytes(), Counter[str]()
    rows = _read_rows(path, data, counts, is_dated="timestamps" not in path.name)
    rows = rows[np.argsort(rows[:, 3], kind="stable")]
    counts["duplicate rows, kept"] = len(rows) - len(np.unique(rows, axis=0))
    tag_data = tags_path.read_bytes()
    texts = _read_tag_texts(tags_path, tag_data, counts)
    unknown = ~np.isin(rows[:, 2], np.fromiter(texts, np.int64))
    counts["rows whose tag has no text, kept"] = int(unknown.sum())
    if 2 * unknown.sum() > len(rows):
        raise ValueError(
            f"{tags_path} has no text for the tags of {unknown.sum()} of {len(rows)} "
            f"rows of {path.name}; it seems to belong to another log."
        )
    users, items, tags, times = np.ascontiguousarray(rows.T)
    return TaggedLog(
        dataset=dataset,
        users=users,
        items=items,
        tags=tags,
        times=times,
        tag_texts=texts,
        sources={
            path.name: hashlib.sha256(data).hexdigest(),
            TAGS: hashlib.sha256(tag_data).hexdigest(),
        },
        counts=nonzero(counts),
    )


def _find_tagged(folder: Path, dataset: str) -> Path:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There is no folder {folder}; {SOURCES[dataset]} there."
        )
    for name in TAGGED[dataset]:
        if (folder / name).is_file():
            return folder / name
    others = [d for d in TAGGED if any((folder / n).is_file() for n in TAGGED[d])]
    hint = f"it holds the {others[0]} log" if others else f"{SOURCES[dataset]} there"
    raise FileNotFoundError(
        f"{folder} has neither {' nor '.join(TAGGED[dataset])}; {hint}."
    )


def _read_rows(
    path: Path, data: bytes, counts: Counter[str], is_dated: bool
) -> np.ndarray:
    """Parse user, item, tag and time in milliseconds, int64[N, 4]."""
    columns = "user, item, tag, day, month, year" if is_dated else "user, item, tag, ms"
    width = columns.count(",") + 1
    lines = _split(path, data)
    rows, numbers, bad = [], [], Counter[str]()
    first = len(lines) + 1  # broken line
    # Some copies have lost their header.
    start = 0 if len(integers(lines[0].split(b"\t"))) == width else 1
    for number, line in enumerate(lines[start:], start + 1):
        if not line.strip():
            counts["blank lines"] += 1
            continue
        cells = line.split(b"\t")
        row = integers(cells)
        if len(cells) != width:
            reason = "lines with a wrong number of columns"
        elif not row:
            reason = "lines with a cell that is no whole number of 64 bits"
        elif min(row[:3]) < 0:
            reason = "lines with a negative id"
        else:
            rows.append(row)
            numbers.append(number)
            continue
        if number == len(lines) and not data.endswith(b"\n"):
            counts[TRUNCATED] = 1
        else:
            bad[f"{reason}, dropped"] += 1
            first = min(first, number)
    found, at = np.array(rows, np.int64).reshape(-1, width), np.array(numbers, np.int64)
    if is_dated:
        times, is_date = _milliseconds(*found[:, 3:].T)
        if not is_date.all():
            bad["lines with a date that is not in the calendar, dropped"] = int(
                (~is_date).sum()
            )
            first = min(first, int(at[~is_date][0]))
        found, at = np.column_stack([found[:, :3], times])[is_date], at[is_date]
    if bad.total() > len(found):
        raise ValueError(
            f"{path} does not look like a log of tags: line {first} is not {columns} "
            "as whole numbers between tabs."
        )
    if not len(found):
        raise ValueError(f"{path} has a header but no rows ({columns}) below it.")
    odd = (found[:, 3] < EARLIEST) | (found[:, 3] >= LATEST)
    if odd[-1] and at[-1] == len(lines) and not data.endswith(b"\n"):
        # The last number of the file has lost its end.
        found, odd = found[:-1], odd[:-1]
        counts[TRUNCATED] = 1
    counts.update(bad)
    counts["rows read"] = len(found) + bad.total() + counts[TRUNCATED]
    counts["rows with an impossible date, kept"] = int(odd.sum())
    return found


def _milliseconds(
    day: np.ndarray, month: np.ndarray, year: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Turn dates into milliseconds since 1970, and say which are in the calendar."""
    is_near = (year > 0) & (year < 10_000) & (month > 0) & (month < 13)
    is_near &= (day > 0) & (day < 32)
    year, month, day = (np.where(is_near, x, 1) for x in (year, month, day))
    start = (12 * (year - 1970) + month - 1).astype("M8[M]")
    date = start.astype("M8[D]") + (day - 1)
    is_date = is_near & (date.astype("M8[M]") == start)
    return date.astype("M8[ms]").astype(np.int64), is_date


def _read_tag_texts(path: Path, data: bytes, counts: Counter[str]) -> dict[int, str]:
    try:
        data.decode()
        encoding = "utf-8"
    except UnicodeDecodeError:
        encoding = "latin-1"
    lines = _split(path, data)
    if not integers([lines[0].partition(b"\t")[0]]):
        lines = lines[1:]  # the header
    texts: dict[int, str] = {}
    bad = 0
    for line in filter(bytes.strip, lines):
        cell, tab, text = line.partition(b"\t")
        number = integers([cell])
        if not (number and tab and number[0] >= 0):
            bad += 1
        elif number[0] in texts:
            counts["tags with a second text, the first kept"] += 1
        else:
            texts[number[0]] = text.decode(encoding)
    if bad > len(texts):
        raise ValueError(
            f"{path} does not look like a list of tags: {bad} of {len(lines)} lines "
            "are not a number, a tab and a text."
        )
    if not texts:
        raise ValueError(f"{path} has a header but no tags below it.")
    counts["malformed lines of tags, dropped"] = bad
    return texts


def _split(path: Path, data: bytes) -> list[bytes]:
    """Split a text into lines without their ends, LF or CRLF."""
    if not data.strip():
        raise ValueError(f"{path} is empty.")
    if b"\0" in data[:4096]:
        raise ValueError(f"{path} is a binary file, not tab separated text.")
    lines = [line.rstrip(b"\r") for line in data.split(b"\n")]
    return lines if lines[-1] else lines[:-1]


def integers(cells: list[bytes]) -> list[int]:
    """Parse whole numbers of 64 bits; none at all if one cell is something else."""
    try:
        row = list(map(int, cells))
    except ValueError:
        return []
    is_fitting = all(-_INT64_MAX <= x <= _INT64_MAX for x in row)
    return row if is_fitting and not any(b"_" in c for c in cells) else []


def nonzero(counts: Counter[str]) -> dict[str, int]:
    """Return what was counted at all, as plain numbers."""
    return {name: int(count) for name, count in counts.items() if count}
