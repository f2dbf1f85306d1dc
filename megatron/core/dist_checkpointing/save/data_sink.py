"""Data files on their way into a store: written once, from their beginning to their end."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from megatron.core.dist_checkpointing.format.manifest import DATA_ALIGNMENT
from megatron.core.files import sync_folder, sync_stream
from megatron.core.shared_file import DIRECT_REFUSED, naming, release_pages


class DataSink(Protocol):
    """A new data file, written once from its beginning to its end."""

    def write(self, buffer: memoryview) -> None:
        """Appends bytes: a multiple of DATA_ALIGNMENT, except in the last write.

        Direct I/O also needs a buffer that begins on a page.
        """

    def close(self, nbytes: int) -> None:
        """Ends the file, which is then durable. ValueError if it does not have `nbytes` bytes."""

    def abort(self) -> None:
        """Gives up the file and deletes it. May be called in any state; raises nothing."""


class LocalSink:
    """A file written past the page cache where the file system can do so.

    The page cache would cost a copy, and evict what is in use. Direct I/O takes whole blocks, so
    the last bytes go through the cache. A file system without direct I/O refuses it when asked, or
    at the first write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._nbytes = 0
        self._file = path.open("xb", buffering=0)
        # Not with O_DIRECT in `open`: where that is refused, some systems leave a new file behind.
        self._is_direct = _set_direct(self._file.fileno(), True)

    def write(self, buffer: memoryview) -> None:
        with naming(self._path):
            rest = buffer.cast("B")
            while rest:
                rest = rest[self._write_some(rest) :]

    def close(self, nbytes: int) -> None:
        if nbytes != self._nbytes:
            raise ValueError(f"Expected {nbytes} bytes in {self._path}, got {self._nbytes}.")
        with naming(self._path):
            sync_stream(self._file)
            # Only what is on disk can be dropped from the cache, so again after the sync.
            release_pages(self._file.fileno(), 0, 0)
            self._file.close()
        sync_folder(self._path.parent)

    def abort(self) -> None:
        for end in (self._file.close, self._path.unlink):
            with contextlib.suppress(OSError):
                end()

    def _write_some(self, rest: memoryview) -> int:
        """Appends as much as the system takes at once. Returns how much."""
        whole = rest.nbytes // DATA_ALIGNMENT * DATA_ALIGNMENT
        if self._is_direct and not whole:
            self._use_page_cache()

        try:
            written = self._file.write(rest[:whole] if self._is_direct else rest)
        except OSError as error:
            if not self._is_direct or error.errno not in DIRECT_REFUSED:
                raise
            self._use_page_cache()
            return 0

        self._nbytes += written
        # Begin to write them now, rather than all at once in `close`.
        if not self._is_direct:
            release_pages(self._file.fileno(), self._nbytes - written, written)
        return written

    def _use_page_cache(self) -> None:
        _set_direct(self._file.fileno(), False)
        self._is_direct = False


class LateSink:
    """A file that the writing thread makes once there is something to write.

    On a slow disk, even making a file may take long. The thread that saves must not wait for that,
    since the optimizer waits for it.
    """

    def __init__(self, open_sink: Callable[[], DataSink], check: Callable[[], None]) -> None:
        """
        Args:
            open_sink: makes the file. The first use raises its errors.
            check: called before each write; an error ends the file, so that a save that is given up
                need not write all that is queued.
        """
        self._open_sink = open_sink
        self._check = check
        self._sink: DataSink | None = None

    def write(self, buffer: memoryview) -> None:
        self._check()
        self._opened().write(buffer)

    def close(self, nbytes: int) -> None:
        self._opened().close(nbytes)

    def abort(self) -> None:
        if self._sink is not None:
            self._sink.abort()

    def _opened(self) -> DataSink:
        if self._sink is None:
            self._sink = self._open_sink()
        return self._sink


class RemoteSink:
    """A file of a remote store, which appears when it is closed, or part by part."""

    def __init__(self, files: Any, path: str) -> None:
        self._files = files
        self._path = path
        self._nbytes = 0
        self._file = files.open(path, "wb")

    def write(self, buffer: memoryview) -> None:
        self._file.write(buffer.cast("B"))
        self._nbytes += buffer.nbytes

    def close(self, nbytes: int) -> None:
        if nbytes != self._nbytes:
            raise ValueError(f"Expected {nbytes} bytes in {self._path}, got {self._nbytes}.")
        self._file.close()

    def abort(self) -> None:
        # Implementations differ in how they discard a file, and in their errors. All of them can
        # close and delete.
        for end in (self._file.close, lambda: self._files.rm_file(self._path)):
            with contextlib.suppress(Exception):
                end()


def _set_direct(descriptor: int, is_direct: bool) -> bool:
    """Turns direct I/O on or off. Returns whether it is on then."""
    # Not every system has O_DIRECT, and not every file system accepts it.
    with contextlib.suppress(AttributeError, OSError):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | (os.O_DIRECT if is_direct else 0))
        return is_direct
    return False
