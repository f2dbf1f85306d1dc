"""Ranks that die, or whose file system fails, at a moment of a save that a test chooses, in
separate processes.

    `watched`             calls a function before each operation that changes a directory
    `intercepted`         the same for all threads, and on request for operations that only read
    `Kill`, `Fault`       such functions, which act at operation n
    `PowerCut`            another, which computes the files that a power cut may leave
    `forks()`, `Child`    processes to run it in

The operations of a rank are the same in every run, so the n-th is always the same moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import importlib
import io
import os
import pathlib
import random
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import cloudpickle
import torch

from megatron.core import shared_file
from megatron.core.dist_checkpointing.save import data_file

PIECE_BYTES = 64 << 10  # of one write to a watched file: a multiple of the alignment of direct I/O
DEFAULT_TIMEOUT = 600.0  # seconds
KILLED = "killed"


# Operations


class Operation(NamedTuple):
    """One operation on a file system that is about to happen."""

    what: str  # "open" a new file, "read" an old one, "write", or the function's name in `os`
    where: str  # relative to the watched directory, without random parts
    path: Path
    target: Path | None = None  # of a rename
    write_some: Callable[[int], None] | None = None  # of a write: writes only so many bytes
    carry_out: Callable[[], object] | None = None  # of a function of `os`: calls it now

    @property
    def is_change(self) -> bool:
        """Whether other processes can observe its effect. They cannot observe a sync."""
        return self.what in ("open", "write", *_CHANGES) and self.what != "fsync"

    def __str__(self) -> str:
        return f"{self.what} {self.where}"


Before = Callable[[Operation], None]

_CHANGES = ("fsync", "mkdir", "remove", "rename", "replace", "rmdir", "unlink")
_LOOKS = ("lstat", "scandir", "stat")
_BY_LOT = [
    (re.compile(r"\.[0-9a-f]{16}\.tmp$"), ""),
    (re.compile(r"(\.[0-9a-z]+)?\.saving"), ".saving"),
    (re.compile(r"\.[0-9a-f]{16}\.deleting"), ".deleting"),
    # The order of entries in a directory depends on the file system.
    (re.compile(r"\.deleting/.*"), ".deleting/*"),
]


@contextmanager
def watched(root: Path, before: Before) -> Iterator[None]:
    """While open, `before` is called before every operation of this process below `root`.

    It may raise the error of the operation. Its own operations, in any thread, are not watched.
    """
    is_off = threading.Event()

    def guarded(operation: Operation) -> None:
        if not is_off.is_set():
            is_off.set()
            try:
                before(operation)
            finally:
                is_off.clear()

    with intercepted(root, guarded):
        yield


@contextmanager
def intercepted(root: Path, before: Before, *, looks_too: bool = False) -> Iterator[None]:
    """As `watched`, but threads may call `before` at the same time, and it must not use files below
    `root`.

    Args:
        looks_too: whether to call it before operations that only read, such as `stat`, too.
    """

    def note(what: str, path: Path, target: Path | None = None, **how: Any) -> None:
        if path.is_relative_to(root):
            before(Operation(what, _without_lot(root, target or path), path, target, **how))

    class WatchedFile(io.FileIO):
        """Written to in pieces."""

        def write(self, buffer: Any) -> int:
            piece = memoryview(buffer).cast("B")[:PIECE_BYTES]
            note(
                "write",
                Path(str(self.name)),
                write_some=lambda nbytes: super(WatchedFile, self).write(piece[:nbytes]),
            )
            return super().write(piece)

    def watched_open(
        file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any
    ) -> Any:
        if not set(mode) & set("wxa+"):
            if looks_too and not isinstance(file, int):
                note("read", Path(file))
            return opened(file, mode, buffering, *args, **options)
        note("open", Path(file))
        raw = WatchedFile(file, mode.replace("b", ""))
        return raw if buffering == 0 else io.BufferedWriter(raw)

    def watching(what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if args:  # of scandir, say, the default is the working folder
                target = Path(args[1]) if what in ("rename", "replace") else None
                path = _path(args[0], options.get("dir_fd"))
                note(what, path, target, carry_out=partial(real, *args, **options))
            return real(*args, **options)

        return call

    def watched_pwritev(descriptor: int, spans: Any, offset: int) -> int:
        piece, room = [], PIECE_BYTES
        for span in spans:
            piece.append(memoryview(span).cast("B")[:room])
            room -= piece[-1].nbytes

        def write_some(nbytes: int) -> None:
            # Direct I/O writes only whole blocks.
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            os.pwrite(descriptor, b"".join(piece)[:nbytes], offset)

        note("write", _path(descriptor, None), write_some=write_some)
        return pwritev(descriptor, piece, offset)

    def watched_creation(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            note("open", _path(path, options.get("dir_fd")))
        elif looks_too:
            note("read", _path(path, options.get("dir_fd")))
        return created(path, flags, *args, **options)

    names = (*_CHANGES, *_LOOKS) if looks_too else _CHANGES
    created, pwritev = os.open, os.pwritev
    opened, wrappers = io.open, {"open": watched_creation}
    for name in names:
        wrappers[name] = watching(name, getattr(os, name))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(io, "open", watched_open))
        stack.enter_context(mock.patch.object(os, "pwritev", watched_pwritev))
        # Addresses of memory differ between runs, and decide which tensors are written in place and
        # with direct I/O. Here all tensors are written in place, and none with direct I/O.
        stack.enter_context(mock.patch.object(data_file, "address_of", return_value=0))
        stack.enter_context(mock.patch.object(shared_file, "address_of", return_value=1))
        for name, wrapper in wrappers.items():
            stack.enter_context(mock.patch.object(os, name, wrapper))

        # Before Python 3.11, pathlib has these functions in a separate class.
        accessor = getattr(pathlib, "_NormalAccessor", None)
        for name, wrapper in {**wrappers, "open": watched_open}.items():
            if hasattr(accessor, name):
                stack.enter_context(mock.patch.object(accessor, name, staticmethod(wrapper)))
        yield


def _path(path: Any, folder: int | None) -> Path:
    if isinstance(path, int):
        return Path(f"/proc/self/fd/{path}").readlink()
    return Path(path) if folder is None else Path(f"/proc/self/fd/{folder}").readlink() / path


def _without_lot(root: Path, path: Path) -> str:
    where = str(path.relative_to(root))
    for pattern, replacement in _BY_LOT:
        where = pattern.sub(replacement, where)
    return where


# Failures


class Kill:
    """Kills this process before operation `number`, or in the middle of it if it is a write."""

    def __init__(self, number: int, num_written: int = 0) -> None:
        self._number = number
        self._num_written = num_written
        self._num_seen = 0

    def __call__(self, operation: Operation) -> None:
        if self._num_seen == self._number:
            if self._num_written and operation.write_some is not None:
                operation.write_some(self._num_written)
            os.kill(os.getpid(), signal.SIGKILL)
        self._num_seen += 1


class Fault:
    """Operation `number` fails, and with `lasts` also all later ones that need room on the disk.

    With `is_carried_out`, a function of `os` succeeds before it raises the error.
    """

    def __init__(
        self,
        number: int,
        code: int = errno.ENOSPC,
        *,
        lasts: bool = False,
        is_carried_out: bool = False,
    ) -> None:
        self._number = number
        self._code = code
        self._lasts = lasts
        self._is_carried_out = is_carried_out
        self._num_seen = 0

    def __call__(self, operation: Operation) -> None:
        number, self._num_seen = self._num_seen, self._num_seen + 1
        takes_room = operation.what in ("open", "write", "mkdir")
        if number == self._number or (self._lasts and number > self._number and takes_room):
            if self._is_carried_out and operation.carry_out is not None:
                operation.carry_out()
            raise OSError(self._code, os.strerror(self._code), operation.where)


class At:
    """Calls a function at operation `number`."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self._number = number
        self._act = act
        self._num_seen = 0

    def __call__(self, _: Operation) -> None:
        number, self._num_seen = self._num_seen, self._num_seen + 1
        if number == self._number:
            self._act()


