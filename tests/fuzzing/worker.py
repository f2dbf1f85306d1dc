"""The process that reads prepared files: within limits, watched, one example after the other.

    python -m tests.fuzzing.worker DESCRIPTOR MODULE    one end of a pipe, and the targets

`harness.Worker` starts it.

Everything is imported and every target is warm before the limits are set, so that only the example
allocates, opens or imports.
"""

from __future__ import annotations

import contextlib
import encodings
import importlib
import io
import json
import logging
import os
import pkgutil
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.fuzzing.target import Target

# Calls that no load makes, by their prefixes: "os.exec" is also "os.execve".
_FORBIDDEN = tuple(
    (
        "compile code.__new__ cpython.run_ ctypes. ensurepip. exec ftplib. http. import marshal. "
        "os.chmod os.chown os.exec os.fork os.forkpty os.kill os.posix_spawn os.putenv os.spawn "
        "os.startfile os.system pickle.find_class pty.spawn shutil. signal.pthread_kill smtplib. "
        "socket. subprocess. sys.setprofile sys.settrace urllib. webbrowser."
    ).split()
)
# Allowed in the example's own directory alone.
_CHANGES = tuple(
    ("os.link os.mkdir os.remove os.rename os.rmdir os.symlink os.truncate os.utime").split()
)
# Where interpreter and libraries look by themselves: sources for a traceback, the time zone.
_READABLE = (
    *{str(Path(prefix).resolve()) for prefix in (sys.prefix, sys.base_prefix)},
    *("/proc/", "/sys/", "/usr/lib/", "/usr/share/zoneinfo", "/etc/localtime", "/dev/urandom"),
    *(str(Path(each).resolve()) for each in sys.path if each),
)


class Watch:
    """Records the system calls of an example. A hook cannot be removed: it is switched.

    Python itself compiles and runs text when it is asked for type hints or makes a named tuple.
    Text that it runs for intact files may run again, and no other.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self._folder: str | None = None
        self._learns = False
        self._known: set[object] = set()
        self._own = threading.local()
        sys.addaudithook(self._hook)

    @contextmanager
    def over(self, folder: Path, *, learns: bool = False) -> Iterator[None]:
        """Notes what happens in the block, in any thread.

        Args:
            learns: whether the files are intact, so that all events are allowed.
        """
        self.events.clear()
        self._folder, self._learns = os.path.realpath(folder), learns
        try:
            yield
        finally:
            self._folder = None

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        folder = self._folder
        if folder is None or getattr(self._own, "is_busy", False):
            return
        self._own.is_busy = True  # the following code raises events, too
        try:
            if not self._is_forbidden(event, args, folder):
                return
            if self._learns:
                self._known.add(_identity(event, args))
            elif _identity(event, args) not in self._known:
                shown = ", ".join(repr(arg)[:100] for arg in args[:3])
                self.events.append(f"{event}({shown})")
        finally:
            self._own.is_busy = False

    def _is_forbidden(self, event: str, args: tuple[Any, ...], folder: str) -> bool:
        if event == "open":
            return _is_strange_open(args, folder)
        if event.startswith(_CHANGES):
            # Renaming and removing change a link itself, not its target.
            paths = (os.fsdecode(arg) for arg in args if isinstance(arg, str | bytes))
            return not all(_is_inside(str(Path(path).parent), folder) for path in paths)
        if event == "socket.gethostname" or (event == "os.kill" and args[1] == 0):
            return False  # a name; and whether there is such a process
        return event.startswith(_FORBIDDEN)


def _identity(event: str, args: tuple[Any, ...]) -> object:
    """What two events have in common that do the same."""
    if event == "compile":
        return event, args[0]
    if event == "exec":
        code = args[0]
        return event, code.co_filename, code.co_code, code.co_names, repr(code.co_consts)
    return event, repr(args)


def _is_strange_open(args: tuple[Any, ...], folder: str) -> bool:
    path, _, flags = args
    if not isinstance(path, str | bytes) or _is_inside(path, folder):
        return False
    writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    return bool(writes) or not os.path.realpath(os.fsdecode(path)).startswith(_READABLE)


def _is_inside(path: str | bytes, folder: str) -> bool:
    found = os.path.realpath(os.fsdecode(path))
    return found == folder or found.startswith(f"{folder}/")


class TooLateError(BaseException):
    """An example took longer than it may. No `except Exception` stops it."""


@contextmanager
def within_seconds(seconds: float) -> Iterator[None]:
    """Raises TooLateError in a block that takes longer, once it comes back to the interpreter."""

    def too_late(*_: Any) -> None:
        raise TooLateError

    signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


@contextmanager
def within_memory(nbytes: int) -> Iterator[None]:
    """In the block, the process can have so much more address space than it has now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status_bytes("VmSize") + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


class _Warnings(logging.Handler):
    """Keeps the first few warnings of the project, as they would be shown."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.messages) < 20:
            self.messages.append(record.getMessage()[:10_000])


def read(
    target: Target, folder: Path, seconds: float, nbytes: int, watch: Watch, *, is_intact: bool
) -> dict[str, Any]:
    """One example: the fields of its `harness.Outcome`."""
    target.reset()
    left = target.left()
    logged = _Warnings()
    logging.getLogger("megatron").addHandler(logged)
    out, err = io.StringIO(), io.StringIO()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before, begun = _status_bytes("VmRSS"), time.monotonic()

    outcome: dict[str, Any] = {"error": None, "message": "", "causes": [], "value": None}
    try:
        with (
            warnings.catch_warnings(record=True),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            watch.over(folder, learns=is_intact),
            within_seconds(seconds),
            within_memory(nbytes),
        ):
            outcome["value"] = target.read(folder)
    except BaseException as error:
        outcome |= {
            "error": type(error).__name__,
            "is_expected": isinstance(error, target.errors),
            "message": _text(error),
            "causes": [type(each).__name__ for each in _causes(error)],
            "where": _where(error),
        }
    finally:
        logging.getLogger("megatron").removeHandler(logged)

    outcome["seconds"] = time.monotonic() - begun
    outcome["nbytes"] = _status_bytes("VmHWM") - before
    outcome["events"] = watch.events[:20]
    outcome["warnings"] = logged.messages
    outcome["out"], outcome["err"] = out.getvalue()[:100_000], err.getvalue()[:100_000]
    outcome["is_touched"] = target.left() != left
    return outcome


def _text(error: BaseException) -> str:
    try:
        return str(error)[:100_000]
    except Exception as second:  # Python cannot print an integer of 5000 digits
        return f"{type(second).__name__} of its own message"


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause = error.__cause__
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _where(error: BaseException) -> list[str]:
    """Files and lines, the innermost last; of the cause, if the error was raised from another."""
    innermost = next(iter(list(_causes(error))[::-1]), error)
    places, trace = [], innermost.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return places[-6:]


def main(descriptor: int, module: str) -> None:
    """Serves until the pipe is closed."""
    pipe = Connection(descriptor)
    targets = importlib.import_module(module)
    targets.start()
    # Text may declare its encoding, and Python then imports that.
    for encoding in pkgutil.iter_modules(encodings.__path__, "encodings."):
        with contextlib.suppress(ImportError):  # of another system
            importlib.import_module(encoding.name)
    watch = Watch()
    while True:
        try:
            request = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        target, folder = targets.TARGETS[request["target"]], Path(request["folder"])
        target.prepare()
        if request["action"] == "make":
            target.make(folder)
            answer: dict[str, Any] = {}
        else:
            limits = (request["seconds"], request["nbytes"])
            answer = read(target, folder, *limits, watch, is_intact=request["action"] == "warm")
        pipe.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
