"""The kernel on ordered lists, and the master with it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax.masters.kernel import combine
from msb_jax.masters.list_kernel import list_kernel, place_kernels
from msb_jax.masters.ntk_ucb import NtkUcbConfig, ntk_ucb
from msb_jax.problem import Problem, problem_from_conflicts
from msb_jax.solvers.local_search import evaluate
from msb_jax.spaces.ordered import encode, placement_problem

L, K = 8, 3
KERNEL = list_kernel()
WEIGHTS = jnp.array([0.7, 1.3, 0.4, 0.5, 0.2])


def _problem() -> Problem:
    return placement_problem(problem_from_conflicts(np.zeros((L, L), bool), K))


def _lists(n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(L)[:K] for _ in range(n)]).astype(np.int32)


def _by_hand(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The five terms of two lists of items, from the definition."""
    shapes = np.asarray(place_kernels(K), float)
    rho = np.zeros(3)
    for place, item in enumerate(a):
        for other, same in enumerate(b):
            if item == same:
                rho += shapes[:, place, other]
    return np.array([*rho, rho[0] ** 2, rho[1] ** 2])


def test_terms__equal_the_definition_and_are_1_at_home() -> None:
    problem, lists = _problem(), _lists(12)
    placed = encode(problem, jnp.asarray(lists))
    turned = placed[:, ::-1]
    terms = np.asarray(KERNEL.terms(problem, placed, turned))
    for i, j in np.ndindex(12, 12):
        np.testing.assert_allclose(
            terms[:, i, j], _by_hand(lists[i], lists[j]), rtol=1e-5
        )
    np.testing.assert_allclose(terms[:, range(12), range(12)], 1.0, rtol=1e-5)
    value = KERNEL.value(problem, WEIGHTS, placed, placed)
    np.testing.assert_allclose(np.diagonal(value), KERNEL.own(problem, WEIGHTS), 1e-5)


def test_terms__are_positive_semidefinite() -> None:
    placed = encode(_problem(), jnp.asarray(_lists(40)))
    for gram in np.asarray(KERNEL.terms(_problem(), placed, placed), float):
        assert np.linalg.eigvalsh(gram).min() > -1e-5


def test_expansion__is_exact() -> None:
    """sum_t a_t k(A_t, x) as a quadratic in x gives the kernel's own values."""
    problem = _problem()
    rows, others = (encode(problem, jnp.asarray(_lists(9, s))) for s in (1, 2))
    alpha = jnp.asarray(np.random.default_rng(0).normal(size=9), jnp.float32)
    arms = jnp.arange(problem.num_arms, dtype=jnp.int32)
    model = combine(KERNEL.expand(problem, WEIGHTS, rows, arms), alpha)
    got = jax.vmap(evaluate, (None, 0))(model, others)
    want = alpha @ KERNEL.value(problem, WEIGHTS, rows, others)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_draws__have_the_covariance_of_the_linear_terms() -> None:
    problem = _problem()
    rows = encode(problem, jnp.asarray(_lists(6, 4)))
    arms = jnp.arange(problem.num_arms, dtype=jnp.int32)
    model = KERNEL.expand(problem, WEIGHTS, rows, arms)
    drawn = KERNEL.draw(
        jax.random.split(jax.random.key(0)), problem, WEIGHTS, model, rows, arms, 20_000
    )
    hot = np.zeros((6, problem.num_arms))
    hot[np.arange(6)[:, None], np.asarray(rows)] = 1.0
    np.testing.assert_allclose(drawn.linear @ hot.T, drawn.values, atol=1e-4)
    linear = KERNEL.terms(problem, rows, rows)[:3]
    want = jnp.einsum("s,snm->nm", WEIGHTS[:3], linear)
    np.testing.assert_allclose(np.cov(drawn.values.T), want, atol=0.08)


def test_master__learns_which_item_and_where() -> None:
    """Held-out lists of a position-based reward are told from each other."""
    problem, rng = _problem(), np.random.default_rng(5)
    worth, seen = rng.random(L), np.array([1.0, 0.5, 0.2])
    lists, held = _lists(150, 6), _lists(60, 7)
    rewards = worth[lists] @ seen + 0.02 * rng.normal(size=150)
    master = ntk_ucb(NtkUcbConfig(block=10, fit_rows=128, constraints="hard"))
    state = master.init(jax.random.key(0), problem)

    @jax.jit
    def learn(state: object) -> object:
        def tell(state: object, pair: tuple) -> tuple[object, None]:
            return master.update(jax.random.key(1), state, *pair), None

        placed = encode(problem, jnp.asarray(lists))
        told = (placed, jnp.asarray(rewards, jnp.float32))
        state, _ = jax.lax.scan(tell, state, told)
        return functools.partial(master.refresh, fit=True)(jax.random.key(2), state)

    state = learn(state)
    score = jax.jit(master.score)(state, encode(problem, jnp.asarray(held)))
    truth = worth[held] @ seen
    assert np.corrcoef(score.mean, truth)[0, 1] > 0.98
    marginals = np.asarray(jax.jit(master.marginals)(state)).reshape(K, L)
    assert np.corrcoef(marginals[0], worth)[0, 1] > 0.9
    assert marginals[0].std() > 2 * marginals[2].std()
