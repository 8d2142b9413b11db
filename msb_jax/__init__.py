"""Master-slave top-K bandits with conflicts, in JAX.

An action is a set of K of L arms, one noisy number comes back, and some pairs of
arms should not stand together. Start at `msb_jax.types`: every algorithm is a
`Policy`, and `msb_jax.runner.run` plays one over many seeds.
"""

__version__ = "0.1.0"
