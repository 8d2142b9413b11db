"""The output folder of an experiment: what it holds, and how a run continues.

    config.json     flags, versions, device
    curves.npz      per policy arrays "<policy>/reward" and so on, [B, T]
    summary.json    the numbers (msb_jax.metrics)
    summary.md      the table a person reads
    curves.png      the figure
    checkpoint-*    only while a run is unfinished

Every file is replaced in one step, so that a crash never leaves half of one.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

import msb_jax
from experiments import flags
from experiments.flags import UsageError
from msb_jax.atomic import atomic_file
from msb_jax.runner import Curves

CONFIG, CURVES, FIGURE = "config.json", "curves.npz", "curves.png"
SUMMARY, TABLE = "summary.json", "summary.md"
RESULTS = Path("results")
# Flags that say how to run, not what; they may differ when a run continues.
NOT_COMPARED = ("out", "resume")


def write_text(path: Path, text: str) -> None:
    """Replace a text file."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file; NaN and infinity are errors, not JSON."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        UsageError: it is not there, or damaged.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}).") from None


def write_curves(path: Path, curves: Mapping[str, Curves]) -> None:
    """Replace the curves of all policies."""
    arrays = {
        f"{policy}/{name}": value
        for policy, one in curves.items()
        for name, value in one._asdict().items()
    }
    with atomic_file(path) as file:
        np.savez_compressed(file, **arrays)


def read_curves(path: Path) -> dict[str, Curves]:
    """Read what `write_curves` wrote; nothing if there is no file."""
    if not path.exists():
        return {}
    with open(path, "rb") as raw, np.load(raw) as file:
        arrays = dict(file)
    names = dict.fromkeys(key.rsplit("/", 1)[0] for key in arrays)
    return {
        policy: Curves(
            **{n: arrays[f"{policy}/{n}"] for n in Curves._fields[:-1]},
            interrupted=bool(arrays[f"{policy}/interrupted"]),
        )
        for policy in names
    }


def describe(given: dict[str, Any], experiment: str) -> dict[str, Any]:
    """Collect what `config.json` holds."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy", "scipy", "pyscipopt")
    versions = {name: metadata.version(name) for name in packages}
    device = jax.devices()[0]
    return {
        "experiment": experiment,
        "flags": given,
        "versions": {
            "msb_jax": msb_jax.__version__,
            "python": platform.python_version(),
        }
        | versions,
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
        },
    }


def new_folder(out: str | None, label: str) -> Path:
    """Make the folder of a new run; never one that holds something.

    Args:
        out: the folder that was asked for; none makes results/<label>-<time>.
        label: what the run is about.
    """
    if out is None:
        stem = f"{label}-{time.strftime('%Y%m%d-%H%M%S')}"
        names = [stem, *(f"{stem}-{i}" for i in range(2, 1000))]
        folder = next(RESULTS / n for n in names if not (RESULTS / n).exists())
    else:
        folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_used = any(folder.iterdir())
        if not is_used:
            probe = folder / ".probe"
            probe.touch()
            probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"--out={folder} cannot be written: {reason}.") from None
    if is_used:
        raise UsageError(
            f"--out={folder} is not empty: continue the run in it with --resume, or "
            "choose another folder."
        )
    return folder


def stored_flags(folder: Path) -> dict[str, Any] | None:
    """Return the flags of the run in `folder`; none if there is no run."""
    path = folder / CONFIG
    return read_json(path)["flags"] if path.exists() else None


def latest_folder(config_class: type, label: str, given: Mapping[str, Any]) -> Path:
    """Return the newest run under results/ that `--resume` can mean.

    Args:
        config_class: of the experiment.
        label: what the run is about.
        given: flags of the command line, which the run must agree with.
    """
    found = []
    for path in RESULTS.glob(f"{label}-*/{CONFIG}"):
        stored = stored_flags(path.parent)
        if stored is not None and not differing(config_class, given, stored):
            found.append((path.stat().st_mtime, path.parent))
    if not found:
        raise UsageError(
            f"There is no run of these flags in {RESULTS}/ to resume; name its folder "
            "with --out."
        )
    return max(found)[1]


def differing(
    config_class: type, given: Mapping[str, Any], stored: Mapping[str, Any]
) -> list[str]:
    """Describe the flags of the command line that contradict the stored run."""
    same = flags.from_json(config_class, dict(stored))
    # Through the config, so that a flag that asks for the default finds it there.
    wanted = flags.to_json(config_class(**{**same, **given}))
    return [
        f"--{name} was {_plain(stored.get(name))}, not {_plain(wanted[name])}"
        for name in given
        if name not in NOT_COMPARED and wanted[name] != stored.get(name)
    ]


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
