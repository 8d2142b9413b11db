"""All policies by name.

A policy joins by one line: its name and a function that makes it from settings. For
most of them that is `_plain`: a module with a factory of the same name and one
argument, `config`, whose annotation is the config class. Modules are imported when
they are asked for.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from msb_jax.types import Policy

Settings = Mapping[str, Any]

MASTERS = {
    "ntk_ucb": "msb_jax.masters.ntk_ucb",
    "neural_ucb": "msb_jax.masters.neural_ucb",
    "kalman_ucb": "msb_jax.masters.kalman_ucb",
}


def make_policy(name: str, settings: Settings) -> Policy:
    """Make a policy from the settings of an experiment.

    Args:
        name: a key of `POLICIES`, `LIST_POLICIES` or `STRUCTURED_POLICIES`.
        settings: what the experiment knows, for example lam, constraints, n_re and
            f_in; the policy takes those that its config has a field for.
    """
    known = POLICIES | LIST_POLICIES | STRUCTURED_POLICIES
    check_name(name, known, "policy")
    return known[name](settings)


def check_name(name: str, known: Iterable[str], what: str) -> None:
    """Raise with the known names, and the nearest one, unless `name` is known."""
    names = list(known)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"There is no {what} {name!r}: {hint}choose from {', '.join(names)}."
        )


def _plain(module: str, name: str, settings: Settings) -> Any:
    """Call the factory `name` of a module with its config."""
    factory = getattr(importlib.import_module(module), name)
    return factory(_choose(typing.get_type_hints(factory)["config"], settings))


def _choose(config_class: type, settings: Settings) -> Any:
    """Make a config of those settings that it has a field for."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    return config_class(**{k: v for k, v in settings.items() if k in fields})


def _master_slave(settings: Settings) -> Policy:
    """Make the agent with the master and the samplers of the settings."""
    agent = importlib.import_module("msb_jax.agent.master_slave")
    samplers = importlib.import_module("msb_jax.samplers.registry")
    settings = {"block": settings.get("f_in", 20), **settings}
    discount = settings.get("discount", 1.0)
    if discount != "auto":
        settings["discount"] = float(discount)  # a flag is a word
    name = settings.get("master", "ntk_ucb")
    check_name(name, MASTERS, "master")
    master = _plain(MASTERS[name], name, settings)
    names = settings.get("samplers", samplers.DEFAULT)
    config = _choose(agent.MasterSlaveConfig, settings)
    made = samplers.make_samplers(names, settings)
    policy: Policy = agent.master_slave(master, made, config)
    if settings.get("is_ordered"):
        policy = importlib.import_module("msb_jax.agent.ordered").ordered(policy)
    return policy


def _neural_diag(settings: Settings) -> Policy:
    """Make the agent whose confidence is the diagonal one of public code."""
    diagonal = {"master": "neural_ucb", "confidence": "diagonal"}
    return _master_slave({**settings, **diagonal})


def _d_lin_ts(settings: Settings) -> Policy:
    """Make the discounted peer, with the settings lin_gamma and lin_scale if given."""
    own = {
        n: settings[f"lin_{n}"] for n in ("gamma", "scale") if f"lin_{n}" in settings
    }
    settings = {**settings, **own}
    return _plain("msb_jax.baselines.d_lin_ts", "d_lin_ts", settings)


def _oracle(settings: Settings) -> Policy:
    """Make the policy that is told the best sets, settings["truth"]."""
    module = importlib.import_module("msb_jax.baselines.oracle")
    if settings.get("truth") is None:
        raise ValueError("oracle needs a ground truth, and there is none here.")
    return module.oracle(*settings["truth"])


POLICIES: dict[str, Callable[[Settings], Policy]] = {
    "master_slave": _master_slave,
    "neural_diag": _neural_diag,
    "lin_ts": partial(_plain, "msb_jax.baselines.lin_ts", "lin_ts"),
    "d_lin_ts": _d_lin_ts,
    "gp_ucb": partial(_plain, "msb_jax.baselines.gp_ucb", "gp_ucb"),
    "csar_est1": partial(_plain, "msb_jax.baselines.csar", "csar_est1"),
    "csar_est2": partial(_plain, "msb_jax.baselines.csar", "csar_est2"),
    "rlfd": partial(_plain, "msb_jax.baselines.rlfd", "rlfd"),
    "wolpertinger": partial(_plain, "msb_jax.baselines.wolpertinger", "wolpertinger"),
    "pdwa": partial(_plain, "msb_jax.baselines.pdwa", "pdwa"),
    "pdg2anet": partial(_plain, "msb_jax.baselines.pdg2anet", "pdg2anet"),
    "cem_ppo": partial(_plain, "msb_jax.baselines.cem_ppo", "cem_ppo"),
    "gtkr": partial(_plain, "msb_jax.baselines.gtkr", "gtkr"),
    "random": partial(_plain, "msb_jax.baselines.random", "random"),
    "oracle": _oracle,
}
# For environments with ordered lists; all but pbm_lin_ucb learn from clicks alone.
LIST_POLICIES: dict[str, Callable[[Settings], Policy]] = {
    name: partial(_plain, f"msb_jax.baselines.{name}", name)
    for name in (
        "cascade_kl_ucb",
        "cascade_lsb",
        "cascade_hybrid",
        "pbm_ucb",
        "pbm_lin_ucb",
    )
}
# For problems other than sets with conflicts.
STRUCTURED_POLICIES: dict[str, Callable[[Settings], Policy]] = {
    name: partial(_plain, "msb_jax.baselines.structured_ts", name)
    for name in ("path_ts", "coverage_ts")
}


def _family(*names: str) -> dict[str, Callable[[Settings], Policy]]:
    known = POLICIES | LIST_POLICIES | STRUCTURED_POLICIES
    return {name: known[name] for name in ("master_slave", *names, "random", "oracle")}


# Who can play where; the agent is told by the setting `is_ordered` to play lists.
CASCADE_POLICIES = _family("cascade_kl_ucb", "cascade_lsb", "cascade_hybrid")
POSITION_POLICIES = _family("pbm_ucb", "pbm_lin_ucb")
PATH_POLICIES = _family("path_ts")
COVERAGE_POLICIES = _family("coverage_ts", "lin_ts", "gp_ucb")
# Made from the settings and `truth`, the problems and their best sets.
TOLD = ("oracle",)
