"""CSAR with EST1 or EST2: estimate arms by Hadamard designs, accept, reject, commit.

Rejwan & Mansour 2020, *Top-k combinatorial bandits with full-bandit feedback*
(ALGORITHMS 8). Phase t estimates the arms that are neither accepted nor rejected to
within eps_t, which halves from phase to phase; it accepts those that lead the
(k'+1)-th by 2 eps_t and rejects those that trail the k'-th by as much, k' being the
places left. EST1 pulls K arms of the contest; EST2 puts the accepted arms into every
pull and explores with the other places only. When K arms are accepted they are
played for ever. It looks at rewards alone, not at lam.

Differs from the paper:
* m is computed for one noise a pull and from an estimate of its variance: the pooled
  variance within repeated pulls, at first of the `num_pilot` sets that phase 1 pulls
  twice. `m_scale` multiplies the pulls; 1 keeps the guarantee for additive rewards
  (8.5: with it and eps_1 = 1/2 nothing would be accepted in 5,000 rounds);
* eps_1 is half the range of the estimates of phase 1. A phase that turns out more
  precise than planned (at least one pull a set) is used for up to two further
  halvings, because without noise and with a reward that is not additive a new
  grouping is worth more than a small eps;
* arms within 1e-6 of the range are equal: then the loop ends with the best estimates;
* sizes that do not fit: see `csar_design`. With L < 2K there is no design; sets are
  random and the weights a least-squares fit to all rounds of finished phases;
* hard constraints: the pulls are repaired (arms in conflict replaced by others), no
  Hadamard decoding is possible, and the same least-squares fit takes its place, with
  its own variances. Accept and reject ask whether swaps around the best feasible
  set, found by SCIP, are worth it (`csar_loop.decide`; a local test, unlike the
  global one without conflicts);
* EST2 takes the worth of accepted arms from the phase that accepted them, not from a
  phase of its own: it only shifts all estimates alike.

Tuning of m_scale: linear rewards, soft constraints, share of the unconstrained optimum
over the rounds after the first 2L, and in the last tenth; L=60, K=6 over 2,000 rounds
is the mean of seeds 0 and 1, L=300, K=20 over 5,000 rounds is seed 0.

    m_scale               0.03            0.1             0.3             1
    EST1, L=60            0.921, 0.936    0.918, 0.939    0.839, 0.939    0.670, 0.832
    EST2, L=60            0.959, 0.997    0.927, 0.965    0.840, 0.947    0.670, 0.832
    EST1, L=300           0.946, 0.964    0.893, 0.922
    EST2, L=300           0.958, 0.990    0.904, 0.951

At 0.03 a radius is 0.8 deviations of an estimate: arms close to the K-th are at times
taken for better or worse than they are, which costs little.

Feedback may come late within a phase, in any order; a set whose reward was lost (NaN)
is pulled again. Rounds told after their phase ended are not used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax.baselines.csar_loop import UNUSED, advance
from msb_jax.baselines.random import check_constraints
from msb_jax.parallel import one_or_many
from msb_jax.problem import Problem, random_feasible_sets, random_sets
from msb_jax.rng import stream
from msb_jax.types import Key, Policy


@dataclass(frozen=True, kw_only=True)
class CsarConfig:
    """Settings of `csar_est1` and `csar_est2`."""

    constraints: str = "soft"
    delta: float = 0.05  # probability of a wrong decision, if m_scale is 1
    m_scale: float = 0.03  # times the pulls that the guarantee asks for
    num_pilot: int = 30  # sets that phase 1 pulls twice

    def __post_init__(self) -> None:
        check_constraints(self.constraints)
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must be between 0 and 1, got {self.delta}.")
        if not (math.isfinite(self.m_scale) and self.m_scale > 0):
            raise ValueError(f"m_scale must be a number > 0, got {self.m_scale}.")
        if self.num_pilot < 1:
            raise ValueError(
                f"num_pilot must be at least 1, got {self.num_pilot}: the noise is "
                "estimated from repeated pulls."
            )


class CsarState(NamedTuple):
    """The pulls of a phase with their rewards, and what is known of the arms.

    S = 2L + 8K rows are room for the pulls of any phase.
    """

    problem: Problem
    slots: jax.Array  # [S, K] int32, sets in ascending order
    target: jax.Array  # [S] int32, wanted pulls; UNUSED for rows without a set
    asked: jax.Array  # [S] int32
    pulled: jax.Array  # [S] int32, rewards told
    mean: jax.Array  # [S] of the rewards
    square: jax.Array  # [S] sum of squared deviations from the mean
    status: jax.Array  # [L] int32: 0 rejected, 1 active, 2 accepted
    theta: jax.Array  # [L] last estimates; NaN before the first
    seed: jax.Array  # [2] uint32, of the design
    phase: jax.Array  # [] int32; 0 before the first refresh
    eps: jax.Array  # [] of the phase
    scale: jax.Array  # [] range of the arms
    noise_sum: jax.Array  # [] squared deviations within equal sets, all phases
    noise_dof: jax.Array  # [] their degrees of freedom
    gram: jax.Array  # [L, L] sum of xx', if weights are fitted; else [0, 0]
    cross: jax.Array  # [L] sum of (r - shift) x; else [0]
    total: jax.Array  # [] sum of r - shift
    rounds: jax.Array  # [] rounds in the sums
    shift: jax.Array  # [] mean reward of phase 1
    is_done: jax.Array  # [] bool


def csar_est1(config: CsarConfig) -> Policy:
    """Make the policy that explores with all K places."""
    return _csar(config, exploit=False)


def csar_est2(config: CsarConfig) -> Policy:
    """Make the policy that plays accepted arms while it explores."""
    return _csar(config, exploit=True)


def _csar(config: CsarConfig, exploit: bool) -> Policy:
    draw_sets = random_feasible_sets if config.constraints == "hard" else random_sets

    def init(key: Key, problem: Problem) -> CsarState:
        zero, none = jnp.zeros(()), jnp.zeros((), jnp.int32)
        size, k = problem.num_arms, problem.k
        rows = 2 * size + 8 * k
        fitted = size if config.constraints == "hard" or size < 2 * k else 0
        # Played if someone asks before the first refresh.
        sets = jnp.sort(draw_sets(key, problem, 8), axis=1)
        return CsarState(
            problem=problem,
            slots=sets[jnp.arange(rows) % 8],
            target=jnp.full((rows,), UNUSED, jnp.int32),
            asked=jnp.zeros((rows,), jnp.int32),
            pulled=jnp.zeros((rows,), jnp.int32),
            mean=jnp.zeros((rows,)),
            square=jnp.zeros((rows,)),
            status=jnp.ones((size,), jnp.int32),
            theta=jnp.full((size,), jnp.nan),
            seed=jnp.zeros((2,), jnp.uint32),
            phase=none,
            eps=zero,
            scale=zero,
            noise_sum=zero,
            noise_dof=zero,
            gram=jnp.zeros((fitted, fitted)),
            cross=jnp.zeros((fitted,)),
            total=zero,
            rounds=zero,
            shift=zero,
            is_done=jnp.zeros((), bool),
        )

    def ask(key: Key, state: CsarState) -> tuple[CsarState, jax.Array]:
        del key
        row = jnp.argmax(state.target - state.asked)  # the first that lacks most
        return state._replace(asked=state.asked.at[row].add(1)), state.slots[row]

    def tell(
        key: Key, state: CsarState, action: jax.Array, reward: jax.Array
    ) -> CsarState:
        del key
        is_same = (state.slots == jnp.sort(action)[None, :]).all(axis=1)
        is_same &= state.target > UNUSED
        # A set may have two rows: then the one that was told less.
        row = jnp.argmin(jnp.where(is_same, state.pulled, jnp.iinfo(jnp.int32).max))
        is_new = is_same[row] & jnp.isfinite(reward)
        count = state.pulled[row] + 1
        gap = jnp.where(is_new, reward - state.mean[row], 0.0)
        step = gap / count.astype(gap.dtype)
        return state._replace(
            pulled=state.pulled.at[row].add(is_new.astype(jnp.int32)),
            mean=state.mean.at[row].add(step),
            square=state.square.at[row].add(gap * (gap - step)),
        )

    @jax.jit
    @jax.vmap
    def draw_words(key: Key) -> jax.Array:
        return jax.random.bits(stream(key, "design"), (2,), jnp.uint32)

    def refresh_all(keys: Key, state: CsarState) -> CsarState:
        count, asked, target = (
            np.asarray(x) for x in (state.pulled, state.asked, state.target)
        )  # [B, S]
        is_open = ~np.asarray(state.is_done)  # [B]
        is_due = is_open & (count >= target).all(axis=1)
        # All was asked, but some rewards never came: ask for these again.
        is_lost = is_open & ~is_due & (asked >= target).all(axis=1)
        if is_lost.any():
            again = np.where(is_lost[:, None], count, asked)
            state = state._replace(asked=jnp.asarray(again))
        if not is_due.any():
            return state
        words = np.asarray(draw_words(keys))
        fields = {n: getattr(state, n) for n in state._fields if n != "problem"}
        whole = {n: np.array(leaf) for n, leaf in fields.items()}
        problems = jax.device_get(state.problem)
        for b in np.flatnonzero(is_due).tolist():
            problem = jax.tree.map(lambda leaf, b=b: leaf[b], problems)
            run = CsarState(problem, **{n: leaf[b] for n, leaf in whole.items()})
            run = advance(run, words[b], config, exploit)
            for name, leaf in whole.items():
                leaf[b] = getattr(run, name)
        return state._replace(**jax.tree.map(jnp.asarray, whole))

    def origin(state: CsarState) -> jax.Array:
        return state.is_done.astype(jnp.int32)

    return Policy(
        init, ask, tell, one_or_many(refresh_all), origin, ("explore", "accepted")
    )
