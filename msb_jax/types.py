"""The protocols by which the parts meet, and the letters used for shapes.

Every bundle is a NamedTuple of pure functions over a pytree state. Functions are
written for one problem and one run; batching over seeds is the caller's `vmap`.

Letters, used in every shape comment of the project:

    B seeds       T rounds       L arms          K arms in an action
    D features    N candidates   M conflicts     P network parameters
    C capacity of a history (rows that are allocated, used or not)
    A arms that a search looks at (all L of them unless L is large)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from msb_jax.link import Link
from msb_jax.problem import Problem

Key = jax.Array
State = Any


class Outcome(NamedTuple):
    """What the environment gives back for one action."""

    reward: jax.Array  # [] what the learner sees
    mean_reward: jax.Array  # [] the same without noise, for the records only
    clicks: jax.Array | None = None  # [K] what a learner with click feedback sees


class Score(NamedTuple):
    """The master's judgement of N actions, in units of the reward."""

    mean: jax.Array  # [N]
    bonus: jax.Array  # [N] radius times posterior deviation
    violation: jax.Array  # [N] c(A) = conflicting pairs / M
    total: jax.Array  # [N] what is maximised


class Belief(NamedTuple):
    """Joint Gaussian belief over N actions, on the latent scale of the link."""

    mean: jax.Array  # [N]
    cov: jax.Array  # [N, N]
    noise: jax.Array  # [] variance of one observation
    link: Link  # latent value <-> reward


class Quadratic(NamedTuple):
    """A quadratic model x'Qx + d'x + e on K-hot x of A arms, on the latent scale."""

    pair: jax.Array  # [A, A] symmetric
    linear: jax.Array  # [A]
    offset: jax.Array  # []


class EnvReset(Protocol):
    def __call__(self, key: Key) -> State:
        """Draw an instance."""
        ...


class EnvStep(Protocol):
    def __call__(
        self, key: Key, state: State, action: jax.Array
    ) -> tuple[State, Outcome]:
        """Play `action` (int32[K])."""
        ...


class Env(NamedTuple):
    """An environment. `problem` is all that a policy may know in advance."""

    reset: EnvReset
    step: EnvStep
    problem: Callable[[State], Problem]


class Master(NamedTuple):
    """A model of what sets are worth.

    `update` only appends a round to the history and is cheap; `refresh` does the
    work (linear algebra, training) for all rounds appended since the last one.
    `belief` is the joint posterior over a pool of candidates: a block of rounds
    played from that pool needs nothing but Gaussian conditioning.
    """

    init: Callable[[Key, Problem], State]
    update: Callable[[Key, State, jax.Array, jax.Array], State]  # action, reward
    refresh: Callable[..., State]  # (key, state, *, fit: bool): fit is static
    due: Callable[[State], bool]  # host: should the next refresh also fit scales?
    belief: Callable[[State, jax.Array], Belief]  # actions [N, K]
    score: Callable[[State, jax.Array], Score]  # actions [N, K]
    fitted: Callable[[State], jax.Array]  # [C] expected reward at absorbed rows
    link: Callable[[State], Link]
    radius: Callable[[State], jax.Array]  # [] multiplies the posterior deviation
    marginals: Callable[[State], jax.Array]  # [L] first-order extractor b
    quadratic: Callable[[State, jax.Array], Quadratic]  # extractor (Q, d) on arms [A]
    draws: Callable[[Key, State, jax.Array, int], Quadratic]  # n draws of it
    grow: Callable[[State, int], State]  # host: raise the capacity
    # `update` learns at once: candidates are scored anew at every round.
    is_live: bool = False
    # [] rounds after which a reward says little of today; None: it always does.
    memory: Callable[[State], jax.Array] | None = None


class Policy(NamedTuple):
    """What the runner, the tables and a live system know of an algorithm.

    `ask` and `tell` are pure and are jitted by the caller; `refresh` is called
    every `f_in` rounds, may use the host, and accepts one run (a scalar key) or a
    batch of runs (keys [B], every leaf of the state with a leading B). Where the
    environment gives clicks, a policy with `tell_clicks` is told by it instead of by
    `tell`; one that cannot do without them has a `tell` that says so.
    """

    init: Callable[[Key, Problem], State]
    ask: Callable[[Key, State], tuple[State, jax.Array]]
    tell: Callable[[Key, State, jax.Array, jax.Array], State]
    refresh: Callable[[Key, State], State]
    origin: Callable[[State], jax.Array]  # [] index into `origins` of the last ask
    origins: tuple[str, ...] = ("policy",)
    producer: Callable[[State], jax.Array] | None = None  # who found the last action
    # (key, state, action, reward, clicks) -> state
    tell_clicks: (
        Callable[[Key, State, jax.Array, jax.Array, jax.Array], State] | None
    ) = None
