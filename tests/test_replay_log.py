"""Windows of clicks, and what is possible on a log."""

from __future__ import annotations

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.data.format import load_log
from msb_jax.envs import replay_log as replay
from msb_jax.problem import make_problem, problem_from_conflicts
from tests.logs import published

CLICKS = np.array([0, 0, 1, 2, 2, 2, 3, 0, 1, 1, 3, 3], np.int32)


def test_window_worth__counts_the_clicks_around_a_round() -> None:
    worth = replay.window_worth(CLICKS, 4, 2, 10)
    for t in range(10):
        window = CLICKS[max(0, t - 2) : t + 2].tolist()
        np.testing.assert_allclose(worth[t], [window.count(a) / 4 for a in range(4)])
    assert worth.dtype == np.float32 and (worth.sum(axis=1)[2:] == 1.0).all()


def test_window_worth__set_and_causal() -> None:
    config = replay.WindowConfig(counting="set", is_causal=True)
    worth = replay.window_worth(CLICKS, 4, 2, 10, config)
    np.testing.assert_array_equal(worth[0], np.zeros(4))
    np.testing.assert_allclose(worth[6], np.array([0, 0, 1, 0]) / 4 + [0, 0.25, 0, 0])


@pytest.mark.parametrize("rounds", [0, 11])
def test_window_worth__stops_at_the_end_of_the_log(rounds: int) -> None:
    with pytest.raises(ValueError, match=r"rounds must be in 1..10"):
        replay.window_worth(CLICKS, 4, 2, rounds)


def test_num_rounds__needs_a_window() -> None:
    assert replay.num_rounds(12, 2) == 10
    with pytest.raises(ValueError, match="12 clicks; windows of 24 need more than 12"):
        replay.num_rounds(12, 12)


def test_window_config__unknown_counting() -> None:
    with pytest.raises(ValueError, match="counting must be one of"):
        replay.WindowConfig(counting="twice")


def test_step__pays_the_share_of_the_window_and_moves_on() -> None:
    worth = replay.window_worth(CLICKS, 4, 2, 10)
    state = replay.replay_state(worth)
    action = jnp.array([1, 2])
    paid = []
    for _ in range(12):
        state, outcome = jax.jit(replay.step)(jax.random.key(0), state, action)
        paid.append(float(outcome.reward))
    np.testing.assert_allclose(paid[:10], worth[:, [1, 2]].sum(axis=1))
    assert paid[11] == paid[9]  # beyond the log the last window stays


def test_references__equal_enumeration() -> None:
    rng = np.random.default_rng(0)
    conflicts = np.zeros((6, 6), bool)
    conflicts[[0, 1], [1, 0]] = True
    problem = problem_from_conflicts(conflicts, 2)
    worth = replay.window_worth(rng.integers(0, 6, 60).astype(np.int32), 6, 2, 50)
    found = replay.references(problem, worth)
    pairs = [p for p in combinations(range(6), 2) if p != (0, 1)]
    sums = np.stack([worth[:, list(p)].sum(axis=1) for p in pairs])
    assert found.best_fixed == pytest.approx(sums.mean(axis=1).max(), abs=1e-6)
    assert found.clairvoyant == pytest.approx(sums.max(axis=0).mean(), abs=1e-6)
    assert found.clairvoyant <= found.clairvoyant_free
    assert found.random == pytest.approx(worth.sum(axis=1).mean() * 2 / 6, abs=1e-6)
    assert found.least_pairs == 0


def test_references__infeasible_graph_reports_its_floor() -> None:
    conflicts = ~np.eye(5, dtype=bool)
    problem = problem_from_conflicts(conflicts, 3)
    worth = replay.window_worth(CLICKS, 5, 2, 10)
    assert replay.references(problem, worth).least_pairs == 3


@pytest.mark.parametrize(
    ("name", "rounds", "random", "fixed", "free"),
    [("lastfm", 2541, 0.250, 0.705, 0.997), ("movielens", 5000, 0.250, 0.740, 0.999)],
)
def test_references__published_logs(
    name: str, rounds: int, random: float, fixed: float, free: float
) -> None:
    log = load_log(published("prepared", f"{name}.npz"))
    clicks = log.clicks_of()
    worth = replay.window_worth(clicks, 40, 10, rounds)
    no_conflicts = make_problem(log.item_vectors, 10)
    found = replay.references(no_conflicts, worth)
    assert found.random == pytest.approx(random, abs=0.002)
    assert found.best_fixed == pytest.approx(fixed, abs=0.002)
    assert found.clairvoyant == pytest.approx(free, abs=0.002)
