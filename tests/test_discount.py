"""Forgetting: the recursions, their Gram form, and the masters that use them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.agent.master_slave import MasterSlaveConfig, master_slave
from msb_jax.agent.pool import condition
from msb_jax.masters import discount as forget
from msb_jax.masters import evidence, set_kernel
from msb_jax.masters import history as hist
from msb_jax.masters.discounted_confidence import discounted_confidence
from msb_jax.masters.kalman_ucb import KalmanUcbConfig, kalman_ucb
from msb_jax.masters.neural_ucb import NeuralUcbConfig, neural_ucb
from msb_jax.masters.ntk_ucb import NtkUcbConfig, ntk_ucb
from msb_jax.networks import ucb
from msb_jax.problem import Problem, problem_from_conflicts, stack_problems
from msb_jax.samplers.registry import PLAIN, make_samplers
from msb_jax.types import Master
from tests.reference import multi_hot

L, K, ROWS = 12, 3, 40
EDGES = np.array([[0, 1], [2, 3], [4, 5]])
GAMMA, LAM1 = 0.9, 0.7
ALMOST_ONE = 0.9999999
NTK: dict[str, Any] = {"block": 10, "fit_rows": 64, "fit_steps": 15, "memory": 60}
NEURAL: dict[str, Any] = {
    "width": 8,
    "num_steps": 20,
    "batch_size": 16,
    "capacity": 64,
    "block": 10,
    "extractor_sets": 4,
    "memory": 60,
}
KEY = functools.partial(jax.random.key, 0)


def _problem() -> Problem:
    return problem_from_conflicts(EDGES, K, num_arms=L)


def _sets(n: int, seed: int) -> np.ndarray:
    """Distinct random sets: int32[n, K]."""
    rng = np.random.default_rng(seed)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < n:
        found[tuple(np.sort(rng.permutation(L)[:K]).tolist())] = None
    return np.array(list(found), np.int32)


def _stream(
    n: int, switch: int | None = None, noise: float = 0.1
) -> tuple[np.ndarray, np.ndarray]:
    """Random sets, and rewards whose weights are reversed at a round."""
    rng = np.random.default_rng(3)
    worth = np.sort(rng.random(L))
    sets = np.stack([rng.permutation(L)[:K] for _ in range(n)]).astype(np.int32)
    hot = multi_hot(sets, L)
    late = np.arange(n) >= (n if switch is None else switch)
    rewards = np.where(late, hot @ worth[::-1], hot @ worth)
    return sets, (1.0 + rewards + noise * rng.normal(size=n)).astype(np.float32)


@functools.cache
def _compiled(name: str, **changes: Any) -> Master:
    if name == "ntk":
        master = ntk_ucb(NtkUcbConfig(**(NTK | changes)))
    else:
        master = neural_ucb(NeuralUcbConfig(**(NEURAL | changes)))
    return master._replace(
        refresh=jax.jit(master.refresh, static_argnames="fit"),
        belief=jax.jit(master.belief),
        score=jax.jit(master.score),
        fitted=jax.jit(master.fitted),
        radius=jax.jit(master.radius),
    )


@functools.partial(jax.jit, static_argnums=0)
def _tell(master: Master, state: Any, sets: jax.Array, rewards: jax.Array) -> Any:
    def one(state: Any, told: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        return master.update(KEY(), state, *told), None

    return jax.lax.scan(one, state, (sets, rewards))[0]


def _learn(master: Master, sets: np.ndarray, rewards: np.ndarray, cuts: int = 1) -> Any:
    """Tell the rounds, with a refresh after each of `cuts` equal parts."""
    state = master.init(KEY(), _problem())
    for part in np.split(np.arange(len(sets)), cuts):
        state = _tell(master, state, sets[part], rewards[part])
        state = master.refresh(KEY(), state, fit=True)
    return state


def _direct(rows: np.ndarray, gamma: float) -> np.ndarray:
    """lam1 I + sum of gamma^age a a'."""
    weights = gamma ** np.arange(len(rows))[::-1]
    return rows.T @ (weights[:, None] * rows) + LAM1 * np.eye(rows.shape[1])


