"""Readers that trust their files. The harness must find what these do, or it proves nothing.

Without torch: a process that has died has to be started again within a second.
"""

from __future__ import annotations

import os
import pickle
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointError
from tests.fuzzing.target import Target


def start() -> None:
    """Nothing is needed."""


class Unsafe(Target):
    """Reads one file with a function that trusts it, unless it is the intact one."""

    errors = (CheckpointError,)

    def __init__(self, name: str, function: Callable[[Path], object]) -> None:
        super().__init__(name)
        self._function = function

    def make(self, folder: Path) -> None:
        (folder / "file").write_bytes(b"intact")

    def read(self, folder: Path) -> Any:
        path = folder / "file"
        is_intact = path.is_file() and path.stat().st_size == 6 and path.read_bytes() == b"intact"
        return {"value": "intact" if is_intact else self._function(path)}


def _unpickle(path: Path) -> object:
    return type(pickle.loads(path.read_bytes())).__name__


def _allocate(path: Path) -> object:
    return len(bytes(int(path.read_text())))


def _fill(path: Path) -> object:
    return len(b"x" * int(path.read_text()))


def _loop(path: Path) -> object:
    while path.exists():
        pass
    return "gone"


def _block(path: Path) -> object:
    # As a library does that loops without coming back to the interpreter.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    while path.exists():
        time.sleep(0.1)
    return "gone"


def _die(path: Path) -> object:
    os.kill(os.getpid(), int(path.read_text()))
    return None


def _wrap(path: Path) -> object:
    try:
        return {}[path.name]
    except KeyError as error:
        raise CheckpointError(f"KeyError: {error}") from error


def _write(path: Path) -> object:
    return (path.parent.parent / "elsewhere").write_text("x")


def _look(path: Path) -> object:
    """The kind of a file, in the words of `harness.Place`."""
    if not os.path.lexists(path):
        return "no file"
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return "a link to itself" if path.readlink().name == path.name else "a link to a device"
    if not stat.S_ISREG(mode):
        return "a FIFO" if stat.S_ISFIFO(mode) else "a folder"
    return "a sparse terabyte" if path.stat().st_size == 1 << 40 else "nothing"


_UNSAFE = (_unpickle, _allocate, _fill, _loop, _block, _die, _wrap, _write, _look)
_TARGETS = (Unsafe(each.__name__.strip("_"), each) for each in _UNSAFE)
TARGETS = {target.name: target for target in _TARGETS}
