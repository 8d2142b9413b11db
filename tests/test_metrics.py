"""The numbers of summary.json, against cases worked by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from msb_jax import metrics
from msb_jax.runner import Curves

GT_KEYS = {"gt_fraction", "gt_fraction_sem", "gt_fraction_all", "gt_fraction_last"}
KEYS = GT_KEYS | {
    "reward_mean",
    "reward_mean_all",
    "composite_mean",
    "violation_rate",
    "violated_pairs",
    "feasible_share",
    "seconds_per_round",
    "compile_seconds",
    "recommended_rate",
}


def make_curves() -> Curves:
    """Two seeds, four rounds, the first of which is warm-up."""
    return Curves(
        reward=np.array([[0, 1, 2, 3], [0, 2, 2, 2]], np.float32),
        mean_reward=np.array([[0, 1, 1, 1], [1, 3, 3, 6]], np.float32),
        violations=np.array([[4, 0, 0, 2], [2, 0, 0, 0]], np.int32),
        origin=np.array([[0, 1, 1, 2], [0, 1, 2, 2]], np.int32),
        producer=np.array([[0, 1, 1, 1], [0, 1, 1, 1]], np.int32),
        block_seconds=np.array([3.0, 1.0]),
        compile_seconds=np.array([2.4, 0.0]),
    )


def summarise(**changes: object) -> dict:
    settings = {
        "num_conflicts": 10,
        "origins": ("random", "solver", "search"),
        "warm_up": 1,
        "lam": 5.0,
        "ground_truth": [2.0, 4.0],
    }
    return metrics.summarise(make_curves(), **(settings | changes))


def test_summarise__matches_the_case_worked_by_hand() -> None:
    s = summarise()
    assert set(s) >= KEYS
    # Seed fractions after warm-up: 1/2, and (3/4 + 3/4 + 6/4) / 3 = 1.
    assert s["gt_fraction"] == pytest.approx(0.75)
    assert s["gt_fraction_sem"] == pytest.approx(0.25)
    assert s["gt_fraction_all"] == pytest.approx((0.375 + 0.8125) / 2)
    assert s["gt_fraction_last"] == pytest.approx((0.5 + 1.5) / 2)
    assert s["reward_mean"] == pytest.approx(2.0)
    assert s["reward_mean_all"] == pytest.approx(1.5)
    assert s["composite_mean"] == pytest.approx(1.5 - 5 * (8 / 8) / 10)
    assert s["violated_pairs"] == pytest.approx(2 / 6)
    assert s["violation_rate"] == pytest.approx(2 / 60)
    assert s["feasible_share"] == pytest.approx(5 / 6)
    assert s["compile_seconds"] == pytest.approx(2.4)
    assert s["seconds_per_round"] == pytest.approx(1.6 / 8)
    assert s["recommended_rate"] == pytest.approx(
        {"random": 0.0, "solver": 3 / 6, "search": 3 / 6}
    )


def test_summarise__is_plain_json() -> None:
    text = json.dumps(summarise(), allow_nan=False)
    assert json.loads(text)["feasible_share"] == summarise()["feasible_share"]


def test_summarise__uses_all_rounds_when_the_run_is_no_longer_than_its_warm_up() -> (
    None
):
    s = summarise(warm_up=4)
    assert not metrics.is_past_warm_up(make_curves(), 4)
    assert metrics.is_past_warm_up(make_curves(), 3)
    assert s["gt_fraction"] == pytest.approx(s["gt_fraction_all"])
    assert s["reward_mean"] == s["reward_mean_all"]
    assert s["feasible_share"] == pytest.approx(5 / 8)


def test_summarise__leaves_gt_keys_out_without_ground_truth() -> None:
    s = summarise(ground_truth=None)
    assert not GT_KEYS & set(s)
    assert set(s) >= KEYS - GT_KEYS


def test_summarise__takes_conflicts_per_seed_and_none_at_all() -> None:
    assert summarise(num_conflicts=[10, 20])["violation_rate"] == pytest.approx(2 / 60)
    without = make_curves()._replace(violations=np.zeros((2, 4), np.int32))
    s = metrics.summarise(without, num_conflicts=0, origins=("a",), warm_up=0, lam=5.0)
    assert (s["violation_rate"], s["feasible_share"]) == (0.0, 1.0)


def test_summarise__one_seed_has_no_standard_error() -> None:
    c = make_curves()
    one = c._replace(**{n: getattr(c, n)[:1] for n in Curves._fields[:4]})
    s = metrics.summarise(
        one, num_conflicts=1, origins=("a",), warm_up=0, lam=1.0, ground_truth=2.0
    )
    assert s["gt_fraction_sem"] == 0.0


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_summarise__refuses_a_ground_truth_that_is_not_positive(bad: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        summarise(ground_truth=[1.0, bad])


def test_summarise__refuses_an_empty_run() -> None:
    c = make_curves()
    empty = c._replace(**{n: getattr(c, n)[:, :0] for n in Curves._fields[:4]})
    with pytest.raises(ValueError, match="no round"):
        metrics.summarise(empty, num_conflicts=1, origins=(), warm_up=0, lam=1.0)


def test_smooth__equals_the_mean_of_the_last_rounds() -> None:
    values = np.random.default_rng(0).normal(size=(3, 17))
    for window in (1, 4, 17, 40):
        expected = np.stack(
            [values[:, max(0, t - window + 1) : t + 1].mean(axis=1) for t in range(17)],
            axis=1,
        )
        np.testing.assert_allclose(metrics.smooth(values, window), expected, atol=1e-12)
    with pytest.raises(ValueError, match="window"):
        metrics.smooth(values, 0)
