"""The primal-dual Wolpertinger sampler: its parts, what it learns, its protocol."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.competence import Objective, known_view, make_objective, train
from msb_jax.agent import replay as rp
from msb_jax.networks.actor_critic import sum_to_k
from msb_jax.problem import (
    Problem,
    make_problem,
    problem_from_conflicts,
    to_multi_hot,
    violated_pairs,
)
from msb_jax.samplers.base import Context, View
from msb_jax.samplers.ddpg import (
    Ddpg,
    DdpgConfig,
    Learner,
    clash_matrix,
    critic_target,
    ddpg,
    dual_step,
    relative_violation,
)
from msb_jax.samplers.wolpertinger import (
    WolpertingerConfig,
    WolpertingerState,
    nearest_sets,
    random_swaps,
    wolpertinger,
)
from msb_jax.types import Quadratic
from tests.reference import all_sets, multi_hot

L, K, N = 12, 3, 10
SMALL = WolpertingerConfig(
    learner=DdpgConfig(width=8, num_steps=3, batch_size=12),
    capacity=64,
    num_scored=8,
    num_random=4,
    num_candidates=4,
)
SAMPLER = wolpertinger(SMALL)


# The parts of a proposal.


def test_sum_to_k__has_sum_k_and_keeps_the_order() -> None:
    logits = 5.0 * jax.random.normal(jax.random.key(0), (20, L))
    for k in (1, K, L - 1):
        output = np.asarray(jax.vmap(lambda x, k=k: sum_to_k(x, k))(logits))
        np.testing.assert_allclose(output.sum(axis=1), k, atol=1e-3)
        assert (np.argsort(output) == np.argsort(logits)).mean() > 0.95
        assert output.min() >= 0
        assert output.max() <= 1


def test_sum_to_k__reaches_zero_and_one() -> None:
    logits = jnp.where(jnp.arange(L) < K, 20.0, -20.0)
    np.testing.assert_allclose(sum_to_k(logits, K), jnp.arange(L) < K, atol=1e-3)
    np.testing.assert_allclose(sum_to_k(logits, L), np.ones(L), atol=1e-3)


def test_sum_to_k__has_the_gradient_of_the_shifted_sigmoid() -> None:
    logits = np.random.default_rng(0).normal(size=L)
    weights = np.random.default_rng(1).normal(size=L)
    grad = jax.grad(lambda x: jnp.dot(sum_to_k(x, K), jnp.asarray(weights)))(
        jnp.asarray(logits, jnp.float32)
    )
    output = np.asarray(sum_to_k(jnp.asarray(logits, jnp.float32), K), float)
    slope = output * (1 - output)
    # The shift moves so that the sum stays: d shift = -slope.dx / sum slope.
    want = slope * (weights - (slope @ weights) / slope.sum())
    np.testing.assert_allclose(grad, want, atol=1e-4)


def test_nearest_sets__first_is_the_nearest_of_all_sets() -> None:
    nearest = jax.jit(nearest_sets, static_argnums=(1, 2))
    sets = list(all_sets(6, 3))
    for seed in range(10):
        proto = np.random.default_rng(seed).normal(size=6)
        gaps = ((multi_hot(np.array(sets), 6) - proto) ** 2).sum(axis=1)
        found = nearest(jnp.asarray(proto, jnp.float32), 3, 1)[0]
        assert sorted(found.tolist()) == list(sets[int(gaps.argmin())])


def test_nearest_sets__are_the_single_swaps_by_distance() -> None:
    proto = np.random.default_rng(3).normal(size=6)
    found = nearest_sets(jnp.asarray(proto, jnp.float32), 3, 10)
    best = set(np.argsort(-proto)[:3].tolist())
    near = [s for s in all_sets(6, 3) if len(best & set(s)) >= 2]
    gaps = ((multi_hot(np.array(near), 6) - proto) ** 2).sum(axis=1)
    want = [near[i] for i in np.argsort(gaps)]
    assert [tuple(sorted(row)) for row in found.tolist()] == want


@pytest.mark.parametrize(("size", "k"), [(2, 1), (3, 3), (4, 1)])
def test_nearest_sets__are_repeated_where_there_are_too_few(size: int, k: int) -> None:
    found = nearest_sets(jnp.arange(size, dtype=jnp.float32), k, 9).tolist()
    distinct = {tuple(sorted(row)) for row in found}
    assert len(distinct) == 1 + k * (size - k)
    assert all(len(set(row)) == k for row in found)


def test_random_swaps__stay_near_and_vary() -> None:
    proto = jnp.arange(L, dtype=jnp.float32)
    sets = np.asarray(random_swaps(jax.random.key(0), proto, K, 200, 2))
    nearest = {L - 1, L - 2, L - 3}
    assert set(sets[0].tolist()) == nearest
    assert all(len(set(row)) == K for row in sets.tolist())
    assert sets.min() >= 0
    assert sets.max() < L
    changed = np.array([K - len(nearest & set(row)) for row in sets.tolist()])
    assert set(changed.tolist()) == {0, 1, 2}
    assert len({frozenset(row) for row in sets.tolist()}) > 30


# The dual variable and the critic's target.


def test_dual_step__settles_where_the_constraint_holds() -> None:
    # max x with x <= alpha on [0, 1]: the best response is x = 1 while lam2 < 1.
    alpha, eta = 0.3, 0.01

    def step(lam2: jax.Array, _: None) -> tuple[jax.Array, Any]:
        x = (lam2 < 1.0).astype(jnp.float32)
        return dual_step(lam2, x, alpha, eta, 100.0), (x, lam2)

    _, (x, lam2) = jax.lax.scan(step, jnp.zeros(()), None, length=4000)
    assert abs(float(jnp.mean(x[1000:])) - alpha) < 0.01
    np.testing.assert_allclose(lam2[1000:], 1.0, atol=2 * eta)


def test_dual_step__stays_within_its_bounds() -> None:
    assert float(dual_step(jnp.asarray(0.1), jnp.asarray(0.0), 0.5, 1.0, 9.0)) == 0.0
    assert float(dual_step(jnp.asarray(8.9), jnp.asarray(1.0), 0.5, 1.0, 9.0)) == 9.0


def test_critic_target__of_one_step_is_the_composite_feedback() -> None:
    r, c = jnp.asarray([1.0, -2.0]), jnp.asarray([0.5, 3.0])
    np.testing.assert_allclose(critic_target(r, c, 2.0), [0.0, -8.0])
    ahead = jnp.asarray([10.0, 20.0])
    np.testing.assert_allclose(critic_target(r, c, 2.0, 0.5, ahead), [5.0, 2.0])


def test_relative_violation__is_one_for_random_sets_and_x_W_x() -> None:
    problem = _problem()
    sets = np.array(list(all_sets(L, K)), np.int32)
    rates = np.asarray(relative_violation(problem, jnp.asarray(sets)))
    np.testing.assert_allclose(rates.mean(), 1.0, rtol=1e-5)
    hot, clash = multi_hot(sets, L), np.asarray(clash_matrix(problem), float)
    np.testing.assert_allclose(rates, np.einsum("ni,ij,nj->n", hot, clash, hot), 1e-4)


# The learner, on all sets of a small problem.

SIZE, PICK = 7, 2
ROWS = np.array(list(all_sets(SIZE, PICK)), np.int32)
WORTH = np.array([0.1, 0.9, 0.3, 0.8, 0.2, 0.7, 0.0])
START = jnp.full((SIZE,), 1.0 / SIZE)
FAST = DdpgConfig(width=16, num_steps=150, batch_size=24, actor_rate=5e-3)


def _pair_problem() -> Problem:
    """The two best arms, 1 and 3, conflict."""
    return problem_from_conflicts(np.array([[1, 3], [2, 4]]), PICK, num_arms=SIZE)


def _rows(rewards: np.ndarray) -> rp.Replay:
    problem, n = _pair_problem(), len(ROWS)
    states = jnp.tile(START[None, :], (n, 1))
    rows = rp.Transitions(
        actions=jnp.asarray(ROWS),
        rewards=jnp.asarray(rewards, jnp.float32),
        violations=relative_violation(problem, jnp.asarray(ROWS)),
        states=states,
        next_states=states,
    )
    empty = rp.new_replay(n + 9, PICK, SIZE)
    return rp.push(empty, rows, jnp.ones((n,), bool))


@functools.cache
def _ddpg(config: DdpgConfig) -> tuple[Ddpg, Any]:
    learner = ddpg(config, SIZE, PICK)
    return learner, jax.jit(learner.learn)


def _learn(config: DdpgConfig, replay: rp.Replay, lam2: float, calls: int) -> Learner:
    own, learn = _ddpg(config)
    learner = own.init(jax.random.key(0))
    clash = clash_matrix(_pair_problem())
    for i in range(calls):
        learner = learn(jax.random.key(i), learner, replay, jnp.asarray(lam2), clash)
    return learner


def _values(config: DdpgConfig, learner: Learner, lam2: float) -> np.ndarray:
    own, _ = _ddpg(config)
    violations = relative_violation(_pair_problem(), jnp.asarray(ROWS))
    value = own.value(learner, START, jnp.asarray(ROWS), violations, jnp.asarray(lam2))
    return np.asarray(value)


def _chosen(config: DdpgConfig, learner: Learner) -> list[int]:
    proto = _ddpg(config)[0].proto(learner, START)
    return sorted(jax.lax.top_k(proto, PICK)[1].tolist())


def _standard(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / values.std()


def test_ddpg__starts_at_value_zero_and_the_centre() -> None:
    own, _ = _ddpg(FAST)
    learner = own.init(jax.random.key(0))
    assert not _values(FAST, learner, 0.0).any()
    np.testing.assert_allclose(own.proto(learner, START), PICK / SIZE, atol=1e-4)


@pytest.mark.parametrize("kind", rp.KINDS)
def test_learn__finds_values_and_the_best_set(kind: str) -> None:
    config = DdpgConfig(
        width=16, num_steps=150, batch_size=24, actor_rate=5e-3, replay=kind
    )
    rewards = WORTH[ROWS].sum(axis=1)
    learner = _learn(config, _rows(rewards), 0.0, 4)
    error = _values(config, learner, 0.0) - _standard(rewards)
    assert np.abs(error).max() < 0.15
    assert _chosen(config, learner) == [1, 3]


def test_learn__lam2_acts_on_rows_stored_before() -> None:
    rewards = WORTH[ROWS].sum(axis=1)
    replay = _rows(rewards)
    learner = _learn(FAST, replay, 3.0, 4)
    want = _standard(rewards) - 3.0 * np.asarray(replay.rows.violations[: len(ROWS)])
    assert np.abs(_values(FAST, learner, 3.0) - want).max() < 0.15
    # Arms 1 and 3 conflict: the best pair at this price is 1 and 5.
    assert _chosen(FAST, learner) == [1, 5]


def test_learn__is_free_of_offset_and_unit_of_the_reward() -> None:
    rewards = WORTH[ROWS].sum(axis=1)
    one = _learn(FAST, _rows(rewards), 0.5, 1)
    other = _learn(FAST, _rows(1e-3 * rewards + 0.02), 0.5, 1)
    own, _ = _ddpg(FAST)
    np.testing.assert_allclose(
        own.proto(one, START), own.proto(other, START), atol=0.02
    )
    np.testing.assert_allclose(
        _values(FAST, one, 0.5), _values(FAST, other, 0.5), atol=0.05
    )


def test_learn__leaves_out_rewards_that_are_not_numbers() -> None:
    rewards = WORTH[ROWS].sum(axis=1)
    rewards[4] = np.nan
    learner = _learn(FAST, _rows(rewards), 0.0, 2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(learner))
    assert _chosen(FAST, learner) == [1, 3]


def test_learn__from_nothing_changes_nothing() -> None:
    own, learn = _ddpg(FAST)
    start = own.init(jax.random.key(0))
    empty = rp.new_replay(len(ROWS) + 9, PICK, SIZE)
    clash = clash_matrix(_pair_problem())
    after = learn(jax.random.key(1), start, empty, jnp.ones(()), clash)
    for one, other in zip(jax.tree.leaves(start), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(one, other)


def test_learn__discount_adds_the_value_of_what_follows() -> None:
    config = DdpgConfig(
        width=16, num_steps=150, batch_size=24, actor_rate=5e-3, discount=0.5
    )
    rewards = WORTH[ROWS].sum(axis=1)
    learner = _learn(config, _rows(rewards), 0.0, 6)
    # For ever the best set z: Q = r + gamma z / (1 - gamma), with gamma = 1/2.
    standard = _standard(rewards)
    error = _values(config, learner, 0.0) - (standard + standard.max())
    assert np.abs(error).max() < 0.4


def test_imitate__moves_the_output_to_the_set() -> None:
    own, _ = _ddpg(FAST)
    imitate = jax.jit(own.imitate)
    action = jnp.asarray([2, 6], jnp.int32)
    goal = np.asarray(to_multi_hot(action, SIZE))
    learner = own.init(jax.random.key(0))
    losses = []
    for _ in range(12):
        output = np.clip(np.asarray(own.proto(learner, START)), 1e-4, 1 - 1e-4)
        losses.append(-(goal * np.log(output) + (1 - goal) * np.log1p(-output)).mean())
        learner = imitate(learner, START, action)
    assert losses[1] < losses[0] - 0.05
    assert losses[-1] < 0.1 * losses[0]
    assert _chosen(FAST, learner) == [2, 6]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"width": 0}, "width must be positive"),
        ({"actor_rate": 0.0}, "actor_rate must be positive"),
        ({"entropy": -1.0}, "entropy must not be negative"),
        ({"tau": 2.0}, "tau must be in"),
        ({"discount": 1.0}, "discount must be in"),
        ({"replay": "newest"}, "replay must be one of prioritized"),
    ],
)
def test_ddpg_config__explains_what_is_wrong(settings: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DdpgConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"capacity": 0}, "capacity must be at least 1"),
        ({"bonus": -1.0}, "bonus must be at least 0"),
        ({"lam2": 200.0}, "lam2 must be at most max_lam2"),
        ({"neighbours": "all"}, "neighbours must be one of random, exact"),
    ],
)
def test_wolpertinger_config__explains_what_is_wrong(settings: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        WolpertingerConfig(**settings)


# The sampler.


def _problem(num_conflicts: int = 12) -> Problem:
    features = np.random.default_rng(0).random((L, 3))
    return make_problem(features, K, metric="ned", num_conflicts=num_conflicts)


def _view(problem: Problem, *, is_hard: bool = False, seed: int = 0) -> View:
    """A view on a known objective, with a pool of own (0) and foreign (1) sets."""
    rng = np.random.default_rng(seed)
    size, k = problem.num_arms, problem.k
    model = Quadratic(
        pair=jnp.zeros((size, size)),
        linear=jnp.asarray(rng.random(size), jnp.float32),
        offset=jnp.zeros(()),
    )
    objective = Objective(problem, model, jnp.asarray(float(k)))
    pool = np.stack([rng.permutation(size)[:k] for _ in range(8)])
    view = known_view(objective)._replace(
        pool=jnp.asarray(pool, jnp.int32),
        pool_origin=jnp.arange(8, dtype=jnp.int32) % 2,
        round=jnp.asarray(100, jnp.int32),
    )
    if is_hard:
        price = jnp.asarray(jnp.inf)
        view = view._replace(forbidden=problem.conflicts, pair_price=price, model=model)
    return view


def _refresh(
    key: jax.Array, state: WolpertingerState, view: View
) -> tuple[WolpertingerState, jax.Array]:
    keys = jax.random.split(key)
    state = SAMPLER.update(keys[0], state, Context(view=view))
    return state, SAMPLER.propose(keys[1], state, Context(view=view), N)


refresh = jax.jit(_refresh)


def _start(problem: Problem) -> WolpertingerState:
    return SAMPLER.init(jax.random.key(1), problem)


@pytest.mark.parametrize("is_hard", [False, True])
def test_wolpertinger__proposes_legal_sets_of_distinct_arms(is_hard: bool) -> None:
    problem = _problem()
    view = _view(problem, is_hard=is_hard)
    state, actions = refresh(jax.random.key(2), _start(problem), view)
    _, actions = refresh(jax.random.key(3), state, view)
    assert actions.shape == (N, K)
    assert actions.dtype == jnp.int32
    rows = actions.tolist()
    assert all(len(set(row)) == K and set(row) <= set(range(L)) for row in rows)
    assert len({frozenset(row) for row in rows}) == N
    if is_hard:
        assert not np.asarray(violated_pairs(problem, actions)).any()


def test_wolpertinger__state_is_a_fixed_point_and_traces_once() -> None:
    problem = _problem()
    traces = 0

    @jax.jit
    def run(key: jax.Array, state: WolpertingerState) -> WolpertingerState:
        nonlocal traces
        traces += 1
        return SAMPLER.update(key, state, Context(view=_view(problem)))

    state = _start(problem)
    after = run(jax.random.key(4), run(jax.random.key(3), state))
    assert traces == 1
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_wolpertinger__jit_equals_eager() -> None:
    problem = _problem()
    view, state = _view(problem), _start(problem)
    fast, actions = refresh(jax.random.key(5), state, view)
    slow, same = _refresh(jax.random.key(5), state, view)
    np.testing.assert_array_equal(actions, same)
    for one, other in zip(jax.tree.leaves(fast), jax.tree.leaves(slow), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_wolpertinger__over_seeds_equals_one_by_one() -> None:
    problem = _problem()
    views = [_view(problem, seed=s) for s in (0, 1)]
    keys = jax.random.split(jax.random.key(6), 2)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *views)
    states = jax.vmap(lambda _: _start(problem))(jnp.arange(2))
    together = jax.jit(jax.vmap(_refresh))(keys, states, stacked)
    again = jax.random.split(jax.random.key(6), 2)
    for i, view in enumerate(views):
        alone = refresh(again[i], _start(problem), view)
        for one, other in zip(
            jax.tree.leaves(together), jax.tree.leaves(alone), strict=True
        ):
            np.testing.assert_allclose(one[i], other, atol=1e-4)


def test_wolpertinger__lowers_for_gpu_and_tpu() -> None:
    problem = _problem()
    exported = jax.export.export(refresh, platforms=("cpu", "cuda", "tpu"))(
        jax.random.key(0), _start(problem), _view(problem, is_hard=True)
    )
    assert len(exported.platforms) == 3


@pytest.mark.parametrize("neighbours", ["random", "exact"])
@pytest.mark.parametrize(
    ("size", "k", "graph"), [(2, 1, "none"), (3, 3, "all"), (5, 2, "all")]
)
def test_wolpertinger__works_at_tiny_sizes(
    size: int, k: int, graph: str, neighbours: str
) -> None:
    conflicts = (~np.eye(size, dtype=bool)) & (graph == "all")
    problem = problem_from_conflicts(conflicts, k)
    sampler = wolpertinger(
        WolpertingerConfig(
            learner=SMALL.learner,
            capacity=16,
            num_scored=4,
            num_random=2,
            neighbours=neighbours,
        )
    )

    @jax.jit
    def run(state: WolpertingerState, view: View) -> tuple[Any, jax.Array]:
        context = Context(view=view)
        state = sampler.update(jax.random.key(0), state, context)
        state = sampler.imitate(jax.random.key(1), state, context, view.pool[0])  # type: ignore[misc]
        return state, sampler.propose(jax.random.key(2), state, context, 6)

    state = sampler.init(jax.random.key(1), problem)
    state, actions = run(state, _view(problem, is_hard=True))
    assert actions.shape == (6, k)
    assert all(len(set(row)) == k for row in actions.tolist())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_update__state_changes_at_the_epoch_boundary_only() -> None:
    problem = _problem()
    view = _view(problem)._replace(round=jnp.asarray(80, jnp.int32))
    first, _ = refresh(jax.random.key(0), _start(problem), view)
    np.testing.assert_allclose(first.usage, 1.0 / L)
    view = view._replace(round=jnp.asarray(100, jnp.int32))
    second, _ = refresh(jax.random.key(1), first, view)
    own = multi_hot(np.asarray(view.pool)[::2], L).sum(axis=0)  # counted twice
    np.testing.assert_allclose(second.counts, 2 * own)
    np.testing.assert_allclose(second.usage, own / own.sum(), rtol=1e-5)
    # The transitions of the second refresh lead from the old state to the new one.
    row = int(first.replay.place)
    np.testing.assert_allclose(second.replay.rows.states[row], 1.0 / L)
    np.testing.assert_allclose(second.replay.rows.next_states[row], second.usage)


def test_update__keeps_the_pool_with_its_rewards_and_violations() -> None:
    problem = _problem()
    view = _view(problem)
    state, _ = refresh(jax.random.key(0), _start(problem), view)
    rows = state.replay.rows
    np.testing.assert_array_equal(rows.actions[:8], view.pool)
    worth = np.asarray(view.marginals)[np.asarray(view.pool)].sum(axis=1)
    np.testing.assert_allclose(rows.rewards[:8], worth, rtol=1e-4)
    np.testing.assert_allclose(
        rows.violations[:8], relative_violation(problem, view.pool), rtol=1e-5
    )
    assert int(state.replay.place) == 8 + SMALL.num_scored + SMALL.num_random


def test_update__scores_old_rows_anew() -> None:
    problem = _problem()
    view = _view(problem)
    state, _ = refresh(jax.random.key(0), _start(problem), view)
    raised = view.model._replace(offset=view.model.offset + 7.0)
    after, _ = refresh(jax.random.key(1), state, view._replace(model=raised))
    np.testing.assert_allclose(
        after.replay.rows.rewards[:8], state.replay.rows.rewards[:8] + 7.0, rtol=1e-5
    )


def test_update__lam2_follows_the_own_violations() -> None:
    problem = _problem()
    conflict = np.argwhere(np.asarray(problem.conflicts))[0]
    other = next(a for a in range(L) if a not in conflict)
    bad = jnp.asarray([*conflict, other], jnp.int32)
    view = _view(problem)
    is_own = (view.pool_origin == 0)[:, None]
    guilty = view._replace(pool=jnp.where(is_own, bad[None, :], view.pool))
    state, _ = refresh(jax.random.key(0), _start(problem), guilty)
    rate = float(relative_violation(problem, bad[None, :])[0])
    want = SMALL.lam2 + SMALL.eta * (rate - SMALL.alpha)
    np.testing.assert_allclose(state.lam2, want, rtol=1e-5)
    # What the other samplers do does not count.
    innocent = guilty._replace(pool_origin=1 - view.pool_origin)
    before = relative_violation(problem, view.pool[1::2]).mean()
    state, _ = refresh(jax.random.key(0), _start(problem), innocent)
    want = SMALL.lam2 + SMALL.eta * (float(before) - SMALL.alpha)
    np.testing.assert_allclose(state.lam2, want, rtol=1e-5)


def test_update__price_is_at_least_the_masters_up_to_a_bound() -> None:
    problem = _problem()
    pairs = K * (K - 1) / (L * (L - 1)) * int(problem.num_conflicts)
    state = _start(problem)._replace(lam2=jnp.zeros(()))
    for price in (1e-4, 1e9, np.inf):
        view = _view(problem)._replace(pair_price=jnp.asarray(price))
        view = view._replace(round=jnp.asarray(0, jnp.int32))
        after, _ = refresh(jax.random.key(0), state, view)
        rows, is_row = after.replay.rows.rewards, np.asarray(after.replay.is_row)
        deviation = np.asarray(rows)[is_row].std()
        want = min(price / deviation, SMALL.max_pair_price / np.sqrt(K)) * pairs
        np.testing.assert_allclose(after.price, want, rtol=1e-3)


def test_wolpertinger__learns_a_known_objective() -> None:
    sampler = wolpertinger(
        WolpertingerConfig(learner=DdpgConfig(width=32), capacity=1000)
    )
    objective = make_objective(0, form="quadratic", num_arms=20, k=4)
    _, report = jax.jit(lambda key: train(key, sampler, objective, refreshes=40))(
        jax.random.key(0)
    )
    assert report.best > 0.95
    # An actor that does not learn stays at the mean of the random sets.
    assert report.mean > report.random_mean + 0.5 * (1.0 - report.random_mean)
    assert report.violation < 0.5 * report.random_violation
