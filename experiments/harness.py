"""What all experiments share: flags, folder, the loop over policies, the files.

An experiment is an `Experiment`: its config class, and `prepare`, which turns a
config into a `Task`. `main` does the rest:

    flags -> frozen config -> prepare -> run each policy -> files, table, figure

Ctrl-C stops at the end of the block, writes what is finished and a checkpoint; a
second Ctrl-C stops at once and leaves the last checkpoint. `--resume` continues.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import figures, files, flags, tables
from experiments.flags import UsageError
from experiments.progress import Progress
from msb_jax import metrics, runner
from msb_jax.baselines.registry import TOLD, make_policy
from msb_jax.checkpoint import load_snapshot, save_snapshot
from msb_jax.problem import Problem
from msb_jax.runner import Curves, Snapshot
from msb_jax.types import EnvStep, Key, Policy, State

SECONDS_BETWEEN_CHECKPOINTS = 60.0
# A checkpoint may take this share of the time at most.
CHECKPOINT_SHARE = 0.05
NOTE_ROUNDS = 100  # the progress line shows the mean of so many rounds


class Task(NamedTuple):
    """What is played: one environment for each of B seeds."""

    env_step: EnvStep
    env_states: State  # every leaf [B, ...]
    problems: Problem  # every leaf [B, ...]
    keys: Key  # [B]
    ground_truth: Sequence[Mapping[str, Any]]  # entries of summary.json, or none
    title: str
    notes: Sequence[str] = ()  # sentences for summary.md
    best_actions: np.ndarray | None = None  # [B, K] of the ground truth
    references: Mapping[str, float] = {}  # mean rewards to compare with, by name


class Experiment(NamedTuple):
    """What an experiment has to say for itself.

    The config has the fields out, resume, quick, policies, rounds, num_seeds, f_in,
    n_re and lam; its fields are also the settings of the policies.
    """

    name: str  # of the module
    config_class: type
    label: Callable[[Any], str]  # names the default folder
    prepare: Callable[[Any, Path, Progress], Task]
    quick: Mapping[str, Any]  # what --quick changes, unless given
    # Fills in what the flags leave open and a file says; UsageError or ValueError.
    settle: Callable[[Any], Any] = lambda config: config
    # Settings of the policies beside the flags.
    settings: Callable[[Any], Mapping[str, Any]] = lambda config: {}


def main(experiment: Experiment, argv: Sequence[str] | None = None) -> int:
    """Run an experiment from the command line and return the exit code.

    Returns:
        0; 2 for a command line that cannot be followed; 130 after Ctrl-C.
    """
    command = f"python -m experiments.{experiment.name}"
    try:
        given = flags.parse(
            experiment.config_class, sys.argv[1:] if argv is None else argv
        )
        if given.pop("help", False):
            print(flags.usage(experiment.config_class, command))
            return 0
        config, folder = _configure(experiment, given)
        config = experiment.settle(config)
        policies = _make_policies(config, experiment.settings(config))
        if folder is None:
            folder = files.new_folder(config.out, experiment.label(config))
    except (UsageError, ValueError) as error:
        return flags.fail(str(error))
    use_compilation_cache()
    caught: list[int] = []
    with Progress() as progress:
        try:
            _describe(experiment, config, folder, progress)
            task = experiment.prepare(config, folder, progress)
            policies = _tell_truth(config, policies, task)
            with deferred_signals(caught):
                _run_all(config, folder, policies, task, progress, caught)
        except UsageError as error:
            return flags.fail(str(error))
        except KeyboardInterrupt:
            caught.append(signal.SIGINT)
        progress.stop()
        if caught:
            progress.say(f"Interrupted; what is finished is in {folder}.")
            progress.say(f"Continue with: {command} --resume --out={folder}")
            return 128 + caught[0]
        progress.say(f"Results: {folder}")
    return 0


def use_compilation_cache() -> None:
    """Keep compiled programs in the user's cache folder, unless told otherwise."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    jax.config.update("jax_compilation_cache_dir", os.path.join(root, "msb_jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@contextmanager
