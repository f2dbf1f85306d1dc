"""Options: dataclass fields with their flag, their help line and what values they admit.

A config class lives with the code that reads it. It is a frozen dataclass whose fields are made
with `option(...)`; `check_options(self)` in its `__post_init__` checks every value against the
field's type, choices and bounds, and against the other options that it needs. The command line and
YAML (`megatron/training/arguments.py`) read the same metadata.

    @dataclass(frozen=True)
    class OptimizerConfig:
        lr: float = option(1e-3, "peak learning rate", more_than=0.0)
        offload: bool = option(False, "keep the states in host memory")
        offload_fraction: float = option(1.0, "share of them", no_effect_unless="offload")

        def __post_init__(self) -> None:
            check_options(self)

    OptimizerConfig(lr=-1.0)               # --lr: expected a number > 0.0, got -1.0.
    OptimizerConfig(offload_fraction=0.5)  # --offload-fraction: expected --offload, got 0.5.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict

from megatron.core.log import printable

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The most that a timeout may be. Waits count nanoseconds in 63 bits, and add them to the present.
YEAR_SECONDS = 365 * 24 * 60 * 60.0

_METADATA_KEY = "megatron.option"
_MOST_REPORTED = 4000  # characters of a line of an error's report
_MAX_BITS = 63  # of an integer, which becomes an int64 somewhere

# Types of a field. Lists of values are tuples, so that configs stay hashable.
_SCALARS: dict[type, str] = {
    int: "an integer",
    float: "a number",
    str: "a non-empty string",
    bool: "true or false",
}


class _Shown(reprlib.Repr):
    """A bounded `repr`: the beginning of long texts and lists, a few levels deep."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = 400
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = 8

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002  reprlib's signature
        # Python does not write integers of thousands of digits.
        return repr(x) if x.bit_length() <= 256 else f"an integer of {x.bit_length()} bits"


_SHOWN = _Shown()


def shown(value: object) -> str:
    """A value as a message shows it: its `repr`, bounded, even of values nested without end."""
    return _SHOWN.repr(value)


class ConfigError(ValueError):
    """A configuration that cannot be honoured. One line: "FLAG: expected X, got Y."."""

    @property
    def lines(self) -> tuple[str, ...]:
        """The message, a line for each thing that is wrong."""
        return (str(self),)

    def report(self) -> str:
        """The message for a terminal, harmless to it."""
        return printable(str(self), _MOST_REPORTED)


