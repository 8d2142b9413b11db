"""The master-slave agent: samplers propose, the master plays the best.

Every `f_in` rounds (`refresh`) the master learns from the rounds played, the samplers
look at its model and propose a pool of n_es x f_in sets, and the master's joint belief
over the pool is computed. A round (`ask`) plays the set of highest score, and its
reward (`tell`) conditions the belief: an exact Bayesian update of N numbers and an
N x N matrix, so that the rounds of a block cost next to nothing.

Source: paper, algorithm 1 and section "Master-slave algorithm".

Differs from the paper:
* candidates are made once a refresh, n_es for each of its rounds, not once a round;
* warm-up rounds are random feasible sets when constraints are hard (I-27);
* a set proposed by several samplers is credited to the first of them, and a set that
  was found before also to the one that found it (I-23);
* the radius is widened by the errors actually seen: a model that is surprised is less
  sure than it thinks;
* the best candidates of the solver and of the samplers that learn are improved by a
  search on the bound itself (`refine`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax.agent.cotraining import KINDS, CoTrainingState, init_cotraining
from msb_jax.agent.pool import (
    Elites,
    Pool,
    condition,
    empty_pool,
    find_producers,
    observe,
    renew_elites,
)
from msb_jax.agent.proposals import Proposals, proposer, stages
from msb_jax.agent.refine import refine
from msb_jax.agent.view import Recent, make_view, no_rounds, remember
from msb_jax.clicks import needs_clicks
from msb_jax.link import to_reward
from msb_jax.masters import history as hist
from msb_jax.masters.scoring import total_score
from msb_jax.parallel import map_seeds, one_or_many
from msb_jax.problem import Problem, violated_pairs
from msb_jax.rng import stream
from msb_jax.samplers.base import Sampler, View
from msb_jax.spaces import legal_actions
from msb_jax.types import Key, Master, Policy, State


@dataclass(frozen=True, kw_only=True)
class MasterSlaveConfig:
    """Settings of the agent; the defaults are the paper's."""

    n_re: int = 600  # random rounds at the start (the paper: 2L)
    n_es: int = 10  # candidates a round
    f_in: int = 20  # rounds between two refreshes
    lam: float = 5.0  # price of the violation rate
    constraints: str = "soft"  # or "hard"
    num_elites: int = 16  # best distinct sets kept for the samplers
    length_epoch: int = 100  # last rounds the samplers may look at
    max_arms: int = 320  # arms the quadratic model speaks of
    num_draws: int = 16  # posterior draws of the model made for the samplers
    draw_arms: int = 96  # arms these speak of
    cotraining: str = "all"  # or "demonstrations", "sharing", "none"

    def __post_init__(self) -> None:
        if self.n_re < 0:
            raise ValueError(f"n_re must not be negative, got {self.n_re}.")
        for name in ("n_es", "f_in", "num_elites", "length_epoch"):
            if getattr(self, name) < 1:
                value = getattr(self, name)
                raise ValueError(f"{name} must be positive, got {value}.")
        if self.lam < 0:
            raise ValueError(f"lam must not be negative, got {self.lam}.")
        if self.constraints not in ("soft", "hard"):
            raise ValueError(
                f"constraints must be 'soft' or 'hard', got {self.constraints!r}."
            )
        if self.cotraining not in KINDS:
            raise ValueError(
                f"cotraining must be one of {', '.join(KINDS)}, got "
                f"{self.cotraining!r}."
            )


class Known(NamedTuple):
    """What the master learns from, for one run."""

    master: State
    elites: Elites
    recent: Recent
    round: jax.Array  # [] int32, actions asked for
    random_origin: jax.Array  # [] int32, who is credited with the random rounds


class MasterSlaveState(NamedTuple):
    """One run of the agent."""

    problem: Problem
    master: State
    samplers: tuple[State, ...]
    cotraining: CoTrainingState
    pool: Pool
    elites: Elites
    recent: Recent
    radius: jax.Array  # [] of the confidence, at the last refresh
    surprise: jax.Array  # [] running mean of squared standardised errors
    round: jax.Array  # [] int32, actions asked for
    origin: jax.Array  # [] int32, sampler of the last action
    producer: jax.Array  # [] int32, sampler that first proposed it


