"""GP-UCB on sets: the statistical anchor.

A Gaussian process over K-sets whose kernel is a polynomial of degree two in the
overlap of two sets, k = w_1 rho + w_2 rho^2 with rho = |S and S'| / K and a free
constant; weights and noise by marginal likelihood. A round plays the set of highest

    m(S) + beta sqrt(v(S)) - price of its conflicts,

with hard constraints among sets without a conflict. The set is found by exchanging one
arm for another and nothing else (`solvers.bound_search`): walkers start from the best
sets played and from random ones; they first make `walk_steps` exchanges with a tabu
list on the posterior mean, which is a quadratic form and so costs little, each with a
random bonus on the arms of which little is known; then a few on the bound itself, whose
deviation is dear. The best of all sets that were scored make a pool for the coming f_in
rounds, within which the joint belief is conditioned exactly on every reward.

The Gaussian process is the closed-form master (`masters.ntk_ucb`) without its extras:
no tangent kernel, no power of the reward, a constant radius; and none of the agent's
other parts: no integer programs, no other samplers.

Source: Srinivas, Krause, Kakade and Seeger 2010; Desautels, Krause and Burdick 2014 for
batches.

Differs from the papers:
* beta is a constant, in posterior deviations, instead of the theory's growing one;
* the maximum over all sets is that of a search, and between two refreshes that over
  the pool;
* rewards of the same batch are known before the next round, so the belief is updated by
  them and not by hallucinated ones.

The first n_re rounds are random sets, as in the master-slave agent.

Tried on L=300, K=20, the cubic form, hard constraints, one seed; share of the optimum
in the last tenth of the rounds:

    without walks, beta 2 (1,600 rounds)      0.943
    beta 2 (1,200 rounds)                     0.969
    beta 5 (1,600 rounds)                     0.9985
    beta 5 (5,000 rounds)                     0.9999

The first had 6 walkers, 8 steps and 24 swaps, the others have the defaults. With beta 2
the share does not move any more soon after the random rounds; probably a quadratic that
was fitted to random sets is surer of itself near the top of a cubic than it should be.
The theory's sqrt(2 log |D|), with D all sets, is about 12 there. Other values, other
forms and other noise were not tried.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax.agent.pool import Pool, condition, empty_pool
from msb_jax.agent.view import best_played
from msb_jax.baselines.checks import check_least, check_numbers
from msb_jax.baselines.random import check_constraints
from msb_jax.masters import history as hist
from msb_jax.masters.evidence import row_noise
from msb_jax.masters.ntk_ucb import NtkUcbConfig, NtkUcbState, ntk_ucb
from msb_jax.masters.scoring import HARD_PRICE
from msb_jax.parallel import map_seeds, one_or_many
from msb_jax.problem import (
    Problem,
    random_feasible_sets,
    random_sets,
    violated_pairs,
)
from msb_jax.rng import stream
from msb_jax.solvers.bound_search import Terrain, climb, distinct, walk
from msb_jax.solvers.local_search import hollow, penalise
from msb_jax.types import Key, Master, Policy


@dataclass(frozen=True, kw_only=True)
class GpUcbConfig:
    """Settings of `gp_ucb`."""

    constraints: str = "soft"
    lam: float = 5.0  # weight of the violation rate, soft mode
    n_re: int = 600  # random rounds at the start
    f_in: int = 20  # rounds between two refreshes
    beta: float = 5.0  # times the posterior deviation
    num_elites: int = 4  # walkers that start from the best sets played
    num_random: int = 4  # walkers that start from random sets
    walk_steps: int = 100  # exchanges of a walker on the posterior mean
    num_steps: int = 4  # exchanges of a walker on the bound itself
    num_swaps: int = 16  # scored for each of these
    pool_size: int = 128  # sets that a block may play

    def __post_init__(self) -> None:
        check_constraints(self.constraints)
        least = {"n_re": 0, "f_in": 1, "num_elites": 1, "num_random": 1}
        least |= {"num_steps": 1, "num_swaps": 1, "walk_steps": 1, "pool_size": 1}
        check_least(self, least)
        check_numbers(self, "lam", "beta")


class GpUcbState(NamedTuple):
    """The Gaussian process, and the candidates of the coming rounds."""

    problem: Problem
    master: NtkUcbState
    pool: Pool
    round: jax.Array  # [] int32, actions asked for


def make_master(config: GpUcbConfig) -> Master:
    """Make the Gaussian process with a kernel of degree two."""
    return ntk_ucb(
        NtkUcbConfig(
            tangent=False,
            fit_power=False,
            radius=config.beta,
            explore=0.0,
            lam=config.lam,
            constraints=config.constraints,
            block=config.f_in,
        )
    )


def gp_ucb(config: GpUcbConfig) -> Policy:
    """Make the policy that plays the highest upper confidence bound it finds."""
    master = make_master(config)
    draw = random_feasible_sets if config.constraints == "hard" else random_sets
    slack = hist.slack(config.f_in)

    def init(key: Key, problem: Problem) -> GpUcbState:
        return GpUcbState(
            problem=problem,
            master=master.init(key, problem),
            pool=empty_pool(config.pool_size, problem.k),
            round=jnp.zeros((), jnp.int32),
        )

    def ask(key: Key, state: GpUcbState) -> tuple[GpUcbState, jax.Array]:
        pool, problem, belief = state.pool, state.problem, state.pool.belief
        assert belief is not None  # its master is not live
        variance = jnp.maximum(jnp.diagonal(belief.cov), 0.0)
        value = belief.mean + config.beta * jnp.sqrt(variance)
        value -= pair_price(config, problem, _size(belief.mean)) * pool.pairs
        is_random = (state.round < config.n_re) | (pool.actions[0, 0] < 0)
        random = draw(key, problem, 1)[0]
        action = jnp.where(is_random, random, pool.actions[jnp.argmax(value)])
        return state._replace(round=state.round + 1), action

    def tell(
        key: Key, state: GpUcbState, action: jax.Array, reward: jax.Array
    ) -> GpUcbState:
        pool = state.pool
        assert pool.belief is not None
        same = jnp.all(pool.actions == jnp.sort(action)[None, :], axis=1)
        belief = condition(pool.belief, same & jnp.isfinite(reward), reward)
        return state._replace(
            master=master.update(key, state.master, action, reward),
            pool=pool._replace(belief=belief),
        )

    def learn(key: Key, state: NtkUcbState, *, fit: bool) -> NtkUcbState:
        """Take in the rounds played."""
        return master.refresh(key, state, fit=fit)

    def look(key: Key, state: NtkUcbState) -> Pool:
        """Search the sets of the next rounds, and form the belief over them."""
        actions = search(key, config, master, state)[: config.pool_size]
        actions = jnp.sort(actions, axis=1)
        none = jnp.zeros((config.pool_size,), jnp.int32)
        pairs = violated_pairs(state.problem, actions)
        return Pool(actions, pairs, none, none, master.belief(state, actions))

    run_learn = {
        fit: map_seeds(functools.partial(learn, fit=fit), in_turn=True)
        for fit in (False, True)
    }
    run_look = map_seeds(look, in_turn=True)

    def refresh_batch(keys: Key, state: GpUcbState) -> GpUcbState:
        warm_up = config.n_re - int(np.max(np.asarray(state.round)))
        roomy = hist.make_room(master.grow, state.master, slack, warm_up)
        state = state._replace(master=roomy)
        is_told = bool(np.any(np.asarray(roomy.history.count) > 0))
        if not is_told or warm_up >= config.f_in:
            return state  # only random rounds ahead
        fit = master.due(state.master)
        learned = run_learn[fit](stream(keys, "learn"), state.master)
        pool = run_look(stream(keys, "look"), learned)
        return state._replace(master=learned, pool=pool)

    def origin(state: GpUcbState) -> jax.Array:
        return jnp.zeros_like(state.round)

    return Policy(init, ask, tell, one_or_many(refresh_batch), origin, ("gp_ucb",))


def pair_price(config: GpUcbConfig, problem: Problem, scale: jax.Array) -> jax.Array:
    """What a conflicting pair costs; prohibitive on rewards of size `scale`: []."""
    if config.constraints == "hard":
        return HARD_PRICE * scale
    return config.lam / jnp.maximum(problem.num_conflicts, 1).astype(jnp.float32)


def search(
    key: Key, config: GpUcbConfig, master: Master, state: NtkUcbState
) -> jax.Array:
    """Search for the highest upper confidence bounds.

    Returns:
        int32[N, K], the distinct sets that were scored, highest first; N is at least
        `pool_size`, and the best set fills the places beyond the distinct ones.
    """
    draw = random_feasible_sets if config.constraints == "hard" else random_sets
    terrain = survey(config, master, state)
    price = pair_price(config, state.problem, _size(master.fitted(state)))
    elites, _ = best_played(master, state, price, config.num_elites)
    fresh = draw(stream(key, "starts"), state.problem, config.num_random)
    starts = jnp.concatenate([elites, fresh])
    walked = walk(stream(key, "walks"), terrain, starts, config.walk_steps)
    actions, totals = climb(
        stream(key, "swaps"),
        lambda sets: master.score(state, sets).total,
        terrain,
        jnp.concatenate([elites, walked]),
        num_steps=config.num_steps,
        num_swaps=config.num_swaps,
    )
    return distinct(actions, totals, max(config.pool_size, totals.shape[0]))


def survey(config: GpUcbConfig, master: Master, state: NtkUcbState) -> Terrain:
    """Prepare what the choice of exchanges looks at."""
    problem, scales = state.problem, state.scales
    is_hard = config.constraints == "hard"
    model = master.quadratic(state, jnp.arange(problem.num_arms))
    if not is_hard:
        price = pair_price(config, problem, jnp.ones(()))
        model = penalise(model, problem.conflicts, price)
    # An arm's worth as if the others were known: the kernel's variance of one
    # exchange, less what its plays tell.
    prior = jnp.exp(scales.log_weights[:2]) @ jnp.array([1.0, 2.0]) / problem.k
    is_row = hist.valid_rows(state.history, state.history.absorbed)
    weight = (state.history.plays * is_row)[:, None]
    plays = jnp.zeros((problem.num_arms,)).at[state.history.actions].add(weight)
    variance = prior / (1.0 + plays * prior / row_noise(scales, jnp.ones(())))
    return Terrain(
        model=hollow(model),
        forbidden=problem.conflicts & is_hard,
        reach=config.beta * scales.deviation * jnp.sqrt(variance),
    )


def _size(values: jax.Array) -> jax.Array:
    """What rewards of such values are small against: []."""
    return 1.0 + jnp.max(jnp.abs(values))
