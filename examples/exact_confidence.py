"""Exact NeuralUCB confidence for a network of your own, without a p x p matrix.

Run: python examples/exact_confidence.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from msb_jax.masters.confidence import exact_confidence

WIDTH = 64


def network(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Any differentiable function of (params, x) with a scalar output."""
    hidden = jnp.tanh(params["w1"] @ x + params["b1"])
    return params["w2"] @ hidden


def main() -> tuple[float, float]:
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "w1": jax.random.normal(keys[0], (WIDTH, 2)),
        "b1": jax.random.normal(keys[1], (WIDTH,)),
        "w2": jax.random.normal(keys[2], (WIDTH,)) / jnp.sqrt(WIDTH),
    }
    # 40 contexts seen so far, all in the left half of the square.
    seen = jax.random.uniform(keys[3], (40, 2)) * jnp.array([[0.5, 1.0]])
    fresh = jax.random.uniform(keys[4], (200, 2))
    confidence = jax.jit(
        lambda p, h, c: exact_confidence(network, p, h, c, lam1=0.1, width=WIDTH)
    )(params, seen, fresh)
    known = float(confidence[fresh[:, 0] < 0.5].mean())
    unknown = float(confidence[fresh[:, 0] >= 0.5].mean())
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{size} parameters, 40 observations")
    print(
        f"mean confidence radius where data is: {known:.3f}, elsewhere: {unknown:.3f}"
    )
    return known, unknown


if __name__ == "__main__":
    main()
