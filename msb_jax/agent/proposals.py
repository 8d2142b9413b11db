"""Samplers learn and propose, each in a program of its own.

A program depends on one sampler, its settings and the sizes of the problem, and not on
who else is there: agents with other samplers find it in the compilation cache.

    survey    what the last candidates were worth; who is to imitate, and what
    train     one sampler learns and makes as many proposals as there are places
    collect   places by quality (`assignment`), filled with the best proposals
    train     samplers of the second stage, from what was collected
    finish    the pool
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.agent.assignment import assemble, assign, average_scores, elites_first
from msb_jax.agent.cotraining import (
    CoTrainingState,
    demonstration,
    has_converged,
    observe_pool,
    private_view,
)
from msb_jax.parallel import map_seeds
from msb_jax.rng import stream
from msb_jax.samplers.base import Context, Sampler, View, value_of
from msb_jax.sets import copies_last
from msb_jax.types import Key, State


class Survey(NamedTuple):
    """What is said to all samplers at a refresh, for one run."""

    shared: CoTrainingState
    scores: jax.Array  # [S] of the samplers of the first stage
    example: jax.Array  # [K] int32, the demonstration A*
    is_pupil: jax.Array  # [S] bool, who should imitate it


class Proposals(NamedTuple):
    """The candidates of the coming rounds, for one run."""

    actions: jax.Array  # [N, K] int32, arms ascending
    origin: jax.Array  # [N] int32, number of the sampler


Propose = Callable[
    [Key, tuple[State, ...], CoTrainingState, View, tuple[Any, ...], tuple[Any, ...]],
    tuple[tuple[State, ...], CoTrainingState, Proposals],
]


def stages(samplers: Sequence[Sampler]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers of the samplers that propose by themselves, and of those that follow.

    Whoever learns from the others proposes from the best sets played if alone.
    """
    first = tuple(i for i, s in enumerate(samplers) if not s.is_second_stage)
    first = first or tuple(range(len(samplers)))
    return first, tuple(i for i in range(len(samplers)) if i not in first)


def proposer(
    samplers: Sequence[Sampler], num_candidates: int, cotraining: str
) -> Propose:
    """Build the function that lets all samplers learn and propose.

    Args:
        samplers: in the order of credit.
        num_candidates: N, at least one for each.
        cotraining: one of `cotraining.KINDS`.

    Returns:
        A function of keys [B], the samplers' states, what co-training has seen, the
        view, and the samplers' requests and answers, every leaf with a leading B. It
        returns new states, what co-training has seen now, and the proposals.
    """
    number = len(samplers)
    first, second = stages(samplers)
    # Those of the second stage have a sixth each, the others what is assigned.
    second_share = max(1, num_candidates // max(6, number))
    num_first = num_candidates - len(second) * second_share
    is_shared = cotraining in ("all", "sharing")
    is_taught = cotraining in ("all", "demonstrations")

    def survey(shared: CoTrainingState, view: View) -> Survey:
        values = value_of(view, view.pool)
        scores = average_scores(values, view.pool_origin, number)[jnp.array(first)]
        shared = observe_pool(shared, view, scores)
        example, worth = demonstration(shared, view)
        return Survey(shared, scores, example, has_converged(shared, worth))

    def train(
        sampler: Sampler, *, is_first: bool
    ) -> Callable[..., tuple[State, jax.Array]]:
        """One run of one sampler; what is named here becomes part of its program."""
        imitate, size = sampler.imitate, num_first if is_first else second_share

        def run(
            key: Key,
            state: State,
            context: Context,
            example: jax.Array,
            is_pupil: jax.Array,
        ) -> tuple[State, jax.Array]:
            if imitate is not None and not is_shared:
                view = private_view(context.view, context.origin)
                context = context._replace(view=view)
            state = sampler.update(
                stream(key, f"{sampler.name}/update"), state, context
            )
            if imitate is not None and is_taught:
                state = jax.lax.cond(
                    is_pupil,
                    lambda s: imitate(
                        stream(key, f"{sampler.name}/imitate"), s, context, example
                    ),
                    lambda s: s,
                    state,
                )
            made = sampler.propose(
                stream(key, f"{sampler.name}/propose"), state, context, size
            )
            if imitate is not None:
                made = elites_first(made, value_of(context.view, made))
            elif is_first:
                made = copies_last(made)
            return state, made

        return run

    def collect(
        made: tuple[jax.Array, ...], scores: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        counts = assign(scores, num_first)
        pool, owner = assemble(jnp.stack(made), counts, num_first)
        return pool, jnp.array(first, jnp.int32)[owner]

    def finish(
        pool: jax.Array, origin: jax.Array, taught: tuple[jax.Array, ...]
    ) -> Proposals:
        owners = [jnp.full((second_share,), i, jnp.int32) for i in second]
        origin = jnp.concatenate([origin, *owners])
        actions = jnp.sort(jnp.concatenate([pool, *taught]), axis=1)
        return Proposals(actions, origin)

    run_survey, run_collect = map_seeds(survey), map_seeds(collect)
    run_finish = map_seeds(finish)
    run_train = [
        map_seeds(train(s, is_first=i in first), in_turn=True)
        for i, s in enumerate(samplers)
    ]

    def propose(
        keys: Key,
        states: tuple[State, ...],
        shared: CoTrainingState,
        view: View,
        requests: tuple[Any, ...],
        answers: tuple[Any, ...],
    ) -> tuple[tuple[State, ...], CoTrainingState, Proposals]:
        seen = run_survey(shared, view)
        new = list(states)

        def run(i: int, is_pupil: jax.Array, peers: jax.Array | None) -> jax.Array:
            # An array, so that the program does not depend on the number.
            origin = jnp.full(keys.shape, i, jnp.int32)
            context = Context(view, requests[i], answers[i], peers, origin)
            new[i], made = run_train[i](
                keys, states[i], context, seen.example, is_pupil
            )
            return made

        made = [run(i, seen.is_pupil[:, p], None) for p, i in enumerate(first)]
        pool, origin = run_collect(tuple(made), seen.scores)
        nobody = jnp.zeros(keys.shape, bool)
        taught = [run(i, nobody, pool) for i in second]
        proposals = run_finish(pool, origin, tuple(taught))
        return tuple(new), seen.shared, proposals

    return propose
