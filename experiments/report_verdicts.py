"""Sentences about what the figures show, made from the figures.

A single seed has no standard error, and nothing is said of it.
"""

from __future__ import annotations

from collections.abc import Callable

from experiments import printed
from experiments.plan import Section
from experiments.report_parts import label
from experiments.results import Results, Value

PEERLESS = ("master_slave", "oracle")  # not among those the agent is compared with


def helps(
    results: Results, section: Section, base: str, name: Callable[[str], str]
) -> list[str]:
    """Say of each part whether it helps the reward, seed by seed.

    Args:
        results: where the figures are.
        section: rows without the part, and the row `base` with it.
        base: the whole.
        name: of the part, from the row.
    """
    sentences = []
    for column in section.columns:
        helped: list[str] = []
        useless: list[str] = []
        for row in section.rows:
            if row == base or (row, column) not in section.cells:
                continue
            gain = results.difference(
                section.cells[base, column], section.cells[row, column], "reward"
            )
            if gain.mean is None or gain.error is None:
                continue
            text = f"{name(row)} ({signed(gain)})"
            (helped if exceeds_error(gain) else useless).append(text)
        if helped:
            sentences.append(f"{label(column)}: it pays to have {', '.join(helped)}.")
        if useless:
            sentences.append(
                f"{label(column)}: no help is shown (a gain of at most one standard "
                f"error, or a loss) by {', '.join(useless)}."
            )
    return sentences


def alone(results: Results, section: Section, base: str) -> list[str]:
    """Name the samplers that alone do as well as all together."""
    sentences = []
    for column in section.columns:
        found = []
        for row in section.rows:
            if row == base or (row, column) not in section.cells:
                continue
            loss = results.difference(
                section.cells[base, column], section.cells[row, column], "reward"
            )
            if loss.error is not None and not exceeds_error(loss):
                found.append(f"{row} ({signed(loss)})")
        if found:
            sentences.append(
                f"{label(column)}: all samplers together gain nothing beyond one "
                f"standard error on a single one: {', '.join(found)}."
            )
    return sentences


def gains(results: Results, section: Section) -> list[str]:
    """Compare the agent with the best other policy.

    By the reward alone, as the paper's text does, and by r - lam c, which is what the
    agent is asked for.
    """
    sentences = []
    for column in section.columns:
        by_reward = _lead(results, section, column, "reward")
        if by_reward is None:
            continue
        best, gain, share = by_reward
        told = printed.GAIN_REWARD.get(("gain", column))
        paper = "" if told is None else f"; the paper says +{told:g} %"
        text = (
            f"{label(column)}: master_slave {_verdict(gain)} of the best other policy "
            f"that played, {best}: {share:+.1f} % of the reward ({signed(gain)}){paper}"
        )
        if priced := _lead(results, section, column, "composite"):
            best, gain, _ = priced
            text += (
                f". In r - lam c it {_verdict(gain)} of the best other, {best} "
                f"({signed(gain)})"
            )
        sentences.append(f"{text}.")
    return sentences


def _lead(
    results: Results, section: Section, column: str, measure: str
) -> tuple[str, Value, float] | None:
    """Return the best other policy, the agent's lead, and this in percent."""
    agent = section.cells.get(("master_slave", column))
    if agent is None:
        return None
    means = {}
    for row in section.rows:
        cell = section.cells.get((row, column))
        if cell is not None and row not in PEERLESS:
            mean = results.value(cell, measure).mean
            if mean is not None:
                means[row] = mean
    ours = results.value(agent, measure).mean
    if ours is None or not means:
        return None
    best = max(means, key=lambda row: means[row])
    gain = results.difference(agent, section.cells[best, column], measure)
    if gain.error is None:
        return None
    share = 100 * (ours / means[best] - 1) if means[best] > 0 else float("nan")
    return best, gain, share


def _verdict(gain: Value) -> str:
    return "is ahead" if exceeds_error(gain) else "is not shown to be ahead"


def exceeds_error(gain: Value) -> bool:
    """Tell whether a gain is larger than its standard error."""
    return gain.mean is not None and gain.error is not None and gain.mean > gain.error


def signed(gain: Value) -> str:
    """Write a difference."""
    return f"{gain.mean:+.4f} ± {gain.error:.4f}"
