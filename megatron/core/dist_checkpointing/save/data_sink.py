"""Sinks: new data files in a store, written sequentially."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from megatron.core.shared_file import SharedFile


class LocalSink:
    """A new local file, written with direct I/O where possible.

    The page cache would cost a copy, and evict pages that are in use.
    """

    def __init__(self, path: Path) -> None:
        path.open("xb").close()
        self._path = path
        self._nbytes = 0
        self._file = SharedFile(path)

    def write(self, spans: Sequence[memoryview]) -> None:
        """Appends spans of bytes. The size of each is a multiple of DATA_ALIGNMENT, except for the
        last span of the last write.

        Direct I/O also needs memory at a multiple of MEMORY_ALIGNMENT.
        """
        self._file.write_at(self._nbytes, *spans)
        self._nbytes += sum(span.nbytes for span in spans)

    def close(self, nbytes: int) -> None:
        """Closes the file, which is then durable. ValueError unless it has `nbytes` bytes."""
        _check_size(self._path, self._nbytes, nbytes)
        # Publishing syncs the directory once for the files of all ranks.
        self._file.close(syncs_name=False)

    def abort(self) -> None:
        """Closes and deletes the file. May be called in any state; never raises."""
        self._file.abort()
        with contextlib.suppress(OSError):
            self._path.unlink()


class RemoteSink:
    """A new file of a remote store, which appears when it is closed, or part by part. Has the
    interface of `LocalSink`.
    """

    def __init__(self, files: Any, path: str) -> None:
        self._files = files
        self._path = path
        self._nbytes = 0
        self._file = files.open(path, "wb")

    def write(self, spans: Sequence[memoryview]) -> None:
        for span in spans:
            self._file.write(span)
            self._nbytes += span.nbytes

    def close(self, nbytes: int) -> None:
        _check_size(self._path, self._nbytes, nbytes)
        self._file.close()

    def abort(self) -> None:
        # Implementations differ in how they discard a file, and in their errors. All of them can
        # close and delete.
        for end in (self._file.close, lambda: self._files.rm_file(self._path)):
            with contextlib.suppress(Exception):
                end()


DataSink: TypeAlias = LocalSink | RemoteSink


def _check_size(path: object, found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"Expected {expected} bytes in {path}, got {found}.")
