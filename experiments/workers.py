"""Run units side by side: processes of this machine, or a Ray cluster.

    --workers=2            two processes here
    --workers=ray:2        two workers of a Ray that is started here
    --workers=ray://HOST:10001, or ray:HOST:6379    a Ray that runs already

All of them start the same process with the same environment for a unit
(experiments.unit_process), so that the results do not depend on who ran it. The folder
of the results must be one that all machines see. A unit that fails is tried again; the
last time from its beginning.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from experiments import files, units
from experiments.flags import UsageError
from experiments.unit_process import FRESH
from experiments.units import ABOUT, LOG, Unit

RETRIES = 2
POLL = 0.2  # seconds
# CPU devices of a unit's process, the same on every machine: the seeds are split over
# them, and how they are split may show in the last digits.
DEVICES = 2
ROOT = Path(__file__).resolve().parent.parent


class Outcome(NamedTuple):
    """What became of a unit."""

    is_done: bool
    reason: str = ""  # the end of the log, if it failed; empty if it was interrupted


@dataclass(frozen=True)
class Workers:
    """Who runs the units.

    Attributes:
        number: of processes here; of Ray workers started here if `is_ray`.
        is_ray: use Ray.
        address: of a Ray that runs already, or none.
    """

    number: int = 1
    is_ray: bool = False
    address: str | None = None

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"--workers must be at least 1, got {self.number}.")


class Stop(NamedTuple):
    """How a run is told to end: soon, with a checkpoint, or at once."""

    soon: threading.Event
    now: threading.Event


def parse_workers(text: str) -> Workers:
    """Read the flag --workers."""
    if text.isdecimal():
        return Workers(int(text))
    if text.startswith("ray://"):
        return Workers(is_ray=True, address=text)
    kind, _, rest = text.partition(":")
    if kind == "ray" and rest.isdecimal():
        return Workers(int(rest), is_ray=True)
    if kind == "ray" and rest:
        return Workers(is_ray=True, address=rest)
    raise ValueError(
        f"--workers must be a number, ray:NUMBER or ray://ADDRESS, got {text!r}."
    )


def run_units(
    todo: Sequence[Unit],
    root: Path,
    workers: Workers,
    report: Callable[[Unit, Outcome], None],
    caught: list[int],
) -> None:
    """Run units and call `report` after each, in the order in which they end.

    Args:
        todo: what to run.
        root: folder of all results; absolute.
        workers: who runs them.
        report: called in the thread of the caller.
        caught: signals caught; as soon as there is one, the units stop.
    """
    for unit in todo:
        folder = unit.folder(root)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / ABOUT).exists():
            files.write_json(folder / ABOUT, units.describe(unit))
    run = _run_ray if workers.is_ray else _run_here
    run(todo, root, workers, report, caught)


def run_unit(folder: Path, stop: Stop | None = None) -> Outcome:
    """Run the unit of a folder in a process of its own, and again if it fails."""
    if not (folder / ABOUT).exists():
        return Outcome(False, f"{folder} is not there: --out must be a shared folder.")
    for attempt in range(1 + RETRIES):
        if stop is not None and stop.soon.is_set():
            return Outcome(False)
        is_last = attempt == RETRIES
        try:
            code = _run_process(folder, [FRESH] if is_last else [], stop)
        except OSError as error:
            return Outcome(False, str(error))
        if units.is_finished(folder):
            return Outcome(True)
    if stop is not None and stop.soon.is_set():
        return Outcome(False)
    text = units.last_lines(folder / LOG)
    return Outcome(False, f"{text}\n(exit code {code}, tried {1 + RETRIES} times)")


def environment(xla_flags: str = "") -> dict[str, str]:
    """Return the environment of a unit's process, the same on every machine.

    Args:
        xla_flags: of the unit.
    """
    name = "--xla_force_host_platform_device_count"
    given = re.sub(rf"{name}=\d+", "", os.environ.get("XLA_FLAGS", ""))
    words = f"{given} {name}={DEVICES} {xla_flags}".split()
    return dict(os.environ) | {"XLA_FLAGS": " ".join(words), "PYTHONHASHSEED": "0"}


def _run_process(folder: Path, extra: Sequence[str], stop: Stop | None) -> int:
    command = [sys.executable, "-m", "experiments.unit_process", str(folder), *extra]
    about = files.read_json(folder / ABOUT)
    with open(folder / LOG, "ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # closes when this process ends, and ends the other
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment(about.get("xla_flags", "")),
            start_new_session=True,  # Ctrl-C reaches it through `stop` alone
        )
    assert process.stdin is not None
    try:
        is_told = False
        while True:
            try:
                return process.wait(POLL)
            except subprocess.TimeoutExpired:
                pass
            if stop is not None and stop.now.is_set():
                break
            if stop is not None and stop.soon.is_set() and not is_told:
                process.send_signal(signal.SIGINT)
                is_told = True
    finally:
        process.stdin.close()
        code = process.wait()
    return code


def _run_here(
    todo: Sequence[Unit],
    root: Path,
    workers: Workers,
    report: Callable[[Unit, Outcome], None],
    caught: list[int],
) -> None:
    stop = Stop(threading.Event(), threading.Event())
    with ThreadPoolExecutor(workers.number) as pool:
        unit_of = {pool.submit(run_unit, u.folder(root), stop): u for u in todo}
        pending = set(unit_of)
        try:
            while pending:
                done, pending = wait(pending, POLL, return_when=FIRST_COMPLETED)
                for future in done:
                    report(unit_of[future], future.result())
                if caught:
                    stop.soon.set()
        except BaseException:
            stop.soon.set()
            stop.now.set()
            raise


def _run_ray(
    todo: Sequence[Unit],
    root: Path,
    workers: Workers,
    report: Callable[[Unit, Outcome], None],
    caught: list[int],
) -> None:
    ray = import_ray()
    if workers.address is None:
        ray.init(num_cpus=workers.number, include_dashboard=False)
    else:
        ray.init(address=workers.address)
    # Ray's own retries would hide from us how often a unit was lost.
    remote = ray.remote(num_cpus=1, max_retries=0)(run_unit)
    try:
        waiting = {remote.remote(unit.folder(root)): unit for unit in todo}
        lost: Counter[Unit] = Counter()
        while waiting and not caught:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=POLL)
            for reference in ready:
                unit = waiting.pop(reference)
                try:
                    report(unit, ray.get(reference))
                except ray.exceptions.RayError as error:  # the worker was lost
                    lost[unit] += 1
                    if lost[unit] > RETRIES:
                        report(unit, Outcome(False, f"Worker lost: {error}"))
                    else:
                        waiting[remote.remote(unit.folder(root))] = unit
        for reference in waiting:
            ray.cancel(reference, force=True)
    finally:
        ray.shutdown()


def import_ray() -> Any:
    """Import Ray, or say how to get it."""
    try:
        import ray
    except ImportError:
        raise UsageError(
            "--workers=ray needs Ray, which is not installed: pip install "
            "'msb_jax[ray]', or give a number of processes."
        ) from None
    return ray
