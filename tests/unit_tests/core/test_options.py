from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from megatron.core.options import (
    ConfigError,
    Option,
    check_options,
    expect,
    option,
    options_of,
    resolve_default,
    shown,
)


@dataclass(frozen=True)
class Example:
    count: int = option(help="a number that must be given", at_least=1, at_most=9)
    rate: float = option(0.5, "a rate", more_than=0, less_than=1)
    shape: str = option("round", "a shape", choices=("round", "square"))
    paths: tuple[str, ...] | None = option(None, "some paths")
    is_loud: bool = option(True, "loud or not", off_flag="--quiet")
    not_an_option: int = 3

    def __post_init__(self) -> None:
        check_options(self)


FIELDS = {field.name: field for field in options_of(Example)}


def test_options_know_their_flags_and_types():
    assert list(FIELDS) == ["count", "rate", "shape", "paths", "is_loud"]
    assert FIELDS["paths"].is_list
    assert FIELDS["paths"].is_optional
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


def test_values_within_bounds_are_taken():
    assert Example(count=9, rate=0.25, paths=("a", "b")).count == 9


@pytest.mark.parametrize(
    ("name", "given", "converted"),
    [
        ("count", "3", 3),
        ("rate", "1e-4", 1e-4),
        ("rate", 0, 0.0),
        ("paths", "a b", ("a", "b")),
        ("paths", [0.5, "a"], ("0.5", "a")),
        ("paths", None, None),
        ("is_loud", "false", False),
    ],
)
def test_text_and_yaml_values_become_the_fields_type(name, given, converted):
    value = FIELDS[name].convert(given)
    assert value == converted
    assert type(value) is type(converted)


@pytest.mark.parametrize(
    ("name", "given"), [("count", "three"), ("count", "1.5"), ("is_loud", "1"), ("rate", [1])]
)
def test_text_that_is_not_of_the_fields_type_is_refused(name, given):
    with pytest.raises(ConfigError, match=FIELDS[name].flag):
        FIELDS[name].convert(given)


def test_expect_speaks_in_the_same_form():
    expect(True, "--a", "anything", 1)
    with pytest.raises(ConfigError, match=r"^--a: expected b, got 'c'\.$"):
        expect(False, "--a", "b", "c")


def test_resolve_default_fills_only_what_is_open():
    @dataclass(frozen=True)
    class Derived:
        width: int = option(2, "width")
        area: int | None = option(None, "area")

    open_one, given = Derived(), Derived(area=5)
    resolve_default(open_one, "area", 4)
    resolve_default(given, "area", 4)
    assert (open_one.area, given.area) == (4, 5)


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
def test_a_value_without_measure_is_refused_in_a_line_that_ends(name, kind):
    if (name, kind) == ("paths", "a long text"):
        return  # which is a path
    with pytest.raises(ConfigError) as error:
        FIELDS[name].check(FIELDS[name].convert(BOMBS[kind]))
    assert len(str(error.value)) < 1000


def test_an_integer_is_one_that_64_bits_hold():
    unbounded = dataclasses.replace(FIELDS["count"], option=Option(help="any"))
    unbounded.check(2**63 - 1)
    for value in (2**63, 10**400):
        with pytest.raises(ConfigError, match="--count: expected an integer, got"):
            unbounded.check(value)


def test_what_is_shown_of_a_value_is_one_line_of_bounded_length():
    assert shown("a\x1b[2J\n\u202e") == repr("a\x1b[2J\n\u202e")
    assert shown((0.5, "a", None)) == "(0.5, 'a', None)"
    assert shown(10**5000) == "an integer of 16610 bits"
    assert len(shown("x" * 10**7)) <= 400
    assert len(shown([["x" * 10**7] * 1000] * 1000)) < 30_000
