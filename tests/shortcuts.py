"""What makes tests of whole experiments quick: shared policies, no figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msb_jax.baselines.registry import TOLD, make_policy
from msb_jax.types import Policy

_POLICIES: dict[str, Policy] = {}
# Settings that no policy looks at.
_IGNORED = ("out", "resume", "rounds", "policies", "seed")


def cached_policy(name: str, settings: Mapping[str, Any]) -> Policy:
    """Make a policy once for all tests, so that they share its compiled blocks."""
    if name in TOLD:
        return make_policy(name, settings)
    wanted = {k: v for k, v in settings.items() if k not in _IGNORED}
    key = name + json.dumps(wanted, sort_keys=True)
    if key not in _POLICIES:
        _POLICIES[key] = make_policy(name, settings)
    return _POLICIES[key]


def tiny_figure(path: Path, *args: Any, **kwargs: Any) -> None:
    """Stand in for `figures.plot_curves`."""
    path.write_bytes(b"png")
