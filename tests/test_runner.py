"""The runner, with a toy policy that has everything: keys, growth, refresh noise."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax import checkpoint, runner
from msb_jax.problem import Problem, problem_from_conflicts, random_sets, stack_problems
from msb_jax.rng import stream
from msb_jax.types import Outcome, Policy

NUM_SEEDS, NUM_ARMS, K, F_IN = 3, 7, 3, 4


class ToyState(NamedTuple):
    key: jax.Array  # [] a typed key
    history: jax.Array  # [C]
    used: jax.Array  # [] int32
    offset: jax.Array  # [] redrawn by every refresh
    half: jax.Array  # [] bfloat16
    problem: Problem


class EnvState(NamedTuple):
    worth: jax.Array  # [L]
    played: jax.Array  # [] int32


def toy_policy(counter: dict | None = None, fail_at: int | None = None) -> Policy:
    """Play random sets; remember all rewards in a history that grows by 4.

    With `fail_at`, the refresh of that number is interrupted.
    """
    counter = {} if counter is None else counter

    def count(name: str) -> None:
        counter[name] = counter.get(name, 0) + 1

    def init(key: jax.Array, problem: Problem) -> ToyState:
        return ToyState(
            key=stream(key, "own"),
            history=jnp.zeros((4,)),
            used=jnp.zeros((), jnp.int32),
            offset=jnp.zeros(()),
            half=jnp.ones((), jnp.bfloat16),
            problem=problem,
        )

    def ask(key: jax.Array, state: ToyState) -> tuple[ToyState, jax.Array]:
        count("ask")  # at trace time only
        own = jax.random.fold_in(state.key, 1)
        noisy, draw = jax.random.split(key)
        shift = jax.random.normal(noisy) + state.history.mean()
        state = state._replace(key=own, offset=state.offset + shift)
        return state, random_sets(draw, state.problem, 1)[0]

    def tell(
        key: jax.Array, state: ToyState, action: jax.Array, reward: jax.Array
    ) -> ToyState:
        del action
        noise = jax.random.normal(key) * state.half.astype(jnp.float32)
        history = state.history.at[state.used].set(reward + noise)
        return state._replace(history=history, used=state.used + 1)

    def refresh(key: jax.Array, state: ToyState) -> ToyState:
        count("refresh")
        if counter["refresh"] == fail_at:
            raise KeyboardInterrupt
        batch = key.shape
        offset = jax.vmap(jax.random.normal)(key) if batch else jax.random.normal(key)
        room = jnp.zeros((*batch, F_IN))
        used = int(np.max(np.asarray(state.used)))
        if used + F_IN > state.history.shape[-1]:
            history = jnp.concatenate([state.history, room], axis=-1)
            state = state._replace(history=history)
        return state._replace(offset=np.asarray(offset))  # the host may give NumPy

    def origin(state: ToyState) -> jax.Array:
        return (state.offset > 0).astype(jnp.int32)

    return Policy(init, ask, tell, refresh, origin, ("low", "high"))


def env_step(
    key: jax.Array, state: EnvState, action: jax.Array
) -> tuple[EnvState, Outcome]:
    # Drifts with the rounds played, so that losing the state would show.
    mean = state.worth[action].sum() + 0.1 * state.played.astype(jnp.float32)
    noise = 0.1 * jax.random.normal(key)
    return state._replace(played=state.played + 1), Outcome(mean + noise, mean)


# One policy for most tests, so that they share its compiled blocks.
POLICY = toy_policy()


@pytest.fixture
def setting() -> dict:
    edges = np.array([[0, 1], [2, 3], [4, 5]])
    problem = problem_from_conflicts(edges, K, num_arms=NUM_ARMS)
    worth = jax.random.uniform(jax.random.key(5), (NUM_SEEDS, NUM_ARMS))
    return {
        "env_step": env_step,
        "env_states": EnvState(worth, jnp.zeros((NUM_SEEDS,), jnp.int32)),
        "problems": stack_problems([problem] * NUM_SEEDS),
        "keys": jax.random.split(jax.random.key(1), NUM_SEEDS),
    }


def assert_same(one: runner.Curves, other: runner.Curves) -> None:
    for name in ("reward", "mean_reward", "violations", "origin"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


@pytest.mark.parametrize("rounds", [3, 10])
def test_run__equals_a_plain_loop_over_seeds_and_rounds(
    setting: dict, rounds: int
) -> None:
    curves = runner.run(POLICY, **setting, rounds=rounds, f_in=F_IN)
    policy = POLICY
    for b in range(NUM_SEEDS):
        key, problem, env = jax.tree.map(
            lambda leaf, b=b: leaf[b],
            (setting["keys"], setting["problems"], setting["env_states"]),
        )
        state = policy.init(stream(key, "init"), problem)
        for t in range(rounds):
            if t % F_IN == 0:
                refresh_key = jax.random.fold_in(stream(key, "refresh"), t)
                state = policy.refresh(refresh_key, state)
            state, action = policy.ask(jax.random.fold_in(stream(key, "ask"), t), state)
            origin = policy.origin(state)
            env, outcome = env_step(
                jax.random.fold_in(stream(key, "env"), t), env, action
            )
            tell_key = jax.random.fold_in(stream(key, "tell"), t)
            state = policy.tell(tell_key, state, action, outcome.reward)
            assert curves.reward[b, t] == pytest.approx(float(outcome.reward), rel=1e-5)
            assert curves.mean_reward[b, t] == pytest.approx(
                float(outcome.mean_reward), rel=1e-5
            )
            assert curves.origin[b, t] == int(origin)
            inside = set(np.asarray(action).tolist())
            pairs = [(0, 1), (2, 3), (4, 5)]
            expected = sum(p <= inside for p in map(set, pairs))
            assert curves.violations[b, t] == expected


def test_run__tells_clicks_where_there_are_both(setting: dict) -> None:
    def tell_clicks(
        key: jax.Array,
        state: ToyState,
        action: jax.Array,
        reward: jax.Array,
        clicks: jax.Array,
    ) -> ToyState:
        del key, reward
        history = state.history.at[state.used].set(clicks @ action)
        return state._replace(history=history, used=state.used + 1)

    def clicked_step(
        key: jax.Array, state: EnvState, action: jax.Array
    ) -> tuple[EnvState, Outcome]:
        state, outcome = env_step(key, state, action)
        return state, outcome._replace(clicks=action + 1)

    def last_history(policy: Policy, step: Any) -> tuple[runner.Curves, np.ndarray]:
        kept = []
        curves = runner.run(
            policy,
            **setting | {"env_step": step},
            rounds=F_IN,
            f_in=F_IN,
            on_block=lambda s: kept.append(np.array(s.state.history[:NUM_SEEDS])),
        )
        return curves, kept[0]

    both = POLICY._replace(tell_clicks=tell_clicks)
    plain, told = last_history(POLICY, env_step)
    _, clicked = last_history(both, clicked_step)
    np.testing.assert_array_equal(clicked, clicked.astype(int))  # sums of integers
    assert (clicked > 0).all()
    # Without clicks, or without a use for them, all is as before.
    for policy, step in ((both, env_step), (POLICY, clicked_step)):
        same, history = last_history(policy, step)
        assert_same(same, plain)
        np.testing.assert_array_equal(history, told)


def test_run__shapes_dtypes_and_times(setting: dict) -> None:
    # A fresh policy, because the others are compiled already.
    curves = runner.run(toy_policy(), **setting, rounds=10, f_in=F_IN)
    assert curves.reward.shape == (NUM_SEEDS, 10)
    assert curves.num_rounds == 10
    assert curves.violations.dtype == curves.origin.dtype == np.int32
    assert curves.block_seconds.shape == curves.compile_seconds.shape == (3,)
    assert (curves.compile_seconds <= curves.block_seconds).all()
    assert curves.compile_seconds[0] > 0
    assert curves.seconds_per_round > 0
    assert not curves.interrupted


def test_run__traces_once_a_length_and_never_for_the_round_number(
    setting: dict,
) -> None:
    counter: dict = {}
    policy = toy_policy(counter)._replace(refresh=lambda key, state: state)
    wide = policy._replace(
        init=lambda key, p: policy.init(key, p)._replace(history=jnp.zeros((64,)))
    )
    runner.run(wide, **setting, rounds=5 * F_IN, f_in=F_IN)
    one_trace = counter["ask"]
    runner.run(wide, **setting, rounds=5 * F_IN, f_in=F_IN)
    assert counter["ask"] == one_trace  # the second run compiles nothing
    runner.run(wide, **setting, rounds=5 * F_IN + 1, f_in=F_IN)
    assert counter["ask"] == 2 * one_trace  # the short last block


def test_run__leaves_the_callers_arrays_alone(setting: dict) -> None:
    before = jax.device_get((setting["env_states"], setting["problems"].conflicts))
    runner.run(POLICY, **setting, rounds=9, f_in=F_IN)
    after = jax.device_get((setting["env_states"], setting["problems"].conflicts))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_run__one_array_in_two_places_of_the_state(setting: dict) -> None:
    policy = toy_policy()

    def refresh(key: jax.Array, state: ToyState) -> ToyState:
        state = policy.refresh(key, state)
        worth = setting["problems"]
        return state._replace(key=key, problem=worth)

    twice = policy._replace(refresh=refresh)
    curves = runner.run(twice, **setting, rounds=9, f_in=F_IN)
    assert curves.num_rounds == 9
    assert setting["problems"].conflicts.sum() == 6 * NUM_SEEDS


def test_run__noise_of_the_environment_does_not_depend_on_the_policy(
    setting: dict,
) -> None:
    other = toy_policy()._replace(ask=lambda key, s: (s, jnp.arange(K)))
    one = runner.run(POLICY, **setting, rounds=6, f_in=F_IN)
    two = runner.run(other, **setting, rounds=6, f_in=2)
    np.testing.assert_allclose(
        one.reward - one.mean_reward, two.reward - two.mean_reward, atol=1e-6
    )
    assert not np.array_equal(one.mean_reward, two.mean_reward)


@pytest.mark.parametrize("stop", [1, 3])
def test_run__resumed_from_a_file_is_equal_bit_for_bit(
    setting: dict, tmp_path: Path, stop: int
) -> None:
    policy, path = POLICY, tmp_path / "run.npz"
    whole = runner.run(policy, **setting, rounds=14, f_in=F_IN)

    def save(snapshot: runner.Snapshot) -> bool:
        checkpoint.save_snapshot(path, snapshot, setting["keys"])
        return snapshot.round == stop * F_IN

    part = runner.run(policy, **setting, rounds=14, f_in=F_IN, on_block=save)
    assert part.interrupted
    assert part.num_rounds == stop * F_IN
    fresh = toy_policy()
    like = {n: setting[n] for n in ("env_states", "problems", "keys")}
    start = checkpoint.load_snapshot(path, fresh, **like)
    assert start.round == stop * F_IN
    rest = runner.run(fresh, **setting, rounds=14, f_in=F_IN, start=start)
    assert_same(rest, whole)
    assert rest.block_seconds.shape == whole.block_seconds.shape
    assert os.listdir(tmp_path) == ["run.npz"]


def test_run__stopped_by_on_block_at_the_last_block_is_not_interrupted(
    setting: dict,
) -> None:
    curves = runner.run(
        POLICY, **setting, rounds=8, f_in=F_IN, on_block=lambda s: s.round == 8
    )
    assert not curves.interrupted


@pytest.mark.parametrize("where", ["refresh", "on_block"])
def test_run__keyboard_interrupt_returns_the_finished_blocks(
    setting: dict, where: str
) -> None:
    whole = runner.run(POLICY, **setting, rounds=12, f_in=F_IN)
    if where == "refresh":
        policy, on_block = toy_policy(fail_at=3), None
    else:
        policy = POLICY

        def on_block(snapshot: runner.Snapshot) -> None:
            if snapshot.round == 8:
                raise KeyboardInterrupt

    curves = runner.run(policy, **setting, rounds=12, f_in=F_IN, on_block=on_block)
    assert curves.interrupted
    assert curves.num_rounds == 8
    np.testing.assert_array_equal(curves.reward, whole.reward[:, :8])


def test_run__interrupted_before_the_first_block_returns_nothing(
    setting: dict,
) -> None:
    curves = runner.run(toy_policy(fail_at=1), **setting, rounds=12, f_in=F_IN)
    assert curves.interrupted
    assert curves.reward.shape == (NUM_SEEDS, 0)
    assert curves.seconds_per_round == 0


def test_run__other_errors_pass_on_and_listeners_are_removed(setting: dict) -> None:
    from jax._src import monitoring

    def broken(key: jax.Array, state: ToyState) -> ToyState:
        raise RuntimeError("no")

    before = len(monitoring.get_event_duration_listeners())
    with pytest.raises(RuntimeError, match="no"):
        runner.run(
            toy_policy()._replace(refresh=broken), **setting, rounds=4, f_in=F_IN
        )
    assert len(monitoring.get_event_duration_listeners()) == before


def test_run__refuses_bad_arguments(setting: dict) -> None:
    policy = POLICY
    with pytest.raises(ValueError, match="rounds must be"):
        runner.run(policy, **setting, rounds=0, f_in=F_IN)
    with pytest.raises(ValueError, match="f_in must be"):
        runner.run(policy, **setting, rounds=4, f_in=0)
    for bad in (jax.random.key(0), jnp.zeros((NUM_SEEDS, 2), jnp.uint32)):
        with pytest.raises(ValueError, match="one typed key a seed"):
            runner.run(policy, **(setting | {"keys": bad}), rounds=4, f_in=F_IN)
    kept = []
    runner.run(policy, **setting, rounds=6, f_in=3, on_block=kept.append)
    with pytest.raises(ValueError, match="not the end of a block"):
        runner.run(policy, **setting, rounds=8, f_in=F_IN, start=kept[0])
    with pytest.raises(ValueError, match="is less"):
        runner.run(policy, **setting, rounds=2, f_in=3, start=kept[0])


def test_compile_clock__counts_nested_stages_once() -> None:
    with runner.compile_clock() as compiled:
        assert compiled() == 0
        jax.monitoring.record_event_duration_secs("/jax/core/compile/inner", 0.2)
        jax.monitoring.record_event_duration_secs("/jax/core/compile/inner", 0.1)
        assert compiled() == pytest.approx(0.2, abs=0.05)
        jax.monitoring.record_event_duration_secs("/jax/core/compile/outer", 5.0)
        jax.monitoring.record_event_duration_secs("/jax/other", 50.0)
        assert compiled() == pytest.approx(5.0, abs=0.05)


def save_one(setting: dict, path: Path, policy: Policy) -> dict:
    runner.run(
        policy,
        **setting,
        rounds=F_IN,
        f_in=F_IN,
        on_block=lambda s: checkpoint.save_snapshot(path, s, setting["keys"]),
    )
    return {n: setting[n] for n in ("env_states", "problems", "keys")}


def test_load_snapshot__says_what_does_not_fit(setting: dict, tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    like = save_one(setting, path, POLICY)
    with pytest.raises(ValueError, match="other seeds"):
        other = jax.random.split(jax.random.key(2), NUM_SEEDS)
        checkpoint.load_snapshot(path, toy_policy(), **(like | {"keys": other}))
    stateless = toy_policy()._replace(init=lambda key, problem: jnp.zeros(()))
    with pytest.raises(ValueError, match="does not fit the policy"):
        checkpoint.load_snapshot(path, stateless, **like)
    base = toy_policy()
    changed = base._replace(
        init=lambda key, p: base.init(key, p)._replace(used=jnp.zeros(()))
    )
    with pytest.raises(ValueError, match="does not fit the policy"):
        checkpoint.load_snapshot(path, changed, **like)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="cannot be read"):
        checkpoint.load_snapshot(path, toy_policy(), **like)


def test_atomic_file__keeps_the_old_file_when_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), checkpoint.atomic_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    with checkpoint.atomic_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_run__a_start_can_be_used_twice(setting: dict, tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    like = save_one(setting, path, POLICY)
    start = checkpoint.load_snapshot(path, POLICY, **like)
    again = [
        runner.run(POLICY, **setting, rounds=12, f_in=F_IN, start=start)
        for _ in range(2)
    ]
    assert_same(*again)
    assert again[0].num_rounds == 12