def deferred_signals(caught: list[int]) -> Iterator[None]:
    """Append SIGINT and SIGTERM to the list; let a second one interrupt at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        # Not print: a handler may run in the middle of another print.
        os.write(2, b"\nStopping soon; Ctrl-C again stops at once.\n")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _configure(
    experiment: Experiment, given: Mapping[str, Any]
) -> tuple[Any, Path | None]:
    """Return the config, and the folder if there is a run in it to resume."""
    config_class = experiment.config_class
    preset = experiment.quick if given.get("quick") else {}
    config = config_class(**{**preset, **given})
    if not config.resume:
        return config, None
    if config.out is None:
        label = experiment.label(config)
        folder = files.latest_folder(config_class, label, given)
    else:
        folder = Path(config.out)
    stored = files.stored_flags(folder)
    if stored is None:
        return config, None
    if different := files.differing(config_class, given, stored):
        raise UsageError(
            f"The run in {folder} has other flags: {', '.join(different)}; repeat "
            "them or leave them out."
        )
    same = flags.from_json(config_class, stored)
    return config_class(**{**same, "out": str(folder), "resume": True}), folder


def _make_policies(config: Any, more: Mapping[str, Any]) -> dict[str, Policy]:
    """Make the policies that need no ground truth."""
    settings = flags.to_json(config) | dict(more)
    names = [name for name in config.policies if name not in TOLD]
    return {name: make_policy(name, settings) for name in names}


def _tell_truth(
    config: Any, policies: Mapping[str, Policy], task: Task
) -> dict[str, Policy]:
    """Add those that do, in the order of the flags."""
    truth = None
    if task.best_actions is not None:
        truth = (task.problems, task.best_actions)
    try:
        told = {
            name: make_policy(name, {"truth": truth})
            for name in config.policies
            if name in TOLD
        }
    except ValueError as error:
        raise UsageError(str(error)) from None
    return {name: (told | dict(policies))[name] for name in config.policies}


def _describe(
    experiment: Experiment, config: Any, folder: Path, progress: Progress
) -> None:
    """Write config.json, or compare the versions with those of the run resumed."""
    now = files.describe(flags.to_json(config) | {"resume": False}, experiment.name)
    if not (folder / files.CONFIG).exists():
        files.write_json(folder / files.CONFIG, now)
        return
    before = files.read_json(folder / files.CONFIG).get("versions", {})
    changed = [k for k, v in now["versions"].items() if before.get(k, v) != v]
    if changed:
        progress.say(
            f"warning: {', '.join(changed)} changed since this run was started; the "
            "rest of it may differ in the last digits from a run without a break."
        )


def _run_all(
    config: Any,
    folder: Path,
    policies: Mapping[str, Policy],
    task: Task,
    progress: Progress,
    caught: list[int],
) -> None:
    """Run what is not finished, and write the files after every policy."""
    done = files.read_curves(folder / files.CURVES)
    is_written = False  # what is there may be of another version
    for number, (name, policy) in enumerate(policies.items(), 1):
        if name in done and done[name].num_rounds == config.rounds:
            continue
        if caught:
            break
        label = f"{name} ({number} of {len(policies)})"
        path = folder / f"checkpoint-{name}.npz"
        curves = _run_one(config, path, label, policy, task, progress, caught)
        if curves.num_rounds:
            done[name] = curves
            ordered = {n: done[n] for n in policies if n in done}
            files.write_curves(folder / files.CURVES, ordered)
            _write_results(config, folder, ordered, policies, task)
            is_written = True
        if curves.interrupted:
            break
        path.unlink(missing_ok=True)
    progress.stop()
    if not done:
        return
    ordered = {n: done[n] for n in policies if n in done}
    if not is_written:
        _write_results(config, folder, ordered, policies, task)
    summary = files.read_json(folder / files.SUMMARY)
    progress.say("\n" + tables.results_table(summary["policies"]) + "\n")
    for extra in (tables.relative_table, tables.paired_table):
        if text := extra(summary["policies"]):
            progress.say(text + "\n")


def _run_one(
    config: Any,
    path: Path,
    label: str,
    policy: Policy,
    task: Task,
    progress: Progress,
    caught: list[int],
) -> Curves:
    """Run one policy with progress and checkpoints, from its checkpoint if any."""
    start = None
    if path.exists():
        try:
            start = load_snapshot(
                path, policy, task.env_states, task.problems, task.keys
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
    saved, pause = time.monotonic(), SECONDS_BETWEEN_CHECKPOINTS

    def on_block(snapshot: Snapshot) -> bool:
        nonlocal saved, pause
        progress.update(snapshot.round, _note(snapshot.curves, task))
        is_last = snapshot.round == config.rounds
        is_due = time.monotonic() - saved >= pause
        if (caught or is_due) and not is_last:
            begin = time.monotonic()
            save_snapshot(path, snapshot, task.keys)
            saved = time.monotonic()
            pause = max(pause, (saved - begin) / CHECKPOINT_SHARE)
        return bool(caught)

    progress.start(label, config.rounds, start.round if start else 0)
    curves = runner.run(
        policy,
        task.env_step,
        task.env_states,
        task.problems,
        task.keys,
        rounds=config.rounds,
        f_in=config.f_in,
        start=start,
        on_block=on_block,
    )
    if curves.interrupted and not caught:
        caught.append(signal.SIGINT)  # it came as an exception, not as a signal
    return curves


def _note(curves: Curves, task: Task) -> str:
    """Say how the last rounds went."""
    recent = curves.mean_reward[:, -NOTE_ROUNDS:]
    if not task.ground_truth:
        return f"reward {recent.mean():.4f}"
    best = np.array([g["reward"] for g in task.ground_truth])
    return f"gt fraction {(recent / best[:, None]).mean():.4f}"


def _write_results(
    config: Any,
    folder: Path,
    done: Mapping[str, Curves],
    policies: Mapping[str, Policy],
    task: Task,
) -> None:
    """Write summary.json, summary.md and curves.png from the curves."""
    num_conflicts = np.asarray(task.problems.num_conflicts)  # [B]
    truth = [g["reward"] for g in task.ground_truth] or None
    summary = {
        "config": flags.to_json(config) | {"resume": False},
        "ground_truth": [dict(g) for g in task.ground_truth],
        "policies": {
            name: metrics.summarise(
                curves,
                num_conflicts=num_conflicts,
                origins=policies[name].origins,
                warm_up=config.n_re,
                lam=config.lam,
                ground_truth=truth,
                references=task.references,
            )
            for name, curves in done.items()
        },
    }
    if task.references:
        summary["references"] = dict(task.references)
    files.write_json(folder / files.SUMMARY, summary)
    text = tables.summary_markdown(
        task.title,
        summary,
        rounds={name: curves.num_rounds for name, curves in done.items()},
        warm_up=config.n_re,
        notes=task.notes,
    )
    files.write_text(folder / files.TABLE, text)
    figures.plot_curves(
        folder / files.FIGURE,
        done,
        origins={name: policies[name].origins for name in done},
        num_conflicts=num_conflicts.tolist(),
        ground_truth=truth,
        warm_up=config.n_re,
        title=task.title,
    )
