"""A file that several processes write at the same time, each at offsets of its own."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from megatron.core.files import sync_folder

DIRECT_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)  # what a file system without direct I/O answers
_PAGE_BYTES = 4096
_RELEASED_BYTES = 1 << 20  # of a write that is sent to disk at once


class SharedFile:
    """A file that several ranks write at the same time, each at offsets of its own.

    Whole pages go past the page cache where the file system can do so. Pages that two ranks share
    go through it, so that neither writes over the other's part.
    """

    def __init__(self, path: Path, nbytes: int | None = None) -> None:
        """
        Args:
            nbytes: of the whole file, which whoever comes first makes; None: it is there already.
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

    def write_at(self, offset: int, content: memoryview) -> None:
        """Writes all of the content to this place. OSError if the file system failed."""
        with naming(self._path):
            head, end = -offset % _PAGE_BYTES, content.nbytes
            tail = (offset + end) % _PAGE_BYTES
            is_aligned = (address_of(content) + head) % _PAGE_BYTES == 0
            middle = content[head : end - tail] if head + tail < end and is_aligned else content[:0]
            if middle and self._write_direct(offset + head, middle):
                self._write_cached(offset, content[:head])
                self._write_cached(offset + end - tail, content[end - tail :])
            else:
                self._write_cached(offset, content)

    def close(self) -> None:
        """Ends this rank's part, which is then durable."""
        with naming(self._path):
            os.fsync(self._cached)
            release_pages(self._cached, 0, 0)
        self.abort()
        # Whoever publishes syncs only the folder that this one is in.
        sync_folder(self._path.parent)

    def abort(self) -> None:
        """Lets go of the file. May be called in any state; raises nothing."""
        descriptors, self._cached, self._direct = (self._cached, self._direct), -1, None
        for descriptor in descriptors:
            if descriptor is not None and descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def _write_direct(self, offset: int, content: memoryview) -> bool:
        """False if the file system has no direct I/O."""
        if self._direct is None:
            return False
        try:
            _write_all(self._direct, offset, content)
        except OSError as error:
            if error.errno not in DIRECT_REFUSED:
                raise
            os.close(self._direct)
            self._direct = None
            return False
        return True

    def _write_cached(self, offset: int, content: memoryview) -> None:
        _write_all(self._cached, offset, content)
        # Begin to write them now, rather than all at once in `close`. Not for a few bytes of a
        # page: the next ones would wait until it is on disk.
        if content.nbytes >= _RELEASED_BYTES:
            release_pages(self._cached, offset, content.nbytes)


def release_pages(descriptor: int, offset: int, nbytes: int) -> None:
    """Has the system write a range of a file and drop it from the page cache.

    Args:
        nbytes: 0 for the rest of the file.
    """
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Makes errors of the system name the file, which those of an open file do not."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def address_of(content: memoryview) -> int:
    """Where a buffer lies in memory."""
    return int(np.frombuffer(content, np.uint8).ctypes.data) if content.nbytes else 0


def _write_all(descriptor: int, offset: int, content: memoryview) -> None:
    end, rest = offset + content.nbytes, content
    while rest:
        rest = rest[os.pwrite(descriptor, rest, end - rest.nbytes) :]
