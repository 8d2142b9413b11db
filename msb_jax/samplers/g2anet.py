"""G2ANet sampler: arms as agents, attention between them, REINFORCE on sets.

The network (`networks/attention.py`) gives every arm a logit phi_i; a set is drawn by
gumbel top-K and the network follows the gradient of the expected score,

    loss = -mean_n (Score(S_n) - b_n) log P(S_n),    Score = surrogate - price x pairs,

with the probability of the set, not of the order, and b_n the mean of the other
scores. A refresh takes several such steps on fresh sets.

Source: paper, "G2ANet sampler"; Liu et al. 2020; ALGORITHMS 4, 2.4.

Differs from the paper:
* gumbel noise goes on logits, not on out_i in [0, 1] (I-16);
* P(S) is exact (trapezoid rule); the average over random orders is an option (I-16);
* of the paper's two training rules it follows REINFORCE (I-17). The critic learns from
  the rounds really played what the surrogate misses, and is added to the score;
* scores are in deviations of the surrogate over random sets. With hard constraints,
  which have no price, a conflicting pair costs `hard_price` of them, and proposals are
  repaired, most wanted arms first;
* the policy keeps an entropy, which falls to a floor, and some proposals are drawn at a
  higher temperature: a policy that always draws one set proposes nothing new;
* an arm's inputs, which the paper does not name, are its features, its conflicts, its
  share in the sampler's good proposals, and its worth, alone and beside the best set;
* with more than `max_arms` arms the network sees the most promising ones only; all
  others together get the share `OUTSIDE` of the weight;
* two options: `semantic`, the weight of the practical semantic loss of the
  probabilities sum_to_k(logits), and `off_policy`, learning from the others' sets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from msb_jax import topk
from msb_jax.networks import attention
from msb_jax.networks.actor_critic import sum_to_k
from msb_jax.networks.attention import G2ANet, Nets, Scene, init_nets, judge, mask_noise
from msb_jax.off_policy import foreign_loss
from msb_jax.problem import Problem, random_sets, to_multi_hot, violated_pairs
from msb_jax.samplers.base import Context, Sampler, View, legalise, reward_of, value_of
from msb_jax.semantic import practical_loss
from msb_jax.types import Key

OUTSIDE = 0.01  # share of the weight for all arms out of sight
NUM_RANDOM = 64  # random sets that give the unit of the score
MEMORY = 0.9  # how much of the share in good proposals survives a refresh
NUM_NODES = 41  # of the trapezoid rule: gradients are exact to rounding
TAU_START, TAU_END = 1.0, 0.1  # temperature of the hard attention
MAX_MISSED = 10.0  # deviations that a round, or another's set, may tell
COOLING = 0.98  # a refresh, of that temperature and of the entropy

_LEAST = dict.fromkeys(("hidden", "max_arms", "num_steps", "hesitation"), 1)
_LEAST |= dict.fromkeys(("num_permutations", "imitation_steps", "hard_price"), 0)
_LEAST |= {"critic_weight": 0, "semantic": 0, "batch": 2}


@dataclass(frozen=True, kw_only=True)
class G2ANetConfig:
    """Settings of the sampler."""

    hard: str = "mlp"  # hard attention; or "lstm" (the paper's, slow), or "none"
    hidden: int = 8  # size of the encodings
    max_arms: int = 160  # arms the network looks at
    num_steps: int = 6  # REINFORCE steps a refresh
    batch: int = 48  # sets a step
    learning_rate: float = 0.02
    num_permutations: int = 0  # orders that estimate P(S) (the paper's M); 0: exact
    hesitation: float = 1.5  # this many times K arms share the weight in the end
    hard_price: float = 1.0  # of a forbidden pair, in deviations
    critic_weight: float = 0.5
    temperatures: tuple[float, ...] = (0.5, 1.0, 1.5)  # of proposals, in turn
    imitation_steps: int = 20  # steps towards a demonstration (n_D)
    semantic: float = 0.0  # weight of the semantic loss; 0: off
    off_policy: bool = False  # learn from the sets of the other samplers too

    def __post_init__(self) -> None:
        attention.check_stage(self.hard)
        if min(self.temperatures, default=0.0) <= 0 or self.learning_rate <= 0:
            raise ValueError("learning_rate and all temperatures must be positive.")
        for name, low in _LEAST.items():
            if getattr(self, name) < low:
                value = getattr(self, name)
                raise ValueError(f"{name} must be at least {low}, got {value}.")


class G2ANetState(NamedTuple):
    """The networks, and what the sampler remembers of its proposals."""

    nets: Nets
    opt: Any
    frequency: jax.Array  # [L] share of its good proposals that hold the arm
    heat: jax.Array  # [] 1 at the start, falls towards 0


def arm_logits(
    config: G2ANetConfig, state: G2ANetState, scene: Scene, noise: jax.Array
) -> jax.Array:
    """Compute the logits of the arms of a scene for one draw of `mask_noise`: [A]."""
    tau = jnp.maximum(TAU_START * state.heat, TAU_END)
    net: Any = G2ANet(state.frequency.shape[0], config.hidden, config.hard)
    return net.apply(state.nets.actor, scene, noise, tau)


def soften(logits: jax.Array, k: int, hesitation: float, heat: jax.Array) -> jax.Array:
    """Divide logits [A] by the least T >= 1 that keeps softmax(logits / T) undecided.

    Its entropy stays above that of `hesitation` times K equal arms at heat 0, and of a
    number halfway between K and A at heat 1. T is differentiated too, so that nothing
    is gained by larger and larger logits.
    """
    halfway = 0.5 * math.log(logits.shape[0] / k)
    end = min(math.log(hesitation), halfway)
    goal = math.log(k) + end + (halfway - end) * heat

    def lack(log_t: jax.Array, logits: jax.Array) -> jax.Array:
        log_share = jax.nn.log_softmax(logits * jnp.exp(-log_t))
        return goal + jnp.sum(jnp.exp(log_share) * log_share)

    def halve(_: int, ends: jax.Array) -> jax.Array:
        middle = jnp.mean(ends)
        is_cold = lack(middle, fixed) > 0
        return jnp.where(is_cold, ends.at[0].set(middle), ends.at[1].set(middle))

    fixed = jax.lax.stop_gradient(logits)
    root = jax.lax.fori_loop(0, 24, halve, jnp.asarray([0.0, 8.0]))[1]
    # A Newton step at the root moves nothing, but brings the gradient of the root.
    slope = jnp.minimum(jax.grad(lack)(root, fixed), -1e-3)
    root -= lack(root, logits) / slope
    return logits * jnp.exp(-jnp.where(lack(0.0 * root, fixed) > 0, root, 0.0))


def actor_loss(
    key: Key, logits: jax.Array, actions: jax.Array, scores: jax.Array, num_orders: int
) -> jax.Array:
    """Compute the loss of REINFORCE with the mean of the others as baseline: [].

    Args:
        logits: float32[A].
        actions: int32[n, K], n >= 2, drawn from the logits; places in them.
        scores: float32[n], rewards less the price of violations, in deviations.
        num_orders: orders that estimate P(S); 0 for the exact one.
    """
    n = actions.shape[0]

    def log_prob(key: Key, action: jax.Array) -> jax.Array:
        if num_orders:
            return topk.set_log_prob_permutations(key, logits, action, num_orders)
        return topk.set_log_prob_trapezoid(logits, action, NUM_NODES)

    log_probs = jax.vmap(log_prob)(jax.random.split(key, n), actions)
    # Less the mean of the others is less the mean of all, times n / (n - 1).
    return -jnp.sum((scores - jnp.mean(scores)) * log_probs) / (n - 1)


def critic_loss(
    critic: Any, actions: jax.Array, targets: jax.Array, is_known: jax.Array
) -> jax.Array:
    """Compute the mean squared error of the critic on the known rows of [n, K]: []."""
    errors = jnp.where(is_known, judge(critic, actions) - targets, 0.0)
    return jnp.sum(jnp.square(errors)) / jnp.maximum(jnp.sum(is_known), 1)


def descend(
    config: G2ANetConfig, loss: Callable[..., jax.Array], nets: Nets, opt: Any, n: int
) -> tuple[Nets, Any]:
    """Take n steps of Adam on loss(nets, t), t = 0, 1, ..."""

    def step(carry: tuple[Nets, Any], t: jax.Array) -> tuple[tuple[Nets, Any], None]:
        nets, opt = carry
        steps, opt = _adam(config).update(jax.grad(loss)(nets, t), opt)
        return (optax.apply_updates(nets, steps), opt), None

    return jax.lax.scan(step, (nets, opt), jnp.arange(n))[0]


def g2anet(config: G2ANetConfig = G2ANetConfig()) -> Sampler:
    """Build the G2ANet sampler."""

    def init(key: Key, problem: Problem) -> G2ANetState:
        num_arms, num_inputs = problem.num_arms, problem.features.shape[1] + 4
        nets = init_nets(key, G2ANet(num_arms, config.hidden, config.hard), num_inputs)
        return G2ANetState(
            nets=nets,
            opt=_adam(config).init(nets),
            frequency=jnp.full((num_arms,), problem.k / num_arms, jnp.float32),
            heat=jnp.ones(()),
        )

    def update(key: Key, state: G2ANetState, context: Context) -> G2ANetState:
        view, problem = context.view, context.view.problem
        chance_key, steps_key = jax.random.split(key)
        chance = reward_of(view, random_sets(chance_key, problem, NUM_RANDOM))
        is_hard = jnp.isinf(view.pair_price)
        soft_price = jnp.where(is_hard, 0.0, view.pair_price)
        unit = jnp.maximum(_deviation(chance), 1e-3 * soft_price)
        price = jnp.where(is_hard, config.hard_price, soft_price / unit)
        missed = (view.played_values - reward_of(view, view.played)) / unit
        missed = jnp.clip(missed, -MAX_MISSED, MAX_MISSED)
        state = state._replace(frequency=_remember(state.frequency, context))
        scene = look(view, state.frequency, config.max_arms)

        def score(actions: jax.Array) -> jax.Array:
            scores = reward_of(view, actions) / unit
            scores -= price * violated_pairs(problem, actions)
            return scores + config.critic_weight * judge(state.nets.critic, actions)

        def loss(nets: Nets, t: jax.Array) -> jax.Array:
            step_key = jax.random.fold_in(steps_key, t)
            mask_key, draw_key, loss_key = jax.random.split(step_key, 3)
            noise = mask_noise(mask_key, scene.arms.shape[0])
            logits = arm_logits(config, state._replace(nets=nets), scene, noise)
            logits = soften(logits, problem.k, config.hesitation, state.heat)
            places = topk.gumbel_topk_batch(draw_key, logits, problem.k, config.batch)
            scores = score(scene.arms[places])
            known = (view.played, missed, view.is_played)
            total = critic_loss(nets.critic, *known) + actor_loss(
                loss_key, logits, places, scores, config.num_permutations
            )
            if config.semantic:
                p = sum_to_k(logits, problem.k)
                total += config.semantic * practical_loss(p, scene.conflicts, problem.k)
            if config.off_policy:
                gains = score(view.pool) - jnp.mean(scores)
                gains = jnp.clip(gains, -MAX_MISSED, MAX_MISSED)
                total += foreign_loss(logits, scene.arms, context, gains)
            return total

        nets, opt = descend(config, loss, state.nets, state.opt, config.num_steps)
        return state._replace(nets=nets, opt=opt, heat=COOLING * state.heat)

    def propose(key: Key, state: G2ANetState, context: Context, n: int) -> jax.Array:
        view, problem = context.view, context.view.problem
        mask_key, draw_key = jax.random.split(key)
        scene = look(view, state.frequency, config.max_arms)
        noise = mask_noise(mask_key, scene.arms.shape[0])
        logits = arm_logits(config, state, scene, noise)
        logits = soften(logits, problem.k, config.hesitation, state.heat)
        num_others = max(problem.num_arms - scene.arms.shape[0], 1)
        low = jax.nn.logsumexp(logits) + math.log(OUTSIDE / num_others)
        logits = jnp.full((problem.num_arms,), low).at[scene.arms].set(logits)
        temperature = jnp.resize(jnp.asarray(config.temperatures), (n, 1))
        wanted = logits[None, :] / temperature
        wanted += jax.random.gumbel(draw_key, wanted.shape)
        actions = jax.lax.top_k(wanted, problem.k)[1].astype(jnp.int32)
        return jax.vmap(legalise, in_axes=(None, 0, 0))(view, actions, wanted)

    def imitate(
        key: Key, state: G2ANetState, context: Context, demonstration: jax.Array
    ) -> G2ANetState:
        scene = look(context.view, state.frequency, config.max_arms)
        target = to_multi_hot(demonstration, state.frequency.shape[0])[scene.arms]

        def loss(nets: Nets, t: jax.Array) -> jax.Array:
            noise = mask_noise(jax.random.fold_in(key, t), target.shape[0])
            logits = arm_logits(config, state._replace(nets=nets), scene, noise)
            return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, target))

        opt = _adam(config).init(state.nets)  # that of REINFORCE is left alone
        nets, _ = descend(config, loss, state.nets, opt, config.imitation_steps)
        return state._replace(nets=nets)

    return Sampler("g2anet", init, propose, update, num_starts=4, imitate=imitate)


def look(view: View, frequency: jax.Array, max_arms: int) -> Scene:
    """Choose the arms the network looks at, and say what it sees of them."""
    problem, model = view.problem, view.model
    is_best = to_multi_hot(view.elites[0], problem.num_arms)[view.arms]
    beside = model.linear + 2.0 * model.pair @ is_best  # worth beside the best set
    size = min(view.arms.shape[0], max(max_arms, problem.k))
    promise = jnp.where(is_best > 0, jnp.inf, beside)
    places = jnp.sort(jax.lax.top_k(promise, size)[1])
    arms = view.arms[places]
    worth = jnp.stack([view.marginals[arms], beside[places]], axis=1)
    columns = jnp.concatenate([problem.features[arms], worth], axis=1)
    return describe(problem, arms, columns, frequency[arms])


def describe(
    problem: Problem, arms: jax.Array, columns: jax.Array, frequency: jax.Array
) -> Scene:
    """Say what the network sees of arms int32[A]: columns [A, F] and shares [A]."""
    centred = columns - jnp.mean(columns, axis=0, keepdims=True)
    columns = centred / _deviation(columns)[None, :]
    conflicts = problem.conflicts[arms]  # [A, L]
    degree = jnp.sum(conflicts, axis=1) / problem.num_arms
    shares = jnp.stack([degree, frequency], axis=1)
    return Scene(
        arms=arms,
        inputs=jnp.concatenate([columns, shares], axis=1),
        conflicts=conflicts[:, arms].astype(jnp.float32),
    )


def _remember(frequency: jax.Array, context: Context) -> jax.Array:
    """Mix in the arms of this sampler's own proposals that beat their average."""
    view = context.view
    values = value_of(view, view.pool)
    is_own = view.pool_origin == context.origin
    mean = jnp.sum(jnp.where(is_own, values, 0.0)) / jnp.maximum(jnp.sum(is_own), 1)
    is_good = (is_own & (values >= mean)).astype(jnp.float32)  # [N]
    share = jnp.zeros_like(frequency).at[view.pool].add(is_good[:, None])
    share /= jnp.maximum(jnp.sum(is_good), 1.0)
    new = jnp.where(jnp.any(is_good > 0), share, frequency)
    return MEMORY * frequency + (1.0 - MEMORY) * new


def _deviation(values: jax.Array) -> jax.Array:
    """The deviation along the first axis, but never less than rounding errors."""
    tiny = 1e-5 * jnp.max(jnp.abs(values), axis=0) + 1e-30
    return jnp.maximum(jnp.std(values, axis=0), tiny)


def _adam(config: G2ANetConfig) -> optax.GradientTransformation:
    # A common shift of the logits changes nothing; eps keeps its rounding errors small.
    return optax.adam(config.learning_rate, b2=0.99, eps=1e-5)
