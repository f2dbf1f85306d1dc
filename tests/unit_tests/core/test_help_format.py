"""The help of programs that use `ProgramParser`, and of torchrun's parser with its formatter."""

from __future__ import annotations

import argparse

import pytest

from megatron.core.help_format import HelpFormatter, OnOffAction, ProgramParser


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


def test_the_usage_is_one_line_with_what_must_be_given() -> None:
    usage = parser_of_everything().format_usage()
    assert usage.rstrip("\n") == "usage: try [options] --target FILE SOURCE [SOURCE ...]"


def test_a_usage_without_space_leaves_the_flags_to_the_list() -> None:
    parser = ProgramParser(prog="try")
    for name in ("one", "two", "three"):
        flag = f"--a-long-name-of-{name}"
        parser.add_argument(flag, metavar="VALUE", required=True, help="number")
    text = parser.format_help()
    assert text.startswith("usage: try [options]\n\n")
    assert text.count("(required)") == 3


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


def test_a_wide_terminal_gets_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    parser = ProgramParser(prog="try")
    parser.add_argument("--x", metavar="X", help="word " * 100)
    assert 90 < max(map(len, parser.format_help().splitlines())) <= 100


def test_commands_of_a_program_have_the_same_help() -> None:
    parser = ProgramParser(prog="try")
    command = parser.add_subparsers(metavar="COMMAND").add_parser("go")
    command.add_argument("--speed", type=float, default=0.5, help="in m/s")
    assert "--speed FLOAT  in m/s (default: 0.5)" in command.format_help()
    assert command.format_usage() == "usage: try go [options]\n"


def test_the_second_spelling_of_a_flag_of_another_parser_is_left_out() -> None:
    parser = argparse.ArgumentParser(prog="try", formatter_class=HelpFormatter)
    parser.add_argument("--max-restarts", "--max_restarts", type=int, default=0, help="how many")
    assert "--max-restarts INT  how many (default: 0)" in parser.format_help()
    assert "max_restarts" not in parser.format_help()


def test_flags_turn_a_setting_on_and_off() -> None:
    given = ["x", "--target", "y"]
    parse = parser_of_everything().parse_args
    assert parse([*given, "--fast"]).fast is True
    assert parse([*given, "--fast", "--no-fast"]).fast is False
