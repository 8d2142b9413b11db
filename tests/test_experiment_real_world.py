"""The experiment with logs, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments import real_world
from msb_jax.data.demo import demo_log
from msb_jax.data.format import save_log

SMALL = ("--rounds=60", "--num_seeds=2")


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(folder: str) -> dict:  # type: ignore[type-arg]
    return json.loads(Path(folder, "summary.json").read_text())


def test_main__demo_writes_rewards_relative_to_what_was_possible() -> None:
    asked = ("--policies=d_lin_ts,random,oracle", "--constraints=hard", "--out=a")
    assert real_world.main([*SMALL, *asked]) == 0
    summary = read("a")
    known = summary["references"]
    order = ("random", "best_fixed", "clairvoyant", "clairvoyant_free")
    values = [known[name] for name in order]
    assert values == sorted(values)
    assert summary["ground_truth"] == []
    assert summary["config"]["n_re"] == 20 and summary["config"]["rounds"] == 60
    policies = summary["policies"]
    assert "gt_fraction" not in policies["random"]
    # The oracle of a log plays the best fixed set.
    assert policies["oracle"]["relative"]["best_fixed"] == pytest.approx(1.0, abs=1e-5)
    relative = policies["random"]["reward_mean_all"] / known["random"]
    assert policies["random"]["relative"]["random"] == pytest.approx(relative)
    text = Path("a/summary.md").read_text()
    assert "of clairvoyant" in text and "## What was possible" in text


def test_main__synthetic_feedback_on_the_arms_of_a_log() -> None:
    asked = ("--feedback=mixed", "--num_constraints=90", "--policies=random,oracle")
    assert real_world.main([*SMALL, *asked, "--out=a"]) == 0
    summary = read("a")
    assert summary["policies"]["oracle"]["gt_fraction"] == pytest.approx(1.0, abs=1e-4)
    assert summary["policies"]["random"]["gt_fraction"] < 0.95
    assert summary["config"]["master"] == "ntk_ucb" and summary["config"]["n_re"] == 80


def test_main__reads_a_prepared_log_and_a_user() -> None:
    save_log("log.npz", demo_log(seed=3, num_arms=12, rounds=120))
    asked = ("--dataset=lastfm", "--data=log.npz", "--policies=random", "--k=3")
    assert real_world.main([*asked, "--num_seeds=1", "--out=a"]) == 0
    assert read("a")["config"]["rounds"] == 117
    assert real_world.main([*asked, "--user=0", "--counting=set", "--causal"]) == 0


def test_main__all_arms_conflict_reports_the_floor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_log("log.npz", demo_log(seed=3, num_arms=6, rounds=60))
    asked = ("--dataset=yahoo", "--data=log.npz", "--policies=random", "--k=3")
    assert real_world.main([*asked, "--num_seeds=1", "--tau=2", "--out=a"]) == 0
    assert "3 of the 15 pairs at least" in Path("a/summary.md").read_text()


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (("--dataset=lastfm",), "needs --data=FILE.npz"),
        (("--data=x.npz",), "leave out --data"),
        (("--dataset=yahoo", "--data=none.npz"), "There is no file none.npz"),
        (("--rounds=3000",), "more than the log has: 2990"),
        (("--k=41",), "--k=41 is more than the 40 arms"),
        (("--rounds=0",), "--rounds must be at least 1"),
        (("--user=7",), "User 7 is not in the log"),
        (("--tau=-1",), "--tau must be at least 0"),
        (("--num_constraints=1000",), "num_conflicts must be an integer in 0..780"),
    ],
)
def test_main__says_what_is_wrong(
    asked: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert real_world.main([*asked, "--policies=random"]) == 2
    assert sentence in capsys.readouterr().err


def test_liking__is_between_0_and_a_half() -> None:
    log = demo_log(seed=1, num_arms=10, rounds=50)
    worth = real_world.liking(log, log.clicks_of())
    assert worth.min() == 0.0 and worth.max() == 0.5
    same = log._replace(item_vectors=np.tile(log.item_vectors[:1], (10, 1)))
    np.testing.assert_array_equal(real_world.liking(same, log.clicks_of()), 0.25)


def test_agent__tracks_the_demo_log_and_never_violates() -> None:
    asked = ("--policies=master_slave,random", "--constraints=hard", "--out=a")
    plain = "--samplers=solver,random_best,teacher_student"
    assert real_world.main(["--rounds=300", "--num_seeds=2", plain, *asked]) == 0
    policies = read("a")["policies"]
    agent = policies["master_slave"]
    assert agent["feasible_share"] == 1.0
    assert agent["reward_mean_all"] > 1.3 * policies["random"]["reward_mean_all"]
