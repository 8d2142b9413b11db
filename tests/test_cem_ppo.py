"""The CEM-PPO sampler: its learning functions, and the sampler as a whole."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import competence
from msb_jax.problem import (
    make_problem,
    problem_from_conflicts,
    random_sets,
    to_multi_hot,
    violated_pairs,
)
from msb_jax.samplers import cem_ppo as cem
from msb_jax.samplers.base import Context, View, reward_of
from msb_jax.samplers.cem_ppo import CemPpoConfig, CemPpoState, Ranked, cem_ppo
from msb_jax.topk import set_log_prob_exact
from msb_jax.types import Quadratic
from tests.reference import best_set

L, K = 20, 4
EPS = 0.05
SMALL = CemPpoConfig(epoch_size=40, interval=20)


@functools.cache
def _objective() -> competence.Objective:
    rng = np.random.default_rng(0)
    problem = make_problem(rng.random((L, 3)), K, metric="ned", num_conflicts=30)
    pair = rng.random((L, L)) / K
    pair = (pair + pair.T) / 2
    best = best_set(pair, np.zeros(L), np.asarray(problem.conflicts), K)[1]
    model = Quadratic(jnp.asarray(pair, jnp.float32), jnp.zeros((L,)), jnp.zeros(()))
    return competence.Objective(problem, model, jnp.asarray(best, jnp.float32))


@functools.cache
def _view(is_hard: bool = False) -> View:
    view = competence.known_view(_objective())
    pool = random_sets(jax.random.key(5), view.problem, 12)
    view = view._replace(pool=pool, pool_origin=jnp.zeros((12,), jnp.int32))
    if is_hard:
        conflicts = view.problem.conflicts
        view = view._replace(forbidden=conflicts, pair_price=jnp.asarray(jnp.inf))
    return view


@functools.cache
def _functions(config: CemPpoConfig = SMALL) -> tuple[Any, Any, Any]:
    sampler = cem_ppo(config)
    propose = jax.jit(sampler.propose, static_argnums=3)
    return jax.jit(sampler.update), propose, jax.jit(sampler.imitate)


_project = jax.jit(cem.project, static_argnums=(1, 2))
_to_logits = jax.jit(cem.to_logits)
_draw = jax.jit(cem.draw, static_argnums=2)
_kl = jax.jit(cem.bernoulli_kl)
_proximal_update = jax.jit(cem.proximal_update, static_argnums=0)
_rank = jax.jit(cem.rank, static_argnums=2)
_cross_entropy_update = jax.jit(cem.cross_entropy_update, static_argnums=0)
_imitate_set = jax.jit(cem.imitate_set, static_argnums=0)
_standardise = jax.jit(cem.standardise)
_log_probs = jax.jit(cem.log_probs)
_value_and_grad = jax.jit(jax.value_and_grad(cem.proximal_objective))


def _start(config: CemPpoConfig = SMALL) -> CemPpoState:
    return cem.start(config, L, K)


def _logits(seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (L,)) - 1.5


def _ranked(actions: list[list[int]], scores: list[float]) -> Ranked:
    return Ranked(jnp.asarray(actions, jnp.int32), jnp.asarray(scores))


def _assert_rates(mu: jax.Array, k: int = K) -> None:
    share = k / mu.shape[0]
    assert abs(float(mu.sum()) - k) < 1e-3
    assert float(mu.min()) >= EPS * share - 1e-6
    assert float(mu.max()) <= 1 - EPS * (1 - share) + 1e-6


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_project__keeps_sum_bounds_and_order(scale: float) -> None:
    logits = scale * _logits()
    mu = _project(logits, K, EPS)
    _assert_rates(mu)
    assert (np.diff(np.asarray(mu)[np.argsort(logits)]) >= 0).all()


def test_project__leaves_rates_of_sum_k_as_they_are() -> None:
    mu = _project(_logits(), K, EPS)
    again = _project(_to_logits(mu), K, EPS)
    np.testing.assert_allclose(again, mu, rtol=1e-4)


def test_draw__takes_the_arms_that_were_wanted_most() -> None:
    mu = jnp.tile(_project(_logits(), K, EPS)[None], (2000, 1))
    actions, wanted = _draw(jax.random.key(0), mu, K)
    order = np.argsort(-np.asarray(wanted), axis=1)[:, :K]
    np.testing.assert_array_equal(actions, order)
    # The first arm of a draw has the odds mu / (1 - mu).
    odds = np.asarray(jnp.exp(_to_logits(mu[0])))
    share = np.bincount(np.asarray(actions)[:, 0], minlength=L) / 2000
    expected = odds / odds.sum()
    sem = np.sqrt(expected * (1 - expected) / 2000)
    assert (np.abs(share - expected) < 5 * sem).all()


def test_bernoulli_kl__equals_the_formula() -> None:
    old, new = _logits(0), _logits(1)
    u, v = (1 / (1 + np.exp(-np.asarray(x, float))) for x in (old, new))
    kl = (u * np.log(u / v) + (1 - u) * np.log((1 - u) / (1 - v))).sum()
    np.testing.assert_allclose(_kl(old, new), kl, rtol=1e-5)


def _draws(logits: jax.Array) -> cem.Draws:
    mu = jnp.tile(jax.nn.sigmoid(logits)[None], (16, 1))
    actions = _draw(jax.random.key(3), mu, K)[0]
    advantages = jax.random.normal(jax.random.key(4), (16,))
    return cem.Draws(actions, _log_probs(logits, actions), advantages)


@jax.jit
def _exact(phi: jax.Array, old: jax.Array, draws: cem.Draws) -> tuple[Any, Any]:
    """The gain of the objective and the gradient of REINFORCE, by exact sums."""
    each = jax.vmap(set_log_prob_exact, in_axes=(None, 0))
    ratio = jnp.exp(each(phi, draws.actions) - each(old, draws.actions))

    def reinforce(phi: jax.Array) -> jax.Array:
        return jnp.mean(each(phi, draws.actions) * draws.advantages)

    return jnp.mean(ratio * draws.advantages), jax.grad(reinforce)(phi)


def test_proximal_objective__gradient_at_the_old_logits_is_that_of_reinforce() -> None:
    logits = _logits()
    draws = _draws(logits)
    expected = _exact(logits, logits, draws)[1]
    assert float(jnp.abs(expected).max()) > 1e-2
    for beta in (0.0, 10.0):  # the KL term has no gradient there
        grad = _value_and_grad(logits, logits, draws, beta)[1]
        np.testing.assert_allclose(grad, expected, atol=1e-5)


def test_proximal_objective__weighs_by_clipped_ratios_and_pays_for_distance() -> None:
    old = _logits()
    draws = _draws(old)
    new = old + 0.3 * _logits(1)
    expected = _exact(new, old, draws)[0] - 0.5 * _kl(old, new)
    value = _value_and_grad(new, old, draws, 0.5)[0]
    np.testing.assert_allclose(value, expected, rtol=1e-3)
    far = draws._replace(log_probs=draws.log_probs - 100.0)
    clipped = _value_and_grad(new, old, far, 0.0)[0]
    highest = np.exp(5.0) * draws.advantages.mean()
    np.testing.assert_allclose(clipped, highest, rtol=1e-5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_proximal_update__raises_what_scores_better(sign: float) -> None:
    config = CemPpoConfig(learning_rate=0.05)
    state = _start(config)
    actions = random_sets(jax.random.key(0), _objective().problem, 60)
    has_arm = jnp.any(actions == 7, axis=1)
    scores = 1e3 + sign * jnp.where(has_arm, 2.0, 1.0)
    after = _proximal_update(config, state, actions, scores)
    moved = sign * (after.mu - state.mu)
    assert float(moved[7]) > 1e-3
    assert float(moved[7]) > 5 * abs(float(jnp.delete(moved, 7).mean()))
    _assert_rates(after.mu)


def test_standardise__is_free_of_scale_and_blind_to_rounding() -> None:
    scores = jnp.asarray([1.0, 2.0, 4.0, 3.0])
    plain = _standardise(scores)
    np.testing.assert_allclose([plain.mean(), plain.std()], [0, 1], atol=1e-6)
    np.testing.assert_allclose(_standardise(1e-3 * scores - 5), plain, atol=1e-2)
    flat = jnp.asarray([1e3, 1e3, 1e3 + 1e-4, 1e3])
    np.testing.assert_array_equal(_standardise(flat), jnp.zeros((4,)))
    np.testing.assert_array_equal(_standardise(jnp.zeros((3,))), jnp.zeros((3,)))


def test_rank__counts_equal_sets_once_and_marks_what_is_missing() -> None:
    actions = jnp.asarray([[0, 1], [2, 3], [1, 0], [4, 5]], jnp.int32)
    top = _rank(actions, jnp.asarray([3.0, 1.0, 3.0, 2.0]), 5)
    assert top.actions[:3].tolist() == [[0, 1], [4, 5], [2, 3]]
    np.testing.assert_array_equal(top.scores, [3.0, 2.0, 1.0, -np.inf, -np.inf])
    # A row that is missing does not hide a set that is there.
    top = _rank(actions, jnp.asarray([-jnp.inf, 1.0, 3.0, 2.0]), 5)
    assert top.actions[:3].tolist() == [[0, 1], [4, 5], [2, 3]]


def test_cross_entropy_update__of_one_elite_is_that_set_up_to_the_bounds() -> None:
    config = CemPpoConfig(zeta=0.0)
    elites = _ranked([[1, 5, 6, 9]] * 3, [1.0, 1.0, -np.inf])
    mu = _cross_entropy_update(config, _start().mu, elites, elites)
    hot = to_multi_hot(elites.actions[0], L)
    np.testing.assert_allclose(mu, (1 - EPS) * hot + EPS * K / L, atol=1e-5)


def test_cross_entropy_update__mixes_old_rates_elites_and_best_draws() -> None:
    config = CemPpoConfig(zeta=0.6, kept_weight=0.25)
    elites = _ranked([[0, 1, 2, 3], [0, 1, 2, 4]], [2.0, 1.0])
    kept = _ranked([[0, 5, 6, 7], [8, 9, 10, 11]], [3.0, -np.inf])
    mu = _cross_entropy_update(config, _start().mu, elites, kept)
    arms = jnp.asarray([0, 1, 3, 5, 8])
    expected = 0.6 * 0.2 + 0.4 * np.array([1.0, 0.75, 0.375, 0.25, 0.0])
    np.testing.assert_allclose(mu[arms], expected, atol=1e-5)
    _assert_rates(mu)


def test_learning__finds_the_target_of_one_max() -> None:
    target = jnp.asarray([2, 3, 11, 17], jnp.int32)
    nothing = _ranked([[0, 1, 2, 3]], [-np.inf])

    def epoch(state: CemPpoState, key: jax.Array) -> tuple[CemPpoState, jax.Array]:
        mu = jnp.tile(state.mu[None], (40, 1))
        actions = cem.draw(key, mu, K)[0]
        scores = to_multi_hot(target, L)[actions].sum(axis=1)
        state = cem.proximal_update(SMALL, state, actions, scores)
        own = cem.rank(actions, scores, 4)
        return cem.end_epoch(SMALL, state, own, nothing), state.mu

    keys = jax.random.split(jax.random.key(0), 12)
    rates = np.asarray(jax.jit(lambda s: jax.lax.scan(epoch, s, keys)[1])(_start()))
    assert set(np.argsort(-rates[-1])[:K]) == set(target.tolist())
    inside = rates[:, target].sum(axis=1)
    assert inside[-1] > 0.75 * K
    np.testing.assert_allclose(rates.sum(axis=1), K, atol=1e-3)


def test_end_epoch__starts_anew_alone_and_shares_after_the_next_standstill() -> None:
    config = CemPpoConfig(patience=2)
    own = _ranked([[0, 1, 2, 4]], [1.0])
    shared = _ranked([[8, 9, 10, 11]], [9.0])
    step = jax.jit(lambda s: cem.end_epoch(config, s, own, shared))
    states = [_start(config)]
    for _ in range(8):
        states.append(step(states[-1]))
    first, second, third = states[1:4]
    assert float(first.mu[8]) > K / L  # it shares
    assert [int(s.stalled) for s in (first, second)] == [0, 1]
    np.testing.assert_array_equal(third.mu, states[0].mu)
    assert np.isneginf(third.kept.scores).all()
    alone = [bool(s.is_alone) for s in states]
    assert alone == [False, False, False, True, True, True, False, False, True]
    assert float(states[5].mu[8]) < K / L < float(states[5].mu[0])
    assert float(states[7].mu[8]) > float(states[6].mu[8])


def test_imitate_set__is_steps_towards_the_set() -> None:
    action = jnp.asarray([0, 4, 8, 12], jnp.int32)
    mu = _project(_logits(), K, EPS)
    hot, expected = to_multi_hot(action, L), mu
    for _ in range(SMALL.imitation_steps):
        expected = expected + SMALL.imitation_rate * (hot - expected)
    after = _imitate_set(SMALL, mu, action)
    # The lower bound lifts a few arms, the others give way.
    np.testing.assert_allclose(after, expected, atol=5e-3)
    assert float(jnp.abs(after - mu).max()) > 0.2
    _assert_rates(after)


def test_imitate__waits_while_the_sampler_is_alone() -> None:
    imitate = _functions()[2]
    context, action = Context(view=_view()), jnp.arange(K, dtype=jnp.int32)
    state = _start()
    taught = imitate(jax.random.key(0), state, context, action)
    assert float(taught.mu[:K].min()) > 2 * K / L
    state = state._replace(is_alone=jnp.ones((), bool))
    left = imitate(jax.random.key(0), state, context, action)
    np.testing.assert_array_equal(left.mu, state.mu)


def _run(config: CemPpoConfig, view: View, num: int) -> CemPpoState:
    update = _functions(config)[0]
    state = _start(config)
    for i in range(num):
        state = update(jax.random.key(i), state, Context(view=view))
    return state


@pytest.mark.parametrize("is_hard", [False, True])
def test_propose__gives_distinct_arms_legal_and_diverse(is_hard: bool) -> None:
    view = _view(is_hard)
    state = _run(SMALL, view, 8)
    context = Context(view=view)
    actions = np.asarray(_functions()[1](jax.random.key(1), state, context, 30))
    assert actions.shape == (30, K)
    assert actions.dtype == np.int32
    assert all(len(set(row)) == K for row in actions.tolist())
    assert len({frozenset(row) for row in actions.tolist()}) >= 10
    pairs = violated_pairs(view.problem, jnp.asarray(actions))
    if is_hard:
        assert not np.asarray(pairs).any()
    # Half of them keep most of a set played.
    hot = to_multi_hot(jnp.asarray(actions[15:]), L)
    kept = (hot @ to_multi_hot(view.elites, L).T).max(axis=1)
    assert float(kept.mean()) > K - 2


def test_update__is_free_of_the_scale_of_the_surrogate() -> None:
    view = _view()
    other = view._replace(
        model=Quadratic(
            1e-3 * view.model.pair, 1e-3 * view.model.linear, jnp.asarray(-0.5)
        ),
        pair_price=1e-3 * view.pair_price,
    )
    one, two = _run(SMALL, view, 3), _run(SMALL, other, 3)
    np.testing.assert_allclose(one.mu, two.mu, atol=1e-2)


def test_update__ignores_a_surrogate_that_broke_down() -> None:
    view, state = _view(), _run(SMALL, _view(), 2)
    broken = view._replace(model=jax.tree.map(lambda x: x * jnp.nan, view.model))
    after = _functions()[0](jax.random.key(9), state, Context(view=broken))
    for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(one, two)


def test_update__prefers_sets_without_conflict_where_repair_must_fail() -> None:
    # Arms 0..2 conflict with one another, 3 with nobody: K = 3 has one pair at least.
    graph = np.zeros((4, 4), bool)
    graph[:3, :3] = ~np.eye(3, dtype=bool)
    problem = problem_from_conflicts(graph, 3)
    view = _tiny_view(problem, jnp.asarray([5.0, 5.0, 5.0, 0.0]))
    sets = jnp.asarray([[0, 1, 2], [0, 1, 3]], jnp.int32)
    scores = cem.score_of(view, sets)
    assert float(scores[1]) > float(scores[0])


def _tiny_view(problem: Any, linear: jax.Array) -> View:
    size = problem.num_arms
    model = Quadratic(jnp.zeros((size, size)), linear, jnp.zeros(()))
    view = competence.known_view(competence.Objective(problem, model, jnp.ones(())))
    return view._replace(
        forbidden=problem.conflicts, pair_price=jnp.asarray(jnp.inf), model=model
    )


@pytest.mark.parametrize(
    ("size", "k", "graph"), [(2, 1, "none"), (3, 3, "all"), (5, 2, "all")]
)
def test_sampler__works_at_tiny_sizes(size: int, k: int, graph: str) -> None:
    conflicts = (~np.eye(size, dtype=bool)) & (graph == "all")
    problem = problem_from_conflicts(conflicts, k)
    context = Context(view=_tiny_view(problem, jnp.arange(size, dtype=jnp.float32)))
    update, propose, imitate = _functions()
    state = cem.start(SMALL, size, k)
    for i in range(3):
        state = update(jax.random.key(i), state, context)
    demonstration = jnp.arange(k, dtype=jnp.int32)
    taught = imitate(jax.random.key(7), state, context, demonstration)
    for rates in (state.mu, taught.mu):
        _assert_rates(rates, k)
    if k < size:
        assert float(state.mu[-1]) > k / size  # the best arm
    for n in (1, 16):
        actions = np.asarray(propose(jax.random.key(8), taught, context, n))
        assert actions.shape == (n, k)
        assert all(len(set(row)) == k for row in actions.tolist())


def test_sampler__jit_and_vmap_equal_one_by_one() -> None:
    update = cem_ppo(SMALL).update
    context = Context(view=_view(True))
    state = _run(SMALL, context.view, 1)
    alone = [_functions()[0](jax.random.key(i), state, context) for i in (5, 6)]
    eager = update(jax.random.key(5), state, context)
    together = jax.jit(jax.vmap(lambda i: update(jax.random.key(i), state, context)))(
        jnp.arange(5, 7)
    )
    np.testing.assert_allclose(eager.mu, alone[0].mu, atol=1e-4)
    np.testing.assert_allclose(together.mu, np.stack([s.mu for s in alone]), atol=1e-4)
    assert float(jnp.abs(alone[0].mu - alone[1].mu).max()) > 1e-3


def test_sampler__lowers_for_gpu_and_tpu() -> None:
    sampler = cem_ppo(SMALL)

    def step(key: jax.Array, state: CemPpoState, context: Context) -> Any:
        first, second, third = jax.random.split(key, 3)
        state = sampler.update(first, state, context)
        actions = sampler.propose(second, state, context, 6)
        assert sampler.imitate is not None
        return sampler.imitate(third, state, context, actions[0]), actions

    context = Context(view=_view(True))
    exported = jax.export.export(jax.jit(step), platforms=("cpu", "cuda", "tpu"))(
        jax.random.key(0), _start(), context
    )
    assert len(exported.platforms) == 3


def test_sampler__learns_a_known_objective_and_is_traced_once() -> None:
    # Without new starts, so that the last rates show what was learned.
    sampler = cem_ppo(CemPpoConfig(epoch_size=40, interval=20, patience=1000))
    objective, traces = _objective(), 0

    def update(key: jax.Array, state: CemPpoState, context: Context) -> CemPpoState:
        nonlocal traces
        traces += 1
        return sampler.update(key, state, context)

    def train(key: jax.Array, objective: competence.Objective) -> Any:
        counted = sampler._replace(update=update)
        return competence.train(key, counted, objective, refreshes=40, num_proposals=10)

    state, report = jax.jit(train)(jax.random.key(0), objective)
    assert traces == 1
    assert float(report.best) > 0.97
    # Half of the proposals are near the best sets even if nothing is learned; these
    # are from the rates alone.
    sets = _draw(jax.random.key(1), jnp.tile(state.mu[None], (200, 1)), K)[0]
    value = reward_of(_view(), sets).mean() / objective.optimum
    random = float(report.random_mean)
    assert float(value) > random + 0.6 * (1 - random)
    pairs = violated_pairs(objective.problem, sets).mean()
    assert float(pairs) < 0.5 * float(report.random_violation)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"interval": 0}, "must be positive"),
        ({"epoch_size": 50, "interval": 20}, "multiple of interval"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"epsilon": 0.0}, "in \\(0, 1\\)"),
        ({"zeta": 1.0}, "in \\[0, 1\\)"),
    ],
)
def test_config__explains_what_is_wrong(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CemPpoConfig(**changes)