def master_slave(
    master: Master,
    samplers: Sequence[Sampler],
    config: MasterSlaveConfig = MasterSlaveConfig(),
    watch: Callable[[str, Any], None] = lambda stage, result: None,
) -> Policy:
    """Build the agent from a master and at least one sampler.

    Args:
        master: what judges the sets.
        samplers: what proposes them, in the order of credit.
        config: settings.
        watch: called after each stage of a refresh with its name and its result, which
            may still be under way on the device; for clocks and logs.
    """
    names = tuple(sampler.name for sampler in samplers)
    if not samplers:
        raise ValueError("The agent needs at least one sampler; got none.")
    # Warm-up rounds are random sets, whoever else proposes.
    random_origin = names.index("random_best") if "random_best" in names else 0
    is_hard = config.constraints == "hard"
    num_candidates = max(config.n_es * config.f_in, len(samplers))
    slack = hist.slack(config.f_in)
    num_starts = tuple(sampler.num_starts for sampler in samplers)

    def init(key: Key, problem: Problem) -> MasterSlaveState:
        sampler_states = tuple(s.init(stream(key, s.name), problem) for s in samplers)
        window = -(-2 * problem.num_arms // config.f_in)  # L_2 = 2L rounds
        return MasterSlaveState(
            problem=problem,
            master=master.init(stream(key, "master"), problem),
            samplers=sampler_states,
            cotraining=init_cotraining(len(stages(samplers)[0]), window, problem.k),
            pool=empty_pool(num_candidates, problem.k, is_live=master.is_live),
            elites=Elites(
                actions=jnp.full((config.num_elites, problem.k), -1, jnp.int32),
                producer=jnp.zeros((config.num_elites,), jnp.int32),
            ),
            recent=no_rounds(config.length_epoch, problem.k),
            radius=jnp.zeros(()),
            surprise=jnp.ones(()),
            round=jnp.zeros((), jnp.int32),
            origin=jnp.zeros((), jnp.int32),
            producer=jnp.zeros((), jnp.int32),
        )

    def expect(state: MasterSlaveState) -> tuple[jax.Array, jax.Array]:
        """Mean reward of the candidates and the bonus for what is unknown: [N], [N]."""
        belief = state.pool.belief
        if belief is None:
            score = master.score(state.master, state.pool.actions)
            return score.mean, score.bonus
        deviation = jnp.sqrt(jnp.maximum(jnp.diagonal(belief.cov), 0.0))
        mean = to_reward(belief.link, belief.mean)
        radius = state.radius * jnp.sqrt(jnp.maximum(state.surprise, 1.0))
        upper = to_reward(belief.link, belief.mean + radius * deviation)
        return mean, upper - mean

    def ask(key: Key, state: MasterSlaveState) -> tuple[MasterSlaveState, jax.Array]:
        random = legal_actions(key, state.problem, 1, is_hard)[0]
        pool, pairs = state.pool, state.pool.pairs
        mean, bonus = expect(state)
        total = total_score(
            mean,
            bonus,
            pairs,
            pairs / jnp.maximum(state.problem.num_conflicts, 1),
            config.lam,
            config.constraints,
            1.0 + jnp.max(jnp.abs(mean)),
        )
        best = jnp.argmax(total)
        is_random = (state.round < config.n_re) | (pool.actions[0, 0] < 0)
        action = jnp.where(is_random, random, pool.actions[best])
        state = state._replace(
            round=state.round + 1,
            origin=jnp.where(is_random, random_origin, pool.origin[best]),
            producer=jnp.where(is_random, random_origin, pool.producer[best]),
        )
        return state, action

    def tell(
        key: Key, state: MasterSlaveState, action: jax.Array, reward: jax.Array
    ) -> MasterSlaveState:
        pool = state.pool
        same = jnp.all(pool.actions == jnp.sort(action)[None, :], axis=1)
        same &= jnp.isfinite(reward)
        rounds = state.master.history.rounds
        state = state._replace(
            master=master.update(key, state.master, action, reward),
            recent=remember(state.recent, rounds, action, reward),
        )
        if pool.belief is None:
            return state
        return state._replace(
            pool=pool._replace(belief=condition(pool.belief, same, reward)),
            surprise=observe(state.surprise, pool.belief, same, reward),
        )

    def tell_clicks(
        key: Key,
        state: MasterSlaveState,
        action: jax.Array,
        reward: jax.Array,
        clicks: jax.Array,
    ) -> MasterSlaveState:
        """Tell the master the reward, and the samplers that look at clicks these."""
        state = tell(key, state, action, reward)
        told = tuple(
            own if s.tell_clicks is None else s.tell_clicks(own, action, reward, clicks)
            for s, own in zip(samplers, state.samplers, strict=True)
        )
        return state._replace(samplers=told)

    def learn(
        key: Key, known: Known, problem: Problem, pool: Pool, *, fit: bool
    ) -> tuple[Known, View]:
        """The master takes in the rounds played and shows what it knows."""
        learned = master.refresh(stream(key, "master"), known.master, fit=fit)
        view = make_view(
            stream(key, "draws"),
            master,
            learned,
            config,
            problem=problem,
            round=known.round,
            candidates=pool,
            recent=known.recent,
        )
        elites = renew_elites(known.elites, pool, view.elites, known.random_origin)
        return known._replace(master=learned, elites=elites), view

    def consult(key: Key, states: tuple[State, ...], view: View) -> tuple[Any, ...]:
        """Samplers say what they want of the host."""
        return tuple(
            sampler.request(stream(key, f"{sampler.name}/request"), own, view)
            if sampler.request is not None
            else ()
            for sampler, own in zip(samplers, states, strict=True)
        )

    def judge(
        key: Key,
        learned: State,
        view: View,
        elites: Elites,
        proposals: Proposals,
    ) -> tuple[Pool, jax.Array]:
        """The master forms its belief over the pool, and chooses the radius."""
        problem = view.problem
        actions, origin = refine(
            key,
            lambda sets: master.score(learned, sets).total,
            view,
            proposals.actions,
            proposals.origin,
            num_starts,
            num_rows=learned.history.rewards.shape[0],
        )
        actions = jnp.sort(actions, axis=1)
        pool = Pool(
            actions=actions,
            pairs=violated_pairs(problem, actions),
            origin=origin,
            producer=find_producers(elites, actions, origin),
            belief=None if master.is_live else master.belief(learned, actions),
        )
        return pool, master.radius(learned)

    # Only `learn` and `judge` depend on the capacity of the history, which changes
    # during a run; the searches and networks of the samplers are compiled once.
    run_learn = {
        fit: map_seeds(functools.partial(learn, fit=fit), donate=(1,), in_turn=True)
        for fit in (False, True)
    }
    run_consult = map_seeds(consult)
    run_judge = map_seeds(judge, in_turn=True)
    propose = proposer(samplers, num_candidates, config.cotraining)

    def refresh_batch(keys: Key, state: MasterSlaveState) -> MasterSlaveState:
        rounds = int(np.max(np.asarray(state.master.history.rounds)))
        warm_up = config.n_re - rounds
        roomy = hist.make_room(master.grow, state.master, slack, warm_up)
        state = state._replace(master=roomy)
        is_told = bool(np.any(np.asarray(roomy.history.count) > 0))
        if not is_told or warm_up >= config.f_in:
            return state  # only random rounds ahead
        fit = master.due(state.master)
        known = Known(
            master=roomy,
            elites=state.elites,
            recent=state.recent,
            round=state.round,
            random_origin=jnp.full(keys.shape, random_origin, jnp.int32),
        )
        known, view = run_learn[fit](
            stream(keys, "learn"), known, state.problem, state.pool
        )
        watch("fit" if fit else "learn", view)
        requests = run_consult(stream(keys, "consult"), state.samplers, view)
        watch("search", requests)
        answers = tuple(
            sampler.solve(view.problem, asked) if sampler.solve is not None else ()
            for sampler, asked in zip(samplers, requests, strict=True)
        )
        watch("solver", answers)
        states, shared, proposals = propose(
            stream(keys, "propose"),
            state.samplers,
            state.cotraining,
            view,
            requests,
            answers,
        )
        watch("samplers", proposals)
        pool, radius = run_judge(
            stream(keys, "judge"), known.master, view, known.elites, proposals
        )
        watch("score", pool)
        # The errors seen so far were those of other scales.
        surprise = jnp.ones_like(state.surprise) if fit else state.surprise
        return state._replace(
            master=known.master,
            elites=known.elites,
            recent=known.recent,
            round=known.round,
            samplers=states,
            cotraining=shared,
            pool=pool,
            radius=radius,
            surprise=surprise,
        )

    needy = [sampler.name for sampler in samplers if sampler.tell_clicks is not None]
    return Policy(
        init=init,
        ask=ask,
        tell=needs_clicks(f"An agent with the sampler {needy[0]}") if needy else tell,
        refresh=one_or_many(refresh_batch),
        origin=lambda state: state.origin,
        origins=names,
        producer=lambda state: state.producer,
        tell_clicks=tell_clicks if needy else None,
    )
