"""Turns lines of input into samples, in order, on one process or several; counts bad lines."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megatron.core.log import printable
from megatron_hybrid.endings import worker_pool
from megatron_hybrid.input_files import Line

_MOST_TOLD = 10  # skipped lines that are printed
_MOST_SKIPPED = 0.1  # share of all lines
_CHUNK_BYTES = 1 << 19

Sample = TypeVar("Sample", covariant=True)


class SampleError(ValueError):
    """A bad line. The message has the file, the line number and the reason."""


class Maker(Protocol[Sample]):
    """Makes samples of JSON values."""

    def make(self, record: object, folder: Path) -> Sample:
        """Returns the sample of a line's JSON value. ValueError for a bad one."""
        ...


class Skipped:
    """Counts lines and skips bad ones. The rest of a damaged file counts as one line.

    Args:
        is_allowed: whether bad lines are skipped; otherwise the first one is raised.

    Attributes:
        num_lines: the lines that were read.
        num_good_bytes: the size of the lines whose samples have been made.
        reasons: the errors of bad lines.
    """

    def __init__(self, *, is_allowed: bool) -> None:
        self._is_allowed = is_allowed
        self.num_lines = 0
        self.num_good_bytes = 0
        self.reasons: list[str] = []

    def add(self, error: SampleError, *, is_damage: bool = False) -> None:
        """Skips a bad line, or raises its error."""
        if not self._is_allowed:
            raise error
        # Damaged files are printed first, since only the first reasons are printed.
        self.reasons.insert(0 if is_damage else len(self.reasons), str(error))

    def check(self) -> None:
        """Raises SampleError if more than a tenth of all lines were bad."""
        if len(self.reasons) > _MOST_SKIPPED * self.num_lines:
            self.tell()
            raise SampleError(
                f"--skip-bad-samples: expected at most {_MOST_SKIPPED:.0%} bad lines, got "
                f"{len(self.reasons)} of {self.num_lines}. Repair or remove these lines."
            )

    def tell(self) -> None:
        """Prints the first reasons."""
        for reason in self.reasons[:_MOST_TOLD]:
            print(f"skipped: {reason}", file=sys.stderr)
        if (more := len(self.reasons) - _MOST_TOLD) > 0:
            print(f"skipped: {more} more", file=sys.stderr)


def make_samples(
    lines: Iterable[Line],
    maker: Maker[Sample],
    skipped: Skipped,
    *,
    num_workers: int = 1,
    chunk_lines: int = 256,
) -> Iterator[Sample]:
    """Yields the samples of all good lines, in order.

    Args:
        maker: must be picklable for several workers.
        skipped: receives bad lines.
        chunk_lines: the most lines that a worker processes at a time.

    Raises:
        SampleError: a bad line, or after the last sample, too many bad lines.
    """
    sizes: deque[int] = deque()  # of the lines that were read and whose samples are not made
    whole = _without_damage(lines, skipped, sizes)
    made: Iterator[Sample | SampleError]
    if num_workers == 1:
        made = (try_to_make(maker, line) for line in whole)
    else:
        made = _made_by_workers(_chunks(whole, chunk_lines), maker, num_workers)

    for sample in made:
        num_bytes = sizes.popleft()
        if isinstance(sample, SampleError):
            skipped.add(sample)
        else:
            skipped.num_good_bytes += num_bytes
            yield sample
    skipped.check()


def try_to_make(maker: Maker[Sample], line: Line) -> Sample | SampleError:
    """Returns the sample of a line, or its error."""
    try:
        return maker.make(line.record(), line.folder)
    except ValueError as error:
        text = printable(str(error)).removesuffix(".")
        return SampleError(f"{line.place}: {text}.")


def _without_damage(lines: Iterable[Line], skipped: Skipped, sizes: deque[int]) -> Iterator[Line]:
    for line in lines:
        # A document may have several lines.
        skipped.num_lines += 1 + line.content.count(b"\n", 0, -1)
        if line.damage:
            skipped.add(SampleError(f"{line.damage}."), is_damage=True)
        else:
            sizes.append(len(line.content))
            yield line


def _chunks(lines: Iterable[Line], chunk_lines: int) -> Iterator[list[Line]]:
    chunk: list[Line] = []
    nbytes = 0
    for line in lines:
        chunk.append(line)
        nbytes += len(line.content)
        if len(chunk) >= chunk_lines or nbytes >= _CHUNK_BYTES:
            yield chunk
            chunk, nbytes = [], 0
    if chunk:
        yield chunk


def _made_by_workers(
    chunks: Iterator[list[Line]], maker: Maker[Sample], num_workers: int
) -> Iterator[Sample | SampleError]:
    with worker_pool(num_workers, _start_worker, maker) as pool:
        # Only as many chunks in flight as keep the workers busy, which bounds the memory.
        pending: deque[Future[list[Any]]] = deque()
        for chunk in islice(chunks, 2 * num_workers):
            pending.append(pool.submit(_make_chunk, chunk))
        while pending:
            yield from pending.popleft().result()
            for chunk in islice(chunks, 1):
                pending.append(pool.submit(_make_chunk, chunk))


_worker_maker: Maker[Any] | None = None  # in a worker process


def _start_worker(maker: Maker[Any]) -> None:
    global _worker_maker
    # The workers share the cores; the tokenizer's threads would compete for them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_maker = maker


def _make_chunk(lines: list[Line]) -> list[Any]:
    assert _worker_maker is not None, "set by _start_worker"
    return [try_to_make(_worker_maker, line) for line in lines]
