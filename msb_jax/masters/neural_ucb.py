"""NeuralUCB: the paper's master, a trained network with gradient confidence.

Every set S is judged by U(S) = h'(S; theta) + gamma sqrt(g'Z^{-1}g / m), with h' a
bias-free ReLU network (`networks.UcbNet`), g its gradient in the parameters and Z
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
  the linear part leaves: a linear reward is then learned as fast as by ridge
  regression (`linear_part=False` is the paper's mean);
* rewards are standardised by their running mean and deviation (I-9), and inputs are
  x / sqrt(K) everywhere (I-12);
* radius_kind="theory" uses the large-width limit of gamma_t with -2 log delta, where
  the paper prints one power of delta too few (I-14), and its last term only with
  literal training, to which alone it applies. The default is the constant nu;
* extractor="least_squares" fits the network where the good sets are;
  extractor="paper" reads it at one and two arms, far away from them (I-1).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from msb_jax import networks
from msb_jax.masters import extractors, training
from msb_jax.masters import history as hist
from msb_jax.masters import ridge as linear
from msb_jax.masters.confidence import KINDS, MIN_RIDGE, Confidence, confidence
from msb_jax.masters.scoring import check_constraints, total_score
from msb_jax.problem import Problem, violated_pairs, violation_rate
from msb_jax.rng import stream
from msb_jax.types import Belief, Key, Master, Quadratic, Score

ADAM_RATE = 1e-2


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")


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
    extractor: str = "least_squares"  # or "paper"
    num_elites: int = 32  # best played sets, around which the extractor fits
    spread: float = 0.25  # share of arms swapped in that neighbourhood
    lam: float = 5.0  # price of the violation rate, soft constraints
    constraints: str = "soft"  # or "hard"
    capacity: int = 256  # rounds the history starts with
    block: int = 20  # rounds absorbed at once

    def __post_init__(self) -> None:
        networks.check_sizes(1, self.width, self.depth)
        check_constraints(self.constraints, self.lam)
        _check_choice("confidence", self.confidence, KINDS)
        _check_choice("radius_kind", self.radius_kind, ("constant", "theory"))
        _check_choice("training", self.training, ("adam", "literal"))
        _check_choice("extractor", self.extractor, ("least_squares", "paper"))
        for name in ("num_steps", "batch_size", "num_elites", "capacity", "block"):
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
        if not 0 < self.delta < 1 or not 0 < self.spread <= 1:
            raise ValueError(
                "delta must lie in (0, 1) and spread in (0, 1], got "
                f"{self.delta} and {self.spread}."
            )
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"learning_rate must be positive, got {self.learning_rate}."
            )
        is_theory = self.radius_kind == "theory" and self.training == "literal"
        rate = self.learning_rate or 0.0
        if is_theory and rate * self.width * self.lam1 >= 1:
            raise ValueError(
                "radius_kind='theory' needs learning_rate * width * lam1 below 1; "
                "leave learning_rate out to have it chosen."
            )


class Gate(NamedTuple):
    """How far the network's forecasts came true, beyond the linear part."""

    agreement: jax.Array  # [] discounted sum of forecast * outcome
    energy: jax.Array  # [] discounted sum of forecast^2


class NeuralUcbState(NamedTuple):
    """Everything the neural master knows."""

    problem: Problem
    history: hist.History
    params: Any  # theta
    params_0: Any  # theta_0
    opt_state: Any
    confidence: Any
    ridge: linear.Ridge
    gate: Gate
    center: jax.Array  # [] moments of the rewards at the last refresh
    scale: jax.Array  # []
    fitted: jax.Array  # [C] mean at the absorbed rounds, in reward units
    elites: jax.Array  # [E, K] int32, best of them


