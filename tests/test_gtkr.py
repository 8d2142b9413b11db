"""Gumbel top-K REINFORCE: its gradient, its probabilities, and that it learns."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax import runner
from msb_jax.baselines.gtkr import GtkrConfig, advantages, gtkr, log_probs
from msb_jax.problem import Problem, problem_from_conflicts, stack_problems
from msb_jax.types import Outcome

L, K = 5, 2
LOGITS = np.array([0.3, -0.5, 0.8, 0.0, -1.0])
WORTH = np.array([0.2, 1.0, -0.4, 0.5, 0.1])
EDGES = np.array([[0, 1], [1, 2], [3, 4]])


def make_problem(edges: Any = EDGES, k: int = K, num_arms: int = L) -> Problem:
    return problem_from_conflicts(np.asarray(edges), k, num_arms=num_arms)


def draw_probability(logits: np.ndarray, draw: tuple[int, int], hard: bool) -> float:
    """Return the probability of two arms in this order, from the definition."""
    weight = np.exp(logits)
    first, second = draw
    left = [j for j in range(L) if j != first]
    if hard:
        graph = np.asarray(make_problem().conflicts)
        left = [j for j in left if not graph[first, j]]
    if second not in left:
        return 0.0
    return weight[first] / weight.sum() * weight[second] / weight[left].sum()


def expected_reward(logits: np.ndarray, hard: bool) -> float:
    draws = itertools.permutations(range(L), K)
    return sum(draw_probability(logits, d, hard) * WORTH[list(d)].sum() for d in draws)


@pytest.mark.parametrize(
    ("hard", "set_prob", "tolerance"),
    [(False, "trapezoid", 1e-4), (True, "", 1e-4), (False, "permutations", 0.02)],
)
def test_gtkr__gradient_equals_the_enumerated_one(
    hard: bool, set_prob: str, tolerance: float
) -> None:
    config = GtkrConfig(
        constraints="hard" if hard else "soft",
        set_prob=set_prob or "trapezoid",
        num_permutations=400,
    )
    draws = list(itertools.permutations(range(L), K))
    probs = np.array([draw_probability(LOGITS, d, hard) for d in draws])
    assert probs.sum() == pytest.approx(1.0)
    draws = [d for d, p in zip(draws, probs, strict=True) if p > 0]
    probs = probs[probs > 0]
    actions = jnp.asarray(draws, jnp.int32)
    gains = jnp.asarray(probs * WORTH[np.array(draws)].sum(axis=1), jnp.float32)

    def score(logits: jax.Array) -> jax.Array:
        rows = jnp.tile(logits, (len(draws), 1))
        key = jax.random.key(0)
        return (gains * log_probs(key, config, make_problem(), rows, actions)).sum()

    found = np.asarray(jax.grad(score)(jnp.asarray(LOGITS, jnp.float32)))
    step = 1e-5
    truth = [
        (
            expected_reward(LOGITS + step * unit, hard)
            - expected_reward(LOGITS - step * unit, hard)
        )
        / (2 * step)
        for unit in np.eye(L)
    ]
    np.testing.assert_allclose(found, truth, atol=tolerance)


@pytest.mark.parametrize("hard", [False, True])
def test_gtkr__asks_with_the_probabilities_that_it_trains(hard: bool) -> None:
    constraints = "hard" if hard else "soft"
    policy = gtkr(GtkrConfig(constraints=constraints, n_re=1))
    state = policy.init(jax.random.key(0), make_problem())
    state = state._replace(logits=jnp.asarray(LOGITS, jnp.float32))
    many = jax.jit(jax.vmap(policy.ask, in_axes=(0, None)))
    for asked, logits in ((0, np.zeros(L)), (1, LOGITS)):
        keys = jax.random.split(jax.random.key(asked), 8000)
        later = state._replace(asked=jnp.int32(asked))
        drawn = np.asarray(many(keys, later)[1]).tolist()
        for draw in itertools.permutations(range(L), K):
            prob = draw_probability(logits, draw, hard)
            share = drawn.count(list(draw)) / 8000
            assert abs(share - prob) <= 5 * np.sqrt(prob * (1 - prob) / 8000)


def tell_all(config: GtkrConfig, rewards: list[float]) -> Any:
    """Tell the sets in turn, (0, 1), (0, 2) and so on."""
    policy = gtkr(config)
    state = policy.init(jax.random.key(0), make_problem())
    for arms, reward in zip(itertools.combinations(range(L), K), rewards, strict=False):
        action = jnp.asarray(arms, jnp.int32)
        state = policy.tell(jax.random.key(1), state, action, jnp.float32(reward))
    return policy, state


def test_advantages__leave_one_out_of_standardised_rewards() -> None:
    rewards = [1.0, 4.0, float("nan"), 7.0]
    _, state = tell_all(GtkrConfig(f_in=6), rewards)
    told = np.array([1.0, 4.0, 7.0])
    gaps = (told - told.mean()) / told.std()
    expected = [g - (gaps.sum() - g) / 2 for g in gaps]
    found = np.asarray(advantages(state, "leave_one_out"))
    np.testing.assert_allclose(found[[0, 1, 3]], expected, rtol=1e-5, atol=1e-6)
    assert (found[[2, 4, 5]] == 0).all()
    found = np.asarray(advantages(state, "running_mean"))
    np.testing.assert_allclose(found[[0, 1, 3]], gaps, rtol=1e-5, atol=1e-6)


def test_gtkr__penalise_takes_lam_times_the_violation_rate_off() -> None:
    _, plain = tell_all(GtkrConfig(f_in=3, lam=6.0), [1.0, 1.0])
    _, priced = tell_all(GtkrConfig(f_in=3, lam=6.0, penalise=True), [1.0, 1.0])
    np.testing.assert_allclose(plain.rewards[:2], [1.0, 1.0])
    np.testing.assert_allclose(priced.rewards[:2], [-1.0, 1.0])  # 1 of 3 conflicts


@pytest.mark.parametrize(
    "rewards", [[], [float("nan")] * 4, [2.0] * 4, [2.0], [float("nan"), 2.0]]
)
def test_gtkr__learns_nothing_where_nothing_is_to_be_learnt(rewards: list) -> None:
    policy, state = tell_all(GtkrConfig(f_in=4), rewards)
    state = policy.refresh(jax.random.key(2), state)
    np.testing.assert_array_equal(np.asarray(state.logits), 0.0)


def test_gtkr__a_block_is_used_once() -> None:
    policy, state = tell_all(GtkrConfig(f_in=4, n_re=0), [1.0, 2.0, 0.0, 5.0])
    state = policy.refresh(jax.random.key(2), state)
    again = policy.refresh(jax.random.key(3), state)
    assert np.abs(np.asarray(state.logits)).max() > 0
    np.testing.assert_array_equal(np.asarray(state.logits), np.asarray(again.logits))


def linear_step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, Outcome]:
    mean = state[action].sum()
    return state, Outcome(mean + 0.1 * jax.random.normal(key), mean)


@pytest.mark.parametrize("constraints", ["soft", "hard"])
def test_gtkr__learns_a_linear_problem(constraints: str) -> None:
    worth = np.linspace(0.0, 1.0, 12)
    edges = np.array([[11, 10], [9, 0], [8, 7]])
    policy = gtkr(GtkrConfig(constraints=constraints, n_re=40, f_in=10))
    curves = runner.run(
        policy,
        linear_step,
        jnp.asarray(worth, jnp.float32)[None],
        stack_problems([make_problem(edges, 3, 12)]),
        jax.random.split(jax.random.key(0), 1),
        rounds=800,
        f_in=10,
    )
    hard = constraints == "hard"
    best = worth[[11, 9, 8]].sum() if hard else worth[-3:].sum()
    assert curves.mean_reward[0, -80:].mean() > 0.95 * best
    assert curves.mean_reward[0, :40].mean() < 0.65 * best
    if hard:
        assert (curves.violations == 0).all()


@pytest.mark.parametrize(
    ("num_arms", "k", "edges", "constraints"),
    [
        (1, 1, np.zeros((0, 2), int), "hard"),
        (2, 1, [[0, 1]], "soft"),
        (4, 4, [[0, 1]], "soft"),
        (4, 2, list(itertools.combinations(range(4), 2)), "hard"),
    ],
)
def test_gtkr__tiny_problems(
    num_arms: int, k: int, edges: Any, constraints: str
) -> None:
    policy = gtkr(GtkrConfig(constraints=constraints, n_re=4, f_in=4))
    state = policy.init(jax.random.key(0), make_problem(edges, k, num_arms))
    ask, tell = jax.jit(policy.ask), jax.jit(policy.tell)
    for t in range(40):
        if t % 4 == 0:
            state = policy.refresh(jax.random.key(1000 + t), state)
        state, action = ask(jax.random.key(2000 + t), state)
        assert len(set(action.tolist())) == k
        state = tell(jax.random.key(3000), state, action, action.sum() * 1.0)
    assert np.isfinite(np.asarray(state.logits)).all()
    assert int(jnp.argmax(state.logits)) == (num_arms - 1 if k < num_arms else 0)


@pytest.mark.parametrize(
    "bad",
    [
        {"constraints": "firm"},
        {"n_re": -1},
        {"f_in": 0},
        {"num_permutations": 0},
        {"lam": float("nan")},
        {"rate": -0.1},
        {"set_prob": "exact"},
        {"baseline": "none"},
    ],
)
def test_gtkr_config__refuses_bad_values(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        GtkrConfig(**bad)
