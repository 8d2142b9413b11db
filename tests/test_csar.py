"""CSAR: Hadamard matrices, designs and their decoding, the accept/reject loop."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax import runner
from msb_jax.baselines.csar import CsarConfig, csar_est1, csar_est2
from msb_jax.baselines.csar_design import (
    decode,
    design_sets,
    least_squares,
    make_design,
)
from msb_jax.baselines.csar_loop import decide
from msb_jax.baselines.hadamard import hadamard, largest_order
from msb_jax.problem import Problem, problem_from_conflicts, stack_problems
from msb_jax.types import Outcome, Policy

FACTORIES = {"csar_est1": csar_est1, "csar_est2": csar_est2}
NO_EDGES = np.zeros((0, 2), int)


@pytest.mark.parametrize("order", [1, 2, *range(4, 49, 4)])
def test_hadamard__is_orthogonal_normalised_and_balanced(order: int) -> None:
    matrix = hadamard(order)
    assert matrix.dtype == np.int8
    wide = matrix.astype(int)
    np.testing.assert_array_equal(wide @ wide.T, order * np.eye(order))
    assert (wide[0] == 1).all() and (wide[:, 0] == 1).all()
    assert (wide[1:].sum(axis=1) == 0).all()
    matrix[0, 0] = 5  # the caller's copy
    assert hadamard(order)[0, 0] == 1


@pytest.mark.parametrize("order", [0, -4, 3, 6, 10, 52])
def test_hadamard__refuses_other_orders(order: int) -> None:
    with pytest.raises(ValueError, match=f"order={order}"):
        hadamard(order)


def test_largest_order__skips_what_does_not_exist() -> None:
    found = [largest_order(n) for n in (1, 2, 3, 10, 14, 40, 52)]
    assert found == [1, 2, 2, 8, 12, 40, 48]
    with pytest.raises(ValueError, match="limit=0"):
        largest_order(0)


def estimate(
    worth: np.ndarray, k: int, num_active: int, num_base: int, rewards: Any, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return estimates and truth of the active arms of one design."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(worth.size)
    base, active, outside = np.split(order, [num_base, num_base + num_active])
    design = make_design(rng, active, outside, base, k)
    sets = design_sets(design)
    assert all(len(set(row)) == k for row in sets.tolist())
    assert all(set(base) <= set(row) for row in sets.tolist())
    assert len(sets) <= 2 * worth.size + 8 * k  # the room of the state
    known = np.where(np.isin(np.arange(worth.size), active), np.nan, worth)
    return decode(design, rewards(sets), known)[active], worth[active]


# Even and odd K, arms left over, accepted arms (EST2), few arms left, no outsiders.
SIZES = [
    (8, 2, 8, 0),
    (40, 10, 40, 0),
    (13, 5, 13, 0),
    (10, 5, 10, 0),
    (6, 3, 6, 0),
    (2, 1, 2, 0),
    (11, 3, 4, 2),
    (12, 5, 5, 3),
    (50, 7, 41, 4),
    (9, 4, 1, 0),
    (120, 26, 120, 0),
]


@pytest.mark.parametrize(("size", "k", "num_active", "num_base"), SIZES)
def test_decode__is_exact_without_noise(
    size: int, k: int, num_active: int, num_base: int
) -> None:
    worth = np.random.default_rng(1).uniform(size=size)
    found, truth = estimate(
        worth, k, num_active, num_base, lambda sets: worth[sets].sum(axis=1), 2
    )
    np.testing.assert_allclose(found, truth, atol=1e-13)


@pytest.mark.parametrize(("k", "num_base"), [(20, 0), (20, 12)])
def test_decode__variance_is_that_of_one_noise_a_pull(k: int, num_base: int) -> None:
    size, noise_std, repeats = 80 + num_base, 0.1, 40
    worth = np.zeros(size)
    rng = np.random.default_rng(3)

    def rewards(sets: np.ndarray) -> np.ndarray:
        return noise_std * rng.normal(size=len(sets))

    found = [estimate(worth, k, 80, num_base, rewards, s)[0] for s in range(repeats)]
    expected = noise_std**2 / (k - num_base)
    error = expected * np.sqrt(2.0 / (80 * repeats))
    assert abs(np.var(found) - expected) < 5 * error


def test_decode__quadratic_rewards_give_row_sums() -> None:
    rng = np.random.default_rng(4)
    pair = rng.uniform(size=(12, 12))
    pair += pair.T

    def rewards(sets: np.ndarray) -> np.ndarray:
        return np.array([pair[np.ix_(s, s)].sum() for s in sets])

    rows = pair.sum(axis=1)  # the one group is all arms
    found, truth = estimate(rows, 6, 12, 0, rewards, 5)
    gap = found - truth
    np.testing.assert_allclose(gap, gap[0], atol=1e-12)


def test_least_squares__equals_the_explicit_fit() -> None:
    rng = np.random.default_rng(6)
    x = np.zeros((30, 7))
    for row in x:
        row[rng.permutation(6)[:3]] = 1.0  # arm 6 is never played
    reward = 2.0 + x @ np.arange(7.0) + rng.normal(size=30)
    theta, variance = least_squares(x.T @ x, x.T @ reward, reward.sum(), 30)
    design = np.column_stack([np.ones(30), x[:, :6]])
    explicit = np.linalg.lstsq(design, reward, rcond=None)[0][1:]
    np.testing.assert_allclose(
        theta[:6] - theta[0], explicit - explicit[0], rtol=1e-5, atol=1e-5
    )
    centred = x[:, :6] - x[:, :6].mean(axis=0)
    np.testing.assert_allclose(
        variance[:6], np.diag(np.linalg.pinv(centred.T @ centred)), rtol=1e-5
    )
    assert np.isinf(variance[6])


def test_decide__without_conflicts_is_the_rule_of_the_paper() -> None:
    rng = np.random.default_rng(7)
    none = np.zeros((9, 9), bool)
    for eps in (0.02, 0.1, 0.3):
        theta = rng.uniform(size=9)
        order = np.argsort(-theta)
        best, others = order[:4], order[4:]
        radius = np.full(9, eps)
        accept, reject = decide(theta, radius, best, others, np.zeros(0, int), none)
        np.testing.assert_array_equal(accept, theta[best] - theta[order[4]] > 2 * eps)
        np.testing.assert_array_equal(reject, theta[order[3]] - theta[others] > 2 * eps)


def test_decide__conflicts_leave_open_what_a_feasible_swap_may_change() -> None:
    conflicts = np.zeros((5, 5), bool)
    conflicts[0, 2] = conflicts[2, 0] = True
    theta = np.array([1.0, 0.6, 0.95, 0.5, 0.1])
    # Best is {0, 1}: 2 may only replace 0, so 1 is judged against 3, not against 2.
    accept, reject = decide(
        theta,
        np.full(5, 0.04),
        np.array([0, 1]),
        np.array([2, 3, 4]),
        np.zeros(0, int),
        conflicts,
    )
    assert accept.tolist() == [False, True]
    assert reject.tolist() == [False, True, True]


def make_step(noise_std: float) -> Any:
    def step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, Outcome]:
        mean = state[action].sum()
        return state, Outcome(mean + noise_std * jax.random.normal(key), mean)

    return step


def play(
    policy: Policy,
    problem: Problem,
    worth: np.ndarray,
    rounds: int,
    noise_std: float = 0.0,
) -> tuple[runner.Curves, list[Any]]:
    """Play one seed; return the curves and (round, phase, status, eps) by block."""
    seen: list[Any] = []

    def note(snapshot: runner.Snapshot) -> None:
        state = snapshot.state
        status = np.array(state.status[0])
        seen.append((snapshot.round, int(state.phase[0]), status))

    curves = runner.run(
        policy,
        make_step(noise_std),
        jnp.asarray(worth, jnp.float32)[None],
        stack_problems([problem]),
        jax.random.split(jax.random.key(0), 1),
        rounds=rounds,
        f_in=8,
        on_block=note,
    )
    return curves, seen


@pytest.mark.parametrize("name", FACTORIES)
def test_csar__toy_finds_the_two_best(name: str) -> None:
    worth = np.array([4, 3, 2, 1, 0, 0, 0, 0]) / 4
    problem = problem_from_conflicts(NO_EDGES, 2, num_arms=8)
    curves, seen = play(FACTORIES[name](CsarConfig()), problem, worth, 200)
    assert np.flatnonzero(seen[-1][2] == 2).tolist() == [0, 1]
    np.testing.assert_allclose(curves.mean_reward[0, -8:], 1.75, rtol=1e-6)
    assert (curves.origin[0, -8:] == 1).all() and curves.origin[0, 0] == 0


@pytest.mark.parametrize("name", FACTORIES)
def test_csar__odd_k_finds_the_best_without_noise(name: str) -> None:
    worth = np.random.default_rng(8).uniform(size=23)
    problem = problem_from_conflicts(NO_EDGES, 5, num_arms=23)
    curves, _ = play(FACTORIES[name](CsarConfig()), problem, worth, 600)
    best = np.sort(worth)[-5:].sum()
    np.testing.assert_allclose(curves.mean_reward[0, -8:], best, rtol=1e-5)


@pytest.mark.parametrize("name", FACTORIES)
def test_csar__accepts_arms_in_the_budget_with_noise(name: str) -> None:
    worth = np.random.default_rng(9).uniform(0.0, 0.5, size=60)
    problem = problem_from_conflicts(NO_EDGES, 6, num_arms=60)
    policy = FACTORIES[name](CsarConfig())
    curves, seen = play(policy, problem, worth, 1600, noise_std=0.1)
    best = np.sort(worth)[-6:].sum()
    assert (seen[-1][2] == 2).sum() >= 3
    assert curves.mean_reward[0, -160:].mean() > 0.9 * best
    # Decisions are for good.
    for before, after in itertools.pairwise(status for _, _, status in seen):
        assert (after[before == 2] == 2).all()
        assert (after[before == 0] == 0).all()


def test_csar_est2__plays_accepted_arms_while_it_explores() -> None:
    # Four clear winners and a tie that takes long to tell apart.
    worth = np.append([5.0, 5.0, 5.0, 5.0], np.linspace(1.0, 1.1, 16))
    problem = problem_from_conflicts(NO_EDGES, 6, num_arms=20)
    policies = [make(CsarConfig(m_scale=1.0)) for make in FACTORIES.values()]
    means = []
    for policy in policies:
        curves, seen = play(policy, problem, worth, 400, noise_std=0.3)
        assert (seen[-1][2] == 2).sum() == 4
        means.append(curves.mean_reward[0, -80:])
    assert (means[1] >= 22.0).all()
    assert means[0].mean() < 20.0


EDGES = np.array([[0, 1], [0, 2], [1, 2], [3, 4], [5, 6], [7, 8], [2, 9]])


@pytest.mark.parametrize("name", FACTORIES)
def test_csar__hard_is_feasible_and_finds_the_constrained_best(name: str) -> None:
    worth = np.linspace(1.0, 0.1, 12)
    problem = problem_from_conflicts(EDGES, 3, num_arms=12)
    policy = FACTORIES[name](CsarConfig(constraints="hard"))
    curves, _ = play(policy, problem, worth, 600, noise_std=0.01)
    assert (curves.violations == 0).all()
    best = worth[[0, 3, 5]].sum()
    np.testing.assert_allclose(curves.mean_reward[0, -8:], best, rtol=1e-5)


@pytest.mark.parametrize(
    ("num_arms", "k", "edges", "constraints"),
    [
        (1, 1, NO_EDGES, "hard"),
        (2, 1, [[0, 1]], "soft"),
        (2, 2, [[0, 1]], "hard"),
        (5, 4, NO_EDGES, "soft"),
        (7, 5, [[0, 1]], "hard"),
        (4, 2, list(itertools.combinations(range(4), 2)), "hard"),
        (5, 2, [[0, 1], [0, 2], [0, 3], [0, 4]], "hard"),
        (4, 2, [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3]], "hard"),
    ],
)
@pytest.mark.parametrize("name", FACTORIES)
def test_csar__tiny_problems(
    name: str, num_arms: int, k: int, edges: Any, constraints: str
) -> None:
    problem = problem_from_conflicts(np.asarray(edges), k, num_arms=num_arms)
    worth = np.linspace(0.5, 1.0, num_arms)
    policy = FACTORIES[name](CsarConfig(constraints=constraints))
    curves, _ = play(policy, problem, worth, 240)
    graph = np.asarray(problem.conflicts) * (constraints == "hard")
    best = max(
        (-graph[np.ix_(s, s)].sum(), worth[list(s)].sum())
        for s in itertools.combinations(range(num_arms), k)
    )
    np.testing.assert_allclose(curves.mean_reward[0, -4:], best[1], rtol=1e-5)
    if constraints == "hard":
        assert (curves.violations[0] == -best[0] // 2).all()


def test_csar__asks_again_for_lost_rewards_and_ignores_them() -> None:
    worth = np.random.default_rng(10).uniform(size=8)
    problem = problem_from_conflicts(NO_EDGES, 2, num_arms=8)
    policy = csar_est1(CsarConfig())
    ask, tell = jax.jit(policy.ask), jax.jit(policy.tell)
    state = policy.init(jax.random.key(0), problem)
    rng = np.random.default_rng(11)
    late: list[Any] = []
    for t in range(240):
        if t % 8 == 0:
            state = policy.refresh(jax.random.fold_in(jax.random.key(1), t), state)
        state, action = ask(jax.random.key(1000 + t), state)
        late.append(np.asarray(action))
        if len(late) >= 3:  # out of order, in any order of arms, one in five lost
            told = rng.permutation(late.pop(int(rng.integers(3))))
            reward = np.nan if rng.uniform() < 0.2 else worth[told].sum()
            told = jnp.asarray(told, jnp.int32)
            state = tell(jax.random.key(5000 + t), state, told, jnp.float32(reward))
    assert state.is_done
    assert set(np.flatnonzero(state.status == 2)) == set(np.argsort(-worth)[:2])


def test_csar__rewards_that_are_all_equal_end_the_loop() -> None:
    problem = problem_from_conflicts(NO_EDGES, 2, num_arms=8)
    _, seen = play(csar_est2(CsarConfig()), problem, np.ones(8), 160)
    assert (seen[-1][2] == 2).sum() == 2


@pytest.mark.parametrize(
    "bad",
    [
        {"constraints": "firm"},
        {"delta": 0.0},
        {"delta": 1.0},
        {"m_scale": 0.0},
        {"m_scale": float("nan")},
        {"num_pilot": 0},
    ],
)
def test_csar_config__refuses_bad_values(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        CsarConfig(**bad)
