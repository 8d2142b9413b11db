"""The command that runs everything: killed, interrupted, failing, with workers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from experiments import report, reproduce, units
from experiments.files import CURVES, read_curves
from experiments.report_markdown import BEGIN, END
from experiments.workers import Outcome
from tests import tiny_reproduce

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "tests.tiny_reproduce"]


def start(out: Path, *flags: str) -> subprocess.Popen[bytes]:
    log = open(out.parent / f"{out.name}.log", "ab")  # noqa: SIM115
    command = [*COMMAND, f"--out={out}", *flags]
    with log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def same_files(one: Path, other: Path) -> None:
    """Assert that two folders hold the same results, byte for byte."""
    names = sorted(p.name for p in (one / report.CSV).iterdir())
    assert names == sorted(p.name for p in (other / report.CSV).iterdir())
    for name in [report.DATA, *(f"{report.CSV}/{n}" for n in names)]:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    for unit in tiny_reproduce.tiny_units():
        places = [unit.folder(root) / units.RUN / CURVES for root in (one, other)]
        left, right = (read_curves(place) for place in places)
        for policy, curves in left.items():
            for field in ("reward", "mean_reward", "violations", "origin"):
                values = (getattr(c, field) for c in (curves, right[policy]))
                np.testing.assert_array_equal(*values)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that was filled without a break, by one worker."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert start(out, "--workers=1").wait(600) == 0
    return out


@pytest.mark.slow
def test_reproduce__killed_at_three_points_gives_the_same_files(
    whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def number(name: str) -> int:
        return len(list(out.glob(f"units/*/{name}")))

    moments: list[Callable[[], bool]] = [
        lambda: number("run/config.json") == 1,  # the first unit has begun
        lambda: number("done.json") == 1,  # it is finished
        lambda: (out / report.DATA).exists(),  # the report is being written
    ]
    for is_time in moments:
        process = start(out, "--workers=1")
        while not is_time():
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not (out / report.PAGE).exists()
    assert start(out, "--workers=1").wait(600) == 0
    same_files(whole, out)


@pytest.mark.slow
def test_reproduce__ctrl_c_writes_what_is_finished_and_goes_on(
    whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start(out, "--workers=2")
    while not list(out.glob("units/*/done.json")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(300) in (0, 130)  # 0 if the others had ended as well
    assert (out / report.PAGE).exists()
    assert start(out, "--workers=2").wait(600) == 0
    same_files(whole, out)


@pytest.mark.slow
def test_reproduce__a_unit_that_fails_is_named_and_the_rest_goes_on(
    whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    unit = tiny_reproduce.tiny_units()[0]
    shutil.rmtree(unit.folder(out) / units.RUN)
    (unit.folder(out) / units.DONE).unlink()
    about = json.loads((unit.folder(out) / units.ABOUT).read_text())
    broken = about | {"argv": ["--form=none"]}
    (unit.folder(out) / units.ABOUT).write_text(json.dumps(broken))
    assert start(out, "--workers=1").wait(600) == 1
    page = (out / report.PAGE).read_text()
    assert "Units that failed" in page and "tried 3 times" in page
    (unit.folder(out) / units.ABOUT).write_text(json.dumps(about))
    assert start(out, "--workers=1").wait(600) == 0
    assert "Units that failed" not in (out / report.PAGE).read_text()
    same_files(whole, out)


@pytest.mark.slow
def test_reproduce__ray_gives_the_same_files_though_a_worker_dies(
    whole: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    out = tmp_path / "out"
    process = start(out, "--workers=ray:2")
    victim = None
    while victim is None:
        assert process.poll() is None
        victim = _parent_of_a_unit(out)
        time.sleep(0.02)
    os.kill(victim, signal.SIGKILL)
    assert process.wait(600) == 0
    same_files(whole, out)


def _parent_of_a_unit(out: Path) -> int | None:
    """Return the process that waits for a unit's, which Ray calls a worker."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().decode().split("\0")
            status = (place.parent / "status").read_text()
        except OSError:
            continue
        if "experiments.unit_process" in words and any(
            word.startswith(str(out)) for word in words
        ):
            return int(status.split("PPid:")[1].split()[0])
    return None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--only=figures"], ["--only=figures", "synthetic", "report"]),
        (["--only="], ["--only"]),
        (["--workers=0"], ["--workers must be at least 1"]),
        (["--workers=many"], ["--workers"]),
        (["--budget=large"], ["budget"]),
        (["--data=nowhere"], ["has none of", "experiments.prepare"]),
        (["--out=/dev/null/x"], ["/dev/null/x"]),
        (["--tables=nowhere.md"], ["nowhere.md"]),
        ([f"--tables={__file__}"], ["--tables", "go between them"]),
    ],
)
def test_reproduce__bad_flags_get_a_sentence_and_exit_2(
    flags: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert reproduce.main(flags) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and all(word in err for word in words)
    assert not list(tmp_path.iterdir())


def test_reproduce__the_report_of_nothing_is_all_dashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "plot_figure", lambda folder, figure: None)
    (tmp_path / report.CSV).mkdir()
    for name in (".data.json.half", f"{report.CSV}/.reward.csv.half"):
        (tmp_path / name).write_text("left by a killed process")
    copy = tmp_path / "copy.md"
    copy.write_text(f"{BEGIN}\n{END}\n")
    flags = ["--only=report", f"--out={tmp_path}", f"--tables={copy}"]
    assert reproduce.main(flags) == 0
    assert "Reward of every policy" in copy.read_text()
    assert not list(tmp_path.rglob(".*"))
    data = json.loads((tmp_path / report.DATA).read_text())
    tables = [table for part in data["parts"] for table in part["tables"]]
    assert len(tables) >= 14
    for table in tables:
        for _, entries in table["rows"]:
            for entry in entries:
                mean, error, reason = entry["ours"].values()
                assert mean is not None or (reason and error is None)
    page = (tmp_path / report.PAGE).read_text()
    assert "paper 0.1364" in page and "0 of " in page


def test_reproduce__a_page_that_loses_its_markers_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "plot_figure", lambda folder, figure: None)
    copy = tmp_path / "copy.md"
    monkeypatch.setattr(reproduce, "_page", lambda name: copy)
    copy.write_text("mine\n")
    assert reproduce.main(["--only=report", f"--out={tmp_path}"]) == 2
    assert "has lost the lines" in capsys.readouterr().err
    assert copy.read_text() == "mine\n" and (tmp_path / report.PAGE).exists()


def test_reproduce__counts_and_keeps_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "plot_figure", lambda folder, figure: None)
    monkeypatch.setattr(reproduce, "make_plan", tiny_reproduce.tiny_plan)

    def fail(todo, root, workers, done, caught) -> None:  # type: ignore[no-untyped-def]
        for unit in todo:
            unit.folder(root).mkdir(parents=True)
            done(unit, Outcome(False, "error: <broken>"))

    monkeypatch.setattr(reproduce, "run_units", fail)
    assert reproduce.main([f"--out={tmp_path}"]) == 1
    assert "error: <broken>" in capsys.readouterr().out
    assert reproduce.main([f"--out={tmp_path}", "--only=report"]) == 0
    page = (tmp_path / report.PAGE).read_text()
    assert page.count("error: &lt;broken&gt;") == 3
