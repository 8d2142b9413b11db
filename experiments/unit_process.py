"""The process of one unit: `python -m experiments.unit_process FOLDER`.

It calls the experiment's own `main`, as the command line would, and writes `done.json`
when that went well. It holds a lock, so that two of them never work on one unit, and
ends with whoever started it: its standard input is a pipe that closes when the other
end dies, however it dies.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments import files
from experiments.units import ABOUT, DONE, LOCK, RUN

LEFT_ALONE = 3  # exit code: whoever started the process is gone
FRESH = "--fresh"


def main(argv: Sequence[str]) -> int:
    """Run the unit in a folder to its end and return the experiment's exit code.

    Args:
        argv: the folder, and perhaps `--fresh`, which forgets an earlier start.
    """
    folder = Path(argv[0])
    _end_with_the_starter()
    with _locked(folder / LOCK):
        if (folder / DONE).exists():
            return 0
        about = files.read_json(folder / ABOUT)
        _tidy(folder / RUN, is_fresh=FRESH in argv[1:])
        experiment = importlib.import_module(f"experiments.{about['module']}")
        start = time.time()
        code = experiment.main(
            [*about["argv"], f"--out={folder / RUN}", "--resume=true"]
        )
        if code == 0:
            files.write_json(folder / DONE, _provenance(folder, about, start))
    return code


def commit() -> str:
    """Return the commit of the code, with a + if files differ from it."""
    root = Path(__file__).resolve().parent.parent
    try:
        head, changes = (
            subprocess.run(
                ["git", "-C", str(root), *words],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head[:12] + ("+" if changes else "")


def _provenance(folder: Path, about: dict[str, Any], start: float) -> dict[str, Any]:
    config = files.read_json(folder / RUN / files.CONFIG)
    return {
        "name": about["name"],
        "command": about["command"],
        "commit": commit(),
        "versions": config["versions"],
        "device": config["device"],
        "finished": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "seconds": round(time.time() - start, 1),
    }


def _tidy(run: Path, *, is_fresh: bool) -> None:
    """Remove what a killed process left half-made, or everything."""
    if is_fresh or not (run / files.CONFIG).exists():
        shutil.rmtree(run, ignore_errors=True)
        return
    for path in run.glob(".*"):  # temporary names of atomic_file
        path.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file's lock, which the system frees when the process ends."""
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _end_with_the_starter() -> None:
    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(LEFT_ALONE)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
