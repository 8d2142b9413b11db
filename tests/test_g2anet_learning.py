"""The learning rules of the G2ANet sampler, and that it learns by them."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.competence import make_objective, train
from msb_jax.networks.attention import G2ANet, Nets, mask_noise
from msb_jax.problem import random_feasible_sets, to_multi_hot
from msb_jax.samplers import g2anet as lib
from msb_jax.samplers.base import Context
from msb_jax.samplers.g2anet import G2ANetConfig, g2anet
from msb_jax.topk import set_log_prob_exact
from tests.g2anets import (
    CONFIG,
    F,
    H,
    K,
    L,
    random_view,
    small_problem,
    small_sampler,
    start_nets,
)

SETS = jnp.asarray(list(itertools.combinations(range(5), 2)), jnp.int32)
LOGITS = jnp.asarray([0.3, -0.5, 1.2, 0.0, -1.0])


# The learning rules.


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
    nets = start_nets(jax.random.key(0), G2ANet(5, H), F)
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
    problem = small_problem()
    view = random_view(problem)
    played = jnp.resize(random_feasible_sets(jax.random.key(5), problem, 40), (100, K))
    view = view._replace(
        model=jax.tree.map(jnp.zeros_like, view.model),
        pair_price=jnp.zeros(()),
        played=played,
        played_values=jnp.any(played == 0, axis=1).astype(jnp.float32),
        is_played=jnp.full((100,), is_played),
    )
    sampler = small_sampler()
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
    problem = small_problem()
    context = Context(random_view(problem))
    sampler = small_sampler()
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
    logits = lib.arm_logits(CONFIG, taught, scene, noise)
    assert set(np.argsort(-logits)[:3].tolist()) == {1, 6, 10}


def test_g2anet__learns_the_same_in_any_unit() -> None:
    problem = small_problem()
    view = random_view(problem)
    unit = 1e-3
    small = view._replace(
        model=jax.tree.map(lambda leaf: unit * leaf, view.model)._replace(
            offset=jnp.full((), 0.01, jnp.float32)
        ),
        pair_price=unit * view.pair_price,
        marginals=unit * view.marginals,
    )
    sampler = small_sampler()
    state = sampler.init(jax.random.key(0), problem)
    one = sampler.update(jax.random.key(1), state, Context(view)).nets.actor
    other = sampler.update(jax.random.key(1), state, Context(small)).nets.actor
    moved = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), one, other)
    assert max(jax.tree.leaves(moved)) < 2e-3  # steps of Adam are 0.02 each


def test_g2anet__remembers_its_own_good_proposals_only() -> None:
    view = random_view(small_problem())
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
