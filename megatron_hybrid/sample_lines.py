"""Samples of JSON lines, made in their order by several processes, and the lines that make none."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megatron.core.json_reading import parse_json
from megatron.core.log import printable
from megatron.core.options import ConfigError
from megatron_hybrid.endings import worker_pool
from megatron_hybrid.input_files import Line

_MOST_TOLD = 10  # skipped samples that are named
_MOST_SKIPPED = 0.1  # of all lines
_CHUNK = 16  # samples that a worker makes at a time

Sample = TypeVar("Sample", covariant=True)


class SampleError(ValueError):
    """A line that makes no sample. The message names the file, the line, and what is wrong."""


class LostLinesError(SampleError):
    """The rest of a file, or all of it, that cannot be decompressed."""


class Maker(Protocol[Sample]):
    """Makes samples."""

    def make(self, record: object, folder: Path) -> Sample:
        """The sample of what a line has as JSON. ValueError says why there is none."""
        ...


def try_to_make(maker: Maker[Sample], line: Line) -> Sample | SampleError:
    """The sample of a line, or why there is none."""
    if line.damage:
        return LostLinesError(f"{line.damage}.")
    try:
        record = parse_json(line.text())
    except ValueError as error:
        return SampleError(f"{line.place}: expected a JSON object, got {error}.")
    try:
        return maker.make(record, line.folder)
    except ValueError as error:
        text = printable(str(error)).removesuffix(".")
        return SampleError(f"{line.place}: {text}.")


def make_samples(
    lines: Iterable[Line], maker: Maker[Sample], num_workers: int
) -> Iterator[Sample | SampleError]:
    """What each line makes, in their order.

    Args:
        maker: picklable, if there are several workers.

    Raises:
        ConfigError: fewer than one worker.
    """
    if num_workers < 1:
        raise ConfigError(f"--workers: expected at least 1, got {num_workers}.")
    if num_workers == 1:
        for line in lines:
            yield try_to_make(maker, line)
        return

    iterator = iter(lines)
    chunks = iter(lambda: list(itertools.islice(iterator, _CHUNK)), [])
    with worker_pool(num_workers, _start_worker, maker) as pool:
        # As many in flight as keep the workers busy: all of the input need not be in memory.
        pending = [pool.submit(_make_chunk, c) for c in itertools.islice(chunks, 2 * num_workers)]
        while pending:
            yield from pending.pop(0).result()
            pending += [pool.submit(_make_chunk, c) for c in itertools.islice(chunks, 1)]


_worker_maker: Maker[Any] | None = None  # of this process, if it is a worker


def _start_worker(maker: Maker[Any]) -> None:
    global _worker_maker
    _worker_maker = maker


def _make_chunk(lines: list[Line]) -> list[Any]:
    assert _worker_maker is not None, "the pool has started this process with one"
    return [try_to_make(_worker_maker, line) for line in lines]


class Skipped:
    """Lines that were left out. The rest of a damaged file counts as one.

    Args:
        is_allowed: otherwise the first one is raised.
    """

    def __init__(self, *, is_allowed: bool) -> None:
        self._is_allowed = is_allowed
        self.reasons: list[str] = []

    def add(self, error: SampleError) -> None:
        """Counts a line, or raises its error."""
        if not self._is_allowed:
            raise error
        # Damaged files come first, so that each is named, or at least ten.
        position = 0 if isinstance(error, LostLinesError) else len(self.reasons)
        self.reasons.insert(position, str(error))

    def check(self, num_kept: int) -> None:
        """Raises SampleError, after the first reasons are printed, if more than a tenth of all
        lines were left out. To be called before anything is published.

        Args:
            num_kept: lines that made samples.
        """
        num_lines = num_kept + len(self.reasons)
        if len(self.reasons) > _MOST_SKIPPED * num_lines:
            self.tell()
            raise SampleError(
                f"--skip-bad-samples: expected at most {_MOST_SKIPPED:.0%} bad lines, got "
                f"{len(self.reasons)} of {num_lines}. Repair the input, or take these lines out."
            )

    def tell(self) -> None:
        """Prints the first ones, and how many more there are."""
        for reason in self.reasons[:_MOST_TOLD]:
            print(f"skipped: {reason}", file=sys.stderr)
        if (more := len(self.reasons) - _MOST_TOLD) > 0:
            print(f"skipped: {more} more", file=sys.stderr)
