"""The replay: its ring, its clusters and the parts of its batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.agent import replay as rp
from msb_jax.problem import to_multi_hot

L, K, C, B = 12, 3, 64, 36
THIRD, SIXTH = B // 3, B // 6

stratify = jax.jit(rp.stratify, static_argnums=(3, 4))
draw = jax.jit(rp.draw, static_argnums=2)
push = jax.jit(rp.push)


def _sets(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.stack([rng.permutation(L)[:K] for _ in range(n)]).astype(np.int32)


def _rows(n: int, first: int = 0) -> rp.Transitions:
    """Rows that carry their number in every field."""
    number = jnp.arange(first, first + n, dtype=jnp.float32)
    return rp.Transitions(
        actions=jnp.asarray(_sets(np.random.default_rng(first), n)),
        rewards=number,
        violations=-number,
        states=jnp.tile(number[:, None], (1, L)),
        next_states=jnp.tile(number[:, None] + 0.5, (1, L)),
    )


def _filled(
    rewards: np.ndarray, violations: np.ndarray, actions: np.ndarray | None = None
) -> rp.Replay:
    """A ring of C places with these rows at its start."""
    n = len(rewards)
    rows = _rows(n)._replace(
        rewards=jnp.asarray(rewards, jnp.float32),
        violations=jnp.asarray(violations, jnp.float32),
    )
    if actions is not None:
        rows = rows._replace(actions=jnp.asarray(actions, jnp.int32))
    return push(rp.new_replay(C, K, L), rows, jnp.ones((n,), bool))


def _batches(replay: rp.Replay, num: int, kind: str = "prioritized") -> np.ndarray:
    hot = to_multi_hot(replay.rows.actions, L)
    strata = stratify(jax.random.key(0), replay, hot, B, kind)
    return np.asarray(draw(jax.random.key(1), strata, num))


def test_push__fills_from_the_start_and_keeps_fields_together() -> None:
    replay = push(rp.new_replay(C, K, L), _rows(10), jnp.ones((10,), bool))
    assert np.asarray(replay.is_row).sum() == 10
    assert int(replay.place) == 10
    np.testing.assert_array_equal(replay.rows.rewards[:10], np.arange(10))
    np.testing.assert_array_equal(replay.rows.violations[:10], -np.arange(10.0))
    np.testing.assert_array_equal(replay.rows.states[7], np.full(L, 7.0))
    np.testing.assert_array_equal(replay.rows.next_states[7], np.full(L, 7.5))
    np.testing.assert_array_equal(replay.rows.actions[:10], _rows(10).actions)


def test_push__writes_over_the_oldest_rows() -> None:
    replay = rp.new_replay(C, K, L)
    for first in range(0, 150, 30):
        replay = push(replay, _rows(30, first), jnp.ones((30,), bool))
    kept = np.asarray(replay.rows.rewards)
    assert sorted(kept.tolist()) == list(range(150 - C, 150))
    assert int(replay.place) == 150 % C
    assert kept[int(replay.place) - 1] == 149


def test_push__leaves_out_rows_that_are_not_marked() -> None:
    is_new = jnp.arange(10) % 3 == 0
    replay = push(rp.new_replay(C, K, L), _rows(10), is_new)
    np.testing.assert_array_equal(replay.rows.rewards[:4], [0, 3, 6, 9])
    assert np.asarray(replay.is_row).sum() == 4


def test_push__of_more_rows_than_fit_keeps_the_last() -> None:
    replay = push(rp.new_replay(C, K, L), _rows(100), jnp.ones((100,), bool))
    assert sorted(np.asarray(replay.rows.rewards).tolist()) == list(range(36, 100))


def test_join__adds_rows_without_keeping_them() -> None:
    replay = push(rp.new_replay(C, K, L), _rows(5), jnp.ones((5,), bool))
    both = rp.join(replay, _rows(4, 50), jnp.arange(4) < 2)
    assert both.is_row.shape == (C + 4,)
    chosen = np.asarray(both.rows.rewards)[np.asarray(both.is_row)]
    np.testing.assert_array_equal(chosen, [0, 1, 2, 3, 4, 50, 51])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_standardise__is_free_of_offset_and_unit(scale: float) -> None:
    values = np.random.default_rng(0).normal(size=C)
    is_row = np.arange(C) < 50
    got = rp.standardise(jnp.asarray(scale * (values + 5.0)), jnp.asarray(is_row))
    want = (values - values[:50].mean()) / values[:50].std()
    np.testing.assert_allclose(got, np.where(is_row, want, 0.0), atol=1e-3)


def test_standardise__ignores_what_is_not_a_number() -> None:
    values = jnp.asarray([1.0, 3.0, jnp.nan, jnp.inf])
    got = rp.standardise(values, jnp.ones((4,), bool))
    np.testing.assert_allclose(got, [-1.0, 1.0, 0.0, 0.0], atol=1e-6)


def test_standardise__of_equal_rows_is_zero() -> None:
    got = rp.standardise(jnp.full((C,), 0.1), jnp.ones((C,), bool))
    assert not np.asarray(got).any()


def test_cluster__finds_separate_groups() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, size=C)
    actions = np.stack([4 * g + rng.permutation(4)[:K] for g in truth])
    hot = to_multi_hot(jnp.asarray(actions, jnp.int32), L)
    found = np.asarray(rp.cluster(jax.random.key(0), hot, jnp.ones((C,), bool), 3, 10))
    pairs = set(zip(truth.tolist(), found.tolist(), strict=True))
    assert len(pairs) == 3


def test_cluster__lowers_the_spread_within_groups() -> None:
    hot = to_multi_hot(jnp.asarray(_sets(np.random.default_rng(3), C)), L)
    is_row = jnp.arange(C) < 50

    def spread(steps: int) -> float:
        group = np.asarray(rp.cluster(jax.random.key(1), hot, is_row, 5, steps))[:50]
        x = np.asarray(hot)[:50]
        parts = [x[group == g] for g in range(5) if (group == g).any()]
        return sum(((part - part.mean(axis=0)) ** 2).sum() for part in parts)

    assert spread(10) < spread(0) - 1.0


def test_cluster_quotas__are_the_floors_of_the_shares() -> None:
    sizes = jnp.asarray([10, 5, 0, 9], jnp.int32)
    np.testing.assert_array_equal(rp.cluster_quotas(sizes, 12), [5, 2, 0, 4])
    assert not np.asarray(rp.cluster_quotas(0 * sizes, 12)).any()


def test_draw__gives_every_part_its_pool() -> None:
    rng = np.random.default_rng(0)
    rewards, violations = rng.uniform(size=50), rng.uniform(size=50)
    rewards[[3, 4]] = [9.0, -9.0]
    violations[[7, 8, 9]] = 9.0
    batches = _batches(_filled(rewards, violations), 300)
    assert batches.shape == (300, B)
    assert batches.min() >= 0
    assert batches.max() < 50
    odd_rewards = batches[:, THIRD : THIRD + SIXTH]
    odd_violations = batches[:, THIRD + SIXTH : THIRD + 2 * SIXTH]
    assert set(odd_rewards.ravel()) == {3, 4}
    assert set(odd_violations.ravel()) == {7, 8, 9}
    # Members of a pool are drawn equally often.
    low = (odd_rewards == 3).mean()
    assert abs(low - 0.5) < 5 * 0.5 / np.sqrt(odd_rewards.size)
    rest = np.bincount(batches[:, THIRD + 2 * SIXTH :].ravel(), minlength=50)
    share = rest / rest.sum()
    sem = np.sqrt(0.02 * 0.98 / rest.sum())
    assert np.abs(share - 0.02).max() < 5 * sem


def test_draw__gives_every_cluster_its_quota() -> None:
    # Three groups of arms that never mix: 30, 15 and 5 of 50 rows.
    rng = np.random.default_rng(0)
    group = np.repeat([0, 1, 2], [30, 15, 5])
    actions = np.stack([4 * g + rng.permutation(4)[:K] for g in group])
    replay = _filled(np.zeros(50), np.zeros(50), actions)
    hot = to_multi_hot(replay.rows.actions, L)
    labels = rp.cluster(jax.random.key(0), hot, replay.is_row, 20, 10)
    sizes = np.bincount(np.asarray(labels)[:50], minlength=20)
    quotas = THIRD * sizes // 50
    batches = _batches(replay, 200)[:, :THIRD]
    filled = 0
    for cluster, quota in enumerate(quotas):
        places = batches[:, filled : filled + quota]
        assert (np.asarray(labels)[places] == cluster).all()
        filled += quota
    assert 0 < filled <= THIRD


def test_draw__fills_empty_pools_from_all_rows() -> None:
    # No reward is two deviations off, and equal violations have no outlier.
    rewards = np.tile([0.0, 1.0], 25)
    batches = _batches(_filled(rewards, np.full(50, 0.1)), 300)
    for part in (slice(THIRD, THIRD + SIXTH), slice(THIRD + SIXTH, THIRD + 2 * SIXTH)):
        assert set(batches[:, part].ravel()) == set(range(50))


def test_draw__uniform_has_no_parts() -> None:
    rewards = np.zeros(50)
    rewards[3] = 9.0
    batches = _batches(_filled(rewards, np.zeros(50)), 400, "uniform")
    counts = (batches == 3).mean(axis=0)
    sem = np.sqrt(0.02 * 0.98 / 400)
    assert np.abs(counts - 0.02).max() < 5 * sem
    assert batches.max() < 50


@pytest.mark.parametrize("kind", rp.KINDS)
def test_draw__after_wrap_around_reaches_every_row(kind: str) -> None:
    replay = rp.new_replay(C, K, L)
    for first in (0, 50):
        replay = push(replay, _rows(50, first), jnp.ones((50,), bool))
    assert set(_batches(replay, 300, kind).ravel()) == set(range(C))


@pytest.mark.parametrize("kind", rp.KINDS)
def test_draw__from_one_row_is_that_row(kind: str) -> None:
    assert not _batches(_filled(np.ones(1), np.ones(1)), 10, kind).any()


def test_draw__from_nothing_stays_in_range() -> None:
    batches = _batches(rp.new_replay(C, K, L), 10)
    assert batches.min() >= 0
    assert batches.max() < C


def test_draw__over_seeds_equals_one_by_one() -> None:
    rng = np.random.default_rng(5)
    rings = [_filled(rng.normal(size=n), rng.normal(size=n)) for n in (50, 20)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rings)

    def run(seed: jax.Array, replay: rp.Replay) -> jax.Array:
        keys = jax.random.split(jax.random.key(seed))
        hot = to_multi_hot(replay.rows.actions, L)
        strata = rp.stratify(keys[0], replay, hot, B, "prioritized")
        return rp.draw(keys[1], strata, 7)

    together = jax.jit(jax.vmap(run))(jnp.arange(2), stacked)
    alone = [jax.jit(run)(jnp.asarray(i), rings[i]) for i in range(2)]
    np.testing.assert_array_equal(together, np.stack(alone))
