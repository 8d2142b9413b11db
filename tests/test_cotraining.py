"""Demonstrations and shared samples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from experiments.competence import known_view, make_objective
from msb_jax.agent import cotraining as co
from msb_jax.agent.pool import Elites, empty_pool, find_producers, renew_elites
from msb_jax.problem import random_sets
from msb_jax.samplers.base import View, value_of

OBJECTIVE = make_objective(0, form="linear", num_arms=12, k=3)


def _view(seed: int = 1, size: int = 8) -> View:
    pool = jnp.sort(random_sets(jax.random.key(seed), OBJECTIVE.problem, size), axis=1)
    view = known_view(OBJECTIVE)
    return view._replace(
        pool=pool,
        pool_origin=jnp.arange(size, dtype=jnp.int32) % 2,
        is_played=jnp.ones_like(view.is_played),
    )


def _state(number: int = 2, window: int = 3) -> co.CoTrainingState:
    return co.init_cotraining(number, window, OBJECTIVE.problem.k)


def test_demonstration__is_the_best_candidate_of_the_window() -> None:
    state, best = _state(), []
    for seed in range(5):
        view = _view(seed)
        state = co.observe_pool(state, view, jnp.zeros((2,)))
        best.append(float(value_of(view, view.pool).max()))
        lesson, worth = co.demonstration(state, view)
        # Three refreshes are remembered, older ones are not.
        np.testing.assert_allclose(worth, max(best[-3:]), rtol=1e-6)
        np.testing.assert_allclose(value_of(view, lesson[None])[0], worth, rtol=1e-6)


def test_has_converged__means_no_progress_and_something_to_learn() -> None:
    state = _state()
    rising = np.linspace(0.0, 1.0, 12)
    flat = np.minimum(rising * 4, 1.0)
    converged = []
    for values in zip(rising, flat, strict=True):
        state = co.observe_pool(state, _view(), jnp.asarray(values, jnp.float32))
        converged.append(np.asarray(co.has_converged(state, jnp.asarray(2.0))))
    assert not np.array(converged)[:, 0].any()
    assert not np.array(converged)[: co.WINDOW - 1].any()
    assert converged[-1][1]
    # Nothing to learn from a demonstration that is worth less.
    assert not np.asarray(co.has_converged(state, jnp.asarray(0.5))).any()


def test_private_view__hides_what_others_did() -> None:
    view = _view()
    own = jax.jit(co.private_view, static_argnums=1)(view, 1)
    mine = {tuple(row) for row in np.asarray(view.pool)[1::2].tolist()}
    assert {tuple(row) for row in np.asarray(own.pool).tolist()} == mine
    assert {tuple(row) for row in np.asarray(own.elites).tolist()} <= mine
    assert np.asarray(own.pool_origin == 1).all()
    assert not np.asarray(own.is_played).any()
    nobody = co.private_view(view, 5)
    assert np.asarray(nobody.pool_origin == -1).all()


def test_producers__keep_the_credit_of_who_found_a_set() -> None:
    a, b, c = ([0, 1, 2], [0, 1, 3], [2, 3, 4])
    pool = empty_pool(2, 3)._replace(
        actions=jnp.asarray([b, c]), producer=jnp.asarray([2, 1])
    )
    known = Elites(actions=jnp.asarray([a, a]), producer=jnp.asarray([3, 3]))
    best = jnp.asarray([[1, 0, 2], c, [4, 5, 6]])  # in any order of arms
    elites = renew_elites(known, pool, best, random_origin=0)
    np.testing.assert_array_equal(elites.producer, [3, 1, 0])
    who = find_producers(elites, jnp.asarray([a, b, c]), jnp.asarray([4, 4, 4]))
    np.testing.assert_array_equal(who, [3, 4, 1])
