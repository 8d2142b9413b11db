"""A monotone scale on which the reward is easier to model.

A Gaussian process with one kernel has one smoothness everywhere. A reward such as
(theta'x)^3 is steep where it is high and flat where it is low; on the scale of its
cube root it is linear. The link is the Box-Cox power family, normalised by the
geometric mean so that likelihoods of different powers compare without a Jacobian:

    z = c + u + u (((y - c) / u)^p - 1) / p,        u = geometric mean of y - c,

with value and slope those of y at y = c + u for every power, and a straight line below
5 % of u, so that noise may take a reward below the origin c. Power 1 is the identity.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

LOWEST = 0.05  # of the unit; below, the scale is a straight line
MIN_POWER, MAX_POWER = 0.15, 1.5


class Link(NamedTuple):
    """The scale: reward <-> latent value."""

    power: jax.Array  # [] p
    shift: jax.Array  # [] c
    unit: jax.Array  # [] u


def identity_link() -> Link:
    """The scale that changes nothing."""
    return Link(power=jnp.ones(()), shift=jnp.zeros(()), unit=jnp.ones(()))


def choose_origin(rewards: jax.Array, is_row: jax.Array) -> Link:
    """Take zero for the origin if all rewards are positive, else below the lowest.

    Args:
        rewards: [C].
        is_row: [C], which of them are real.
    """
    total = jnp.maximum(jnp.sum(is_row), 1.0)
    mean = jnp.sum(rewards * is_row) / total
    low = jnp.min(jnp.where(is_row > 0, rewards, jnp.inf))
    low = jnp.where(jnp.isfinite(low), low, 0.0)
    below = low - jnp.maximum(0.5 * (mean - low), 1e-3)
    shift = jnp.where(low > 0.0, 0.0, below)
    heights = jnp.log(jnp.maximum(rewards - shift, 1e-6))
    unit = jnp.exp(jnp.sum(heights * is_row) / total)
    return Link(power=jnp.ones(()), shift=shift, unit=unit)


def to_latent(link: Link, reward: jax.Array) -> jax.Array:
    """Map rewards of any shape to the latent scale."""
    p = link.power
    height = (reward - link.shift) / link.unit
    curved = (jnp.maximum(height, LOWEST) ** p - 1.0) / p
    straight = jnp.minimum(height - LOWEST, 0.0) * LOWEST ** (p - 1.0)
    return link.shift + link.unit * (1.0 + curved + straight)


def to_reward(link: Link, latent: jax.Array) -> jax.Array:
    """Invert `to_latent`."""
    p = link.power
    level = (latent - link.shift) / link.unit - 1.0
    lowest = (LOWEST**p - 1.0) / p
    curved = (1.0 + p * jnp.maximum(level, lowest)) ** (1.0 / p)
    straight = jnp.minimum(level - lowest, 0.0) / LOWEST ** (p - 1.0)
    return link.shift + link.unit * (curved + straight)


def latent_slope(link: Link, reward: jax.Array) -> jax.Array:
    """Latent units a unit of reward is worth at `reward`."""
    height = jnp.maximum((reward - link.shift) / link.unit, LOWEST)
    return height ** (link.power - 1.0)
