"""How the neural master learns: rounds into Z, training, forgetting.

The gradients of the new rounds are taken into Z in blocks (`absorb`), at the weights
with which these rounds were played; then the linear part is solved anew and the network
trained on what it leaves. With a discount the last rounds alone are kept (`let_go`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from msb_jax.masters import discount as forget
from msb_jax.masters import history as hist
from msb_jax.masters import neural_state as neural
from msb_jax.masters import ridge as linear
from msb_jax.masters import training
from msb_jax.masters.learner import Learner
from msb_jax.masters.neural_state import NeuralUcbConfig, NeuralUcbState
from msb_jax.networks import ucb
from msb_jax.problem import Problem, random_sets
from msb_jax.rng import stream
from msb_jax.types import Key

ADAM_RATE = 1e-2


def learner(config: NeuralUcbConfig) -> Learner:
    """Build what learns."""
    optimizer = optax.adam(config.learning_rate or ADAM_RATE)
    is_discounted = config.discount != 1.0
    is_auto = config.discount == forget.AUTO
    network_for = functools.partial(neural.network_for, config)
    confidence_for = functools.partial(neural.confidence_for, config)
    network = functools.partial(neural.network, config)
    gradients = functools.partial(neural.gradients, config)
    mean = functools.partial(neural.mean, config)

    def init(key: Key, problem: Problem) -> NeuralUcbState:
        params = ucb.init_params(stream(key, "params"), network_for(problem))
        trust = confidence_for(problem)
        capacity = config.capacity
        if is_discounted:  # enough for all rounds after the warm-up
            capacity = hist.next_capacity(config.memory, 2 * hist.slack(config.block))
        return NeuralUcbState(
            problem=problem,
            history=hist.new_history(capacity, problem.k),
            params=params,
            # A copy: a caller may donate the state, and no buffer goes twice.
            params_0=jax.tree.map(jnp.copy, params),
            opt_state=optimizer.init(params),
            confidence=trust.init(capacity, problem.k),
            ridge=linear.new_ridge(problem.num_arms),
            gate=linear.new_gate(),
            center=jnp.zeros(()),
            scale=jnp.ones(()),
            fitted=jnp.zeros((capacity,)),
            best=random_sets(stream(key, "best"), problem, config.extractor_sets),
            fitted_at=jnp.zeros((), jnp.int32),
            tracker=forget.new_tracker(problem.num_arms) if is_auto else (),
        )

    def absorb(state: NeuralUcbState) -> NeuralUcbState:
        """Take the pending rounds into Z, at the weights they were played with."""
        history = state.history
        end = jnp.minimum(history.count, history.rewards.shape[0])
        trust = confidence_for(state.problem)
        gamma = forget.present(config.discount, state.tracker)

        def take(_: int, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            matrix, ridge, gate, start = carry
            num_new = jnp.clip(end - start, 0, config.block)
            rows = start + jnp.arange(config.block)
            actions = history.actions.at[rows].get(mode="fill", fill_value=0)
            rewards = history.rewards.at[rows].get(mode="fill", fill_value=0)
            grads = gradients(state, actions)
            outcomes = (rewards - state.center) / state.scale
            outcomes = outcomes - linear.predict(state.ridge, actions)
            forecasts = network(state, actions)
            if is_discounted:
                share = jnp.minimum(linear.GATE_MEMORY, jnp.power(gamma, num_new))
                matrix = trust.absorb(matrix, grads, num_new, gamma)
                gate = linear.compare(gate, forecasts, outcomes, num_new, share)
            else:
                matrix = trust.absorb(matrix, grads, num_new)
                ridge = linear.absorb(ridge, actions, num_new)
                gate = linear.compare(gate, forecasts, outcomes, num_new)
            return matrix, ridge, gate, start + num_new

        num_blocks = _most((end - history.absorbed + config.block - 1) // config.block)
        carry = (state.confidence, state.ridge, state.gate, history.absorbed)
        matrix, ridge, gate, done = jax.lax.fori_loop(0, num_blocks, take, carry)
        return state._replace(
            confidence=matrix,
            ridge=ridge,
            gate=gate,
            history=history._replace(absorbed=done),
        )

    def let_go(state: NeuralUcbState) -> tuple[NeuralUcbState, jax.Array]:
        """Keep the last rows alone, and weigh them by their age: [C]."""
        before = state.history
        gamma = forget.present(config.discount, state.tracker)
        kept = forget.num_kept(gamma, config.memory, config.min_weight)
        state = state._replace(history=hist.keep_last(before, kept))
        weights = neural.weigh(config, state)
        trust = confidence_for(state.problem)
        first = before.count - state.history.count
        state = state._replace(
            confidence=trust.settle(state.confidence, first, weights),
            ridge=linear.recount(state.ridge, state.history.actions, weights),
        )
        return state, weights

    def refresh(
        key: Key, state: NeuralUcbState, *, fit: bool = False
    ) -> NeuralUcbState:
        tracker = forget.track_history(state.tracker, state.history)
        state = absorb(state._replace(tracker=tracker))
        weights = None
        if is_discounted:
            state, weights = let_go(state)
        history = state.history
        is_row = hist.valid_rows(history, history.absorbed)
        if weights is None:
            center, scale = hist.moments(history)
        else:
            center, scale = hist.masked_moments(history.rewards, weights)
        state = state._replace(center=center, scale=scale)
        targets = (history.rewards - center) / scale * is_row
        if config.linear_part:
            told = history.rounds if is_discounted else history.absorbed
            state = state._replace(
                ridge=linear.refit(
                    state.ridge,
                    history.actions,
                    targets,
                    history.absorbed,
                    fit=fit,
                    weights=weights,
                ),
                fitted_at=told if fit else state.fitted_at,
            )
        task = training.Task(
            predict=functools.partial(ucb.predict, network_for(state.problem)),
            actions=history.actions,
            targets=(targets - linear.predict(state.ridge, history.actions)) * is_row,
            num_rows=history.absorbed,
            anchor=state.params_0,
            pull=config.width * config.lam1,
            weights=weights,
        )
        state = train(key, state, task)
        fitted = mean(state, history.actions)
        return state._replace(
            fitted=fitted * is_row, best=best_sets(state, fitted, is_row)
        )

    def train(key: Key, state: NeuralUcbState, task: training.Task) -> NeuralUcbState:
        if config.training == "literal":
            eta = neural.step_size(config, training.total_weight(task))
            params = training.train_literal(task, eta, config.num_steps)
            return state._replace(params=params)
        shape = (config.num_steps, config.batch_size)
        params, opt_state = training.train_adam(
            key, task, optimizer, state.params, state.opt_state, shape
        )
        return state._replace(params=params, opt_state=opt_state)

    def best_sets(
        state: NeuralUcbState, fitted: jax.Array, is_row: jax.Array
    ) -> jax.Array:
        """Choose the sets around which the extractor fits: int32[E, K]."""
        ranked = jnp.where(is_row > 0, fitted, -jnp.inf)
        values, rows = jax.lax.top_k(ranked, min(config.extractor_sets, ranked.size))
        # Fewer rounds than places: the best one takes the empty ones.
        rows = jnp.where(jnp.isfinite(values), rows, rows[0])
        rows = jnp.pad(rows, (0, config.extractor_sets - rows.size), mode="edge")
        played = state.history.actions[rows]
        return jnp.where(state.history.absorbed > 0, played, state.best)

    def due(state: NeuralUcbState) -> bool:
        told = state.history.rounds if is_discounted else state.history.count
        count = int(np.max(np.asarray(told)))
        last = int(np.min(np.asarray(state.fitted_at)))
        wanted = config.fit_growth * last
        if is_discounted:  # after so many rounds all that is remembered is new
            wanted = min(wanted, last + config.memory)
        return config.linear_part and count > 0 and count >= wanted

    def grow(state: NeuralUcbState, capacity: int) -> NeuralUcbState:
        extra = capacity - state.fitted.shape[0]
        if extra <= 0:
            return state
        trust = confidence_for(state.problem)
        return state._replace(
            history=hist.grow(state.history, capacity),
            confidence=trust.grow(state.confidence, capacity),
            fitted=jnp.pad(state.fitted, (0, extra)),
        )

    return Learner(init=init, refresh=refresh, due=due, grow=grow)


@jax.custom_batching.custom_vmap
def _most(num: jax.Array) -> jax.Array:
    """Return `num`; under `vmap` the largest of the batch, shared by all.

    A loop whose bound differs along the batch would copy its whole carry at every
    turn to hold back the runs that are done; here they go through empty turns.
    """
    return num


@_most.def_vmap
def _(axis_size: int, in_batched: list[bool], num: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size
    return _most(num.max(axis=0) if in_batched[0] else num), False