class ConfigErrors(ConfigError):  # noqa: N818  a plural
    """Everything that is wrong with a configuration, so that its user need not find it out one
    by one. The message is still one line.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__(f"{len(lines)} settings cannot be used: {' '.join(lines)}")
        self._lines = tuple(lines)

    @property
    def lines(self) -> tuple[str, ...]:
        return self._lines

    def heading(self) -> str:
        """The first line of the report."""
        return f"{len(self._lines)} setting{'s' * (len(self._lines) > 1)} cannot be used:"

    def report(self) -> str:
        """The message for a terminal: a line for each thing that is wrong."""
        lines = (printable(line, _MOST_REPORTED) for line in self._lines)
        return "\n  ".join((self.heading(), *lines))


@dataclass(frozen=True)
class Option:
    """What `option(...)` records about a dataclass field.

    Attributes:
        help: one line for `--help`.
        flag: the flag's name where it is not `--field-name`.
        off_flag: for a bool, the flag that sets it to false where it is not `--no-field-name`.
        choices: the only values admitted.
        at_least, more_than, at_most, less_than: bounds of a number.
        ceiling: a bound far beyond any use, named only where it is exceeded.
        noun: the kind of value, for messages of the options that require this one.
        metavar: the value's name in `--help`, which a text without choices must have.
        requires: options of which one must have a value where this one is given: is not the
            default.
        no_effect_unless: the values that other options must have where this one is given, since it
            has no effect otherwise.
        is_pattern: whether the text may be a list in Python's syntax; one of YAML becomes text.
        overridden_by: the switch with which a resumed run takes the checkpoint's value instead.
        may_change: whether a resumed run may have another value without a line in the log, as it
            does not change any result.
        bare: the flag's meaning without a value; None: it needs one.
    """

    help: str
    flag: str | None = None
    off_flag: str | None = None
    choices: tuple[Any, ...] | None = None
    at_least: float | None = None
    more_than: float | None = None
    at_most: float | None = None
    less_than: float | None = None
    ceiling: float | None = None
    noun: str | None = None
    metavar: str | None = None
    requires: tuple[str, ...] = ()
    no_effect_unless: tuple[tuple[str, Any], ...] = ()
    is_pattern: bool = False
    overridden_by: str | None = None
    may_change: bool = False
    bare: Any = None


class _Attributes(TypedDict, total=False):
    """The attributes of `Option` that `option` passes on as they are."""

    flag: str | None
    off_flag: str | None
    at_least: float | None
    more_than: float | None
    at_most: float | None
    less_than: float | None
    ceiling: float | None
    noun: str | None
    metavar: str | None
    is_pattern: bool
    overridden_by: str | None
    may_change: bool
    bare: Any


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    choices: Sequence[Any] | None = None,
    requires: str | tuple[str, ...] = (),
    no_effect_unless: str | Mapping[str, Any] = MappingProxyType({}),
    **others: Unpack[_Attributes],
) -> Any:
    """Returns a dataclass field that becomes a flag.

    Args:
        default: the field's default; a field without one must be given by the user.
        requires, no_effect_unless: see `Option`; one name is the option that must have a value, or
            the switch that must be on. They may be options of other config classes: see
            `check_options`, `check_needs`.
        others: further attributes of `Option`.
    """
    if isinstance(no_effect_unless, str):
        no_effect_unless = {no_effect_unless: True}
    described = Option(
        help,
        choices=None if choices is None else tuple(choices),
        requires=(requires,) if isinstance(requires, str) else requires,
        no_effect_unless=tuple(no_effect_unless.items()),
        **others,
    )
    return dataclasses.field(default=default, metadata={_METADATA_KEY: described})


@dataclass(frozen=True)
class Field:
    """One option of a config class, resolved: its name, type, default and description."""

    name: str
    scalar: type  # int, float, str or bool
    is_optional: bool
    is_list: bool
    words: tuple[str, ...]  # admitted besides numbers
    default: Any  # dataclasses.MISSING if the user must give it
    option: Option

    @property
    def flag(self) -> str:
        return self.option.flag or "--" + self.name.replace("_", "-")

    @property
    def off_flag(self) -> str:
        return self.option.off_flag or "--no-" + self.name.replace("_", "-")

    def flag_for(self, value: Any) -> str:
        """The flag that sets this value: for a bool that is false, the one that turns it off."""
        return self.off_flag if value is False else self.flag

    @property
    def metavar(self) -> str:
        """The values this field admits, as `--help` shows them next to the flag."""
        if self.option.choices is not None:
            return "{%s}" % ",".join(map(str, self.option.choices))  # noqa: UP031  braces
        if self.option.is_pattern:
            return "N|LIST"
        return self.option.metavar or "|".join((self.scalar.__name__.upper(), *self.words))

    @property
    def expected(self) -> str:
        """The values this field admits, in words."""
        if self.option.choices is not None:
            what = "one of " + ", ".join(str(choice) for choice in self.option.choices)
        else:
            limits = " and ".join(f"{sign} {bound}" for sign, _, bound in self._bounds())
            what = f"{_SCALARS[self.scalar]} {limits}".rstrip()
            what = ", or ".join((what, *self.words))
        return f"a list, each {what}" if self.is_list else what

    def error(self, got: Any) -> ConfigError:
        return ConfigError(f"{self.flag}: expected {self.expected}, got {shown(got)}.")

    def convert(self, value: Any) -> Any:
        """`value`, as a command line or a YAML file gives it, in this field's type.

        Raises:
            ConfigError: if it is not of this type.
        """
        if value is None:
            if not self.is_optional:
                raise self.error(None)
            return None

        if self.is_list:
            if isinstance(value, str):
                value = value.split()
            items = value if isinstance(value, (list, tuple)) else [value]
            return tuple(self._convert_scalar(one) for item in items for one in self._split(item))
        if self.option.is_pattern and isinstance(value, (list, tuple)):
            # Of YAML, which may nest values without end: no other items are written out.
            if not all(isinstance(item, (int, str)) for item in value):
                raise self.error(value)
            value = f"[{','.join(map(str, value))}]"
        return self._convert_scalar(value)

    def _split(self, item: Any) -> list[Any]:
        """The values in an item of a list: numbers may have commas between them and parentheses
        around them, as in "(127,0)".
        """
        if isinstance(item, str) and self.scalar in (int, float):
            is_enclosed = item.startswith("(") and item.endswith(")")
            return (item[1:-1] if is_enclosed else item).split(",")
        return [item]

    def _convert_scalar(self, value: Any) -> Any:
        if value in self.words:
            return value
        is_bool = isinstance(value, bool)
        if isinstance(value, self.scalar) and is_bool == (self.scalar is bool):
            return value
        try:
            if self.scalar is str and isinstance(value, (int, float)) and not is_bool:
                return str(value)
            if self.scalar is float and isinstance(value, int) and not is_bool:
                return float(value)
            if self.scalar is bool and isinstance(value, str):
                return {"true": True, "false": False}[value.lower()]
            if isinstance(value, str):
                return self.scalar(value)
        except (ValueError, KeyError, OverflowError):  # the last for hundreds of digits
            pass

        raise self.error(value)

    def check(self, value: Any) -> None:
        """ConfigError unless `value` has this field's type and is within its bounds."""
        if value is None:
            if not self.is_optional:
                raise self.error(None)
            return

        if self.is_list != isinstance(value, tuple):
            raise self.error(value)
        for item in value if self.is_list else (value,):
            self._check_scalar(item, got=value)

    def _check_scalar(self, item: Any, got: Any) -> None:
        if item in self.words:
            return
        admitted: tuple[type, ...] = (int, float) if self.scalar is float else (self.scalar,)
        if not isinstance(item, admitted) or (isinstance(item, bool) and self.scalar is not bool):
            raise self.error(got)

        rule = self.option
        if (rule.choices is not None and item not in rule.choices) or item == "":
            raise self.error(got)
        if not isinstance(item, (int, float)):
            return

        if not all(holds(item, bound) for _, holds, bound in self._bounds()) or (
            isinstance(item, float) and not math.isfinite(item)
        ):
            raise self.error(got)
        limit = None
        if rule.ceiling is not None and item > rule.ceiling:
            limit = f"and <= {rule.ceiling}"
        elif isinstance(item, int) and item.bit_length() > _MAX_BITS:
            limit = f"of at most {_MAX_BITS} bits"
        if limit is not None:
            raise ConfigError(f"{self.flag}: expected {self.expected} {limit}, got {shown(got)}.")

    def _bounds(self) -> list[tuple[str, Callable[[Any, Any], bool], float]]:
        """Sign, comparison and number of each bound."""
        rule = self.option
        bounds = (
            (">=", operator.ge, rule.at_least),
            (">", operator.gt, rule.more_than),
            ("<=", operator.le, rule.at_most),
            ("<", operator.lt, rule.less_than),
        )
        return [(sign, holds, bound) for sign, holds, bound in bounds if bound is not None]