def neural_ucb(config: NeuralUcbConfig = NeuralUcbConfig()) -> Master:
    """Build the NeuralUCB master."""
    optimizer = optax.adam(config.learning_rate or ADAM_RATE)

    def train(key: Key, task: training.Task, params: Any, opt_state: Any) -> Any:
        if config.training == "literal":
            eta = _step_size(config, task.count)
            return training.train_literal(task, eta, config.num_steps), opt_state
        shape = (config.num_steps, config.batch_size)
        return training.train_adam(key, task, optimizer, params, opt_state, shape)

    def network(state: NeuralUcbState) -> networks.UcbNet:
        return _network(config, state.problem.num_arms)

    def bounds(state: NeuralUcbState) -> Confidence:
        return _confidence(config, state.problem.num_arms)

    def init(key: Key, problem: Problem) -> NeuralUcbState:
        params_key, elites_key = stream(key, "params"), stream(key, "elites")
        params = networks.init_params(params_key, _network(config, problem.num_arms))
        shape = (config.num_elites, problem.num_arms)
        noise = jax.random.uniform(elites_key, shape)
        return NeuralUcbState(
            problem=problem,
            history=hist.new_history(config.capacity, problem.k),
            params=params,
            params_0=params,
            opt_state=optimizer.init(params),
            confidence=_confidence(config, problem.num_arms).init(
                config.capacity, problem.k
            ),
            ridge=linear.new_ridge(problem.num_arms),
            gate=Gate(agreement=jnp.ones(()), energy=jnp.ones(())),
            center=jnp.zeros(()),
            scale=jnp.ones(()),
            fitted=jnp.zeros((config.capacity,)),
            elites=jax.lax.top_k(noise, problem.k)[1],
        )

    def update(
        key: Key, state: NeuralUcbState, action: jax.Array, reward: jax.Array
    ) -> NeuralUcbState:
        del key
        return state._replace(history=hist.append(state.history, action, reward))

    def absorb(state: NeuralUcbState) -> NeuralUcbState:
        """Take the pending rounds into Z, at the weights they were played with."""
        end = jnp.minimum(state.history.count, state.history.rewards.shape[0])
        offsets = jnp.arange(config.block)
        net, bound = network(state), bounds(state)

        def take(_: int, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            trust, ridge, gate, start = carry
            num_new = jnp.clip(end - start, 0, config.block)
            rows = state.history.actions.at[start + offsets].get(
                mode="fill", fill_value=0
            )
            seen=state.history.rewards.at[start + offsets].get(mode="fill", fill_value=0)
            forecast = networks.predict(net, state.params, rows)*(offsets<num_new)
            outcome=(seen-state.center)/state.scale-linear.predict(state.ridge,rows)
            keep=jnp.where(num_new>0,0.9,1.0)
            gate=Gate(keep*gate.agreement+jnp.sum(forecast*outcome), keep*gate.energy+jnp.sum(forecast**2))
            trust = bound.absorb(
                trust, networks.factors(net, state.params, rows), num_new
            )
            return trust, linear.absorb(ridge, rows, num_new), gate, start + num_new

        pending = end - state.history.absorbed
        num_blocks = _most((pending + config.block - 1) // config.block)
        start = (state.confidence, state.ridge, state.gate, state.history.absorbed)
        trust, ridge, gate, done = jax.lax.fori_loop(0, num_blocks, take, start)
        return state._replace(
            confidence=trust,
            ridge=ridge,
            gate=gate,
            history=state.history._replace(absorbed=done),
        )

    def refresh(key: Key, state: NeuralUcbState, *, fit: bool = False) -> Any:
        del fit  # the scale of the linear part follows at every refresh
        state = absorb(state)
        history = state.history
        center, scale = hist.moments(history)
        is_row = hist.valid_rows(history, history.absorbed)
        targets = (history.rewards - center) / scale * is_row
        ridge = state.ridge
        if config.linear_part:
            ridge = linear.refit(ridge, history.actions, targets, history.absorbed)
        rest = (targets - linear.predict(ridge, history.actions)) * is_row
        task = training.Task(
            predict=functools.partial(networks.predict, network(state)),
            actions=history.actions,
            targets=rest,
            count=history.absorbed,
            anchor=state.params_0,
            pull=config.width * config.lam1,
        )
        params, opt_state = train(key, task, state.params, state.opt_state)
        state = state._replace(
            params=params,
            opt_state=opt_state,
            ridge=ridge,
            center=center,
            scale=scale,
        )
        fitted = mean(state, history.actions)
        ranked = jnp.where(is_row > 0, fitted, -jnp.inf)
        num = min(config.num_elites, ranked.shape[0])
        best = jnp.resize(jax.lax.top_k(ranked, num)[1], (config.num_elites,))
        # Fewer rounds than places: the best round takes the others.
        best = jnp.where(is_row[best] > 0, best, best[0])
        elites = jnp.where(history.absorbed > 0, history.actions[best], state.elites)
        return state._replace(fitted=fitted * is_row, elites=elites)

    def mean(state: NeuralUcbState, actions: jax.Array) -> jax.Array:
        output = networks.predict(network(state), state.params, actions)
        output = share(state) * output + linear.predict(state.ridge, actions)
        return state.center + state.scale * output

    def share(state: NeuralUcbState) -> jax.Array:
        if not config.linear_part: return jnp.ones(())
        return jnp.clip((state.gate.agreement+1e-3)/(state.gate.energy+1e-3),0.0,1.0)

    def belief(state: NeuralUcbState, actions: jax.Array) -> Belief:
        grads = networks.factors(network(state), state.params, actions)
        unit = jnp.square(state.scale)
        cov = bounds(state).covariance(state.confidence, grads)
        return Belief(mean=mean(state, actions), cov=unit * cov, noise=unit)

    def score(state: NeuralUcbState, actions: jax.Array) -> Score:
        grads = networks.factors(network(state), state.params, actions)
        variance = bounds(state).variance(state.confidence, grads)
        bonus = radius(state) * state.scale * jnp.sqrt(variance)
        expected = mean(state, actions)
        pairs = violated_pairs(state.problem, actions)
        rate = violation_rate(state.problem, actions)
        total = total_score(
            expected, bonus, pairs, rate, config.lam, config.constraints, state.scale
        )
        return Score(mean=expected, bonus=bonus, violation=rate, total=total)

    def radius(state: NeuralUcbState) -> jax.Array:
        if config.radius_kind == "constant":
            return jnp.asarray(config.nu, jnp.float32)
        log_det = bounds(state).log_det(state.confidence)
        return _theory_radius(config, log_det, state.history.absorbed)

    def network_quadratic(state: NeuralUcbState, arms: jax.Array) -> Quadratic:
        """Model the network on sets within arms int32[A], in standardised units."""
        net, k = network(state), state.problem.k
        rows = networks.first_weights(state.params)[arms]  # [A, m]
        if config.extractor == "paper":
            pairs = jax.lax.map(
                lambda row: networks.predict_entered(
                    net, state.params, (rows + row[None, :]) / math.sqrt(2.0)
                ),
                rows,
            )
            single = networks.predict_entered(net, state.params, rows)
            return extractors.quadratic_from_values(single, pairs, jnp.zeros(()), k)
        if config.depth == 1:
            flat = jnp.zeros((arms.shape[0], arms.shape[0]))
            slope = math.sqrt(config.width / k) * rows[:, 0]
            return Quadratic(pair=flat, linear=slope, offset=jnp.zeros(()))
        units, outgoing = unit_fit(state)
        return extractors.smooth_quadratic(units, rows, outgoing, k)

    def unit_fit(state: NeuralUcbState) -> tuple[extractors.UnitFit, jax.Array]:
        rows = networks.first_weights(state.params)
        units = extractors.fit_units(rows, state.elites, config.spread)
        return units, networks.outgoing_weights(
            network(state), state.params, state.elites
        )

    def marginals(state: NeuralUcbState) -> jax.Array:
        rows = networks.first_weights(state.params)
        root = math.sqrt(state.problem.k)
        if config.extractor == "paper":
            single = networks.predict_entered(network(state), state.params, rows)
            return state.center + state.scale * (single + state.ridge.weights)
        if config.depth == 1:
            slopes = math.sqrt(config.width) * rows[:, 0]
        else:
            units, outgoing = unit_fit(state)
            slopes = rows @ (outgoing * units.slope)
        return state.scale * (slopes + state.ridge.weights) / root

    def quadratic(state: NeuralUcbState, arms: jax.Array) -> Quadratic:
        model = network_quadratic(state, arms)
        weights = state.ridge.weights[arms] / math.sqrt(state.problem.k)
        part=state.scale*share(state)
        return Quadratic(
            pair=part * model.pair,
            linear=part * model.linear + state.scale*weights,
            offset=state.center + part * model.offset,
        )

    def draws(key: Key, state: NeuralUcbState, arms: jax.Array, n: int) -> Quadratic:
        """Return the model with n posterior draws of its linear coefficients."""
        model, k = quadratic(state, arms), state.problem.k
        noise = linear.draw_noise(key, state.ridge, k, n)[:, arms]  # [n, A]
        return Quadratic(
            pair=jnp.broadcast_to(model.pair, (n, *model.pair.shape)),
            linear=model.linear[None, :] + state.scale / math.sqrt(k) * noise,
            offset=jnp.broadcast_to(model.offset, (n,)),
        )

    def grow(state: NeuralUcbState, capacity: int) -> NeuralUcbState:
        extra = capacity - state.fitted.shape[0]
        if extra <= 0:
            return state
        return state._replace(
            history=hist.grow(state.history, capacity),
            confidence=bounds(state).grow(state.confidence, capacity),
            fitted=jnp.pad(state.fitted, (0, extra)),
        )

    return Master(
        init=init,
        update=update,
        refresh=refresh,
        due=lambda state: False,
        belief=belief,
        score=score,
        fitted=lambda state: state.fitted,
        radius=radius,
        marginals=marginals,
        quadratic=quadratic,
        draws=draws,
        grow=grow,
    )


def _network(config: NeuralUcbConfig, num_arms: int) -> networks.UcbNet:
    return networks.UcbNet(num_arms, config.width, config.depth)


def _confidence(config: NeuralUcbConfig, num_arms: int) -> Confidence:
    return confidence(
        config.confidence,
        num_arms=num_arms,
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
