"""The neural master: what it learns, how sure it is, and that nothing depends on
how the rounds were cut into refreshes, batches or capacities."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from msb_jax.masters.neural_state import NeuralUcbConfig, NeuralUcbState
from msb_jax.masters.neural_ucb import neural_ucb
from msb_jax.networks import ucb
from msb_jax.problem import Problem, problem_from_conflicts
from msb_jax.types import Master
from tests.reference import multi_hot

L, K, ROWS = 10, 3, 40
EDGES = np.array([[0, 1], [2, 3], [4, 5]])
SMALL: dict[str, Any] = {
    "width": 16,
    "nu": 0.2,
    "num_steps": 30,
    "batch_size": 16,
    "capacity": 64,
    "block": 8,
    "extractor_sets": 8,
}
# The paper as printed: gradient steps from theta_0, no linear part, gamma_t.
LITERAL: dict[str, Any] = {
    "training": "literal",
    "radius_kind": "theory",
    "num_steps": 400,
    "linear_part": False,
    "lam1": 0.05,
}
BY_ADAM: dict[str, Any] = {"num_steps": 200, "linear_part": False, "lam1": 0.05}
NEW = np.array([[0, 1, 2], [1, 4, 9], [3, 6, 8], [5, 7, 9], [2, 3, 0]], np.int32)


def _problem() -> Problem:
    return problem_from_conflicts(EDGES, K, num_arms=L)


@functools.cache
def _make(**changes: Any) -> Master:
    """Return the master with its functions compiled."""
    master = neural_ucb(NeuralUcbConfig(**(SMALL | changes)))
    return master._replace(
        init=jax.jit(master.init),
        refresh=jax.jit(master.refresh, static_argnames="fit"),
        belief=jax.jit(master.belief),
        score=jax.jit(master.score),
        radius=jax.jit(master.radius),
    )


def _rounds(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random sets with a reward that is curved in a linear function of the set."""
    rng = np.random.default_rng(seed)
    worth = np.random.default_rng(99).random(L)
    sets = np.stack([rng.permutation(L)[:K] for _ in range(n)]).astype(np.int32)
    level = multi_hot(sets, L) @ worth
    return sets, (5.0 + level**3).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def _tell(master: Master, state: Any, sets: jax.Array, rewards: jax.Array) -> Any:
    def one(state: Any, told: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        return master.update(jax.random.key(0), state, *told), None

    return jax.lax.scan(one, state, (sets, rewards))[0]


@functools.cache
def _learned(n: int = ROWS, **changes: Any) -> NeuralUcbState:
    master = _make(**changes)
    state = master.init(jax.random.key(1), _problem())
    state = _tell(master, state, *_rounds(n))
    return master.refresh(jax.random.key(2), state, fit=True)


def _close(a: Any, b: Any, rtol: float = 1e-3, atol: float = 1e-3) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


def test_update__only_appends_a_round():
    master = _make()
    state = master.init(jax.random.key(1), _problem())
    sets, rewards = _rounds(1)
    told = _tell(master, state, sets, rewards)
    assert int(told.history.count) == 1
    assert int(told.history.absorbed) == 0
    np.testing.assert_array_equal(told.history.actions[0], sets[0])
    _close(told._replace(history=state.history), state, 0, 0)


@pytest.mark.parametrize("training", ["adam", "literal"])
def test_refresh__the_network_alone_learns_a_curved_reward(training):
    """At theta_0 the error is the variance and the correlation is 0."""
    changes = LITERAL if training == "literal" else BY_ADAM
    master, state = _make(**changes), _learned(**changes)
    sets, rewards = _rounds(200, seed=5)
    expected = np.asarray(master.score(state, sets).mean)
    assert np.corrcoef(expected, rewards)[0, 1] > 0.95
    seen = _rounds(ROWS)[1]
    error = np.mean((np.asarray(state.fitted)[:ROWS] - seen) ** 2)
    assert error < 0.05 * seen.var()


def test_refresh__linear_part_makes_linear_rewards_as_good_as_ridge():
    master = _make()
    rng = np.random.default_rng(3)
    worth = rng.random(L)
    sets = np.stack([rng.permutation(L)[:K] for _ in range(60)]).astype(np.int32)
    truth = multi_hot(sets, L) @ worth
    rewards = (truth + 0.3 * rng.normal(size=60)).astype(np.float32)
    state = master.init(jax.random.key(1), _problem())
    for start in range(0, 60, 20):
        part = slice(start, start + 20)
        state = _tell(master, state, sets[part], rewards[part])
        state = master.refresh(jax.random.key(start), state, fit=True)
    test = np.stack([rng.permutation(L)[:K] for _ in range(200)]).astype(np.int32)
    wanted = multi_hot(test, L) @ worth
    x, at = multi_hot(sets, L), multi_hot(test, L)

    def ridge_error(rho: float) -> float:
        level = rewards.mean()
        weights = np.linalg.solve(x.T @ x + rho * np.eye(L), x.T @ (rewards - level))
        return float(np.mean((at @ weights + level - wanted) ** 2))

    best = min(ridge_error(rho) for rho in (0.1, 0.3, 1.0, 3.0, 10.0, 30.0))
    got = np.mean((np.asarray(master.score(state, test).mean) - wanted) ** 2)
    assert got < 1.5 * best


def test_refresh__in_blocks_equals_at_once():
    """Everything but the gate, which looks at one block after the other."""
    small, large = _learned(ROWS, block=8), _learned(ROWS, block=64)
    _close(small.confidence, large.confidence)
    _close(small.ridge, large.ridge)
    _close(small.params, large.params, atol=1e-2)


def test_refresh__takes_rows_at_the_weights_they_were_played_with():
    """Rows of the first refresh stay as they were at theta_0."""
    master = _make()
    first = _learned(ROWS)
    sets, rewards = _rounds(8, seed=7)
    state = _tell(master, first, sets, rewards)
    second = master.refresh(jax.random.key(3), state, fit=True)
    old, new = first.confidence.rows, second.confidence.rows
    np.testing.assert_array_equal(old.deltas[:ROWS], new.deltas[:ROWS])
    net = ucb.UcbNet(L, SMALL["width"], 2)
    grads = jax.jit(lambda params, sets: ucb.factors(net, params, sets).deltas)
    start = grads(first.params_0, _rounds(ROWS)[0])
    np.testing.assert_allclose(old.deltas[:ROWS], start, rtol=1e-5)
    played = grads(first.params, sets)
    got = new.deltas[ROWS : ROWS + 8]
    np.testing.assert_allclose(got, played, rtol=1e-4, atol=1e-5)
    assert int(second.history.absorbed) == ROWS + 8


@pytest.mark.parametrize("kind", ["exact", "diagonal", "full"])
def test_belief__agrees_with_score_and_conditions_like_z(kind):
    master, state = _make(confidence=kind), _learned(confidence=kind)
    actions = jnp.asarray(NEW)
    belief, score = master.belief(state, actions), master.score(state, actions)
    np.testing.assert_allclose(belief.mean, score.mean, rtol=1e-5)
    deviation = np.sqrt(np.diagonal(belief.cov))
    radius = float(master.radius(state))
    np.testing.assert_allclose(radius * deviation, score.bonus, rtol=1e-3)
    if kind == "diagonal":
        return
    # Conditioning on one play of a set equals taking its gradient into Z.
    scale = float(state.scale)
    before = deviation[0] / scale
    column = np.asarray(belief.cov)[:, 0]
    after = belief.cov[0, 0] - column[0] ** 2 / (column[0] + belief.noise)
    np.testing.assert_allclose(
        np.sqrt(after) / scale, before / np.sqrt(1 + before**2), rtol=1e-3
    )


def test_score__subtracts_conflicts_softly_or_first():
    state, actions = _learned(), jnp.asarray(NEW)
    soft = _make().score(state, actions)
    conflicts = np.array([1, 0, 0, 0, 1])
    np.testing.assert_allclose(soft.violation, conflicts / 3, rtol=1e-6)
    np.testing.assert_allclose(
        soft.total, soft.mean + soft.bonus - 5.0 * soft.violation, rtol=1e-5
    )
    hard = _make(constraints="hard").score(state, actions)
    upper = np.asarray(hard.mean + hard.bonus)
    order = sorted(range(5), key=lambda i: (conflicts[i], -upper[i]))
    np.testing.assert_array_equal(np.argsort(-np.asarray(hard.total)), order)


def test_radius__theory_follows_the_formula():
    state, lam1 = _learned(**LITERAL), LITERAL["lam1"]
    rows = jax.tree.map(lambda x: np.asarray(x)[:ROWS], state.confidence.rows)
    flat = ucb.flat_gradients(rows, L, SMALL["width"])
    seen = np.asarray(flat, np.float64) / np.sqrt(SMALL["width"])
    log_det = np.linalg.slogdet(np.eye(ROWS) + seen @ seen.T / lam1)[1]
    left = 1 - lam1 / (lam1 + 2 * ROWS)  # 1 - eta m lam1
    misfit = (lam1 + 2 * ROWS) * left**200 * np.sqrt(ROWS / lam1)
    expected = np.sqrt(lam1) + 0.2 * np.sqrt(log_det - 2 * np.log(0.1))
    np.testing.assert_allclose(
        _make(**LITERAL).radius(state), expected + misfit, rtol=1e-4
    )
    by_adam = _make(**(LITERAL | {"training": "adam"}))
    np.testing.assert_allclose(by_adam.radius(state), expected, rtol=1e-4)
    assert float(_make().radius(state)) == pytest.approx(0.2)


@pytest.mark.parametrize("extractor", ["least_squares", "paper"])
def test_quadratic__speaks_of_the_mean_in_reward_units(extractor):
    """Both extractors rank sets like the mean; the fitted one also has its level."""
    master, state = _make(extractor=extractor), _learned()
    arms = jnp.arange(L, dtype=jnp.int32)
    model = jax.jit(master.quadratic)(state, arms)
    sets = _rounds(100, seed=8)[0]
    x = multi_hot(sets, L)
    value = np.einsum("ni,ij,nj->n", x, np.asarray(model.pair, np.float64), x)
    value = value + x @ np.asarray(model.linear) + float(model.offset)
    mean = np.asarray(_make().score(state, sets).mean)
    assert np.corrcoef(value, mean)[0, 1] > 0.9
    marginals = np.asarray(jax.jit(master.marginals)(state))
    assert np.corrcoef(x @ marginals, mean)[0, 1] > 0.9
    if extractor == "least_squares":
        assert np.abs(value - mean).mean() < 0.5 * mean.std()


def test_draws__vary_around_the_model():
    master, state = _make(), _learned()
    arms = jnp.array([8, 1, 4, 5], jnp.int32)
    model = jax.jit(master.quadratic)(state, arms)
    n = 2000
    draw = jax.jit(master.draws, static_argnums=3)
    draws = draw(jax.random.key(0), state, arms, n)
    assert draws.pair.shape == (n, 4, 4) and draws.offset.shape == (n,)
    spread = np.std(draws.linear, axis=0)
    assert (spread > 0).all()
    gap = np.asarray(draws.linear).mean(axis=0) - np.asarray(model.linear)
    assert np.all(np.abs(gap) < 5 * spread / np.sqrt(n))


def test_grow__changes_nothing_but_the_room():
    master, state = _make(), _learned()
    grown = master.grow(state, 96)
    assert grown.history.rewards.shape == (96,) and grown.fitted.shape == (96,)
    _close(master.belief(grown, NEW), master.belief(state, NEW), 1e-5, 1e-5)
    assert master.grow(grown, 64) is grown


def test_refresh__batch_equals_one_by_one_even_at_different_lengths():
    """Runs of a batch may have told different numbers of rounds."""
    master = _make()
    lengths, seeds = (12, ROWS), (3, 4)
    start = master.init(jax.random.key(1), _problem())
    told = [_tell(master, start, *_rounds(length)) for length in lengths]
    alone = [
        master.refresh(jax.random.key(seed), state, fit=True)
        for seed, state in zip(seeds, told, strict=True)
    ]
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *told)
    together = jax.jit(jax.vmap(functools.partial(master.refresh, fit=True)))
    got = together(jax.vmap(jax.random.key)(jnp.array(seeds)), batch)
    np.testing.assert_array_equal(got.history.absorbed, lengths)
    for index, expected in enumerate(alone):
        mine = jax.tree.map(lambda leaf, index=index: leaf[index], got)
        _close(master.belief(mine, NEW), master.belief(expected, NEW))


