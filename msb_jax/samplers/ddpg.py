"""Deterministic policy gradients with a price on violations, on sets.

The actor proposes a point of [0, 1]^L with sum K (the proto-action), the critic learns
the composite feedback r - lam2 c of the sets in a replay, and the actor climbs the
critic's gradient at the proto-action. The price lam2 of violations follows the dual
ascent of RCPO on a slower time scale. Nothing here knows where rewards come from.

Source: paper, "Primal-dual Wolpertinger sampler"; Dulac-Arnold et al. 2015; Lillicrap
et al. 2015; Tessler et al. 2018; ALGORITHMS 3.1, 3.2.

Differs from the paper:
* a round is an episode, and the target is r - lam2 c; a discount is an option (I-33),
  then the next action is the top-K of the target actor;
* violations of a vector are known, x'Wx, so the critic's network learns the rest and
  Q(s, x) = net(s, x) - lam2 x'Wx. A change of lam2 acts at once, on stored rows too;
* rewards are standardised when they are drawn, and lam2 is in their deviations (I-31);
* the actor's output has sum K, and a little entropy keeps it from saturating: else the
  gradient would die at the first set it finds, and its arms could never leave;
* imitation has an optimiser of its own, started afresh, so that it leaves no momentum;
* an option, off: `semantic` is the weight of the practical semantic loss of the
  proto-action, whose entries are the probabilities of the arms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from msb_jax.agent.replay import KINDS, Replay, draw, standardise, stratify
from msb_jax.networks.actor_critic import (
    ActorNet,
    Critic,
    Params,
    evaluate,
    plain_actor,
    sum_to_k,
)
from msb_jax.problem import Problem, to_multi_hot, violation_rate
from msb_jax.semantic import practical_loss
from msb_jax.types import Key

# Outputs are clipped here before a logarithm (I-21).
_CLIP = 1e-4
_POSITIVE = ("width", "num_steps", "batch_size", "actor_batch", "num_clusters")
_RATES = ("critic_rate", "actor_rate", "imitation_rate")
_NOT_NEGATIVE = ("weight_decay", "entropy", "imitation_steps", "semantic")


@dataclass(frozen=True, kw_only=True)
class DdpgConfig:
    """Settings of the learner."""

    width: int = 64  # hidden units of both networks
    num_steps: int = 40  # gradient steps a call of `learn`
    batch_size: int = 96  # rows of a step
    actor_batch: int = 8  # states of a step of the actor
    critic_rate: float = 3e-3  # Adam
    actor_rate: float = 2.5e-3  # slower than the critic, as RCPO asks
    weight_decay: float = 1e-4  # of the critic
    entropy: float = 0.05  # its weight, in deviations of the reward a nat
    tau: float = 0.05  # pace of the target networks
    discount: float = 0.0  # 0: every round is an episode
    replay: str = "prioritized"  # or "uniform"
    num_clusters: int = 20  # n_c, of the prioritised one
    imitation_steps: int = 20  # n_D
    imitation_rate: float = 1e-2
    semantic: float = 0.0  # weight of the semantic loss, in deviations; 0: off

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in _POSITIVE + _RATES and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}.")
            if name in _NOT_NEGATIVE and value < 0:
                raise ValueError(f"{name} must not be negative, got {value}.")
        if not 0 < self.tau <= 1:
            raise ValueError(f"tau must be in (0, 1], got {self.tau}.")
        if not 0 <= self.discount < 1:
            raise ValueError(f"discount must be in [0, 1), got {self.discount}.")
        if self.replay not in KINDS:
            raise ValueError(
                f"replay must be one of {', '.join(KINDS)}, got {self.replay!r}."
            )


class Learner(NamedTuple):
    """Weights and moments of the optimisers."""

    actor: Params
    critic: Params
    target_actor: Params
    target_critic: Params
    actor_moments: Any
    critic_moments: Any


class Ddpg(NamedTuple):
    """The learner's functions, for one run.

    `value` and `learn` count violations in one unit, that of the rows of the replay;
    `learn` also takes the matrix W with which x'Wx is the violation of a vector.
    """

    init: Callable[[Key], Learner]
    proto: Callable[[Learner, jax.Array], jax.Array]  # state [L] -> [L], sum K
    # (learner, state [L], actions [N, K], violations [N], lam2) -> [N]
    value: Callable[..., jax.Array]
    learn: Callable[..., Learner]  # (key, learner, replay, lam2, W [L, L])
    imitate: Callable[[Learner, jax.Array, jax.Array], Learner]  # state, int32[K]


def composite(
    rewards: jax.Array, violations: jax.Array, lam2: jax.Array | float
) -> jax.Array:
    """Compute the composite feedback r - lam2 c."""
    return rewards - lam2 * violations


def critic_target(
    rewards: jax.Array,
    violations: jax.Array,
    lam2: jax.Array | float,
    discount: float = 0.0,
    next_values: jax.Array | float = 0.0,
) -> jax.Array:
    """Compute r - lam2 c + gamma Q'(s', pi'(s')); gamma = 0 ends the episode."""
    return composite(rewards, violations, lam2) + discount * next_values


def dual_step(
    lam2: jax.Array, violation: jax.Array, alpha: float, eta: float, most: float
) -> jax.Array:
    """Ascend in the price: lam2 + eta (mean violation - alpha), in [0, most]."""
    return jnp.clip(lam2 + eta * (violation - alpha), 0.0, most)


def relative_violation(problem: Problem, actions: jax.Array) -> jax.Array:
    """Compute c / E[c of a uniform set]: int32[N, K] -> float32[N]."""
    return violation_rate(problem, actions) / random_rate(problem)


def random_rate(problem: Problem) -> float:
    """E[c] of a uniform set, K(K-1) / (L(L-1)); 1 where no set has a pair."""
    k, num_arms = problem.k, problem.num_arms
    return k * (k - 1) / (num_arms * (num_arms - 1)) if k > 1 else 1.0


def clash_matrix(problem: Problem) -> jax.Array:
    """The matrix W with x'Wx = `relative_violation` of 0/1 vectors: [L, L]."""
    edges = jnp.maximum(problem.num_conflicts, 1).astype(jnp.float32)
    return problem.conflicts.astype(jnp.float32) / (2.0 * edges * random_rate(problem))


