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

import jax
import jax.numpy as jnp

from msb_jax.link import Link, identity_link
from msb_jax.masters import discount as forget
from msb_jax.masters import extractors
from msb_jax.masters import neural_state as neural
from msb_jax.masters import ridge as linear
from msb_jax.masters.learner import update
from msb_jax.masters.neural_learning import learner
from msb_jax.masters.neural_state import NeuralUcbConfig, NeuralUcbState
from msb_jax.masters.scoring import total_score
from msb_jax.problem import violated_pairs, violation_rate
from msb_jax.types import Belief, Key, Master, Quadratic, Score


def neural_ucb(config: NeuralUcbConfig = NeuralUcbConfig()) -> Master:
    """Build the NeuralUCB master."""
    is_discounted = config.discount != 1.0
    network_for = functools.partial(neural.network_for, config)
    confidence_for = functools.partial(neural.confidence_for, config)
    gradients = functools.partial(neural.gradients, config)
    weight = functools.partial(neural.weight, config)
    mean = functools.partial(neural.mean, config)
    learns = learner(config)

    def belief(state: NeuralUcbState, actions: jax.Array) -> Belief:
        trust = confidence_for(state.problem)
        cov = trust.covariance(state.confidence, gradients(state, actions))
        unit = jnp.square(state.scale)
        return Belief(
            mean=mean(state, actions),
            cov=unit * cov,
            noise=unit,
            link=link(state),
        )

    def score(state: NeuralUcbState, actions: jax.Array) -> Score:
        trust = confidence_for(state.problem)
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
        log_det = confidence_for(state.problem).log_det(state.confidence)
        rounds = state.history.absorbed
        if is_discounted:
            rounds = jnp.sum(neural.weigh(config, state))
        return _theory_radius(config, log_det, rounds)

    def extractor(state: NeuralUcbState) -> extractors.NetworkExtractor:
        return extractors.NetworkExtractor(
            net=network_for(state.problem),
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

    def memory(state: NeuralUcbState) -> jax.Array:
        return forget.memory(config.discount, state.tracker)

    # Accelerators multiply in lower precision by default, too little for Z.
    full = jax.default_matmul_precision("highest")
    return Master(
        init=learns.init,
        update=update,
        refresh=full(learns.refresh),
        due=learns.due,
        belief=full(belief),
        score=full(score),
        fitted=lambda state: state.fitted,
        link=link,
        radius=radius,
        marginals=full(marginals),
        quadratic=full(quadratic),
        draws=full(draws),
        grow=learns.grow,
        memory=memory if is_discounted else None,
    )


def _theory_radius(
    config: NeuralUcbConfig, log_det: jax.Array, count: jax.Array
) -> jax.Array:
    """Compute the large-width limit of gamma_t (paper, appendix; ALGORITHMS 1.1)."""
    spread = jnp.sqrt(log_det - 2.0 * math.log(config.delta))
    radius = math.sqrt(config.lam1) * config.norm_bound + config.nu * spread
    if config.training == "adam":
        return radius
    rounds = count.astype(jnp.float32)
    left = 1.0 - neural.step_size(config, rounds) * config.width * config.lam1
    misfit = jnp.power(left, config.num_steps / 2) * jnp.sqrt(rounds / config.lam1)
    return radius + (config.lam1 + rounds * config.depth) * misfit
