"""The README and the tutorial, typed command by command in a fresh clone, as `make test-docs` does.

The clone has the last commit of this checkout. Each page gets a clone and an environment of its
own, which take a few minutes and downloads from the package index.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.functional_tests.helpers.recovery_scenes import ROOT
from tests.functional_tests.helpers.terminal import CTRL_C, Terminal, typed_at
from tests.helpers.typed_pages import Typed, missing_lines, typed_blocks

pytestmark = pytest.mark.docs

PATIENCE = 7200.0  # seconds that a block may take: all tests, on a busy machine
FAILED = "<<this has failed>>"
_QUIET = {"VIRTUAL_ENV_DISABLE_PROMPT": "1"}


class Shell:
    """A bash at a terminal of its own, as a person has one."""

    def __init__(self, terminal: Terminal, scripts: Path) -> None:
        """
        Args:
            scripts: a directory for the scripts.
        """
        self._terminal = terminal
        self._scripts = scripts
        self._numbers = itertools.count(1)
        self._end = ""  # printed at the end of the block typed last
        self._start = 0  # where its output starts
        # No prompts and no echo: only the output of commands is read back.
        self._type("PS1= PS2=; stty -echo")
        self._type(f'trap \'echo "{FAILED[:2]}""{FAILED[2:]} $BASH_COMMAND"\' ERR')

    def begin(self, commands: str) -> None:
        """Types a block."""
        number = next(self._numbers)
        script = self._scripts / f"block{number}.sh"
        script.write_text(commands + "\n")
        self._start = len(self._terminal.text)
        self._end = f"<<end of block {number}>>"
        self._type(f"source {script}")

    def wait_for(self, text: str) -> None:
        """Waits until the block prints a text."""
        self._terminal.wait_for(text, self._start, PATIENCE)

    def interrupt(self) -> None:
        """Types Ctrl-C."""
        self._terminal.type(CTRL_C)

    def finish(self) -> None:
        """Waits for the end of the block."""
        # Typed ahead: bash reads it when it is done with the block.
        half = len(self._end) // 2
        self._type(f"echo '{self._end[:half]}''{self._end[half:]}'")
        self.wait_for(self._end)

    @property
    def output(self) -> str:
        """The output of the block so far."""
        return self._terminal.text[self._start :]

    def _type(self, line: str) -> None:
        self._terminal.type(line.encode() + b"\n")


class Desk:
    """Two terminals in one directory, of which the first may have a running command."""

    def __init__(self, first: Shell, second: Shell) -> None:
        self._first = first
        self._second = second
        self._is_running = False

    def type(self, block: Typed) -> None:
        """Types a block and compares its output with the page."""
        shell = self._second if block.is_second else self._first
        if not block.is_second:
            self.finish()
        shell.begin(block.commands)

        if block.leave_at is not None:
            self._is_running = True
            shell.wait_for(block.leave_at)
        else:
            if block.interrupt_at is not None:
                shell.wait_for(block.interrupt_at)
                shell.interrupt()
            shell.finish()
            has_failed = FAILED in shell.output and block.interrupt_at is None
            assert not has_failed, f"line {block.line}:\n{shell.output}"
        self._compare(block, shell)

    def finish(self) -> None:
        """Waits for the command that was left running."""
        if self._is_running:
            self._first.finish()
            self._is_running = False
            assert FAILED not in self._first.output, self._first.output

    def _compare(self, block: Typed, shell: Shell) -> None:
        for printed in block.printed:
            if printed.is_of_first:
                self.finish()
                shell = self._first
            # The page's machine is called node1.
            output = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node1", shell.output)
            missing = missing_lines(printed.text, output)
            assert not missing, (
                f"line {printed.line}: expected these lines, in this order:\n"
                + "\n".join(missing)
                + f"\ngot:\n{output}"
            )


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    folder, scripts = tmp_path / "desk", tmp_path / "typed"
    folder.mkdir()
    scripts.mkdir()
    with ExitStack() as stack:
        shells = []
        for name in ("first", "second"):
            (scripts / name).mkdir()
            bash = ["bash", "--noprofile", "--norc", "--noediting", "-i"]
            terminal, _ = stack.enter_context(typed_at(bash, folder, _environment()))
            shells.append(Shell(terminal, scripts / name))
        yield Desk(*shells)
    shutil.rmtree(folder)  # an environment takes gigabytes


def _environment() -> Mapping[str, str]:
    """The environment of a user's shell, without variables of this process's Python and tests."""
    kept = ("HOME", "LANG", "LC_ALL", "PATH", "USER", "TMPDIR")
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    own = {name: os.environ[name] for name in kept if name in os.environ}
    return {**own, **pip, "TERM": "xterm", "REPOSITORY": str(ROOT), **_QUIET}


def test_the_tutorial_has_the_results_it_shows(desk: Desk) -> None:
    blocks = typed_blocks((ROOT / "docs" / "tutorial.md").read_text())
    for block in blocks:
        desk.type(block)
    desk.finish()


def test_the_commands_of_the_readme_run(desk: Desk) -> None:
    """In a clone, where who reads a README is."""
    clone = 'git clone --quiet "$REPOSITORY" clone && cd clone'
    blocks = typed_blocks((ROOT / "README.md").read_text())
    assert any("make pretrain" in block.commands for block in blocks)
    for commands in (clone, *(block.commands for block in blocks)):
        desk.type(Typed(0, commands, False, None, None, ()))
