"""The parts of the report: which tables, which figures, and what they say.

The sentences about units and sizes follow the list of what does not fit together in
the paper (docs/decisions.md); the sentences about parts that do not help are made from
the figures.
"""

from __future__ import annotations

from collections.abc import Mapping

from experiments import printed
from experiments.plan import FEEDBACK, Section
from experiments.printed import FORMS
from experiments.report_curves import make_curves, make_hyper_curves, make_rates
from experiments.report_parts import Part, label, make_table
from experiments.report_sizes import log_sizes
from experiments.report_verdicts import alone, gains, helps
from experiments.results import Results

Plan = Mapping[str, Section]

REWARD_UNITS = (
    "Units differ: our synthetic rewards are shares of the largest reward that any set "
    "has; the paper prints numbers of 0.1 to 0.5 without their unit, which its own "
    "formulas do not give (5 to 125). Compare the order of rows, not the numbers."
)
LOG_UNITS = (
    "On logs ours is the share of a window of 2K clicks that falls on the set, from 0 "
    "to 1. The paper's formula allows 0.5 at most and its tables have 0.81, so that "
    "its unit is another one."
)
RATE_UNITS = (
    "Ours is the violated share n / M of all conflicting pairs. A random set has "
    "K(K-1) / (L(L-1)) whatever the conflicts are: 0.0042 for 20 of 300 arms, less "
    "than every synthetic figure the paper prints, so that its size or its unit must "
    "be another one."
)
ROUNDS = "Means of all rounds, the random ones at the start included, ± one standard "
ROUNDS += "error over seeds; the paper's figure stands beside ours."


def make_parts(plan: Plan, results: Results) -> list[Part]:
    """Return all parts but the times, in order."""
    parts = [
        _main(plan, results),
        _logs(plan, results),
        _rates(plan, results),
        _feedback(plan, results),
        _lam(plan, results),
        _samplers(plan, results),
        _mechanisms(plan, results),
        _hyper(plan, results),
    ]
    if "cascading" in plan:
        parts.append(_cascading(plan["cascading"], results))
    return parts


def _main(plan: Plan, results: Results) -> Part:
    section = plan["baselines"]
    tables = [
        make_table(
            results,
            section,
            "reward",
            key="reward",
            title="Reward of every policy",
            note=f"{ROUNDS} {REWARD_UNITS} {LOG_UNITS}",
            printed=printed.REWARD,
        ),
        make_table(
            results,
            section,
            "violation",
            key="violation",
            title="Violation rate of every policy",
            note=f"{ROUNDS} {RATE_UNITS}",
            printed=printed.VIOLATION,
            digits=5,
        ),
        make_table(
            results,
            section,
            "composite",
            key="composite",
            title="Reward less the price of violations, r - lam c",
            note="What the agent is asked to maximise. Means of all rounds, the random "
            "ones included. The paper has no such table.",
        ),
        make_table(
            results,
            _only(section, FORMS),
            "gt_fraction",
            key="gt-fraction",
            title="Share of the ground truth after the random rounds",
            note="The ground truth keeps all constraints; a policy that violates some "
            "may exceed 1. The paper has this as a picture only.",
        ),
    ]
    figures = [
        make_curves(results, section, FORMS, "gt_fraction", "synthetic-reward"),
        make_curves(results, section, FORMS, "violation", "synthetic-violation"),
    ]
    sentences = gains(results, section)
    return Part("synthetic", "All policies", sentences, tables, figures)


def _logs(plan: Plan, results: Results) -> Part:
    section = plan["baselines"]
    columns = [c for c in section.columns if c not in FORMS]
    figures = [
        make_curves(results, section, columns, "reward", "logs-reward"),
        make_curves(results, section, columns, "violation", "logs-violation"),
    ]
    absent = [f"{label(c)} is empty: {why}." for c, why in section.missing.items()]
    table = log_sizes(plan["logs"])
    return Part("logs", "Logs with real feedback", absent, [table], figures)


def _rates(plan: Plan, results: Results) -> Part:
    figure = make_rates(results, plan["rates"])
    return Part("rates", "Who proposed what was played", [], [], [figure])


def _feedback(plan: Plan, results: Results) -> Part:
    section = plan["feedback"]
    figures = []
    for log in dict.fromkeys(c.split()[0] for c in section.columns):
        columns = [c for c in section.columns if c.split()[0] == log]
        figure = make_curves(
            results, section, columns, "gt_fraction", f"feedback-{log}"
        )
        figures.append(figure._replace(title=f"{label(log)} with synthetic feedback"))
    table = make_table(
        results,
        section,
        "gt_fraction",
        key="feedback",
        title="Share of the ground truth after the random rounds",
    )
    absent = [
        f"{label(c)} is empty: {section.missing[c]}."
        for c in FEEDBACK
        if c in section.missing
    ]
    title = "Logs with synthetic feedback"
    return Part("feedback", title, absent, [table], figures)


