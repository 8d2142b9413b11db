"""The clicks of a real user, replayed: what a set would have earned at each round.

At round t the log shows a window of 2K clicks, and a set earns the share of them that
fell on its arms,

    r_t(S) = sum over a in S of n_t(a) / 2K,

n_t(a) the clicks on arm a in [t-K, t+K), cut off at the ends of the log. Rewards lie in
[0, 1] and have no noise; what makes the task hard is that interests move.

Source: paper, section "Real-world datasets"; ALGORITHMS I-2, I-10, I-11.

Differs from the paper:
* clicks count as often as they happened, and are divided by 2K (I-11); `counting="set"`
  is the printed formula, in which an arm counts once;
* the window may look back only (`is_causal`): the last 2K clicks before round t;
* a run ends with the log, instead of going on with empty windows (I-11).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax.problem import Problem
from msb_jax.solvers.scip import LinearProgram
from msb_jax.types import Key, Outcome

COUNTING = ("multiplicity", "set")


@dataclass(frozen=True, kw_only=True)
class WindowConfig:
    """How a window of clicks becomes a reward."""

    counting: str = "multiplicity"  # or "set"
    is_causal: bool = False  # the 2K clicks before a round instead of those around it

    def __post_init__(self) -> None:
        if self.counting not in COUNTING:
            raise ValueError(
                f"counting must be one of {', '.join(COUNTING)}, got {self.counting!r}."
            )


class ReplayLogState(NamedTuple):
    """What the environment needs to answer, and the round it is in."""

    worth: jax.Array  # [T, L] float32, what each arm adds to the reward of each round
    round: jax.Array  # [] int32


class References(NamedTuple):
    """What is possible on a log, in mean rewards over all rounds."""

    random: float  # a uniform set of K arms
    best_fixed: float  # the best set of all rounds, with as few conflicts as can be
    clairvoyant: float  # the best such set of every round
    clairvoyant_free: float  # the best set of every round, whatever conflicts
    least_pairs: int  # conflicting pairs of any set at least; 0 if there is a way
    best_action: np.ndarray  # [K] int32, of best_fixed


def num_rounds(num_clicks: int, k: int) -> int:
    """Rounds that a log has clicks for, those of a cut-off last window left out."""
    if num_clicks <= k:
        raise ValueError(
            f"The log has {num_clicks} clicks; windows of {2 * k} need more than {k}."
        )
    return num_clicks - k


def window_worth(
    clicks: np.ndarray,
    num_arms: int,
    k: int,
    rounds: int,
    config: WindowConfig = WindowConfig(),
) -> np.ndarray:
    """What each arm adds to the reward of each round: float32[rounds, L].

    Args:
        clicks: int[N], the arm of each click, in the order of time.
        num_arms: L.
        k: half of the window.
        rounds: T, at most `num_rounds`.
        config: see there.
    """
    most = num_rounds(clicks.size, k)
    if not 1 <= rounds <= most:
        raise ValueError(
            f"rounds must be in 1..{most}, the windows of {clicks.size} clicks, got "
            f"{rounds}."
        )
    total = np.zeros((clicks.size + 1, num_arms), np.int32)
    total[np.arange(1, clicks.size + 1), clicks] = 1
    total = np.cumsum(total, axis=0)  # [N + 1, L], clicks before each moment
    t = np.arange(rounds)
    first, last = (t - 2 * k, t) if config.is_causal else (t - k, t + k)
    counts = total[last] - total[np.maximum(first, 0)]
    if config.counting == "set":
        counts = np.minimum(counts, 1)
    return (counts / (2.0 * k)).astype(np.float32)


def replay_state(worth: np.ndarray) -> ReplayLogState:
    """Start at the first round."""
    return ReplayLogState(jnp.asarray(worth), jnp.zeros((), jnp.int32))


def step(
    key: Key, state: ReplayLogState, action: jax.Array
) -> tuple[ReplayLogState, Outcome]:
    """Play a set int32[K]; beyond the end of the log the last window stays."""
    del key  # a log has no noise
    reward = jnp.sum(state.worth[state.round, action])
    state = state._replace(round=jnp.minimum(state.round + 1, len(state.worth) - 1))
    return state, Outcome(reward=reward, mean_reward=reward)


def references(problem: Problem, worth: np.ndarray) -> References:
    """Find what is possible on a log (host)."""
    conflicts, k = np.asarray(problem.conflicts), problem.k
    program = LinearProgram(conflicts, k)
    fixed = program.solve(worth.sum(axis=0, dtype=np.float64))
    # Windows of a bursty log are often the same.
    kinds, counts = np.unique(worth, axis=0, return_counts=True)
    best = [program.solve(row.astype(np.float64)).value for row in kinds]
    rounds = len(worth)
    top = -np.sort(-worth, axis=1)[:, :k]
    return References(
        random=float(worth.sum(axis=1).mean()) * k / worth.shape[1],
        best_fixed=float(fixed.value) / rounds,
        clairvoyant=float(np.dot(best, counts)) / rounds,
        clairvoyant_free=float(top.sum(axis=1, dtype=np.float64).mean()),
        least_pairs=int(fixed.violated),
        best_action=fixed.action,
    )
