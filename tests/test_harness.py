"""The command line, the folder and the files, with an experiment of a few rounds."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import figures, files, flags, harness, progress, tables
from experiments.flags import UsageError, flag
from msb_jax.baselines.random import CONSTRAINTS
from msb_jax.problem import problem_from_conflicts, stack_problems
from msb_jax.runner import Curves
from msb_jax.types import Outcome
from tests.shortcuts import cached_policy, tiny_figure

FILES = {"config.json", "curves.npz", "summary.json", "summary.md", "curves.png"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig:
    policies: tuple[str, ...] = flag(("random", "lin_ts"), "who plays")
    rounds: int = flag(10, "how long")
    num_seeds: int = flag(2, "how many")
    size: int | None = flag(None, "arms; 6 if not given")
    lam: float = flag(5.0, "price")
    constraints: str = flag("soft", "how", CONSTRAINTS)
    n_re: int = flag(4, "random rounds")
    f_in: int = flag(3, "rounds between refreshes")
    truth: bool = flag(True, "know the ground truth")
    out: str | None = flag(None, "folder")
    resume: bool = flag(False, "go on")
    quick: bool = flag(False, "be quick")

    def __post_init__(self) -> None:
        if self.size is None:
            object.__setattr__(self, "size", 6)
        if self.rounds < 1:
            raise ValueError(f"--rounds must be at least 1, got {self.rounds}.")


def toy_step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, Outcome]:
    mean = state[action].sum()
    return state, Outcome(mean + 0.1 * jax.random.normal(key), mean)


def prepare(config: ToyConfig, folder: Path, bar: progress.Progress) -> harness.Task:
    del folder
    bar.say("preparing")
    edges = np.array([[0, 1], [2, 3]])
    problem = problem_from_conflicts(edges, 2, num_arms=config.size)
    worth = jnp.arange(config.size, dtype=jnp.float32) / 10
    truth = {"reward": 0.9, "upper_bound": 1.0, "status": "guessed"}
    seeds = range(config.num_seeds if config.truth else 0)
    return harness.Task(
        env_step=toy_step,
        env_states=jnp.stack([worth] * config.num_seeds),
        problems=stack_problems([problem] * config.num_seeds),
        keys=jax.random.split(jax.random.key(3), config.num_seeds),
        ground_truth=[{"seed": s} | truth for s in seeds],
        title="Toy",
        notes=["Only a toy."],
    )


TOY = harness.Experiment(
    name="toy",
    config_class=ToyConfig,
    label=lambda config: "toy",
    prepare=prepare,
    quick={"rounds": 5, "size": 8},
)


@pytest.fixture(autouse=True)
def quickly_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(harness, "make_policy", cached_policy)
    if "contract" not in request.node.name:
        monkeypatch.setattr(figures, "plot_curves", tiny_figure)


def run(*argv: str) -> int:
    return harness.main(TOY, argv)


def assert_same_curves(one: str, other: str) -> None:
    first = files.read_curves(Path(one) / files.CURVES)
    second = files.read_curves(Path(other) / files.CURVES)
    assert list(first) == list(second)
    for policy in first:
        for name in Curves._fields[:4]:
            np.testing.assert_array_equal(
                getattr(first[policy], name), getattr(second[policy], name)
            )


def stop_at(monkeypatch: pytest.MonkeyPatch, block: int, how: str) -> None:
    """Interrupt after a number of blocks: by a signal, or by an exception."""
    real, seen = harness._note, []

    def note(curves: Curves, task: harness.Task) -> str:
        seen.append(1)
        if len(seen) == block:
            if how == "exception":
                raise KeyboardInterrupt
            if how == "crash":
                raise RuntimeError("crash")
            os.kill(os.getpid(), getattr(signal, how))
        return real(curves, task)

    monkeypatch.setattr(harness, "_note", note)


def test_main__writes_the_files_of_the_contract(capsys: pytest.CaptureFixture) -> None:
    assert run("--out=a") == 0
    assert set(os.listdir("a")) == FILES
    summary = json.loads(Path("a/summary.json").read_text())
    assert set(summary) == {"config", "ground_truth", "policies"}
    assert list(summary["policies"]) == ["random", "lin_ts"]
    assert summary["ground_truth"][1] == {
        "seed": 1,
        "reward": 0.9,
        "upper_bound": 1.0,
        "status": "guessed",
    }
    assert summary["config"]["rounds"] == 10
    rate = summary["policies"]["lin_ts"]["recommended_rate"]
    assert rate == {"lin_ts": 1.0}
    config = json.loads(Path("a/config.json").read_text())
    assert config["flags"] == summary["config"]
    assert config["device"]["platform"] == "cpu"
    assert config["versions"]["jax"] == jax.__version__
    with np.load("a/curves.npz") as curves:
        assert curves["random/reward"].shape == (2, 10)
        assert curves["lin_ts/violations"].dtype == np.int32
    assert Path("a/curves.png").read_bytes()[:4] == b"\x89PNG"
    page = Path("a/summary.md").read_text()
    assert "| lin_ts |" in page
    assert "Only a toy." in page
    out = capsys.readouterr().out
    assert "| lin_ts |" in out
    assert "Results: a" in out


def test_main__default_folder_is_new_every_time() -> None:
    assert run("--policies=random") == 0
    assert run("--policies=random") == 0
    folders = sorted(Path("results").iterdir())
    assert len(folders) == 2
    assert all(set(os.listdir(f)) == FILES for f in folders)


def test_main__without_ground_truth_leaves_the_keys_out() -> None:
    assert run("--policies=random", "--notruth", "--out=a") == 0
    summary = json.loads(Path("a/summary.json").read_text())
    assert summary["ground_truth"] == []
    assert not any(k.startswith("gt") for k in summary["policies"]["random"])


def test_main__says_when_no_round_is_after_warm_up() -> None:
    assert run("--policies=random", "--n_re=10", "--out=a") == 0
    assert "No round after warm-up: random" in Path("a/summary.md").read_text()


def test_main__quick_is_a_preset_that_flags_override() -> None:
    assert run("--quick", "--policies=random", "--size=7", "--out=a") == 0
    config = json.loads(Path("a/config.json").read_text())["flags"]
    assert (config["rounds"], config["size"]) == (5, 7)


@pytest.mark.parametrize(
    ("how", "block"),
    [("SIGINT", 2), ("SIGTERM", 6), ("exception", 2), ("exception", 6)],
)
def test_main__resumed_run_equals_an_uninterrupted_one(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    how: str,
    block: int,
) -> None:
    assert run("--out=whole") == 0
    with monkeypatch.context() as patch:
        stop_at(patch, block, how)
        assert run("--out=part") == (143 if how == "SIGTERM" else 130)
    assert "--resume --out=part" in capsys.readouterr().out
    # An exception skips the checkpoint; what was finished is there in any case.
    summary = json.loads(Path("part/summary.json").read_text())
    assert list(summary["policies"]) == ["random", "lin_ts"][: 1 + (block > 4)]
    assert "Interrupted" in Path("part/summary.md").read_text()
    assert run("--resume", "--out=part") == 0
    assert_same_curves("whole", "part")
    assert set(os.listdir("part")) == FILES
    assert "Interrupted" not in Path("part/summary.md").read_text()


def test_main__resumes_after_a_crash_from_the_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run("--out=whole", "--policies=lin_ts") == 0
    with monkeypatch.context() as patch:
        patch.setattr(harness, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
        patch.setattr(harness, "CHECKPOINT_SHARE", 1e9)
        stop_at(patch, 3, "crash")
        with pytest.raises(RuntimeError, match="crash"):
            run("--out=part", "--policies=lin_ts")
    assert "checkpoint-lin_ts.npz" in os.listdir("part")
    assert run("--resume", "--out=part") == 0
    assert_same_curves("whole", "part")


def test_main__resuming_a_finished_run_only_prints(
    capsys: pytest.CaptureFixture,
) -> None:
    assert run("--policies=random", "--out=a") == 0
    before = Path("a/curves.npz").read_bytes()
    capsys.readouterr()
    assert run("--resume", "--out=a") == 0
    assert "| random |" in capsys.readouterr().out
    assert Path("a/curves.npz").read_bytes() == before


def test_main__resume_finds_the_latest_folder_of_the_flags() -> None:
    assert run("--policies=random", "--rounds=4") == 0
    assert run("--policies=random", "--rounds=5") == 0
    assert run("--resume", "--rounds=4") == 0
    assert len(list(Path("results").iterdir())) == 2


def test_main__resume_of_an_empty_folder_starts() -> None:
    assert run("--resume", "--out=new", "--policies=random") == 0
    assert set(os.listdir("new")) == FILES


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--rounds=0"], ["--rounds", "at least 1"]),
        (["--rounds=ten"], ["rounds", "ten"]),
        (["--rouns=10"], ["rouns", "rounds"]),
        (["--lam"], ["lam"]),
        (["--constraints=firm"], ["constraints", "soft", "hard"]),
        (["--policies=randon"], ["randon", "did you mean 'random'", "lin_ts"]),
        (["--policies=lin_ts", "--f_in=0"], ["f_in"]),
        (["word"], ["word", "--"]),
        (["--resume"], ["no run", "--out"]),
        (["--out=/proc/nowhere/x"], ["--out=/proc/nowhere/x", "cannot be written"]),
        (["--out=used"], ["used", "not empty", "--resume"]),
        (["--out=used", "--resume"], ["used", "not empty"]),
        (["--out=used/file"], ["used/file", "cannot be written"]),
    ],
)
def test_main__bad_command_lines_get_a_sentence_and_exit_2(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture
) -> None:
    Path("used").mkdir()
    Path("used/file").write_text("precious")
    assert run(*argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert not Path("results").exists()
    assert os.listdir("used") == ["file"]


def test_main__resume_with_other_flags_names_them(
    capsys: pytest.CaptureFixture,
) -> None:
    assert run("--policies=random", "--out=a") == 0
    assert run("--resume", "--out=a", "--rounds=11", "--lam=5", "--size=7") == 2
    err = capsys.readouterr().err
    assert "--rounds was 10, not 11" in err
    assert "--size was 6, not 7" in err
    assert "lam" not in err


def test_main__damaged_checkpoint_gets_a_sentence(
    capsys: pytest.CaptureFixture,
) -> None:
    assert run("--policies=random", "--out=a") == 0
    Path("a/curves.npz").unlink()
    Path("a/checkpoint-random.npz").write_bytes(b"nothing")
    assert run("--resume", "--out=a") == 2
    assert "checkpoint cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    ["bench", "cascading", "other_problems", "real_world", "reproduce", "synthetic"],
)
def test_main__every_command_has_help(name: str, capsys: pytest.CaptureFixture) -> None:
    module = importlib.import_module(f"experiments.{name}")
    assert module.main(["--help"]) == 0
    assert f"python -m experiments.{name}" in capsys.readouterr().out


def test_main__help_shows_every_flag(capsys: pytest.CaptureFixture) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    for field in dataclasses.fields(ToyConfig):
        assert f"--{field.name} " in out


def test_main__interrupted_while_preparing_keeps_the_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def interrupted(*args: Any) -> harness.Task:
        raise KeyboardInterrupt

    assert harness.main(TOY._replace(prepare=interrupted), ["--out=a"]) == 130
    assert "--resume --out=a" in capsys.readouterr().out
    assert run("--resume", "--out=a") == 0
    assert set(os.listdir("a")) == FILES


def test_deferred_signals__a_second_one_interrupts_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    caught: list[int] = []
    with harness.deferred_signals(caught):
        os.kill(os.getpid(), signal.SIGINT)
        assert caught == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_flags__round_trip_through_json() -> None:
    config = ToyConfig(policies=("a", "b"), size=3)
    stored = json.loads(json.dumps(flags.to_json(config)))
    again = ToyConfig(**flags.from_json(ToyConfig, stored | {"unknown": 1}))
    assert again == config


def test_flags__only_given_ones_are_returned() -> None:
    given = flags.parse(ToyConfig, ["--policies=a,b", "--noresume", "--lam=2"])
    assert given == {"policies": ("a", "b"), "resume": False, "lam": 2.0}


def test_files__json_refuses_nan_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(path, {"a": float("nan")})
    assert files.read_json(path) == {"a": 1}
    path.write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        files.read_json(path)


def test_progress__prints_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with progress.Progress() as bar:
        bar.start("policy", 100, done=20)
        bar.update(40, "gt fraction 0.9")
        bar.update(100)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "policy: 100 rounds, continuing at round 20"
    assert lines[1].startswith("policy: round 40 of 100, gt fraction 0.9, ")
    assert lines[1].endswith(" left")
    assert lines[2] == "policy: round 100 of 100"


def test_format_seconds__is_short() -> None:
    shown = [progress.format_seconds(s) for s in (0.4, 59.4, 65, 7325)]
    assert shown == ["0 s", "59 s", "1:05 min", "2:02:05 h"]


def test_markdown_table__is_aligned() -> None:
    table = tables.markdown_table(["a", "b"], [["xx", "1"], ["y", "222"]])
    assert table.splitlines() == [
        "| a  |   b |",
        "| -- | --: |",
        "| xx |   1 |",
        "| y  | 222 |",
    ]