def _recursions(rows: np.ndarray, rewards: np.ndarray, gamma: float) -> Any:
    state = forget.start_recursions(rows.shape[1], LAM1)

    def one(state: Any, told: Any) -> tuple[Any, None]:
        return forget.update_recursions(state, *told, gamma, LAM1), None

    return jax.lax.scan(one, state, (jnp.asarray(rows), jnp.asarray(rewards)))[0]


@pytest.mark.parametrize("gamma", [GAMMA, 1.0])
def test_recursions__equal_the_direct_sums(gamma: float) -> None:
    rng = np.random.default_rng(0)
    rows, rewards = rng.normal(size=(30, 4)), rng.normal(size=30)
    with jax.enable_x64(True):
        state = _recursions(rows, rewards, gamma)
        weights = gamma ** np.arange(30)[::-1]
        np.testing.assert_allclose(state.gram, _direct(rows, gamma), atol=1e-6)
        np.testing.assert_allclose(state.squared, _direct(rows, gamma**2), atol=1e-6)
        moment = rows.T @ (weights * rewards)
        np.testing.assert_allclose(state.moment, moment, atol=1e-6)
        if gamma == 1.0:
            np.testing.assert_array_equal(state.gram, state.squared)


def test_recursions__of_a_constant_action_have_a_limit() -> None:
    state = _recursions(np.eye(2, dtype=np.float32)[[0] * 300], np.ones(300), GAMMA)
    np.testing.assert_allclose(state.gram[0, 0], LAM1 + 1 / (1 - GAMMA), rtol=1e-5)
    limit = LAM1 + 1 / (1 - GAMMA**2)
    np.testing.assert_allclose(state.squared[0, 0], limit, rtol=1e-5)
    # What is never seen stays at the prior, whatever is forgotten.
    np.testing.assert_allclose(state.squared[1, 1], LAM1, rtol=1e-5)


def test_row_weights__fall_with_the_age_of_a_row() -> None:
    weights = forget.row_weights(jnp.asarray(3), 5, 0.5)
    np.testing.assert_allclose(weights, [0.25, 0.5, 1.0, 0.0, 0.0])
    np.testing.assert_array_equal(forget.row_weights(jnp.asarray(0), 2, 0.5), [0, 0])


@pytest.mark.parametrize(
    ("gamma", "rows"), [(0.5, 10), (0.9, 66), (0.99, 100), (1.0, 100)]
)
def test_num_kept__ends_at_the_least_weight_or_at_the_memory(
    gamma: float, rows: int
) -> None:
    assert int(forget.num_kept(gamma, 100, 1e-3)) == rows
    assert rows == 100 or gamma ** (rows - 1) >= 1e-3 > gamma**rows


def test_overcount__turns_the_posterior_into_the_sandwich() -> None:
    rng = np.random.default_rng(1)
    rows, new = rng.normal(size=(25, 4)), rng.normal(size=(6, 4))
    weights = np.asarray(forget.row_weights(jnp.asarray(25), 25, GAMMA), float)
    v, squared = _direct(rows, GAMMA), _direct(rows, GAMMA**2)
    sandwich = np.linalg.inv(v) @ squared @ np.linalg.inv(v)
    noises = LAM1 / weights
    solved = np.linalg.solve(rows @ rows.T + np.diag(noises), rows @ new.T)
    root = forget.overcount(
        jnp.asarray(solved, jnp.float32), jnp.asarray(noises, jnp.float32), LAM1
    )
    cov = new @ new.T - new @ rows.T @ solved - np.asarray(root.T @ root)
    np.testing.assert_allclose(cov / LAM1, new @ sandwich @ new.T, atol=1e-5)


