"""Seeds spread over devices give what one device gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax.parallel import filled_size, map_seeds

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

RUN_SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from msb_jax import runner
from msb_jax.baselines.random import RandomConfig, random
from msb_jax.checkpoint import load_snapshot, save_snapshot
from msb_jax.problem import problem_from_conflicts, stack_problems
from msb_jax.types import Outcome

def step(key, state, action):
    mean = state[action].sum()
    return state + 1.0, Outcome(mean + jax.random.normal(key), mean)

policy = random(RandomConfig())
problem = problem_from_conflicts(np.zeros((6, 6), bool), 2)
worth = jnp.arange(30.0).reshape(5, 6)
args = (worth, stack_problems([problem] * 5), jax.random.split(jax.random.key(0), 5))

def run(**rest):
    return runner.run(policy, step, *args, rounds=12, f_in=4, **rest)

path = sys.argv[1]

def stop(snapshot):
    save_snapshot(path, snapshot, args[2])
    assert snapshot.env_state.shape[0] == int(sys.argv[2])
    return snapshot.round == 8

whole = run()
run(on_block=stop)
rest = run(start=load_snapshot(path, policy, *args))
np.testing.assert_array_equal(whole.reward, rest.reward)
np.save(path + ".npy", whole.reward)
"""


def test_run__fills_the_devices_and_reports_the_seeds_alone(tmp_path: Path) -> None:
    rewards = []
    for devices, filled in ((1, 5), (2, 6)):
        path = str(tmp_path / f"{devices}.npz")
        flags = f"--xla_force_host_platform_device_count={devices}"
        subprocess.run(
            [sys.executable, "-c", RUN_SCRIPT, path, str(filled)],
            cwd=ROOT,
            env={**os.environ, "XLA_FLAGS": flags},
            check=True,
        )
        rewards.append(np.load(path + ".npy"))
    assert rewards[0].shape == (5, 12)
    np.testing.assert_array_equal(*rewards)


def test_filled_size__wastes_as_little_as_possible() -> None:
    assert [filled_size(n) for n in (1, 2, 5)] == [1, 2, 5]  # on one device


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
