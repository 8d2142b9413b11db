"""Raw logs: what is accepted, what is dropped and counted, what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from msb_jax.data.raw import TAGGED, read_tagged
from msb_jax.data.yahoo import read_yahoo
from tests.logs import HEADER, MS, TAGS, raw_folder, write_tagged, yahoo_line

DATED = "user_taggedartists.dat"
DATES = "userID\titemID\ttagID\tday\tmonth\tyear\n"
DAY = "ydata-fp-td-clicks-v1_0.20090501"
POOL: dict[int, list[float] | None] = {
    11: [0.5, 0.1, 0.2, 0.1, 0.1],
    12: [0.1, 0.6, 0.1, 0.1, 0.1],
    13: None,
}


def row(user: int, item: int, tag: int = 1, time: int = MS) -> str:
    return f"{user}\t{item}\t{tag}\t{time}\n"


TWO = row(1, 5) + row(2, 6)
REFUSED = {
    "empty": ("", "is empty"),
    "header only": (HEADER, "has a header but no rows"),
    "too few columns": (HEADER + "1\t2\n" * 3, r"line 2 is not user, item, tag, ms"),
    "comma separated": (HEADER + "1,2,3,4\n" * 3, "does not look like a log of tags"),
    "binary": (b"\x7fELF\0\0\1\n\0\0", "is a binary file"),
    "utf-16": ((HEADER + TWO).encode("utf-16"), "is a binary file"),
    "words": (HEADER + "a\tb\tc\td\n", "line 2 is not user, item, tag, ms"),
    "more bad than good": (HEADER + row(1, 5) + "x\n" * 2, "line 3 is not"),
    "only huge ids": (HEADER + row(2**63, 5), "line 2 is not"),
}
# What the file holds below its header; items of the rows in order; what is counted.
ACCEPTED = {
    "unsorted": (row(1, 5, time=MS + 1) + row(2, 6), [6, 5], None),
    "equal times": (row(1, 9) + row(1, 3) + row(1, 5), [9, 3, 5], None),
    "duplicates": (row(1, 5) * 3, [5, 5, 5], ("duplicate rows, kept", 2)),
    "mixed ends": (row(1, 5)[:-1] + "\r\n" + row(2, 6), [5, 6], None),
    "no end of line": (TWO[:-1], [5, 6], None),
    "blank lines": (
        "\n" + row(1, 5) + "\r\n\n" + row(2, 6),
        [5, 6],
        ("blank lines", 3),
    ),
    "cut in a row": (TWO + "3\t7", [5, 6], ("truncated last line, dropped", 1)),
    "cut in the time": (
        TWO + row(3, 7)[:-4],
        [5, 6],
        ("truncated last line, dropped", 1),
    ),
    "huge id": (
        TWO + row(2**63, 7),
        [5, 6],
        ("lines with a cell that is no whole number of 64 bits, dropped", 1),
    ),
    "negative id": (TWO + row(-1, 7), [5, 6], ("lines with a negative id, dropped", 1)),
    "extra column": (
        TWO + "1\t2\t3\t4\t5\n",
        [5, 6],
        ("lines with a wrong number of columns, dropped", 1),
    ),
    "underscore": (
        TWO + f"1_0\t7\t1\t{MS}\n",
        [5, 6],
        ("lines with a cell that is no whole number of 64 bits, dropped", 1),
    ),
    "impossible time": (
        TWO + row(3, 7, time=-5),
        [7, 5, 6],
        ("rows with an impossible date, kept", 1),
    ),
    "tag without text": (
        TWO + row(3, 7, tag=99),
        [5, 6, 7],
        ("rows whose tag has no text, kept", 1),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_read_tagged__refuses_what_is_no_log(case: str, tmp_path: Path) -> None:
    log, sentence = REFUSED[case]
    write_tagged(tmp_path, log)
    with pytest.raises(ValueError, match=sentence) as caught:
        read_tagged(tmp_path, "lastfm")
    assert TAGGED["lastfm"][0] in str(caught.value)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ACCEPTED)
def test_read_tagged__accepts_and_counts(case: str, tmp_path: Path) -> None:
    rows, items, counted = ACCEPTED[case]
    log = read_tagged(write_tagged(tmp_path, HEADER + rows), "lastfm")
    assert log.items.tolist() == items
    counts = {k: v for k, v in log.counts.items() if k != "rows read"}
    assert counts == (dict([counted]) if counted else {})


def test_read_tagged__a_lost_header_costs_no_row(tmp_path: Path) -> None:
    assert read_tagged(write_tagged(tmp_path, TWO), "lastfm").items.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("tags", "error", "sentence"),
    [
        (None, FileNotFoundError, r"tags\.dat is missing"),
        ("", ValueError, r"tags\.dat is empty"),
        ("id\tvalue\n", ValueError, "no tags below"),
        ("id\tvalue\nrock\njazz\n", ValueError, "does not look like a list of tags"),
        ("id\tvalue\n77\trock\n", ValueError, "seems to belong to another log"),
    ],
)
def test_read_tagged__refuses_wrong_tags(
    tags: str | None, error: type[Exception], sentence: str, tmp_path: Path
) -> None:
    write_tagged(tmp_path, HEADER + TWO, tags)
    with pytest.raises(error, match=sentence):
        read_tagged(tmp_path, "lastfm")


def test_read_tagged__tags_are_utf8_or_latin1(tmp_path: Path) -> None:
    for encoding in ("utf-8", "latin-1"):
        tags = f'{TAGS}4\t"café\tnoir\r\n'.encode(encoding)
        log = read_tagged(write_tagged(tmp_path, HEADER + TWO, tags), "lastfm")
        assert log.tag_texts[4] == '"café\tnoir'


def test_read_tagged__says_where_to_get_the_files(tmp_path: Path) -> None:
    sentence = r"hetrec2011-lastfm-2k\.zip from files\.grouplens\.org"
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match=sentence):
            read_tagged(folder, "lastfm")
    write_tagged(tmp_path, HEADER + TWO, name="user_taggedmovies.dat")
    with pytest.raises(FileNotFoundError, match="it holds the movielens log"):
        read_tagged(tmp_path, "lastfm")
    with pytest.raises(ValueError, match="must be one of lastfm"):
        read_tagged(tmp_path, "netflix")


def test_read_tagged__dates(tmp_path: Path) -> None:
    rows = (
        "1\t5\t1\t1\t4\t2009\n2\t6\t1\t29\t2\t2008\n3\t7\t1\t1\t6\t1956\n"
        "4\t8\t1\t29\t2\t2009\n5\t9\t1\t1\t13\t2009\n"
    )
    log = read_tagged(write_tagged(tmp_path, DATES + rows, name=DATED), "lastfm")
    assert log.items.tolist() == [7, 6, 5]
    assert log.times[1] == np.datetime64("2008-02-29", "ms").astype(np.int64)
    assert log.counts == {
        "rows read": 5,
        "lines with a date that is not in the calendar, dropped": 2,
        "rows with an impossible date, kept": 1,
    }
    write_tagged(tmp_path, DATES + "1\t5\t1\t2009\t4\t1\n" * 2, name=DATED)
    with pytest.raises(ValueError, match="line 2 is not user, item, tag, day, month"):
        read_tagged(tmp_path, "lastfm")


def test_read_tagged__prefers_timestamps(tmp_path: Path) -> None:
    write_tagged(tmp_path, DATES + "1\t5\t1\t1\t4\t2009\n", name=DATED)
    write_tagged(tmp_path, HEADER + row(1, 6))
    assert read_tagged(tmp_path, "lastfm").items.tolist() == [6]


@pytest.mark.parametrize(
    ("dataset", "num_rows", "num_users", "num_items", "num_odd"),
    [("lastfm", 186_479, 1892, 12_523, 5), ("movielens", 47_957, 2113, 5908, 0)],
)
def test_read_tagged__published_logs(
    dataset: str, num_rows: int, num_users: int, num_items: int, num_odd: int
) -> None:
    log = read_tagged(raw_folder(dataset), dataset)
    assert log.counts["rows read"] == log.items.size == num_rows
    assert np.unique(log.users).size == num_users
    assert np.unique(log.items).size == num_items
    assert log.counts.get("rows with an impossible date, kept", 0) == num_odd
    assert (np.diff(log.times) >= 0).all()


def write_yahoo(folder: Path, packed: bool = False) -> Path:
    lines = [
        yahoo_line(200, 11, 1, POOL),
        yahoo_line(100, 12, 1, POOL),
        yahoo_line(300, 11, 0, {**POOL, 11: [0.7, 0.1, 0.2, 0.1, 0.1]}),
        yahoo_line(300, 13, 1, {13: None}),
    ]
    data = "".join(lines).encode()
    path = folder / (DAY + ".gz" if packed else DAY)
    path.write_bytes(gzip.compress(data) if packed else data)
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_read_yahoo__by_hand(packed: bool, tmp_path: Path) -> None:
    path = write_yahoo(tmp_path, packed)
    log = read_yahoo(path)
    assert log.clicks.tolist() == [12, 11, 13]
    assert log.articles.tolist() == [11, 12] and log.shown.tolist() == [2, 1]
    np.testing.assert_allclose(log.features[0], [1.7 / 3, 0.1, 0.2, 0.1, 0.1])
    np.testing.assert_allclose(log.features[1], POOL[12])
    assert log.counts["malformed articles, dropped"] == 4
    assert log.counts["rows read"] == 4 and log.counts["rows with a click"] == 3


def test_read_yahoo__a_day_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    for packed in (False, True):
        write_yahoo(tmp_path, packed)
    log = read_yahoo(tmp_path, lambda done, total: seen.append((done, total)))
    assert log.counts["rows read"] == 4 and list(log.sources) == [DAY]
    assert seen == [(0, (tmp_path / DAY).stat().st_size)]


def test_read_yahoo__drops_a_few_bad_lines(tmp_path: Path) -> None:
    path = write_yahoo(tmp_path)
    more = "nonsense\n\n100 11 7 |user 1:1\n|||\n"
    path.write_text(path.read_text() + more + "400 11 1 |user 1:1 ||x 1:1 |11 2:nan")
    log = read_yahoo(path)
    assert log.clicks.tolist() == [12, 11, 13, 11]
    assert log.counts["malformed lines, dropped"] == 3
    assert log.counts["malformed articles, dropped"] == 4 + 3
    assert log.counts["blank lines"] == 1


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is empty"),
        (b"1\t2\t3\t4\n" * 3, "line 1 is not 'time article click"),
        (b"no line\n" * 3000, "does not look like a day of Yahoo"),
        (yahoo_line(1, 11, 0, POOL).encode(), "no row with a click"),
        (yahoo_line(1, 13, 1, {13: None}).encode(), "no article with all six"),
    ],
)
def test_read_yahoo__refuses(data: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / DAY).write_bytes(data)
    with pytest.raises(ValueError, match=sentence):
        read_yahoo(tmp_path)


def test_read_yahoo__truncated_or_false_gzip(tmp_path: Path) -> None:
    path = write_yahoo(tmp_path, packed=True)
    whole = path.read_bytes()
    for data in (whole[:-20], b"plain text\n", whole[:40] + b"\xff" * 40):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="is damaged or cut short after line"):
            read_yahoo(path)


def test_read_yahoo__says_where_to_get_the_files(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match="Webscope"):
            read_yahoo(path)
