"""The one rank-aware logger.

Every file that reports something does `logger = logging.getLogger(__name__)`. `configure(rank)`
decides once which are shown: rank 0 shows information and up, the others warnings and up with their
rank in front.
"""

from __future__ import annotations

import logging
import sys

from tqdm import tqdm

_ROOT = "megatron"
_CUT = "..."  # ends a text that was longer than its limit


def printable(text: str, limit: int = 500) -> str:
    """`text` as one harmless line of at most `limit` characters, to put into a message.

    Text from a file or from another process may hold newlines that fake lines of the log, escape
    codes that a terminal obeys, or marks that reverse the direction of text. All of these
    are shown escaped, as Python would write them in a string; longer text is cut.
    """
    # The text beyond the limit is not read: it may be huge.
    head = text[:limit]
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in head
    )

    if len(text) <= limit and len(shown) <= limit:
        return shown
    return shown[: max(limit - len(_CUT), 0)] + _CUT[:limit]


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `2 batches`."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else ending}"


class _StdoutHandler(logging.Handler):
    """Writes lines to the present `sys.stdout`, above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stdout
        try:
            text = self.format(record)
            # A stream that cannot encode a character of a path would lose the line.
            encoding = getattr(stream, "encoding", None) or "utf-8"
            text = text.encode(encoding, "backslashreplace").decode(encoding)
            tqdm.write(text, file=stream)
            stream.flush()
        except Exception:
            self.handleError(record)


class _Formatter(logging.Formatter):
    """`[date and time] message`, or `time message`; warnings and errors name their level, ranks
    other than 0 their rank.
    """

    def __init__(self, rank: int, short_time: bool) -> None:
        super().__init__(datefmt="%H:%M:%S" if short_time else "[%Y-%m-%d %H:%M:%S]")
        self._prefix = "" if rank == 0 else f"[rank {rank}] "

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's own name
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        moment = self.formatTime(record, self.datefmt)
        return f"{self._prefix}{moment} {level}{record.getMessage()}"


def configure(rank: int, *, short_time: bool = False) -> logging.Logger:
    """Sets up the project's logger for this rank and returns it, replacing an earlier one.

    Args:
        short_time: whether lines start with the time of day alone, without the date.
    """
    logger = logging.getLogger(_ROOT)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)

    handler = _StdoutHandler()
    handler.setFormatter(_Formatter(rank, short_time))
    logger.addHandler(handler)

    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
    return logger
