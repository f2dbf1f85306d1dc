"""The command line and YAML files, both generated from the fields of `RunConfig`.

A flag given on the command line overrides the file of `--config`, which overrides the default. A
file's keys are the flags' names without the dashes in front (`lr-warmup-iters` or
`lr_warmup_iters`). Whatever is wrong is one line, a `ConfigError`, before anything has been built.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from megatron.core.log import printable
from megatron.core.options import ConfigError, Field, options_of
from megatron.training.config import RunConfig
from megatron.training.settings_file import Setting, read_settings

C = TypeVar("C")
_SHOWN_KEY = 80  # characters of a key or a number in a message
_IS_OCTAL = re.compile(r"[-+]?0[0-9_]+")


@dataclass(frozen=True)
class _Switch:
    """The field that a YAML key or a flag sets, and whether it sets the opposite
    (`no-load-optim`).
    """

    field: Field
    is_negated: bool = False


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are `ConfigError`s."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_config(argv: Sequence[str], world_size: int) -> RunConfig:
    """The resolved configuration of a run from its command line.

    Args:
        argv: the arguments, without the program's name.
        world_size: ranks in the run.

    Raises:
        ConfigError: one line that names the flag or key, what was expected and what was got.
    """
    given, unknown = build_parser().parse_known_args(list(argv))
    if unknown:
        raise ConfigError(_unknown(unknown[0], "a known flag", _switches()))

    flags = vars(given)
    path = flags.pop("config", None)

    values = {} if path is None else read_yaml(path)
    fields = {field.name: field for field in _all_fields()}
    values |= {name: fields[name].convert(value) for name, value in flags.items()}
    return build_config(values).resolve(world_size)


def build_config(values: dict[str, Any]) -> RunConfig:
    """An unresolved configuration from converted values by field name, and defaults."""
    sections = {
        name: _build_section(config_class, values)
        for name, config_class in _section_classes().items()
    }
    return RunConfig(**sections)


def section_from_values(config_class: type[C], values: dict[str, Any]) -> C:
    """One owner's config from `RunConfig.values()`, a checkpoint's for example. ConfigError as
    `build_config`.
    """
    mine = {
        field.name: field.convert(values[field.name])
        for field in options_of(config_class)
        if field.name in values
    }
    return _build_section(config_class, mine)


def read_yaml(path: str) -> dict[str, Any]:
    """The settings in a YAML file, converted, by field name. ConfigError for unusable ones."""
    switches = {flag.lstrip("-"): switch for flag, switch in _switches().items()}
    values: dict[str, Any] = {}
    for key, setting in read_settings(path).items():
        shown = printable(key, _SHOWN_KEY)
        switch = switches.get(key.replace("_", "-"))
        if switch is None:
            raise ConfigError(f"{path}: " + _unknown(shown, "a known key", list(switches)))
        if switch.field.name in values:
            expected = f"{switch.field.flag} to be set once"
            raise ConfigError(f"{path}: {shown}: expected {expected}, got it twice.")
        converted = _convert_setting(switch.field, setting)
        values[switch.field.name] = not converted if switch.is_negated else converted

    return values


def _convert_setting(field: Field, setting: Setting | list[Setting]) -> Any:
    """A setting of a YAML file as the field's type: its text is read as on the command line."""

    def plain(one: Setting) -> Any:
        if one.is_null:
            return None
        if field.scalar is int and _IS_OCTAL.fullmatch(one.text):
            got = f"{printable(one.text, _SHOWN_KEY)}, which YAML 1.1 takes for octal"
            raise ConfigError(f"{field.flag}: expected {field.expected}, got {got}.")
        return one.truth if field.scalar is bool and one.truth is not None else one.text

    return field.convert(
        [plain(one) for one in setting] if isinstance(setting, list) else plain(setting)
    )


def build_parser() -> argparse.ArgumentParser:
    """The command line: one group of flags for each owner."""
    parser = _Parser(description="Trains a GPT.", allow_abbrev=False)
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file with any of these flags",
    )
    for name, config_class in _section_classes().items():
        group = parser.add_argument_group(name)
        for field in options_of(config_class):
            _add_flags(group, field)
    return parser


def describe(config: RunConfig) -> str:
    """The effective configuration, one setting a line, by owner."""
    lines = ["effective configuration:"]
    for name, section in config.sections():
        lines.append(f"  [{name}]")
        for field in dataclasses.fields(section):
            lines.append(
                f"    {field.name} {'.' * max(2, 44 - len(field.name))} "
                f"{getattr(section, field.name)}"
            )
    return "\n".join(lines)


def _add_flags(group: argparse._ArgumentGroup, field: Field) -> None:
    default = "" if field.default in (None, dataclasses.MISSING) else f" (default: {field.default})"
    text = (field.option.help + default).replace("%", "%%")
    if field.scalar is bool:
        for flag, value, line in (
            (field.flag, True, text),
            (field.off_flag, False, "the opposite"),
        ):
            group.add_argument(
                flag,
                dest=field.name,
                action="store_const",
                const=value,
                default=argparse.SUPPRESS,
                help=line,
            )
        return

    group.add_argument(
        field.flag,
        dest=field.name,
        nargs="+" if field.is_list else None,
        metavar=field.scalar.__name__.upper(),
        default=argparse.SUPPRESS,
        help=text,
    )


def _build_section(config_class: type[C], values: dict[str, Any]) -> C:
    mine = {}
    for field in options_of(config_class):
        if field.name in values:
            mine[field.name] = values[field.name]
        elif field.default is dataclasses.MISSING:
            raise ConfigError(
                f"{field.flag}: expected {field.expected}, got none; it has no default."
            )
    return config_class(**mine)


def _section_classes() -> dict[str, type[Any]]:
    hints = typing.get_type_hints(RunConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(RunConfig)}


def _all_fields() -> list[Field]:
    return [
        field for config_class in _section_classes().values() for field in options_of(config_class)
    ]


def _switches() -> dict[str, _Switch]:
    """Every flag and every bool's opposite, by name; and field names that differ from the flag."""
    switches: dict[str, _Switch] = {}
    for field in _all_fields():
        switches[field.flag] = _Switch(field)
        switches.setdefault("--" + field.name.replace("_", "-"), _Switch(field))
        if field.scalar is bool:
            switches[field.off_flag] = _Switch(field, is_negated=True)
    return switches


def _unknown(name: str, expected: str, known: Sequence[str] | dict[str, _Switch]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"{name}: expected {expected}, got one that does not exist.{hint}"