def test_belief__of_ntk_is_the_sandwich_in_feature_space() -> None:
    """With a kernel of degree one, whose features are the arms and a constant."""
    master = _compiled("ntk", discount=GAMMA, memory=30)
    sets, rewards = _stream(ROWS)
    state = _tell(master, master.init(KEY(), _problem()), sets, rewards)
    scales = state.scales._replace(log_weights=jnp.asarray([0.0, -30.0, -30.0]))
    state = master.refresh(KEY(), state._replace(scales=scales))
    assert int(state.history.count) == 30 and int(state.history.rounds) == ROWS
    noise = float(evidence.row_noise(state.scales, jnp.ones(())))
    # A prior variance of 1e4 stands for a constant that may be anything.
    linear = float(set_kernel.basis_tables(K, 2)[0, K]) ** 0.5
    features = [
        np.c_[linear * multi_hot(s, L) / K**0.5, np.full(len(s), 100.0)]
        for s in (sets[-30:], _sets(8, 5))
    ]
    weights = GAMMA ** np.arange(30)[::-1]
    v, squared = (
        features[0].T @ (w[:, None] * features[0]) + noise * np.eye(L + 1)
        for w in (weights, weights**2)
    )
    spread = np.linalg.solve(v, features[1].T)
    mean = spread.T @ features[0].T @ (weights * rewards[-30:])
    belief = master.belief(state, _sets(8, 5))
    np.testing.assert_allclose(belief.mean, mean, rtol=1e-3)
    cov = noise * spread.T @ squared @ spread
    np.testing.assert_allclose(belief.cov, cov, atol=2e-3 * np.abs(cov).max())
    score = master.score(state, _sets(8, 5))
    width = master.radius(state) * np.sqrt(np.diagonal(cov))
    np.testing.assert_allclose(score.bonus, width, rtol=5e-3)
    again = master.belief(state, sets[-8:]).mean
    np.testing.assert_allclose(master.fitted(state)[22:30], again, rtol=1e-4)


@pytest.mark.parametrize("fit", [False, True])
def test_ntk__almost_without_discount_is_the_stationary_master(fit: bool) -> None:
    rewards = _stream(ROWS)[1]
    beliefs = []
    for discount in (ALMOST_ONE, 1.0):
        master = _compiled("ntk", discount=discount)
        state = master.init(KEY(), _problem())
        for part in np.split(np.arange(ROWS), 4):
            state = _tell(master, state, _sets(ROWS, 1)[part], rewards[part])
            state = master.refresh(KEY(), state, fit=fit)
        beliefs.append(master.belief(state, _sets(8, 5)))
    _close(beliefs)


def _close(beliefs: list[Any], rtol: float = 2e-3) -> None:
    one, other = beliefs
    np.testing.assert_allclose(one.mean, other.mean, rtol=rtol)
    size = float(jnp.max(jnp.abs(other.cov)))
    np.testing.assert_allclose(one.cov, other.cov, atol=rtol * size)
    np.testing.assert_allclose(one.noise, other.noise, rtol=rtol)


@pytest.mark.parametrize("confidence", ["exact", "diagonal"])
def test_neural__almost_without_discount_is_the_stationary_master(
    confidence: str,
) -> None:
    sets, rewards = _stream(ROWS)
    changes = {"confidence": confidence, "radius_kind": "theory"}
    changes["linear_part"] = confidence == "exact"
    beliefs, radii = [], []
    for discount in (ALMOST_ONE, 1.0):
        # Batches of Adam are drawn in another way with weights.
        master = _compiled("neural", discount=discount, training="literal", **changes)
        state = _learn(master, sets, rewards, cuts=2)
        beliefs.append(master.belief(state, _sets(8, 5)))
        radii.append(master.radius(state))
    _close(beliefs)
    np.testing.assert_allclose(*radii, rtol=1e-3)


