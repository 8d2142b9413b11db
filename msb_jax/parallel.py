"""Run a function for all seeds at once, on all devices there are.

The seeds of a run never talk to each other, so the batch is cut along its leading axis
and each device works on its own part (`shard_map`, no communication). On a CPU the
experiments ask XLA for one device a core: linear algebra on one device is one thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec


def filled_size(size: int) -> int:
    """The least batch, not below `size`, that keeps the devices equally busy."""
    per_device = -(-size // len(jax.devices()))
    return per_device * -(-size // per_device)


def one_or_many(refresh: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of keys [B] and a batched state also take one key and one run."""

    def either(key: jax.Array, state: Any) -> Any:
        if key.ndim:
            return refresh(key, state)
        batched = jax.tree.map(lambda leaf: leaf[None], (key, state))
        return jax.tree.map(lambda leaf: leaf[0], refresh(*batched))

    return either


def map_seeds(
    function: Callable[..., Any],
    *,
    donate: tuple[int, ...] = (),
    in_turn: bool = False,
) -> Callable[..., Any]:
    """Jit and vmap `function` over the leading axis of all its arguments.

    Args:
        function: written for one run; takes and returns pytrees of arrays.
        donate: positions of arguments whose memory may be reused.
        in_turn: on a CPU, work on the seeds of a device one after the other. Large
            matrix products gain nothing from a batch there, and batched ones were
            seen never to finish (jaxlib 0.10.2, five seeds on one device).

    Returns:
        A function of batched arguments. The batch is spread over as many devices as
        divide its size.
    """

    def one_by_one(*args: Any) -> Any:
        return jax.lax.map(lambda own: function(*own), args)

    @functools.cache
    def compiled(num_devices: int) -> Callable[..., Any]:
        batched = jax.vmap(function)
        if in_turn and jax.default_backend() == "cpu":
            batched = one_by_one
        if num_devices > 1:
            devices = jax.devices()[:num_devices]
            mesh = jax.make_mesh(
                (num_devices,), ("seeds",), (AxisType.Auto,), devices=devices
            )
            seeds = PartitionSpec("seeds")
            batched = jax.shard_map(
                batched, mesh=mesh, in_specs=seeds, out_specs=seeds, check_vma=False
            )
        return jax.jit(batched, donate_argnums=donate)

    def call(*args: Any) -> Any:
        size = jax.tree.leaves(args)[0].shape[0]
        most = min(size, len(jax.devices()))
        num_devices = max(n for n in range(1, most + 1) if size % n == 0)
        return compiled(num_devices)(*args)

    return call
