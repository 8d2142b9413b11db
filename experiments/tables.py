"""summary.md: the table a person reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from msb_jax.metrics import standard_error

# Rewards are float32: a smaller difference between averages is rounding.
TIE = 1e-6


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write an aligned Markdown table, the first column to the left."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        first = row[0].ljust(widths[0])
        rest = [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        return "| " + " | ".join([first, *rest]) + " |"

    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join([line(header), line(rule), *map(line, cells[1:])])


def results_table(policies: Mapping[str, Mapping[str, Any]]) -> str:
    """Write the numbers of all policies, those of a ground truth where there is one."""
    has_truth = all("gt_fraction" in p for p in policies.values())
    header = ["policy"]
    if has_truth:
        header += ["gt fraction", "all rounds", "last tenth"]
    header += ["reward", "r - lam c", "violation rate", "pairs", "feasible"]
    header += ["ms / round", "compile s"]
    rows = []
    for name, p in policies.items():
        row = [name]
        if has_truth:
            row += [
                f"{p['gt_fraction']:.4f} ± {p['gt_fraction_sem']:.4f}",
                f"{p['gt_fraction_all']:.4f}",
                f"{p['gt_fraction_last']:.4f}",
            ]
        row += [
            f"{p['reward_mean']:.4f}",
            f"{p['composite_mean']:.4f}",
            f"{p['violation_rate']:.5f}",
            f"{p['violated_pairs']:.2f}",
            f"{p['feasible_share']:.1%}",
            f"{1e3 * p['seconds_per_round']:.2f}",
            f"{p['compile_seconds']:.1f}",
        ]
        rows.append(row)
    return markdown_table(header, rows)


def relative_table(policies: Mapping[str, Mapping[str, Any]]) -> str:
    """Write the rewards of all rounds as shares of the references; empty if none."""
    names = list(next(iter(policies.values()))["relative"])
    header = ["policy", "reward, all rounds"]
    header += [f"of {name.replace('_', ' ')}" for name in names]
    rows = []
    for policy, p in policies.items():
        row = [policy, f"{p['reward_mean_all']:.4f} ± {p['reward_all_sem']:.4f}"]
        rows.append(row + [f"{p['relative'][name]:.3f}" for name in names])
    return markdown_table(header, rows) if names else ""


def references_sentence(references: Mapping[str, float]) -> str:
    """Say what the references are."""
    values = ", ".join(f"{n.replace('_', ' ')} {v:.4f}" for n, v in references.items())
    return (
        f"Mean rewards over all rounds: {values}. `best fixed` is the best set of all "
        "rounds and `clairvoyant` the best of each round, with as few conflicts as can "
        "be; `clairvoyant free` may violate."
    )


def paired_table(
    policies: Mapping[str, Mapping[str, Any]], reference: str = "master_slave"
) -> str:
    """Write what each policy gains on the reference, seed by seed.

    Seeds with equal averages are won by nobody. Empty if the reference did not play,
    or nobody else did.
    """
    if reference not in policies or len(policies) < 2:
        return ""
    own = policies[reference]["by_seed"]
    measure = next(iter(own))
    header = ["policy", measure.replace("_", " ") + f" less {reference}'s"]
    header += [f"seeds that {reference} wins", "r - lam c less its", "pairs less its"]
    rows = []
    for name, p in policies.items():
        if name == reference:
            continue
        gain, net, pairs = (
            np.subtract(p["by_seed"][key], own[key])
            for key in (measure, "composite_mean", "violated_pairs")
        )
        rows.append(
            [
                name,
                f"{gain.mean():+.4f} ± {standard_error(gain):.4f}",
                f"{(gain < -TIE).sum()} of {gain.size}",
                f"{net.mean():+.4f} ± {standard_error(net):.4f}",
                f"{pairs.mean():+.2f} ± {standard_error(pairs):.2f}",
            ]
        )
    return markdown_table(header, rows)


def origins_table(policies: Mapping[str, Mapping[str, Any]]) -> str:
    """Write who proposed what was played; empty if every policy has one source."""
    rows = [
        [name, origin, f"{share:.1%}", f"{p['produced_rate'][origin]:.1%}"]
        for name, p in policies.items()
        if len(p["recommended_rate"]) > 1
        for origin, share in p["recommended_rate"].items()
    ]
    header = ["policy", "source", "proposed", "found first"]
    return markdown_table(header, rows) if rows else ""


def summary_markdown(
    title: str,
    summary: Mapping[str, Any],
    *,
    rounds: Mapping[str, int],
    warm_up: int,
    notes: Sequence[str] = (),
) -> str:
    """Write summary.md.

    Args:
        title: of the page.
        summary: what `summary.json` holds.
        rounds: rounds played by each policy.
        warm_up: rounds at the start that the first columns leave out.
        notes: sentences about this run.
    """
    config = summary["config"]
    short = [name for name, played in rounds.items() if played <= warm_up]
    lines = [f"# {title}", "", results_table(summary["policies"]), ""]
    lines.append(
        f"Averages over {config['num_seeds']} seeds of the rounds after the first "
        f"{warm_up} (warm-up); `all rounds` and `r - lam c` (lam = {config['lam']:g}) "
        "include them. ± is one standard error over seeds; ms / round is wall time per "
        "round and seed without compilation."
    )
    if short:
        lines += ["", f"No round after warm-up: {', '.join(short)}; all rounds count."]
    for name, played in rounds.items():
        if played < config["rounds"]:
            lines += ["", f"Interrupted: {name} has {played} of {config['rounds']} "]
            lines[-1] += "rounds. `--resume` continues."
    for note in notes:
        lines += ["", note]
    if relative := relative_table(summary["policies"]):
        lines += ["", "## What was possible", "", relative, ""]
        lines.append(references_sentence(summary["references"]))
    if paired := paired_table(summary["policies"]):
        lines += ["", "## Seed by seed (after warm-up)", "", paired]
    if summary["ground_truth"]:
        lines += ["", "## Ground truth", "", truth_table(summary["ground_truth"])]
    if origins := origins_table(summary["policies"]):
        lines += ["", "## Who proposed what was played (after warm-up)", "", origins]
    flags = " ".join(f"--{k}={_plain(v)}" for k, v in config.items() if v is not None)
    return "\n".join([*lines, "", "## Flags", "", f"`{flags}`", ""])


def truth_table(ground_truth: Sequence[Mapping[str, Any]]) -> str:
    """Write the best known reward of every seed and how sure it is."""
    rows = []
    for g in ground_truth:
        bound = g["upper_bound"]
        shown = "unknown" if bound is None else f"{bound:.5f}"
        rows.append([str(g["seed"]), f"{g['reward']:.5f}", shown, g["status"]])
    return markdown_table(["seed", "reward", "upper bound", "status"], rows)


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
