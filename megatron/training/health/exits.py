"""Exit codes, one for each way to end, and how a process leaves."""

from __future__ import annotations

import contextlib
import enum
import os
import sys
import threading
from typing import NoReturn

from megatron.core.datasets.data_files import IndexedDatasetError
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.drivers import PinError
from megatron.core.host_memory import HostMemoryError
from megatron.core.options import ConfigError


class ExitCode(enum.IntEnum):
    """How a run ended. Codes from 128 on are the shell's: 128 + the signal that ended it."""

    # Trained to the end, or a planned stop (--exit-interval, --exit-duration-in-mins); saved.
    FINISHED = 0
    FAILED = 1  # an unexpected error, printed with its traceback
    BAD_CONFIGURATION = 2  # an invalid configuration, or one that exceeds this machine
    BAD_FILES = 3  # an unusable checkpoint or data file
    NON_FINITE_LOSS = 4  # with --check-for-nan-in-loss
    LOST_RANK = 5  # another rank died or failed; this one is intact
    HANG = 6  # no progress within --hang-timeout-seconds
    NOT_SAVED = 7  # a state could not be saved, at the end or with --exit-on-save-failure
    NO_PROGRESS = 8  # relaunched --recover-retries times without getting to the next checkpoint
    PREEMPTED = 75  # a signal; the state is saved. sysexits.h: EX_TEMPFAIL, try again
    PREEMPTED_UNSAVED = 76  # a signal; there was no time to save


class ExitError(RuntimeError):
    """Ends the run with an exit code.

    Args:
        code: the exit code.
        message: one line that needs no traceback.
        is_reported: whether a rank has logged the line.
    """

    def __init__(self, code: ExitCode, message: str, *, is_reported: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.is_reported = is_reported


def code_of(error: BaseException) -> ExitCode:
    """Returns the exit code for an error. FAILED for KeyboardInterrupt, too."""
    if isinstance(error, ExitError):
        return error.code
    if isinstance(error, (ConfigError, HostMemoryError, PinError)):
        return ExitCode.BAD_CONFIGURATION
    if isinstance(error, (CheckpointError, IndexedDatasetError)):
        return ExitCode.BAD_FILES
    return ExitCode.FAILED


def is_foreseen(error: BaseException) -> bool:
    """Returns whether an error is printed without its traceback."""
    return isinstance(error, ExitError) or code_of(error) is not ExitCode.FAILED


def process_status(code: ExitCode, is_elastic: bool) -> int:
    """Returns the exit status of the process, 0 to 255.

    For every status but 0, torchrun's agent restarts a rank at once, on the same machine. A
    preempted rank therefore exits with 0, and the event log has the code.
    """
    is_preempted = code in (ExitCode.PREEMPTED, ExitCode.PREEMPTED_UNSAVED)
    return 0 if is_preempted and is_elastic else int(code)


def exit_process(status: int, patience_seconds: float | None = None) -> NoReturn:
    """Ends this process from any thread, without the interpreter's finalization.

    gloo's threads outlive `destroy_process_group`. A thread that drops its last tensor during the
    finalization calls std::terminate, so successful runs would sometimes exit with SIGABRT. All
    files are closed by now. (Lanes are safe without this: [Note: the end of the program] in
    lanes.py.)

    Args:
        status: the exit status, 0 to 255.
        patience_seconds: the time limit for flushing the output, since a thread that is stuck in
            printing keeps the stream locked; None: no limit.
    """
    if patience_seconds is not None:
        impatience = threading.Timer(patience_seconds, os._exit, (status,))
        impatience.daemon = True
        impatience.start()

    for stream in (sys.stdout, sys.stderr):
        # The stream is closed, or has no reader.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
