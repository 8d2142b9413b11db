"""From a raw log to a bandit log."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from msb_jax.data.format import Log, load_log, save_log
from msb_jax.data.prepare import STEPS, PrepareConfig, prepare_tagged, prepare_yahoo
from msb_jax.data.raw import TaggedLog, read_tagged
from msb_jax.data.yahoo import ClickLog
from tests.logs import random_tagged, raw_folder

BOOKMARKS = "user_taggedbookmarks-timestamps.dat"
SMALL = PrepareConfig(num_arms=5, num_items=20, num_features=4)


@pytest.fixture
def raw(tmp_path: Path) -> TaggedLog:
    return read_tagged(random_tagged(tmp_path, BOOKMARKS), "delicious")


@pytest.fixture(scope="module")
def published_logs() -> dict[str, tuple[TaggedLog, Log]]:
    names = ("lastfm", "movielens")
    raws = {name: read_tagged(raw_folder(name), name) for name in names}
    return {name: (one, prepare_tagged(one)) for name, one in raws.items()}


def tagged(items: list[int], tags: list[int], texts: dict[int, str]) -> TaggedLog:
    return TaggedLog(
        dataset="lastfm",
        users=np.ones(len(items), np.int64),
        items=np.array(items),
        tags=np.array(tags),
        times=np.arange(len(items)),
        tag_texts=texts,
        sources={},
        counts={},
    )


def clicks(**changes: np.ndarray) -> ClickLog:
    log = ClickLog(
        clicks=np.array([12, 11, 99, 12, 13]),
        articles=np.array([11, 12, 13]),
        features=np.array([[0.5, 0, 0, 0, 0], [0.3, 0.4, 0, 0, 0], [0.0, 0, 0, 0, 0]]),
        shown=np.array([5, 7, 5]),
        sources={},
        counts={},
    )
    return log._replace(**changes)


@pytest.mark.parametrize(
    ("dataset", "num_rows", "least", "most"),
    [("lastfm", 167_660, 2541, 2567), ("movielens", 47_957, 5430, 5430)],
)
def test_prepare_tagged__published_counts(
    dataset: str,
    num_rows: int,
    least: int,
    most: int,
    published_logs: dict[str, tuple[TaggedLog, Log]],
    tmp_path: Path,
) -> None:
    raw, log = published_logs[dataset]
    assert log.click_items.size == log.summary["counts"]["rows kept"] == num_rows
    assert least <= log.clicks_of().size <= most
    assert log.item_vectors.shape == (40, 10)
    np.testing.assert_allclose(np.linalg.norm(log.item_vectors, axis=1), 1, rtol=1e-6)
    assert np.unique(log.click_items).size == 40
    one, two = tmp_path / "one.npz", tmp_path / "two.npz"
    save_log(one, log)
    save_log(two, prepare_tagged(raw))
    assert one.read_bytes() == two.read_bytes()


def test_prepare_tagged__delicious_by_hand(raw: TaggedLog, tmp_path: Path) -> None:
    steps: list[str] = []
    log = prepare_tagged(raw, SMALL, on_step=steps.append)
    assert tuple(steps) == STEPS
    items, counts = np.unique(raw.items, return_counts=True)
    top = sorted(zip(-counts, items, strict=True))[:20]
    kept = np.isin(raw.items, [item for _, item in top])
    assert log.click_items.size == kept.sum() < raw.items.size
    # The log of a user is its rows in the order of time, and an item has one arm.
    for user in log.user_ids.tolist():
        own = raw.items[kept & (raw.users == user)]
        arms = log.clicks_of(user)
        assert arms.size == own.size
        pairs = set(zip(own.tolist(), arms.tolist(), strict=True))
        assert len(pairs) == np.unique(own).size
    np.testing.assert_array_equal(log.user_ids[log.log_users], raw.users[kept])
    save_log(tmp_path / "log.npz", log)
    again = load_log(tmp_path / "log.npz")
    np.testing.assert_array_equal(again.item_vectors, log.item_vectors)
    assert again.summary == log.summary and log.dataset == "delicious"


def test_prepare_tagged__order_of_the_file_does_not_matter(
    raw: TaggedLog, tmp_path: Path
) -> None:
    header, *lines = (tmp_path / BOOKMARKS).read_text().splitlines()
    (tmp_path / BOOKMARKS).write_text("\n".join([header, *lines[::-1]]) + "\n")
    other = prepare_tagged(read_tagged(tmp_path, "delicious"), SMALL)
    log = prepare_tagged(raw, SMALL)
    np.testing.assert_array_equal(log.click_items, other.click_items)
    np.testing.assert_array_equal(log.item_vectors, other.item_vectors)


def test_prepare_tagged__one_user(raw: TaggedLog) -> None:
    whole = prepare_tagged(raw, SMALL)
    own = prepare_tagged(raw, PrepareConfig(**vars(SMALL) | {"user": 3}))
    assert own.user_ids.tolist() == [3]
    np.testing.assert_array_equal(own.clicks_of(), whole.clicks_of(3))
    np.testing.assert_array_equal(own.item_vectors, whole.item_vectors)
    with pytest.raises(ValueError, match="User 77 has no rows in the delicious log"):
        prepare_tagged(raw, PrepareConfig(user=77, num_arms=5))


def test_prepare_tagged__items_without_a_direction() -> None:
    texts = {1: "rock", 2: "jazz", 3: "soul", 4: "folk"}
    raw = tagged([1, 2, 3, 4, 5], [1, 2, 3, 4, 99], texts)
    log = prepare_tagged(raw, PrepareConfig(num_arms=2, num_features=2))
    assert log.summary["counts"]["items without a direction"] == 1
    np.testing.assert_allclose(np.linalg.norm(log.item_vectors, axis=1), 1, rtol=1e-6)


def test_prepare_tagged__clusters_that_cancel() -> None:
    # One cluster of all items: two tags are opposite on the one axis.
    texts = {1: "rock", 2: "jazz"}
    raw = tagged([1, 2], [1, 2], texts)
    log = prepare_tagged(raw, PrepareConfig(num_arms=1, num_features=1))
    assert log.summary["counts"]["arms without a direction"] == 1
    np.testing.assert_allclose(np.abs(log.item_vectors), [[1.0]])


@pytest.mark.parametrize(
    ("raw", "changes", "sentence"),
    [
        (tagged([1, 2], [1, 2], {}), {}, "has 2 items for 40 arms"),
        (tagged([1, 2], [1, 2], {1: "!", 2: "?"}), {"num_arms": 1}, "have no words"),
        (tagged([1, 2], [1, 2], {}), {"num_arms": 1}, "have no words"),
        (
            tagged([1, 2], [1, 2], {1: "rock", 2: "jazz"}),
            {"num_arms": 1},
            "10 features need more different tags and words than the 2 and 2",
        ),
        (
            tagged([1, 2, 3], [1, 1, 2], {1: "rock", 2: "jazz"}),
            {"num_arms": 3, "num_features": 1},
            "fall into 2 clusters for 3 arms",
        ),
    ],
)
def test_prepare_tagged__refuses(
    raw: TaggedLog, changes: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        prepare_tagged(raw, PrepareConfig(**changes))


def test_prepare_tagged__names_the_extra(
    raw: TaggedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(ImportError, match=r"msb_jax\[data\]"):
        prepare_tagged(raw, SMALL)


def test_prepare_yahoo__by_hand() -> None:
    log = prepare_yahoo(clicks(), PrepareConfig(num_arms=2))
    assert log.clicks_of().tolist() == [1, 0, 1]
    expected = [[1, 0, 0, 0, 0], [0.6, 0.8, 0, 0, 0]]
    np.testing.assert_allclose(log.item_vectors, expected, rtol=1e-6)
    assert log.summary["counts"] == {
        "clicks on other articles, dropped": 2,
        "rows kept": 3,
    }
    whole = prepare_yahoo(clicks(), PrepareConfig(num_arms=3))
    assert whole.summary["counts"]["arms without a direction"] == 1
    np.testing.assert_array_equal(whole.item_vectors[2], [1, 0, 0, 0, 0])


def test_prepare_yahoo__refuses() -> None:
    with pytest.raises(ValueError, match="3 articles with whole features for 20 arms"):
        prepare_yahoo(clicks())
    with pytest.raises(ValueError, match="does not name its users"):
        prepare_yahoo(clicks(), PrepareConfig(num_arms=2, user=1))
    with pytest.raises(ValueError, match="None of the 2 articles"):
        prepare_yahoo(clicks(clicks=np.array([99])), PrepareConfig(num_arms=2))


@pytest.mark.parametrize(
    "changes", [{"num_arms": 0}, {"num_items": 0}, {"num_features": 0}, {"seed": -1}]
)
def test_config__refuses(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(changes))} must be at least"):
        PrepareConfig(**changes)
