"""Prepare a real log, or generate one, for the experiments with logs.

    python -m experiments.prepare --dataset=lastfm --raw=FOLDER --out=lastfm.npz
    python -m experiments.prepare --dataset=demo --out=demo.npz

The file is described in msb_jax/data/format.py; no log comes with the project.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments import flags
from experiments.flags import UsageError, flag
from experiments.progress import Progress
from msb_jax.data import raw, yahoo
from msb_jax.data.demo import demo_log
from msb_jax.data.format import Log, save_log
from msb_jax.data.prepare import STEPS, PrepareConfig, prepare_tagged, prepare_yahoo

DATASETS = (*raw.TAGGED, "yahoo", "demo")
MEGABYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of the preparation."""

    dataset: str | None = flag(None, f"which log: {', '.join(DATASETS)}", DATASETS)
    raw: str | None = flag(None, "folder of the unpacked download (not for demo)")
    out: str | None = flag(None, "file to write, .npz")
    num_arms: int | None = flag(None, "arms, L; not given: 40, of yahoo 20")
    num_items: int = flag(6000, "most frequent items that are kept (not for yahoo)")
    user: int | None = flag(None, "keep the rows of this user only")
    seed: int = flag(0, "of the components and clusters, or of the generated log")
    force: bool = flag(False, "replace the file if it exists")

    def __post_init__(self) -> None:
        if self.dataset is None:
            raise ValueError(f"Choose a log: --dataset={'|'.join(DATASETS)}.")
        if self.out is None or not self.out.endswith(".npz"):
            raise ValueError("Name the file to write: --out=FILE.npz.")
        if self.raw is None and self.dataset != "demo":
            source = raw.SOURCES.get(self.dataset, yahoo.SOURCE)
            raise ValueError(
                f"--dataset={self.dataset} needs --raw=FOLDER with the raw files: "
                f"{source} there."
            )
        if self.user is not None and self.dataset in ("yahoo", "demo"):
            raise ValueError(f"The {self.dataset} log has no users; leave out --user.")
        if self.num_arms is None:
            object.__setattr__(self, "num_arms", 20 if self.dataset == "yahoo" else 40)
        self.settings()

    def settings(self) -> PrepareConfig:
        """Return the part of the config that the preparation knows."""
        return PrepareConfig(
            num_arms=self.num_arms or 0,
            num_items=self.num_items,
            user=self.user,
            seed=self.seed,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare a log from the command line and return the exit code.

    Returns:
        0; 2 if it cannot be done; 130 after Ctrl-C.
    """
    try:
        given = flags.parse(Config, sys.argv[1:] if argv is None else argv)
        if given.pop("help", False):
            print(flags.usage(Config, "python -m experiments.prepare"))
            return 0
        config = Config(**given)
        out = Path(str(config.out))
        _check_out(out, config.force)
        with Progress() as progress:
            log = _make_log(config, progress)
        save_log(out, log)
    except OSError as error:
        known = f"{error.filename} cannot be used: {error.strerror}."
        return flags.fail(known if error.strerror else str(error))
    except (UsageError, ValueError, ImportError) as error:
        return flags.fail(str(error))
    except KeyboardInterrupt:
        print("Interrupted; nothing was written.", file=sys.stderr)
        return 130
    print(describe(log))
    print(f"{out}: sha256 {hashlib.sha256(out.read_bytes()).hexdigest()}")
    return 0


def describe(log: Log) -> str:
    """Say what was read, dropped and kept."""
    lines = [f"{name}: sha256 {sha}" for name, sha in log.summary["sources"].items()]
    lines += [f"{count:>12,} {what}" for what, count in log.summary["counts"].items()]
    num_arms, num_features = log.item_vectors.shape
    users, rows = log.user_ids, log.clicks_of().size
    busiest = users[np.diff(log.user_offsets).argmax()]
    who = (
        f"1 user, number {busiest}, with {rows:,} rows"
        if users.size == 1
        else f"{users.size:,} users, the busiest is {busiest} with {rows:,} rows"
    )
    lines.append(f"{log.dataset}: {num_arms} arms with {num_features} features; {who}")
    return "\n".join(lines)


def _make_log(config: Config, progress: Progress) -> Log:
    settings = config.settings()
    if config.dataset == "demo":
        return demo_log(config.seed, settings.num_arms)
    folder = str(config.raw)
    if config.dataset == "yahoo":

        def on_read(done: int, total: int) -> None:
            if done == 0:
                progress.start("yahoo", total // MEGABYTE + 1, unit="megabyte")
            progress.update(done // MEGABYTE, "reading")

        return prepare_yahoo(yahoo.read_yahoo(folder, on_read), settings)
    dataset = str(config.dataset)
    progress.start(dataset, 1 + len(STEPS), unit="step")
    progress.update(0, "reading")
    done = itertools.count(1)
    log = prepare_tagged(
        raw.read_tagged(folder, dataset),
        settings,
        on_step=lambda name: progress.update(next(done), name),
    )
    progress.update(1 + len(STEPS), "done")
    return log


def _check_out(out: Path, is_forced: bool) -> None:
    if out.is_dir():
        raise UsageError(f"--out={out} is a folder; name a file in it.")
    if out.exists() and not is_forced:
        raise UsageError(f"--out={out} exists; replace it with --force.")
    out.parent.mkdir(parents=True, exist_ok=True)


if __name__ == "__main__":
    sys.exit(main())
