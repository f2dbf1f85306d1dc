"""Reads prepared files in a separate process, and returns the outcome.

    worker = Worker(folder)
    files = worker.make("run")                                # intact ones, as bytes by name
    outcome = worker.read("run", {**files, "x": Place.FIFO})  # in a new directory

A process that dies or does not come back is an outcome, too; the next example gets a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parent.parent.parent

MAX_SECONDS = 120.0  # of one example, on a machine that does other things as well
MAX_BYTES = 512 << 20  # of address space that one example may take
GRACE_SECONDS = 60.0  # for a process that raises TooLateError and responds
_START_SECONDS = 300.0  # importing torch on a busy machine, and making the files
_MOST_MESSAGE = 20_000  # characters

# A moment long past: part of the name of a sample index.
_MOMENT = 1_700_000_000


class Place(Enum):
    """A replacement of a file."""

    MISSING = "no file"
    NOTHING = "nothing"
    FIFO = "a FIFO"
    FOLDER = "a folder"
    DEVICE = "a link to a device"
    LOOP = "a link to itself"
    TERABYTE = "a sparse terabyte"


Files: TypeAlias = Mapping[str, bytes | Place]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one example.

    Attributes:
        value: the loaded value; None if an error was raised.
        error: the kind of error; None for a value.
        is_expected: whether it is an error that the target may raise.
        message, causes, where: of the error.
        events: forbidden system calls of the process.
        warnings, out, err: log and output.
        is_touched: whether the state that a load changes has changed.
        death: how the process ended, if it did.
    """

    value: Any = None
    error: str | None = None
    is_expected: bool = False
    message: str = ""
    causes: list[str] = field(default_factory=list)
    where: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    out: str = ""
    err: str = ""
    is_touched: bool = False
    seconds: float = 0.0
    nbytes: int = 0  # of memory, at most
    death: str | None = None

    def problems(self) -> list[str]:
        """Effects that no file may have, with any content."""
        found = [f"the process did {event}" for event in self.events]
        if self.death is not None:
            found.append(self.death)
        if self.error is not None and not self.is_expected:
            found.append(f"it raised {self.error}: {self.message[:2000]}")

        # A load among ranks makes a CheckpointError of whatever was not foreseen.
        if self.causes and self.message.startswith(f"{self.causes[0]}: "):
            found.append(f"it did not foresee {self.message[:2000]}")
        texts = [self.message, *self.warnings, self.err]
        for sign in (
            "MemoryError",
            "can't allocate memory",  # of torch; mapping a file may fail
            "RecursionError",
            "maximum recursion",
            "Traceback",
        ):
            found += [f"it said {text[:2000]!r}" for text in texts if sign in text]

        for text in (self.message, *self.warnings, *self.err.splitlines(), *self.out.splitlines()):
            if not text.isprintable() or len(text) > _MOST_MESSAGE:
                found.append(f"the message is not one line: {text[:2000]!r}")
        return found

    def __str__(self) -> str:
        said = f"{self.error}: {self.message[:500]}" if self.error else f"{self.value}"
        where = "".join(f"\n    {place}" for place in self.where)
        return f"{said} ({self.seconds:.1f} s, {self.nbytes >> 20} MiB){where}"


class Worker:
    """The process, and the directory that it reads in."""

    def __init__(
        self,
        folder: Path,
        module: str = "tests.fuzzing.targets",
        *,
        seconds: float = MAX_SECONDS,
        nbytes: int = MAX_BYTES,
    ) -> None:
        self._folder = folder
        self._module = module
        self._seconds = seconds
        self._nbytes = nbytes
        self.grace_seconds = GRACE_SECONDS
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._intact: dict[str, dict[str, bytes]] = {}  # by target
        self._values: dict[str, Any] = {}  # the value of each
        self._warm: set[str] = set()  # targets that this process has read once

    def make(self, target: str) -> dict[str, bytes]:
        """The intact files of a target, by their paths in its directory."""
        if target not in self._intact:
            folder = self._emptied(target)
            request = {"action": "make", "target": target, "folder": str(folder)}
            death, _ = self._ask(request, _START_SECONDS)
            assert death is None, f"{death}\n{self._said()}"
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
            found = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
            self._intact[target] = found
        return dict(self._intact[target])

    def value(self, target: str) -> Any:
        """The value loaded from the intact files."""
        self._warm_up(target)
        return self._values[target]

    def read(self, target: str, files: Files) -> Outcome:
        """Has the process read a directory of these files."""
        self._warm_up(target)
        return self._read(target, files, "read")

    def _warm_up(self, target: str) -> None:
        """Has a new process read the intact files, twice, so that it imports all it needs."""
        if target in self._warm:
            return
        files = self.make(target)
        outcomes = [self._read(target, files, "warm") for _ in range(2)]
        for outcome in outcomes:
            assert outcome.death is None, outcome
            assert outcome.error is None, outcome
            assert self._values.setdefault(target, outcome.value) == outcome.value, outcome
        self._warm.add(target)

    def _read(self, target: str, files: Files, action: str) -> Outcome:
        folder = self._emptied(target)
        write_files(folder, files)
        limits = {"seconds": self._seconds, "nbytes": self._nbytes}
        # The process has the same limit, but a library that loops does not hear of it.
        request = {"action": action, "target": target, "folder": str(folder), **limits}
        death, answer = self._ask(request, self._seconds + self.grace_seconds)
        if death is not None:
            return Outcome(death=f"{death} {self._said()}")
        return Outcome(**answer)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            assert self._pipe is not None, "there are both or neither"
            self._pipe.close()
            self._process.kill()
            self._process.wait()
            self._process = self._pipe = None
            self._warm.clear()

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._pipe, theirs = Pipe()
        # One arena of malloc, because each arena reserves address space.
        environment = {
            **os.environ,
            "MALLOC_ARENA_MAX": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzzing.worker", str(theirs.fileno()), self._module],
                cwd=ROOT,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        theirs.close()

    def _ask(self, request: dict[str, Any], seconds: float) -> tuple[str | None, dict[str, Any]]:
        """(how the process died, its response)"""
        if self._process is None:
            self._start()
            seconds += _START_SECONDS
        assert self._pipe is not None, "there are both or neither"
        try:
            self._pipe.send_bytes(json.dumps(request).encode())
            if not self._pipe.poll(seconds):
                self.close()
                return f"it did not come back within {seconds} seconds", {}
            return None, json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            assert self._process is not None, "as above"
            code = self._process.wait()
            self.close()
            with contextlib.suppress(ValueError):
                return f"it was killed by {signal.Signals(-code).name}", {}
            return f"it ended with exit code {code}", {}

    @property
    def _log(self) -> Path:
        return self._folder / "worker.log"

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def _emptied(self, target: str) -> Path:
        folder = self._folder / target.replace(" ", "_")
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        return folder


def write_files(folder: Path, files: Files) -> None:
    """Makes them all, each with the same time of its last change."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            _PLACES[content](path)
        if content is not Place.MISSING:
            os.utime(path, (_MOMENT, _MOMENT), follow_symlinks=False)


def _terabyte(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(1 << 40)


_PLACES = {
    Place.MISSING: lambda _: None,
    Place.NOTHING: Path.touch,
    Place.FIFO: os.mkfifo,
    Place.FOLDER: Path.mkdir,
    Place.DEVICE: lambda path: path.symlink_to("/dev/zero"),
    Place.LOOP: lambda path: path.symlink_to(path.name),
    Place.TERABYTE: _terabyte,
}