_resolved: dict[type[Any], tuple[Field, ...]] = {}  # results of `options_of`


def options_of(config: type[Any]) -> tuple[Field, ...]:
    """The options of a config class, in the order of declaration."""
    if config not in _resolved:
        hints = typing.get_type_hints(config)
        _resolved[config] = tuple(
            Field(field.name, *_resolve(hints[field.name]), field.default, described)
            for field in dataclasses.fields(config)
            if (described := field.metadata.get(_METADATA_KEY)) is not None
        )
    return _resolved[config]


def given_options(config: Any) -> list[Field]:
    """The options of `config` (an instance) that have another value than their default."""
    return [
        field for field in options_of(type(config)) if getattr(config, field.name) != field.default
    ]


def check_options(config: Any) -> None:
    """ConfigError for the first option of `config` (an instance) whose value is not admitted, or
    that lacks another option it needs.
    """
    fields = options_of(type(config))
    for field in fields:
        field.check(getattr(config, field.name))
    own = {field.name: (field, getattr(config, field.name)) for field in fields}
    for field in given_options(config):
        _check_needs(field, own[field.name][1], own)


def check_needs(configs: Sequence[Any], granted: Collection[str] = ()) -> None:
    """ConfigError for the first option of `configs` (instances) that lacks an option of another of
    them which it needs.

    Args:
        configs: instances of the classes whose options are used together.
        granted: the names of options that count as given, since something else serves as well.
    """
    fields = [options_of(type(config)) for config in configs]
    everything = {
        field.name: (field, getattr(config, field.name))
        for config, own in zip(configs, fields, strict=True)
        for field in own
        if field.name not in granted
    }
    for config, own in zip(configs, fields, strict=True):
        names = {field.name for field in own}
        others = {name: one for name, one in everything.items() if name not in names}
        for field in given_options(config):
            _check_needs(field, getattr(config, field.name), others)