@pytest.mark.parametrize("confidence", ["exact", "diagonal"])
def test_discounted_confidence__is_that_of_the_matrices(confidence: str) -> None:
    width, depth, kept, gamma = 4, 3, 20, 0.8
    sizes = {"num_arms": L, "width": width, "depth": depth}
    trust = discounted_confidence(confidence, **sizes, lam1=LAM1)
    absorb, settle = jax.jit(trust.absorb), jax.jit(trust.settle)
    net = ucb.UcbNet(L, width, depth)
    params = ucb.init_params(KEY(), net)
    factors = jax.jit(functools.partial(ucb.factors, net))
    rows, new = (factors(params, jnp.asarray(_sets(*n))) for n in ((25, 1), (6, 5)))
    state, rate = trust.init(32, K), jnp.asarray(gamma)
    for start, num in ((0, 10), (10, 10), (20, 5)):  # the last block is a part
        index = jnp.minimum(jnp.arange(start, start + 10), 24)
        block = jax.tree.map(lambda leaf, i=index: leaf[i], rows)
        state = absorb(state, block, jnp.asarray(num), rate)
    if confidence == "diagonal":
        kept = 25  # it has no rows to let go of
    weights = forget.row_weights(jnp.asarray(kept), 32, rate)
    state = settle(state, jnp.asarray(25 - kept), weights)
    state = trust.grow(state, 40)
    phi, at = (
        np.asarray(ucb.flat_gradients(g, L, width), float) / width**0.5
        for g in (rows, new)
    )
    z, squared = _direct(phi[-kept:], gamma), _direct(phi[-kept:], gamma**2)
    if confidence == "diagonal":
        z, squared = np.diag(np.diag(z)), np.diag(np.diag(squared))
    inverse = np.linalg.inv(z)
    cov = at @ inverse @ squared @ inverse @ at.T
    got = jax.jit(trust.covariance)(state, new)
    np.testing.assert_allclose(got, cov, atol=1e-5 * np.abs(cov).max())
    variance = jax.jit(trust.variance)(state, new)
    np.testing.assert_allclose(variance, np.diag(cov), rtol=1e-4)
    log_det = np.linalg.slogdet(squared / LAM1)[1]
    np.testing.assert_allclose(jax.jit(trust.log_det)(state), log_det, rtol=1e-4)


@pytest.mark.parametrize("name", ["ntk", "neural"])
def test_master__with_a_discount_learns_the_new_weights(name: str) -> None:
    sets, rewards = _stream(160, switch=80)
    held = _sets(60, 7)
    truth = 1.0 + multi_hot(held, L) @ np.sort(np.random.default_rng(3).random(L))[::-1]

    def error(discount: float) -> float:
        master = _compiled(name, discount=discount)
        state = _learn(master, sets, rewards, cuts=4)
        mean = np.asarray(master.score(state, held).mean)
        return float(np.mean(np.square(mean - truth)) / truth.var())

    assert error(0.95) < 0.15
    if name == "ntk":  # once is enough: half of the rounds say the contrary
        assert error(1.0) > 0.5


def test_evidence__old_rows_do_not_hide_the_noise() -> None:
    """120 rows of which 33 count: taken for noisy ones they would say a quarter."""
    sets, rewards = _stream(120, noise=0.4)
    kernel = set_kernel.set_kernel(2)
    tables = set_kernel.basis_tables(K, 2).at[1:].set(0.0)
    weights = forget.row_weights(jnp.asarray(120), 128, 0.97)
    empty = hist.new_history(128, K)
    history = empty._replace(
        actions=empty.actions.at[:120].set(sets),
        rewards=empty.rewards.at[:120].set(rewards),
        plays=jnp.where(weights > 0, weights, 1.0),
        count=jnp.asarray(120),
    )

    @jax.jit
    def fit(history: hist.History) -> jax.Array:
        settings = {"num_rows": 128, "num_steps": 60, "min_noise": 5e-4}
        scales = evidence.fit_scales(
            history,
            lambda actions: tables[:, set_kernel.overlaps(actions, actions, L)],
            evidence.start_scales(kernel.start),
            kernel.prior,
            **settings,
            fit_power=False,
        )
        return scales.deviation**2 * evidence.row_noise(scales, jnp.ones(()))

    assert 0.5 * 0.4**2 < float(fit(history)) < 2 * 0.4**2


@functools.cache
def _errors(switch: int | None) -> np.ndarray:
    sets, rewards = _stream(200, switch)

    def one(tracker: Any, told: Any) -> tuple[Any, None]:
        return forget.track(tracker, *told), None

    start = forget.new_tracker(L)
    scan = jax.jit(lambda *pairs: jax.lax.scan(one, start, pairs)[0].errors)
    return scan(jnp.asarray(sets), jnp.asarray(rewards))


def test_choose__forgets_after_a_switch_and_not_without() -> None:
    assert float(forget.choose(_errors(None))) == 1.0
    assert float(forget.choose(_errors(150))) <= 0.98


