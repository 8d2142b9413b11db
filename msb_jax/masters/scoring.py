"""The composite score of the master: prediction, bonus and conflicts in one number.

Paper, "Master model": Score(A) = U(A) - lam c(A), c the violation rate. That is
`constraints="soft"`, in which reward buys violations at the price lam. `"hard"` is
what most people mean by a constraint: fewer conflicts always win, and U decides
among sets with the same number of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

CONSTRAINTS = ("soft", "hard")
# Price of one conflicting pair in hard mode, in units of `scale`: above any spread
# of U, and small enough that float32 still tells U apart next to it.
HARD_PRICE = 1e3


def check_constraints(constraints: str, lam: float) -> None:
    """Raise ValueError unless the pair is one that `total_score` takes."""
    if constraints not in CONSTRAINTS:
        raise ValueError(
            f"constraints must be one of {', '.join(CONSTRAINTS)}, got {constraints!r}."
        )
    if not 0 <= lam < float("inf"):
        raise ValueError(f"lam must be finite and at least 0, got {lam}.")


def total_score(
    mean: jax.Array,
    bonus: jax.Array,
    violated_pairs: jax.Array,
    rate: jax.Array,
    lam: float,
    constraints: str,
    scale: jax.Array | float = 1.0,
) -> jax.Array:
    """Combine prediction and conflicts into what is maximised: float32[N].

    Args:
        mean: [N] predicted reward.
        bonus: [N] radius times posterior deviation.
        violated_pairs: [N] int, conflicting pairs n.
        rate: [N] c = n / M.
        lam: price of c in soft mode; without effect in hard mode.
        constraints: "soft" or "hard".
        scale: [] spread of the rewards, the unit of the price in hard mode.
    """
    check_constraints(constraints, lam)
    upper = mean + bonus
    if constraints == "soft":
        return upper - lam * rate
    price = jnp.asarray(HARD_PRICE * scale, jnp.float32)
    return upper - price * violated_pairs.astype(jnp.float32)