def ddpg(
    config: DdpgConfig, num_arms: int, k: int, actor_net: ActorNet | None = None
) -> Ddpg:
    """Build the learner for sets of k of `num_arms` arms; the actor may be given."""
    actor_net = actor_net or plain_actor(num_arms, k, config.width)
    critic_net = Critic(num_arms, k, config.width)
    actor_step = optax.adam(config.actor_rate)
    critic_step = optax.adamw(config.critic_rate, weight_decay=config.weight_decay)
    imitation_step = optax.adam(config.imitation_rate)

    def act(params: Params, state: jax.Array) -> jax.Array:
        return sum_to_k(actor_net.logits(params, state), k)

    def judge(params: Params, state: jax.Array, action: jax.Array) -> jax.Array:
        return evaluate(critic_net, params, state, action)

    act_all = jax.vmap(act, in_axes=(None, 0))
    judge_all = jax.vmap(judge, in_axes=(None, 0, 0))
    semantic = jax.vmap(practical_loss, in_axes=(0, None, None))

    def init(key: Key) -> Learner:
        keys = jax.random.split(key)
        zeros = jnp.zeros((num_arms,))
        actor = actor_net.init(keys[0])
        critic = critic_net.init(keys[1], zeros, zeros)
        return Learner(
            actor=actor,
            critic=critic,
            target_actor=actor,
            target_critic=critic,
            actor_moments=actor_step.init(actor),
            critic_moments=critic_step.init(critic),
        )

    def value(
        learner: Learner,
        state: jax.Array,
        actions: jax.Array,
        violations: jax.Array,
        lam2: jax.Array,
    ) -> jax.Array:
        vectors = to_multi_hot(actions, num_arms)
        known = jax.vmap(judge, (None, None, 0))(learner.critic, state, vectors)
        return composite(known, violations, lam2)

    def learn(
        key: Key, learner: Learner, replay: Replay, lam2: jax.Array, clash: jax.Array
    ) -> Learner:
        replay = replay._replace(
            is_row=replay.is_row & jnp.isfinite(replay.rows.rewards)
        )
        rows = replay.rows
        rewards = standardise(rows.rewards, replay.is_row)
        hot = to_multi_hot(rows.actions, num_arms)  # [C, L]
        cluster_key, draw_key = jax.random.split(key)
        strata = stratify(
            cluster_key,
            replay,
            hot,
            config.batch_size,
            config.replay,
            config.num_clusters,
        )
        batches = draw(draw_key, strata, config.num_steps)

        def priced(critic: Params, states: jax.Array, x: jax.Array) -> jax.Array:
            """Values of any vectors [N, L] beside the states [N, L]."""
            violations = jnp.sum((x @ clash) * x, axis=1)
            return composite(judge_all(critic, states, x), violations, lam2)

        def step(learner: Learner, batch: jax.Array) -> tuple[Learner, None]:
            states, violations = rows.states[batch], rows.violations[batch]
            ahead: jax.Array | float = 0.0
            if config.discount:
                following = rows.next_states[batch]
                proto = act_all(learner.target_actor, following)
                chosen = to_multi_hot(jax.lax.top_k(proto, k)[1], num_arms)
                ahead = priced(learner.target_critic, following, chosen)
            target = critic_target(
                rewards[batch], violations, lam2, config.discount, ahead
            )

            def critic_loss(params: Params) -> jax.Array:
                known = judge_all(params, states, hot[batch])
                return jnp.mean(jnp.square(composite(known, violations, lam2) - target))

            def actor_loss(params: Params) -> jax.Array:
                some = states[-config.actor_batch :]
                output = act_all(params, some)
                gain = priced(critic, some, output) + config.entropy * _entropy(output)
                if config.semantic:
                    # The matrix W is positive at the conflicts and 0 elsewhere.
                    gain -= config.semantic * semantic(output, clash, k)
                return -jnp.mean(gain)

            critic, critic_moments = _descend(
                critic_step, critic_loss, learner.critic, learner.critic_moments
            )
            actor, actor_moments = _descend(
                actor_step, actor_loss, learner.actor, learner.actor_moments
            )
            return Learner(
                actor=actor,
                critic=critic,
                target_actor=_follow(learner.target_actor, actor, config.tau),
                target_critic=_follow(learner.target_critic, critic, config.tau),
                actor_moments=actor_moments,
                critic_moments=critic_moments,
            ), None

        learned, _ = jax.lax.scan(step, learner, batches)
        # Without a row there is nothing to learn from.
        is_ready = jnp.any(replay.is_row)
        return jax.tree.map(lambda a, b: jnp.where(is_ready, a, b), learned, learner)

    def imitate(learner: Learner, state: jax.Array, action: jax.Array) -> Learner:
        goal = to_multi_hot(action, num_arms)

        def loss(params: Params) -> jax.Array:
            output = jnp.clip(act(params, state), _CLIP, 1.0 - _CLIP)
            return -jnp.mean(goal * jnp.log(output) + (1.0 - goal) * jnp.log1p(-output))

        def step(carry: tuple[Params, Any], _: None) -> tuple[tuple[Params, Any], None]:
            return _descend(imitation_step, loss, *carry), None

        start = (learner.actor, imitation_step.init(learner.actor))
        (actor, _), _ = jax.lax.scan(step, start, None, length=config.imitation_steps)
        return learner._replace(actor=actor)

    return Ddpg(
        init=init,
        proto=lambda learner, state: act(learner.actor, state),
        value=value,
        learn=learn,
        imitate=imitate,
    )


def _descend(
    optimizer: optax.GradientTransformation,
    loss: Callable[[Params], jax.Array],
    params: Params,
    moments: Any,
) -> tuple[Params, Any]:
    """Take one step of an optimiser."""
    updates, moments = optimizer.update(jax.grad(loss)(params), moments, params)
    return optax.apply_updates(params, updates), moments


def _follow(target: Params, params: Params, tau: float) -> Params:
    """Move the target network a little towards the other one."""
    return jax.tree.map(lambda old, new: old + tau * (new - old), target, params)


def _entropy(output: jax.Array) -> jax.Array:
    """Sum the entropies of the arms, in nats: [N, L] -> [N]."""
    p = jnp.clip(output, _CLIP, 1.0 - _CLIP)
    return -jnp.sum(p * jnp.log(p) + (1.0 - p) * jnp.log1p(-p), axis=1)