def test_choose__of_equals_takes_the_largest() -> None:
    assert float(forget.choose(jnp.zeros((len(forget.DISCOUNTS),)))) == 1.0
    errors = jnp.asarray([5.0, 1.0, 3.0, 1.0, 2.0, jnp.nan])
    assert float(forget.choose(errors)) == pytest.approx(0.99)


@pytest.mark.parametrize("name", ["ntk", "neural"])
def test_auto__chooses_by_the_rounds_told(name: str) -> None:
    master = _compiled(name, discount="auto")
    for switch in (None, 150):
        state = _learn(master, *_stream(200, switch), cuts=4)
        np.testing.assert_allclose(state.tracker.errors, _errors(switch), rtol=1e-3)
    assert int(state.history.rounds) == 200
    assert int(state.history.count) <= 60
    assert np.isfinite(np.asarray(master.belief(state, _sets(8, 5)).cov)).all()


LONG, AFTER, BLOCK, NUM_RANDOM = 1500, 200, 20, 40
EVERY = np.array(list(itertools.combinations(range(L), K)), np.int32)  # [220, K]


def _play_greedily(master: Master, seeds: Sequence[int]) -> np.ndarray:
    """Play the set of highest upper bound, of all sets there are.

    After `LONG` rounds the order of the arms is reversed: the best set becomes the
    worst, and what says the contrary is seven times as long as what is to come.

    Returns:
        Share of the best reward of the time: [len(seeds), LONG + AFTER].
    """
    sets = jnp.asarray(EVERY)

    @jax.jit
    def block(
        key: jax.Array, state: Any, worth: jax.Array, start: jax.Array
    ) -> tuple[Any, jax.Array]:
        radius = master.radius(state)

        def one(carry: tuple[Any, Any], t: jax.Array) -> tuple[Any, jax.Array]:
            state, belief = carry
            deviation = jnp.sqrt(jnp.maximum(jnp.diagonal(belief.cov), 0.0))
            draw, noise = jax.random.split(jax.random.fold_in(key, t))
            chance = jax.random.randint(draw, (), 0, len(EVERY))
            best = jnp.argmax(belief.mean + radius * deviation)
            row = jnp.where(t < NUM_RANDOM, chance, best)
            value = jnp.where(t < LONG, worth, worth[::-1])[sets[row]].sum()
            reward = value + 0.1 * jax.random.normal(noise)
            state = master.update(key, state, sets[row], reward)
            is_played = jnp.arange(len(EVERY)) == row
            return (state, condition(belief, is_played, reward)), value

        carry = (state, master.belief(state, sets))
        (state, _), values = jax.lax.scan(one, carry, start + jnp.arange(BLOCK))
        return state, values

    refresh = jax.jit(master.refresh, static_argnames="fit")

    def play(seed: int) -> np.ndarray:
        worth = np.sort(np.random.default_rng(seed).random(L)).astype(np.float32)
        key = jax.random.key(seed)
        state, values = master.init(key, _problem()), []
        for start in range(0, LONG + AFTER, BLOCK):
            state = _make_room(master, state)
            if start >= NUM_RANDOM:  # random rounds need no model
                state = refresh(key, state, fit=master.due(state))
            state, value = block(key, state, worth, jnp.asarray(start))
            values.append(value)
        return np.concatenate(values) / worth[-K:].sum()

    return np.stack([play(seed) for seed in seeds])


def _make_room(master: Master, state: Any) -> Any:
    """Raise the capacity of a history when the next block needs it."""
    batched = jax.tree.map(lambda leaf: leaf[None], state)
    roomy = hist.make_room(master.grow, batched, hist.slack(BLOCK), 0)
    return jax.tree.map(lambda leaf: leaf[0], roomy)


@pytest.mark.slow
def test_master__recovers_within_200_rounds_with_a_discount_alone() -> None:
    """At every seed: the evidence of 1500 rounds outweighs what 200 can say."""
    settings: dict[str, Any] = {"block": BLOCK, "memory": 256, "fit_rows": 128}
    forgetful, stationary = (
        _play_greedily(
            ntk_ucb(NtkUcbConfig(**(NTK | settings), discount=discount, lam=0.0)),
            seeds=(0, 1, 2),
        )
        for discount in (0.97, 1.0)
    )
    before, late = slice(LONG - 60, LONG), slice(LONG + 150, None)
    assert forgetful[:, before].mean(axis=1).min() > 0.9
    assert stationary[:, before].mean(axis=1).min() > 0.95
    assert forgetful[:, late].mean(axis=1).min() >= 0.9
    assert stationary[:, LONG:].mean(axis=1).max() < 0.75


