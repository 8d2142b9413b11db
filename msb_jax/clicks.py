"""What the clicks on a list say of its items."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import jax
import jax.numpy as jnp

from msb_jax.types import Key, State

TARGETS = ("clicks", "reward")


def needs_clicks(name: str) -> Callable[..., NoReturn]:
    """Make the `tell` of a policy that cannot learn from the reward alone."""

    def tell(key: Key, state: State, action: jax.Array, reward: jax.Array) -> NoReturn:
        del key, state, action, reward
        raise ValueError(
            f"{name} learns from clicks, and this environment gives none; play it on "
            "ordered lists with clicks, or choose a policy that learns from rewards."
        )

    return tell


def check_target(target: str) -> None:
    """Raise unless `target` names something that a click can be credited with."""
    if target not in TARGETS:
        raise ValueError(f"target must be clicks or reward, got {target!r}.")


def credit(
    clicks: jax.Array, reward: jax.Array, target: str
) -> tuple[jax.Array, jax.Array]:
    """Say what the places of a list have shown.

    Args:
        clicks: [K] of 1, 0, and -1 or NaN where nothing is known.
        reward: [], 1 if the user was satisfied.
        target: clicks, to learn what attracts; or reward, to learn what satisfies:
            then the last click is worth the reward and the others nothing.

    Returns:
        float32[K] 1 where something is known and else 0, and float32[K] what it is.
    """
    is_clicked = clicks > 0
    if target == "reward":
        later = jnp.cumsum(is_clicked[::-1])[::-1] - is_clicked  # clicks further down
        is_last = is_clicked & (later == 0)
        value = jnp.where(is_last, reward, 0.0)
    else:
        value = is_clicked.astype(jnp.float32)
    is_known = (clicks >= 0) & jnp.isfinite(value)
    return is_known.astype(jnp.float32), jnp.where(is_known, value, 0.0)