def _check_needs(field: Field, value: Any, others: Mapping[str, tuple[Field, Any]]) -> None:
    """ConfigError unless the options that a given one needs are given, too, as far as `others` (by
    name, with their values) has them.
    """
    flag = field.flag_for(value)
    needed = [others[name] for name in field.option.requires if name in others]
    if needed and all(found is None for _, found in needed):
        required, _ = needed[0]
        noun = required.option.noun or required.expected
        expect(False, required.flag, f"{noun}, since {flag} is given", None)

    for name, wanted in field.option.no_effect_unless:
        if name not in others:
            continue
        other, found = others[name]
        # None: one whose default is not resolved yet.
        if found is None or found == wanted:
            continue
        if wanted is not True:
            raise ConfigError(f"{flag}: expected {other.flag} {wanted}, got {shown(found)}.")
        got = other.off_flag if isinstance(value, bool) else value
        raise ConfigError(f"{flag}: expected {other.flag}, got {shown(got)}.")


def expect(condition: bool, flag: str, expected: str, got: Any) -> None:
    """ConfigError "FLAG: expected X, got Y." unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{flag}: expected {expected}, got {shown(got)}.")


def resolve_default(config: Any, name: str, value: Any) -> None:
    """Sets an option of a frozen config that is None to a value derived from others. For
    `__post_init__` only.
    """
    if getattr(config, name) is None:
        object.__setattr__(config, name, value)


def _resolve(hint: Any) -> tuple[type, bool, bool, tuple[str, ...]]:
    """A field's annotation -> (scalar type, may be None, is a list, texts that it admits)."""
    is_optional, words = False, list[str]()
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        given = typing.get_args(hint)
        is_optional = types.NoneType in given
        words = [word for arg in given for word in typing.get_args(arg) if _is_literal(arg)]
        (hint,) = (arg for arg in given if arg is not types.NoneType and not _is_literal(arg))

    is_list = typing.get_origin(hint) is tuple
    if is_list:
        hint = typing.get_args(hint)[0]

    if hint not in _SCALARS:
        raise TypeError(
            f"Expected an option of type {sorted(t.__name__ for t in _SCALARS)}, got {hint!r}."
        )
    return hint, is_optional, is_list, tuple(words)


def _is_literal(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Literal
