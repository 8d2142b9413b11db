"""NeuralUCB: the paper's master, a trained network with gradient confidence.

Every set S is judged by U(S) = h'(S; theta) + gamma sqrt(g'Z^{-1}g / m), with h' a
bias-free ReLU network (`ucb.UcbNet`), g its gradient in the parameters and Z
the sum of g g' / m over the rounds played (paper, "Master model" and appendix
"Details of master model"; Zhou, Li and Gu 2020; ALGORITHMS 1.1).

`update` only records a round. `refresh` takes the gradients of the new rounds into
Z at the weights with which they were played, then trains.

Differs from the paper:
* weights are trained at each refresh instead of after each round; in between, the
  joint Gaussian `belief` over a pool of candidates is conditioned on what is
  observed, which is the linearised update of the same model. With s the deviation
  of the rewards it reads w ~ N(0, s^2 / lam1 I) on the features g / sqrt(m) and
  noise variance s^2, so that one play of a set takes its sqrt(g'Z^{-1}g / m) from b
  to b / sqrt(1 + b^2), as Z does;
* training="adam" warm-starts mini-batch Adam on the same loss (I-14);
  training="literal" is the paper's J gradient steps from theta_0 on all rounds;
* the mean is a closed-form linear part (`ridge`) plus the network, which learns what
  the linear part leaves and counts as far as its forecasts came true: a linear
  reward is then learned as fast as by ridge regression (`linear_part=False` is the
  paper's mean);
* rewards are standardised by their running mean and deviation (I-9), and inputs are
  x / sqrt(K) everywhere (I-12);
* radius_kind="theory" uses the large-width limit of gamma_t with -2 log delta, where
  the paper prints one power of delta too few (I-14), and its last term only with
  literal training, to which alone it applies. The default is the constant nu;
* extractor="least_squares" fits the network where the good sets are;
  extractor="paper" reads it at one and two arms, far away from them (I-1);
* with a `discount` the loss, the linear part and the moments weigh a round by its age,
  and the confidence is `discounted_confidence`. With "diagonal", Z and Z~ remember
  beyond `memory`, at the discounts of their time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from msb_jax.link import Link, identity_link
from msb_jax.masters import discount as forget
from msb_jax.masters import discounted_confidence as discounted
from msb_jax.masters import extractors, training
from msb_jax.masters import history as hist
from msb_jax.masters import ridge as linear
from msb_jax.masters.confidence import KINDS, MIN_RIDGE, confidence
from msb_jax.masters.scoring import check_constraints, total_score
from msb_jax.networks import ucb
from msb_jax.problem import Problem, random_sets, violated_pairs, violation_rate
from msb_jax.rng import stream
from msb_jax.types import Belief, Key, Master, Quadratic, Score

ADAM_RATE = 1e-2
CHOICES = {
    "confidence": KINDS,
    "radius_kind": ("constant", "theory"),
    "training": ("adam", "literal"),
    "extractor": ("least_squares", "paper"),
}


@dataclass(frozen=True, kw_only=True)
class NeuralUcbConfig:
    """Settings of the neural master."""

    width: int = 64  # m, even
    depth: int = 2  # D, number of weight matrices
    lam1: float = 1.0  # ridge of Z and of the training loss
    nu: float = 0.1  # exploration, in deviations of the rewards
    confidence: str = "exact"  # or "diagonal", "full"
    radius_kind: str = "constant"  # or "theory"
    norm_bound: float = 1.0  # S of the theoretical radius
    delta: float = 0.1  # failure probability of the theoretical radius
    training: str = "adam"  # or "literal"
    learning_rate: float | None = None  # None: 1e-2, literal 1 / (m (lam1 + t D))
    num_steps: int = 200  # training steps of a refresh, J
    batch_size: int = 64  # rounds in a step of Adam
    linear_part: bool = True
    fit_growth: float = 1.5  # choose the ridge anew after growth by this factor
    extractor: str = "least_squares"  # or "paper"
    extractor_sets: int = 32  # best played sets, around which it fits
    extractor_spread: float = 0.25  # share of arms swapped in that neighbourhood
    lam: float = 5.0  # price of the violation rate, soft constraints
    constraints: str = "soft"  # or "hard"
    capacity: int = 256  # rounds the history starts with
    block: int = 20  # rounds absorbed at once
    discount: float | str = 1.0  # weight of a round for each it is older, or "auto"
    memory: int = 384  # last rounds that count, with a discount
    min_weight: float = 1e-3  # and their least weight

    def __post_init__(self) -> None:
        ucb.check_sizes(1, self.width, self.depth)
        check_constraints(self.constraints, self.lam)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(choices)}, "
                    f"got {getattr(self, name)!r}."
                )
        for name in ("num_steps", "batch_size", "extractor_sets", "capacity", "block"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}."
                )
        if not MIN_RIDGE <= self.lam1 < math.inf:
            raise ValueError(f"lam1 must be at least {MIN_RIDGE}, got {self.lam1}.")
        if not 0 <= self.nu < math.inf or not 0 <= self.norm_bound < math.inf:
            raise ValueError(
                "nu and norm_bound must be finite and at least 0, got "
                f"{self.nu} and {self.norm_bound}."
            )
        if not 0 < self.delta < 1 or not 0 < self.extractor_spread <= 1:
            raise ValueError(
                "delta must lie in (0, 1) and extractor_spread in (0, 1], got "
                f"{self.delta} and {self.extractor_spread}."
            )
        if not 1 < self.fit_growth < math.inf:
            raise ValueError(f"fit_growth must be above 1, got {self.fit_growth}.")
        forget.check_discount(self.discount, self.memory, self.min_weight)
        if self.discount != 1.0 and self.confidence not in discounted.KINDS:
            raise ValueError(
                f"confidence={self.confidence!r} knows no discount; choose "
                f"{' or '.join(discounted.KINDS)}, or discount=1."
            )
        rate = 0.0 if self.learning_rate is None else self.learning_rate
        if self.learning_rate is not None and not 0 < rate < math.inf:
            raise ValueError(f"learning_rate must be positive, got {rate}.")
        is_theory = self.radius_kind == "theory" and self.training == "literal"
        if is_theory and rate * self.width * self.lam1 >= 1:
            raise ValueError(
                "radius_kind='theory' needs learning_rate * width * lam1 below 1; "
                "leave learning_rate out to have it chosen."
            )


DEFAULT = NeuralUcbConfig()


class NeuralUcbState(NamedTuple):
    """Everything the neural master knows."""

    problem: Problem
    history: hist.History
    params: Any  # theta
    params_0: Any  # theta_0
    opt_state: Any
    confidence: Any
    ridge: linear.Ridge
    gate: linear.Gate
    center: jax.Array  # [] moments of the rewards at the last refresh
    scale: jax.Array  # []
    fitted: jax.Array  # [C] mean at the absorbed rounds, 0 beyond
    best: jax.Array  # [E, K] int32, the best of them
    fitted_at: jax.Array  # [] int32, rounds when the ridge was chosen
    tracker: Any = ()  # what chooses the discount, if it is "auto"


def neural_ucb(config: NeuralUcbConfig = DEFAULT) -> Master:
    """Build the NeuralUCB master."""
    optimizer = optax.adam(config.learning_rate or ADAM_RATE)
    is_discounted = config.discount != 1.0
    is_auto = config.discount == forget.AUTO

    def init(key: Key, problem: Problem) -> NeuralUcbState:
        params = ucb.init_params(stream(key, "params"), _network(config, problem))
        trust = _confidence(config, problem)
        capacity = config.capacity
        if is_discounted:  # enough for all rounds after the warm-up
            capacity = hist.next_capacity(config.memory, 2 * hist.slack(config.block))
        return NeuralUcbState(
            problem=problem,
            history=hist.new_history(capacity, problem.k),
            params=params,
            # A copy: a caller may donate the state, and no buffer goes twice.
            params_0=jax.tree.map(jnp.copy, params),
            opt_state=optimizer.init(params),
            confidence=trust.init(capacity, problem.k),
            ridge=linear.new_ridge(problem.num_arms),
            gate=linear.new_gate(),
            center=jnp.zeros(()),
            scale=jnp.ones(()),
            fitted=jnp.zeros((capacity,)),
            best=random_sets(stream(key, "best"), problem, config.extractor_sets),
            fitted_at=jnp.zeros((), jnp.int32),
            tracker=forget.new_tracker(problem.num_arms) if is_auto else (),
        )

    def update(
        key: Key, state: NeuralUcbState, action: jax.Array, reward: jax.Array
    ) -> NeuralUcbState:
        del key
        return state._replace(history=hist.append(state.history, action, reward))

    def absorb(state: NeuralUcbState) -> NeuralUcbState:
        """Take the pending rounds into Z, at the weights they were played with."""
        history = state.history
        end = jnp.minimum(history.count, history.rewards.shape[0])
        trust = _confidence(config, state.problem)
        gamma = forget.present(config.discount, state.tracker)

        def take(_: int, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            matrix, ridge, gate, start = carry
            num_new = jnp.clip(end - start, 0, config.block)
            rows = start + jnp.arange(config.block)
            actions = history.actions.at[rows].get(mode="fill", fill_value=0)
            rewards = history.rewards.at[rows].get(mode="fill", fill_value=0)
            grads = gradients(state, actions)
            outcomes = (rewards - state.center) / state.scale
            outcomes = outcomes - linear.predict(state.ridge, actions)
            forecasts = network(state, actions)
            if is_discounted:
                share = jnp.minimum(linear.GATE_MEMORY, jnp.power(gamma, num_new))
                matrix = trust.absorb(matrix, grads, num_new, gamma)
                gate = linear.compare(gate, forecasts, outcomes, num_new, share)
            else:
                matrix = trust.absorb(matrix, grads, num_new)
                ridge = linear.absorb(ridge, actions, num_new)
                gate = linear.compare(gate, forecasts, outcomes, num_new)
            return matrix, ridge, gate, start + num_new

        num_blocks = _most((end - history.absorbed + config.block - 1) // config.block)
        carry = (state.confidence, state.ridge, state.gate, history.absorbed)
        matrix, ridge, gate, done = jax.lax.fori_loop(0, num_blocks, take, carry)
        return state._replace(
            confidence=matrix,
            ridge=ridge,
            gate=gate,
            history=history._replace(absorbed=done),
        )

    def weigh(state: NeuralUcbState) -> jax.Array:
        """Weights of the absorbed rows, 0 beyond: [C]."""
        gamma = forget.present(config.discount, state.tracker)
        capacity = state.history.rewards.shape[0]
        return forget.row_weights(state.history.absorbed, capacity, gamma)

    def let_go(state: NeuralUcbState) -> tuple[NeuralUcbState, jax.Array]:
        """Keep the last rows alone, and weigh them by their age: [C]."""
        before = state.history
        gamma = forget.present(config.discount, state.tracker)
        kept = forget.num_kept(gamma, config.memory, config.min_weight)
        state = state._replace(history=hist.keep_last(before, kept))
        weights = weigh(state)
        trust = _confidence(config, state.problem)
        first = before.count - state.history.count
        state = state._replace(
            confidence=trust.settle(state.confidence, first, weights),
            ridge=linear.recount(state.ridge, state.history.actions, weights),
        )
        return state, weights

    def refresh(
        key: Key, state: NeuralUcbState, *, fit: bool = False
    ) -> NeuralUcbState:
        tracker = forget.track_history(state.tracker, state.history)
        state = absorb(state._replace(tracker=tracker))
        weights = None
        if is_discounted:
            state, weights = let_go(state)
        history = state.history
        is_row = hist.valid_rows(history, history.absorbed)
        if weights is None:
            center, scale = hist.moments(history)
        else:
            center, scale = hist.masked_moments(history.rewards, weights)
        state = state._replace(center=center, scale=scale)
        targets = (history.rewards - center) / scale * is_row
        if config.linear_part:
            told = history.rounds if is_discounted else history.absorbed
            state = state._replace(
                ridge=linear.refit(
                    state.ridge,
                    history.actions,
                    targets,
                    history.absorbed,
                    fit=fit,
                    weights=weights,
                ),
                fitted_at=told if fit else state.fitted_at,
            )
        task = training.Task(
            predict=functools.partial(ucb.predict, _network(config, state.problem)),
            actions=history.actions,
            targets=(targets - linear.predict(state.ridge, history.actions)) * is_row,
            num_rows=history.absorbed,
            anchor=state.params_0,
            pull=config.width * config.lam1,
            weights=weights,
        )
        state = train(key, state, task)
        fitted = mean(state, history.actions)
        return state._replace(
            fitted=fitted * is_row, best=best_sets(state, fitted, is_row)
        )

    def train(key: Key, state: NeuralUcbState, task: training.Task) -> NeuralUcbState:
        if config.training == "literal":
            eta = _step_size(config, training.total_weight(task))
            params = training.train_literal(task, eta, config.num_steps)
            return state._replace(params=params)
        shape = (config.num_steps, config.batch_size)
        params, opt_state = training.train_adam(
            key, task, optimizer, state.params, state.opt_state, shape
        )
        return state._replace(params=params, opt_state=opt_state)

    def best_sets(
        state: NeuralUcbState, fitted: jax.Array, is_row: jax.Array
    ) -> jax.Array:
        """Choose the sets around which the extractor fits: int32[E, K]."""
        ranked = jnp.where(is_row > 0, fitted, -jnp.inf)
        values, rows = jax.lax.top_k(ranked, min(config.extractor_sets, ranked.size))
        # Fewer rounds than places: the best one takes the empty ones.
        rows = jnp.where(jnp.isfinite(values), rows, rows[0])
        rows = jnp.pad(rows, (0, config.extractor_sets - rows.size), mode="edge")
        played = state.history.actions[rows]
        return jnp.where(state.history.absorbed > 0, played, state.best)

    def due(state: NeuralUcbState) -> bool:
        told = state.history.rounds if is_discounted else state.history.count
        count = int(np.max(np.asarray(told)))
        last = int(np.min(np.asarray(state.fitted_at)))
        wanted = config.fit_growth * last
        if is_discounted:  # after so many rounds all that is remembered is new
            wanted = min(wanted, last + config.memory)
        return config.linear_part and count > 0 and count >= wanted

    def network(state: NeuralUcbState, actions: jax.Array) -> jax.Array:
        """Evaluate the network, in standardised units: [N]."""
        net = _network(config, state.problem)
        return ucb.predict(net, state.params, actions)

    def gradients(state: NeuralUcbState, actions: jax.Array) -> ucb.Factors:
        net = _network(config, state.problem)
        return ucb.factors(net, state.params, actions)

    def weight(state: NeuralUcbState) -> jax.Array:
        """Return what a unit of the network's output is worth in rewards: []."""
        if not config.linear_part:
            return state.scale
        return state.scale * linear.share(state.gate)

    def mean(state: NeuralUcbState, actions: jax.Array) -> jax.Array:
        straight = state.scale * linear.predict(state.ridge, actions)
        return state.center + straight + weight(state) * network(state, actions)

    def belief(state: NeuralUcbState, actions: jax.Array) -> Belief:
        trust = _confidence(config, state.problem)
        cov = trust.covariance(state.confidence, gradients(state, actions))
        unit = jnp.square(state.scale)
        return Belief(
            mean=mean(state, actions),
            cov=unit * cov,
            noise=unit,
            link=link(state),
        )

    def score(state: NeuralUcbState, actions: jax.Array) -> Score:
        trust = _confidence(config, state.problem)
        variance = trust.variance(state.confidence, gradients(state, actions))
        bonus = radius(state) * state.scale * jnp.sqrt(variance)
        expected = mean(state, actions)
        pairs = violated_pairs(state.problem, actions)
        rate = violation_rate(state.problem, actions)
        total = total_score(
            expected, bonus, pairs, rate, config.lam, config.constraints, state.scale
        )
        return Score(mean=expected, bonus=bonus, violation=rate, total=total)

    def link(state: NeuralUcbState) -> Link:
        del state
        return identity_link()

    def radius(state: NeuralUcbState) -> jax.Array:
        if config.radius_kind == "constant":
            return jnp.asarray(config.nu, jnp.float32)
        log_det = _confidence(config, state.problem).log_det(state.confidence)
        rounds = jnp.sum(weigh(state)) if is_discounted else state.history.absorbed
        return _theory_radius(config, log_det, rounds)

    def extractor(state: NeuralUcbState) -> extractors.NetworkExtractor:
        return extractors.NetworkExtractor(
            net=_network(config, state.problem),
            params=state.params,
            k=state.problem.k,
            sets=state.best,
            spread=config.extractor_spread,
            is_literal=config.extractor == "paper",
        )

    def marginals(state: NeuralUcbState) -> jax.Array:
        own = extractors.network_marginals(extractor(state))
        straight = state.ridge.weights
        if config.extractor == "paper":  # h'(e_i), not scaled by 1 / sqrt(K)
            return state.center + weight(state) * own + state.scale * straight
        root = math.sqrt(state.problem.k)
        return weight(state) * own + state.scale / root * straight

    def quadratic(state: NeuralUcbState, arms: jax.Array) -> Quadratic:
        model = extractors.network_quadratic(extractor(state), arms)
        straight = state.ridge.weights[arms] / math.sqrt(state.problem.k)
        offset = state.center + weight(state) * model.offset
        return Quadratic(
            pair=weight(state) * model.pair,
            linear=weight(state) * model.linear + state.scale * straight,
            offset=offset,
        )

    def draws(key: Key, state: NeuralUcbState, arms: jax.Array, n: int) -> Quadratic:
        """Return the model with n posterior draws of its linear coefficients."""
        model = quadratic(state, arms)
        noise = linear.draw_deviations(key, state.ridge, n)[:, arms]  # [n, A]
        unit = state.scale / math.sqrt(state.problem.k)
        return Quadratic(
            pair=jnp.broadcast_to(model.pair, (n, *model.pair.shape)),
            linear=model.linear[None, :] + unit * noise,
            offset=jnp.broadcast_to(model.offset, (n,)),
        )

    def grow(state: NeuralUcbState, capacity: int) -> NeuralUcbState:
        extra = capacity - state.fitted.shape[0]
        if extra <= 0:
            return state
        trust = _confidence(config, state.problem)
        return state._replace(
            history=hist.grow(state.history, capacity),
            confidence=trust.grow(state.confidence, capacity),
            fitted=jnp.pad(state.fitted, (0, extra)),
        )

    def memory(state: NeuralUcbState) -> jax.Array:
        return forget.memory(config.discount, state.tracker)

    # Accelerators multiply in lower precision by default, too little for Z.
    full = jax.default_matmul_precision("highest")
    return Master(
        init=init,
        update=update,
        refresh=full(refresh),
        due=due,
        belief=full(belief),
        score=full(score),
        fitted=lambda state: state.fitted,
        link=link,
        radius=radius,
        marginals=full(marginals),
        quadratic=full(quadratic),
        draws=full(draws),
        grow=grow,
        memory=memory if is_discounted else None,
    )