SWITCH, F_IN = 300, 20
BEFORE, LATE = slice(SWITCH - 60, SWITCH), slice(SWITCH + 80, SWITCH + 160)


def _closed_form(discount: float) -> Master:
    settings = {"block": F_IN, "memory": 128, "fit_rows": 128}
    return ntk_ucb(NtkUcbConfig(**(NTK | settings), discount=discount))


def _play(master: Master, num_seeds: int, num_rounds: int) -> np.ndarray:
    """Share of the best reward of the time: [seeds, rounds].

    At the switch the order of the arms is reversed: the best set becomes the worst.
    """
    config = MasterSlaveConfig(n_re=40, f_in=F_IN, n_es=4, num_draws=4, lam=0.0)
    policy = master_slave(master, make_samplers(PLAIN), config)
    worth = np.sort(np.random.default_rng(3).random(L)).astype(np.float32)
    worths = jnp.asarray(np.stack([worth, worth[::-1]]))
    keys = jax.random.split(jax.random.key(1), num_seeds)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0, None))
    def block(key: jax.Array, state: Any, start: jax.Array) -> tuple[Any, jax.Array]:
        def one(state: Any, t: jax.Array) -> tuple[Any, jax.Array]:
            ask, step, tell = jax.random.split(jax.random.fold_in(key, t), 3)
            state, action = policy.ask(ask, state)
            value = worths[(t >= SWITCH).astype(int)][action].sum()
            reward = value + 0.3 * jax.random.normal(step)
            return policy.tell(tell, state, action, reward), value

        return jax.lax.scan(one, state, start + jnp.arange(F_IN))

    fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    state = jax.vmap(policy.init)(keys, stack_problems([_problem()] * num_seeds))
    values = []
    for start in range(0, num_rounds, F_IN):
        state = policy.refresh(fold(keys, num_rounds + start), state)
        state, value = block(keys, state, jnp.asarray(start))
        values.append(value)
    return np.concatenate(values, axis=1) / worth[-K:].sum()


@pytest.mark.slow
def test_agent__with_a_discount_recovers_from_a_switch() -> None:
    forgetful, stationary = (
        _play(_closed_form(d), num_seeds=6, num_rounds=LATE.stop) for d in (0.98, 1.0)
    )
    assert stationary[:, BEFORE].mean() > 0.95
    # What it had before, but for the price of looking again and again.
    assert forgetful[:, BEFORE].mean() > 0.85
    assert forgetful[:, LATE].mean() > 0.85
    assert stationary[:, LATE].mean() < 0.75


@pytest.mark.slow
def test_agent__that_tracks_recovers_from_a_switch() -> None:
    late = slice(SWITCH + 60, SWITCH + 120)
    master = kalman_ucb(KalmanUcbConfig(block=F_IN))
    shares = _play(master, num_seeds=12, num_rounds=late.stop)
    assert shares[:, BEFORE].mean() > 0.85
    # 0.84, with a standard error of 0.01; the new best set is the old worst.
    assert shares[:, late].mean() > 0.8


@pytest.mark.parametrize("make", [NtkUcbConfig, NeuralUcbConfig])
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"discount": 0.0}, "discount"),
        ({"discount": 1.5}, "discount"),
        ({"discount": float("nan")}, "discount"),
        ({"discount": "some"}, "discount"),
        ({"memory": 0}, "memory"),
        ({"min_weight": 0.0}, "min_weight"),
    ],
)
def test_config__rejects_bad_values_in_a_sentence(
    make: Any, change: dict, word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        make(**change)


def test_config__full_confidence_knows_no_discount() -> None:
    with pytest.raises(ValueError, match="discount"):
        NeuralUcbConfig(confidence="full", discount=0.99)
    with pytest.raises(ValueError, match="discount"):
        discounted_confidence("full", num_arms=L, width=4, depth=2, lam1=1.0)
    assert NeuralUcbConfig(confidence="full").discount == 1.0
