"""The agent: one run, many runs, odd orders of feedback, tiny problems."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.agent.master_slave import (
    MasterSlaveConfig,
    MasterSlaveState,
    master_slave,
)
from msb_jax.agent.pool import observe
from msb_jax.link import identity_link
from msb_jax.masters import history as hist
from msb_jax.masters.ntk_ucb import NtkUcbConfig, ntk_ucb
from msb_jax.problem import (
    Problem,
    make_problem,
    problem_from_conflicts,
    stack_problems,
    violated_pairs,
)
from msb_jax.samplers.registry import make_samplers
from msb_jax.types import Belief, Policy
from tests.reference import best_set

NAMES = ("solver", "random_best", "teacher_student")


@functools.cache
def _policy(
    constraints: str = "hard", n_re: int = 20, f_in: int = 5, names: tuple = NAMES
) -> Policy:
    master = ntk_ucb(
        NtkUcbConfig(constraints=constraints, block=f_in, fit_rows=32, fit_steps=10)
    )
    config = MasterSlaveConfig(
        n_re=n_re, f_in=f_in, n_es=8, constraints=constraints, num_draws=4
    )
    return master_slave(master, make_samplers(names), config)


@functools.cache
def _jitted(policy: Policy) -> tuple:
    return jax.jit(policy.init), jax.jit(policy.ask), jax.jit(policy.tell)


def _problem(seed: int = 0, num_arms: int = 16, k: int = 3) -> Problem:
    features = np.random.default_rng(seed).random((num_arms, 3))
    return make_problem(features, k, metric="ned", num_conflicts=num_arms)


def _theta(num_arms: int) -> np.ndarray:
    return np.random.default_rng(42).random(num_arms).astype(np.float32)


def _play(
    policy: Policy, problem: Problem, rounds: int, f_in: int = 5
) -> tuple[MasterSlaveState, list[np.ndarray], list[float]]:
    init, ask, tell = _jitted(policy)
    theta = _theta(problem.num_arms)
    key = jax.random.key(0)
    state = init(jax.random.fold_in(key, 10_000), problem)
    actions, means = [], []
    for t in range(rounds):
        keys = jax.random.split(jax.random.fold_in(key, t), 3)
        if t % f_in == 0:
            state = policy.refresh(keys[0], state)
        state, action = ask(keys[1], state)
        value = theta[np.asarray(action)].sum()
        noise = 0.01 * np.random.default_rng(t).normal()
        state = tell(keys[2], state, action, jnp.asarray(value + noise))
        actions.append(np.asarray(action))
        means.append(float(value))
    return state, actions, means


def test_agent__finds_the_best_feasible_set_of_a_linear_reward() -> None:
    problem = _problem()
    _, actions, means = _play(_policy(), problem, 60)
    pairs = violated_pairs(problem, jnp.asarray(np.stack(actions)))
    assert not np.asarray(pairs).any()
    theta, conflicts = _theta(16), np.asarray(problem.conflicts)
    _, best = best_set(np.zeros((16, 16)), theta.astype(float), conflicts, 3)
    assert np.mean(means[-10:]) > 0.98 * best
    assert np.mean(means[-10:]) > np.mean(means[:20]) + 0.3


def test_agent__forgets_the_errors_of_old_scales_when_it_fits_new_ones() -> None:
    policy = _policy()
    state, _, _ = _play(policy, _problem(), 21)  # the first fit was before round 20
    wrong = state._replace(surprise=jnp.full((), 9.0))
    kept = policy.refresh(jax.random.key(1), wrong)
    assert float(kept.surprise) == 9.0
    last = state.master.history.rounds - 10  # two blocks
    due = wrong._replace(master=wrong.master._replace(fitted_at=last))
    assert float(policy.refresh(jax.random.key(1), due).surprise) == 1.0


def test_agent__learns_with_the_second_stage_alone() -> None:
    _, _, means = _play(_policy(names=("teacher_student",)), _problem(), 60)
    assert np.mean(means[-10:]) > np.mean(means[:20]) + 0.3


def test_agent__soft_constraints_run_and_learn() -> None:
    _, _, means = _play(_policy("soft"), _problem(), 50)
    assert np.mean(means[-10:]) > np.mean(means[:20]) + 0.3


@pytest.mark.parametrize(
    ("num_arms", "k", "graph"),
    [(2, 1, "none"), (4, 2, "all")],
)
def test_agent__works_at_tiny_sizes(num_arms: int, k: int, graph: str) -> None:
    conflicts = (~np.eye(num_arms, dtype=bool)) & (graph == "all")
    problem = problem_from_conflicts(conflicts, k)
    policy = _policy("hard", 3, 3)
    state, actions, means = _play(policy, problem, 9, f_in=3)
    assert all(len(set(a.tolist())) == k for a in actions)
    assert np.isfinite(means).all()
    assert np.isfinite(np.asarray(state.pool.belief.mean)).all()


def test_agent__without_warm_up_starts_with_a_random_block() -> None:
    state, actions, _ = _play(_policy("hard", 0, 5), _problem(), 15)
    assert int(state.round) == 15
    assert len({tuple(sorted(a.tolist())) for a in actions[:5]}) > 1


def test_refresh__of_a_batch_equals_one_by_one() -> None:
    policy = _policy()
    problems = [_problem(0), _problem(1)]
    states = [_play(policy, problem, 25)[0] for problem in problems]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    together = policy.refresh(jax.random.split(jax.random.key(9), 2), stacked)
    again = jax.random.split(jax.random.key(9), 2)
    alone = [policy.refresh(again[i], states[i]) for i in range(2)]
    for i in range(2):
        np.testing.assert_allclose(
            together.master.whitened[i], alone[i].master.whitened, rtol=0.01, atol=0.01
        )
        # Rounding may order equal swaps differently: the pools are equal as sets of
        # sets but for a few.
        one = {tuple(row) for row in np.asarray(together.pool.actions[i]).tolist()}
        other = {tuple(row) for row in np.asarray(alone[i].pool.actions).tolist()}
        assert len(one & other) >= 0.9 * len(one)


def test_ask_and_tell__in_a_loop_equal_a_scan() -> None:
    policy = _policy()
    state, _, _ = _play(policy, _problem(), 25)
    state = policy.refresh(jax.random.key(3), state)
    rounds = jnp.arange(5)
    theta = jnp.asarray(_theta(16))

    def body(state: MasterSlaveState, t: jax.Array) -> tuple:
        ask_key, tell_key = jax.random.split(jax.random.key(t))
        state, action = policy.ask(ask_key, state)
        return policy.tell(tell_key, state, action, theta[action].sum()), action

    scanned, actions = jax.jit(lambda s: jax.lax.scan(body, s, rounds))(state)
    looped, played = state, []
    step = jax.jit(body)
    for t in rounds:
        looped, action = step(looped, t)
        played.append(action)
    np.testing.assert_array_equal(actions, np.stack(played))
    for one, other in zip(
        jax.tree.leaves(scanned), jax.tree.leaves(looped), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_tell__takes_feedback_late_out_of_order_and_for_foreign_sets() -> None:
    policy = _policy()
    _, ask, tell = _jitted(policy)
    state, _, _ = _play(policy, _problem(), 25)
    state = policy.refresh(jax.random.key(3), state)
    pending = []
    for i in range(4):
        state, action = ask(jax.random.key(50 + i), state)
        pending.append(action)
    theta = _theta(16)
    foreign = jnp.asarray([0, 1, 2], jnp.int32)
    before = state.pool.belief
    state = tell(jax.random.key(1), state, foreign, jnp.asarray(1.0))
    for action in reversed(pending):
        reward = jnp.asarray(theta[np.asarray(action)].sum())
        state = tell(jax.random.key(2), state, action[::-1], reward)
    assert int(state.master.history.count) == 30
    assert not np.allclose(before.mean, state.pool.belief.mean)
    state = policy.refresh(jax.random.key(5), state)
    history = state.master.history
    assert int(history.absorbed) == int(history.count)
    assert int(jnp.sum(history.plays[: int(history.count)])) == 30


def test_tell__leaves_out_rewards_that_are_not_numbers() -> None:
    policy = _policy()
    init, _, tell = _jitted(policy)
    state = init(jax.random.key(0), _problem())
    action = jnp.asarray([0, 1, 2], jnp.int32)
    for reward in (float("nan"), 0.5, float("inf")):
        state = tell(jax.random.key(1), state, action, jnp.asarray(reward))
    assert int(state.master.history.count) == 1
    assert float(state.master.history.rewards.sum()) == 0.5
    assert np.isfinite(np.asarray(state.pool.belief.mean)).all()
    assert np.isfinite(float(state.surprise))


def test_refresh__says_when_more_was_told_than_fits() -> None:
    policy = _policy()
    state, _, _ = _play(policy, _problem(), 25)
    capacity = state.master.history.rewards.shape[0]
    history = state.master.history._replace(count=jnp.asarray(capacity + 1))
    state = state._replace(master=state.master._replace(history=history))
    with pytest.raises(ValueError, match="call refresh at least every"):
        policy.refresh(jax.random.key(0), state)


def test_refresh__grows_the_history_without_losing_rounds() -> None:
    policy = _policy("hard", 250, 5)
    problem = _problem()
    init, _, tell = _jitted(policy)
    state = policy.refresh(jax.random.key(1), init(jax.random.key(0), problem))
    rng = np.random.default_rng(0)
    told = []
    for t in range(300):
        action = np.sort(rng.permutation(16)[:3]).astype(np.int32)
        told.append(action)
        state = tell(
            jax.random.key(t), state, jnp.asarray(action), jnp.asarray(1.0 * t)
        )
        if t % 100 == 99:
            state = policy.refresh(jax.random.key(t), state)
    history = hist.merge(state.master.history)
    assert int(history.rounds) == 300
    rewards: dict[tuple[int, ...], list[int]] = {}
    for t, action in enumerate(told):
        rewards.setdefault(tuple(action.tolist()), []).append(t)
    assert int(history.count) == len(rewards)
    for row, (action, given) in enumerate(rewards.items()):
        assert tuple(history.actions[row].tolist()) == action
        assert float(history.plays[row]) == len(given)
        np.testing.assert_allclose(history.rewards[row], np.mean(given), rtol=1e-5)


def test_ask_and_tell__lower_for_gpu_and_tpu() -> None:
    policy = _policy()
    state = policy.init(jax.random.key(0), _problem())
    platforms = ("cpu", "cuda", "tpu")
    export = functools.partial(jax.export.export, platforms=platforms)
    export(jax.jit(policy.ask))(jax.random.key(1), state)
    export(jax.jit(policy.tell))(
        jax.random.key(1), state, jnp.arange(3, dtype=jnp.int32), jnp.asarray(0.5)
    )


def test_init__leaves_no_type_open() -> None:
    """A leaf of weak type would make the first refresh compile everything twice."""
    state = jax.eval_shape(_policy().init, jax.random.key(0), _problem())
    weak = [leaf for leaf in jax.tree.leaves(state) if getattr(leaf, "weak_type", 0)]
    assert not weak


def test_init__over_seeds_equals_one_by_one() -> None:
    policy = _policy()
    problems = [_problem(0), _problem(1)]
    keys = jax.random.split(jax.random.key(0), 2)
    together = jax.vmap(policy.init)(keys, stack_problems(problems))
    alone = policy.init(jax.random.split(jax.random.key(0), 2)[1], problems[1])
    for one, other in zip(
        jax.tree.leaves(together), jax.tree.leaves(alone), strict=True
    ):
        np.testing.assert_array_equal(one[1], other)


def test_is_first__marks_one_row_of_every_set_whatever_the_order() -> None:
    rows = [[0, 1, 2], [2, 1, 0], [0, 1, 3], [0, 1, 2], [5, 4, 3], [3, 5, 4]]
    history = hist.new_history(6, 3)._replace(
        actions=jnp.asarray(rows, jnp.int32), count=jnp.asarray(6)
    )
    assert np.asarray(hist.is_first(history)).tolist() == [
        True,
        False,
        True,
        False,
        True,
        False,
    ]


def test_is_first__tells_all_pairs_of_three_hundred_arms_apart() -> None:
    first, second = np.triu_indices(300, 1)
    actions = np.stack([first, second], axis=1).astype(np.int32)
    history = hist.new_history(len(actions), 2)._replace(actions=jnp.asarray(actions))
    # 44,850 sets in 2^32 codes: about 0.2 collisions are expected.
    assert int(np.sum(~np.asarray(hist.is_first(history)))) <= 3


def test_observe__is_one_for_a_calibrated_belief_and_ignores_known_sets() -> None:
    rng = np.random.default_rng(0)
    belief = Belief(
        mean=jnp.zeros((2,)),
        cov=jnp.diag(jnp.asarray([4.0, 0.0])),
        noise=jnp.asarray(1.0),
        link=identity_link(),
    )
    step = jax.jit(observe)
    known, calm, bold = jnp.ones(()), jnp.ones(()), jnp.ones(())
    calms, bolds = [], []
    for _ in range(400):
        error = rng.normal()
        calm = step(calm, belief, jnp.asarray([True, False]), 5.0**0.5 * error)
        bold = step(bold, belief, jnp.asarray([True, False]), 3 * 5.0**0.5 * error)
        known = step(known, belief, jnp.asarray([False, True]), 10.0 * error)
        calms.append(float(calm))
        bolds.append(float(bold))
    assert float(known) == 1.0
    assert 0.7 < np.mean(calms[100:]) < 1.4
    assert 6.0 < np.mean(bolds[100:]) < 12.5


def test_master_slave__needs_a_sampler() -> None:
    with pytest.raises(ValueError, match="at least one sampler"):
        master_slave(ntk_ucb(NtkUcbConfig()), ())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"n_re": -1}, "n_re"),
        ({"n_es": 0}, "n_es"),
        ({"lam": -0.1}, "lam"),
        ({"constraints": "firm"}, "constraints"),
        ({"cotraining": "some"}, "cotraining"),
        ({"length_epoch": 0}, "length_epoch"),
    ],
)
def test_config__rejects_bad_values_in_a_sentence(change: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        MasterSlaveConfig(**change)
