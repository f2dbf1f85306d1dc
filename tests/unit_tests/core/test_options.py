from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import pytest

from megatron.core.options import (
    ConfigError,
    Option,
    check_needs,
    check_options,
    given_options,
    option,
    options_of,
    shown,
)


@dataclass(frozen=True)
class Example:
    count: int = option(help="a number that must be given", at_least=1, at_most=9)
    rate: float = option(0.5, "a rate", more_than=0, less_than=1)
    shape: str = option("round", "a shape", choices=("round", "square"))
    paths: tuple[str, ...] | None = option(None, "some paths")
    sizes: tuple[int, ...] | None = option(None, "some numbers")
    pattern: str | None = option(None, "a list or a number", is_pattern=True)
    pace: float | Literal["auto"] = option(1.0, "a pace", at_least=0)
    is_loud: bool = option(True, "loud or not", off_flag="--quiet")
    not_an_option: int = 3

    def __post_init__(self) -> None:
        check_options(self)


FIELDS = {field.name: field for field in options_of(Example)}


def test_options_know_their_flags_and_types():
    assert list(FIELDS) == [
        "count",
        "rate",
        "shape",
        "paths",
        "sizes",
        "pattern",
        "pace",
        "is_loud",
    ]
    assert FIELDS["paths"].is_list
    assert FIELDS["paths"].is_optional
    assert (FIELDS["pace"].scalar, FIELDS["pace"].metavar) == (float, "FLOAT|auto")
    assert FIELDS["is_loud"].flag == "--is-loud"
    assert FIELDS["is_loud"].off_flag == "--quiet"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "--count: expected an integer >= 1 and <= 9, got 0."),
        ({"count": True}, "--count: expected an integer >= 1 and <= 9, got True."),
        ({"count": 2.0}, "--count: expected an integer >= 1 and <= 9, got 2.0."),
        ({"count": 2, "rate": 1.0}, "--rate: expected a number > 0 and < 1, got 1.0."),
        ({"count": 2, "rate": float("nan")}, "--rate: expected a number > 0 and < 1, got nan."),
        ({"count": 2, "pace": "slow"}, "--pace: expected a number >= 0, or auto, got 'slow'."),
        ({"count": 2, "shape": "oval"}, "--shape: expected one of round, square, got 'oval'."),
        ({"count": 2, "paths": "a"}, "--paths: expected a list, each a non-empty string, got 'a'."),
        (
            {"count": 2, "paths": ("a", "")},
            "--paths: expected a list, each a non-empty string, got ('a', '').",
        ),
        ({"count": 2, "rate": None}, "--rate: expected a number > 0 and < 1, got None."),
    ],
)
def test_a_value_that_a_field_does_not_admit_is_named_in_one_line(values, message):
    with pytest.raises(ConfigError) as error:
        Example(**values)
    assert str(error.value) == message


@pytest.mark.parametrize("count", [1, 9])
def test_a_bound_itself_is_admitted(count):
    assert Example(count=count).count == count


@pytest.mark.parametrize(
    ("name", "given", "converted"),
    [
        ("count", "3", 3),
        ("rate", "1e-4", 1e-4),
        ("rate", 0, 0.0),
        ("paths", "a b", ("a", "b")),
        ("paths", [0.5, "a"], ("0.5", "a")),
        ("paths", None, None),
        ("paths", ["a b", "c,d"], ("a b", "c,d")),
        ("sizes", "127,0", (127, 0)),
        ("sizes", ["(127,0)"], (127, 0)),
        ("sizes", ["-1,0"], (-1, 0)),
        ("sizes", [127, 0], (127, 0)),
        ("pattern", "[1,0]*2", "[1,0]*2"),
        ("pattern", [1, 1, 0], "[1,1,0]"),
        ("pattern", 4, "4"),
        ("pace", "auto", "auto"),
        ("pace", "2", 2.0),
        ("is_loud", "false", False),
    ],
)
def test_text_and_yaml_values_become_the_fields_type(name, given, converted):
    value = FIELDS[name].convert(given)
    assert value == converted
    assert type(value) is type(converted)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("count", "three"),
        ("count", "1.5"),
        ("is_loud", "1"),
        ("pace", "AUTO"),
        ("rate", [1]),
        ("shape", [1]),
        ("sizes", ")127,0("),
        ("sizes", "127,,0"),
    ],
)
def test_text_that_is_not_of_the_fields_type_is_rejected(name, given):
    with pytest.raises(ConfigError, match=FIELDS[name].flag):
        FIELDS[name].convert(given)


def _doubled() -> list[object]:
    """A list of a few kilobytes whose repr has 2^40 elements."""
    nested: list[object] = []
    for _ in range(40):
        nested = [nested, nested]
    return nested


