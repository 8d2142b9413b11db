"""The main experiment from its command line, at sizes of a few arms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import figures, files, harness, synthetic
from experiments.synthetic import Config
from msb_jax.baselines.registry import POLICIES
from msb_jax.envs import synthetic as env
from msb_jax.runner import Curves
from tests.shortcuts import cached_policy, tiny_figure

FILES = {
    "config.json",
    "curves.npz",
    "summary.json",
    "summary.md",
    "curves.png",
    "instances.npz",
}
TINY = ("--num_arms=8", "--k=3", "--rounds=14", "--f_in=4", "--n_re=6", "--num_seeds=2")
TINY += ("--samplers=solver,random_best,teacher_student",)


@pytest.fixture(autouse=True)
def quickly_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(harness, "make_policy", cached_policy)
    if "all_policies" not in request.node.name:
        monkeypatch.setattr(figures, "plot_curves", tiny_figure)


def run(*argv: str) -> int:
    """Run at a tiny size; later flags win."""
    return synthetic.main([*TINY, "--policies=random", "--out=out", *argv])


def read_summary(folder: str = "out") -> dict:
    return json.loads(Path(folder, "summary.json").read_text())


@pytest.mark.parametrize("form", env.FORMS)
def test_synthetic__runs_every_form(form: str) -> None:
    assert run(f"--form={form}") == 0
    assert set(os.listdir("out")) == FILES
    summary = read_summary()
    assert [g["seed"] for g in summary["ground_truth"]] == [0, 1]
    for truth in summary["ground_truth"]:
        assert set(truth) == {"seed", "reward", "upper_bound", "status"}
        assert 0 < truth["reward"] <= truth["upper_bound"] + 1e-6 <= 1 + 1e-5
    assert 0 < summary["policies"]["random"]["gt_fraction"] < 1.5


def test_synthetic__all_policies_and_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "--policies=lin_ts,random,master_slave"
    flags = (names, "--form=linear", "--constraints=hard")
    assert run(*flags, "--out=whole") == 0
    assert set(read_summary("whole")["policies"]) == {
        "lin_ts",
        "random",
        "master_slave",
    }
    real, seen = harness._note, []

    def interrupt(curves: Curves, task: harness.Task) -> str:
        seen.append(1)
        if len(seen) == 10:  # in the third policy
            os.kill(os.getpid(), 2)
        return real(curves, task)

    with monkeypatch.context() as patch:
        patch.setattr(harness, "_note", interrupt)
        assert run(*flags, "--out=part") == 130
    assert "checkpoint-master_slave.npz" in os.listdir("part")
    made = []
    monkeypatch.setattr(env, "make_instance", lambda *args: made.append(args))
    assert synthetic.main(["--resume", "--out=part"]) == 0
    assert not made  # ground truths are read, not made again
    assert set(os.listdir("part")) == FILES
    whole, part = (files.read_curves(Path(f, files.CURVES)) for f in ("whole", "part"))
    assert list(whole) == list(part)
    for policy, curves in whole.items():
        for name in Curves._fields[:4]:
            np.testing.assert_array_equal(
                getattr(curves, name), getattr(part[policy], name), f"{policy} {name}"
            )


@pytest.mark.parametrize(
    "flags",
    [
        ["--k=8"],
        ["--k=1"],
        ["--num_constraints=0", "--policies=lin_ts"],
        ["--num_arms=1", "--k=1"],
        ["--num_arms=2", "--k=1", "--num_constraints=1"],
        ["--num_seeds=1", "--rounds=3"],
    ],
)
def test_synthetic__odd_sizes(flags: list[str]) -> None:
    assert run(*flags, "--constraints=hard") == 0
    (policy,) = read_summary()["policies"].values()
    assert policy["gt_fraction"] > 0


def test_synthetic__warns_of_an_infeasible_instance(
    capsys: pytest.CaptureFixture,
) -> None:
    assert run("--num_constraints=28", "--constraints=hard") == 0
    assert "no conflict-free set of 3 arms exists" in capsys.readouterr().out
    assert "no conflict-free set of 3 arms exists" in Path("out/summary.md").read_text()
    assert read_summary()["ground_truth"][0]["status"] == "infeasible"
    assert read_summary()["policies"]["random"]["violated_pairs"] == 3


def test_synthetic__more_seeds_leave_the_first_ones_alone() -> None:
    assert run("--num_seeds=1", "--out=one") == 0
    assert run("--num_seeds=3", "--out=three") == 0
    one, three = (files.read_curves(Path(f, files.CURVES)) for f in ("one", "three"))
    np.testing.assert_array_equal(one["random"].reward, three["random"].reward[:1])
    assert not np.array_equal(three["random"].reward[1], three["random"].reward[2])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--k=9"], ["--k=9", "--num_arms=8"]),
        (["--k=0"], ["--k", "at least 1"]),
        (["--num_arms=0"], ["--num_arms", "at least 1"]),
        (["--num_constraints=29"], ["--num_constraints=29", "28 pairs"]),
        (["--rounds=-5"], ["--rounds", "at least 1"]),
        (["--noise_std=nan"], ["--noise_std"]),
        (["--lam=-1"], ["--lam", "at least 0"]),
        (["--seed=-1"], ["--seed"]),
        (["--f_in=0"], ["--f_in"]),
        (["--n_es=0"], ["--n_es"]),
        (["--form=quartic"], ["form", "cubic"]),
        (["--master=ntk"], ["master", "ntk_ucb"]),
        (["--policies="], ["--policies", "lin_ts"]),
        (["--policies=random,random"], ["twice"]),
        (["--policies=linear_ts"], ["linear_ts", "lin_ts"]),
        (["--num_arm=3"], ["num_arm"]),
    ],
)
def test_synthetic__bad_flags_get_a_sentence_and_exit_2(
    flags: list[str], words: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert run(*flags) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert not Path("out").exists()


def test_synthetic__is_a_command() -> None:
    command = [sys.executable, "-m", "experiments.synthetic", "--k=400"]
    root = Path(synthetic.__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: --k=400 is more than")
    assert done.stderr.count("\n") == 1


def test_config__defaults_are_the_papers() -> None:
    config = Config()
    assert (config.num_arms, config.k, config.feature_dim) == (300, 20, 10)
    assert (config.num_constraints, config.rounds, config.n_re) == (3962, 5000, 600)
    assert (config.f_in, config.lam, config.n_es) == (20, 5.0, 10)
    assert config.policies == ("master_slave", "lin_ts", "random")
    assert (config.constraints, config.num_seeds) == ("soft", 3)


def test_synthetic__oracle_reaches_the_ground_truth() -> None:
    assert run("--policies=oracle,random", "--form=quadratic") == 0
    policies = read_summary()["policies"]
    assert list(policies) == ["oracle", "random"]
    assert policies["oracle"]["gt_fraction_all"] == pytest.approx(1.0, abs=1e-5)
    assert policies["oracle"]["feasible_share"] == 1.0


def test_config__all_is_every_policy() -> None:
    config = Config(policies=("all",))
    assert config.policies == tuple(POLICIES)
    assert config.policies[0] == "master_slave"


def test_config__sizes_scale_the_constraints_and_the_warm_up() -> None:
    config = Config(num_arms=60, k=6)
    assert (config.num_constraints, config.n_re) == (156, 120)
    given = Config(num_arms=60, k=6, num_constraints=10, n_re=5)
    assert (given.num_constraints, given.n_re) == (10, 5)
    assert Config(num_constraints=-1, n_re=-1) == Config()


def test_config__quick_is_small() -> None:
    quick = Config(**synthetic.QUICK)
    assert quick.num_arms < 100
    assert quick.rounds > 2 * quick.n_re
