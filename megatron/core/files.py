"""Files that a reader finds whole or not at all, also after a crash, and reads that end.

A file is written under a temporary name that no other writer uses, flushed to disk, and only then
renamed; the directory is flushed after that, or the rename might be lost in a crash. After the
rename other processes may act on the file, and may even move its directory. A writer that must not
fail from then on leaves the last step to the reader that acts on the file (`Sync.CONTENT`).

Files may be in a directory that other users can write to. A FIFO instead of a file would block its
reader forever, a device may do anything when it is opened, and a sparse file of a terabyte takes no
space on disk but all of the memory. So a reader opens only regular files, and limits how much it
reads.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import BinaryIO

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_READ_BYTES = 1 << 24  # at a time
_OTHER_OPEN_FILES = 512  # libraries, sockets between ranks, pipes to workers, checkpoints


class UnusableFileError(OSError):
    """Not a regular file, or larger than its reader accepts."""


def open_regular(path: str | Path, what: str = "a file") -> io.FileIO:
    """Opens a regular file for reading, unbuffered. No other kind of file is opened, not even
    briefly.

    Args:
        what: the purpose of the file, for the message: "the marker of a checkpoint".

    Raises:
        UnusableFileError: for a directory, a FIFO, a socket or a device.
        OSError: as `open`.
    """
    _expect_regular(Path(path).stat().st_mode, path, what)

    # Another file may have taken its place since. O_NONBLOCK keeps a FIFO without a writer from
    # blocking, and the opened file is checked once more.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _expect_regular(os.fstat(descriptor).st_mode, path, what)
        return io.FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def allow_open_files(count: int) -> None:
    """Raises the limit of this process, and of its children, by so many open files on top of some
    hundreds of others; as far as the system lets it.
    """
    wanted = count + _OTHER_OPEN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def reason_of(failure: OSError) -> str:
    """The reason why a path could not be written."""
    places: list[Path] = []
    # An unusable file may be a link, which its writer does not follow, whether dangling or not.
    if isinstance(failure.filename, str | bytes) and not isinstance(failure, UnusableFileError):
        path = Path(os.fsdecode(failure.filename))
        places = [path, *path.parents]
    # For a dangling link, the system reports that the file exists. The check may fail as the write
    # did, for a name that is too long or in a directory without permission.
    with contextlib.suppress(OSError):
        for place in places:
            if place.is_symlink() and not place.exists():
                return f"{place} is a symbolic link to {place.readlink()}, which does not exist"
    return failure.strerror or str(failure)


def remove_empty_folder(path: str | Path) -> None:
    """Removes an empty directory. Anything else stays, also a link to an empty directory."""
    with contextlib.suppress(OSError):
        Path(path).rmdir()


def read_regular(path: str | Path, *, max_bytes: int, what: str = "a file") -> bytes:
    """The content of a regular file of at most `max_bytes`.

    Raises:
        UnusableFileError: for a directory, a FIFO, a socket or a device, and for a larger file.
        OSError: as `open` and `read`.
    """
    with open_regular(path, what) as stream:
        size = os.fstat(stream.fileno()).st_size
        pieces: list[bytes] = []
        rest = max_bytes + 1  # one more than is allowed: a file may grow while it is read
        while size <= max_bytes and rest > 0:
            piece = stream.read(min(rest, _READ_BYTES))
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
            rest -= len(piece)

    message = (
        f"Expected {what} of at most {max_bytes} bytes, got {max(size, max_bytes + 1)} or more"
    )
    raise UnusableFileError(errno.EFBIG, message, str(path))


def open_for_append(path: str | Path, what: str = "a file") -> int:
    """A descriptor that reads and appends to a regular file, which is created if missing.

    Symbolic links are not followed: in a directory that other users can write to, a link could make
    this process append to any file of its user.

    Raises:
        UnusableFileError: for a link, a directory, a FIFO, a socket or a device, before it is
            opened.
        OSError: as `open`.
    """
    with contextlib.suppress(FileNotFoundError):
        _expect_regular(os.lstat(path).st_mode, path, what)

    # Something else may have taken the name since.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    try:
        _expect_regular(os.fstat(descriptor).st_mode, path, what)
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _expect_regular(mode: int, path: str | Path, what: str) -> None:
    if not stat.S_ISREG(mode):
        found = next((kind for is_kind, kind in _KINDS if is_kind(mode)), "something else")
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise UnusableFileError(number, f"Expected {what}, got {found}", str(path))


class Sync(Enum):
    """The parts that are flushed to disk when a file is published."""

    ALL = "the content, then the name"
    CONTENT = "the content; the rename is the last step, and the reader syncs the directory"
    NOTHING = "no part: a note for running processes, which also works where syncing fails"


@contextmanager
def published(path: Path, sync: Sync = Sync.ALL) -> Iterator[BinaryIO]:
    """A stream whose content is in the file `path` once the block ends, whole and on disk.

    After an error there is no such file, with one exception: if only the last step of `Sync.ALL`
    fails, the file is whole, but a crash may lose it.
    """
    temporary = temporary_path(path)
    try:
        with failures_named(path), temporary.open("xb") as stream:
            yield stream
            if sync is not Sync.NOTHING:
                sync_stream(stream)
        temporary.replace(path)
    except BaseException:
        # Never after the rename: the directory may have another name by then.
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise

    if sync is Sync.ALL:
        sync_folder(path.parent)


@contextmanager
def failures_named(path: Path) -> Iterator[None]:
    """Names a file in errors of the system that name none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def temporary_path(path: Path) -> Path:
    """A name in the directory of `path` that no other writer uses, in any process, container or
    node. Open it with "x".
    """
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")


def sync_stream(stream: BinaryIO) -> None:
    """Flushes a stream to disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Flushes a directory's entries to disk, so that a rename in it survives a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
