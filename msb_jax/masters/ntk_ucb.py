"""NeuralUCB in function space: the closed form of the paper's master.

The paper trains its network by J gradient steps from theta_0 with a pull towards
theta_0. The limit of that is ridge regression in the gradient features at theta_0,
that is a Gaussian process whose kernel is the tangent kernel of the network; on sets
of K arms this is a function of the overlap alone (`set_kernel`). Mean and confidence
are then both exact and cost nothing that grows with L:

    U(S) = m(S) + gamma sqrt(v(S)),
    m = k_S'(K + s I)^-1 r,   v = k(S, S) - k_S'(K + s I)^-1 k_S

Source: paper, section "Master model"; Zhou, Li and Gu 2020; ALGORITHMS 1.1.

Differs from the paper:
* closed form instead of gradient steps (the limit of them, see above);
* the kernel has linear and quadratic terms beside the tangent kernel, and the weights
  of the three and the noise are chosen by marginal likelihood, on a geometric schedule
  of rounds; the constant is estimated by generalised least squares;
* rewards are standardised (I-9), on a monotone scale (`link`) whose power the
  likelihood chooses: a cubic of a linear function is linear on its cube-root scale;
* rounds that played the same set are one row, with their mean reward and a noise
  divided by their number: the same posterior, from far fewer rows;
* the inverse of the Cholesky factor is kept: solves are then matrix products, which
  run at full speed on every kind of device;
* the linear algebra is done once a refresh; between refreshes `belief` over a pool of
  candidates is conditioned exactly, so that no number differs;
* the radius is a constant in calibrated posterior deviations instead of the theory's
  growing gamma_t (I-14), and widens while nothing but known sets is played, so that
  new ones are never given up;
* with a `discount` every round is a row of its own, its noise divided by its weight,
  and the factor is made anew at each refresh. Confidence is that of `discount`, the
  draws are those of the discounted likelihood.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from msb_jax.link import to_latent, to_reward
from msb_jax.masters import discount as forget
from msb_jax.masters import history as hist
from msb_jax.masters.evidence import TINY, row_noise
from msb_jax.masters.kernel import Expansion, combine
from msb_jax.masters.learner import update
from msb_jax.masters.ntk_learning import learner
from msb_jax.masters.ntk_state import (
    NtkUcbConfig,
    NtkUcbState,
    coefficients,
    cross_columns,
    diagonal,
    doubt,
    fresh_noise,
    kernel_for,
    kernel_values,
    solution,
    target,
    unwhiten,
    whiten,
)
from msb_jax.masters.scoring import total_score
from msb_jax.problem import violated_pairs, violation_rate
from msb_jax.types import Belief, Key, Master, Quadratic, Score

# Share of the radius with a discount: what was forgotten is looked at again anyway.
FORGETFUL = 0.75


def ntk_ucb(config: NtkUcbConfig = NtkUcbConfig()) -> Master:
    """Build the closed-form NeuralUCB master."""
    is_discounted = config.discount != 1.0
    kernel_of = kernel_for(config)
    kernel = functools.partial(kernel_values, kernel_of)
    cross = functools.partial(cross_columns, kernel_of)
    learns = learner(config, kernel_of)

    def explained(state: NtkUcbState, v: jax.Array) -> jax.Array:
        """Columns whose products are taken off the prior covariance: [C or 2C, N]."""
        if not is_discounted:
            return v
        ones = state.whitened[:, 1]
        size = jnp.sqrt(jnp.maximum(ones @ ones, TINY))
        # What each row adds to the mean, by way of the constant too.
        pull = v + ones[:, None] * (doubt(state, v) / size)[None, :]
        is_row = hist.valid_rows(state.history, state.history.absorbed)
        noises, noise = diagonal(state, is_row), fresh_noise(state)
        extra = forget.overcount(unwhiten(state, pull.T).T, noises, noise)
        return jnp.concatenate([v, extra])

    def belief(state: NtkUcbState, actions: jax.Array) -> Belief:
        residual, constant, deviation = target(state)
        v = cross(state, actions)
        extra = doubt(state, v)
        known = explained(state, v)
        prior = kernel(state, actions, actions)
        cov = prior - known.T @ known + extra[:, None] * extra[None, :]
        scale = deviation * deviation
        return Belief(
            mean=constant + deviation * (v.T @ residual),
            cov=scale * cov,
            noise=scale * fresh_noise(state),
            link=state.scales.link,
        )

    def radius(state: NtkUcbState) -> jax.Array:
        """Confidence radius gamma_t, in posterior deviations.

        The theory's grows with all that the rounds have told, and never narrows: what
        a linear reward hides is known soon, and it would be explored for ever. This one
        is a constant while there is something new to play, and widens when there is
        not (`widen`): the sets that are played then are the likeliest to be better.
        """
        if is_discounted:
            return jnp.asarray(FORGETFUL * config.radius, jnp.float32)
        return config.radius * jnp.exp(state.stretch)

    def score(state: NtkUcbState, actions: jax.Array) -> Score:
        residual, constant, deviation = target(state)
        v = cross(state, actions)
        weights = jnp.exp(state.scales.log_weights)
        own = kernel_of(state.problem).own(state.problem, weights)
        known = explained(state, v)
        variance = own - jnp.sum(known * known, axis=0) + jnp.square(doubt(state, v))
        latent = constant + deviation * (v.T @ residual)
        reach = radius(state) * deviation * jnp.sqrt(jnp.maximum(variance, 0.0))
        mean = to_reward(state.scales.link, latent)
        bonus = to_reward(state.scales.link, latent + reach) - mean
        rate = violation_rate(state.problem, actions)
        pairs = violated_pairs(state.problem, actions)
        total = total_score(
            mean, bonus, pairs, rate, config.lam, config.constraints, deviation
        )
        return Score(mean=mean, bonus=bonus, violation=rate, total=total)

    def fitted(state: NtkUcbState) -> jax.Array:
        """Posterior mean at every absorbed row: z - s alpha, no kernel needed."""
        alpha, _, deviation = coefficients(state)
        latent = to_latent(state.scales.link, state.history.rewards)
        pull = row_noise(state.scales, state.history.plays) * alpha
        return to_reward(state.scales.link, latent - deviation * pull)

    def weighted(state: NtkUcbState, alpha: jax.Array) -> jax.Array:
        """Coefficients of the rows that count: [C]."""
        return alpha * hist.valid_rows(state.history, state.history.absorbed)

    def marginals(state: NtkUcbState) -> jax.Array:
        alpha, constant, deviation = coefficients(state)
        weights = jnp.exp(state.scales.log_weights)
        worth = kernel_of(state.problem).by_arm(
            state.problem, weights, state.history.actions, weighted(state, alpha)
        )
        return constant + deviation * worth

    def quadratic(state: NtkUcbState, arms: jax.Array) -> Quadratic:
        alpha, constant, deviation = coefficients(state)
        model = expansion(state, arms)
        pull = combine(model, weighted(state, alpha))
        return Quadratic(
            pair=deviation * pull.pair,
            linear=deviation * pull.linear,
            offset=constant + deviation * pull.offset,
        )

    def expansion(state: NtkUcbState, arms: jax.Array) -> Expansion:
        weights = jnp.exp(state.scales.log_weights)
        actions = state.history.actions
        return kernel_of(state.problem).expand(state.problem, weights, actions, arms)

    def draws(key: Key, state: NtkUcbState, arms: jax.Array, n: int) -> Quadratic:
        """Exact posterior draws of the quadratic part (Matheron's rule)."""
        *prior_keys, noise_key = jax.random.split(key, 3)
        capacity = state.history.rewards.shape[0]
        model = expansion(state, arms)
        weights = jnp.exp(state.scales.log_weights)
        linear, pair, values = kernel_of(state.problem).draw(
            prior_keys, state.problem, weights, model, state.history.actions, arms, n
        )
        noise = jnp.sqrt(row_noise(state.scales, state.history.plays))
        values += noise[None, :] * jax.random.normal(noise_key, (n, capacity))
        is_row = hist.valid_rows(state.history, state.history.absorbed)
        residual, constant, deviation = target(state)
        inner, level = solution(state, whiten(state, (values * is_row[None, :]).T))
        alpha = unwhiten(state, residual[None, :] - inner.T)  # [n, C]
        pull = jax.vmap(combine, (None, 0))(model, alpha * is_row[None, :])
        return Quadratic(
            pair=deviation * (pair + pull.pair),
            linear=deviation * (linear + pull.linear),
            offset=constant + deviation * (pull.offset - level),
        )

    def memory(state: NtkUcbState) -> jax.Array:
        return forget.memory(config.discount, state.tracker)

    # Accelerators multiply in lower precision by default, which ends in pivots below 0.
    full = jax.default_matmul_precision("highest")
    return Master(
        init=learns.init,
        update=update,
        refresh=full(learns.refresh),
        due=learns.due,
        belief=full(belief),
        score=full(score),
        fitted=full(fitted),
        radius=radius,
        marginals=full(marginals),
        quadratic=full(quadratic),
        link=lambda state: state.scales.link,
        draws=full(draws),
        grow=learns.grow,
        memory=memory if is_discounted else None,
    )