@dataclass
class _File:
    """A file: `synced` is on disk, and `descriptor` reads all that has been written."""

    synced: bytes = b""
    descriptor: int | None = None


@dataclass
class _Folder:
    """A directory: its entries as programs see them, the entries on disk, and the changes between,
    any of which may have reached the disk.
    """

    seen: dict[str, _File | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Folder] = field(default_factory=dict)
    steps: list[tuple[list[str], dict[str, _File | _Folder]]] = field(
        default_factory=list
    )  # names gone, and new

    def change(self, gone: list[str], new: dict[str, _File | _Folder]) -> None:
        self.steps.append((gone, new))
        self.seen = {name: node for name, node in self.seen.items() if name not in gone} | new


class PowerCut:
    """Follows the operations on a directory, and computes what a power cut may leave of it.

    A file has its contents at its last sync, or any prefix of the later contents. A directory has
    its entries at its last sync, with any of the later changes; a rename is one change.
    """

    def __init__(self, root: Path) -> None:
        """Starts with all existing files on disk."""
        self._path = root
        self._root = self._scan(root)

    def __call__(self, operation: Operation) -> None:
        folder, name = self._folder(operation.path.parent), operation.path.name
        if operation.what == "fsync":
            node = self._root if operation.path == self._path else folder.seen[name]
            if isinstance(node, _File):
                node.synced = operation.path.read_bytes()
            else:
                node.synced, node.steps = dict(node.seen), []
        elif operation.what in ("open", "mkdir"):
            if name not in folder.seen:
                folder.change([], {name: _File() if operation.what == "open" else _Folder()})
        elif operation.what == "write":
            file = folder.seen[name]
            assert isinstance(file, _File)
            if file.descriptor is None:
                file.descriptor = os.open(operation.path, os.O_RDONLY)
        elif operation.target is not None:
            assert operation.target.parent == operation.path.parent
            folder.change([name], {operation.target.name: folder.seen[name]})
        elif name in folder.seen:
            folder.change([name], {})

    def leave(self, target: Path, lot: random.Random) -> None:
        """Writes a random image of the files that are left."""
        self._leave(self._root, target, lot)

    def _leave(self, folder: _Folder, target: Path, lot: random.Random) -> None:
        target.mkdir()
        entries = dict(folder.synced)
        odds = lot.choice((0, 0.5, 1))
        for gone, new in folder.steps:
            if lot.random() < odds:
                entries = {name: node for name, node in entries.items() if name not in gone} | new
        for name, node in sorted(entries.items()):
            if isinstance(node, _Folder):
                self._leave(node, target / name, lot)
                continue
            written = b"" if node.descriptor is None else os.pread(node.descriptor, 1 << 30, 0)
            length = lot.choice((0, lot.randrange(len(written) + 1), len(written)))
            is_lucky = len(written) > len(node.synced) and lot.random() < 0.5
            (target / name).write_bytes(written[:length] if is_lucky else node.synced)

    def _scan(self, path: Path) -> _Folder:
        found: dict[str, _File | _Folder] = {
            entry.name: self._scan(entry) if entry.is_dir() else _File(entry.read_bytes())
            for entry in sorted(path.iterdir())
        }
        return _Folder(found, dict(found))

    def _folder(self, path: Path) -> _Folder:
        node = self._root
        for name in () if path == self._path.parent else path.relative_to(self._path).parts:
            child = node.seen[name]
            assert isinstance(child, _Folder)
            node = child
        return node


