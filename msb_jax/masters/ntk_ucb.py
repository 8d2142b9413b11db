"""NeuralUCB in function space: the closed form of the paper's master.

The paper trains its network by J gradient steps from theta_0 with a pull towards
theta_0. The limit of that is ridge regression in the gradient features at theta_0,
that is a Gaussian process whose kernel is the tangent kernel of the network; on sets
of K arms this is a function of the overlap alone (`set_kernel`). Mean and confidence
are then both exact and cost nothing that grows with L:

    U(S) = m(S) + gamma sqrt(v(S)),
    m = k_S'(K + s I)^-1 r,   v = k(S, S) - k_S'(K + s I)^-1 k_S

Source: paper, section "Master model"; Zhou, Li and Gu 2020; ALGORITHMS 1.1.

Differs from the paper:
* closed form instead of gradient steps (the limit of them, see above);
* the kernel has linear and quadratic terms beside the tangent kernel, and the weights
  of the three and the noise are chosen by marginal likelihood, on a geometric schedule
  of rounds; the constant is estimated by generalised least squares;
* rewards are standardised (I-9), on a monotone scale (`link`) whose power the
  likelihood chooses: a cubic of a linear function is linear on its cube-root scale;
* rounds that played the same set are one row, with their mean reward and a noise
  divided by their number: the same posterior, from far fewer rows;
* the inverse of the Cholesky factor is kept: solves are then matrix products, which
  run at full speed on every kind of device;
* the linear algebra is done once a refresh; between refreshes `belief` over a pool of
  candidates is conditioned exactly, so that no number differs;
* the radius is a constant in calibrated posterior deviations instead of the theory's
  growing gamma_t (I-14), and widens while nothing but known sets is played, so that
  new ones are never given up;
* with a `discount` every round is a row of its own, its noise divided by its weight,
  and the factor is made anew at each refresh. Confidence is that of `discount`, the
  draws are those of the discounted likelihood.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from msb_jax.link import to_latent, to_reward
from msb_jax.masters import discount as forget
from msb_jax.masters import history as hist
from msb_jax.masters.evidence import (
    Scales,
    fit_scales,
    row_noise,
    start_scales,
)
from msb_jax.masters.kernel import Expansion, Kernel, combine
from msb_jax.masters.list_kernel import list_kernel
from msb_jax.masters.scoring import total_score
from msb_jax.masters.set_kernel import set_kernel
from msb_jax.masters.triangular import invert_lower, lift, lower_product
from msb_jax.problem import ORDERED, Problem, violated_pairs, violation_rate
from msb_jax.types import Belief, Key, Master, Quadratic, Score

# Keeps divisions by what is zero before the first round finite.
TINY = 1e-12
# A set is known after so many rounds. At most this share should play one that is not.
KNOWN_PLAYS = 30.0
MAX_SHARE = 0.1
MAX_STRETCH = 1.1  # log of what the radius is widened by at most
# Share of the radius with a discount: what was forgotten is looked at again anyway.
FORGETFUL = 0.75
# The first gap between two fits in blocks, and what the next ones are longer by.
FIRST_GAP, GAP_GROWTH = 2, 1.15


@dataclass(frozen=True, kw_only=True)
class NtkUcbConfig:
    """Settings of the closed-form master."""

    depth: int = 2  # weight matrices of the network whose limit is taken
    radius: float = 3.0  # of the confidence, in posterior deviations
    explore: float = 100.0  # over t: share of rounds for unknown sets; 0: never widen
    lam: float = 5.0  # price of the violation rate (soft constraints)
    constraints: str = "soft"  # or "hard"
    block: int = 20  # rows absorbed at once
    fit_rows: int = 512  # rows the marginal likelihood looks at
    fit_steps: int = 30
    fit_growth: float = 1.2  # refit when the rounds have grown by this factor
    fit_rounds: int = 256  # or by so many
    fit_power: bool = True  # False: model the reward itself
    tangent: bool = True  # False: the linear and the quadratic term alone
    min_noise: float = 5e-4  # share of the kernel's variance; keeps float32 safe
    many_rows: int = 1024  # beyond these the share grows with the rows
    discount: float | str = 1.0  # weight of a round for each it is older, or "auto"
    memory: int = 384  # last rounds that count, with a discount
    min_weight: float = 1e-3  # and their least weight

    def __post_init__(self) -> None:
        if self.depth < 2:
            raise ValueError(f"depth must be at least 2, got {self.depth}.")
        if self.radius < 0 or self.explore < 0:
            raise ValueError(
                "radius and explore must not be negative, got "
                f"{self.radius} and {self.explore}."
            )
        if self.constraints not in ("soft", "hard"):
            raise ValueError(
                f"constraints must be 'soft' or 'hard', got {self.constraints!r}."
            )
        if self.block < 1 or self.fit_rows < 8 or self.fit_growth <= 1:
            raise ValueError(
                "block must be >= 1, fit_rows >= 8 and fit_growth > 1, got "
                f"{self.block}, {self.fit_rows} and {self.fit_growth}."
            )
        if self.fit_rounds < 1 or self.many_rows < 1:
            raise ValueError(
                "fit_rounds and many_rows must be positive, got "
                f"{self.fit_rounds} and {self.many_rows}."
            )
        if not 0 < self.min_noise < 1:
            raise ValueError(f"min_noise must be in (0, 1), got {self.min_noise}.")
        forget.check_discount(self.discount, self.memory, self.min_weight)


class NtkUcbState(NamedTuple):
    """Everything the closed-form master knows."""

    problem: Problem
    history: hist.History
    root: jax.Array  # [C, C] inverse Cholesky factor of K + noise; identity beyond
    whitened: jax.Array  # [C, 2] root times (standardised latent rewards, ones)
    scales: Scales
    fitted_at: jax.Array  # [] int32, rounds told at the last fit of the weights
    num_fits: jax.Array  # [] int32
    stretch: jax.Array  # [] log of what the radius is widened by
    tracker: Any = ()  # what chooses the discount, if it is "auto"


def ntk_ucb(config: NtkUcbConfig = NtkUcbConfig()) -> Master:
    """Build the closed-form NeuralUCB master."""
    is_discounted = config.discount != 1.0
    is_auto = config.discount == forget.AUTO

    sets, lists = set_kernel(config.depth, config.tangent), list_kernel()

    def kernel_of(problem: Problem) -> Kernel:
        return lists if problem.space == ORDERED else sets

    def kernel(state: NtkUcbState, actions: jax.Array, others: jax.Array) -> jax.Array:
        """Kernel values of every pair: [C, N]."""
        weights = jnp.exp(state.scales.log_weights)
        return kernel_of(state.problem).value(state.problem, weights, actions, others)

    def diagonal(state: NtkUcbState, is_row: jax.Array) -> jax.Array:
        """Noise of the rows of the history, 1 where there is none: [C]."""
        noise = row_noise(state.scales, state.history.plays)
        return jnp.where(is_row > 0, noise, 1.0)

    def fresh_noise(state: NtkUcbState) -> jax.Array:
        """Noise of one round: []."""
        return row_noise(state.scales, jnp.ones(()))

    def standardised(state: NtkUcbState, rewards: jax.Array) -> jax.Array:
        scales = state.scales
        return (to_latent(scales.link, rewards) - scales.center) / scales.deviation

    def init(key: Key, problem: Problem) -> NtkUcbState:
        del key
        capacity = hist.next_capacity(0, 2 * config.block)
        if is_discounted:  # enough for all rounds after the warm-up
            capacity = hist.next_capacity(config.memory, 2 * hist.slack(config.block))
        return NtkUcbState(
            problem=problem,
            history=hist.new_history(capacity, problem.k),
            root=jnp.eye(capacity),
            whitened=jnp.zeros((capacity, 2)),
            scales=start_scales(kernel_of(problem).start),
            fitted_at=jnp.zeros((), jnp.int32),
            num_fits=jnp.zeros((), jnp.int32),
            stretch=jnp.zeros(()),
            tracker=forget.new_tracker(problem.num_arms) if is_auto else (),
        )

    def update(
        key: Key, state: NtkUcbState, action: jax.Array, reward: jax.Array
    ) -> NtkUcbState:
        del key
        return state._replace(history=hist.append(state.history, action, reward))

    def whiten(state: NtkUcbState, columns: jax.Array) -> jax.Array:
        """Apply root to columns [C, N] that are 0 beyond the rows of the history."""
        return lower_product(state.root, columns, state.history.absorbed)

    def cross(state: NtkUcbState, actions: jax.Array) -> jax.Array:
        """Whitened kernel columns, root k(history, actions): [C, N]."""
        is_row = hist.valid_rows(state.history, state.history.absorbed)
        values = kernel(state, state.history.actions, actions)
        return whiten(state, values * is_row[:, None])

    def absorb(state: NtkUcbState) -> NtkUcbState:
        """Append the next `block` pending rows to the root (missing ones: I).

        With V = root k(history, new) and C the factor of the new rows' Schur
        complement, the new rows of the root are [-C^-1 V' root, C^-1].
        """
        history, size = state.history, config.block
        start = history.absorbed
        rows = jax.lax.dynamic_slice(
            history.actions, (start, 0), (size, history.actions.shape[1])
        )
        is_new = (start + jnp.arange(size) < history.count).astype(jnp.float32)
        v = cross(state, rows) * is_new[None, :]  # [C, block]
        gram = kernel(state, rows, rows)
        gram = gram * is_new[:, None] * is_new[None, :]
        noise = jnp.where(is_new > 0, fresh_noise(state), 1.0)
        complement = lift(gram - v.T @ v + jnp.diag(noise), jnp.min(noise))
        corner = jnp.linalg.cholesky(complement)
        inverse = solve_triangular(corner, jnp.eye(size), lower=True)
        lines = -inverse @ (v.T @ state.root)
        lines = jax.lax.dynamic_update_slice(lines, inverse, (0, start))
        rewards = jax.lax.dynamic_slice(history.rewards, (start,), (size,))
        targets = jnp.stack([standardised(state, rewards) * is_new, is_new], axis=1)
        fresh = inverse @ (targets - v.T @ state.whitened)  # [block, 2]
        return state._replace(
            root=jax.lax.dynamic_update_slice(state.root, lines, (start, 0)),
            whitened=jax.lax.dynamic_update_slice(
                state.whitened, fresh * is_new[:, None], (start, 0)
            ),
            history=history._replace(absorbed=jnp.minimum(start + size, history.count)),
            stretch=widen(state, rows, is_new),
        )

    def widen(state: NtkUcbState, rows: jax.Array, is_new: jax.Array) -> jax.Array:
        """Widen or narrow the radius by how many rounds explored: [].

        Args:
            rows: int32[block, K], the sets of the last rounds, in the history too.
            is_new: [block], which of them are real.
        """
        history = state.history
        same = jnp.all(rows[:, None, :] == history.actions[None, :, :], axis=2)
        plays = same @ (history.plays * hist.valid_rows(history, history.count))
        explored = jnp.sum(is_new * (plays <= KNOWN_PLAYS))
        rounds = jnp.maximum(history.rounds, 1)
        wanted = jnp.minimum(config.explore / rounds, MAX_SHARE)
        change = (wanted * jnp.sum(is_new) - explored) / is_new.shape[0]
        return jnp.clip(state.stretch + change, 0.0, MAX_STRETCH)

    def refit(state: NtkUcbState) -> NtkUcbState:
        """Merge the rounds, choose the weights by likelihood and factorise afresh."""
        merged = state._replace(history=hist.merge(state.history))
        return factorise(choose_scales(merged))

    def choose_scales(state: NtkUcbState) -> NtkUcbState:
        """Choose the weights by likelihood."""
        history = state.history
        crowd = jnp.maximum(1.0, history.count / config.many_rows)
        terms = kernel_of(state.problem).terms
        scales = fit_scales(
            history,
            lambda actions: terms(state.problem, actions, actions),
            state.scales,
            kernel_of(state.problem).prior,
            num_rows=config.fit_rows,
            num_steps=config.fit_steps,
            min_noise=config.min_noise * crowd,
            fit_power=config.fit_power,
        )
        return state._replace(
            scales=scales, fitted_at=history.rounds, num_fits=state.num_fits + 1
        )

    def factorise(state: NtkUcbState) -> NtkUcbState:
        """Take all rows into a new root."""
        history = state.history
        state = state._replace(history=history._replace(absorbed=history.count))
        is_row = hist.valid_rows(history, history.count)
        gram = kernel(state, history.actions, history.actions)
        gram = gram * is_row[:, None] * is_row[None, :]

        def invert(state: NtkUcbState) -> NtkUcbState:
            full = gram + jnp.diag(diagonal(state, is_row))
            return state._replace(root=invert_lower(jnp.linalg.cholesky(full)))

        def with_more_noise(state: NtkUcbState) -> NtkUcbState:
            """What float32 could not factorise is taken for noise."""
            more = state.scales._replace(floor=30.0 * state.scales.floor)
            return invert(state._replace(scales=more))

        state = invert(state)
        is_sound = jnp.all(jnp.isfinite(jnp.diagonal(state.root)))
        state = jax.lax.cond(is_sound, lambda s: s, with_more_noise, state)
        rewards = standardised(state, history.rewards)
        targets = jnp.stack([rewards * is_row, is_row], axis=1)
        return state._replace(whitened=whiten(state, targets))

    def forgetful(state: NtkUcbState, *, fit: bool) -> NtkUcbState:
        """Weigh the last rounds by their age, and start from these alone."""
        state = state._replace(
            tracker=forget.track_history(state.tracker, state.history)
        )
        gamma = forget.present(config.discount, state.tracker)
        history = state.history
        kept = forget.num_kept(gamma, config.memory, config.min_weight)
        history = hist.keep_last(history, kept)
        capacity = history.rewards.shape[0]
        weights = forget.row_weights(history.count, capacity, gamma)
        is_row = hist.valid_rows(history, history.count) > 0
        history = history._replace(plays=jnp.where(is_row, weights, 1.0))
        state = state._replace(history=history)
        return factorise(choose_scales(state) if fit else state)

    def refresh(key: Key, state: NtkUcbState, *, fit: bool = False) -> NtkUcbState:
        """Learn the next `block` pending rounds, or with `fit` all that there are."""
        del key
        if is_discounted:
            return forgetful(state, fit=fit)
        state = absorb(state)  # of which a fit needs `stretch` alone
        return refit(state) if fit else state

    def due(state: NtkUcbState) -> bool:
        """Ask for a fit on two geometric schedules, and when more than a block waits.

        One goes by all rounds, the other by those after the first fit: random sets say
        little of the noise, and the first ones that are alike say much.
        """
        history = jax.tree.map(np.asarray, state.history)
        rounds, last = int(history.rounds.max()), int(np.min(state.fitted_at))
        former = min(int(np.min(state.num_fits)) - 1, 99)
        gap = FIRST_GAP * config.block * GAP_GROWTH**former
        waiting = int(np.max(history.count - history.absorbed))
        is_sound = bool(np.isfinite(np.asarray(state.whitened)).all())
        is_late = waiting > config.block or 0 < rounds >= config.fit_growth * last
        is_late |= rounds - last >= min(gap, config.fit_rounds)
        return is_late or not is_sound

    def solution(state: NtkUcbState, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Take the least-squares constant out of whitened columns [C, N].

        Returns:
            The columns without it [C, N] and the constants [N].
        """
        ones = state.whitened[:, 1]
        level = ones @ columns / jnp.maximum(ones @ ones, TINY)
        return columns - ones[:, None] * level[None, :], level

    def target(
        state: NtkUcbState,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Whitened residual [C] in units of the deviation; constant; deviation."""
        residual, level = solution(state, state.whitened[:, :1])
        scales = state.scales
        constant = scales.center + scales.deviation * level[0]
        return residual[:, 0], constant, scales.deviation

    def unwhiten(state: NtkUcbState, rows: jax.Array) -> jax.Array:
        """Apply root' to rows [N, C]; a product from the left reads root in order."""
        return rows @ state.root

    def coefficients(state: NtkUcbState) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(K + s I)^-1 applied to the residual; the constant; the deviation."""
        residual, constant, deviation = target(state)
        return unwhiten(state, residual[None, :])[0], constant, deviation

    def doubt(state: NtkUcbState, v: jax.Array) -> jax.Array:
        """Deviation that comes from not knowing the constant: [N]."""
        ones = state.whitened[:, 1]
        return (1.0 - v.T @ ones) / jnp.sqrt(jnp.maximum(ones @ ones, TINY))

    def explained(state: NtkUcbState, v: jax.Array) -> jax.Array:
        """Columns whose products are taken off the prior covariance: [C or 2C, N]."""
        if not is_discounted:
            return v
        ones = state.whitened[:, 1]
        size = jnp.sqrt(jnp.maximum(ones @ ones, TINY))
        # What each row adds to the mean, by way of the constant too.
        pull = v + ones[:, None] * (doubt(state, v) / size)[None, :]
        is_row = hist.valid_rows(state.history, state.history.absorbed)
        noises, noise = diagonal(state, is_row), fresh_noise(state)
        extra = forget.overcount(unwhiten(state, pull.T).T, noises, noise)
        return jnp.concatenate([v, extra])

    def belief(state: NtkUcbState, actions: jax.Array) -> Belief:
        residual, constant, deviation = target(state)
        v = cross(state, actions)
        extra = doubt(state, v)
        known = explained(state, v)
        prior = kernel(state, actions, actions)
        cov = prior - known.T @ known + extra[:, None] * extra[None, :]
        scale = deviation * deviation
        return Belief(
            mean=constant + deviation * (v.T @ residual),
            cov=scale * cov,
            noise=scale * fresh_noise(state),
            link=state.scales.link,
        )

    def radius(state: NtkUcbState) -> jax.Array:
        """Confidence radius gamma_t, in posterior deviations.

        The theory's grows with all that the rounds have told, and never narrows: what
        a linear reward hides is known soon, and it would be explored for ever. This one
        is a constant while there is something new to play, and widens when there is
        not (`widen`): the sets that are played then are the likeliest to be better.
        """
        if is_discounted:
            return jnp.asarray(FORGETFUL * config.radius, jnp.float32)
        return config.radius * jnp.exp(state.stretch)

    def score(state: NtkUcbState, actions: jax.Array) -> Score:
        residual, constant, deviation = target(state)
        v = cross(state, actions)
        weights = jnp.exp(state.scales.log_weights)
        own = kernel_of(state.problem).own(state.problem, weights)
        known = explained(state, v)
        variance = own - jnp.sum(known * known, axis=0) + jnp.square(doubt(state, v))
        latent = constant + deviation * (v.T @ residual)
        reach = radius(state) * deviation * jnp.sqrt(jnp.maximum(variance, 0.0))
        mean = to_reward(state.scales.link, latent)
        bonus = to_reward(state.scales.link, latent + reach) - mean
        rate = violation_rate(state.problem, actions)
        pairs = violated_pairs(state.problem, actions)
        total = total_score(
            mean, bonus, pairs, rate, config.lam, config.constraints, deviation
        )
        return Score(mean=mean, bonus=bonus, violation=rate, total=total)

    def fitted(state: NtkUcbState) -> jax.Array:
        """Posterior mean at every absorbed row: z - s alpha, no kernel needed."""
        alpha, _, deviation = coefficients(state)
        latent = to_latent(state.scales.link, state.history.rewards)
        pull = row_noise(state.scales, state.history.plays) * alpha
        return to_reward(state.scales.link, latent - deviation * pull)

    def weighted(state: NtkUcbState, alpha: jax.Array) -> jax.Array:
        """Coefficients of the rows that count: [C]."""
        return alpha * hist.valid_rows(state.history, state.history.absorbed)

    def marginals(state: NtkUcbState) -> jax.Array:
        alpha, constant, deviation = coefficients(state)
        weights = jnp.exp(state.scales.log_weights)
        worth = kernel_of(state.problem).by_arm(
            state.problem, weights, state.history.actions, weighted(state, alpha)
        )
        return constant + deviation * worth

    def quadratic(state: NtkUcbState, arms: jax.Array) -> Quadratic:
        alpha, constant, deviation = coefficients(state)
        model = expansion(state, arms)
        pull = combine(model, weighted(state, alpha))
        return Quadratic(
            pair=deviation * pull.pair,
            linear=deviation * pull.linear,
            offset=constant + deviation * pull.offset,
        )

    def expansion(state: NtkUcbState, arms: jax.Array) -> Expansion:
        weights = jnp.exp(state.scales.log_weights)
        actions = state.history.actions
        return kernel_of(state.problem).expand(state.problem, weights, actions, arms)

    def draws(key: Key, state: NtkUcbState, arms: jax.Array, n: int) -> Quadratic:
        """Exact posterior draws of the quadratic part (Matheron's rule)."""
        *prior_keys, noise_key = jax.random.split(key, 3)
        capacity = state.history.rewards.shape[0]
        model = expansion(state, arms)
        weights = jnp.exp(state.scales.log_weights)
        linear, pair, values = kernel_of(state.problem).draw(
            prior_keys, state.problem, weights, model, state.history.actions, arms, n
        )
        noise = jnp.sqrt(row_noise(state.scales, state.history.plays))
        values += noise[None, :] * jax.random.normal(noise_key, (n, capacity))
        is_row = hist.valid_rows(state.history, state.history.absorbed)
        residual, constant, deviation = target(state)
        inner, level = solution(state, whiten(state, (values * is_row[None, :]).T))
        alpha = unwhiten(state, residual[None, :] - inner.T)  # [n, C]
        pull = jax.vmap(combine, (None, 0))(model, alpha * is_row[None, :])
        return Quadratic(
            pair=deviation * (pair + pull.pair),
            linear=deviation * (linear + pull.linear),
            offset=constant + deviation * (pull.offset - level),
        )

    def grow(state: NtkUcbState, capacity: int) -> NtkUcbState:
        extra = capacity - state.root.shape[-1]
        if extra <= 0:
            return state
        tail = jnp.arange(capacity) >= capacity - extra
        return state._replace(
            history=hist.grow(state.history, capacity),
            root=jnp.pad(state.root, ((0, extra), (0, extra)))
            + jnp.diag(tail.astype(jnp.float32)),
            whitened=jnp.pad(state.whitened, ((0, extra), (0, 0))),
        )

    def memory(state: NtkUcbState) -> jax.Array:
        return forget.memory(config.discount, state.tracker)

    # Accelerators multiply in lower precision by default, which ends in pivots below 0.
    full = jax.default_matmul_precision("highest")
    return Master(
        init=init,
        update=update,
        refresh=full(refresh),
        due=due,
        belief=full(belief),
        score=full(score),
        fitted=full(fitted),
        radius=radius,
        marginals=full(marginals),
        quadratic=full(quadratic),
        link=lambda state: state.scales.link,
        draws=full(draws),
        grow=grow,
        memory=memory if is_discounted else None,
    )
