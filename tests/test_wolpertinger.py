"""The primal-dual Wolpertinger sampler: its parts, what it learns, its protocol."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.competence import Objective, known_view, make_objective, train
from msb_jax.problem import Problem, problem_from_conflicts, violated_pairs
from msb_jax.samplers.base import Context, View
from msb_jax.samplers.ddpg import DdpgConfig, relative_violation
from msb_jax.samplers.wolpertinger import (
    WolpertingerConfig,
    WolpertingerState,
    nearest_sets,
    random_swaps,
    wolpertinger,
)
from msb_jax.types import Quadratic
from tests.actor_critics import K, L, small_problem
from tests.reference import all_sets, multi_hot

N = 10
SMALL = WolpertingerConfig(
    learner=DdpgConfig(width=8, num_steps=3, batch_size=12),
    capacity=64,
    num_scored=8,
    num_random=4,
    num_candidates=4,
)
SAMPLER = wolpertinger(SMALL)


# The parts of a proposal.


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
    problem = small_problem()
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
    problem = small_problem()
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
    problem = small_problem()
    view, state = _view(problem), _start(problem)
    fast, actions = refresh(jax.random.key(5), state, view)
    slow, same = _refresh(jax.random.key(5), state, view)
    np.testing.assert_array_equal(actions, same)
    for one, other in zip(jax.tree.leaves(fast), jax.tree.leaves(slow), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_wolpertinger__over_seeds_equals_one_by_one() -> None:
    problem = small_problem()
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
    problem = small_problem()
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
    problem = small_problem()
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
    problem = small_problem()
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
    problem = small_problem()
    view = _view(problem)
    state, _ = refresh(jax.random.key(0), _start(problem), view)
    raised = view.model._replace(offset=view.model.offset + 7.0)
    after, _ = refresh(jax.random.key(1), state, view._replace(model=raised))
    np.testing.assert_allclose(
        after.replay.rows.rewards[:8], state.replay.rows.rewards[:8] + 7.0, rtol=1e-5
    )


def test_update__lam2_follows_the_own_violations() -> None:
    problem = small_problem()
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
    problem = small_problem()
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
