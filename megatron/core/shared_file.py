"""Files written at given offsets, past the page cache where that is possible: by one process, or by
several at the same time, each at its own offsets.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from megatron.core.files import sync_folder

MEMORY_ALIGNMENT = 512  # bytes; of memory that most devices take without a copy

_DIRECT_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)  # of a file system without direct I/O
_PAGE_BYTES = 4096
_MAX_SPANS = 1024  # that one call of the system takes
_RELEASED_BYTES = 1 << 20  # of a write that is sent to disk at once


class SharedFile:
    """A file that several ranks write at the same time, each at its own offsets.

    Whole pages go past the page cache where the file system can do so. Pages that two ranks share
    go through it, so that neither writes over the other's part.
    """

    def __init__(self, path: Path, nbytes: int | None = None) -> None:
        """
        Args:
            nbytes: size of the file, which is created if missing; None: the file exists already.
        """
        self._path = path
        # Not for reading, too: then an NFS client may fetch a page before it writes a part of it,
        # and later send back all of it, over what another rank has written there.
        flags = os.O_WRONLY | os.O_CLOEXEC
        self._cached = os.open(path, flags if nbytes is None else flags | os.O_CREAT, 0o666)
        self._direct: int | None = None
        with contextlib.suppress(AttributeError, OSError):
            self._direct = os.open(path, flags | os.O_DIRECT)
        if nbytes is not None:
            # All ranks set the same size, so it does not matter who comes first. Writes that make a
            # file longer would wait for each other.
            with naming(path):
                os.ftruncate(self._cached, nbytes)

    def write_at(self, offset: int, *spans: memoryview) -> None:
        """Writes bytes to this place, one span behind the other.

        Direct I/O needs spans of whole pages, except for the first and the last, in memory that
        starts as their pages do, or at least at a multiple of `MEMORY_ALIGNMENT`.

        Raises:
            OSError: if the file system failed.
        """
        nbytes = sum(span.nbytes for span in spans)
        head = min(-offset % _PAGE_BYTES, nbytes)
        end = max(head, nbytes - (offset + nbytes) % _PAGE_BYTES)
        with naming(self._path):
            whole = _cut(spans, head, end)
            if whole and self._write_direct(offset + head, whole):
                self._write_cached(offset, _cut(spans, 0, head))
                self._write_cached(offset + end, _cut(spans, end, nbytes))
            else:
                self._write_cached(offset, spans)

    def close(self, *, syncs_name: bool = True) -> None:
        """Ends this process's part, which is then durable.

        Args:
            syncs_name: False if the directory is synced before anybody relies on the file.
        """
        with naming(self._path):
            os.fsync(self._cached)
            # Only pages on disk can be dropped from the cache, so again after the sync.
            release_pages(self._cached, 0, 0)
        self.abort()
        if syncs_name:
            sync_folder(self._path.parent)

    def abort(self) -> None:
        """Lets go of the file. May be called in any state; does not raise."""
        descriptors, self._cached, self._direct = (self._cached, self._direct), -1, None
        for descriptor in descriptors:
            if descriptor is not None and descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def _write_direct(self, offset: int, spans: Sequence[memoryview]) -> bool:
        """False if the file system does not take this past the cache."""
        if self._direct is None or not _are_aligned(spans, MEMORY_ALIGNMENT):
            return False
        try:
            _write_all(self._direct, offset, spans)
        except OSError as error:
            if error.errno not in _DIRECT_REFUSED:
                raise
            # Some devices take whole pages of memory only. Otherwise there is no direct I/O here.
            if _are_aligned(spans, _PAGE_BYTES):
                os.close(self._direct)
                self._direct = None
            return False
        return True

    def _write_cached(self, offset: int, spans: Sequence[memoryview]) -> None:
        _write_all(self._cached, offset, spans)
        # Start to write them now, rather than all at once in `close`. Not for a few bytes of a
        # page: the next ones would wait until it is on disk.
        nbytes = sum(span.nbytes for span in spans)
        if nbytes >= _RELEASED_BYTES:
            release_pages(self._cached, offset, nbytes)


def release_pages(descriptor: int, offset: int, nbytes: int) -> None:
    """Has the system write a range of a file and drop it from the page cache.

    Args:
        nbytes: 0 for the rest of the file.
    """
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Makes errors of the system name the file, which errors of an open file do not."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def address_of(content: memoryview) -> int:
    """The address of a buffer."""
    return int(np.frombuffer(content, np.uint8).ctypes.data) if content.nbytes else 0


def _are_aligned(spans: Sequence[memoryview], alignment: int) -> bool:
    """Whether all of them start at such addresses, and are as long as direct I/O wants them."""
    return all(
        address_of(span) % alignment == 0 and span.nbytes % _PAGE_BYTES == 0 for span in spans
    )


def _cut(spans: Sequence[memoryview], begin: int, end: int) -> list[memoryview]:
    """The bytes [begin, end) of the concatenated spans, without copies."""
    found, position = [], 0
    for span in spans:
        part = span[max(0, begin - position) : max(0, end - position)]
        if part:
            found.append(part)
        position += span.nbytes
    return found


def _write_all(descriptor: int, offset: int, spans: Sequence[memoryview]) -> None:
    rest = list(spans)
    while rest:
        written = os.pwritev(descriptor, rest[:_MAX_SPANS], offset)
        offset += written
        while rest and written >= rest[0].nbytes:
            written -= rest.pop(0).nbytes
        if written:
            rest[0] = rest[0][written:]
