"""What the samplers are shown at a refresh: the master's model and the last rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from msb_jax.agent.pool import Pool
from msb_jax.link import latent_slope, to_latent
from msb_jax.masters import history as hist
from msb_jax.masters.scoring import HARD_PRICE
from msb_jax.problem import SUBSETS, Problem, violated_pairs
from msb_jax.rng import stream
from msb_jax.samplers.base import View, promising
from msb_jax.solvers.local_search import penalise
from msb_jax.spaces import forbidden_pairs, space_of
from msb_jax.types import Key, Master, Quadratic, State

if TYPE_CHECKING:
    from msb_jax.agent.master_slave import MasterSlaveConfig


# Bonus of an arm in a search, in deviations of what it adds, times a random number. It
# has to bring unknown arms into view; what is found is scored by the whole bound.
REACH = 1.0
_ELITE = 1e20  # worth of an arm of a good set: above that of any other


class Recent(NamedTuple):
    """The last rounds, in a ring."""

    actions: jax.Array  # [E, K] int32
    rewards: jax.Array  # [E]; NaN where there was no round yet


def no_rounds(size: int, k: int) -> Recent:
    """A ring without a round."""
    return Recent(
        actions=jnp.zeros((size, k), jnp.int32),
        rewards=jnp.full((size,), jnp.nan, jnp.float32),
    )


def remember(
    recent: Recent, rounds: jax.Array, action: jax.Array, reward: jax.Array
) -> Recent:
    """Put a round in the place of the oldest; `rounds` were told before."""
    place = rounds % recent.rewards.shape[0]
    return Recent(
        actions=recent.actions.at[place].set(jnp.sort(action)),
        rewards=recent.rewards.at[place].set(reward),
    )


def make_view(
    key: Key,
    master: Master,
    learned: State,
    config: MasterSlaveConfig,
    *,
    problem: Problem,
    round: jax.Array,
    candidates: Pool,
    recent: Recent,
) -> View:
    """Gather what the samplers may look at.

    Args:
        key: of the posterior draws, and of the arms looked at by chance.
        master: the master.
        learned: its state.
        config: settings of the agent.
        problem: what is known in advance.
        round: rounds asked for.
        candidates: of the last refresh.
        recent: the last rounds.
    """
    is_hard = config.constraints == "hard"
    marginals = master.marginals(learned)
    lam = jnp.asarray(config.lam, jnp.float32)
    soft_price = lam / jnp.maximum(problem.num_conflicts, 1)
    price = HARD_PRICE if is_hard else soft_price
    elites, values = best_played(master, learned, price, config.num_elites)
    # The model lives on the latent scale, and so does the price of a pair.
    link = master.link(learned)
    soft_price = soft_price * latent_slope(link, values[0])
    space = space_of(problem)
    size = min(problem.num_arms, max(config.max_arms, 2 * problem.k))
    worth = marginals.at[elites].set(_ELITE).at[elites[0]].set(jnp.inf)
    arms = space.shortlist(stream(key, "arms"), problem, worth, size)
    model = master.quadratic(learned, arms)
    # The arms of the best set are among `arms`, so that their places exist.
    best = jnp.searchsorted(arms, jnp.sort(elites[0])).astype(jnp.int32)
    places = _drawn_places(config, problem, model, best)
    draws = master.draws(key, learned, arms[places], config.num_draws)
    reach = slope_deviation(model, draws, places, best)
    if not is_hard:
        model = penalise(model, problem.conflicts[arms][:, arms], soft_price)
    is_played = jnp.isfinite(recent.rewards)
    if master.memory is not None:
        size = recent.rewards.shape[0]
        age = (learned.history.rounds - 1 - jnp.arange(size)) % size
        is_played &= age < master.memory(learned)
    is_empty = candidates.actions[0, 0] < 0
    substitutes = jnp.resize(elites, candidates.actions.shape)
    return View(
        problem=problem,
        round=round,
        forbidden=forbidden_pairs(problem, is_hard),
        pair_price=jnp.asarray(jnp.inf) if is_hard else soft_price,
        arms=arms,
        model=model,
        marginals=marginals,
        elites=elites,
        elite_values=values,
        draw_places=places,
        draws=draws,
        reach=REACH * reach,
        pool=jnp.where(is_empty, substitutes, candidates.actions),
        pool_origin=jnp.where(is_empty, -1, candidates.origin),
        played=recent.actions,
        played_values=to_latent(link, jnp.where(is_played, recent.rewards, 0.0)),
        is_played=is_played,
    )


def _drawn_places(
    config: MasterSlaveConfig, problem: Problem, model: Quadratic, best: jax.Array
) -> jax.Array:
    """The places of the arms that posterior draws speak of: int32[A'], sorted.

    Where any K arms make an action these are the most promising ones; elsewhere a
    search needs all of them.
    """
    if problem.space != SUBSETS:
        return jnp.arange(model.linear.shape[0], dtype=jnp.int32)
    return promising(model, best, max(config.draw_arms, problem.k))


def slope_deviation(
    model: Quadratic, draws: Quadratic, places: jax.Array, top: jax.Array
) -> jax.Array:
    """How unsure the model is of what an arm adds to the set `top`: [A].

    Arms that the draws do not speak of are taken for as unknown as any other.

    Args:
        model: on A arms.
        draws: [R, ...] of it, on `places`.
        places: int32[A'], sorted, the set among them.
        top: int32[K], places of its arms in `model`.
    """
    own = jnp.searchsorted(places, top)
    pair = draws.pair - model.pair[places][:, places][None]
    linear = draws.linear - model.linear[places][None]
    slope = linear + 2.0 * jnp.sum(pair[:, own], axis=1)  # [R, A']
    deviation = jnp.sqrt(jnp.mean(jnp.square(slope), axis=0))
    whole = jnp.full((model.linear.shape[0],), jnp.max(deviation))
    return whole.at[places].set(deviation)


def best_played(
    master: Master, learned: State, price: jax.Array | float, n: int
) -> tuple[jax.Array, jax.Array]:
    """Find the n best distinct sets of the history: [n, K], and their values [n].

    Values are the expected rewards less `price` for each conflicting pair.
    """
    history = learned.history
    pairs = violated_pairs(learned.problem, history.actions)
    value = master.fitted(learned) - price * pairs
    is_row = hist.valid_rows(history, history.absorbed) > 0
    value = jnp.where(is_row & hist.is_first(history), value, -jnp.inf)
    values, rows = jax.lax.top_k(value, n)
    # Fewer distinct sets than places: the best one takes the empty ones.
    rows = jnp.where(jnp.isfinite(values), rows, rows[0])
    return history.actions[rows], jnp.where(jnp.isfinite(values), values, values[0])
