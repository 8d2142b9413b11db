"""What policies for ordered lists share: conflicts and places.

With hard constraints a list is filled from the top by the best arm that is not in
conflict with the arms above it, and where there is none by the one that adds the
fewest conflicts. In soft mode conflicts are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from msb_jax.baselines.random import plan_nothing
from msb_jax.clicks import needs_clicks
from msb_jax.problem import Problem, repair
from msb_jax.types import Key, Policy, State


def click_policy(
    name: str,
    init: Callable[[Key, Problem], State],
    ask: Callable[[Key, State], tuple[State, jax.Array]],
    tell_clicks: Callable[..., State],
) -> Policy:
    """Make a policy that learns from clicks alone and has nothing to prepare.

    Args:
        name: of the policy.
        init, ask, tell_clicks: see `Policy`.
    """

    def origin(state: State) -> jax.Array:
        del state
        return jnp.zeros((), jnp.int32)

    return Policy(
        init=init,
        ask=ask,
        tell=needs_clicks(name),
        refresh=plan_nothing,
        origin=origin,
        origins=(name,),
        tell_clicks=tell_clicks,
    )


def rank_arms(key: Key, problem: Problem, index: jax.Array, is_hard: bool) -> jax.Array:
    """Put the K arms of largest index in descending order, equal ones by lot.

    Args:
        index: [L], below infinity.
        is_hard: avoid conflicts.

    Returns:
        int32[K].
    """
    # First by lot, then by a stable sort.
    shuffled = jax.random.permutation(key, problem.num_arms)
    order = shuffled[jnp.argsort(-index[shuffled], stable=True)].astype(jnp.int32)
    if not is_hard:
        return order[: problem.k]
    rank = (
        jnp.zeros_like(index)
        .at[order]
        .set(-jnp.arange(index.shape[0], dtype=index.dtype))
    )
    action = repair(problem, order[: problem.k], rank)
    return action[jnp.argsort(-rank[action])]


def fill_places(
    problem: Problem,
    start: State,
    scores: Callable[[State], jax.Array],
    take: Callable[[State, jax.Array], State],
    is_hard: bool,
) -> jax.Array:
    """Fill K places from the top, when the scores depend on the arms above.

    Args:
        start: what the arms above amount to when there are none.
        scores: of all arms [L], given the arms above.
        take: add an arm [] to them.
        is_hard: avoid conflicts.

    Returns:
        int32[K].
    """
    size = problem.num_arms

    def place(
        carry: tuple[State, jax.Array], _: None
    ) -> tuple[tuple[State, jax.Array], jax.Array]:
        above, cost = carry  # cost [L]: conflicts that an arm would add
        wanted = jnp.where(cost == cost.min(), scores(above), -jnp.inf)
        arm = jnp.argmax(wanted).astype(jnp.int32)
        if is_hard:
            cost = cost + problem.conflicts[arm].astype(jnp.int32)
        # Above the conflicts that any arm can have.
        return (take(above, arm), cost.at[arm].set(2 * size)), arm

    start = (start, jnp.zeros((size,), jnp.int32))
    return jax.lax.scan(place, start, None, length=problem.k)[1]


def log_round(told: jax.Array, extra: float) -> jax.Array:
    """Compute log t + extra log log t, not below 0, of the round t = told + 1."""
    t = jnp.maximum(told + 1, 2).astype(jnp.float32)
    return jnp.maximum(jnp.log(t) + extra * jnp.log(jnp.log(t)), 0.0)
