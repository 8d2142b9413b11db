"""A master for users whose taste moves: linear worths at two speeds, filtered exactly.

    r_t = c + sum over a in S_t of (slow(a) + fast_t(a)) + noise,
    fast_{t+1} = rho fast_t + innovations,   rho = exp(-1 / tau)

What a user likes in the long run is `slow`; what the user is after now is `fast`,
which fades within some `tau` rounds unless clicks keep it up. A model that only
forgets, be it by weights gamma^age or by a window, has to choose between the two. Mean
and confidence are those of the exact posterior, by a Kalman filter of 2L + 1 numbers:
a round costs O(L^2) whatever the length of the history, and nothing is left to refresh.

How long interests last, how much of them is for long, and how noisy rewards are is not
known: a bank of filters runs side by side, and the one with the best one-step-ahead
predictions of the last rounds (log likelihood, discounted) is the model. The unit of
all variances drops out of the means and is the mean squared standardised error.

Source: Kalman 1960; the discounted master of the paper's appendix, ALGORITHMS 1.2, of
which this is the form with a model of the drift.

Differs from the paper:
* forgetting is a model of how worths move instead of a discount of the past;
* the reward is linear in the set, as that of a log is.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.link import identity_link
from msb_jax.masters import history as hist
from msb_jax.masters.scoring import check_constraints, total_score
from msb_jax.problem import Problem, to_multi_hot, violated_pairs, violation_rate
from msb_jax.types import Belief, Key, Master, Quadratic, Score

# Prior variance of the constant, in units of an arm's fast variance.
LEVEL_VARIANCE = 100.0
# Rounds kept for the samplers to look at.
MEMORY = 256


@dataclass(frozen=True, kw_only=True)
class KalmanUcbConfig:
    """Settings of the tracking master; the grid is that of the bank of filters."""

    taus: tuple[float, ...] = (7.0, 15.0, 30.0, 60.0)  # rounds that interests last
    slow: tuple[float, ...] = (0.1, 0.5)  # variance of `slow`, that of `fast` is 1
    noise: tuple[float, ...] = (0.05, 0.5)  # variance of the noise, in the same unit
    static_noise: tuple[float, ...] = (1.0, 10.0)  # filters without `fast`
    forget: float = 0.998  # weight of an older prediction error
    radius: float = 3.0  # times the posterior deviation
    lam: float = 5.0
    constraints: str = "soft"
    block: int = 20  # rounds between two refreshes

    def __post_init__(self) -> None:
        check_constraints(self.constraints, self.lam)
        for name in ("taus", "slow", "noise", "static_noise"):
            if any(not value > 0 for value in getattr(self, name)):
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")
        if not self.slow or not ((self.taus and self.noise) or self.static_noise):
            raise ValueError("The bank of filters is empty.")
        if not 0 < self.forget <= 1:
            raise ValueError(f"forget must be in (0, 1], got {self.forget}.")
        if not self.radius >= 0:
            raise ValueError(f"radius must not be negative, got {self.radius}.")


class Filters(NamedTuple):
    """The settings of G filters."""

    rho: jax.Array  # [G] what is left of `fast` after a round; 0 without
    slow: jax.Array  # [G]
    fast: jax.Array  # [G] 1, or 0 in a static filter
    noise: jax.Array  # [G]


class KalmanUcbState(NamedTuple):
    """Beliefs of all filters about the next round."""

    problem: Problem
    history: hist.History
    mean: jax.Array  # [G, 2L + 1] slow, fast and the constant, in rewards
    cov: jax.Array  # [G, 2L + 1, 2L + 1] in units of `unit`
    errors: jax.Array  # [G] discounted sum of squared standardised errors
    log_sizes: jax.Array  # [G] and of the logarithms of their variances
    weight: jax.Array  # [] discounted number of rounds


def filters(config: KalmanUcbConfig) -> Filters:
    """List the bank."""
    moving = [
        (jnp.exp(-1.0 / tau), slow, 1.0, noise)
        for tau, slow, noise in itertools.product(
            config.taus, config.slow, config.noise
        )
    ]
    still = [(0.0, 1.0, 0.0, noise) for noise in config.static_noise]
    return Filters(*jnp.array(moving + still, jnp.float32).T)


def kalman_ucb(config: KalmanUcbConfig = KalmanUcbConfig()) -> Master:
    """Build the tracking master."""

    def init(key: Key, problem: Problem) -> KalmanUcbState:
        del key
        bank, size = filters(config), problem.num_arms
        ones = jnp.ones((size,))
        prior = jax.vmap(
            lambda slow, fast: jnp.concatenate(
                [slow * ones, fast * ones, jnp.array([LEVEL_VARIANCE])]
            )
        )(bank.slow, bank.fast)
        number = bank.rho.shape[0]
        capacity = hist.next_capacity(MEMORY, 2 * hist.slack(config.block))
        return KalmanUcbState(
            problem=problem,
            history=hist.new_history(capacity, problem.k),
            mean=jnp.zeros((number, 2 * size + 1)),
            cov=jax.vmap(jnp.diag)(prior),
            errors=jnp.zeros((number,)),
            log_sizes=jnp.zeros((number,)),
            weight=jnp.zeros(()),
        )

    def update(
        key: Key, state: KalmanUcbState, action: jax.Array, reward: jax.Array
    ) -> KalmanUcbState:
        del key
        bank, size = filters(config), state.problem.num_arms
        reward = jnp.asarray(reward, jnp.float32)
        is_known = jnp.isfinite(reward)
        hot = to_multi_hot(action, size)
        row = jnp.concatenate([hot, hot, jnp.ones((1,))])

        def one(
            mean: jax.Array,
            cov: jax.Array,
            rho: jax.Array,
            fast: jax.Array,
            noise: jax.Array,
        ) -> tuple[jax.Array, ...]:
            column = cov @ row
            variance = row @ column + noise
            error = jnp.where(is_known, reward - row @ mean, 0.0)
            gain = jnp.where(is_known, 1.0 / variance, 0.0) * column
            mean = mean + gain * error
            cov = cov - gain[:, None] * column[None, :]
            # Time passes: `fast` fades, and may have moved.
            keep = jnp.ones_like(row).at[size : 2 * size].set(rho)
            moved = (
                jnp.zeros_like(row)
                .at[size : 2 * size]
                .set(fast * (1.0 - jnp.square(rho)))
            )
            cov = keep[:, None] * cov * keep[None, :] + jnp.diag(moved)
            cov = 0.5 * (cov + cov.T)
            return keep * mean, cov, jnp.square(error) / variance, jnp.log(variance)

        mean, cov, error, log_size = jax.vmap(one)(
            state.mean, state.cov, bank.rho, bank.fast, bank.noise
        )
        known = is_known.astype(jnp.float32)
        forget = jnp.where(is_known, config.forget, 1.0)
        return state._replace(
            history=hist.append(state.history, action, reward),
            mean=mean,
            cov=cov,
            errors=forget * state.errors + known * error,
            log_sizes=forget * state.log_sizes + known * log_size,
            weight=forget * state.weight + known,
        )

    def unit(state: KalmanUcbState) -> jax.Array:
        """Unit of the variances of every filter: [G]."""
        # One imagined error of a hundredth keeps it above 0 before the first round.
        return (state.errors + 1e-4) / (state.weight + 1.0)

    def chosen(state: KalmanUcbState) -> jax.Array:
        """The filter that predicts best: [] int32."""
        misfit = state.weight * jnp.log(unit(state)) + state.log_sizes
        return jnp.argmin(misfit)

    def worths(state: KalmanUcbState) -> tuple[jax.Array, jax.Array]:
        """Expected worth of the arms and the constant [L + 1], and the covariance."""
        best, size = chosen(state), state.problem.num_arms
        mean, cov = state.mean[best], state.cov[best]
        whole = jnp.append(mean[:size] + mean[size:-1], mean[-1])
        slow, fast = slice(0, size), slice(size, 2 * size)
        inner = cov[slow, slow] + cov[slow, fast] + cov[fast, slow] + cov[fast, fast]
        edge = cov[slow, -1] + cov[fast, -1]
        joint = jnp.block([[inner, edge[:, None]], [edge[None, :], cov[-1:, -1:]]])
        return whole, unit(state)[best] * joint

    def rows_of(state: KalmanUcbState, actions: jax.Array) -> jax.Array:
        hot = to_multi_hot(actions, state.problem.num_arms)
        return jnp.concatenate([hot, jnp.ones((actions.shape[0], 1))], axis=1)

    def noise_of(state: KalmanUcbState) -> jax.Array:
        best = chosen(state)
        return unit(state)[best] * filters(config).noise[best]

    def belief(state: KalmanUcbState, actions: jax.Array) -> Belief:
        whole, joint = worths(state)
        rows = rows_of(state, actions)
        return Belief(
            mean=rows @ whole,
            cov=rows @ joint @ rows.T,
            noise=noise_of(state),
            link=identity_link(),
        )

    def score(state: KalmanUcbState, actions: jax.Array) -> Score:
        whole, joint = worths(state)
        rows = rows_of(state, actions)
        variance = jnp.sum((rows @ joint) * rows, axis=1)
        mean, bonus = rows @ whole, radius(state) * jnp.sqrt(jnp.maximum(variance, 0.0))
        pairs = violated_pairs(state.problem, actions)
        rate = violation_rate(state.problem, actions)
        scale = 1.0 + jnp.max(jnp.abs(mean))
        total = total_score(
            mean, bonus, pairs, rate, config.lam, config.constraints, scale
        )
        return Score(mean=mean, bonus=bonus, violation=rate, total=total)

    def refresh(
        key: Key, state: KalmanUcbState, *, fit: bool = False
    ) -> KalmanUcbState:
        """Let go of old rounds; all that they taught is in the filters."""
        del key, fit
        history = hist.keep_last(state.history, MEMORY)
        return state._replace(history=history._replace(absorbed=history.count))

    def radius(state: KalmanUcbState) -> jax.Array:
        del state
        return jnp.asarray(config.radius, jnp.float32)

    def fitted(state: KalmanUcbState) -> jax.Array:
        """What the rows of the history would be worth now: [C]."""
        whole, _ = worths(state)
        return rows_of(state, state.history.actions) @ whole

    def quadratic(state: KalmanUcbState, arms: jax.Array) -> Quadratic:
        whole, _ = worths(state)
        size = arms.shape[0]
        return Quadratic(
            pair=jnp.zeros((size, size)), linear=whole[arms], offset=whole[-1]
        )

    def draws(key: Key, state: KalmanUcbState, arms: jax.Array, n: int) -> Quadratic:
        whole, joint = worths(state)
        places = jnp.append(arms, state.problem.num_arms)
        part = joint[places][:, places]
        values, vectors = jnp.linalg.eigh(part)
        root = vectors * jnp.sqrt(jnp.maximum(values, 0.0))[None, :]
        noise = jax.random.normal(key, (n, places.size)) @ root.T
        made = whole[places][None, :] + noise
        return Quadratic(
            pair=jnp.zeros((n, arms.size, arms.size)),
            linear=made[:, :-1],
            offset=made[:, -1],
        )

    def memory(state: KalmanUcbState) -> jax.Array:
        """Twice tau, after which an eighth of `fast` is left; for ever without."""
        rho = filters(config).rho[chosen(state)]
        return jnp.where(rho > 0, -2.0 / jnp.log(jnp.maximum(rho, 1e-6)), jnp.inf)

    def grow(state: KalmanUcbState, capacity: int) -> KalmanUcbState:
        return state._replace(history=hist.grow(state.history, capacity))

    full = jax.default_matmul_precision("highest")
    return Master(
        init=init,
        update=full(update),
        refresh=refresh,
        due=lambda state: False,
        belief=full(belief),
        score=full(score),
        fitted=full(fitted),
        link=lambda state: identity_link(),
        radius=radius,
        marginals=lambda state: worths(state)[0][:-1],
        quadratic=quadratic,
        draws=full(draws),
        grow=grow,
        is_live=True,
        memory=memory,
    )
