"""Checks of settings that the configs of several policies share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def check_least(config: Any, least: Mapping[str, int]) -> None:
    """Raise unless every field named is at least so much."""
    for name, bound in least.items():
        value = getattr(config, name)
        if value < bound:
            raise ValueError(f"{name} must be at least {bound}, got {value}.")


def check_numbers(config: Any, *names: str) -> None:
    """Raise unless the fields are finite and not negative."""
    for name in names:
        value = getattr(config, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a number >= 0, got {value}.")
