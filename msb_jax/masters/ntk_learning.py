"""How the closed-form master learns: blocks, fits of the scales, forgetting.

A block of rounds is appended to the root (`absorb`); at a fit the rounds of one set are
merged, the scales chosen by marginal likelihood and the root made anew (`refit`). With
a discount it is made anew at every refresh, from the rounds that still count.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from msb_jax.masters import discount as forget
from msb_jax.masters import history as hist
from msb_jax.masters.evidence import fit_scales, start_scales
from msb_jax.masters.learner import Learner
from msb_jax.masters.ntk_state import (
    KernelOf,
    NtkUcbConfig,
    NtkUcbState,
    cross_columns,
    diagonal,
    fresh_noise,
    kernel_values,
    standardised,
    whiten,
)
from msb_jax.masters.triangular import invert_lower, lift
from msb_jax.problem import Problem
from msb_jax.types import Key

# A set is known after so many rounds. At most this share should play one that is not.
KNOWN_PLAYS = 30.0
MAX_SHARE = 0.1
MAX_STRETCH = 1.1  # log of what the radius is widened by at most
# The first gap between two fits in blocks, and what the next ones are longer by.
FIRST_GAP, GAP_GROWTH = 2, 1.15


def learner(config: NtkUcbConfig, kernel_of: KernelOf) -> Learner:
    """Build what learns, for the kernel of each kind of problem."""
    is_discounted = config.discount != 1.0
    is_auto = config.discount == forget.AUTO
    kernel = functools.partial(kernel_values, kernel_of)
    cross = functools.partial(cross_columns, kernel_of)

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
        most = config.explore * state.problem.num_exchanges
        wanted = jnp.minimum(most / rounds, MAX_SHARE)
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

    return Learner(init=init, refresh=refresh, due=due, grow=grow)
