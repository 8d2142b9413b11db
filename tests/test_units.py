"""Units: what makes two the same, what a crash leaves, when one is tried again."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from experiments import files, unit_process, units, workers
from experiments.flags import UsageError
from experiments.units import Unit, make_unit, merge_seeds
from msb_jax.data.demo import demo_log
from msb_jax.data.format import save_log

SMALL = {"num_arms": 12, "k": 3, "rounds": 10, "policies": ("random",)}


def test_name__is_the_same_for_the_same_run() -> None:
    unit = make_unit("synthetic", SMALL)
    spelled_out = make_unit("synthetic", SMALL | {"form": "cubic", "lam": 5.0})
    assert unit.name == spelled_out.name
    assert unit.name.endswith("-synthetic-cubic")
    slow = make_unit("synthetic", SMALL, seconds=1e6)
    assert slow == unit and slow.name == unit.name
    assert make_unit("synthetic", SMALL, xla_flags="--x=1").name != unit.name


@pytest.mark.parametrize(
    "change",
    [{"lam": 1.0}, {"seed": 1}, {"num_seeds": 4}, {"rounds": 11}, {"n_D": 7}],
)
def test_name__changes_with_what_matters(change: dict[str, float]) -> None:
    unit, other = (make_unit("synthetic", SMALL | c) for c in ({}, change))
    assert unit.name != other.name


def test_name__depends_on_the_log_and_not_on_its_place(tmp_path: Path) -> None:
    names = []
    for place, seed in (("a.npz", 1), ("b.npz", 1), ("c.npz", 2)):
        save_log(tmp_path / place, demo_log(seed=seed, num_arms=12, rounds=80))
        flags = {"dataset": "lastfm", "data": tmp_path / place, "k": 3}
        names.append(make_unit("real_world", flags).name)
    assert names[0] == names[1] != names[2]


def test_name__changes_with_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    before = make_unit("synthetic", SMALL).name
    monkeypatch.setattr(units, "FORMAT", units.FORMAT + 1)
    units._name.cache_clear()
    assert make_unit("synthetic", SMALL).name != before
    units._name.cache_clear()


def test_make_unit__says_what_is_wrong() -> None:
    with pytest.raises(UsageError, match="--k=13 is more than there are arms"):
        make_unit("synthetic", SMALL | {"k": 13})
    with pytest.raises(UsageError, match="cannot be read"):
        make_unit("real_world", {"dataset": "lastfm", "data": "nowhere.npz"})
    with pytest.raises(ValueError, match="may not set out"):
        make_unit("synthetic", {"out": "x"})
    with pytest.raises(ValueError, match="in order"):
        Unit(module="synthetic", flags=(("lam", "1"), ("k", "3")))


def test_merge_seeds__makes_one_program_of_seeds_that_follow() -> None:
    def unit(seed: int, number: int, **changed: float) -> Unit:
        return make_unit(
            "synthetic", SMALL | {"seed": seed, "num_seeds": number} | changed
        )

    (one,) = merge_seeds([unit(2, 2), unit(0, 2), unit(0, 2)])
    assert one.name == unit(0, 4).name
    assert len(merge_seeds([unit(0, 2), unit(3, 2)])) == 2
    assert len(merge_seeds([unit(0, 2), unit(2, 2, lam=1.0)])) == 2
    assert merge_seeds([unit(0, 2)]) == [unit(0, 2)]


def test_apart__units_that_differ_in_the_reward_do_not_start_together() -> None:
    forms = ("linear", "cubic", "mixed")
    todo = [
        make_unit("synthetic", SMALL | {"form": form, "lam": lam})
        for lam in (1.0, 2.0)
        for form in forms
    ]
    assert units.apart(todo) == [todo[i] for i in (0, 3, 1, 4, 2, 5)]
    assert units.apart([]) == []


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Provide an experiment `stub` that notes its calls; `codes` are its exit codes."""
    module = types.ModuleType("experiments.stub")
    module.calls, module.codes = [], []  # type: ignore[attr-defined]

    def main(argv: list[str]) -> int:
        module.calls.append(argv)  # type: ignore[attr-defined]
        code = module.codes.pop(0) if module.codes else 0  # type: ignore[attr-defined]
        run = tmp_path / units.RUN
        run.mkdir(exist_ok=True)
        versions = {"versions": {}, "device": {}}
        files.write_json(run / files.CONFIG, versions)
        if code == 0:
            files.write_json(run / files.SUMMARY, {})
        else:
            print("error: it broke", flush=True)
        return code

    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "experiments.stub", module)
    monkeypatch.setattr(unit_process, "_end_with_the_starter", lambda: None)
    about = {"module": "stub", "argv": ["--a=1"], "name": "n", "command": "c"}
    files.write_json(tmp_path / units.ABOUT, about)
    return module


