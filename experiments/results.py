"""Read what finished units left behind, one number a seed.

A cell whose unit is not finished has no numbers but a reason, which the report shows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import files, units
from experiments.plan import Cell
from experiments.units import DONE, RUN, Unit
from msb_jax import metrics
from msb_jax.runner import Curves

NOT_RUN = "not run"
MEASURES = ("reward", "gt_fraction", "violation", "composite", "seconds_per_round")


class Value(NamedTuple):
    """A mean over seeds, or why there is none."""

    mean: float | None
    error: float | None = None  # standard error; none with a single seed
    reason: str = ""


class Ran(NamedTuple):
    """A finished unit."""

    summary: Mapping[str, Any]
    curves: Mapping[str, Curves]
    done: Mapping[str, Any]  # provenance

    @property
    def num_conflicts(self) -> float:
        """Return M, which the summary holds as a ratio only."""
        for policy in self.summary["policies"].values():
            if policy["violation_rate_all"] > 0:
                return policy["violated_pairs_all"] / policy["violation_rate_all"]
        return 1.0  # no conflict was ever seen: every rate is zero

    @property
    def warm_up(self) -> int:
        """Return the random rounds at the start."""
        return int(self.summary["config"]["n_re"])


class Results:
    """All finished units of a folder, read when they are asked for."""

    def __init__(self, root: Path) -> None:
        """Remember where to look, the folder of all results."""
        self.root = root
        self.read = functools.cache(self._read)

    def _read(self, unit: Unit) -> Ran | None:
        folder = unit.folder(self.root)
        if not units.is_finished(folder):
            return None
        return Ran(
            summary=files.read_json(folder / RUN / files.SUMMARY),
            curves=files.read_curves(folder / RUN / files.CURVES),
            done=files.read_json(folder / DONE),
        )

    def reason(self, cell: Cell) -> str:
        """Say why a cell is empty, or nothing if it is not."""
        ran = self.read(cell.unit)
        if ran is None:
            failed = units.failure(cell.unit.folder(self.root))
            return "failed, see the top" if failed else NOT_RUN
        return "" if cell.policy in ran.curves else f"{cell.policy} did not play"

    def by_seed(self, cell: Cell, measure: str) -> np.ndarray | None:
        """Return one number a seed, [B], or none; the same order in every unit.

        Args:
            cell: of the plan.
            measure: one of `MEASURES`. `reward`, `violation` (n / M) and `composite`
                (r - lam c) are averages over all rounds, `gt_fraction` over those
                after warm-up.
        """
        ran = self.read(cell.unit)
        if ran is None or cell.policy not in ran.curves:
            return None
        curves = ran.curves[cell.policy]
        reward = curves.mean_reward.mean(axis=1, dtype=np.float64)
        violation = curves.violations.mean(axis=1) / ran.num_conflicts
        if measure == "reward":
            return reward
        if measure == "violation":
            return violation
        if measure == "composite":
            return reward - ran.summary["config"]["lam"] * violation
        if measure == "seconds_per_round":
            return np.array([curves.seconds_per_round])
        if measure != "gt_fraction":
            raise ValueError(f"measure must be one of {', '.join(MEASURES)}.")
        by_seed = ran.summary["policies"][cell.policy]["by_seed"]
        return np.array(by_seed[measure]) if measure in by_seed else None

    def value(self, cell: Cell | None, measure: str, missing: str = "") -> Value:
        """Return mean and standard error of a cell.

        Args:
            cell: none if the plan has no such place.
            measure: see `by_seed`.
            missing: the reason to give where there is no cell.
        """
        if cell is None:
            return Value(None, reason=missing or "not in this budget")
        if reason := self.reason(cell):
            return Value(None, reason=reason)
        numbers = self.by_seed(cell, measure)
        return summarise(numbers, f"no {measure.replace('_', ' ')} here")

    def difference(self, cell: Cell, base: Cell, measure: str) -> Value:
        """Return the mean over seeds of cell - base, seed by seed."""
        ours, theirs = self.by_seed(cell, measure), self.by_seed(base, measure)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            return Value(None, reason=self.reason(cell) or self.reason(base))
        return summarise(ours - theirs, "")

    def curve(self, cell: Cell, measure: str) -> np.ndarray | None:
        """Return [B, T] values of a round: gt_fraction or reward, or violation."""
        ran = self.read(cell.unit)
        if ran is None or cell.policy not in ran.curves:
            return None
        curves = ran.curves[cell.policy]
        if measure == "violation":
            return curves.violations / ran.num_conflicts
        truth = [g["reward"] for g in ran.summary["ground_truth"]]
        return metrics.gt_fraction(curves, truth) if truth else curves.mean_reward

    def rates(self, cell: Cell) -> dict[str, np.ndarray]:
        """Return for each sampler whether it proposed what was played, [B, T]."""
        ran = self.read(cell.unit)
        if ran is None or cell.policy not in ran.curves:
            return {}
        names = ran.summary["policies"][cell.policy]["recommended_rate"]
        origin = ran.curves[cell.policy].origin
        return {n: (origin == i).astype(np.float64) for i, n in enumerate(names)}


def summarise(numbers: np.ndarray | None, reason: str) -> Value:
    """Return mean and standard error of one number a seed."""
    if numbers is None or not np.isfinite(numbers).all():
        return Value(None, reason=reason or "not a number")
    error = metrics.standard_error(numbers) if numbers.size > 1 else None
    return Value(float(numbers.mean()), error)
