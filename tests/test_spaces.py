"""Families of actions: sets, ordered lists, paths."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.problem import (
    PATHS,
    Problem,
    make_problem,
    problem_from_conflicts,
    violated_pairs,
)
from msb_jax.solvers.bound_search import Terrain
from msb_jax.solvers.local_search import evaluate, hollow
from msb_jax.spaces import (
    SPACES,
    Scene,
    forbidden_pairs,
    legal_actions,
    ordered,
    paths,
    space_of,
)
from msb_jax.spaces.base import invite
from msb_jax.types import Quadratic

# Two ways of three edges, one of two and one of one, from 0 to 4.
UNEVEN = [[0, 1], [1, 2], [2, 4], [1, 4], [0, 4], [0, 3], [3, 2]]


def _items(num_conflicts: int = 3) -> Problem:
    features = np.random.default_rng(0).random((7, 3))
    return make_problem(features, 3, metric="ned", num_conflicts=num_conflicts)


def _model(size: int, seed: int = 0) -> Quadratic:
    rng = np.random.default_rng(seed)
    pair = rng.normal(size=(size, size))
    return Quadratic(
        pair=jnp.asarray((pair + pair.T) / 4, jnp.float32),
        linear=jnp.asarray(rng.normal(size=size), jnp.float32),
        offset=jnp.zeros(()),
    )


def _scene(problem: Problem, is_hard: bool = True) -> Scene:
    arms = jnp.arange(problem.num_arms, dtype=jnp.int32)
    return Scene(problem, arms, forbidden_pairs(problem, is_hard))


def _problems() -> dict[str, Problem]:
    return {
        "subsets": _items(),
        "ordered": ordered.placement_problem(_items()),
        "paths": paths.path_problem(paths.grid_edges(3, 3), 0, 8),
        "uneven paths": paths.path_problem(UNEVEN, 0, 4),
    }


def test_num_exchanges__sets_and_lists() -> None:
    """One arm of a set, or one item of a list, for another one."""
    items = _items()
    for problem in (items, ordered.placement_problem(items)):
        assert problem.num_exchanges == 3 * (7 - 3)
    whole = make_problem(np.ones((4, 2)), 4, num_conflicts=0)
    assert whole.num_exchanges == 0


def _is_legal(problem: Problem, action: np.ndarray) -> bool:
    if len(set(action.tolist())) < problem.k:
        return False
    if problem.space == PATHS:
        return paths.is_path(problem, action)
    forbidden = np.asarray(forbidden_pairs(problem, True))
    return not forbidden[np.ix_(action, action)].any()


@pytest.mark.parametrize("name", list(_problems()))
def test_every_space__gives_legal_actions(name: str) -> None:
    problem = _problems()[name]
    space, scene = space_of(problem), _scene(problem)
    key = jax.random.key(0)
    model = _model(problem.num_arms)
    terrain = Terrain(hollow(model), scene.forbidden, jnp.ones((problem.num_arms,)))

    @jax.jit
    def everything(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, 6)
        starts = legal_actions(keys[0], problem, 8, True)
        legal = dataclasses.replace(problem, conflicts=scene.forbidden)
        anything = jnp.argsort(
            jax.random.uniform(keys[1], (8, problem.num_arms)), axis=1
        )[:, : problem.k].astype(jnp.int32)
        wish = jax.random.uniform(keys[2], (8, problem.num_arms))
        repaired = jax.vmap(space.repair, (None, 0, 0))(legal, anything, wish)
        found, values = space.search(scene, model, starts, 10)
        near = space.neighbours(keys[3], scene, terrain, starts[0], 8)
        best = space.best_neighbours(keys[4], scene, terrain.model, starts[0], 8)
        return [starts, repaired, found, near, best, values]

    *made, values = everything(key)
    for actions in map(np.asarray, made):
        assert actions.shape == (8, problem.k)
        assert all(_is_legal(problem, action) for action in actions)
    starts, _, found, near, best = map(np.asarray, made)
    value = jax.vmap(evaluate, (None, 0))
    np.testing.assert_allclose(value(model, found), values, rtol=1e-4, atol=1e-4)
    assert (np.asarray(values) >= np.asarray(value(model, starts)) - 1e-4).all()
    for actions in (starts, near, best):
        assert len(np.unique(np.sort(actions, axis=1), axis=0)) > 1


@pytest.mark.parametrize("name", ["paths", "uneven paths"])
def test_maximise__is_the_best_of_all_paths(name: str) -> None:
    problem = _problems()[name]
    graph = problem.structure
    num_edges = graph.tails.shape[0]
    every = []
    for size in range(1, problem.k + 1):
        for edges in itertools.combinations(range(num_edges), size):
            fillers = num_edges + np.arange(problem.k - size)
            action = np.concatenate([np.array(edges), fillers])
            if paths.is_path(problem, action):
                every.append(action)
    assert len(every) == round(float(np.exp(graph.log_counts[graph.target])))
    best = jax.jit(paths.maximise)
    for seed in range(20):
        worth = np.random.default_rng(seed).normal(size=problem.num_arms)
        action = np.asarray(best(problem, jnp.asarray(worth, jnp.float32)))
        assert paths.is_path(problem, action)
        most = max(worth[a].sum() for a in every)
        assert worth[action].sum() == pytest.approx(most, abs=1e-5)


def test_random_paths__are_equally_likely() -> None:
    problem = paths.path_problem(UNEVEN, 0, 4)
    drawn = np.sort(np.asarray(paths.random(jax.random.key(0), problem, 4000)), axis=1)
    kinds, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(kinds) == 4
    assert counts.min() > 900 and counts.max() < 1100


@pytest.mark.parametrize(
    ("edges", "ends", "sentence"),
    [
        ([[0, 1], [1, 0]], (0, 1), "cycle"),
        ([[0, 1]], (1, 0), "no path"),
        ([[0, 1]], (0, 0), "two nodes"),
        ([[0, 1, 2]], (0, 1), "shape"),
        ([[0.5, 1.0]], (0, 1), "integers"),
        ([[-1, 1]], (0, 1), "integers"),
    ],
)
def test_path_problem__says_what_is_wrong(
    edges: list, ends: tuple[int, int], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        paths.path_problem(np.array(edges), *ends)


def test_one_edge__is_the_only_path() -> None:
    problem = paths.path_problem([[0, 1]], 0, 1)
    assert problem.k == 1
    np.testing.assert_array_equal(legal_actions(jax.random.key(0), problem, 2, True), 0)


def test_placements__count_the_violations_of_the_items() -> None:
    items = _items(8)
    lists = ordered.placement_problem(items)
    rng = np.random.default_rng(1)
    drawn = np.stack([rng.permutation(7)[:3] for _ in range(40)]).astype(np.int32)
    placed = ordered.encode(lists, jnp.asarray(drawn))
    np.testing.assert_array_equal(ordered.decode(lists, placed), drawn)
    turned = placed[:, ::-1]  # the order of the arms says nothing
    np.testing.assert_array_equal(ordered.decode(lists, turned), drawn)
    np.testing.assert_array_equal(
        violated_pairs(lists, placed), violated_pairs(items, jnp.asarray(drawn))
    )
    assert int(violated_pairs(items, jnp.asarray(drawn)).max()) > 0


def test_soft_lists__may_conflict_but_are_lists() -> None:
    full = np.ones((5, 5), bool) & ~np.eye(5, dtype=bool)
    lists = ordered.placement_problem(problem_from_conflicts(full, 3))
    drawn = legal_actions(jax.random.key(0), lists, 30, False)
    items = np.asarray(ordered.decode(lists, drawn))
    places = np.sort(np.asarray(drawn), axis=1) // 5
    np.testing.assert_array_equal(places, np.tile(np.arange(3), (30, 1)))
    assert all(len(set(row)) == 3 for row in items.tolist())
    assert len(np.unique(items, axis=0)) > 10


def test_transpositions__exchange_places_and_know_missing_arms() -> None:
    lists = ordered.placement_problem(_items(0))
    scene = _scene(lists)
    action = ordered.encode(lists, jnp.array([4, 1, 6]))
    made, is_there = jax.jit(ordered.transpositions)(scene, action)
    assert bool(is_there.all())
    np.testing.assert_array_equal(
        ordered.decode(lists, made), [[1, 4, 6], [6, 1, 4], [4, 6, 1]]
    )
    # Without item 4 in the second place one of the three is out of reach.
    arms = jnp.delete(scene.arms, 7 + 4)
    part = Scene(lists, arms, scene.forbidden[arms][:, arms])
    local = jnp.searchsorted(arms, action).astype(jnp.int32)
    made, is_there = jax.jit(ordered.transpositions)(part, local)
    np.testing.assert_array_equal(is_there, [False, True, True])
    np.testing.assert_array_equal(made[0], local)


def test_search_of_lists__sorts_by_worth() -> None:
    """An additive model whose places count less and less wants the best item first."""
    lists = ordered.placement_problem(_items(0))
    worth = np.array([0.1, 0.9, 0.3, 0.7, 0.2, 0.5, 0.4])
    seen = np.array([1.0, 0.6, 0.3])
    model = Quadratic(
        pair=jnp.zeros((21, 21)),
        linear=jnp.asarray((seen[:, None] * worth[None, :]).ravel(), jnp.float32),
        offset=jnp.zeros(()),
    )
    starts = legal_actions(jax.random.key(3), lists, 5, True)
    found, _ = jax.jit(lambda s: space_of(lists).search(_scene(lists), model, s, 20))(
        starts
    )
    np.testing.assert_array_equal(
        ordered.decode(lists, found), np.tile([1, 3, 5], (5, 1))
    )


def test_spaces__are_known_by_name() -> None:
    for name, problem in _problems().items():
        assert space_of(problem) is SPACES[problem.space], name


def test_crowded_lists__stay_lists() -> None:
    """Where all items conflict, places and items still come first."""
    full = np.ones((4, 4), bool) & ~np.eye(4, dtype=bool)
    lists = ordered.placement_problem(problem_from_conflicts(full, 4))
    legal = dataclasses.replace(lists, conflicts=forbidden_pairs(lists, True))
    wish = jax.random.uniform(jax.random.key(0), (20, 16))
    wanted = jax.lax.top_k(wish, 4)[1].astype(jnp.int32)
    drawn = legal_actions(jax.random.key(1), lists, 20, True)
    mended = jax.vmap(ordered.repair, (None, 0, 0))(legal, wanted, wish)
    for actions in (drawn, mended):
        items = np.asarray(ordered.decode(lists, actions))
        places = np.sort(np.asarray(actions), axis=1) // 4
        np.testing.assert_array_equal(places, np.tile(np.arange(4), (20, 1)))
        assert all(len(set(row)) == 4 for row in items.tolist())


def test_shortlist_of_lists__has_every_place_of_its_items() -> None:
    lists = ordered.placement_problem(_items(0))
    worth = jnp.zeros((21,)).at[7 + 2].set(3.0).at[5].set(2.0)  # items 2 and 5
    arms = np.asarray(ordered.shortlist(jax.random.key(0), lists, worth, 6))
    np.testing.assert_array_equal(arms, np.sort(arms))
    by_place = arms.reshape(3, -1)
    np.testing.assert_array_equal(by_place % 7, np.tile(by_place[0] % 7, (3, 1)))
    assert {2, 5} <= set((arms % 7).tolist())
    part = ordered.restrict(lists, jnp.asarray(arms))
    np.testing.assert_array_equal(
        part.structure, np.asarray(lists.structure)[np.ix_(arms, arms)]
    )


def test_invite__the_wanted_the_random_and_the_best() -> None:
    worth = jnp.arange(40.0).at[3].set(jnp.inf).at[7].set(jnp.inf)
    keys = jax.random.split(jax.random.key(0), 400)
    chosen = np.asarray(jax.vmap(invite, (0, None, None))(keys, worth, 12))
    np.testing.assert_array_equal(chosen, np.sort(chosen, axis=1))
    assert all(len(set(row)) == 12 for row in chosen.tolist())
    share = np.bincount(chosen.ravel(), minlength=40) / len(chosen)
    assert share[3] == share[7] == 1.0
    # Three guests of 38 arms; of the others at least the seven best are there.
    assert (share[33:] == 1.0).all()
    others = np.delete(share[:30], [3, 7])
    error = np.sqrt(3 / 38 / len(keys))
    assert np.abs(others - 3 / 38).max() < 5 * error


def test_invite__everybody_where_there_is_room() -> None:
    chosen = invite(jax.random.key(0), jnp.zeros((5,)), 5)
    np.testing.assert_array_equal(chosen, np.arange(5))
