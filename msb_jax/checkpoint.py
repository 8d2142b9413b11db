"""Save a run between two blocks to one file, and go on from it.

The file is a plain .npz of arrays, without pickle: the structure of the state is
not stored but asked of the policy again (`jax.eval_shape` of its `init`). Sizes may
differ from those of a fresh state, because histories grow.
"""

from __future__ import annotations

import os
import zipfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msb_jax.atomic import atomic_file
from msb_jax.problem import Problem
from msb_jax.runner import Curves, Snapshot
from msb_jax.types import Key, Policy, State


def save_snapshot(path: str | os.PathLike[str], snapshot: Snapshot, keys: Key) -> None:
    """Write `snapshot` to `path` in one step.

    Args:
        path: ends in .npz by custom.
        snapshot: from `on_block` of `run`.
        keys: the keys [B] of the run, stored to recognise it.
    """
    arrays: dict[str, Any] = {"round": snapshot.round, "keys": _to_host(keys)}
    for part in ("state", "env_state"):
        for i, leaf in enumerate(jax.tree.leaves(getattr(snapshot, part))):
            arrays[f"{part}/{i}"] = _to_host(leaf)[: keys.shape[0]]
            if _is_key(leaf):
                arrays[f"impl/{part}/{i}"] = str(jax.random.key_impl(leaf))
    curves = snapshot.curves._asdict()
    arrays |= {f"curves/{name}": value for name, value in curves.items()}
    with atomic_file(path) as file:
        np.savez(file, **arrays)


def load_snapshot(
    path: str | os.PathLike[str],
    policy: Policy,
    env_states: State,
    problems: Problem,
    keys: Key,
) -> Snapshot:
    """Read what `save_snapshot` wrote.

    Args:
        path: the file.
        policy, env_states, problems, keys: as given to `run`.

    Raises:
        ValueError: the file is damaged, or of another policy, seed or environment.
    """
    advice = f"remove {path} to start afresh."
    try:
        # Opened here, because np.load leaves a damaged file open.
        with open(path, "rb") as raw, np.load(raw) as file:
            arrays = dict(file)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"The checkpoint cannot be read ({error}); {advice}") from None
    if not np.array_equal(arrays.get("keys", 0), _to_host(keys)):
        raise ValueError(f"The checkpoint is of a run with other seeds; {advice}")
    fresh = jax.eval_shape(jax.vmap(policy.init), keys, problems)
    try:
        return Snapshot(
            round=int(arrays["round"]),
            state=_restore("state", fresh, arrays),
            env_state=_restore("env_state", env_states, arrays),
            curves=Curves(
                **{n: arrays[f"curves/{n}"] for n in Curves._fields[:-1]},
                interrupted=bool(arrays["curves/interrupted"]),
            ),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"The checkpoint does not fit the policy ({error}); {advice}"
        ) from None


def _restore(part: str, like: State, arrays: dict[str, np.ndarray]) -> State:
    """Build the tree of `like` from the stored leaves; sizes may differ."""
    leaves, structure = jax.tree.flatten(like)
    stored = sum(name.startswith(f"{part}/") for name in arrays)
    if stored != len(leaves):
        raise TypeError(f"{part} has {len(leaves)} leaves, the file {stored}")
    values = []
    for i, leaf in enumerate(leaves):
        impl = arrays.get(f"impl/{part}/{i}")
        values.append(_from_host(arrays[f"{part}/{i}"], impl, leaf))
    return jax.tree.unflatten(structure, values)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_host(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _from_host(value: np.ndarray, impl: np.ndarray | None, like: Any) -> jax.Array:
    if impl is not None:
        leaf = jax.random.wrap_key_data(jnp.array(value), impl=str(impl))
    else:
        if value.dtype.kind == "V":  # bfloat16 and its like lose their name in .npz
            value = value.view(like.dtype)
        leaf = jnp.array(value)
    if leaf.dtype != like.dtype or leaf.ndim != len(like.shape):
        raise TypeError(
            f"a leaf is {leaf.dtype}{list(leaf.shape)}, not {like.dtype}"
            f"{list(like.shape)}"
        )
    return leaf