_NEWNS, _NEWUSER, _PRIVATE, _REMOUNT = (
    0x20000,
    0x10000000,
    0x44000,
    0x20,
)  # <linux/sched.h>, <linux/mount.h>


def mount_small_disk(folder: Path, nbytes: int) -> bool:
    """Mounts a new file system, for this process and its forks only. Returns whether it may."""
    libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
    if libc.unshare(_NEWNS) != 0:
        if libc.unshare(_NEWNS | _NEWUSER) != 0:
            return False
        for file, line in (
            ("setgroups", "deny"),
            ("uid_map", f"0 {user} 1"),
            ("gid_map", f"0 {group} 1"),
        ):
            Path(f"/proc/self/{file}").write_text(line)
    return libc.mount(None, b"/", None, _PRIVATE, None) == 0 and _mount(folder, nbytes, 0)


def resize_disk(folder: Path, nbytes: int) -> None:
    """Changes the size of a file system of `mount_small_disk`."""
    assert _mount(folder, nbytes, _REMOUNT)


def _mount(folder: Path, nbytes: int, flags: int) -> bool:
    mount = ctypes.CDLL(None).mount
    return bool(
        mount(b"tmpfs", str(folder).encode(), b"tmpfs", flags, f"size={nbytes}".encode()) == 0
    )


