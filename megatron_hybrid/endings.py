"""How programs end: with one line for bad input, quietly when the reader of their output has closed
the pipe, and without temporary files when a signal stops them.

Code that writes files removes unfinished ones when an exception passes through it. So SIGTERM and
SIGHUP raise an exception, as SIGINT does in Python, and the process ends by the signal afterwards.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import FrameType

from megatron.core.log import printable

_EXIT_FAILURE = 1
_EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE  # as a shell reports a program that the signal ends
_MAX_MESSAGE = 4000  # characters
_STOPS = (signal.SIGTERM, signal.SIGHUP)


class _StoppedError(BaseException):
    """A signal has asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def one_line_errors(
    label: str,
    kinds: tuple[type[Exception], ...] = (ValueError, OSError, BrokenProcessPool),
) -> Iterator[None]:
    """Prints an error of the block in one line on stderr and suppresses it. After the block the
    program returns its exit code for errors.

    Args:
        label: start of the line: the program.
        kinds: types of errors; others are raised. Default: bad input and unusable files.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # for `quiet_pipes`
    except kinds as error:
        # In one line, even if the names of files contain control characters.
        print(f"{label}: {printable(str(error), _MAX_MESSAGE)}", file=sys.stderr)


def run(main: Callable[[], int]) -> int:
    """Runs a program that writes files or prints; returns its exit code.

    The process ends by the signal if SIGTERM, SIGHUP or SIGINT stops it. Signals that are ignored,
    as under `nohup`, stay ignored.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = {
        number: signal.signal(number, _stop)
        for number in _STOPS
        if is_main and signal.getsignal(number) is signal.SIG_DFL
    }
    try:
        with quiet_pipes():
            return main()
    except KeyboardInterrupt:
        return _end_by(signal.SIGINT)
    except _StoppedError as stop:
        return _end_by(stop.number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def quiet_pipes() -> Iterator[None]:
    """Ends a program quietly if the reader of stdout or stderr closes it, as in `program | head`,
    and with one line if stdout cannot be written.
    """
    try:
        try:
            yield
        finally:
            _flush()
    except BrokenPipeError as error:
        if not any(map(_is_broken, (sys.stdout, sys.stderr))):
            raise  # another pipe
        # The interpreter flushes them again at its end.
        for stream in (sys.stdout, sys.stderr):
            if _is_broken(stream):
                _discard(stream)
        raise SystemExit(_EXIT_BROKEN_PIPE) from error


@contextmanager
def worker_pool(
    num_workers: int, start: Callable[..., None], *arguments: object
) -> Iterator[ProcessPoolExecutor]:
    """Worker processes that end with this one, also if it is killed.

    Args:
        start: called in each worker first, with the arguments.
    """
    # Spawned, not forked: a fork of a process that has used the tokenizer's threads may hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, _start_worker, (start, arguments))
    try:
        yield pool
    except BaseException:
        # Without waiting: a signal to the whole process group may have ended a worker in the middle
        # of a result, whose rest the pool would wait for.
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _start_worker(start: Callable[..., None], arguments: tuple[object, ...]) -> None:
    # Ctrl-C reaches every process of the terminal. The process that started the workers handles it
    # and ends them; a worker killed by it might still hold the queue's lock.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    start(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a worker"
    parent.join()
    os._exit(_EXIT_FAILURE)


def _stop(number: int, _frame: FrameType | None) -> None:
    # Another one must not interrupt the clean-up.
    for each in _STOPS:
        signal.signal(each, signal.SIG_IGN)
    raise _StoppedError(number)


def _end_by(number: int) -> int:
    """Ends the process by a signal; returns an exit code only where that is blocked."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


def _flush() -> None:
    """Flushes stdout while errors can still be reported."""
    if sys.stdout is None or sys.stdout.closed:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard(sys.stdout)
        print(f"stdout: {error}", file=sys.stderr)
        raise SystemExit(_EXIT_FAILURE) from error


def _is_broken(stream: object) -> bool:
    """Whether a stream is a pipe or a socket without a reader."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):  # none, a test's, or a closed one
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _discard(stream: object) -> None:
    """Redirects a stream to /dev/null, with its buffered content."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())  # type: ignore[attr-defined]
    os.close(nowhere)
