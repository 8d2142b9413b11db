"""The G2ANet sampler: what it looks at, what it proposes, its protocol."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.problem import problem_from_conflicts, violated_pairs
from msb_jax.samplers import g2anet as lib
from msb_jax.samplers.base import Context, View
from msb_jax.samplers.g2anet import G2ANetConfig, g2anet
from tests.g2anets import CONFIG, K, L, random_view, small_problem, small_sampler

# What it looks at, and what it proposes.


def test_g2anet__looks_at_the_most_promising_arms() -> None:
    problem = small_problem(40, K)
    view = random_view(problem)
    scene = lib.look(view, jnp.zeros((40,)), 8)
    best = np.asarray(view.elites[0])
    worth = np.array(view.model.linear + 2 * view.model.pair[:, best].sum(axis=1))
    worth[best] = np.inf
    np.testing.assert_array_equal(scene.arms, np.sort(np.argsort(-worth)[:8]))
    sampler = small_sampler(max_arms=8)
    state = sampler.init(jax.random.key(0), problem)
    actions = np.asarray(sampler.propose(jax.random.key(2), state, Context(view), 200))
    outside = ~np.isin(actions, np.asarray(scene.arms))
    assert 0 < outside.mean() < 0.1
    after = jax.eval_shape(sampler.update, jax.random.key(1), state, Context(view))
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


def test_look__is_free_of_scale_and_offset() -> None:
    view = random_view(small_problem())
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


@pytest.mark.parametrize("is_hard", [False, True])
def test_g2anet__repairs_proposals_where_conflicts_are_forbidden(is_hard: bool) -> None:
    problem = small_problem()
    context = Context(random_view(problem, is_hard=is_hard))
    sampler = small_sampler()
    state = sampler.init(jax.random.key(0), problem)
    state = sampler.update(jax.random.key(1), state, context)
    actions = sampler.propose(jax.random.key(2), state, context, 60)
    pairs = np.asarray(violated_pairs(problem, actions))
    assert not pairs.any() if is_hard else pairs.any()


# The protocol.


def _close(one: Any, other: Any, atol: float = 2e-3) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, atol=atol)


def test_g2anet__eager_equals_jit() -> None:
    problem = small_problem()
    context = Context(random_view(problem))
    sampler, plain = small_sampler(), g2anet(CONFIG)
    state = sampler.init(jax.random.key(0), problem)
    after = sampler.update(jax.random.key(1), state, context)
    _close(plain.update(jax.random.key(1), state, context), after)
    actions = sampler.propose(jax.random.key(2), after, context, 7)
    alike = plain.propose(jax.random.key(2), after, context, 7)
    np.testing.assert_array_equal(alike, actions)


def test_g2anet__scan_over_seeds_traces_once_and_equals_loops() -> None:
    problem = small_problem()
    sampler = small_sampler()
    views = [random_view(problem, seed, is_hard=True) for seed in (0, 1)]
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
    problem = small_problem()
    sampler = small_sampler(hard=hard)
    context = Context(random_view(problem, is_hard=True))
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
    context = Context(random_view(problem, is_hard=graph == "all"))
    sampler = small_sampler(hard=hard, num_steps=1)
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
