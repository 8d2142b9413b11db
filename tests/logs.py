"""Small raw logs written by hand, and where the published ones are."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "lastfm": "hetrec2011-lastfm-2k",
    "movielens": "hetrec2011-movielens-2k-v2",
}
HEADER = "userID\titemID\ttagID\ttimestamp\n"
TAGS = "id\tvalue\n1\trock\n2\tsoft rock\n3\tjazz\n"
MS = 1_200_000_000_000  # in 2008


def published(*parts: str) -> Path:
    """Return a path in the published data; skip the test where there is none."""
    given = os.environ.get("MSB_DATA")
    path = Path(given) if given else ROOT.parent / "shared" / "data"
    path = path.joinpath(*parts)
    if not path.exists():
        pytest.skip("the published logs are not here; MSB_DATA names their folder")
    return path


def raw_folder(dataset: str) -> Path:
    return published("raw", FOLDERS[dataset])


def write_tagged(
    folder: Path,
    log: str | bytes,
    tags: str | bytes | None = TAGS,
    name: str = "user_taggedartists-timestamps.dat",
) -> Path:
    for file, text in ((name, log), ("tags.dat", tags)):
        if text is not None:
            data = text.encode() if isinstance(text, str) else text
            (folder / file).write_bytes(data)
    return folder


def random_tagged(folder: Path, name: str, num_rows: int = 400) -> Path:
    """Write a log of 8 users, 30 items and 20 tags of one to three words."""
    rng = np.random.default_rng(0)
    columns = [rng.integers(1, n + 1, num_rows) for n in (8, 30, 20)]
    rows = zip(*columns, MS + rng.permutation(num_rows), strict=True)
    log = HEADER + "".join("\t".join(map(str, row)) + "\n" for row in rows)
    words = [f"word{i}" for i in range(15)]
    texts = [" ".join(rng.choice(words, rng.integers(1, 4))) for _ in range(20)]
    tags = "id\tvalue\n" + "".join(f"{i}\t{t}\n" for i, t in enumerate(texts, 1))
    return write_tagged(folder, log, tags, name)


def yahoo_line(
    time: int, shown: int, click: int, articles: dict[int, list[float] | None]
) -> str:
    """Write a line of Yahoo! R6A; an article of None has one feature only."""

    def features(values: list[float] | None) -> str:
        if values is None:
            return "1:1"
        return " ".join(f"{i}:{v:.6f}" for i, v in enumerate(values, 2)) + " 1:1"

    user = "|user " + features([0.1, 0.2, 0.3, 0.3, 0.1])
    pool = " ".join(f"|{name} {features(v)}" for name, v in articles.items())
    return f"{time} {shown} {click} {user} {pool}\n"
