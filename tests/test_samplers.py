"""Every sampler of the registry through the same checks, and each one's own."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.problem import (
    Problem,
    make_problem,
    problem_from_conflicts,
    random_feasible_sets,
    to_multi_hot,
    violated_pairs,
)
from msb_jax.samplers import base, teacher_student
from msb_jax.samplers.base import Context, Sampler, View
from msb_jax.samplers.registry import PLAIN, make_samplers
from msb_jax.samplers.solver import SolverConfig, beta_perturb, solver
from msb_jax.solvers.local_search import evaluate
from msb_jax.types import Quadratic
from tests.reference import best_set

L, K, N = 20, 4, 30
UNTRAINED = (*PLAIN, "clicks")


def _problem(num_conflicts: int = 30) -> Problem:
    features = np.random.default_rng(0).random((L, 3))
    return make_problem(features, K, metric="ned", num_conflicts=num_conflicts)


def _view(problem: Problem, *, is_hard: bool, seed: int = 0) -> View:
    """A view on a known quadratic objective."""
    rng = np.random.default_rng(seed)
    size = problem.num_arms
    pair = rng.normal(size=(size, size)) * 0.3
    model = Quadratic(
        pair=jnp.asarray((pair + pair.T) / 2, jnp.float32),
        linear=jnp.asarray(rng.normal(size=size), jnp.float32),
        offset=jnp.zeros(()),
    )
    elites = random_feasible_sets(jax.random.key(seed), problem, 6)
    values = jax.vmap(lambda a: evaluate(model, a))(elites)
    order = jnp.argsort(-values)
    noise = jnp.asarray(rng.normal(size=(3, size)) * 0.1, jnp.float32)
    return View(
        problem=problem,
        round=jnp.asarray(100, jnp.int32),
        forbidden=problem.conflicts & is_hard,
        pair_price=jnp.asarray(jnp.inf if is_hard else 0.05),
        arms=jnp.arange(size, dtype=jnp.int32),
        model=model,
        marginals=model.linear,
        elites=elites[order],
        elite_values=values[order],
        draw_places=jnp.arange(size, dtype=jnp.int32),
        draws=Quadratic(
            pair=jnp.tile(model.pair[None], (3, 1, 1)),
            linear=model.linear[None] + noise,
            offset=jnp.zeros((3,)),
        ),
        reach=jnp.full((size,), 0.1),
        pool=elites,
        pool_origin=jnp.zeros((6,), jnp.int32),
        played=elites,
        played_values=values,
        is_played=jnp.ones((6,), bool),
    )


def _context(sampler: Sampler, state: object, view: View) -> Context:
    """Do what the agent does for one run, the host part included."""
    asked, answer = (), ()
    if sampler.request is not None and sampler.solve is not None:
        asked = jax.jit(sampler.request)(jax.random.key(8), state, view)
        batch = jax.tree.map(lambda leaf: leaf[None], (view.problem, asked))
        answer = jax.tree.map(lambda leaf: leaf[0], sampler.solve(*batch))
    return Context(view=view, request=asked, answer=answer, peers=view.elites)


@functools.cache
def _proposals(name: str, is_hard: bool) -> tuple[np.ndarray, View]:
    problem = _problem()
    sampler = make_samplers((name,))[0]
    view = _view(problem, is_hard=is_hard)
    state = sampler.init(jax.random.key(1), problem)
    context = _context(sampler, state, view)
    propose = jax.jit(sampler.propose, static_argnums=3)
    return np.asarray(propose(jax.random.key(2), state, context, N)), view


@pytest.mark.parametrize("is_hard", [False, True])
@pytest.mark.parametrize("name", UNTRAINED)
def test_sampler__proposes_the_asked_number_of_legal_sets(
    name: str, is_hard: bool
) -> None:
    actions, view = _proposals(name, is_hard)
    assert actions.shape == (N, K)
    assert actions.dtype == np.int32
    assert actions.min() >= 0
    assert actions.max() < L
    assert all(len(set(row)) == K for row in actions.tolist())
    if is_hard:
        assert not np.asarray(violated_pairs(view.problem, jnp.asarray(actions))).any()


@pytest.mark.parametrize("name", UNTRAINED)
def test_sampler__state_is_a_fixed_point_and_traces_once(name: str) -> None:
    problem = _problem()
    sampler = make_samplers((name,))[0]
    view = _view(problem, is_hard=True)
    state = sampler.init(jax.random.key(1), problem)
    context = _context(sampler, state, view)
    traces = 0

    @jax.jit
    def update(key: jax.Array, state: object, context: Context) -> object:
        nonlocal traces
        traces += 1
        return sampler.update(key, state, context)

    after = update(jax.random.key(3), state, context)
    after = update(jax.random.key(4), after, context)
    assert traces == 1
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype


@pytest.mark.parametrize("name", UNTRAINED)
def test_sampler__over_seeds_equals_one_by_one(name: str) -> None:
    problem = _problem()
    sampler = make_samplers((name,))[0]
    views = [_view(problem, is_hard=True, seed=s) for s in (0, 1)]
    state = sampler.init(jax.random.key(1), problem)
    contexts = [_context(sampler, state, view) for view in views]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *contexts)

    def propose(seed: jax.Array, context: Context) -> jax.Array:
        return sampler.propose(jax.random.key(seed), state, context, N)

    together = jax.jit(jax.vmap(propose))(jnp.arange(2), stacked)
    alone = [jax.jit(propose)(jnp.asarray(i), contexts[i]) for i in range(2)]
    np.testing.assert_array_equal(together, np.stack(alone))


@pytest.mark.parametrize("name", UNTRAINED)
def test_sampler__lowers_for_gpu_and_tpu(name: str) -> None:
    problem = _problem()
    sampler = make_samplers((name,))[0]
    state = sampler.init(jax.random.key(1), problem)
    context = _context(sampler, state, _view(problem, is_hard=True))
    step = jax.jit(lambda k, s, c: sampler.propose(k, s, c, N))
    exported = jax.export.export(step, platforms=("cpu", "cuda", "tpu"))(
        jax.random.key(0), state, context
    )
    assert len(exported.platforms) == 3


@pytest.mark.parametrize(
    ("size", "k", "graph"),
    [(2, 1, "none"), (3, 3, "all"), (5, 2, "all")],
)
@pytest.mark.parametrize("name", UNTRAINED)
def test_sampler__works_at_tiny_sizes(name: str, size: int, k: int, graph: str) -> None:
    conflicts = (~np.eye(size, dtype=bool)) & (graph == "all")
    problem = problem_from_conflicts(conflicts, k)
    sampler = make_samplers((name,))[0]
    view = _view(problem, is_hard=True)
    state = sampler.init(jax.random.key(1), problem)
    context = _context(sampler, state, view)
    propose = jax.jit(sampler.propose, static_argnums=3)
    actions = np.asarray(propose(jax.random.key(2), state, context, 16))
    assert actions.shape == (16, k)
    assert all(len(set(row)) == k for row in actions.tolist())
    assert actions.min() >= 0
    assert actions.max() < size


def test_solver__proposes_the_optimum_of_the_model() -> None:
    actions, view = _proposals("solver", True)
    chosen, _ = best_set(
        np.asarray(view.model.pair, float),
        np.asarray(view.model.linear, float),
        np.asarray(view.problem.conflicts),
        K,
    )
    assert list(chosen) in [sorted(row) for row in actions.tolist()]


def test_solver__first_proposal_is_the_optimum_of_the_linear_program() -> None:
    actions, view = _proposals("solver", True)
    chosen, _ = best_set(
        np.zeros((L, L)),
        np.asarray(view.marginals, float),
        np.asarray(view.problem.conflicts),
        K,
    )
    assert sorted(actions[0].tolist()) == list(chosen)


def test_solver__looks_at_a_part_of_the_arms_when_told_to() -> None:
    problem = _problem()
    view = _view(problem, is_hard=True)
    arms = jnp.sort(
        jnp.unique(jnp.concatenate([view.elites[0], jnp.arange(12)]), size=12)
    ).astype(jnp.int32)
    places = jnp.arange(12, dtype=jnp.int32)
    view = view._replace(
        arms=arms,
        model=Quadratic(
            view.model.pair[arms][:, arms], view.model.linear[arms], view.model.offset
        ),
        draw_places=places,
        draws=Quadratic(
            view.draws.pair[:, arms][:, :, arms],
            view.draws.linear[:, arms],
            view.draws.offset,
        ),
        reach=view.reach[arms],
    )
    sampler = solver(SolverConfig())
    state = sampler.init(jax.random.key(1), problem)
    context = _context(sampler, state, view)
    propose = jax.jit(sampler.propose, static_argnums=3)
    actions = np.asarray(propose(jax.random.key(2), state, context, N))
    assert all(len(set(row)) == K for row in actions.tolist())
    assert not np.asarray(violated_pairs(problem, jnp.asarray(actions))).any()


def test_beta_perturb__changes_about_two_of_twenty_arms() -> None:
    n, action = 400, jnp.arange(20, dtype=jnp.int32)
    keys = jax.random.split(jax.random.key(0), n)
    noisy = jax.jit(jax.vmap(lambda k: beta_perturb(k, action, 300, 0.05)))(keys)
    changed = 20 - (np.asarray(noisy) < 20).sum(axis=1)
    error = (changed.mean() - 2.0) / (changed.std() / np.sqrt(n))
    assert abs(error) < 5
    assert all(len(set(row)) == 20 for row in noisy.tolist())


def test_beta_perturb__keeps_every_other_arm_equally_likely() -> None:
    n, action = 2000, jnp.arange(2, dtype=jnp.int32)
    keys = jax.random.split(jax.random.key(1), n)
    noisy = jax.jit(jax.vmap(lambda k: beta_perturb(k, action, 6, 0.3)))(keys)
    counts = np.bincount(np.asarray(noisy).reshape(-1), minlength=6) / n
    others = counts[2:]
    sem = np.sqrt(others.mean() * (1 - others.mean()) / n)
    assert np.abs(others - others.mean()).max() < 5 * sem
    assert counts[:2].min() > others.max()


def _cross(key: jax.Array, start: list[int], goal: list[int]) -> set[int]:
    hot = to_multi_hot(jnp.asarray([start, goal], jnp.int32), L)
    return set(np.asarray(teacher_student.cross(key, hot[0], hot[1], K)).tolist())


def test_cross__keeps_common_arms_and_mixes_the_rest() -> None:
    start, goal = [0, 1, 2, 3], [2, 3, 4, 5]
    children = [_cross(jax.random.key(s), start, goal) for s in range(60)]
    assert all({2, 3} <= child <= {0, 1, 2, 3, 4, 5} for child in children)
    assert all(len(child) == K for child in children)
    own = np.array([len(child & {0, 1}) for child in children])
    # Each of the two free places goes to either parent with probability one half.
    assert abs(own.mean() - 1.0) < 5 * own.std() / np.sqrt(len(own))
    new = [child not in (set(start), set(goal)) for child in children]
    assert np.mean(new) > 0.5


def test_cross__of_equal_sets_is_the_set() -> None:
    assert _cross(jax.random.key(0), [4, 7, 9, 11], [4, 7, 9, 11]) == {4, 7, 9, 11}


def test_cross__makes_new_sets_nearly_always_at_full_size() -> None:
    k, arms = 20, 300
    keys = jax.random.split(jax.random.key(3), 300)
    parents = to_multi_hot(
        jnp.stack([jnp.arange(k), jnp.arange(k) + 10]).astype(jnp.int32), arms
    )
    children = jax.jit(
        jax.vmap(lambda key: teacher_student.cross(key, parents[0], parents[1], k))
    )(keys)
    known = {frozenset(range(20)), frozenset(range(10, 30))}
    new = [frozenset(child) not in known for child in children.tolist()]
    assert np.mean(new) > 0.9


def test_value_of__equals_the_model_and_ignores_foreign_arms() -> None:
    view = _view(_problem(), is_hard=False)
    values = base.value_of(view, view.elites)
    np.testing.assert_allclose(values, view.elite_values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["solvr"], "did you mean 'solver'"),
        (["solver", "solver"], "named once"),
        ([], "at least one"),
    ],
)
def test_make_samplers__explains_what_is_wrong(names: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_samplers(names)


def test_legal_sets__are_uniform_where_nothing_is_forbidden() -> None:
    view = _view(_problem(), is_hard=False)
    draw: Callable[..., jax.Array] = jax.jit(base.legal_sets, static_argnums=2)
    sets = np.asarray(draw(jax.random.key(0), view, 2000))
    share = np.bincount(sets.reshape(-1), minlength=L) / 2000
    sem = np.sqrt(K / L * (1 - K / L) / 2000)
    assert np.abs(share - K / L).max() < 5 * sem


def test_at_intervals__learns_and_imitates_at_the_same_refreshes() -> None:
    counter = Sampler(
        name="counter",
        init=lambda key, problem: jnp.zeros((2,)),  # updates, imitations
        propose=lambda key, state, context, n: jnp.zeros((n, K), jnp.int32),
        update=lambda key, state, context: state.at[0].add(1.0),
        imitate=lambda key, state, context, action: state.at[1].add(1.0),
    )
    seldom = base.at_intervals(counter, 3)
    view, key = _view(_problem(), is_hard=False), jax.random.key(0)
    state, seen = seldom.init(key, view.problem), []
    for _ in range(7):
        state = seldom.update(key, state, Context(view))
        assert seldom.imitate is not None
        state = seldom.imitate(key, state, Context(view), view.elites[0])
        seen.append(np.asarray(state[0]).tolist())
    assert seen == [[n, n] for n in (1, 1, 1, 2, 2, 2, 3)]
    assert base.at_intervals(counter, 1) is counter