def _network(config: NeuralUcbConfig, problem: Problem) -> ucb.UcbNet:
    return ucb.UcbNet(problem.num_arms, config.width, config.depth)


def _confidence(config: NeuralUcbConfig, problem: Problem) -> Any:
    """A `Confidence`, or with a discount a `DiscountedConfidence`."""
    build: Callable[..., Any] = confidence
    if config.discount != 1.0:
        build = discounted.discounted_confidence
    return build(
        config.confidence,
        num_arms=problem.num_arms,
        width=config.width,
        depth=config.depth,
        lam1=config.lam1,
    )


def _step_size(config: NeuralUcbConfig, count: jax.Array) -> jax.Array:
    """Return eta: as given, or the largest that is stable for t rounds."""
    if config.learning_rate is not None:
        return jnp.asarray(config.learning_rate, jnp.float32)
    # The curvature of the loss is at most m lam1 + sum_s |g_s|^2, |g|^2 about m D.
    return 1.0 / (config.width * (config.lam1 + config.depth * count))


def _theory_radius(
    config: NeuralUcbConfig, log_det: jax.Array, count: jax.Array
) -> jax.Array:
    """Compute the large-width limit of gamma_t (paper, appendix; ALGORITHMS 1.1)."""
    spread = jnp.sqrt(log_det - 2.0 * math.log(config.delta))
    radius = math.sqrt(config.lam1) * config.norm_bound + config.nu * spread
    if config.training == "adam":
        return radius
    rounds = count.astype(jnp.float32)
    left = 1.0 - _step_size(config, rounds) * config.width * config.lam1
    misfit = jnp.power(left, config.num_steps / 2) * jnp.sqrt(rounds / config.lam1)
    return radius + (config.lam1 + rounds * config.depth) * misfit


@jax.custom_batching.custom_vmap
def _most(num: jax.Array) -> jax.Array:
    """Return `num`; under `vmap` the largest of the batch, shared by all.

    A loop whose bound differs along the batch would copy its whole carry at every
    turn to hold back the runs that are done; here they go through empty turns.
    """
    return num


@_most.def_vmap
def _(axis_size: int, in_batched: list[bool], num: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size
    return _most(num.max(axis=0) if in_batched[0] else num), False