def _lam(plan: Plan, results: Results) -> Part:
    tables = []
    for name, what, reward, rate in (
        (
            "lam_linear",
            "the linear form",
            printed.LAM_LINEAR_REWARD,
            printed.LAM_LINEAR_VIOLATION,
        ),
        (
            "lam_log",
            "a log (the paper's is Delicious)",
            printed.LAM_DELICIOUS_REWARD,
            printed.LAM_DELICIOUS_VIOLATION,
        ),
    ):
        key = name.replace("_", "-")
        units = REWARD_UNITS if name == "lam_linear" else LOG_UNITS
        tables += [
            make_table(
                results,
                plan[name],
                "reward",
                key=f"{key}-reward",
                title=f"Reward by lam on {what}",
                note=f"{ROUNDS} {units}",
                printed=reward,
            ),
            make_table(
                results,
                plan[name],
                "violation",
                key=f"{key}-violation",
                title=f"Violation rate by lam on {what}",
                note=f"{ROUNDS} {RATE_UNITS}",
                printed=rate,
                digits=5,
            ),
        ]
    return Part("lam", "The price of a violation", [], tables, [])


def _samplers(plan: Plan, results: Results) -> Part:
    single, without = plan["single"], plan["leave_one_out"]
    tables = [
        make_table(
            results,
            single,
            "reward",
            key="single",
            title="Reward with one sampler alone",
            note=f"{ROUNDS} {REWARD_UNITS} {LOG_UNITS}",
            printed=printed.SINGLE_REWARD,
        ),
        make_table(
            results,
            without,
            "reward",
            key="leave-one-out-reward",
            title="Reward without one sampler",
            note=f"{ROUNDS} {REWARD_UNITS} {LOG_UNITS}",
            printed=printed.LEAVE_OUT_REWARD,
        ),
        make_table(
            results,
            without,
            "violation",
            key="leave-one-out-violation",
            title="Violation rate without one sampler",
            note=f"{RATE_UNITS} In the paper the rows without solver, wolpertinger and "
            "random_best are equal in all columns, and slaves have numbers only, taken "
            "here in the order of its sections.",
            printed=printed.LEAVE_OUT_VIOLATION,
            digits=5,
        ),
    ]
    sentences = helps(results, without, "all", lambda row: row[len("no_") :])
    sentences += alone(results, single, "all")
    return Part("samplers", "What each sampler adds", sentences, tables, [])


def _mechanisms(plan: Plan, results: Results) -> Part:
    tables, figures, sentences = [], [], []
    for name, what, base in (
        ("replay", "Replay buffer", "prioritized"),
        ("cotraining", "Co-training", "all"),
    ):
        section = plan[name]
        tables.append(
            make_table(
                results,
                section,
                "reward",
                key=name,
                title=f"Reward by kind of {what.lower()}",
                note=f"{ROUNDS} The paper has this as a picture only.",
            )
        )
        figures.append(make_curves(results, section, section.columns, "reward", name))
        whole = f"{name}={base}"
        sentences += helps(results, section, base, f"{whole} over {{}}".format)
    title = "Replay and co-training"
    return Part("mechanisms", title, sentences, tables, figures)


def _hyper(plan: Plan, results: Results) -> Part:
    section = plan["hyper"]
    figures = [make_hyper_curves(results, section, m) for m in ("reward", "violation")]
    table = make_table(
        results,
        section,
        "reward",
        key="hyper",
        title="Reward by hyper-parameter",
        note="n_es candidates of a round, n_c clusters of the replay buffer, n_D steps "
        "of imitation, n_re random rounds, f_in rounds between two refreshes.",
    )
    return Part("hyper", "Hyper-parameters", [], [table], figures)


def _cascading(section: Section, results: Results) -> Part:
    tables = [
        make_table(
            results, section, "reward", key="cascading", title="Reward of every policy"
        ),
        make_table(
            results,
            section,
            "violation",
            key="cascading-violation",
            title="Violation rate of every policy",
            note="The paper says that its figures stand in its table of violation "
            "rates, which has no such column.",
            digits=5,
        ),
    ]
    figure = make_curves(results, section, section.columns, "gt_fraction", "cascading")
    return Part("cascading", "Lists that are read from the top", [], tables, [figure])


def _only(section: Section, columns: tuple[str, ...]) -> Section:
    """Keep some columns."""
    cells = {key: cell for key, cell in section.cells.items() if key[1] in columns}
    return section._replace(cells=cells, missing={})
