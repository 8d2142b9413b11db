"""Does a sampler learn? Its proposals for a known objective, without a master.

The master's surrogate is replaced by a known quadratic function of the set, so that
the optimum is known too. A sampler gets `refreshes` chances to update and proposes
`num_proposals` sets after each. Conflicts are soft: nothing repairs a proposal, and
the price of a pair is that of a tenth of the best reward, so that an infeasible set
never pays, unless another price is given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax.problem import (
    Problem,
    make_problem,
    random_feasible_sets,
    random_sets,
    violated_pairs,
)
from msb_jax.rng import stream
from msb_jax.samplers.base import (
    Context,
    Sampler,
    View,
    reward_of,
    value_of,
)
from msb_jax.solvers.local_search import penalise, tabu_search
from msb_jax.types import Key, Quadratic, State

NUM_ELITES = 16
NUM_PLAYED = 100
PRICE = 0.1  # of the best reward, for one conflicting pair


class Objective(NamedTuple):
    """A known function of the set, and its best feasible value."""

    problem: Problem
    model: Quadratic  # of the reward, on all arms
    optimum: jax.Array  # []


class Report(NamedTuple):
    """What the sampler proposed; values are shares of the optimum."""

    best: jax.Array  # [] best feasible proposal of all refreshes
    mean: jax.Array  # [] reward of the proposals of the last quarter
    violation: jax.Array  # [] conflicting pairs of a proposal in the last quarter
    random_mean: jax.Array  # [] reward of uniform sets
    random_violation: jax.Array  # []


def make_objective(
    seed: int, *, form: str, num_arms: int = 60, k: int = 6, density: float = 0.1
) -> Objective:
    """Draw a linear or quadratic objective; the optimum is that of a long search."""
    rng = np.random.default_rng(seed)
    num_conflicts = round(density * num_arms * (num_arms - 1) / 2)
    problem = make_problem(
        rng.random((num_arms, 5)), k, metric="ned", num_conflicts=num_conflicts
    )
    theta, pair = rng.random(num_arms), rng.random((num_arms, num_arms))
    is_linear = form == "linear"
    model = Quadratic(
        pair=jnp.asarray(0.0 * pair if is_linear else 0.5 * (pair + pair.T) / k),
        linear=jnp.asarray(theta if is_linear else 0.0 * theta),
        offset=jnp.zeros(()),
    )
    model = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model)
    starts = random_feasible_sets(jax.random.key(seed), problem, 64)
    search = jax.jit(tabu_search, static_argnames=("num_steps", "tenure"))
    _, values = search(model, problem.conflicts, starts, num_steps=200, tenure=8)
    return Objective(problem, model, jnp.max(values))


def known_view(objective: Objective, pair_price: float = PRICE) -> View:
    """What a sampler sees when the master knows the objective.

    The price of a conflicting pair is a share of the best reward.
    """
    problem = objective.problem
    price = pair_price * objective.optimum
    arms = jnp.arange(problem.num_arms, dtype=jnp.int32)
    sets = random_sets(jax.random.key(0), problem, NUM_ELITES)
    played = jnp.resize(sets, (NUM_PLAYED, problem.k))
    return View(
        problem=problem,
        round=jnp.zeros((), jnp.int32),
        forbidden=jnp.zeros_like(problem.conflicts),
        pair_price=price,
        arms=arms,
        model=penalise(objective.model, problem.conflicts, price),
        marginals=objective.model.linear + jnp.sum(objective.model.pair, axis=1),
        elites=sets,
        elite_values=jnp.full((NUM_ELITES,), -jnp.inf),
        draw_places=arms,
        draws=jax.tree.map(lambda leaf: leaf[None], objective.model),
        reach=jnp.zeros((problem.num_arms,)),
        pool=sets[:1],
        pool_origin=jnp.full((1,), -1, jnp.int32),
        played=played,
        played_values=jnp.zeros((NUM_PLAYED,)),
        is_played=jnp.zeros((NUM_PLAYED,), bool),
    )


def train(
    key: Key,
    sampler: Sampler,
    objective: Objective,
    *,
    refreshes: int,
    num_proposals: int = 20,
    f_in: int = 20,
    demonstrations: bool = False,
    pair_price: float = PRICE,
) -> tuple[State, Report]:
    """Let a sampler learn the objective.

    Args:
        key: of the run.
        sampler: one that proposes by itself and asks nothing of the host.
        objective: what it should learn.
        refreshes: updates it gets.
        num_proposals: sets it proposes after each.
        f_in: rounds between two; the best proposals are played.
        demonstrations: whether it sees random sets and crossings of the best sets in
            the pool too, and imitates the best set of the pool every tenth time.
        pair_price: of a conflict, as a share of the best reward.

    Returns:
        The state of the sampler and its report.
    """
    problem = objective.problem
    base = known_view(objective, pair_price)
    guests = random_sets(stream(key, "guests"), problem, num_proposals)
    size = num_proposals + guests.shape[0] * demonstrations
    start = base._replace(
        pool=jnp.resize(base.elites, (size, problem.k)),
        pool_origin=jnp.full((size,), -1, jnp.int32),
    )

    def refresh(
        carry: tuple[State, View], t: jax.Array
    ) -> tuple[tuple[State, View], Any]:
        state, view = carry
        view = view._replace(round=t * f_in)
        context = Context(view=view)
        state = sampler.update(_fold(key, "update", t), state, context)
        if demonstrations and sampler.imitate is not None:
            best = view.pool[jnp.argmax(value_of(view, view.pool))]
            taught = sampler.imitate(_fold(key, "imitate", t), state, context, best)
            is_due = t % 10 == 9
            state = jax.tree.map(lambda a, b: jnp.where(is_due, a, b), taught, state)
        actions = sampler.propose(
            _fold(key, "propose", t), state, context, num_proposals
        )
        pool = jnp.sort(actions, axis=1)
        origin = jnp.zeros((num_proposals,), jnp.int32)
        if demonstrations:
            others = random_sets(_fold(key, "others", t), problem, num_proposals)
            pool = jnp.concatenate([pool, jnp.sort(others, axis=1)])
            origin = jnp.concatenate([origin, origin + 1])
        view = _next_view(view, pool, origin, f_in)
        reward = reward_of(view, actions) / objective.optimum
        pairs = violated_pairs(problem, actions)
        return (state, view), (reward, pairs)

    state = sampler.init(stream(key, "init"), problem)
    (state, _), (reward, pairs) = jax.lax.scan(
        refresh, (state, start), jnp.arange(refreshes)
    )
    last = -(-refreshes // 4)
    uniform = random_sets(stream(key, "uniform"), problem, 512)
    return state, Report(
        best=jnp.max(jnp.where(pairs == 0, reward, 0.0)),
        mean=jnp.mean(reward[-last:]),
        violation=jnp.mean(pairs[-last:].astype(jnp.float32)),
        random_mean=jnp.mean(reward_of(base, uniform)) / objective.optimum,
        random_violation=jnp.mean(violated_pairs(problem, uniform).astype(jnp.float32)),
    )


def _fold(key: Key, name: str, t: jax.Array) -> Key:
    return jax.random.fold_in(stream(key, name), t)


def _next_view(view: View, pool: jax.Array, origin: jax.Array, f_in: int) -> View:
    """Play the best proposals, and keep the best sets of all."""
    values = value_of(view, pool)
    order = jnp.argsort(-values)[: min(f_in, pool.shape[0])]
    played = jnp.concatenate([pool[order], view.played])[:NUM_PLAYED]
    is_played = jnp.concatenate([jnp.ones(order.shape, bool), view.is_played])
    known = jnp.concatenate([pool, view.elites])
    worth = jnp.concatenate([values, view.elite_values])
    # A copy of a better or earlier set takes no second place.
    same = jnp.all(known[:, None, :] == known[None, :, :], axis=2)
    earlier = jnp.tril(jnp.ones_like(same), -1)
    worth = jnp.where(jnp.any(same & earlier, axis=1), -jnp.inf, worth)
    top, rows = jax.lax.top_k(worth, NUM_ELITES)
    return view._replace(
        pool=pool,
        pool_origin=origin,
        played=played,
        played_values=reward_of(view, played),
        is_played=is_played[:NUM_PLAYED],
        elites=known[rows],
        elite_values=top,
    )
