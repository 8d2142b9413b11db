"""curves.png: reward, violations and who proposed what, over the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler as rc_cycler

from msb_jax import metrics
from msb_jax.atomic import atomic_file
from msb_jax.runner import Curves

STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.size": 9,
    "legend.frameon": False,
}


def plot_curves(
    path: Path,
    curves: Mapping[str, Curves],
    *,
    origins: Mapping[str, Sequence[str]],
    num_conflicts: Sequence[int],
    ground_truth: Sequence[float] | None,
    warm_up: int,
    title: str,
) -> None:
    """Draw the curves of all policies, averaged over seeds, with one s.e. bands.

    Args:
        path: of the .png.
        curves: by policy.
        origins: by policy, the names of `Curves.origin`.
        num_conflicts: M of each seed.
        ground_truth: of each seed; none plots the reward itself.
        warm_up: rounds that are shaded.
        title: of the figure.
    """
    longest = max(c.num_rounds for c in curves.values())
    window = max(1, min(100, longest // 20))
    # One policy's sources are all that a panel can hold; the agent comes first.
    split = [name for name in curves if len(origins[name]) > 1]
    with rc_context(STYLE | {"axes.prop_cycle": _cycle(len(curves))}):
        panels = 2 + bool(split)
        figure = Figure(figsize=(4.6 * panels, 3.6), layout="constrained")
        axes: list[Axes] = list(figure.subplots(1, panels))
        figure.suptitle(f"{title} (means of the last {window} rounds)")
        edges = np.maximum(np.asarray(num_conflicts, np.float64), 1.0)[:, None]
        for name, one in curves.items():
            reward: Any = one.mean_reward
            if ground_truth is not None:
                reward = metrics.gt_fraction(one, np.asarray(ground_truth))
            _band(axes[0], reward, window, name)
            _band(axes[1], one.violations / edges, window, name)
        axes[0].set_title("reward / ground truth" if ground_truth else "mean reward")
        if ground_truth is not None:
            axes[0].axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        axes[1].set_title("violation rate c")
        axes[1].set_ylim(bottom=0.0)
        if split:
            _shares(axes[2], split[0], curves[split[0]], origins[split[0]], window)
        for axis in axes:
            axis.set_xlabel("round")
            axis.set_xlim(0, longest)
            axis.axvspan(0, min(warm_up, longest), color="black", alpha=0.05, lw=0)
            axis.legend(ncols=1 + len(axis.lines) // 8, fontsize="small")
        with atomic_file(path) as file:
            figure.savefig(file, format="png", dpi=130)


def _band(axis: Axes, values: np.ndarray, window: int, label: str) -> None:
    """Plot the mean over seeds of [B, T] values with a band of one s.e."""
    smoothed = metrics.smooth(values, window)  # [B, T]
    mean = smoothed.mean(axis=0)
    rounds = np.arange(1, mean.size + 1)
    (line,) = axis.plot(rounds, mean, label=label, linewidth=1.4)
    if smoothed.shape[0] > 1:
        error = smoothed.std(axis=0, ddof=1) / np.sqrt(smoothed.shape[0])
        axis.fill_between(
            rounds, mean - error, mean + error, color=line.get_color(), alpha=0.2, lw=0
        )


def _shares(
    axis: Axes, policy: str, curves: Curves, origins: Sequence[str], window: int
) -> None:
    """Plot how often each source of a policy was played (arr_t)."""
    for index, origin in enumerate(origins):
        share = metrics.smooth(curves.origin == index, window).mean(axis=0)
        axis.plot(np.arange(1, share.size + 1), share, linewidth=1.2, label=origin)
    axis.set_title(f"rounds of {policy} by source (arr)")
    axis.set_ylim(-0.02, 1.02)


def _cycle(number: int) -> Any:
    """Enough colours to tell so many lines apart."""
    palette = colormaps["tab10" if number <= 10 else "tab20"]
    return rc_cycler(color=[palette(i) for i in range(palette.N)])
