"""The monotone scale of the rewards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msb_jax.link import (
    Link,
    choose_origin,
    identity_link,
    latent_slope,
    to_latent,
    to_reward,
)


def _link(power: float, shift: float = -1.0, unit: float = 2.0) -> Link:
    return Link(jnp.asarray(power), jnp.asarray(shift), jnp.asarray(unit))


@pytest.mark.parametrize("power", [0.15, 1 / 3, 0.8, 1.0, 1.5])
def test_link__inverts_and_rises_everywhere(power: float) -> None:
    link = _link(power)
    rewards = jnp.linspace(-3.0, 8.0, 200)  # below the origin too
    latent = to_latent(link, rewards)
    assert np.all(np.diff(latent) > 0)
    np.testing.assert_allclose(to_reward(link, latent), rewards, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("power", [0.3, 1.0, 1.4])
def test_latent_slope__is_the_derivative(power: float) -> None:
    link = _link(power)
    for reward in (-2.0, -0.5, 1.0, 5.0):
        slope = jax.grad(to_latent, argnums=1)(link, jnp.asarray(reward))
        np.testing.assert_allclose(
            latent_slope(link, jnp.asarray(reward)), slope, rtol=1e-4
        )


def test_link__has_value_and_slope_of_the_reward_at_the_unit() -> None:
    link = _link(0.4)
    np.testing.assert_allclose(to_latent(link, jnp.asarray(1.0)), 1.0, rtol=1e-6)
    np.testing.assert_allclose(latent_slope(link, jnp.asarray(1.0)), 1.0, rtol=1e-6)


def test_identity_link__changes_nothing() -> None:
    rewards = jnp.linspace(-5.0, 5.0, 11)
    np.testing.assert_allclose(to_latent(identity_link(), rewards), rewards, atol=1e-6)
    np.testing.assert_allclose(to_reward(identity_link(), rewards), rewards, atol=1e-6)


def test_choose_origin__is_zero_or_below_the_lowest() -> None:
    is_row = jnp.asarray([1.0, 1.0, 1.0, 0.0])
    positive = choose_origin(jnp.asarray([1.0, 2.0, 4.0, -9.0]), is_row)
    assert float(positive.shift) == 0.0
    np.testing.assert_allclose(positive.unit, 2.0, rtol=1e-5)  # geometric mean
    mixed = choose_origin(jnp.asarray([-1.0, 0.0, 2.0, -9.0]), is_row)
    assert float(mixed.shift) < -1.0
    nothing = choose_origin(jnp.zeros((4,)), jnp.zeros((4,)))
    assert np.isfinite(np.asarray(nothing)).all()
