"""Switches that every test runs under; set before the first import of jax."""

from __future__ import annotations

import os
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "jax"

# The environment, not jax.config, so that processes started by a test inherit it.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # see experiments/__init__.py
# Tests compile much and run little: without optimisation they take a third of the time.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=1"
)
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import jax  # noqa: E402
import pytest  # noqa: E402

# Their programs take minutes to compile. `.ci/run` runs these too.
SLOW = (
    "test_attention",
    "test_cem_ppo",
    "test_ddpg",
    "test_g2anet",
    "test_g2anet_learning",
    "test_gp_ucb",
    "test_learned_baselines",
    "test_rlfd",
    "test_six_samplers",
    "test_wolpertinger",
)

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of what learns by networks as slow."""
    for item in items:
        if item.path.stem in SLOW:
            item.add_marker(pytest.mark.slow)
