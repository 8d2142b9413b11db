"""Turn the curves of a policy into the numbers of `summary.json`.

NumPy only. Averages are over seeds of averages over rounds. "After warm-up" leaves
out the first `warm_up` rounds; a run that is not longer than its warm-up is averaged
over all its rounds instead (`is_past_warm_up` tells).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from msb_jax.runner import Curves


def is_past_warm_up(curves: Curves, warm_up: int) -> bool:
    """Tell whether any round was played after the warm-up."""
    return curves.num_rounds > warm_up


def summarise(
    curves: Curves,
    *,
    num_conflicts: ArrayLike,
    origins: Sequence[str],
    warm_up: int,
    lam: float,
    ground_truth: ArrayLike | None = None,
    references: Mapping[str, float] = {},
) -> dict[str, Any]:
    """Summarise the rounds that were played.

    Args:
        curves: of B seeds and T >= 1 rounds.
        num_conflicts: M, [] or [B].
        origins: names of the values of `curves.origin`.
        warm_up: rounds at the start that are not the policy's own (n_re).
        lam: weight of the violation rate in the composite reward r - lam c.
        ground_truth: best mean reward of each seed, [] or [B]; none leaves the
            `gt_...` keys out.
        references: mean rewards over all rounds to compare with, by name.

    Returns:
        The entry of one policy in `summary.json`, of plain Python numbers:
        `gt_fraction` (mean over seeds of mean_reward / ground truth after warm-up),
        `gt_fraction_sem` (standard error over seeds, 0 for one seed),
        `gt_fraction_all` (all rounds), `gt_fraction_last` (last tenth);
        `by_seed` {name: one number a seed}, of the gt fraction (of the reward where
        there is no ground truth) and the violated pairs after warm-up, and of
        `composite_mean`;
        `reward_mean`, `violation_rate` (n / M), `violated_pairs` (n),
        `feasible_share` (n = 0) after warm-up, the first three also as `_all` over
        all rounds; `composite_mean` over all rounds; `seconds_per_round`,
        `compile_seconds`; `recommended_rate` {origin: share after warm-up},
        by proposer; `produced_rate`, by who proposed the set first.
    """
    if curves.num_rounds < 1:
        raise ValueError("There is nothing to summarise: no round was played.")
    num_seeds, num_rounds = curves.reward.shape
    skip = warm_up if is_past_warm_up(curves, warm_up) else 0
    reward = curves.reward.astype(np.float64)  # [B, T]
    pairs = curves.violations.astype(np.float64)  # [B, T]
    edges = np.broadcast_to(np.asarray(num_conflicts, np.float64), (num_seeds,))
    rate = pairs / np.maximum(edges, 1.0)[:, None]  # [B, T]
    composite = reward - lam * rate  # [B, T]

    summary: dict[str, Any] = {}
    by_seed = reward[:, skip:].mean(axis=1)  # [B]
    measure = "reward_mean" if ground_truth is None else "gt_fraction"
    if ground_truth is not None:
        best = np.broadcast_to(np.asarray(ground_truth, np.float64), (num_seeds,))
        fraction = gt_fraction(curves, best)  # [B, T]
        by_seed = fraction[:, skip:].mean(axis=1)  # [B]
        last = max(1, num_rounds // 10)
        summary |= {
            "gt_fraction": float(by_seed.mean()),
            "gt_fraction_sem": standard_error(by_seed),
            "gt_fraction_all": float(fraction.mean()),
            "gt_fraction_last": float(fraction[:, -last:].mean()),
        }

    def shares(who: np.ndarray) -> dict[str, float]:
        return {n: float((who[:, skip:] == i).mean()) for i, n in enumerate(origins)}

    return summary | {
        "by_seed": {
            measure: by_seed.tolist(),
            "violated_pairs": pairs[:, skip:].mean(axis=1).tolist(),
            "composite_mean": composite.mean(axis=1).tolist(),
        },
        "reward_mean": float(reward[:, skip:].mean()),
        "reward_mean_all": float(reward.mean()),
        "reward_all_sem": standard_error(reward.mean(axis=1)),
        "relative": {
            name: float(reward.mean()) / value
            for name, value in references.items()
            if value > 0
        },
        "composite_mean": float(composite.mean()),
        "violation_rate": float(rate[:, skip:].mean()),
        "violation_rate_all": float(rate.mean()),
        "violated_pairs": float(pairs[:, skip:].mean()),
        "violated_pairs_all": float(pairs.mean()),
        "feasible_share": float((pairs[:, skip:] == 0).mean()),
        "seconds_per_round": curves.seconds_per_round,
        "compile_seconds": float(curves.compile_seconds.sum()),
        "recommended_rate": shares(curves.origin),
        "produced_rate": shares(curves.producer),
    }


def gt_fraction(curves: Curves, ground_truth: ArrayLike) -> np.ndarray:
    """Divide the noiseless reward by the ground truth of its seed, [B, T]."""
    best = np.asarray(ground_truth, np.float64).reshape(-1, 1)  # [B, 1] or [1, 1]
    if not (np.isfinite(best) & (best > 0)).all():
        raise ValueError(
            f"A ground truth must be a positive number, got {best.ravel().tolist()}; "
            "leave it out for rewards without one."
        )
    return curves.mean_reward.astype(np.float64) / best


def standard_error(values: np.ndarray) -> float:
    """Return the standard error of the mean of [B] values; 0 for a single one."""
    if values.size < 2:
        return 0.0
    return float(values.std(ddof=1) / np.sqrt(values.size))


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Average each row over the last `window` rounds (fewer at the start).

    Args:
        values: [B, T].

    Returns:
        float64[B, T].
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}.")
    total = np.cumsum(values, axis=-1, dtype=np.float64)
    late = np.zeros_like(total)
    late[..., window:] = total[..., :-window]
    count = np.minimum(np.arange(1, values.shape[-1] + 1), window)  # [T]
    return (total - late) / count[None, :]
