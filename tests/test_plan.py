"""The plan has every table and figure of the paper, and shares its units."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import printed
from experiments.flags import UsageError
from experiments.plan import DEMO, GROUPS, WIDE, Section, make_plan, units_of
from msb_jax.baselines.registry import POLICIES
from msb_jax.data.demo import demo_log
from msb_jax.data.format import save_log

Plan = dict[str, Section]


@pytest.fixture(scope="module", params=["quick", "paper"])
def plan(request: pytest.FixtureRequest) -> Plan:
    return make_plan(request.param)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    for seed, name in enumerate(("lastfm", "movielens", "yahoo", WIDE)):
        save_log(folder / f"{name}.npz", demo_log(seed=seed, num_arms=40, rounds=900))
    return folder


def test_make_plan__has_every_group(plan: Plan) -> None:
    assert {section.group for section in plan.values()} == set(GROUPS)
    for section in plan.values():
        assert section.cells
        for cell in section.cells.values():
            assert cell.policy in dict(cell.unit.flags)["policies"].split(",")


def test_make_plan__plays_every_policy_on_every_form(plan: Plan) -> None:
    for form in printed.FORMS:
        rows = {r for r, c in plan["baselines"].cells if c == form}
        assert rows >= {r for r, _ in printed.VIOLATION}
    assert {r for r, _ in make_plan("paper")["baselines"].cells} == set(POLICIES)


def test_make_plan__shares_the_agent_of_the_default_settings(plan: Plan) -> None:
    agent = plan["synthetic"].cells["master_slave", "linear"]
    for section, row in (
        ("rates", "master_slave"),
        ("single", "all"),
        ("leave_one_out", "all"),
    ):
        assert plan[section].cells[row, "linear"] == agent
    log = plan["logs"].cells["master_slave", DEMO]
    for section, row in (
        ("replay", "prioritized"),
        ("cotraining", "all"),
        ("hyper", "n_es=10"),
        ("hyper", "f_in=8"),
    ):
        assert plan[section].cells[row, DEMO] == log


def test_make_plan__the_sweep_of_the_paper_shares_the_default_price() -> None:
    plan = make_plan("paper")
    agent = plan["synthetic"].cells["master_slave", "linear"]
    assert plan["lam_linear"].cells["master_slave", "5"] == agent
    assert plan["lam_linear"].cells["master_slave", "10"] != agent
    assert {lam for _, lam in plan["lam_log"].cells} == set(printed.LAMBDAS)


def test_make_plan__leaves_out_one_sampler_at_a_time(plan: Plan) -> None:
    section = plan["leave_one_out"]
    for (row, _), cell in section.cells.items():
        names = dict(cell.unit.flags).get("samplers", "").split(",")
        if row != "all":
            left = {name.split(":")[0] for name in names}
            assert row[len("no_") :] not in left and len(left) == 5
    assert {r for r, _ in section.cells} == {r for r, _ in printed.LEAVE_OUT_REWARD}


def test_make_plan__paper_synthetic_is_what_was_promised() -> None:
    units = units_of(make_plan("paper"), ("synthetic",))
    assert [u.command for u in units] == [
        f"python -m experiments.synthetic --form={form} --num_seeds=10 "
        "--policies=master_slave,lin_ts"
        for form in printed.FORMS
    ]


def test_make_plan__names_logs_that_are_not_there(logs: Path) -> None:
    assert set(make_plan("quick")["logs"].missing) == set(printed.LOGS)
    plan = make_plan("paper", logs)
    assert plan["logs"].columns == ["lastfm", "movielens", "yahoo"]
    assert list(plan["logs"].missing) == ["delicious"]
    wide = plan["feedback"].cells["master_slave", "movielens linear"].unit
    assert dict(wide.flags)["num_constraints"] == "730"
    assert dict(wide.flags)["data"].endswith("movielens100.npz")
    assert plan["hyper"].columns == ["movielens", "yahoo"]


def test_make_plan__says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has none of"):
        make_plan("quick", tmp_path)
    with pytest.raises(UsageError, match="--budget"):
        make_plan("large")


def test_units_of__each_once(plan: Plan) -> None:
    units = units_of(plan, GROUPS)
    assert len({u.name for u in units}) == len(units)
    cells = {c.unit.name for s in plan.values() for c in s.cells.values()}
    assert {u.name for u in units} == cells  # the report finds every unit that ran


def test_printed__matches_the_papers_own_percentages() -> None:
    rates = printed.VIOLATION
    for column in printed.FORMS + printed.LOGS:
        ours = rates["master_slave", column]
        second = min(v for (r, c), v in rates.items() if c == column and v > ours)
        told = printed.GAIN_VIOLATION["gain", column]
        assert 100 * (1 - ours / second) == pytest.approx(told, abs=0.02)
    assert printed.REWARD["master_slave", "linear"] == 0.1364
    assert printed.LAM_DELICIOUS_REWARD["pdg2anet", "5"] == 0.0032
