"""Learn a distribution over K-sets by REINFORCE on your own objective.

Run: python examples/reinforce_topk.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from msb_jax.topk import gumbel_topk_batch, set_log_prob_trapezoid

NUM_ARMS, K, BATCH = 30, 4, 32


def objective(action: jax.Array, worth: jax.Array) -> jax.Array:
    """Any function of a set; nothing is asked of it but a number."""
    return jnp.prod(worth[action])


def main(steps: int = 400) -> tuple[float, float]:
    worth = jax.random.uniform(jax.random.key(0), (NUM_ARMS,), minval=0.5)
    best = float(jnp.prod(jnp.sort(worth)[-K:]))
    optimizer = optax.adam(0.05)

    def loss(logits: jax.Array, sets: jax.Array, advantage: jax.Array) -> jax.Array:
        log_prob = jax.vmap(set_log_prob_trapezoid, in_axes=(None, 0))(logits, sets)
        return -jnp.mean(advantage * log_prob)

    @jax.jit
    def step(carry: tuple, key: jax.Array) -> tuple:
        logits, optimizer_state = carry
        sets = gumbel_topk_batch(key, logits, K, BATCH)  # [BATCH, K]
        rewards = jax.vmap(objective, in_axes=(0, None))(sets, worth)
        # Leave-one-out baseline: unbiased, and needs no network.
        advantage = (rewards - rewards.mean()) * BATCH / (BATCH - 1)
        advantage = advantage / (rewards.std() + 1e-6)
        gradient = jax.grad(loss)(logits, sets, advantage)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state)
        return (logits + updates, optimizer_state), rewards.mean()

    logits = jnp.zeros((NUM_ARMS,))
    start = (logits, optimizer.init(logits))
    keys = jax.random.split(jax.random.key(1), steps)
    _, means = jax.lax.scan(step, start, keys)
    print(f"best set {best:.3f}, first samples {means[0]:.3f}, last {means[-1]:.3f}")
    return float(means[-1]), best


if __name__ == "__main__":
    main()
