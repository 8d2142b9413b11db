"""Seeds spread over devices give what one device gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax.parallel import map_seeds

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from msb_jax.parallel import map_seeds

def walk(key, state):
    noise = jax.random.normal(key, state["x"].shape)
    factor = jnp.linalg.cholesky(jnp.eye(3) + state["x"][:, None] * state["x"][None])
    return {"x": factor @ (state["x"] + noise), "n": state["n"] + 1}

keys = jax.random.split(jax.random.key(0), 6)
state = {"x": jnp.arange(18.0).reshape(6, 3) / 9, "n": jnp.zeros(6, jnp.int32)}
assert len(jax.devices()) == 8
spread = map_seeds(walk)(keys, state)
assert len(spread["x"].sharding.device_set) == 6, spread["x"].sharding
again = map_seeds(walk)(keys, spread)  # sharded arguments are taken as they are
single = jax.vmap(walk)(keys, jax.vmap(walk)(keys, state))
np.testing.assert_allclose(again["x"], single["x"], rtol=1e-5)
print("equal")
"""


def test_map_seeds__over_eight_devices_equals_one() -> None:
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("equal")


def test_map_seeds__on_one_device_is_a_vmap() -> None:
    square = map_seeds(lambda x, y: x * x + y)
    x, y = jnp.arange(5.0), jnp.ones((5,))
    np.testing.assert_array_equal(square(x, y), x * x + y)
    assert len(jax.devices()) == 1
