"""The file of a prepared log: a plain .npz without pickles.

    format_version  int    1
    dataset         str    lastfm, delicious, movielens, yahoo, demo
    item_vectors    float32 [L, D]   features of the arms, unit rows
    click_items     int32 [N]        arm of each row, users one after another, each
                                     in the order of time
    user_offsets    int64 [U + 1]    where each user's rows begin in click_items
    user_ids        int64 [U]        the users' ids in the raw log
    log_users       int32 [N]        user (0..U-1) of each row of the whole log in the
                                     order of time
    summary         str    JSON: sources with sha256, counts of rows, settings

Files without format_version, user_ids, dataset and summary are read too: users are
then numbered from 0.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from msb_jax.atomic import atomic_file

FORMAT_VERSION = 1
REQUIRED = ("item_vectors", "click_items", "user_offsets", "log_users")
# Rows this far from unit length are rounding and made unit; beyond it they are wrong.
UNIT_TOLERANCE = 1e-3

# What damaged, encrypted or absurdly large members of a zip file raise.
_UNREADABLE = (
    ValueError,
    OSError,
    EOFError,
    RuntimeError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
)


class Log(NamedTuple):
    """Clicks of U users on L arms."""

    dataset: str
    item_vectors: np.ndarray  # [L, D] float32, unit rows
    click_items: np.ndarray  # [N] int32, users one after another
    user_offsets: np.ndarray  # [U + 1] int64
    user_ids: np.ndarray  # [U] int64
    log_users: np.ndarray  # [N] int32, in the order of time
    summary: dict[str, Any]

    def clicks_of(self, user: int | None = None) -> np.ndarray:
        """Return the arms that a user clicked, in the order of time, int32[T].

        Args:
            user: an id of `user_ids`; by default the user with most rows, the first
                of several.
        """
        if user is None:
            index = int(np.diff(self.user_offsets).argmax())
        elif (found := np.flatnonzero(self.user_ids == user)).size:
            index = int(found[0])
        else:
            raise ValueError(f"User {user} is not in the log.")
        return self.click_items[self.user_offsets[index] : self.user_offsets[index + 1]]


def save_log(path: str | os.PathLike[str], log: Log) -> None:
    """Write a log in one step; equal logs give equal bytes."""
    target = Path(path)
    log = _checked(log, str(target))
    arrays: dict[str, Any] = log._asdict()
    arrays["summary"] = json.dumps(log.summary, sort_keys=True, allow_nan=False)
    with atomic_file(target) as file:
        # NumPy stamps every array with the same date.
        np.savez_compressed(file, format_version=FORMAT_VERSION, **arrays)


def load_log(path: str | os.PathLike[str]) -> Log:
    """Read and check a log.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, of a newer version, or holds what is no log.
    """
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise FileNotFoundError(
            f"There is no file {name}; make one with python -m experiments.prepare."
        )
    arrays = _read_arrays(name)
    version = arrays.get("format_version", np.array(0))
    if version.shape != () or not np.issubdtype(version.dtype, np.integer):
        raise ValueError(f"{name}: format_version must be one whole number.")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{name} has format version {version}, but this code reads up to "
            f"{FORMAT_VERSION}; update msb_jax or prepare the log again."
        )
    wanted = (*REQUIRED, "user_ids") if version >= 1 else REQUIRED
    if missing := [key for key in wanted if key not in arrays]:
        raise ValueError(f"{name} is no prepared log: it lacks {', '.join(missing)}.")
    num_users = max(0, arrays["user_offsets"].size - 1)
    try:
        summary = json.loads(str(arrays.get("summary", "{}")))
    except ValueError:
        summary = None
    if not isinstance(summary, dict):
        raise ValueError(f"{name}: summary must be a JSON object.")
    log = Log(
        dataset=str(arrays.get("dataset", Path(name).stem)),
        **{key: arrays[key] for key in REQUIRED},
        user_ids=arrays.get("user_ids", np.arange(num_users)),
        summary=summary,
    )
    return _checked(log, name)


def _read_arrays(name: str) -> dict[str, np.ndarray]:
    if not zipfile.is_zipfile(name):
        raise ValueError(f"{name} is not an .npz file, or is cut short.")
    arrays = {}
    key = "an array"
    try:
        with np.load(name, allow_pickle=False) as file:
            for key in file.files:
                arrays[key] = np.asarray(file[key])
    except _UNREADABLE as error:
        reason = (
            "is a pickled object, which is never read"
            if "allow_pickle" in str(error)
            else "is damaged"
        )
        raise ValueError(f"{name}: {key} {reason}.") from None
    return arrays


def _checked(log: Log, name: str) -> Log:
    """Return the log with the types of the format, or say what is wrong."""

    def demand(is_right: bool | np.bool_, what: str) -> None:
        if not is_right:
            raise ValueError(f"{name}: {what}.")

    x, clicks, offsets = log.item_vectors, log.click_items, log.user_offsets
    demand(
        x.ndim == 2 and x.size > 0 and np.issubdtype(x.dtype, np.floating),
        f"item_vectors must be floats [L, D], got {x.dtype} {list(x.shape)}",
    )
    for key in ("click_items", "user_offsets", "user_ids", "log_users"):
        value = getattr(log, key)
        demand(
            value.ndim == 1
            and value.size > 0
            and np.issubdtype(value.dtype, np.integer),
            f"{key} must be a list of whole numbers, got {value.dtype} "
            f"{list(value.shape)}",
        )
    demand(np.isfinite(x).all(), "item_vectors has entries that are NaN or infinite")
    exact = x.astype(np.float64)
    length = np.linalg.norm(exact, axis=1, keepdims=True)  # [L, 1]
    demand(
        (np.abs(length - 1) <= UNIT_TOLERANCE).all(),
        "item_vectors has rows that are not of length 1",
    )
    # Float32 rows that are unit already keep their bits.
    exact = np.where(np.abs(length - 1) > 1e-6, exact / length, exact)
    demand(
        clicks.min() >= 0 and clicks.max() < len(x),
        f"click_items names an arm outside 0..{len(x) - 1}",
    )
    offsets = offsets.astype(np.int64)
    demand(
        offsets[0] == 0
        and (np.diff(offsets) >= 0).all()
        and offsets[-1] == clicks.size,
        f"user_offsets must rise from 0 to the number of rows, {clicks.size}",
    )
    num_users = offsets.size - 1
    ids, users = log.user_ids, log.log_users
    demand(
        ids.size == num_users == np.unique(ids).size,
        f"user_ids must hold {num_users} different ids",
    )
    demand(
        users.min() >= 0
        and users.max() < num_users
        and np.array_equal(np.bincount(users, minlength=num_users), np.diff(offsets)),
        "log_users must name each user as often as user_offsets has rows of it",
    )
    return log._replace(
        item_vectors=exact.astype(np.float32),
        click_items=clicks.astype(np.int32),
        user_offsets=offsets,
        user_ids=ids.astype(np.int64),
        log_users=users.astype(np.int32),
    )
