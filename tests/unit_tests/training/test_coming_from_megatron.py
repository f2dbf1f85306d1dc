"""docs/coming-from-megatron.md: its tables are the code's, its commands are
understood.

`python -m tests.unit_tests.training.test_coming_from_megatron` prints the tables as they should be.
"""

from __future__ import annotations

import pytest

from megatron.core.options import ConfigError
from megatron.training.arguments import parse_command_line
from megatron.training.flag_answers import AnswerRow, Ruling, answer_rows
from tests.helpers.doc_commands import DOCS, commands_in, section_of


def page() -> str:
    return (DOCS / "coming-from-megatron.md").read_text()


def tables() -> str:
    return section_of("coming-from-megatron.md", "Every flag that is not here")


def line_of(row: AnswerRow) -> str:
    """The line of a table that shows a row."""
    flags = " ".join(f"`{flag}`" for flag in row.flags)
    values = " ".join(f"`{value}`" for value in row.values)
    flags = f"{flags} with {values}" if values else flags
    unless = f", unless `{row.unless}` is given" if row.unless else ""
    middle = f" | `{row.use}`" if row.use else ""
    return f"| {flags}{unless}{middle} | {row.why} |"


def lines_of(ruling: Ruling) -> list[str]:
    return [line_of(row) for row in answer_rows() if row.ruling is ruling]


@pytest.mark.parametrize("ruling", Ruling)
def test_the_tables_are_those_of_the_code(ruling):
    rows = [line for line in tables().splitlines() if line.startswith("| `--")]
    shown = [row for row in rows if row in lines_of(ruling)]
    assert shown == lines_of(ruling)
    assert len(rows) == len(answer_rows()), "there are no other rows"


def test_the_commands_are_understood():
    understood = commands_in(page())
    assert len(understood) >= 2
    without_effect, errors = [], []
    for ranks, argv in understood:
        try:
            without_effect += parse_command_line(argv, ranks).without_effect
        except ConfigError as error:
            errors.append(error.report())
    assert without_effect, "a command shows flags that change nothing here"

    # One command shows the message, which stands below it.
    (report,) = errors
    assert f"```\npretrain_gpt.py: {report}\n```" in page()


if __name__ == "__main__":
    for ruling in Ruling:
        print(f"{ruling.value}:", *lines_of(ruling), sep="\n")
