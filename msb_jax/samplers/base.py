"""What a sampler is, and what it may look at.

A sampler proposes sets; it never sees the environment. What it may use is gathered
once a refresh by the agent in a `View`. A sampler whose work needs the host (an
integer program) says what it wants in `request`; the agent collects the requests of
all seeds, calls `solve` once, and hands the answer back in `Context.answer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.problem import Problem
from msb_jax.spaces import Scene, space_of
from msb_jax.types import Key, Quadratic, State


class View(NamedTuple):
    """The state of the search at a refresh, for one run."""

    problem: Problem
    round: jax.Array  # [] int32, rounds played
    forbidden: jax.Array  # [L, L] bool, pairs no proposal may hold (none if soft)
    pair_price: jax.Array  # [] reward a conflicting pair costs; inf if forbidden
    arms: jax.Array  # [A] int32, sorted: the arms that `model` speaks of
    model: Quadratic  # on `arms`: the mean reward less the price of conflicts
    marginals: jax.Array  # [L]
    elites: jax.Array  # [E, K] int32, the best distinct sets played so far
    elite_values: jax.Array  # [E] their expected reward less price, best first
    draw_places: jax.Array  # [A'] int32, sorted: the places in `arms` of `draws`
    draws: Quadratic  # [R, ...] posterior draws of the model, on those arms
    reach: jax.Array  # [A] a bonus for arms of which little is known
    pool: jax.Array  # [N, K] int32, what all samplers proposed last time
    pool_origin: jax.Array  # [N] int32, who; -1 before the first proposals
    played: jax.Array  # [E', K] int32, the last rounds, in no order
    played_values: jax.Array  # [E'] their rewards on the scale of the model
    is_played: jax.Array  # [E'] bool, False where there was no round yet


class Context(NamedTuple):
    """A view, and what the other parts have said."""

    view: View
    request: Any = None  # what this sampler asked of the host
    answer: Any = None  # what its `solve` answered
    peers: jax.Array | None = None  # [N, K] what other samplers propose now
    origin: int | jax.Array = 0  # [] this sampler's number in `view.pool_origin`


class Sampler(NamedTuple):
    """A proposer of sets. `propose` learns nothing; `update` is where it learns."""

    name: str
    init: Callable[[Key, Problem], State]
    propose: Callable[[Key, State, Context, int], jax.Array]  # -> int32[n, K]
    update: Callable[[Key, State, Context], State]
    # Host work: arrays wanted for one run, and the answers for a batch of runs.
    request: Callable[[Key, State, View], Any] | None = None
    solve: Callable[[Any, Any], Any] | None = None
    is_second_stage: bool = False  # proposes after, and from, the others
    # Of its sets, those from which the master's search starts: 12 of the solver, and 4
    # of each learner, which together are as many.
    num_starts: int = 0
    # Steps of cross-entropy of its real-valued output towards a set int32[K].
    imitate: Callable[[Key, State, Context, jax.Array], State] | None = None
    # Told of every round if there are clicks: (state, action, reward, clicks).
    tell_clicks: Callable[[State, jax.Array, jax.Array, jax.Array], State] | None = None


def no_state(key: Key, problem: Problem) -> tuple[()]:
    """Start a sampler that keeps nothing."""
    del key, problem
    return ()


def no_update(key: Key, state: State, context: Context) -> State:
    """Learn nothing."""
    del key, context
    return state


def at_intervals(sampler: Sampler, interval: int) -> Sampler:
    """Let a sampler learn, also from demonstrations, at every `interval`-th refresh."""
    if interval == 1:
        return sampler

    def update(key: Key, state: State, context: Context) -> State:
        own, count = state
        new = jax.lax.cond(
            count % interval == 0,
            lambda s: sampler.update(key, s, context),
            lambda s: s,
            own,
        )
        return new, count + 1

    def imitate(key: Key, state: State, context: Context, example: jax.Array) -> State:
        assert sampler.imitate is not None
        teach, (own, count) = sampler.imitate, state
        new = jax.lax.cond(
            (count - 1) % interval == 0,  # `update` has counted this refresh
            lambda s: teach(key, s, context, example),
            lambda s: s,
            own,
        )
        return new, count

    def request(key: Key, state: State, view: View) -> Any:
        assert sampler.request is not None
        return sampler.request(key, state[0], view)

    def tell_clicks(
        state: State, action: jax.Array, reward: jax.Array, clicks: jax.Array
    ) -> State:
        assert sampler.tell_clicks is not None
        return sampler.tell_clicks(state[0], action, reward, clicks), state[1]

    return sampler._replace(
        init=lambda key, problem: (
            sampler.init(key, problem),
            jnp.zeros((), jnp.int32),
        ),
        update=update,
        propose=lambda key, state, context, n: sampler.propose(
            key, state[0], context, n
        ),
        imitate=None if sampler.imitate is None else imitate,
        request=None if sampler.request is None else request,
        tell_clicks=None if sampler.tell_clicks is None else tell_clicks,
    )


def unpriced(view: View) -> Quadratic:
    """The model of the reward alone, without the price of conflicts."""
    price = jnp.where(jnp.isinf(view.pair_price), 0.0, view.pair_price)
    conflicts = view.problem.conflicts[view.arms][:, view.arms]
    return view.model._replace(
        pair=view.model.pair + 0.5 * price * conflicts.astype(jnp.float32)
    )


def promising(model: Quadratic, top: jax.Array, size: int) -> jax.Array:
    """Places of the arms worth most beside the set `top`, its own included.

    Args:
        model: on A arms.
        top: int32[K], places.
        size: how many are wanted, at least K.

    Returns:
        int32[min(size, A)], sorted.
    """
    slope = model.linear + 2.0 * jnp.sum(model.pair[top], axis=0)
    slope = slope.at[top].set(jnp.inf)
    return jnp.sort(jax.lax.top_k(slope, min(size, slope.shape[0]))[1])


def to_local(view: View, actions: jax.Array, places: jax.Array) -> jax.Array:
    """Write sets [N, K] as positions in `view.arms[places]`.

    Arms that are not there give way to the best ones that are.
    """
    arms = view.arms[places]
    size = arms.shape[0]
    part = space_of(view.problem).restrict(_legal_problem(view), arms)
    position = jnp.full((view.problem.num_arms,), size, jnp.int32)
    position = position.at[arms].set(jnp.arange(size, dtype=jnp.int32))
    worth = view.model.linear[places]
    repair = space_of(part).repair
    return jax.vmap(repair, in_axes=(None, 0, None))(part, position[actions], worth)


def scene_of(view: View, places: jax.Array) -> Scene:
    """What a search among `view.arms[places]` may move among."""
    arms = view.arms[places]
    return Scene(view.problem, arms, view.forbidden[arms][:, arms])


def all_places(view: View) -> jax.Array:
    """Every place of `view.arms`: int32[A]."""
    return jnp.arange(view.arms.shape[0], dtype=jnp.int32)


def legal_sets(key: Key, view: View, n: int) -> jax.Array:
    """Draw random sets: feasible where pairs are forbidden, uniform elsewhere."""
    return space_of(view.problem).random(key, _legal_problem(view), n)


def legalise(view: View, action: jax.Array, priority: jax.Array) -> jax.Array:
    """Repair a set where pairs are forbidden; elsewhere it stays the same set."""
    return space_of(view.problem).repair(_legal_problem(view), action, priority)


def _legal_problem(view: View) -> Problem:
    """The problem in which only forbidden pairs conflict."""
    return dataclasses.replace(view.problem, conflicts=view.forbidden)


def value_of(view: View, actions: jax.Array) -> jax.Array:
    """Value of sets [N, K] under the view's model, less the price of conflicts: [N].

    With hard constraints the model has no price. Arms outside `view.arms` count as
    worth nothing beside the others.
    """
    return _evaluate(view, view.model, actions)


def reward_of(view: View, actions: jax.Array) -> jax.Array:
    """Expected reward of sets [N, K], whatever they violate: [N]."""
    return _evaluate(view, unpriced(view), actions)


def _evaluate(view: View, model: Quadratic, actions: jax.Array) -> jax.Array:
    size = view.arms.shape[0]
    place = jnp.full((view.problem.num_arms,), size, jnp.int32)
    place = place.at[view.arms].set(jnp.arange(size, dtype=jnp.int32))
    pair = jnp.pad(model.pair, ((0, 1), (0, 1)))
    linear = jnp.pad(model.linear, (0, 1))

    def one(action: jax.Array) -> jax.Array:
        local = place[action]
        return jnp.sum(pair[local][:, local]) + jnp.sum(linear[local])

    return jax.vmap(one)(actions) + model.offset