@pytest.mark.parametrize("name", ["update", "refresh", "score", "belief", "draws"])
def test_neural_ucb__lowers_for_every_platform(name):
    master = neural_ucb(NeuralUcbConfig(**(SMALL | {"num_steps": 2})))
    state = jax.eval_shape(master.init, jax.random.key(0), _problem())
    key = jax.eval_shape(lambda: jax.random.key(0))
    actions = jax.ShapeDtypeStruct((5, K), jnp.int32)
    arms = jax.ShapeDtypeStruct((4,), jnp.int32)
    calls = {
        "update": (lambda k, s, a, r: master.update(k, s, a[0], r), (key, state)),
        "refresh": (master.refresh, (key, state)),
        "score": (master.score, (state, actions)),
        "belief": (master.belief, (state, actions)),
        "draws": (lambda k, s, a: master.draws(k, s, a, 3), (key, state, arms)),
    }
    function, args = calls[name]
    if name == "update":
        args = (*args, actions, jax.ShapeDtypeStruct((), jnp.float32))
    platforms = ("cpu", "cuda", "tpu")
    lowered = export.export(jax.jit(function), platforms=platforms)(*args)
    assert lowered.platforms == platforms


@pytest.mark.parametrize(("num_arms", "k"), [(2, 1), (5, 5)])
def test_neural_ucb__works_at_tiny_sizes(num_arms, k):
    every = np.array([(i, j) for i in range(num_arms) for j in range(i)])
    problem = problem_from_conflicts(every, k, num_arms=num_arms)
    master = neural_ucb(
        NeuralUcbConfig(width=2, num_steps=2, batch_size=4, capacity=4, block=3)
    )

    action = jnp.arange(k, dtype=jnp.int32)
    refresh = jax.jit(functools.partial(master.refresh, fit=True))
    state = jax.jit(master.init)(jax.random.key(0), problem)
    state = refresh(jax.random.key(1), state)  # nothing told yet
    state = master.update(jax.random.key(2), state, action, jnp.asarray(2.0))
    state = refresh(jax.random.key(3), state)
    arms = jnp.arange(num_arms, dtype=jnp.int32)
    look = jax.jit(lambda s: (master.score(s, action[None]), master.quadratic(s, arms)))
    score, model = look(state)
    np.testing.assert_allclose(score.mean, [2.0], atol=1e-4)
    np.testing.assert_allclose(score.violation, [float(k > 1) * (k == num_arms)])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((score, model)))


