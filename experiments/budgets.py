"""How much of the paper is run: sizes, policies and values, by name of the budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from experiments.printed import FORMS
from msb_jax.samplers.registry import PLAIN

MAIN = ("master_slave", "lin_ts")
MAIN_LOG = ("master_slave", "d_lin_ts")
# The policies of the paper's tables.
TABLED = (
    "pdwa",
    "pdg2anet",
    "wolpertinger",
    "cem_ppo",
    "gtkr",
    "rlfd",
    "csar_est1",
    "csar_est2",
)
OTHERS = (*TABLED, "gp_ucb", "neural_diag", "d_lin_ts", "random", "oracle")
OTHERS_LOG = (*TABLED, "gp_ucb", "neural_diag", "lin_ts", "random", "oracle")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much is run.

    Attributes:
        synthetic: flags of every synthetic unit.
        logs: flags of every unit on a log.
        feedback: flags of units with synthetic feedback on a log, besides.
        cascading: flags of the unit with ordered lists.
        xla_flags: for the compiler.
        sweep: flags of the agent in the sweep over lam, besides; none: the default
            agent, so that lam = 5 is not run again.
        others: policies of the baselines on the forms.
        others_log: the same on logs.
        swept: policies of the sweep over lam.
        swept_log: the same on logs.
        forms: on which the parts of the agent are compared.
        all_logs: compare the parts on all logs, not on the first alone.
        hyper: values of each hyper-parameter, the default among them or not.
    """

    synthetic: Mapping[str, Any]
    logs: Mapping[str, Any]
    feedback: Mapping[str, Any]
    cascading: Mapping[str, Any]
    xla_flags: str = ""
    sweep: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = OTHERS
    others_log: tuple[str, ...] = OTHERS_LOG
    swept: tuple[str, ...] = (*MAIN, *TABLED)
    swept_log: tuple[str, ...] = (*MAIN_LOG, *TABLED)
    forms: tuple[str, ...] = FORMS
    all_logs: bool = True
    hyper: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {
            "n_es": (10, 20, 40, 60, 80, 100),
            "n_c": (5, 10, 20, 40),
            "n_D": (0, 5, 10, 20, 40),
            "n_re": (10, 20, 40, 80),
            "f_in": (5, 8, 20, 40),
        }
    )


LONG = ("neural_diag",)  # compiles a second agent with all its samplers
# Those of the paper's tables that compile in seconds.
SWEPT = (*MAIN, "gtkr", "csar_est1", "csar_est2")
SWEPT_LOG = (*MAIN_LOG, "gtkr", "csar_est1", "csar_est2")
_SMALL = {"num_arms": 60, "k": 6, "n_re": 60, "rounds": 300, "num_seeds": 2}
BUDGETS = {
    "quick": Budget(
        synthetic=_SMALL,
        logs={"rounds": 300, "num_seeds": 2},
        feedback={"n_re": 40},
        cascading={"num_arms": 30, "k": 5, "rounds": 300, "num_seeds": 2},
        # Compilation is nine tenths of a small run; this takes a third off it.
        xla_flags="--xla_backend_optimization_level=0",
        sweep={"samplers": PLAIN},
        others=tuple(name for name in OTHERS if name not in LONG),
        others_log=tuple(name for name in OTHERS_LOG if name not in LONG),
        swept=SWEPT,
        swept_log=SWEPT_LOG,
        forms=("linear",),
        all_logs=False,
        hyper={
            "n_es": (10, 30),
            "n_c": (5, 20),
            "n_D": (0, 20),
            "n_re": (20, 60),
            "f_in": (8, 20),
        },
    ),
    "paper": Budget(
        synthetic={"num_seeds": 10},
        logs={"num_seeds": 10},
        feedback={},
        cascading={"num_seeds": 10},
    ),
}
