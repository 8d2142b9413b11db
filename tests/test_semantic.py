"""The semantic loss: against enumeration, at 0 and 1, and in the learners."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.competence import make_objective, train
from experiments.run_flags import RunFlags
from msb_jax import semantic
from msb_jax.problem import Problem, problem_from_conflicts
from msb_jax.samplers.base import Sampler
from msb_jax.samplers.ddpg import DdpgConfig
from msb_jax.samplers.g2anet import G2ANetConfig, g2anet
from msb_jax.samplers.registry import make_samplers
from msb_jax.samplers.wolpertinger import WolpertingerConfig, wolpertinger

exactly = jax.jit(semantic.log_exactly_k, static_argnums=1)
slope_of_exactly = jax.jit(jax.grad(semantic.log_exactly_k), static_argnums=1)
inclusion = jax.jit(semantic.inclusion, static_argnums=1)
clause_loss = jax.jit(semantic.clause_loss)
practical_loss = jax.jit(semantic.practical_loss, static_argnums=(2, 3))
# The plan of most tests at the ends of the interval, exact or not.
CHAINS = [(0, 1), (1, 2), (3, 4)]


def _graph(num_arms: int, edges: list[tuple[int, int]]) -> np.ndarray:
    graph = np.zeros((num_arms, num_arms), bool)
    for i, j in edges:
        graph[i, j] = graph[j, i] = True
    return graph


def _random_problem(seed: int, num_arms: int, k: int, density: float) -> Problem:
    rng = np.random.default_rng(seed)
    upper = np.triu(rng.random((num_arms, num_arms)) < density, 1)
    return problem_from_conflicts(upper | upper.T, k)


def _random_p(seed: int, num_arms: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.02, 0.98, num_arms)


def _probability(p: np.ndarray, k: int | None, graph: np.ndarray | None) -> float:
    """Sum over all allowed 0/1 vectors, in float64."""
    x = np.asarray(list(itertools.product((0, 1), repeat=len(p))))  # [2^L, L]
    if k is not None:
        x = x[x.sum(axis=1) == k]
    if graph is not None:
        x = x[((x @ graph) * x).sum(axis=1) == 0]
    return float(np.where(x == 1, p, 1.0 - p).prod(axis=1).sum())


def _gradient(p: np.ndarray, k: int, graph: np.ndarray | None) -> np.ndarray:
    """That of the loss: the probability is linear in every p_i."""
    slopes = []
    for i in range(len(p)):
        high, low = p.copy(), p.copy()
        high[i], low[i] = 1.0, 0.0
        slopes.append(_probability(high, k, graph) - _probability(low, k, graph))
    return -np.asarray(slopes) / _probability(p, k, graph)


def _with_slope(plan: semantic.Plan, p: Any) -> tuple[jax.Array, jax.Array]:
    """The loss of a plan and its gradient."""
    loss = functools.partial(semantic.semantic_loss, plan)
    return jax.jit(jax.value_and_grad(loss))(_f32(p))


def _joint(plan: semantic.Plan, p: Any) -> jax.Array:
    return jax.jit(functools.partial(semantic.log_joint, plan))(_f32(p))


@functools.cache
def _at_the_ends(is_exact: bool) -> Any:
    """Loss and gradient of three of six arms, compiled once."""
    plan = semantic.make_plan(problem_from_conflicts(_graph(6, CHAINS), 3))
    assert plan.obstacle is None
    if not is_exact:
        plan = plan._replace(obstacle="Not wanted.")
    return jax.jit(jax.value_and_grad(functools.partial(semantic.semantic_loss, plan)))


def _f32(p: Any) -> jax.Array:
    return jnp.asarray(p, jnp.float32)


# Exactly K.


@pytest.mark.parametrize(("num_arms", "k"), [(2, 1), (7, 0), (7, 3), (7, 7), (1, 1)])
def test_log_exactly_k__equals_enumeration(num_arms: int, k: int) -> None:
    p = _random_p(num_arms, num_arms)
    want = np.log(_probability(p, k, None))
    np.testing.assert_allclose(exactly(_f32(p), k), want, rtol=1e-5, atol=1e-6)
    grad = slope_of_exactly(_f32(p), k)
    np.testing.assert_allclose(-grad, _gradient(p, k, None), rtol=1e-4, atol=1e-5)


def test_log_exactly_k__is_a_distribution_and_does_not_underflow() -> None:
    p = _f32(_random_p(0, 6))
    total = sum(np.exp(float(exactly(p, k))) for k in range(7))
    np.testing.assert_allclose(total, 1.0, rtol=1e-5)
    # One of 300 arms, each with probability 0.99: 300 x 0.99 x 0.01^299.
    want = np.log(300 * 0.99) + 299 * np.log(0.01)
    np.testing.assert_allclose(exactly(jnp.full((300,), 0.99), 1), want, rtol=1e-4)
    grad = slope_of_exactly(jnp.full((300,), 0.99), 1)
    assert np.isfinite(grad).all()


def test_inclusion__is_the_conditional_probability_and_has_sum_k() -> None:
    p, k = _random_p(3, 7), 3
    all_x = np.asarray(list(itertools.product((0, 1), repeat=7)))
    chosen = all_x[all_x.sum(axis=1) == k]
    weights = np.where(chosen == 1, p, 1.0 - p).prod(axis=1)
    found = inclusion(_f32(p), k)
    np.testing.assert_allclose(found, weights @ chosen / weights.sum(), rtol=1e-4)
    np.testing.assert_allclose(jnp.sum(found), k, rtol=1e-5)
    # It is p_i plus the derivative in the logit of p_i, too.
    slope = jax.jit(jax.grad(lambda z: exactly(jax.nn.sigmoid(z), k)))
    logit = _f32(np.log(p / (1.0 - p)))
    np.testing.assert_allclose(found, _f32(p) + slope(logit), atol=1e-5)
    np.testing.assert_allclose(inclusion(_f32(p), 7), np.ones(7), rtol=1e-5)


# Conflicts.


def test_clause_loss__of_one_edge() -> None:
    p = jnp.asarray([0.5, 0.5])
    loss = clause_loss(p, _graph(2, [(0, 1)]))
    np.testing.assert_allclose(loss, -np.log(0.75), rtol=1e-6)


def test_clause_loss__is_exact_for_disjoint_edges_and_too_high_else() -> None:
    p = _random_p(1, 6)
    apart, star = _graph(6, [(0, 1), (2, 5)]), _graph(6, [(0, 1), (0, 2)])
    exact = -np.log(_probability(p, None, apart))
    np.testing.assert_allclose(clause_loss(_f32(p), apart), exact, rtol=1e-5)
    assert clause_loss(_f32(p), star) > -np.log(_probability(p, None, star)) + 1e-3


def test_log_joint__of_five_models() -> None:
    """Two of four arms, the first two in conflict: all pairs but one."""
    plan = semantic.make_plan(problem_from_conflicts(_graph(4, [(0, 1)]), 2))
    p = np.asarray([0.3, 0.6, 0.8, 0.1])
    models = [pair for pair in itertools.combinations(range(4), 2) if pair != (0, 1)]
    assert len(models) == 5
    total = 0.0
    for i, j in models:
        is_in = np.isin(np.arange(4), (i, j))
        total += np.where(is_in, p, 1.0 - p).prod()
    np.testing.assert_allclose(_joint(plan, p), np.log(total), rtol=1e-5)


@pytest.mark.parametrize(
    ("density", "k"), [(0.0, 3), (0.08, 1), (0.08, 4), (0.2, 3), (0.5, 2)]
)
def test_log_joint__equals_enumeration_on_random_graphs(density: float, k: int) -> None:
    problem = _random_problem(k, 9, k, density)
    graph, p = np.asarray(problem.conflicts), _random_p(k, 9)
    plan = semantic.make_plan(problem)
    assert plan.obstacle is None
    value, grad = _with_slope(plan, p)
    want = -np.log(_probability(p, k, graph))
    np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grad, _gradient(p, k, graph), rtol=1e-3, atol=1e-4)


def test_log_joint__of_many_parts_equals_the_product_of_polynomials() -> None:
    """Sixty arms in paths of three, K = 12, against NumPy in float64."""
    edges = [(3 * i + a, 3 * i + a + 1) for i in range(20) for a in (0, 1)]
    plan = semantic.make_plan(problem_from_conflicts(_graph(60, edges), 12))
    p = _random_p(2, 60)
    product = np.ones(1)
    for a, b, c in p.reshape(20, 3):
        none = (1 - a) * (1 - b) * (1 - c)
        one = a * (1 - b) * (1 - c) + (1 - a) * b * (1 - c) + (1 - a) * (1 - b) * c
        product = np.convolve(product, [none, one, a * (1 - b) * c])
    np.testing.assert_allclose(_joint(plan, p), np.log(product[12]), rtol=1e-5)


def test_make_plan__enumerates_a_part_of_twenty_arms_but_no_larger_one() -> None:
    star = [(0, i) for i in range(1, semantic.MAX_NODES)]
    graph = _graph(25, star)
    plan = semantic.make_plan(problem_from_conflicts(graph, 3))
    assert plan.obstacle is None
    p = _f32(np.full(25, 0.2))
    # Three of the 24 others, or the centre and two of the five lonely arms.
    q = 0.2**3 * 0.8**22
    want = np.log(q * (24 * 23 * 22 / 6 + 10))
    np.testing.assert_allclose(_joint(plan, p), want, rtol=1e-5)
    larger = _graph(25, [*star, (0, semantic.MAX_NODES)])
    plan = semantic.make_plan(problem_from_conflicts(larger, 3))
    with pytest.raises(ValueError, match=r"has 21 arms, but only parts of up to 20"):
        semantic.log_joint(plan, p)
    value, grad = _with_slope(plan, p)
    np.testing.assert_allclose(value, practical_loss(p, larger, 3), rtol=1e-6)
    assert np.isfinite(grad).all()


def test_make_plan__gives_up_beyond_so_many_models(monkeypatch: Any) -> None:
    monkeypatch.setattr(semantic, "MAX_MODELS", 10)
    plan = semantic.make_plan(problem_from_conflicts(_graph(8, [(0, 1)]), 2))
    assert plan.obstacle is not None
    assert "more than 10 independent sets" in plan.obstacle


def test_practical_loss__weighs_the_mean_clause() -> None:
    p = _f32(_random_p(4, 6))
    graph = jnp.asarray(_graph(6, [(0, 1), (1, 2), (4, 5)]))
    first = -exactly(p, 2)
    clauses = clause_loss(p, graph)
    np.testing.assert_allclose(practical_loss(p, graph, 2), first + clauses, rtol=1e-6)
    weighed = practical_loss(p, graph, 2, 0.6)
    np.testing.assert_allclose(weighed, first + 0.6 * clauses / 3, rtol=1e-6)
    nothing = practical_loss(p, jnp.zeros_like(graph), 2, 0.6)
    np.testing.assert_allclose(nothing, first, rtol=1e-6)


# The ends of the interval, and tiny sizes.


@pytest.mark.parametrize("is_exact", [True, False])
def test_semantic_loss__is_zero_at_allowed_sets_with_the_right_slope(
    is_exact: bool,
) -> None:
    graph, p = _graph(6, CHAINS), np.asarray([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    value, grad = _at_the_ends(is_exact)(_f32(p))
    np.testing.assert_allclose(value, 0.0, atol=1e-6)
    want = _gradient(p, 3, graph)
    if not is_exact:  # each clause has the slope p_j at p_i
        want = _gradient(p, 3, None) + graph @ p
    np.testing.assert_allclose(grad, want, atol=1e-4)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize(
    "p", [[1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0] * 6, [1] * 6]
)
def test_semantic_loss__is_high_and_finite_at_other_sets(
    p: list[int], is_exact: bool
) -> None:
    value, grad = _at_the_ends(is_exact)(_f32(p))
    assert 10.0 < value < 100.0
    assert np.isfinite(grad).all()
    assert np.abs(grad).max() > 1e3


@pytest.mark.parametrize(
    ("num_arms", "k", "is_full"),
    [(1, 1, False), (2, 1, False), (2, 1, True), (2, 2, False), (5, 1, True)],
)
def test_semantic_loss__at_tiny_sizes(num_arms: int, k: int, is_full: bool) -> None:
    graph = ~np.eye(num_arms, dtype=bool) & is_full
    plan = semantic.make_plan(problem_from_conflicts(graph, k))
    p = _random_p(5, num_arms)
    want = -np.log(_probability(p, k, graph))
    np.testing.assert_allclose(-_joint(plan, p), want, rtol=1e-5)
    # A set of one arm has no pair: the practical loss is exact too.
    if k == 1:
        loss = practical_loss(_f32(p), graph, k)
        np.testing.assert_allclose(loss, want, rtol=1e-5)


def test_semantic_loss__falls_back_where_everything_conflicts() -> None:
    graph = ~np.eye(5, dtype=bool)
    plan = semantic.make_plan(problem_from_conflicts(graph, 3))
    p = _f32(_random_p(6, 5))
    with pytest.raises(ValueError, match="No 3 arms are free of conflicts"):
        semantic.log_joint(plan, p)
    loss, grad = _with_slope(plan, p)
    want = -exactly(p, 3) + clause_loss(p, graph)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    assert np.isfinite(grad).all()


def test_semantic__explains_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"k must be in 0..3, got 4"):
        semantic.log_exactly_k(jnp.ones(3), 4)
    with pytest.raises(ValueError, match="use vmap for several"):
        semantic.inclusion(jnp.ones((2, 3)), 1)
    plan = semantic.make_plan(problem_from_conflicts(_graph(4, []), 2))
    with pytest.raises(ValueError, match="each of 4 arms"):
        semantic.log_joint(plan, jnp.ones(3))


# The learners.


@pytest.mark.parametrize("config", [G2ANetConfig, DdpgConfig])
def test_learners__take_no_negative_weight(config: Any) -> None:
    assert config().semantic == 0
    with pytest.raises(ValueError, match="semantic must"):
        config(semantic=-0.1)


def test_flags__reach_the_samplers(monkeypatch: Any) -> None:
    flags = RunFlags(semantic=0.25, off_policy=True)
    seen: dict[str, Any] = {}
    for name in ("g2anet", "wolpertinger"):
        monkeypatch.setattr(
            f"msb_jax.samplers.registry.{name}",
            lambda config, name=name: seen.update({name: config}),
        )
    make_samplers(("g2anet", "wolpertinger"), vars(flags))
    assert (seen["g2anet"].semantic, seen["g2anet"].off_policy) == (0.25, True)
    assert seen["wolpertinger"].learner.semantic == 0.25
    with pytest.raises(ValueError, match="--semantic must be at least 0"):
        RunFlags(semantic=-1.0).check({})


def _unpriced(name: str, weight: float) -> Sampler:
    """A learner that knows of conflicts by the semantic loss alone."""
    if name == "g2anet":
        return g2anet(G2ANetConfig(semantic=weight))
    learner = DdpgConfig(semantic=weight)
    return wolpertinger(WolpertingerConfig(learner=learner, lam2=0.0, eta=0.0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["g2anet", "wolpertinger"])
def test_learners__violate_less_with_it_where_conflicts_cost_nothing(name: str) -> None:
    objective = make_objective(0, form="linear", num_arms=30, k=6)

    def run(weight: float) -> Any:
        sampler = _unpriced(name, weight)
        teach = functools.partial(train, refreshes=30, pair_price=0.0)
        learn = jax.jit(lambda key: teach(key, sampler, objective)[1])
        reports = [learn(jax.random.key(seed)) for seed in (0, 1)]
        return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *reports)

    without, with_loss = run(0.0), run(0.3)
    assert with_loss.violation < 0.5 * without.violation
    # And it still learns what sets are worth.
    assert with_loss.mean > 0.5 * (1.0 + with_loss.random_mean)