def test_unit_process__marks_the_end_and_is_not_run_twice(
    tmp_path: Path, stub: types.ModuleType
) -> None:
    assert not units.is_finished(tmp_path)
    assert unit_process.main([str(tmp_path)]) == 0
    assert units.is_finished(tmp_path)
    assert stub.calls == [["--a=1", f"--out={tmp_path / 'run'}", "--resume=true"]]
    done = json.loads((tmp_path / units.DONE).read_text())
    assert done["command"] == "c" and done["seconds"] >= 0
    assert unit_process.main([str(tmp_path)]) == 0
    assert len(stub.calls) == 1


def test_unit_process__a_failure_leaves_no_mark(
    tmp_path: Path, stub: types.ModuleType
) -> None:
    stub.codes = [1]
    assert unit_process.main([str(tmp_path)]) == 1
    assert not (tmp_path / units.DONE).exists()
    assert unit_process.main([str(tmp_path)]) == 0


def test_unit_process__clears_what_a_killed_process_left(
    tmp_path: Path, stub: types.ModuleType
) -> None:
    run = tmp_path / units.RUN
    run.mkdir()
    (run / ".config.json.x").write_text("half")  # killed before there was a config
    seen = []
    real = stub.main

    def main(argv: list[str]) -> int:
        seen.append(sorted(p.name for p in run.glob("*")) if run.exists() else None)
        seen.append(sorted(p.name for p in run.glob(".*")) if run.exists() else None)
        return real(argv)

    stub.main = main
    stub.codes = [1, 1, 0]
    unit_process.main([str(tmp_path)])
    (run / ".curves.npz.x").write_text("half")
    unit_process.main([str(tmp_path)])
    unit_process.main([str(tmp_path), unit_process.FRESH])
    assert seen == [None, None, ["config.json"], [], None, None]


def test_run_unit__tries_again_and_the_last_time_afresh(
    tmp_path: Path, stub: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    extras = []

    def in_this_process(folder: Path, extra: list[str], stop: object) -> int:
        extras.append(extra)
        return unit_process.main([str(folder), *extra])

    monkeypatch.setattr(workers, "_run_process", in_this_process)
    stub.codes = [1, 1]
    assert workers.run_unit(tmp_path) == workers.Outcome(True)
    assert extras == [[], [], [unit_process.FRESH]]


def test_run_unit__gives_up_with_the_end_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_json(tmp_path / units.ABOUT, {})

    def fails(folder: Path, extra: list[str], stop: object) -> int:
        with open(folder / units.LOG, "a") as log:
            log.write("".join(f"line {i}\n" for i in range(20)) + "error: broken\n\n")
        return 7

    monkeypatch.setattr(workers, "_run_process", fails)
    outcome = workers.run_unit(tmp_path)
    assert not outcome.is_done
    assert "error: broken" in outcome.reason and "line 19" in outcome.reason
    assert "line 3\n" not in outcome.reason
    assert "exit code 7, tried 3 times" in outcome.reason


def test_run_unit__reports_a_full_disk_and_a_folder_that_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "shared folder" in workers.run_unit(tmp_path / "nowhere").reason
    files.write_json(tmp_path / units.ABOUT, {})

    def full(folder: Path, extra: list[str], stop: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(workers, "_run_process", full)
    assert "No space left" in workers.run_unit(tmp_path).reason


def test_environment__is_the_same_on_every_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "--xla_force_host_platform_device_count"
    seen = set()
    for count in (1, 2, 64):
        monkeypatch.setenv("XLA_FLAGS", f"--other=1 {name}={count}")
        seen.add(workers.environment("--more=2")["XLA_FLAGS"])
    assert seen == {f"--other=1 {name}={workers.DEVICES} --more=2"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("3", workers.Workers(3)),
        ("ray:2", workers.Workers(2, is_ray=True)),
        ("ray://host:10001", workers.Workers(is_ray=True, address="ray://host:10001")),
        ("ray:host:6379", workers.Workers(is_ray=True, address="host:6379")),
    ],
)
def test_parse_workers__knows_processes_and_ray(
    text: str, wanted: workers.Workers
) -> None:
    assert workers.parse_workers(text) == wanted


@pytest.mark.parametrize("text", ["0", "two", "-1", "ray:", "ray:0", "spark:3", ""])
def test_parse_workers__says_what_is_wrong(text: str) -> None:
    with pytest.raises(ValueError, match="--workers"):
        workers.parse_workers(text)


def test_import_ray__says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'msb_jax\[ray\]'"):
        workers.import_ray()


def test_last_lines__of_a_file_that_is_not_there() -> None:
    assert units.last_lines(Path("nowhere")) == ""
