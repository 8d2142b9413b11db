"""The benchmark runs at a small size and writes what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import bench


def test_bench__measures_all_suites(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "figures.json"
    code = bench.main(
        [
            "--rounds=40",
            "--num_seeds=1",
            "--num_arms=30",
            "--k=4",
            "--history=700",
            "--form=linear",
            "--learners=cem_ppo",
            "--samplers=solver,random_best",
            "--refreshes=3",
            f"--json={path}",
        ]
    )
    assert code == 0
    figures = json.loads(path.read_text())
    (rounds,) = figures["rounds"]
    assert rounds["seconds_per_round"] > 0
    assert rounds["stages"]["rounds"] > 0
    kinds = {result["kind"] for result in figures["confidence"]}
    assert kinds == {"exact", "diagonal", "full"}
    assert figures["drift"]["mean_error"] < 0.01
    assert figures["samplers"]["seconds"]["cem_ppo"] > 0
    assert len(figures["samplers"]["competence"]) == 4
    assert "ms a round and seed" in capsys.readouterr().out


def test_stage_clock__adds_up_stages_without_compilation() -> None:
    compiled = iter([0.0, 1e6, 1e6, 1e6, 1e6])
    clock = bench.StageClock(lambda: next(compiled))
    clock("score", ())  # a stage in which a million seconds went into compilation
    clock("score", ())
    assert clock.seconds["score"] < 0


@pytest.mark.parametrize("argument", ["--suite=speed", "--rounds=0", "--nothing=1"])
def test_bench__explains_bad_flags(
    argument: str, capsys: pytest.CaptureFixture
) -> None:
    assert bench.main([argument]) == 2
    assert capsys.readouterr().err.startswith("error: ")