def test_init__gives_a_state_that_can_be_donated():
    """No buffer stands in two places of the state."""
    state = neural_ucb(NeuralUcbConfig(**SMALL)).init(jax.random.key(0), _problem())
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    used = [
        p for p, leaf in zip(pointers, jax.tree.leaves(state), strict=True) if leaf.size
    ]
    assert len(set(used)) == len(used)


def test_due__asks_for_a_fit_on_a_geometric_schedule():
    master = _make()
    empty = master.init(jax.random.key(1), _problem())
    assert not master.due(empty)
    assert master.due(_tell(master, empty, *_rounds(1)))
    state = _learned()
    assert not master.due(state)
    assert master.due(_tell(master, state, *_rounds(20)))


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 7},
        {"depth": 0},
        {"lam1": 0.0},
        {"nu": -1.0},
        {"confidence": "none"},
        {"training": "sgd"},
        {"radius_kind": "big"},
        {"extractor": "cubic"},
        {"num_steps": 0},
        {"delta": 1.0},
        {"extractor_spread": 0.0},
        {"learning_rate": 0.0},
        {"fit_growth": 1.0},
        {"constraints": "firm"},
        {"radius_kind": "theory", "training": "literal", "learning_rate": 1.0},
    ],
)
def test_config__refuses_with_a_sentence(changes):
    with pytest.raises(ValueError, match=r"must|needs"):
        NeuralUcbConfig(**changes)
