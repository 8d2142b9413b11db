"""Command line flags from one frozen dataclass.

Each field of the config is a flag of the same name and default; its help stands in
the field's metadata (`flag`). Only what the user gave is returned by `parse`, so that
presets and stored configs can stand between the defaults and the command line.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags


class UsageError(Exception):
    """The command line asks for something that cannot be done; says what to do."""


def fail(sentence: str) -> int:
    """Print what is wrong, and return the exit code that says so."""
    print(f"error: {sentence}", file=sys.stderr)
    return 2


def flag(default: Any, help: str, choices: Sequence[str] | None = None) -> Any:
    """Declare a field of a config that is also a flag."""
    metadata = {"help": help, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def parse(config_class: type, argv: Sequence[str]) -> dict[str, Any]:
    """Return the flags that were given, by name.

    Args:
        config_class: a dataclass whose fields are made by `flag`.
        argv: the command line without the program's name.

    Raises:
        UsageError: unknown flags, values of the wrong kind, stray words.
    """
    values = _define(config_class)
    try:
        rest = values(["experiment", *argv])[1:]
    except absl_flags.Error as error:
        raise UsageError(_sentence(str(error))) from None
    if rest:
        raise UsageError(f"Unexpected argument {rest[0]!r}; flags start with --.")
    given = {}
    for name in values:
        if values[name].present:
            value = values[name].value
            given[name] = tuple(value) if isinstance(value, list) else value
    return given


def usage(config_class: type, command: str) -> str:
    """Describe all flags, for --help."""
    lines = [f"usage: {command} [--flag=value ...]", ""]
    for field in dataclasses.fields(config_class):
        default = field.default
        if isinstance(default, tuple):
            default = ",".join(map(str, default))
        note = "" if default in (None, False) else f" (default {default})"
        lines.append(f"  --{field.name:<16} {field.metadata['help']}{note}")
    return "\n".join([*lines, f"  --{'help':<16} show this"])


def to_json(config: Any) -> dict[str, Any]:
    """Return the flags of a config as plain JSON values."""
    plain = dataclasses.asdict(config)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}


def from_json(config_class: type, stored: dict[str, Any]) -> dict[str, Any]:
    """Undo `to_json`, leaving out what is no flag (any more)."""
    names = {field.name for field in dataclasses.fields(config_class)}
    return {
        k: tuple(v) if isinstance(v, list) else v
        for k, v in stored.items()
        if k in names
    }


def _define(config_class: type) -> absl_flags.FlagValues:
    values = absl_flags.FlagValues()
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        kind = _without_none(hints[field.name])
        about = (field.name, None, field.metadata["help"])
        if kind is bool:
            absl_flags.DEFINE_boolean(*about, flag_values=values)
        elif kind is int:
            absl_flags.DEFINE_integer(*about, flag_values=values)
        elif kind is float:
            absl_flags.DEFINE_float(*about, flag_values=values)
        elif typing.get_origin(kind) is tuple:
            absl_flags.DEFINE_list(*about, flag_values=values)
        elif choices := field.metadata["choices"]:
            name, default, text = about
            absl_flags.DEFINE_enum(
                name, default, list(choices), text, flag_values=values
            )
        else:
            absl_flags.DEFINE_string(*about, flag_values=values)
    absl_flags.DEFINE_boolean("help", None, "show this", flag_values=values)
    return values


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        return next(a for a in typing.get_args(kind) if a is not types.NoneType)
    return kind


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text if text.endswith((".", "?")) else f"{text}."
