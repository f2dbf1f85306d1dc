"""How `--help` of every program looks: an argparse formatter, and pairs of flags, on and off.

    usage: python -m megatron_hybrid timeline [options] PATH [PATH ...]

    options:
      --rank INT            rank to show (default: the lowest one recorded)
      --theme {light,dark}  colors of the picture (default: light)

The usage is one line with what must be given. No line is longer than 100 columns, no flag is broken
at its hyphens, and defaults are shown. This module does not import torch.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

MOST_COLUMNS = 100


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One line of usage, the values of each flag, its default. Descriptions keep their lines."""

    def __init__(self, prog: str) -> None:
        columns = min(shutil.get_terminal_size().columns, MOST_COLUMNS)
        super().__init__(prog, max_help_position=26, width=columns)

    def _format_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None,
    ) -> str:
        """One line: the program, `[options]`, and what must be given if there is space for it."""
        if usage is not None:
            return super()._format_usage(usage, actions, groups, prefix)

        actions = list(actions)
        required = [
            self._format_action_invocation(action)
            for action in actions
            if action.option_strings and action.required
        ]
        places = [
            self._format_args(action, self._get_default_metavar_for_positional(action))
            for action in actions
            if not action.option_strings
        ]
        start = f"{'usage: ' if prefix is None else prefix}{self._prog} [options]"
        line = " ".join((start, *required, *places))
        if len(line) > self._width:
            line = " ".join((start, *places))
        return f"{line}\n\n"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """All names of a flag, then its value once: `--theme {light,dark}`."""
        if not action.option_strings:
            return super()._format_action_invocation(action)

        # torchrun has each flag with hyphens and with underscores.
        names = [name for name in action.option_strings if "_" not in name] or action.option_strings
        shown = ", ".join(names)
        if action.nargs == 0:
            return shown
        kind = self._get_default_metavar_for_optional(action)
        return f"{shown} {self._format_args(action, kind)}"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        """The kind of value instead of the flag's name again."""
        if action.type is int or action.type is float:
            return action.type.__name__.upper()
        return str(super()._get_default_metavar_for_optional(action))

    def _get_help_string(self, action: argparse.Action) -> str | None:
        """The help line, with the default, unless it has one already."""
        line = action.help
        if line and action.option_strings and action.required:
            return f"{line} (required)"
        if not line or not action.option_strings or action.nargs == 0 or "default" in line:
            return line
        if action.default in (None, "", argparse.SUPPRESS) or action.default == []:
            return line
        return f"{line} (default: %(default)s)"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class ProgramParser(argparse.ArgumentParser):
    """A parser, and its parsers of commands, with this help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **settings})

    def add_subparsers(  # type: ignore[override]
        self, **settings: Any
    ) -> argparse._SubParsersAction[ProgramParser]:
        # argparse would start the usage of a command with all of this one, `[options]` included.
        return super().add_subparsers(**{"prog": self.prog, **settings})


class OnOffAction(argparse.Action):
    """A setting with two flags: the first turns it on, the second off."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **settings)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        del parser, values
        setattr(namespace, self.dest, option_string == self.option_strings[0])
