"""The closed-form master against float64 formulas."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.agent.pool import condition
from msb_jax.link import to_latent
from msb_jax.masters import set_kernel
from msb_jax.masters.ntk_learning import MAX_SHARE, MAX_STRETCH
from msb_jax.masters.ntk_state import NtkUcbConfig, NtkUcbState
from msb_jax.masters.ntk_ucb import ntk_ucb
from msb_jax.problem import make_problem, random_sets
from msb_jax.solvers.local_search import evaluate
from tests.reference import gaussian_process, multi_hot

L, K, ROWS, BLOCK = 24, 4, 50, 10
# It wants to explore as much as it may, for a set of 4 of 24 arms has few exchanges.
CONFIG = NtkUcbConfig(block=BLOCK, fit_rows=64, fit_steps=25, radius=2.0, explore=1.0)
MASTER = ntk_ucb(CONFIG)
ABSORB_BLOCK = jax.jit(functools.partial(MASTER.refresh, fit=False))
REFIT = jax.jit(functools.partial(MASTER.refresh, fit=True))
UPDATE = jax.jit(MASTER.update)
BELIEF = jax.jit(MASTER.belief)


def absorb_all(key: jax.Array, state: NtkUcbState) -> NtkUcbState:
    """Absorb all pending rounds, block by block."""
    while int(state.history.absorbed) < int(state.history.count):
        state = ABSORB_BLOCK(jax.random.clone(key), state)
    return state


# exp(-30): a kernel term that is switched off.
OFF = -30.0


def _problem() -> object:
    features = np.random.default_rng(0).random((L, 3))
    return make_problem(features, K, metric="ned", num_conflicts=20)


@functools.cache
def _data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    actions = np.stack([rng.permutation(L)[:K] for _ in range(ROWS)])
    theta = rng.random(L)
    rewards = 3.0 + multi_hot(actions, L) @ theta + 0.05 * rng.normal(size=ROWS)
    return actions.astype(np.int32), rewards.astype(np.float32)


def _told(rows: int, *, weights: tuple[float, ...] | None = None) -> NtkUcbState:
    actions, rewards = _data()
    state = MASTER.init(jax.random.key(0), _problem())
    if weights is not None:
        scales = state.scales._replace(log_weights=jnp.asarray(weights))
        state = state._replace(scales=scales)

    def tell(state: NtkUcbState, pair: tuple) -> tuple[NtkUcbState, None]:
        return MASTER.update(jax.random.key(1), state, *pair), None

    pairs = (jnp.asarray(actions[:rows]), jnp.asarray(rewards[:rows]))
    return jax.jit(lambda s, p: jax.lax.scan(tell, s, p)[0])(state, pairs)


def _reference(state: NtkUcbState, sets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    actions, rewards = _data()
    count = int(state.history.count)
    actions, rewards = actions[:count], rewards[:count].astype(float)
    table = np.exp(np.asarray(state.scales.log_weights, float)) @ np.asarray(
        set_kernel.basis_tables(K, CONFIG.depth), float
    )
    rows, others = multi_hot(actions, L), multi_hot(sets, L)
    noise = float(np.exp(state.scales.log_noise) + state.scales.floor)
    mean, scale = float(state.scales.center), float(state.scales.deviation)
    # A flat prior on the constant is the limit of a large variance of it.
    kernel = [
        table[np.rint(a @ b.T).astype(int)] + 1e4
        for a, b in ((rows, rows), (rows, others), (others, others))
    ]
    expected, cov = gaussian_process(*kernel, (rewards - mean) / scale, noise)
    return mean + scale * expected, scale**2 * cov


def _sets(n: int, seed: int = 5) -> jax.Array:
    return random_sets(jax.random.key(seed), _problem(), n)


def test_belief__equals_the_textbook_posterior() -> None:
    state = absorb_all(jax.random.key(2), _told(ROWS))
    sets = _sets(12)
    belief = BELIEF(state, sets)
    mean, cov = _reference(state, np.asarray(sets))
    np.testing.assert_allclose(belief.mean, mean, rtol=1e-4)
    np.testing.assert_allclose(belief.cov, cov, atol=2e-4 * np.abs(cov).max())


def test_refresh__in_blocks_equals_one_factorisation() -> None:
    sets = _sets(6)
    whole = absorb_all(jax.random.key(2), _told(ROWS))
    # 37 rows are absorbed first: the last block of ten is a partial one.
    parts = absorb_all(jax.random.key(2), _told(37))
    actions, rewards = _data()
    for row in range(37, ROWS):
        parts = MASTER.update(
            jax.random.key(3), parts, jnp.asarray(actions[row]), rewards[row]
        )
    parts = absorb_all(jax.random.key(2), parts)
    assert int(parts.history.absorbed) == ROWS
    for one, other in zip(
        BELIEF(whole, sets)[:3], BELIEF(parts, sets)[:3], strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-4)


def test_condition__equals_a_refresh_with_the_new_round() -> None:
    actions, rewards = _data()
    state = absorb_all(jax.random.key(2), _told(ROWS - 1))
    sets = jnp.concatenate([_sets(5), jnp.asarray(actions[-1:])])
    after = condition(BELIEF(state, sets), jnp.arange(6) == 5, jnp.asarray(rewards[-1]))
    again = BELIEF(absorb_all(jax.random.key(2), _told(ROWS)), sets)
    np.testing.assert_allclose(after.cov, again.cov, atol=1e-3 * again.cov.max())
    np.testing.assert_allclose(after.mean, again.mean, rtol=1e-4)


def test_condition__leaves_the_belief_alone_when_nothing_matches() -> None:
    state = absorb_all(jax.random.key(2), _told(ROWS))
    belief = BELIEF(state, _sets(4))
    same = condition(belief, jnp.zeros((4,), bool), jnp.asarray(9.0))
    for one, other in zip(jax.tree.leaves(belief), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(one, other)


def test_fitted__is_the_mean_at_the_rows_played() -> None:
    state = absorb_all(jax.random.key(2), _told(ROWS))
    actions, _ = _data()
    fitted = jax.jit(MASTER.fitted)(state)[:ROWS]
    np.testing.assert_allclose(
        fitted, BELIEF(state, jnp.asarray(actions)).mean, rtol=1e-4
    )


def test_grow__keeps_the_belief_and_makes_room() -> None:
    state = absorb_all(jax.random.key(2), _told(ROWS))
    larger = MASTER.grow(state, 512)
    assert larger.history.rewards.shape == (512,)
    sets = _sets(5)
    for one, other in zip(
        BELIEF(state, sets)[:3], BELIEF(larger, sets)[:3], strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert MASTER.grow(larger, 256) is larger


def test_quadratic__is_exact_when_the_kernel_is_of_degree_two() -> None:
    state = absorb_all(jax.random.key(2), _told(ROWS, weights=(0.0, -1.0, OFF)))
    arms = jnp.arange(L, dtype=jnp.int32)
    model = jax.jit(MASTER.quadratic)(state, arms)
    sets = _sets(20)
    values = jax.vmap(lambda a: evaluate(model, a))(sets)
    np.testing.assert_allclose(values, BELIEF(state, sets).mean, rtol=1e-4)


def test_quadratic__on_some_arms_is_a_part_of_the_whole() -> None:
    state = absorb_all(jax.random.key(2), _told(ROWS))
    arms = jnp.asarray([2, 3, 5, 7, 11, 13], jnp.int32)
    quadratic = jax.jit(MASTER.quadratic)
    part = quadratic(state, arms)
    whole = quadratic(state, jnp.arange(L, dtype=jnp.int32))
    np.testing.assert_allclose(part.pair, whole.pair[arms][:, arms], atol=1e-6)
    np.testing.assert_allclose(part.linear, whole.linear[arms], atol=1e-6)


def test_marginals__order_the_arms_as_the_linear_truth_does() -> None:
    state = REFIT(jax.random.key(2), _told(ROWS))
    base = np.arange(K)
    # Exchange arm 0 for each other arm: differences of theta.
    sets = np.stack([np.r_[arm, base[1:]] for arm in range(K, L)])
    worth = _truth(sets)
    assert np.corrcoef(jax.jit(MASTER.marginals)(state)[K:], worth)[0, 1] > 0.9


def test_draws__have_the_mean_and_the_deviation_of_the_belief() -> None:
    state = absorb_all(jax.random.key(2), _told(ROWS, weights=(0.0, -1.0, OFF)))
    n = 400
    draw = jax.jit(MASTER.draws, static_argnums=3)
    models = draw(jax.random.key(7), state, jnp.arange(L, dtype=jnp.int32), n)
    sets = _sets(5)
    values = jax.vmap(lambda m: jax.vmap(lambda a: evaluate(m, a))(sets))(models)
    belief = BELIEF(state, sets)
    deviation = np.sqrt(np.diagonal(belief.cov))
    error = (values.mean(0) - belief.mean) / (deviation / np.sqrt(n))
    assert np.abs(error).max() < 5
    # The standard error of a sample deviation is sigma / sqrt(2n).
    spread = (values.std(0) / deviation - 1) * np.sqrt(2 * n)
    assert np.abs(spread).max() < 5


def test_score__is_optimistic_and_prices_violations() -> None:
    state = absorb_all(jax.random.key(2), _told(ROWS))
    sets = _sets(30)
    score = jax.jit(MASTER.score)(state, sets)
    belief = BELIEF(state, sets)
    np.testing.assert_allclose(score.mean, belief.mean, rtol=1e-5)
    np.testing.assert_allclose(
        score.bonus, 2.0 * np.sqrt(np.diagonal(belief.cov)), rtol=1e-3
    )
    np.testing.assert_allclose(
        score.total, score.mean + score.bonus - 5.0 * score.violation, rtol=1e-5
    )


def _truth(sets: np.ndarray) -> np.ndarray:
    """The noiseless reward behind `_data`."""
    rng = np.random.default_rng(1)
    for _ in range(ROWS):
        rng.permutation(L)
    return 3.0 + multi_hot(sets, L) @ rng.random(L)


def test_radius__widens_while_known_sets_are_played() -> None:
    constant = ntk_ucb(NtkUcbConfig(block=BLOCK, radius=2.0, explore=0.0))
    state = MASTER.grow(absorb_all(jax.random.key(2), _told(ROWS)), 300)
    assert float(MASTER.radius(state)) == 2.0
    actions, rewards = _data()

    def play(state: NtkUcbState, rows: Sequence[int]) -> NtkUcbState:
        for row in rows:
            state = UPDATE(
                jax.random.key(1), state, jnp.asarray(actions[row]), rewards[row]
            )
        return state

    stretches = []
    for _ in range(20):
        state = play(state, [0] * BLOCK)
        same = constant.refresh(jax.random.key(2), state)
        state = ABSORB_BLOCK(jax.random.key(2), state)
        stretches.append(float(state.stretch))
        # With nothing to explore the radius can only narrow.
        assert float(same.stretch) <= max([0.0, *stretches[:-1]])
    # It had one round before; known after thirty, it widens the radius in every block.
    expected = [0.0, 0.0, MAX_SHARE, 2 * MAX_SHARE]
    assert stretches[:4] == pytest.approx(expected, abs=1e-6)
    assert stretches[-1] == pytest.approx(MAX_STRETCH)
    assert float(MASTER.radius(state)) == pytest.approx(2.0 * np.exp(MAX_STRETCH))
    # One set that is hardly known in a block of ten is what is wanted.
    one = ABSORB_BLOCK(jax.random.key(2), play(state, [1] + [0] * (BLOCK - 1)))
    assert float(one.stretch) == pytest.approx(MAX_STRETCH, abs=0.03)
    many = ABSORB_BLOCK(jax.random.key(2), play(state, range(1, BLOCK + 1)))
    assert float(many.stretch) == pytest.approx(MAX_STRETCH - 0.9, abs=0.03)


def test_radius__explores_in_proportion_to_the_exchanges_of_a_set() -> None:
    share = 0.02
    master = ntk_ucb(NtkUcbConfig(block=BLOCK, explore=share))
    state = master.grow(absorb_all(jax.random.key(2), _told(ROWS)), 200)
    actions, rewards = _data()
    for _ in range(5 * BLOCK):
        told = (jnp.asarray(actions[0]), rewards[0])
        state = UPDATE(jax.random.key(1), state, *told)
    for _ in range(5):
        state = master.refresh(jax.random.key(2), state)
    # All were told before the first was learned: every block is of a known set.
    assert float(state.stretch) == pytest.approx(
        5 * share * K * (L - K) / (ROWS + 5 * BLOCK), rel=1e-5
    )


def test_refit__what_a_linear_reward_does_not_need_leaves_no_doubt() -> None:
    """A new set of known arms is a known set."""
    rng = np.random.default_rng(4)
    actions = np.stack([rng.permutation(L)[:K] for _ in range(300)]).astype(np.int32)
    rewards = 3.0 + multi_hot(actions, L) @ rng.random(L) + 0.05 * rng.normal(size=300)
    state = MASTER.grow(MASTER.init(jax.random.key(0), _problem()), 340)
    for action, reward in zip(actions, rewards.astype(np.float32), strict=True):
        state = UPDATE(jax.random.key(1), state, jnp.asarray(action), reward)
    for _ in range(4):  # every fit starts from the last
        state = REFIT(jax.random.key(2), state)
    weights = np.exp(np.asarray(state.scales.log_weights))
    noise = float(np.exp(state.scales.log_noise))
    assert weights[1:].sum() < 0.05 * noise
    variance = np.diagonal(np.asarray(BELIEF(state, _sets(50)).cov))
    # Ridge regression: some L / n of the noise, for a set of average arms.
    unit = float(state.scales.deviation) ** 2 * noise
    assert np.median(variance) < 0.25 * unit


def test_refit__is_no_worse_than_ridge_regression_on_linear_rewards() -> None:
    state = REFIT(jax.random.key(2), _told(ROWS))
    actions, rewards = _data()
    held = np.asarray(_sets(200, seed=9))
    rows = multi_hot(actions, L)
    centred = rewards - rewards.mean()
    errors = []
    for ridge in (1e-3, 1e-2, 1e-1, 1.0):  # tuned in hindsight
        weights = np.linalg.solve(rows.T @ rows + ridge * np.eye(L), rows.T @ centred)
        guess = rewards.mean() + multi_hot(held, L) @ weights
        errors.append(np.sqrt(np.mean((guess - _truth(held)) ** 2)))
    mean = np.asarray(jax.jit(MASTER.score)(state, jnp.asarray(held)).mean)
    assert np.sqrt(np.mean((mean - _truth(held)) ** 2)) < 1.15 * min(errors)


def test_refit__one_row_a_set_leaves_the_posterior_as_it_is() -> None:
    actions, rewards = _data()
    rng = np.random.default_rng(3)
    again = np.concatenate([np.arange(20), rng.integers(0, 5, 30)])
    noisy = rewards[again] + 0.3 * rng.normal(size=again.size).astype(np.float32)
    config = NtkUcbConfig(block=BLOCK, fit_rows=64, fit_steps=25, min_noise=1e-6)
    master = ntk_ucb(config)
    state = master.init(jax.random.key(0), _problem())
    for row, reward in zip(again, noisy, strict=True):
        played = jnp.asarray(rng.permutation(actions[row]))  # in any order
        state = master.update(jax.random.key(1), state, played, jnp.asarray(reward))
    state = jax.jit(functools.partial(master.refresh, fit=True))(
        jax.random.key(2), state
    )
    assert int(state.history.count) == 20
    assert int(state.history.plays[:20].sum()) == again.size == state.history.rounds
    sets = np.asarray(_sets(12))
    belief = jax.jit(master.belief)(state, jnp.asarray(sets))
    table = np.exp(np.asarray(state.scales.log_weights, float)) @ np.asarray(
        set_kernel.basis_tables(K, 2), float
    )
    rows, others = multi_hot(actions[again], L), multi_hot(sets, L)
    kernel = [
        table[np.rint(a @ b.T).astype(int)] + 1e4
        for a, b in ((rows, rows), (rows, others), (others, others))
    ]
    noise = float(np.exp(state.scales.log_noise))
    # The latent scale is that of the mean reward of a set.
    latent = np.asarray(to_latent(state.scales.link, state.history.rewards))
    place = {tuple(sorted(a)): i for i, a in enumerate(actions.tolist())}
    of_row = [place[tuple(sorted(a))] for a in state.history.actions[:20].tolist()]
    latent_of = dict(zip(of_row, latent[:20], strict=True))
    unit, center = float(state.scales.deviation), float(state.scales.center)
    targets = (np.array([latent_of[row] for row in again]) - center) / unit
    mean, cov = gaussian_process(*kernel, targets, noise)
    np.testing.assert_allclose(belief.mean, center + unit * mean, rtol=2e-3)
    spread = np.abs(cov).max() * unit**2
    np.testing.assert_allclose(belief.cov, unit**2 * cov, atol=5e-3 * spread)


def test_refresh__float32_survives_thousands_of_rounds_around_one_set() -> None:
    """Hundreds of rounds with one set and its neighbours, and next to no noise."""
    rng = np.random.default_rng(5)
    arms, k = 40, 6
    problem = make_problem(rng.random((arms, 3)), k, metric="ned", num_conflicts=0)
    config = NtkUcbConfig(block=40, fit_rows=64, fit_steps=5, many_rows=128)
    master = ntk_ucb(config)
    refresh = {f: jax.jit(functools.partial(master.refresh, fit=f)) for f in (0, 1)}
    tell = jax.jit(
        lambda s, p: jax.lax.scan(
            lambda s, q: (master.update(jax.random.key(0), s, *q), None), s, p
        )[0]
    )
    theta = rng.random(arms)
    state = master.grow(master.init(jax.random.key(0), problem), 768)
    for block in range(60):
        sets = np.tile(np.arange(k), (40, 1))
        for row in sets[: 40 if block < 2 else 15]:
            row[:] = rng.permutation(arms)[:k] if block < 2 else row
            row[rng.integers(k)] = rng.integers(k, arms) if block >= 2 else row[0]
        sets = np.array([s if len(set(s)) == k else np.arange(k) for s in sets])
        rewards = (theta[sets].sum(1) ** 2 + 1e-4 * rng.normal(size=40)) / 10.0
        pair = (jnp.asarray(sets, jnp.int32), jnp.asarray(rewards, jnp.float32))
        state = tell(state, pair)
        state = refresh[int(master.due(state))](jax.random.key(0), state)
    assert int(state.history.rounds) == 2400
    assert int(state.history.count) < 700
    held = np.array([[0, 1, 2, 3, 4, arm] for arm in range(5, arms)])
    truth = theta[held].sum(1) ** 2 / 10.0
    score = jax.jit(master.score)(state, jnp.asarray(held, jnp.int32))
    assert np.abs(np.asarray(score.mean) - truth).max() < 0.05 * truth.std()


def test_due__asks_for_a_fit_on_a_geometric_schedule() -> None:
    state = _told(ROWS)
    assert MASTER.due(state)
    fitted = REFIT(jax.random.key(2), state)
    assert not MASTER.due(fitted)
    later = fitted.history._replace(rounds=jnp.asarray(61))
    assert MASTER.due(fitted._replace(history=later))
    # At first two blocks after the last fit, later more.
    soon = fitted.history._replace(rounds=jnp.asarray(9_000 + 2 * BLOCK))
    first = fitted._replace(fitted_at=jnp.asarray(9_000), history=soon)
    assert MASTER.due(first)
    assert not MASTER.due(first._replace(num_fits=jnp.asarray(2)))
    late = fitted._replace(
        num_fits=jnp.asarray(40_000),
        fitted_at=jnp.asarray(9_000),
        history=fitted.history._replace(rounds=jnp.asarray(9_256)),
    )
    assert MASTER.due(late)
    # More than one block waits.
    waiting = fitted.history._replace(count=jnp.asarray(ROWS + BLOCK + 1))
    assert MASTER.due(fitted._replace(history=waiting))


def test_refresh__lowers_for_gpu_and_tpu() -> None:
    state = _told(ROWS)
    platforms = ("cpu", "cuda", "tpu")
    for fit in (False, True):
        step = jax.jit(functools.partial(MASTER.refresh, fit=fit))
        exported = jax.export.export(step, platforms=platforms)(
            jax.random.key(0), state
        )
        assert set(exported.platforms) == set(platforms)
    sets = _sets(3)
    for function in (MASTER.belief, MASTER.score):
        jax.export.export(jax.jit(function), platforms=platforms)(state, sets)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"depth": 1}, "depth"),
        ({"radius": -1.0}, "radius"),
        ({"explore": -0.1}, "explore"),
        ({"constraints": "firm"}, "constraints"),
        ({"block": 0}, "block"),
        ({"min_noise": 0.0}, "min_noise"),
        ({"fit_rounds": 0}, "fit_rounds"),
    ],
)
def test_config__rejects_bad_values_in_a_sentence(change: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        NtkUcbConfig(**change)