BOMBS = {
    "digits": 10**5000,
    "a negative number": -(10**5000),
    "doublings": _doubled(),
    "doublings in a dict": {"a": _doubled()},
    "a long text": "x" * 10**7,
    "bytes": b"x" * 10**7,
}


@pytest.mark.parametrize("kind", list(BOMBS))
@pytest.mark.parametrize("name", list(FIELDS))
def test_a_value_without_measure_is_rejected_in_a_line_that_ends(name, kind):
    if name in ("paths", "pattern") and kind == "a long text":
        return  # which is a path, or for the option's owner to read
    with pytest.raises(ConfigError) as error:
        FIELDS[name].check(FIELDS[name].convert(BOMBS[kind]))
    assert len(str(error.value)) < 1000


def test_an_integer_is_one_that_64_bits_hold():
    unbounded = dataclasses.replace(FIELDS["count"], option=Option(help="any"))
    unbounded.check(2**63 - 1)
    for value in (2**63, 10**400):
        with pytest.raises(
            ConfigError, match="--count: expected an integer of at most 63 bits, got"
        ):
            unbounded.check(value)


def test_values_in_messages_are_one_line_of_bounded_length():
    assert shown("a\x1b[2J\n\u202e") == repr("a\x1b[2J\n\u202e")
    assert shown((0.5, "a", None)) == "(0.5, 'a', None)"
    assert shown(10**5000) == "an integer of 16610 bits"
    assert len(shown("x" * 10**7)) <= 400
    assert len(shown([["x" * 10**7] * 1000] * 1000)) < 30_000


@dataclass(frozen=True)
class Related:
    folder: str | None = option(None, "a place", noun="a folder")
    every: int | None = option(None, "how often", requires="folder")
    name: str | None = option(None, "of what")
    title: str | None = option(None, "its title", requires="name")
    is_fast: bool = option(False, "fast or not", requires="folder")
    mode: str = option("plain", "a mode", choices=("plain", "rich"))
    tone: str = option("low", "a tone", no_effect_unless="is_fast")
    echo: bool = option(True, "echo or not", off_flag="--quiet", no_effect_unless="is_fast")
    color: int = option(0, "a color", no_effect_unless={"mode": "rich", "is_fast": True})
    kind: str | None = option(None, "filled in later")
    depth: int = option(1, "a depth", no_effect_unless={"kind": "deep"})
    elsewhere: int = option(1, "needs another class", requires="x", no_effect_unless="y")

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"every": 3}, "--folder: expected a folder, since --every is given, got None."),
        ({"is_fast": True}, "--folder: expected a folder, since --is-fast is given, got None."),
        ({"title": "a"}, "--name: expected a non-empty string, since --title is given, got None."),
        ({"tone": "high"}, "--tone: expected --is-fast, got 'high'."),
        ({"echo": False}, "--quiet: expected --is-fast, got '--no-is-fast'."),
        ({"color": 2}, "--color: expected --mode rich, got 'plain'."),
        ({"color": 2, "mode": "rich"}, "--color: expected --is-fast, got 2."),
        ({"depth": 2, "kind": "flat"}, "--depth: expected --kind deep, got 'flat'."),
        # Values that are never admitted come first.
        ({"every": 3, "mode": "odd"}, "--mode: expected one of plain, rich, got 'odd'."),
    ],
)
def test_an_option_without_its_requirement_is_an_error_of_one_line(values, message):
    with pytest.raises(ConfigError) as error:
        Related(**values)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"folder": "a", "every": 3, "is_fast": True, "tone": "high", "echo": False},
        {"folder": "a", "is_fast": True, "mode": "rich", "color": 2},
        {"every": None, "tone": "low", "echo": True},  # the defaults have no needs
        {"depth": 2},  # not known yet
        {"kind": "deep", "depth": 2},
        {"elsewhere": 2},
    ],
)
def test_an_option_with_its_requirement_is_accepted(values):
    names = [field.name for field in given_options(Related(**values))]
    assert names == [name for name in values if values[name] != getattr(Related(), name)]


@dataclass(frozen=True)
class Neighbour:
    x: str | None = option(None, "a folder", noun="a folder")
    y: bool = option(False, "a switch")


@pytest.mark.parametrize(
    ("neighbour", "message"),
    [
        (Neighbour(), "--x: expected a folder, since --elsewhere is given, got None."),
        (Neighbour(x="here"), "--elsewhere: expected --y, got 2."),
        (Neighbour(x="here", y=True), None),
    ],
)
def test_requirements_on_another_class_are_checked_where_both_are_known(neighbour, message):
    related = Related(elsewhere=2)
    if message is None:
        check_needs([related, neighbour])
        return
    with pytest.raises(ConfigError) as caught:
        check_needs([neighbour, related])
    assert str(caught.value) == message
    check_needs([neighbour, Related()])


def test_granted_requirements_need_not_be_given():
    check_needs([Related(elsewhere=2), Neighbour(y=True)], granted=["x"])
