"""The file of a prepared log: round trip, old layout, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msb_jax.data.demo import demo_log
from msb_jax.data.format import FORMAT_VERSION, Log, load_log, save_log
from msb_jax.problem import find_feasible, make_problem
from tests.logs import published

ARRAYS = ("item_vectors", "click_items", "user_offsets", "user_ids", "log_users")


def small_log() -> Log:
    return Log(
        dataset="lastfm",
        item_vectors=np.eye(3, 4, dtype=np.float32),
        click_items=np.array([0, 1, 2, 2, 0], np.int32),
        user_offsets=np.array([0, 2, 4, 5]),
        user_ids=np.array([7, 9, 30]),
        log_users=np.array([1, 0, 2, 0, 1], np.int32),
        summary={"counts": {"rows kept": 5}},
    )


def stored(**changes: Any) -> dict[str, Any]:
    arrays = small_log()._asdict() | {"summary": "{}", "format_version": 1}
    arrays |= changes
    return {name: value for name, value in arrays.items() if value is not None}


def assert_equal_logs(a: Log, b: Log) -> None:
    for name in ARRAYS:
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype, name
        np.testing.assert_array_equal(x, y)
    assert (a.dataset, a.summary) == (b.dataset, b.summary)


def test_save_log__round_trip_and_equal_bytes(tmp_path: Path) -> None:
    for log in (small_log(), demo_log(rounds=50)):
        one, two = tmp_path / "one.npz", tmp_path / "two.npz"
        save_log(one, log)
        save_log(two, log)
        assert one.read_bytes() == two.read_bytes()
        assert_equal_logs(load_log(one), log)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["one.npz", "two.npz"]


def test_save_log__leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "log.npz"
    path.write_text("old")
    with pytest.raises(ValueError, match="NaN"):
        save_log(path, small_log()._replace(item_vectors=np.full((3, 4), np.nan)))
    with pytest.raises(ValueError, match="JSON"):
        save_log(path, small_log()._replace(summary={"x": float("nan")}))
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_clicks_of__most_active_or_given_user() -> None:
    log = small_log()
    assert log.clicks_of().tolist() == [0, 1]  # users 7 and 9 have two rows each
    assert log.clicks_of(9).tolist() == [2, 2]
    with pytest.raises(ValueError, match="User 8 is not in the log"):
        log.clicks_of(8)


def test_load_log__layout_without_a_version(tmp_path: Path) -> None:
    path = tmp_path / "old.npz"
    arrays = stored(format_version=None, user_ids=None, dataset=None, summary=None)
    np.savez(path, **arrays)
    log = load_log(path)
    assert log.dataset == "old" and log.user_ids.tolist() == [0, 1, 2]
    assert log.clicks_of(2).tolist() == [0]


def test_load_log__nearly_unit_rows_are_made_unit(tmp_path: Path) -> None:
    path = tmp_path / "log.npz"
    np.savez(path, **stored(item_vectors=1.0005 * np.eye(3, 4)))
    np.testing.assert_array_equal(load_log(path).item_vectors, np.eye(3, 4))


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "future version": ({"format_version": FORMAT_VERSION + 1}, "has format version 2"),
    "odd version": ({"format_version": "one"}, "must be one whole number"),
    "missing arrays": (
        {"click_items": None, "log_users": None},
        "it lacks click_items, log_users",
    ),
    "missing ids": ({"user_ids": None}, "it lacks user_ids"),
    "pickle": (
        {"click_items": np.array([{}, 1, 2, 2, 0], object)},
        "click_items is a pickled object",
    ),
    "flat vectors": ({"item_vectors": np.ones(3)}, r"must be floats \[L, D\]"),
    "whole vectors": ({"item_vectors": np.eye(3, dtype=int)}, r"must be floats"),
    "no vectors": ({"item_vectors": np.ones((0, 4))}, r"must be floats"),
    "NaN": ({"item_vectors": np.full((3, 4), np.nan)}, "NaN or infinite"),
    "infinity": ({"item_vectors": np.full((3, 4), np.inf)}, "NaN or infinite"),
    "length": ({"item_vectors": 1.01 * np.eye(3, 4)}, "not of length 1"),
    "float clicks": ({"click_items": np.ones(5)}, "click_items must be a list"),
    "no clicks": ({"click_items": np.zeros(0, int)}, "click_items must be a list"),
    "arm too large": ({"click_items": np.array([0, 1, 2, 2, 3])}, r"outside 0\.\.2"),
    "negative arm": ({"click_items": np.array([0, 1, 2, 2, -1])}, r"outside 0\.\.2"),
    "falling offsets": ({"user_offsets": np.array([0, 4, 2, 5])}, "must rise from 0"),
    "short offsets": ({"user_offsets": np.array([0, 2, 4, 4])}, "number of rows, 5"),
    "late offsets": ({"user_offsets": np.array([1, 2, 4, 5])}, "must rise from 0"),
    "equal ids": ({"user_ids": np.array([7, 7, 30])}, "3 different ids"),
    "few ids": ({"user_ids": np.array([7, 9])}, "3 different ids"),
    "unknown user": ({"log_users": np.array([1, 0, 3, 0, 1])}, "each user as often"),
    "other counts": ({"log_users": np.array([1, 0, 1, 0, 1])}, "each user as often"),
    "broken summary": ({"summary": "{"}, "summary must be a JSON object"),
    "other summary": ({"summary": "[]"}, "summary must be a JSON object"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_load_log__refuses(case: str, tmp_path: Path) -> None:
    changes, sentence = BROKEN[case]
    path = tmp_path / "log.npz"
    np.savez(path, **stored(**changes))
    with pytest.raises(ValueError, match=sentence) as caught:
        load_log(path)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: b"", r"is not an \.npz file"),
        (lambda data: b"some text\n", r"is not an \.npz file"),
        (lambda data: data[:-200], r"is not an \.npz file"),
        (lambda data: data[:60] + b"\xff" * 40 + data[100:], "is damaged"),
    ],
)
def test_load_log__refuses_damaged_files(
    damage: Callable[[bytes], bytes], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "log.npz"
    save_log(path, small_log())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=sentence):
        load_log(path)


def test_load_log__missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"experiments\.prepare"):
        load_log(tmp_path / "log.npz")


@pytest.mark.parametrize(
    ("dataset", "num_rows", "num_users", "most"),
    [("lastfm", 167_660, 1823, 2551), ("movielens", 47_957, 2113, 5430)],
)
def test_load_log__published_arrays(
    dataset: str, num_rows: int, num_users: int, most: int
) -> None:
    log = load_log(published("prepared", f"{dataset}.npz"))
    assert log.item_vectors.shape == (40, 10) and log.dataset == dataset
    assert log.click_items.size == num_rows and log.user_ids.size == num_users
    assert log.clicks_of().size == most


@pytest.mark.parametrize("seed", range(8))
def test_demo_log__conflicts_bursts_and_drift(seed: int) -> None:
    log = demo_log(seed)
    clicks = log.clicks_of()
    assert log.item_vectors.shape == (40, 10) and clicks.size == 3000
    problem = make_problem(log.item_vectors, 10, metric="ned_abs", threshold=0.5)
    assert 0.10 <= int(problem.num_conflicts) / 780 <= 0.25
    assert find_feasible(problem) is not None
    assert 0.65 <= (clicks[1:] == clicks[:-1]).mean() <= 0.75
    # The best ten arms of a tenth of the log do better there than the best of all.
    counts = np.stack([np.bincount(p, minlength=40) for p in np.split(clicks, 10)])
    moving = np.sort(counts, axis=1)[:, -10:].sum()
    fixed = np.sort(counts.sum(axis=0))[-10:].sum()
    assert moving > 1.1 * fixed


def test_demo_log__repeats_and_differs_by_seed() -> None:
    assert_equal_logs(demo_log(3), demo_log(3))
    assert not np.array_equal(demo_log(3).click_items, demo_log(4).click_items)
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        demo_log(rounds=0)
