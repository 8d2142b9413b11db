"""All neural networks; the only package that imports flax."""