# Processes


class DiedError(AssertionError):
    """A process ended without a result."""


class Child:
    """A forked process that runs a function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._answers, answers = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            # A forked process has no OpenMP threads, and would wait for them.
            torch.set_num_threads(1)
            _answer(answers, function, args)
        os.close(answers)

    def result(self, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """The function's result. DiedError, with its traceback, if it raised, was killed, or does
        not end.
        """
        answer = self.end(timeout)
        if answer == KILLED:
            raise DiedError("The process was killed.")
        return answer

    def end(self, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """As `result`, but KILLED if the process has been killed."""
        content = self._read(timeout)
        os.close(self._answers)
        status = os.waitpid(self.pid, 0)[1]
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return KILLED
        if status or not content:
            raise DiedError(f"The process ended with status {status}.")
        is_good, result = cloudpickle.loads(content)
        if not is_good:
            raise DiedError(result)
        return result

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; before `end`."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _read(self, timeout: float) -> bytes:
        deadline, content = time.monotonic() + timeout, b""
        while True:
            ready, _, _ = select.select(
                [self._answers], [], [], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                os.kill(self.pid, signal.SIGKILL)
                raise DiedError(f"The process did not end within {timeout} s.")
            part = os.read(self._answers, 1 << 20)
            if not part:
                return content
            content += part


def _answer(answers: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Runs the function, and ends the process without the parent's exit handlers."""
    try:
        try:
            content = cloudpickle.dumps((True, function(*args)))
        except BaseException:
            content = cloudpickle.dumps((False, traceback.format_exc()))
        with os.fdopen(answers, "wb") as stream:
            stream.write(content)
    finally:
        os._exit(0)


class Forks:
    """A process that has imported modules and has no threads, so that it can fork safely."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, modules), daemon=True)
        self._process.start()
        theirs.close()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT
    ) -> Any:
        """Returns `function(*args)` from a fork. The result must not have a class of the test."""
        # Test files cannot be imported there.
        module = sys.modules.get(function.__module__)
        if module is not None and not module.__name__.startswith("tests."):
            cloudpickle.register_pickle_by_value(module)
        self._pipe.send_bytes(cloudpickle.dumps((function, args, timeout)))
        if not self._pipe.poll(timeout + 30.0):
            raise DiedError(f"The process did not end within {timeout} s.")
        is_good, result = cloudpickle.loads(self._pipe.recv_bytes())
        if not is_good:
            raise DiedError(result)
        return result

    def close(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def forks(*modules: str) -> Iterator[Forks]:
    """A process that has imported these modules, to run functions in its forks."""
    found = Forks(modules)
    try:
        yield found
    finally:
        found.close()


def _serve(pipe: Connection, modules: tuple[str, ...]) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # a collection in a fork would copy all pages
    while True:
        try:
            function, args, timeout = cloudpickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        child = Child(_in_own_group, function, args)
        try:
            answer = (True, child.result(timeout))
        except DiedError as died:
            answer = (False, str(died))
        finally:
            # With all of its forks.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        pipe.send_bytes(cloudpickle.dumps(answer))


def _in_own_group(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.setpgid(0, 0)
    return function(*args)
