"""The policies for ordered lists: their formulas, and that they learn."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax import runner
from msb_jax.baselines import cascade_lsb as lsb
from msb_jax.baselines.cascade_hybrid import CascadeHybridConfig, cascade_hybrid
from msb_jax.baselines.cascade_kl_ucb import CascadeKLUCBConfig, bernoulli_kl, kl_bound
from msb_jax.baselines.cascade_lsb import CascadeLSBConfig, cascade_lsb
from msb_jax.baselines.lists import fill_places, log_round, rank_arms
from msb_jax.baselines.pbm_lin_ucb import PbmLinUCBConfig, pbm_lin_ucb
from msb_jax.baselines.pbm_ucb import PbmUCBConfig, pbm_bound
from msb_jax.baselines.registry import LIST_POLICIES, POLICIES, make_policy
from msb_jax.clicks import credit
from msb_jax.envs import cascading, position_based
from msb_jax.envs.cascading import CascadingConfig, visible_clicks
from msb_jax.envs.position_based import PositionBasedConfig
from msb_jax.positions import examination
from msb_jax.problem import (
    Problem,
    problem_from_conflicts,
    stack_problems,
    violated_pairs,
)
from msb_jax.types import Outcome, Policy

NAMES = tuple(LIST_POLICIES)
CLICKED = tuple(name for name in NAMES if name != "pbm_lin_ucb")
EDGES = np.array([[0, 1], [0, 2], [1, 2], [3, 4], [5, 6]])
L, K, D, B = 8, 3, 2, 2
SIZES = {"num_arms": 20, "k": 4, "num_constraints": 20, "feature_dim": 5}


def small_problem(num_arms: int = L, k: int = K, edges: Any = EDGES) -> Problem:
    features = np.random.default_rng(0).uniform(size=(num_arms, D))
    return problem_from_conflicts(np.asarray(edges), k, features)


@cache
def policy_of(name: str, constraints: str, target: str = "clicks") -> Policy:
    """Make a policy once, so that tests share its compiled blocks."""
    return make_policy(name, {"constraints": constraints, "target": target})


def tell(policy: Policy, state: Any, action: Any, reward: Any, clicks: Any) -> Any:
    """Tell a round as the runner does where there are clicks."""
    key, action = jax.random.key(0), jnp.asarray(action, jnp.int32)
    reward, clicks = jnp.float32(reward), jnp.asarray(clicks, jnp.float32)
    if policy.tell_clicks is None:
        return policy.tell(key, state, action, reward)
    return policy.tell_clicks(key, state, action, reward, clicks)


@pytest.mark.parametrize("constraints", ["soft", "hard"])
@pytest.mark.parametrize("name", NAMES)
def test_policy__keeps_the_protocol(name: str, constraints: str) -> None:
    policy = policy_of(name, constraints)
    problem = small_problem()
    state = policy.init(jax.random.key(0), problem)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    ask = jax.jit(policy.ask)
    learn = jax.jit(lambda *args: tell(policy, *args))
    rng = np.random.default_rng(1)
    for t in range(12):
        state = policy.refresh(jax.random.key(100 + t), state)
        state, action = ask(jax.random.key(t), state)
        assert action.shape == (K,)
        assert action.dtype == jnp.int32
        assert len(set(action.tolist())) == K
        assert set(action.tolist()) <= set(range(L))
        if constraints == "hard":
            assert int(violated_pairs(problem, action)) == 0
        assert int(policy.origin(state)) == 0
        clicks = rng.integers(-1, 2, K).astype(np.float32)
        state = learn(state, action, np.float32(t % 2), clicks)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == shapes
    assert ask._cache_size() == learn._cache_size() == 1
    assert policy.origins == (name,)


@pytest.mark.parametrize("name", ["cascade_kl_ucb", "cascade_hybrid", "pbm_lin_ucb"])
@pytest.mark.parametrize(
    ("num_arms", "k", "edges"),
    [
        (1, 1, np.zeros((0, 2), int)),
        (2, 1, [[0, 1]]),
        (4, 4, [[0, 1]]),
        (4, 2, list(itertools.combinations(range(4), 2))),
    ],
)
def test_policy__tiny_problems(name: str, num_arms: int, k: int, edges: Any) -> None:
    policy = policy_of(name, "hard")
    state = policy.init(jax.random.key(0), small_problem(num_arms, k, edges))

    @jax.jit
    def play(key: jax.Array, state: Any) -> Any:
        state, action = policy.ask(key, state)
        return tell(policy, state, action, 1.0, [1.0] * k), action

    for t in range(4):
        state, action = play(jax.random.key(t), state)
        assert len(set(action.tolist())) == k
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("name", NAMES)
def test_policy__a_lost_answer_teaches_nothing(name: str) -> None:
    policy = policy_of(name, "soft")
    state = policy.init(jax.random.key(0), small_problem())
    state = tell(policy, state, [0, 1, 2], 1.0, [0.0, 1.0, -1.0])
    lost = tell(policy, state, [3, 4, 5], np.nan, [np.nan] * K)
    for field in set(state._fields) - {"problem", "told"}:
        np.testing.assert_array_equal(getattr(lost, field), getattr(state, field))


@pytest.mark.parametrize("name", CLICKED)
def test_run__says_that_a_policy_needs_clicks(name: str) -> None:
    def no_clicks(key: jax.Array, state: Any, action: jax.Array) -> Any:
        mean = state[action].sum()
        return state, Outcome(mean + jax.random.normal(key), mean)

    with pytest.raises(ValueError, match=f"{name} learns from clicks, and this envi"):
        runner.run(
            policy_of(name, "soft"),
            no_clicks,
            jnp.ones((B, L)),
            stack_problems([small_problem()] * B),
            jax.random.split(jax.random.key(0), B),
            rounds=4,
            f_in=2,
        )


def test_registry__list_policies_are_not_among_all() -> None:
    assert not set(LIST_POLICIES) & set(POLICIES)
    with pytest.raises(ValueError, match="did you mean 'cascade_lsb'"):
        make_policy("cascade_lbs", {})


@pytest.mark.parametrize(
    ("config", "bad"),
    [
        (CascadeKLUCBConfig, {"constraints": "firm"}),
        (CascadeKLUCBConfig, {"extra": -1.0}),
        (CascadeKLUCBConfig, {"target": "sales"}),
        (CascadeLSBConfig, {"constraints": "firm"}),
        (CascadeLSBConfig, {"alpha": -1.0}),
        (CascadeLSBConfig, {"sigma": 0.0}),
        (CascadeHybridConfig, {"target": "sales"}),
        (PbmUCBConfig, {"decay": 0.0}),
        (PbmUCBConfig, {"extra": float("nan")}),
        (PbmLinUCBConfig, {"ridge": 0.0}),
        (PbmLinUCBConfig, {"alpha": float("inf")}),
    ],
)
def test_configs__refuse_bad_values(config: Callable[..., Any], bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        config(**bad)


def test_rank_arms__soft_is_the_top_in_order() -> None:
    index = jnp.array([0.1, 0.9, 0.5, 0.7, 0.2, 0.3, 0.0, 0.4])
    action = rank_arms(jax.random.key(0), small_problem(), index, False)
    np.testing.assert_array_equal(action, [1, 3, 2])


def test_rank_arms__hard_skips_conflicts() -> None:
    # 0, 1, 2 conflict with each other, and so do 3 and 4.
    index = jnp.arange(L, 0, -1).astype(jnp.float32)
    action = rank_arms(jax.random.key(0), small_problem(), index, True)
    np.testing.assert_array_equal(action, [0, 3, 5])


def test_rank_arms__without_a_way_out_adds_the_fewest_conflicts() -> None:
    problem = small_problem(4, 3, [[0, 1], [0, 2], [0, 3], [1, 2]])
    index = jnp.array([0.9, 0.8, 0.7, 0.6])
    action = rank_arms(jax.random.key(0), problem, index, True)
    # Nothing fits beside 0; all add one conflict, then 3 (two of them) and not 2.
    np.testing.assert_array_equal(action, [0, 1, 3])


def test_rank_arms__equal_arms_come_by_lot() -> None:
    keys = jax.random.split(jax.random.key(1), 400)
    draw = jax.jit(
        jax.vmap(lambda key: rank_arms(key, small_problem(), jnp.ones(L), False))
    )
    first = np.bincount(np.asarray(draw(keys))[:, 0], minlength=L) / 400
    error = np.sqrt(1 / L * (1 - 1 / L) / 400)
    assert np.abs(first - 1 / L).max() < 5 * error


def test_fill_places__equals_rank_arms_when_nothing_depends_on_the_arms_above() -> None:
    index = jax.random.uniform(jax.random.key(2), (L,))
    for is_hard in (False, True):
        action = fill_places(
            small_problem(),
            jnp.zeros(()),
            lambda above: index,
            lambda above, arm: above,
            is_hard,
        )
        same = rank_arms(jax.random.key(0), small_problem(), index, is_hard)
        np.testing.assert_array_equal(action, same)


@pytest.mark.parametrize(
    ("clicks", "reward", "target", "known", "value"),
    [
        ([0, 1, 0, 1, -1], 1.0, "clicks", [1, 1, 1, 1, 0], [0, 1, 0, 1, 0]),
        ([0, 1, 0, 1, -1], 1.0, "reward", [1, 1, 1, 1, 0], [0, 0, 0, 1, 0]),
        ([0, 1, 0, 1, -1], 0.0, "reward", [1, 1, 1, 1, 0], [0, 0, 0, 0, 0]),
        ([0, 0, 0, 0, 0], 0.0, "clicks", [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
        ([np.nan] * 5, 1.0, "clicks", [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
        ([0, 1, -1, -1, -1], np.nan, "reward", [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
    ],
)
def test_credit__of_hand_made_rounds(
    clicks: list, reward: float, target: str, known: list, value: list
) -> None:
    found = credit(jnp.array(clicks, jnp.float32), jnp.float32(reward), target)
    np.testing.assert_array_equal(found[0], np.array(known, np.float32))
    np.testing.assert_array_equal(found[1], np.array(value, np.float32))


def test_log_round__is_clipped_at_the_start() -> None:
    assert log_round(jnp.int32(0), 3.0) == log_round(jnp.int32(1), 3.0) == 0.0
    t = 1000
    expected = np.log(t) + 3 * np.log(np.log(t))
    assert log_round(jnp.int32(t - 1), 3.0) == pytest.approx(expected, rel=1e-5)


# CascadeKL-UCB


def test_bernoulli_kl__of_equal_chances_is_zero() -> None:
    p = jnp.array([0.0, 0.3, 1.0])
    np.testing.assert_allclose(bernoulli_kl(p, p), 0.0, atol=1e-7)
    expected = 0.3 * np.log(0.3 / 0.6) + 0.7 * np.log(0.7 / 0.4)
    assert bernoulli_kl(jnp.float32(0.3), jnp.float32(0.6)) == pytest.approx(expected)
    assert bernoulli_kl(jnp.float32(0.5), jnp.float32(1.0)) == np.inf


def test_kl_bound__closed_forms() -> None:
    count = jnp.array([1.0, 3.0, 20.0, 500.0])
    threshold = jnp.float32(5.0)
    zero = kl_bound(jnp.zeros(4), count, threshold)
    np.testing.assert_allclose(zero, 1.0 - np.exp(-5.0 / count), rtol=1e-5)
    np.testing.assert_array_equal(kl_bound(jnp.ones(4), count, threshold), 1.0)
    # Never shown, and no threshold yet.
    assert kl_bound(jnp.zeros(1), jnp.zeros(1), threshold) == 1.0
    rate = jnp.array([0.2, 0.5, 0.9, 0.0])
    flat = kl_bound(rate, count, jnp.float32(0.0))
    np.testing.assert_allclose(flat, rate, atol=1e-3)


def test_kl_bound__solves_the_equation_and_falls_with_the_count() -> None:
    count = jnp.array([2.0, 5.0, 30.0, 200.0, 1e4, 1e7])
    rate = jnp.full((6,), 0.4)
    bound = kl_bound(rate, count, jnp.float32(6.0))
    assert (np.diff(bound) < 0).all()
    assert (bound >= rate).all()
    assert bound[-1] == pytest.approx(0.4, abs=2e-3)
    gaps = count * bernoulli_kl(rate, bound)
    np.testing.assert_allclose(gaps[:4], 6.0, rtol=1e-3)


def test_cascade_kl_ucb__counts_what_was_read() -> None:
    policy = policy_of("cascade_kl_ucb", "soft")
    state = policy.init(jax.random.key(0), small_problem())
    state = tell(policy, state, [5, 2, 7], 0.0, [0.0, 1.0, -1.0])
    state = tell(policy, state, [2, 7, 5], 0.0, [0.0, 0.0, 0.0])
    np.testing.assert_array_equal(state.read, [0, 0, 2, 0, 0, 2, 0, 1])
    np.testing.assert_array_equal(state.hits, [0, 0, 1, 0, 0, 0, 0, 0])
    assert int(state.told) == 2


# CascadeLSB and CascadeHybrid


def lsb_state(k: int = K) -> lsb.LinearCascadeState:
    policy = cascade_lsb(CascadeLSBConfig())
    return policy.init(jax.random.key(0), small_problem(k=k))


def test_lsb__gains_add_up_to_the_coverage_of_the_list() -> None:
    state = lsb_state()
    action = jnp.array([4, 0, 6])
    gains = lsb.list_rows(state, action)  # [K, D]
    topics = np.asarray(state.topics)[np.asarray(action)]
    coverage = 1.0 - np.prod(1.0 - topics, axis=0)
    np.testing.assert_allclose(gains.sum(axis=0), coverage, rtol=1e-5)
    # The rows of the search are those of the list.
    left = jnp.ones((D,))
    for place, arm in enumerate(action.tolist()):
        np.testing.assert_allclose(
            lsb.rows_of(state, left)[arm], gains[place], rtol=1e-5
        )
        left = left * (1.0 - state.topics[arm])


def test_lsb__a_topic_that_is_covered_gains_nothing() -> None:
    state = lsb_state()
    state = state._replace(topics=state.topics.at[1].set(jnp.array([1.0, 0.0])))
    gains = lsb.list_rows(state, jnp.array([1, 2, 3]))
    np.testing.assert_array_equal(gains[1:, 0], 0.0)
    assert (gains[1:, 1] > 0).all()


def test_lsb__posterior_equals_the_explicit_one() -> None:
    sigma = 0.3
    policy = cascade_lsb(CascadeLSBConfig(sigma=sigma))
    state = policy.init(jax.random.key(0), small_problem())
    precision, moment = np.eye(D), np.zeros(D)
    rng = np.random.default_rng(2)
    for _ in range(20):
        action = rng.permutation(L)[:K]
        clicks = np.asarray(visible_clicks(jnp.asarray(rng.random(K) < 0.4)))
        rows = np.asarray(lsb.list_rows(state, jnp.asarray(action)), np.float64)
        for row, click in zip(rows, clicks, strict=True):
            if click >= 0:
                precision += np.outer(row, row) / sigma**2
                moment += row * click
        state = tell(policy, state, action, 0.0, clicks)
    theta, cov = lsb.posterior(state, sigma)
    np.testing.assert_allclose(cov, np.linalg.inv(precision), rtol=1e-3, atol=1e-6)
    expected = np.linalg.solve(precision, moment) / sigma**2
    np.testing.assert_allclose(theta, expected, rtol=1e-3)


def test_lsb__one_place_is_lin_ucb() -> None:
    policy = cascade_lsb(CascadeLSBConfig(alpha=0.8, sigma=1.0))
    state = policy.init(jax.random.key(0), small_problem(k=1))
    x = np.asarray(state.topics, np.float64)
    v, b = np.eye(D), np.zeros(D)
    rng = np.random.default_rng(3)
    ask = jax.jit(policy.ask)
    for t in range(30):
        state, action = ask(jax.random.key(t), state)
        inverse = np.linalg.inv(v)
        width = np.sqrt(np.einsum("ld,de,le->l", x, inverse, x))
        bound = x @ inverse @ b + 0.8 * width
        assert bound[int(action[0])] == pytest.approx(bound.max(), abs=1e-5)
        click = float(rng.random() < 0.5)
        state = tell(policy, state, action, click, [click])
        v += np.outer(x[int(action[0])], x[int(action[0])])
        b += x[int(action[0])] * click


def test_lsb__topics_are_in_the_unit_interval() -> None:
    signed = np.array([[-1.0, 0.2, 3.0], [1.0, 0.4, 3.0], [0.0, 0.3, 3.0]])
    free = np.zeros((3, 3), bool)
    topics = lsb.topics_of(problem_from_conflicts(free, 2, signed), "x")
    expected = [[0.0, 0.2, 0.0], [1.0, 0.4, 0.0], [0.5, 0.3, 0.0]]
    np.testing.assert_allclose(topics, expected, rtol=1e-6)
    with pytest.raises(ValueError, match="cascade_lsb needs arms with features"):
        lsb.topics_of(problem_from_conflicts(free, 2), "cascade_lsb")


def test_hybrid__without_relevance_is_lsb() -> None:
    hybrid = cascade_hybrid(CascadeHybridConfig(alpha=0.8))
    plain = cascade_lsb(CascadeLSBConfig(alpha=0.8, sigma=1.0))
    one = hybrid.init(jax.random.key(0), small_problem())
    one = one._replace(relevance=jnp.zeros_like(one.relevance))
    two = plain.init(jax.random.key(0), small_problem())
    rng = np.random.default_rng(5)
    ask_hybrid, ask_plain = jax.jit(hybrid.ask), jax.jit(plain.ask)
    for t in range(20):
        one, action = ask_hybrid(jax.random.key(t), one)
        two, same = ask_plain(jax.random.key(t), two)
        np.testing.assert_array_equal(action, same)
        clicks = rng.integers(0, 2, K)
        one = tell(hybrid, one, action, 0.0, clicks)
        two = tell(plain, two, action, 0.0, clicks)
    assert float(one.cross[:D].sum()) > 0


def test_hybrid__equals_block_elimination() -> None:
    """The formulas of LinUCB-hybrid (ALGORITHMS 9.3), in float64."""
    policy = cascade_hybrid(CascadeHybridConfig())
    state = policy.init(jax.random.key(0), small_problem())
    a_x, a_z, cross = np.eye(D), np.eye(D), np.zeros((D, D))  # cross: B, X by Z
    b_x, b_z = np.zeros(D), np.zeros(D)
    rng = np.random.default_rng(4)
    for _ in range(25):
        action, clicks = rng.permutation(L)[:K], rng.integers(0, 2, K)
        rows = np.asarray(lsb.list_rows(state, jnp.asarray(action)), np.float64)
        z, x = rows[:, :D], rows[:, D:]
        a_z += cross.T @ np.linalg.solve(a_x, cross)
        b_z += cross.T @ np.linalg.solve(a_x, b_x)
        a_x, cross, b_x = a_x + x.T @ x, cross + x.T @ z, b_x + x.T @ clicks
        a_z += z.T @ z - cross.T @ np.linalg.solve(a_x, cross)
        b_z += z.T @ clicks - cross.T @ np.linalg.solve(a_x, b_x)
        state = tell(policy, state, action, 0.0, clicks)
    beta = np.linalg.solve(a_z, b_z)
    theta = np.linalg.solve(a_x, b_x - cross @ beta)
    found, cov = lsb.posterior(state, 1.0)
    np.testing.assert_allclose(found, np.append(beta, theta), rtol=2e-3, atol=2e-4)
    rows = np.asarray(lsb.rows_of(state, jnp.array([0.7, 0.4])), np.float64)
    inv_x, inv_z = np.linalg.inv(a_x), np.linalg.inv(a_z)
    mixed = inv_x @ cross @ inv_z  # [X, Z]
    for row in rows:
        z, x = row[:D], row[D:]
        s = z @ inv_z @ z - 2 * x @ mixed @ z + x @ inv_x @ x
        s += x @ mixed @ cross.T @ inv_x @ x
        expected = z @ beta + x @ theta + 0.5 * np.sqrt(s)
        row32 = jnp.asarray(row, jnp.float32)[None]
        score = lsb.upper_bounds(row32, found, cov, 0.5)[0]
        assert score == pytest.approx(expected, rel=1e-3)


def test_hybrid__without_topics_is_linear_in_the_relevance() -> None:
    hybrid = cascade_hybrid(CascadeHybridConfig(alpha=0.5))
    state = hybrid.init(jax.random.key(0), small_problem())
    state = state._replace(topics=jnp.zeros_like(state.topics))
    x = np.asarray(state.relevance, np.float64)
    v, b = np.eye(D), np.zeros(D)
    ask = jax.jit(hybrid.ask)
    for t in range(10):
        state, action = ask(jax.random.key(t), state)
        inverse = np.linalg.inv(v)
        bound = x @ inverse @ b
        bound = bound + 0.5 * np.sqrt(np.einsum("ld,de,le->l", x, inverse, x))
        shown = bound[np.asarray(action)]
        np.testing.assert_allclose(shown, np.sort(bound)[::-1][:K], atol=1e-5)
        state = tell(hybrid, state, action, 0.0, [1.0, 0.0, 1.0])
        rows = x[np.asarray(action)]
        v, b = v + rows.T @ rows, b + rows.T @ np.array([1.0, 0.0, 1.0])


# Position-based policies


def test_pbm_bound__equals_the_formula() -> None:
    found = pbm_bound(
        jnp.array([2.0, 0.0, 0.0]),
        jnp.array([5.0, 4.0, 0.0]),
        jnp.array([3.5, 4.0, 0.0]),
        jnp.float32(6.0),
    )
    first = 2 / 3.5 + np.sqrt(5 / 3.5) * np.sqrt(6 / (2 * 3.5))
    np.testing.assert_allclose(found[:2], [first, np.sqrt(6 / 8)], rtol=1e-5)
    assert np.isfinite(found[2])
    assert found[2] > 1e30  # never shown: first


def test_pbm_ucb__with_all_places_seen_is_ucb_on_the_top_k() -> None:
    policy = make_policy("pbm_ucb", {"decay": 1.0, "extra": 0.0})
    state = policy.init(jax.random.key(0), small_problem())
    rng = np.random.default_rng(6)
    shown, hits = np.zeros(L), np.zeros(L)
    ask = jax.jit(policy.ask)
    for t in range(40):
        state, action = ask(jax.random.key(t), state)
        chosen = np.asarray(action)
        if shown.min() > 0:
            ucb = hits / shown + np.sqrt(np.log(t + 1) / (2 * shown))
            np.testing.assert_allclose(ucb[chosen], np.sort(ucb)[::-1][:K], rtol=1e-4)
        clicks = rng.integers(0, 2, K)
        state = tell(policy, state, action, 0.0, clicks)
        shown[chosen] += 1
        hits[chosen] += clicks
    assert shown.min() > 0
    np.testing.assert_array_equal(state.shown, state.seen)


def test_pbm_ucb__sees_lower_places_less() -> None:
    policy = make_policy("pbm_ucb", {"decay": 0.5})
    state = policy.init(jax.random.key(0), small_problem())
    state = tell(policy, state, [3, 0, 6], 0.0, [1.0, 0.0, 1.0])
    np.testing.assert_allclose(state.seen, [0.5, 0, 0, 1, 0, 0, 0.25, 0])
    np.testing.assert_allclose(state.shown, [1, 0, 0, 1, 0, 0, 1, 0])
    np.testing.assert_allclose(state.clicks, [0, 0, 0, 1, 0, 0, 1, 0])


def test_pbm_lin_ucb__recovers_theta_from_independent_rounds() -> None:
    decay, ridge = 0.6, 1e-5
    policy = pbm_lin_ucb(PbmLinUCBConfig(decay=decay, ridge=ridge))
    state = policy.init(jax.random.key(0), small_problem())
    rng = np.random.default_rng(7)
    theta, kappa = rng.uniform(size=L), examination(decay, K)
    learn = jax.jit(policy.tell)
    phi = np.zeros((L, L))
    for t in range(L):  # the list wanders through the arms
        action = (t + np.arange(K)) % L
        phi[t, action] = kappa
        reward = jnp.float32(kappa @ theta[action])
        key = jax.random.key(t)
        state = learn(key, state, jnp.asarray(action, jnp.int32), reward)
    assert np.linalg.matrix_rank(phi) == L
    np.testing.assert_allclose(state.inverse @ state.cross, theta, atol=2e-2)
    np.testing.assert_allclose(np.linalg.solve(phi, phi @ theta), theta)


def test_pbm_lin_ucb__inverse_equals_the_explicit_one() -> None:
    policy = pbm_lin_ucb(PbmLinUCBConfig(decay=0.6, ridge=0.1))
    state = policy.init(jax.random.key(0), small_problem())
    learn = jax.jit(policy.tell)
    rng = np.random.default_rng(8)
    v, b = 0.1 * np.eye(L), np.zeros(L)
    for t in range(60):
        action, reward = rng.permutation(L)[:K], rng.normal()
        phi = np.zeros(L)
        phi[action] = 0.6 ** np.arange(K)
        v, b = v + np.outer(phi, phi), b + reward * phi
        key = jax.random.key(t)
        action = jnp.asarray(action, jnp.int32)
        state = learn(key, state, action, jnp.float32(reward))
    np.testing.assert_allclose(state.inverse, np.linalg.inv(v), atol=1e-4)
    np.testing.assert_allclose(state.cross, b, atol=1e-4)


# Learning


def coverage_step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, Outcome]:
    """The model of CascadeLSB: clicks come from topics that are not covered yet."""
    topics, theta = state
    x = topics[action]
    left = jnp.cumprod(jnp.concatenate([jnp.ones_like(x[:1]), 1.0 - x[:-1]]), axis=0)
    chance = (left * x) @ theta
    is_attracted = jax.random.uniform(key, action.shape) < chance
    is_first = jnp.cumsum(is_attracted) - is_attracted == 0
    mean = 1.0 - jnp.prod(1.0 - chance)
    clicks = visible_clicks(is_attracted & is_first)
    return state, Outcome(is_attracted.any().astype(jnp.float32), mean, clicks)


def coverage_setting() -> dict[str, Any]:
    """Half of the arms are about a topic that nobody likes."""
    rng = np.random.default_rng(9)
    features = np.zeros((20, 4))
    features[np.arange(20), np.arange(20) % 4] = rng.uniform(0.5, 1.0, 20)
    problem = problem_from_conflicts(np.zeros((20, 20), bool), 4, features)
    theta = jnp.array([0.5, 0.0, 0.45, 0.0])
    return {
        "env_step": coverage_step,
        "env_states": (problem.features, theta),
        "problems": problem,
    }


def list_setting(name: str) -> tuple[dict[str, Any], float]:
    """Draw a small instance that a policy is made for; also return its best reward."""
    if name.startswith("pbm"):
        config = PositionBasedConfig(**SIZES)
        instance: Any = position_based.make_instance(config, 2)
        step, state = position_based.step, position_based.env_state(instance)
    else:
        instance = cascading.make_instance(CascadingConfig(**SIZES), 2)
        step, state = cascading.step, cascading.env_state(instance)
    setting = {"env_step": step, "env_states": state, "problems": instance.problem}
    return setting, instance.ground_truth.reward


def late_reward(policy: Policy, setting: dict[str, Any], rounds: int = 1000) -> Any:
    """Play and return the mean rewards and violations of the last fifth."""
    stacked = jax.tree.map(
        lambda leaf: jnp.stack([leaf] * B),
        {name: setting[name] for name in ("env_states", "problems")},
    )
    keys = jax.random.split(jax.random.key(0), B)
    curves = runner.run(
        policy, setting["env_step"], **stacked, keys=keys, rounds=rounds, f_in=50
    )
    late = rounds - rounds // 5
    return curves.mean_reward[:, late:].mean(), curves.violations


@pytest.mark.parametrize(
    ("name", "target", "constraints", "share"),
    [
        ("cascade_kl_ucb", "clicks", "soft", 0.7),
        ("cascade_kl_ucb", "reward", "hard", 0.9),
        ("cascade_hybrid", "reward", "hard", 0.7),
        ("pbm_ucb", "clicks", "hard", 0.8),
        ("pbm_lin_ucb", "clicks", "hard", 0.8),
    ],
)
def test_policy__learns(name: str, target: str, constraints: str, share: float) -> None:
    """It goes much of the way from random lists to the best one."""
    setting, best = list_setting(name)
    policy = policy_of(name, constraints, target)
    reward, violations = late_reward(policy, setting)
    floor, _ = late_reward(policy_of("random", constraints), setting, rounds=200)
    assert reward > floor + share * (best - floor)
    if constraints == "hard":
        assert (violations == 0).all()


@pytest.mark.parametrize("name", ["cascade_lsb", "cascade_hybrid"])
def test_linear_cascade__learns_which_topics_are_liked(name: str) -> None:
    setting = coverage_setting()
    policy = make_policy(name, {"alpha": 0.3, "sigma": 0.5})
    reward, _ = late_reward(policy, setting)
    floor, _ = late_reward(policy_of("random", "soft"), setting, rounds=200)
    liked = jnp.array(list(itertools.permutations(range(0, 20, 2), 4)))
    means = jax.jit(jax.vmap(coverage_step, in_axes=(None, None, 0)))
    outcomes = means(jax.random.key(0), setting["env_states"], liked)[1]
    best = float(outcomes.mean_reward.max())
    assert reward > floor + 0.9 * (best - floor)


@pytest.mark.parametrize("name", ["cascade_kl_ucb", "cascade_hybrid", "pbm_ucb"])
def test_policy__runs_of_a_batch_equal_one_by_one(name: str) -> None:
    setting, _ = list_setting(name)
    policy = policy_of(name, "hard")
    keys = jax.random.split(jax.random.key(4), B)

    def play(chosen: jax.Array) -> runner.Curves:
        size = chosen.shape[0]
        stacked = jax.tree.map(
            lambda leaf: jnp.stack([leaf] * size),
            {n: setting[n] for n in ("env_states", "problems")},
        )
        step = setting["env_step"]
        return runner.run(policy, step, **stacked, keys=chosen, rounds=30, f_in=10)

    together = play(keys)
    assert (together.reward[0] != together.reward[1]).any()
    for b in range(B):
        alone = play(keys[b : b + 1])
        np.testing.assert_allclose(alone.reward[0], together.reward[b], rtol=1e-5)
        np.testing.assert_allclose(
            alone.mean_reward[0], together.mean_reward[b], rtol=1e-5
        )


@pytest.mark.parametrize("name", NAMES)
def test_policy__block_lowers_for_every_platform(name: str) -> None:
    setting, _ = list_setting(name)
    init, play = runner._compiled(policy_of(name, "hard"), setting["env_step"])
    problems, states = jax.tree.map(
        lambda leaf: jnp.stack([leaf] * B), (setting["problems"], setting["env_states"])
    )

    def block(data: jax.Array) -> Any:
        keys = jax.random.wrap_key_data(data)
        state = init(keys, problems)
        return play(state, states, keys, problems, 0, 4)[2]

    data = jax.random.key_data(jax.random.split(jax.random.key(0), B))
    platforms = ("cpu", "cuda", "tpu")
    exported = jax.export.export(jax.jit(block), platforms=platforms)
    assert exported(data).platforms == platforms
