"""The help of programs that use `ProgramParser`, and of torchrun with its formatter."""

from __future__ import annotations

import pytest

from megatron.core.help_format import OnOffAction, ProgramParser


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def parser_of_everything() -> ProgramParser:
    parser = ProgramParser(prog="try", description="First line.\n    second line, as it is")
    parser.add_argument("source", metavar="SOURCE", nargs="+", help="what to read")
    parser.add_argument("--target", metavar="FILE", required=True, help="what to write")
    parser.add_argument("--depth", type=int, default=3, help="levels")
    parser.add_argument("--color", choices=("red", "green"), default="red", help="of the output")
    parser.add_argument("--name", default=None, metavar="NAME", help="of it (default: SOURCE's)")
    parser.add_argument("--fast", "--no-fast", action=OnOffAction, default=False, help="hurry")
    parser.add_argument(
        "--long", action="store_true", help="a text that ends near --a-flag-with-many-hyphens-in-it"
    )
    return parser


def test_values_and_defaults_are_shown_once_and_flags_are_not_broken() -> None:
    lines = parser_of_everything().format_help().splitlines()
    text = " ".join(" ".join(lines).split())
    assert "--depth INT levels (default: 3)" in text
    assert "--color {red,green} of the output (default: red)" in text
    assert "--name NAME of it (default: SOURCE's)" in text
    assert "--fast, --no-fast hurry" in text
    assert "--target FILE what to write (required)" in text
    assert any("--a-flag-with-many-hyphens-in-it" in line for line in lines)
    assert "    second line, as it is" in lines
    assert max(map(len, lines)) <= 80


def test_flags_turn_a_setting_on_and_off() -> None:
    given = ["x", "--target", "y"]
    parse = parser_of_everything().parse_args
    assert parse([*given, "--fast"]).fast is True
    assert parse([*given, "--fast", "--no-fast"]).fast is False
