"""The G2ANet sampler: its network, its learning rules, and that it learns."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.competence import Objective, known_view, make_objective, train
from msb_jax.networks import attention
from msb_jax.networks.attention import G2ANet, Nets, Scene, init_nets, mask_noise
from msb_jax.problem import (
    make_problem,
    problem_from_conflicts,
    random_feasible_sets,
    to_multi_hot,
    violated_pairs,
)
from msb_jax.samplers import g2anet as lib
from msb_jax.samplers.base import Context, Sampler, View
from msb_jax.samplers.g2anet import G2ANetConfig, g2anet
from msb_jax.topk import set_log_prob_exact
from msb_jax.types import Quadratic

A, F, H = 6, 3, 4
L, K = 12, 3
ONE = jnp.ones(())

_init_nets = jax.jit(init_nets, static_argnums=(1, 2))


def _scene(seed: int = 0) -> Scene:
    keys = jax.random.split(jax.random.key(seed), 2)
    upper = jnp.triu(jax.random.bernoulli(keys[0], 0.4, (A, A)), 1)
    return Scene(
        arms=jnp.arange(A),
        inputs=jax.random.normal(keys[1], (A, F)),
        conflicts=(upper | upper.T).astype(jnp.float32),
    )


def _net(hard: str) -> tuple[G2ANet, Any]:
    """A network whose arms have different embeddings."""
    net = G2ANet(A, H, hard)
    params = _init_nets(jax.random.key(1), net, F).actor
    noise = jax.random.normal(jax.random.key(2), (A, H))
    params["params"]["embedding"] = noise
    return net, params


def _permuted(scene: Scene, order: np.ndarray) -> Scene:
    conflicts = scene.conflicts[order][:, order]
    return Scene(scene.arms[order], scene.inputs[order], conflicts)


def _problem(num_arms: int = L, k: int = K) -> Any:
    features = np.random.default_rng(0).random((num_arms, 2))
    return make_problem(features, k, metric="ned", num_conflicts=num_arms)


def _view(problem: Any, seed: int = 0, *, is_hard: bool = False) -> View:
    rng = np.random.default_rng(seed)
    size = problem.num_arms
    pair = 0.2 * rng.normal(size=(size, size))
    model = Quadratic(
        pair=jnp.asarray((pair + pair.T) / 2, jnp.float32),
        linear=jnp.asarray(rng.normal(size=size), jnp.float32),
        offset=jnp.zeros(()),
    )
    view = known_view(Objective(problem, model, jnp.ones(())))
    if is_hard:
        view = view._replace(
            model=model,
            forbidden=problem.conflicts,
            pair_price=jnp.full((), jnp.inf, jnp.float32),
        )
    return view


_CONFIG = G2ANetConfig(num_steps=2, batch=16, hidden=H)


@functools.cache
def _sampler(**settings: Any) -> Sampler:
    """A small sampler; its functions are compiled once for all tests."""
    sampler = g2anet(dataclasses.replace(_CONFIG, **settings))
    assert sampler.imitate is not None
    return sampler._replace(
        init=jax.jit(sampler.init),
        update=jax.jit(sampler.update),
        propose=jax.jit(sampler.propose, static_argnums=3),
        imitate=jax.jit(sampler.imitate),
    )


# The network.


def _plain_weights(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    scores = np.exp(queries @ keys.T / np.sqrt(H))
    np.fill_diagonal(scores, 0.0)
    return scores / scores.sum(axis=1, keepdims=True)


def test_attend__without_cuts_is_plain_attention() -> None:
    q, k, v = np.random.default_rng(0).normal(size=(3, A, H)).astype(np.float32)
    weights, heard = jax.jit(attention.attend)(q, k, v, np.ones((A, A), np.float32))
    np.testing.assert_allclose(weights, _plain_weights(q, k), atol=1e-6)
    np.testing.assert_allclose(heard, _plain_weights(q, k) @ v, atol=1e-5)


def test_attend__cuts_after_the_softmax() -> None:
    q, k, v = np.random.default_rng(0).normal(size=(3, A, H)).astype(np.float32)
    mask = (np.random.default_rng(1).random((A, A)) < 0.5).astype(np.float32)
    weights = np.asarray(jax.jit(attention.attend)(q, k, v, mask)[0])
    assert (weights[mask == 0] == 0).all()
    # What is kept has the weight it had: nothing is renormalised.
    np.testing.assert_allclose(weights, mask * _plain_weights(q, k), atol=1e-6)


def test_g2anet__with_all_edges_cut_hears_nothing() -> None:
    net, params = _net("mlp")
    scene = _scene()

    @jax.jit
    def run(inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = net.apply(params, scene._replace(inputs=inputs), method="encode")
        x = net.apply(params, h, jnp.zeros((A, A)), method="listen")
        return x, net.apply(params, h, x, method="decide")

    heard, logits = run(scene.inputs)
    assert not np.asarray(heard).any()
    # Noise that forbids every edge does the same to the whole network.
    silent = jax.jit(net.apply)(params, scene, jnp.full((A, A), -1e9), ONE)
    np.testing.assert_allclose(silent, logits, atol=1e-6)
    other = run(scene.inputs.at[0].add(1.0))[1]
    np.testing.assert_allclose(other[1:], logits[1:], atol=1e-6)
    assert abs(other[0] - logits[0]) > 1e-3


def test_g2anet__hears_the_others_otherwise() -> None:
    net, params = _net("none")
    scene = _scene()
    run = jax.jit(lambda s: net.apply(params, s, jnp.zeros((A, A)), ONE))
    moved = scene._replace(inputs=scene.inputs.at[0].add(1.0))
    assert np.abs(np.asarray(run(scene) - run(moved)))[1:].min() > 1e-5


@pytest.mark.parametrize("hard", ["none", "mlp"])
def test_g2anet__permuted_arms_give_permuted_logits(hard: str) -> None:
    net, params = _net(hard)
    scene, order = _scene(), np.array([3, 0, 5, 1, 4, 2])
    noise = mask_noise(jax.random.key(3), A)
    run = jax.jit(lambda s, n: net.apply(params, s, n, ONE))
    permuted = run(_permuted(scene, order), noise[order][:, order])
    np.testing.assert_allclose(permuted, run(scene, noise)[order], atol=1e-5)


@pytest.mark.parametrize(("hard", "sees_others"), [("mlp", False), ("lstm", True)])
def test_hard_attention__lstm_reads_the_whole_sequence_in_both_directions(
    hard: str, sees_others: bool
) -> None:
    stage: Any = attention.PairLstm(H) if hard == "lstm" else attention.PairMlp(H)
    h = jax.random.normal(jax.random.key(0), (A, H))
    conflicts = _scene().conflicts
    params = jax.jit(stage.init)(jax.random.key(1), h, conflicts)
    slopes = jax.jit(jax.grad(lambda *x: stage.apply(params, *x)[0, 2], (0, 1)))
    edge, by_conflict = slopes(h, conflicts)
    moves = np.abs(np.asarray(edge)).sum(axis=1)
    assert moves[0] > 0
    assert moves[2] > 0
    others = moves[[1, 3, 4, 5]]
    assert (others > 0).all() if sees_others else not others.any()
    assert by_conflict[0, 2] != 0


def test_straight_through__is_a_gumbel_softmax_of_two_logits() -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    logits = jax.random.normal(keys[0], (50, 2))
    gumbel = jax.random.gumbel(keys[1], (50, 2))
    tau = jnp.asarray(0.5)

    def by_differences(logits: jax.Array) -> jax.Array:
        gap, noise = logits[:, 1] - logits[:, 0], gumbel[:, 1] - gumbel[:, 0]
        return attention.straight_through(gap, noise, tau)

    hard = np.asarray(by_differences(logits))
    assert set(hard.tolist()) == {0.0, 1.0}
    np.testing.assert_array_equal(hard, np.argmax(logits + gumbel, axis=1))
    weights = jnp.linspace(-1.0, 1.0, 50)
    ours = jax.grad(lambda x: weights @ by_differences(x))(logits)
    soft = jax.grad(lambda x: weights @ jax.nn.softmax((x + gumbel) / tau)[:, 1])
    np.testing.assert_allclose(ours, soft(logits), atol=1e-6)


@pytest.mark.parametrize("hard", ["mlp", "lstm"])
def test_g2anet__trains_the_hard_attention(hard: str) -> None:
    net, params = _net(hard)
    scene, noise = _scene(), mask_noise(jax.random.key(3), A)
    grads = jax.jit(
        jax.grad(lambda p: jnp.sum(jnp.square(net.apply(p, scene, noise, ONE))))
    )(params)
    for leaf in jax.tree.leaves(grads["params"]["pairs"]):
        assert np.isfinite(leaf).all()
        assert np.abs(leaf).max() > 0


def test_critic__is_nothing_at_first_and_knows_no_order() -> None:
    critic = _init_nets(jax.random.key(0), G2ANet(L, H), F).critic
    action = jnp.asarray([[2, 5, 7], [7, 2, 5]], jnp.int32)
    assert not np.asarray(attention.judge(critic, action)).any()
    noisy = jax.tree.map(
        lambda leaf: leaf + jnp.linspace(0.1, 1.0, leaf.size).reshape(leaf.shape),
        critic,
    )
    values = attention.judge(noisy, action)
    assert values[0] != 0
    np.testing.assert_allclose(values[0], values[1], rtol=1e-5)


# The learning rules.

SETS = jnp.asarray(list(itertools.combinations(range(5), 2)), jnp.int32)
LOGITS = jnp.asarray([0.3, -0.5, 1.2, 0.0, -1.0])


@pytest.mark.parametrize(("num_orders", "error"), [(0, 1e-5), (200, 0.03)])
def test_actor_loss__has_the_gradient_of_the_expected_score(
    num_orders: int, error: float
) -> None:
    scores = jax.random.normal(jax.random.key(0), (10,)) + 3.0
    log_prob = jax.vmap(set_log_prob_exact, in_axes=(None, 0))
    exact = jax.grad(lambda x: jnp.sum(jnp.exp(log_prob(x, SETS)) * scores))(LOGITS)
    # The mean over all pairs of sets, each with its probability.
    pairs = jnp.asarray(list(itertools.product(range(10), range(10))))
    chance = jnp.prod(jnp.exp(log_prob(LOGITS, SETS))[pairs], axis=1)

    def loss(x: jax.Array) -> jax.Array:
        keys = jax.random.split(jax.random.key(1), 100)
        each = jax.vmap(lambda key, s, v: lib.actor_loss(key, x, s, v, num_orders))
        return chance @ each(keys, SETS[pairs], scores[pairs])

    np.testing.assert_allclose(-jax.jit(jax.grad(loss))(LOGITS), exact, atol=error)


def _entropy(logits: jax.Array) -> jax.Array:
    return -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits))


def test_soften__keeps_the_entropy_and_only_then_acts() -> None:
    sharp = 4.0 * jax.random.normal(jax.random.key(0), (60,))
    soften = jax.jit(lib.soften, static_argnums=(1, 2))
    cold, warm = jnp.zeros(()), jnp.ones(())
    np.testing.assert_allclose(
        _entropy(soften(sharp, 6, 1.5, cold)), np.log(9), atol=1e-4
    )
    halfway = np.log(np.sqrt(6 * 60))
    np.testing.assert_allclose(
        _entropy(soften(sharp, 6, 1.5, warm)), halfway, atol=1e-4
    )
    flat = 0.1 * sharp
    np.testing.assert_array_equal(soften(flat, 6, 1.5, warm), flat)
    # The size of the logits makes no difference, even if they are saturated.
    np.testing.assert_allclose(
        soften(30.0 * sharp, 6, 1.5, cold), soften(sharp, 6, 1.5, cold), atol=1e-3
    )


def test_soften__has_the_gradient_of_what_it_does() -> None:
    sharp = 4.0 * jax.random.normal(jax.random.key(0), (20,))
    step = jax.random.normal(jax.random.key(1), (20,))
    weights = jax.random.normal(jax.random.key(2), (20,))
    run = jax.jit(lambda x: weights @ lib.soften(x, 4, 1.5, jnp.zeros(())))
    slope = jax.grad(run)(sharp) @ step
    ahead, back = run(sharp + 0.01 * step), run(sharp - 0.01 * step)
    np.testing.assert_allclose(slope, (ahead - back) / 0.02, rtol=1e-2)
    assert abs(jax.grad(run)(sharp) @ sharp) < 1e-3


def test_critic_loss__counts_known_rows_only_and_falls() -> None:
    nets = _init_nets(jax.random.key(0), G2ANet(5, H), F)
    targets = jnp.where(jnp.any(SETS == 2, axis=1), 1.0, -1.0)
    is_known = jnp.arange(10) < 8
    first = lib.critic_loss(nets.critic, SETS, targets, is_known)
    np.testing.assert_allclose(first, 1.0)
    spoiled = jnp.where(is_known, targets, jnp.nan)

    def loss(nets: Nets, _: jax.Array) -> jax.Array:
        return lib.critic_loss(nets.critic, SETS, spoiled, is_known)

    config = G2ANetConfig()
    opt = lib._adam(config).init(nets)
    fit = jax.jit(lambda n, o: lib.descend(config, loss, n, o, 100)[0])
    last = lib.critic_loss(fit(nets, opt).critic, SETS, targets, is_known)
    assert last < 0.1
    nobody = lib.critic_loss(nets.critic, SETS, targets, jnp.zeros((10,), bool))
    assert nobody == 0


# The sampler.


def _share_of_arm_0(*, is_played: bool) -> float:
    """Among proposals, when the surrogate is flat but rounds with arm 0 paid well."""
    problem = _problem()
    view = _view(problem)
    played = jnp.resize(random_feasible_sets(jax.random.key(5), problem, 40), (100, K))
    view = view._replace(
        model=jax.tree.map(jnp.zeros_like, view.model),
        pair_price=jnp.zeros(()),
        played=played,
        played_values=jnp.any(played == 0, axis=1).astype(jnp.float32),
        is_played=jnp.full((100,), is_played),
    )
    sampler = _sampler()
    state = sampler.init(jax.random.key(0), problem)
    for t in range(60):
        state = sampler.update(jax.random.key(t), state, Context(view))
    actions = sampler.propose(jax.random.key(999), state, Context(view), 60)
    return float(jnp.mean(jnp.any(actions == 0, axis=1)))


def test_g2anet__follows_what_the_critic_learned_from_rounds_played() -> None:
    assert _share_of_arm_0(is_played=True) > 0.75
    assert _share_of_arm_0(is_played=False) < 0.6


@pytest.mark.parametrize(
    ("is_taught", "refreshes", "settings"),
    [
        (False, 40, {}),
        (True, 20, {"hard": "lstm", "num_permutations": 8, "imitation_steps": 5}),
    ],
)
def test_g2anet__learns_a_known_objective(
    is_taught: bool, refreshes: int, settings: dict[str, Any]
) -> None:
    objective = make_objective(3, form="linear", num_arms=20, k=4)
    sampler = g2anet(G2ANetConfig(**settings))
    run = functools.partial(train, refreshes=refreshes, demonstrations=is_taught)
    key = jax.random.key(0)
    _, report = jax.jit(lambda key: run(key, sampler, objective))(key)
    assert report.best > 0.95
    assert report.mean > 0.5 * (1.0 + report.random_mean)
    assert report.violation < 0.5 * report.random_violation


def test_g2anet__imitates_a_demonstration() -> None:
    problem = _problem()
    context = Context(_view(problem))
    sampler = _sampler()
    assert sampler.imitate is not None
    state = sampler.init(jax.random.key(0), problem)
    lesson = jnp.asarray([1, 6, 10], jnp.int32)
    taught = sampler.imitate(jax.random.key(1), state, context, lesson)

    def hits(state: Any) -> float:
        actions = sampler.propose(jax.random.key(2), state, context, 60)
        return float(jnp.mean(to_multi_hot(actions, L)[:, lesson]))

    assert hits(taught) > 2 * hits(state)
    scene = lib.look(context.view, state.frequency, 320)
    noise = mask_noise(jax.random.key(3), L)
    logits = lib.arm_logits(_CONFIG, taught, scene, noise)
    assert set(np.argsort(-logits)[:3].tolist()) == {1, 6, 10}


def test_g2anet__looks_at_the_most_promising_arms() -> None:
    problem = _problem(40, K)
    view = _view(problem)
    scene = lib.look(view, jnp.zeros((40,)), 8)
    best = np.asarray(view.elites[0])
    worth = np.array(view.model.linear + 2 * view.model.pair[:, best].sum(axis=1))
    worth[best] = np.inf
    np.testing.assert_array_equal(scene.arms, np.sort(np.argsort(-worth)[:8]))
    sampler = _sampler(max_arms=8)
    state = sampler.init(jax.random.key(0), problem)
    actions = np.asarray(sampler.propose(jax.random.key(2), state, Context(view), 200))
    outside = ~np.isin(actions, np.asarray(scene.arms))
    assert 0 < outside.mean() < 0.1
    after = jax.eval_shape(sampler.update, jax.random.key(1), state, Context(view))
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


def test_look__is_free_of_scale_and_offset() -> None:
    view = _view(_problem())
    far = view._replace(
        model=jax.tree.map(lambda leaf: 1e3 * leaf, view.model),
        marginals=1e3 * view.marginals + 50.0,
        problem=view.problem.__class__(
            features=5.0 * view.problem.features - 2.0,
            conflicts=view.problem.conflicts,
            num_conflicts=view.problem.num_conflicts,
            k=K,
        ),
    )
    share = jnp.full((L,), 0.25)
    near = lib.look(view, share, 320)
    np.testing.assert_allclose(lib.look(far, share, 320).inputs, near.inputs, atol=1e-3)


def test_g2anet__learns_the_same_in_any_unit() -> None:
    problem = _problem()
    view = _view(problem)
    unit = 1e-3
    small = view._replace(
        model=jax.tree.map(lambda leaf: unit * leaf, view.model)._replace(
            offset=jnp.full((), 0.01, jnp.float32)
        ),
        pair_price=unit * view.pair_price,
        marginals=unit * view.marginals,
    )
    sampler = _sampler()
    state = sampler.init(jax.random.key(0), problem)
    one = sampler.update(jax.random.key(1), state, Context(view)).nets.actor
    other = sampler.update(jax.random.key(1), state, Context(small)).nets.actor
    moved = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), one, other)
    assert max(jax.tree.leaves(moved)) < 2e-3  # steps of Adam are 0.02 each


@pytest.mark.parametrize("is_hard", [False, True])
def test_g2anet__repairs_proposals_where_conflicts_are_forbidden(is_hard: bool) -> None:
    problem = _problem()
    context = Context(_view(problem, is_hard=is_hard))
    sampler = _sampler()
    state = sampler.init(jax.random.key(0), problem)
    state = sampler.update(jax.random.key(1), state, context)
    actions = sampler.propose(jax.random.key(2), state, context, 60)
    pairs = np.asarray(violated_pairs(problem, actions))
    assert not pairs.any() if is_hard else pairs.any()


def test_g2anet__remembers_its_own_good_proposals_only() -> None:
    view = _view(_problem())
    pool = jnp.asarray([[0, 1, 2], [3, 4, 5], [6, 7, 8]], jnp.int32)
    model = jax.tree.map(jnp.zeros_like, view.model)
    view = view._replace(
        model=model._replace(linear=model.linear.at[:3].set(1.0).at[6:9].set(5.0)),
        pool=pool,
        pool_origin=jnp.asarray([4, 4, 2], jnp.int32),
    )
    after = lib._remember(jnp.full((L,), 0.25), Context(view, origin=4))
    np.testing.assert_allclose(after[:3], 0.9 * 0.25 + 0.1, rtol=1e-6)
    np.testing.assert_allclose(after[3:], 0.9 * 0.25, rtol=1e-6)
    alone = lib._remember(jnp.full((L,), 0.25), Context(view, origin=1))
    np.testing.assert_allclose(alone, 0.25, rtol=1e-6)


# The protocol.


def _close(one: Any, other: Any, atol: float = 2e-3) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, atol=atol)


def test_g2anet__eager_equals_jit() -> None:
    problem = _problem()
    context = Context(_view(problem))
    sampler, plain = _sampler(), g2anet(_CONFIG)
    state = sampler.init(jax.random.key(0), problem)
    after = sampler.update(jax.random.key(1), state, context)
    _close(plain.update(jax.random.key(1), state, context), after)
    actions = sampler.propose(jax.random.key(2), after, context, 7)
    alike = plain.propose(jax.random.key(2), after, context, 7)
    np.testing.assert_array_equal(alike, actions)


def test_g2anet__scan_over_seeds_traces_once_and_equals_loops() -> None:
    problem = _problem()
    sampler = _sampler()
    views = [_view(problem, seed, is_hard=True) for seed in (0, 1)]
    start = sampler.init(jax.random.key(0), problem)
    traces = 0

    def refresh(
        key: jax.Array, state: Any, view: View, t: jax.Array
    ) -> tuple[Any, jax.Array]:
        nonlocal traces
        traces += 1
        keys = jax.random.split(jax.random.fold_in(key, t))
        state = sampler.update(keys[0], state, Context(view))
        return state, sampler.propose(keys[1], state, Context(view), 7)

    @jax.jit
    @jax.vmap
    def run(seed: jax.Array, view: View) -> tuple[Any, jax.Array]:
        step = functools.partial(refresh, jax.random.key(seed))
        return jax.lax.scan(lambda state, t: step(state, view, t), start, jnp.arange(3))

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *views)
    states, actions = run(jnp.arange(2), stacked)
    assert traces == 1
    for seed, view in enumerate(views):
        state = start
        for t in range(3):
            state, alone = refresh(jax.random.key(seed), state, view, jnp.asarray(t))
        _close(state, jax.tree.map(lambda leaf, i=seed: leaf[i], states))
        np.testing.assert_array_equal(actions[seed, -1], alone)


@pytest.mark.parametrize("hard", ["mlp", "lstm"])
def test_g2anet__lowers_for_gpu_and_tpu(hard: str) -> None:
    problem = _problem()
    sampler = _sampler(hard=hard)
    context = Context(_view(problem, is_hard=True))
    state = sampler.init(jax.random.key(0), problem)

    def refresh(key: jax.Array, state: Any, context: Context) -> tuple[Any, jax.Array]:
        keys = jax.random.split(key, 3)
        assert sampler.imitate is not None
        state = sampler.update(keys[0], state, context)
        state = sampler.imitate(keys[1], state, context, context.view.elites[0])
        return state, sampler.propose(keys[2], state, context, 5)

    exported = jax.export.export(jax.jit(refresh), platforms=("cpu", "cuda", "tpu"))
    assert len(exported(jax.random.key(0), state, context).platforms) == 3


@pytest.mark.parametrize(
    ("hard", "size", "k", "graph"),
    [
        ("mlp", 2, 1, "none"),
        ("lstm", 3, 3, "all"),
        ("mlp", 5, 2, "all"),
    ],
)
def test_g2anet__works_at_tiny_sizes(hard: str, size: int, k: int, graph: str) -> None:
    conflicts = (~np.eye(size, dtype=bool)) & (graph == "all")
    problem = problem_from_conflicts(conflicts, k)
    context = Context(_view(problem, is_hard=graph == "all"))
    sampler = _sampler(hard=hard, num_steps=1)
    state = sampler.init(jax.random.key(0), problem)
    state = sampler.update(jax.random.key(1), state, context)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    actions = np.asarray(sampler.propose(jax.random.key(2), state, context, 9))
    assert actions.shape == (9, k)
    assert actions.dtype == np.int32
    assert all(len(set(row)) == k for row in actions.tolist())
    assert actions.min() >= 0
    assert actions.max() < size


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hard": "gru"}, "hard must be one of mlp, lstm, none"),
        ({"batch": 1}, "batch must be at least 2"),
        ({"hesitation": 0.5}, "hesitation must be at least 1"),
        ({"hard_price": -1.0}, "hard_price must be at least 0"),
        ({"learning_rate": 0.0}, "must be positive"),
        ({"temperatures": ()}, "must be positive"),
    ],
)
def test_config__explains_what_is_wrong(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        G2ANetConfig(**settings)
