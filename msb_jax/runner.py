"""Play a policy on a batch of seeds and record every round.

A run alternates two things: `policy.refresh` on the host, for all seeds at once,
and one jitted, vmapped `lax.scan` over the next `f_in` rounds of ask, step, tell.
This is the only module of the library that jits for others.

Keys: with `key` the key of a seed, round t asks with fold_in(stream(key, "ask"), t),
tells with stream "tell" and steps the environment with stream "env"; the refresh
before round t uses stream "refresh". So a run that continues at round t is equal to
one that never stopped, bit for bit, and all policies see the same noise at one seed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax import problem as problem_lib
from msb_jax.parallel import filled_size, map_seeds
from msb_jax.problem import Problem
from msb_jax.rng import stream
from msb_jax.types import EnvStep, Key, Policy, State


class Curves(NamedTuple):
    """What happened in the rounds that were played, and what they cost."""

    reward: np.ndarray  # [B, T] float32, what the policy was told
    mean_reward: np.ndarray  # [B, T] float32, the same without noise
    violations: np.ndarray  # [B, T] int32, conflicting pairs of the action
    origin: np.ndarray  # [B, T] int32, index into `policy.origins`
    producer: np.ndarray  # [B, T] int32, the same for whoever found the action first
    block_seconds: np.ndarray  # [blocks] wall time, refresh and compilation included
    compile_seconds: np.ndarray  # [blocks] the part of it that was compilation
    interrupted: bool = False  # stopped before the last round

    @property
    def num_rounds(self) -> int:
        """Return T, the rounds played."""
        return self.reward.shape[1]

    @property
    def seconds_per_round(self) -> float:
        """Return wall seconds per round and seed, without compilation."""
        busy = self.block_seconds.sum() - self.compile_seconds.sum()
        return float(max(busy, 0.0) / max(self.reward.size, 1))


class Snapshot(NamedTuple):
    """A run between two blocks: all that is needed to go on with it.

    The next block reuses the memory of `state` and `env_state`: whoever wants to
    keep them beyond the `on_block` call must copy or save them. Their leaves may have
    more than B rows: what follows are copies that fill the devices.
    """

    round: int  # rounds played
    state: State  # of the policy, every leaf [B or more, ...]
    env_state: State  # every leaf [B or more, ...]
    curves: Curves  # of the rounds played


def run(
    policy: Policy,
    env_step: EnvStep,
    env_states: State,
    problems: Problem,
    keys: Key,
    *,
    rounds: int,
    f_in: int,
    start: Snapshot | None = None,
    on_block: Callable[[Snapshot], bool | None] | None = None,
) -> Curves:
    """Play `rounds` rounds of `policy` on B seeds.

    Args:
        policy: any `Policy`.
        env_step: see `EnvStep`; written for one run.
        env_states: one environment a seed, every leaf [B, ...].
        problems: what the policy may know, every leaf [B, ...].
        keys: one typed key a seed, [B].
        rounds: T.
        f_in: rounds between two refreshes; the last block may be shorter.
        start: continue from here instead of round 0.
        on_block: called after every block; the run stops when it returns True.

    Returns:
        The curves of all finished blocks, those of `start` included. A
        KeyboardInterrupt ends the run early instead of passing on.
    """
    _check(keys, rounds, f_in)
    _check_clicks(policy, env_step, env_states, problems, keys)
    records, first = _Records(keys.shape[0], rounds), 0
    if start is not None:
        first = _check_start(start, rounds, f_in)
        records.extend(start.curves)
    size = keys.shape[0]
    if (filled := filled_size(size)) != size or start is not None:
        index = np.arange(filled) % size
        fill = functools.partial(jax.tree.map, lambda leaf: leaf[index])
        env_states, problems, keys = fill((env_states, problems, keys))
        if start is not None:
            state, env_state = fill((start.state, start.env_state))
            start = start._replace(state=state, env_state=env_state)
    given = jax.tree.leaves((env_states, problems, keys, start))
    borrowed = {id(leaf) for leaf in given}
    length_of = {t0: min(f_in, rounds - t0) for t0 in range(first, rounds, f_in)}
    refresh_keys = stream(keys, "refresh")
    init, play = _compiled(policy, cast(Hashable, env_step))
    finished = first
    try:
        with compile_clock() as compiled:
            begin, compiled_before = time.perf_counter(), compiled()
            if start is None:
                state = init(stream(keys, "init"), problems)
                env_state = env_states
            else:
                state, env_state = start.state, start.env_state
            state, env_state = _own((state, env_state), borrowed)
            for t0, length in length_of.items():
                state = policy.refresh(_fold(refresh_keys, t0), state)
                state = _own(state, borrowed)
                state, env_state, block = play(
                    state, env_state, keys, problems, t0, length
                )
                jax.block_until_ready((state, env_state))
                now, compiled_now = time.perf_counter(), compiled()
                records.add(t0, block, now - begin, compiled_now - compiled_before)
                finished = t0 + length
                if on_block is not None:
                    so_far = records.curves(finished)
                    if on_block(Snapshot(finished, state, env_state, so_far)):
                        break
                begin, compiled_before = time.perf_counter(), compiled()
    except KeyboardInterrupt:
        pass  # every finished block is in the records
    return records.curves(finished)


@functools.lru_cache(maxsize=16)
def _compiled(
    policy: Policy, env_step: Any
) -> tuple[Callable[..., State], Callable[..., Any]]:
    """Jit the start and one block of a policy.

    Cached, so that a second run of the same policy compiles nothing.
    """

    def play_one(
        state: State, env_state: State, key: Key, problem: Problem, rounds: jax.Array
    ) -> tuple[State, State, dict[str, jax.Array]]:
        ask_key, env_key, tell_key = (stream(key, n) for n in ("ask", "env", "tell"))

        def body(
            carry: tuple[State, State], t: jax.Array
        ) -> tuple[tuple[State, State], dict[str, jax.Array]]:
            state, env_state = carry
            state, action = policy.ask(jax.random.fold_in(ask_key, t), state)
            origin = policy.origin(state)
            found = policy.producer or policy.origin
            producer = found(state)
            step_key = jax.random.fold_in(env_key, t)
            env_state, outcome = env_step(step_key, env_state, action)
            told = jax.random.fold_in(tell_key, t)
            if policy.tell_clicks is None or outcome.clicks is None:
                state = policy.tell(told, state, action, outcome.reward)
            else:
                state = policy.tell_clicks(
                    told, state, action, outcome.reward, outcome.clicks
                )
            record = {
                "reward": outcome.reward,
                "mean_reward": outcome.mean_reward,
                "violations": problem_lib.violated_pairs(problem, action),
                "origin": origin,
                "producer": producer,
            }
            return (state, env_state), record

        (state, env_state), record = jax.lax.scan(body, (state, env_state), rounds)
        return state, env_state, record

    block = map_seeds(play_one, donate=(0, 1))

    def play(
        state: State,
        env_state: State,
        keys: Key,
        problems: Problem,
        t0: int | jax.Array,
        length: int,
    ) -> tuple[State, State, dict[str, jax.Array]]:
        # The rounds are an argument: one compilation serves all blocks of one length.
        rounds = t0 + np.arange(length, dtype=np.int32)
        rounds = np.broadcast_to(rounds, (keys.shape[0], length))
        return block(state, env_state, keys, problems, rounds)

    return map_seeds(policy.init), play


_fold = jax.jit(jax.vmap(jax.random.fold_in, in_axes=(0, None)))


def _own(tree: State, borrowed: set[int]) -> State:
    """Copy the leaves that are not the run's alone, because it donates them.

    A start is the caller's; a refresh may return NumPy arrays, the same array in
    two places, or arrays of the problem.
    """
    seen = set(borrowed)

    def own(leaf: Any) -> jax.Array:
        if not isinstance(leaf, jax.Array) or id(leaf) in seen:
            leaf = jnp.array(leaf, copy=True)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, tree)


class _Records:
    """The arrays [B, T] of a run, filled block by block."""

    def __init__(self, num_seeds: int, rounds: int) -> None:
        kinds: dict[str, Any] = {"reward": np.float32, "mean_reward": np.float32}
        kinds |= dict.fromkeys(("violations", "origin", "producer"), np.int32)
        self._rounds = rounds
        self._arrays = {n: np.zeros((num_seeds, rounds), k) for n, k in kinds.items()}
        self._wall: list[float] = []
        self._compile: list[float] = []

    def extend(self, curves: Curves) -> None:
        """Take over the rounds of an earlier part of the run."""
        for name, array in self._arrays.items():
            array[:, : curves.num_rounds] = getattr(curves, name)
        self._wall += curves.block_seconds.tolist()
        self._compile += curves.compile_seconds.tolist()

    def add(self, t0: int, block: dict[str, Any], wall: float, comp: float) -> None:
        """Write the rounds [t0, t0 + length) of all seeds."""
        for name, array in self._arrays.items():
            values = np.asarray(block[name])  # [B or more, length]
            array[:, t0 : t0 + values.shape[1]] = values[: array.shape[0]]
        self._wall.append(wall)
        self._compile.append(comp)

    def curves(self, finished: int) -> Curves:
        """Return the first `finished` rounds, as views."""
        return Curves(
            **{name: array[:, :finished] for name, array in self._arrays.items()},
            block_seconds=np.array(self._wall),
            compile_seconds=np.array(self._compile),
            interrupted=finished < self._rounds,
        )


@contextmanager
def compile_clock() -> Iterator[Callable[[], float]]:
    """Yield a function that tells the seconds spent tracing and compiling so far.

    jax reports each stage when it ends, and stages nest (a jit inside a jit is
    traced inside the trace of the outer one), so the union of the intervals is
    measured, not the sum of the durations.
    """
    spans: list[tuple[float, float]] = []  # disjoint, in order

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if not event.startswith("/jax/core/compile/"):
            return
        end = time.perf_counter()
        begin = end - duration_secs
        while spans and spans[-1][1] > begin:
            begin = min(begin, spans.pop()[0])
        spans.append((begin, end))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lambda: sum(end - begin for begin, end in spans)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _check(keys: Key, rounds: int, f_in: int) -> None:
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}.")
    if f_in < 1:
        raise ValueError(f"f_in must be at least 1, got {f_in}.")
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.ndim != 1:
        raise ValueError(
            "keys must be one typed key a seed, for example "
            "jax.random.split(jax.random.key(0), num_seeds)."
        )


def _check_clicks(
    policy: Policy, env_step: EnvStep, env_states: State, problems: Problem, keys: Key
) -> None:
    """Let a policy that needs clicks say so where there are none; computes nothing."""
    if policy.tell_clicks is None:
        return

    def first_tell(key: Key, env_state: State, problem: Problem) -> State:
        action = jnp.zeros((problem.k,), jnp.int32)
        _, outcome = env_step(stream(key, "env"), env_state, action)
        if outcome.clicks is not None:
            return None
        start = policy.init(stream(key, "init"), problem)
        return policy.tell(stream(key, "tell"), start, action, outcome.reward)

    # Shapes instead of arrays, so that no key counts as used.
    given = jax.eval_shape(lambda *args: args, keys, env_states, problems)
    jax.eval_shape(jax.vmap(first_tell), *given)


def _check_start(start: Snapshot, rounds: int, f_in: int) -> int:
    if start.round % f_in and start.round < rounds:
        raise ValueError(
            f"A run with f_in={f_in} cannot continue at round {start.round}, which "
            "is not the end of a block; use the f_in the run was started with."
        )
    if start.round > rounds:
        raise ValueError(
            f"The run to continue has {start.round} rounds already; rounds={rounds} "
            "is less."
        )
    return start.round
