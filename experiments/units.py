"""A unit of work: one experiment with its flags, run once and kept.

A unit has a folder of its own, ROOT/units/<hash>-<label>:

    unit.json   what the unit is
    run/        the folder of the experiment (experiments.files)
    log.txt     what the experiment printed
    lock        held while a process works on the unit
    done.json   written last: the unit is finished
    failed.txt  why it failed, if it did

The hash covers every flag of the experiment, given or default, what stands in the
file of `--data`, and `FORMAT`; so a unit is the same wherever it runs, and another
unit as soon as anything that matters changes. Seeds are flags too: units that differ
in nothing else are merged into one (`merge_seeds`), which is one vmapped program.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import files, flags
from experiments.flags import UsageError

FORMAT = 1  # of what a unit leaves behind; a new number runs everything again
UNITS, RUN = "units", "run"
ABOUT, DONE, LOCK, LOG = "unit.json", "done.json", "lock", "log.txt"
FAILED = "failed.txt"
# Flags that say how or where a run happens, not what it is.
NOT_HASHED = ("out", "resume", "quick")
HASH_LETTERS = 12
REWARD_FLAGS = ("form", "feedback")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One experiment with its flags.

    Attributes:
        module: of `experiments`; it has an `EXPERIMENT` and a `main`.
        flags: by name, as they stand on the command line, in order of name.
        xla_flags: more flags for the compiler; they may show in the last digits.
        seconds: a guess of the time it takes, for the time left; not in the hash.
    """

    module: str
    flags: tuple[tuple[str, str], ...]
    xla_flags: str = ""
    seconds: float = dataclasses.field(default=60.0, compare=False)

    def __post_init__(self) -> None:
        names = [name for name, _ in self.flags]
        if sorted(set(names)) != names:
            raise ValueError("The flags of a unit must be in order and named once.")
        if wrong := set(names) & set(NOT_HASHED):
            raise ValueError(f"A unit may not set {', '.join(sorted(wrong))}.")

    @property
    def argv(self) -> list[str]:
        """Return the flags as they are typed."""
        return [f"--{name}={value}" for name, value in self.flags]

    @property
    def command(self) -> str:
        """Return what a person would type for the same run."""
        words = [f"XLA_FLAGS='{self.xla_flags}'"] if self.xla_flags else []
        words += ["python", "-m", f"experiments.{self.module}", *self.argv]
        return " ".join(words)

    @property
    def name(self) -> str:
        """Return the name of the folder."""
        return _name(self)

    def folder(self, root: Path) -> Path:
        """Return the folder of the unit."""
        return root / UNITS / self.name


def is_finished(folder: Path) -> bool:
    """Tell whether the unit of the folder has run to its end."""
    return (folder / DONE).exists() and (folder / RUN / files.SUMMARY).exists()


def failure(folder: Path) -> str:
    """Return why the unit of the folder failed; empty if it did not."""
    if is_finished(folder) or not (folder / FAILED).exists():
        return ""
    return (folder / FAILED).read_text(errors="replace").strip()


def make_unit(
    module: str,
    given: Mapping[str, Any],
    *,
    xla_flags: str = "",
    seconds: float = 60.0,
) -> Unit:
    """Make a unit from plain values; None leaves a flag out.

    Raises:
        UsageError: the experiment would not accept the flags.
    """
    plain = {k: _word(v) for k, v in given.items() if v is not None}
    unit = Unit(
        module=module,
        flags=tuple(sorted(plain.items())),
        xla_flags=xla_flags,
        seconds=seconds,
    )
    _ = unit.name  # fails now rather than in the middle of a plan
    return unit


def merge_seeds(units: Iterable[Unit]) -> list[Unit]:
    """Merge units whose seeds follow each other and that differ in nothing else.

    The order is that of the first of each; a unit that is there twice stays once.
    """
    groups: dict[Any, list[tuple[int, int, Unit]]] = {}
    for unit in units:
        settings = _settings(unit)
        seed, number = settings.pop("seed"), settings.pop("num_seeds")
        group = (unit.module, unit.xla_flags, json.dumps(settings, sort_keys=True))
        groups.setdefault(group, []).append((seed, number, unit))
    merged = []
    for members in groups.values():
        members.sort(key=lambda member: member[:2])
        first, number, unit = members[0]
        for seed, more, other in members[1:]:
            if seed <= first + number:
                number = max(number, seed + more - first)
            else:
                merged.append(_with_seeds(unit, first, number))
                first, number, unit = seed, more, other
        merged.append(_with_seeds(unit, first, number))
    return merged


def apart(todo: Sequence[Unit]) -> list[Unit]:
    """Order units so that those that share most programs do not start together.

    The first of each kind comes first: it compiles, and the others, which differ in the
    reward alone, find its programs in the compilation cache.
    """
    seen: Counter[Any] = Counter()
    order = []
    for unit in todo:
        rest = tuple((k, v) for k, v in unit.flags if k not in REWARD_FLAGS)
        order.append(seen[unit.module, rest])
        seen[unit.module, rest] += 1
    return [todo[i] for i in sorted(range(len(todo)), key=lambda i: order[i])]


def describe(unit: Unit) -> dict[str, Any]:
    """Collect what `unit.json` holds."""
    return {
        "name": unit.name,
        "module": unit.module,
        "argv": unit.argv,
        "command": unit.command,
        "xla_flags": unit.xla_flags,
        "format": FORMAT,
    }


def last_lines(path: Path, number: int = 5) -> str:
    """Return the end of a text file, empty if there is none."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-number:])


@functools.cache
def _name(unit: Unit) -> str:
    settings = {k: v for k, v in _settings(unit).items() if k not in NOT_HASHED}
    if settings.get("data") is not None:
        settings["data"] = _digest(settings["data"])
    whole = {
        "format": FORMAT,
        "module": unit.module,
        "settings": settings,
        "xla_flags": unit.xla_flags,
    }
    text = json.dumps(whole, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:HASH_LETTERS]
    experiment = importlib.import_module(f"experiments.{unit.module}").EXPERIMENT
    config = experiment.config_class(**_parsed(unit))
    return f"{digest}-{experiment.label(config)}"


def _parsed(unit: Unit) -> dict[str, Any]:
    experiment = importlib.import_module(f"experiments.{unit.module}").EXPERIMENT
    return flags.parse(experiment.config_class, unit.argv)


def _settings(unit: Unit) -> dict[str, Any]:
    """Return all flags of the experiment as JSON values."""
    experiment = importlib.import_module(f"experiments.{unit.module}").EXPERIMENT
    try:
        return flags.to_json(experiment.config_class(**_parsed(unit)))
    except ValueError as error:
        raise UsageError(f"{unit.command}: {error}") from None


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error}).") from None


def _with_seeds(unit: Unit, seed: int, number: int) -> Unit:
    same = {"seed": str(seed), "num_seeds": str(number)}
    if all(_settings(unit)[name] == int(value) for name, value in same.items()):
        return unit
    given = tuple(sorted((dict(unit.flags) | same).items()))
    return dataclasses.replace(unit, flags=given)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value)
