"""How often the places of an ordered list are seen, where that is known to all."""

from __future__ import annotations

import numpy as np


def check_decay(decay: float) -> None:
    """Raise unless a place is seen with some chance, and at most as the one above."""
    if not 0 < decay <= 1:
        raise ValueError(f"decay must be in (0, 1], got {decay}.")


def examination(decay: float, k: int) -> np.ndarray:
    """Return kappa_l = decay^(l-1), the chance that place l is seen: float64[K]."""
    return decay ** np.arange(k, dtype=np.float64)
