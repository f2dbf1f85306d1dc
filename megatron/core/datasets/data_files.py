"""Data files as training reads them: regular files only, and never beyond where they end.

[Note: a data file that shrinks]

Training reads its data for days, and a file may be truncated meanwhile: by a copy over it, a quota,
a failing file system. Touching a mapped page that no longer has a file behind it kills the process
with SIGBUS, without a word. So tokens are read by pread, which returns fewer bytes or an error.
Indices are mapped, because they are read at random places; the file's size is checked before each
look-up. The check costs half a microsecond and leaves only the moment between the two.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.core.files import open_regular


class IndexedDatasetError(ValueError):
    """Data on disk that cannot be used: missing, foreign, truncated, or files that do not belong
    together, or with tokens that the model does not have. One line that names the file."""


def check_vocabulary(tokens: npt.NDArray[np.integer], vocab_size: int, prefix: str | Path) -> None:
    """IndexedDatasetError for tokens, at least one, that have no embedding.

    Args:
        vocab_size: ids from there on have none.
        prefix: of the files that they come from.
    """
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= vocab_size:
        raise IndexedDatasetError(
            f"{prefix}: expected token ids in range({vocab_size}), the vocabulary size, got "
            f"{lowest if lowest < 0 else highest}. The data was made with another tokenizer than "
            "this run's."
        )


class FileVersion(NamedTuple):
    """Distinguishes a file from another one that later has its name."""

    num_bytes: int
    mtime_ns: int


class DataFile:
    """An open file of data, read at given places.

    Args:
        path: of a regular file.
        what: it is, for messages: "a file of tokens".

    Raises:
        IndexedDatasetError: another kind of file, or one that cannot be opened.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        try:
            self._stream: BinaryIO = open_regular(path, what)
        except FileNotFoundError as error:
            raise IndexedDatasetError(f"{path}: expected {what}, got no such file.") from error
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            reason = error.strerror if isinstance(error, OSError) else error
            raise IndexedDatasetError(f"{path}: {reason}{_advice(error)}.") from error

        # Of the file that is open, which may no longer be the one under its name.
        status = os.fstat(self._stream.fileno())
        self.version = FileVersion(status.st_size, status.st_mtime_ns)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """`num_bytes` from byte `offset` on.

        Raises:
            IndexedDatasetError: they are not in the file, or no longer; or the file system failed.
        """
        size = self.version.num_bytes
        # Before the buffer is made: a wrong number may be a huge one.
        if not 0 <= offset <= offset + num_bytes <= size:
            end = offset + num_bytes
            raise IndexedDatasetError(
                f"{self.path}: expected bytes {offset} to {end} in it, got a file of {size} bytes."
            )

        content = self._pread(offset, num_bytes)
        while len(content) < num_bytes:  # the system reads at most 2 GiB at once
            more = self._pread(offset + len(content), num_bytes - len(content))
            if not more:
                raise _shrunk(self.path, size, os.fstat(self._stream.fileno()).st_size)
            content += more

        return content

    def array(self, offset: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """`count` values from byte `offset` on, read-only. IndexedDatasetError as `read`."""
        kind = np.dtype(dtype)
        return np.frombuffer(self.read(offset, count * kind.itemsize), dtype=kind)

    def map(self) -> MappedFile:
        """The same file, mapped. It stays mapped when this object is gone."""
        return MappedFile(self.path, self._stream, self.version.num_bytes)

    def _pread(self, offset: int, num_bytes: int) -> bytes:
        try:
            return os.pread(self._stream.fileno(), num_bytes, offset)
        except OSError as error:
            raise IndexedDatasetError(f"{self.path}: cannot be read ({error.strerror}).") from error


class MappedFile:
    """The bytes of a file, mapped.

    Attributes:
        content: uint8 [num_bytes], read-only. `check_size()` comes before each look.
    """

    def __init__(self, path: Path, stream: BinaryIO, num_bytes: int) -> None:
        self.path = path
        self.content: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._mapping: mmap.mmap | None = None
        if num_bytes == 0:  # such a file cannot be mapped
            return
        try:
            self._mapping = mmap.mmap(stream.fileno(), num_bytes, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file has shrunk by now
            raise IndexedDatasetError(
                f"{path}: cannot be mapped ({error}){_advice(error)}."
            ) from error
        self.content = np.frombuffer(self._mapping, dtype=np.uint8)

    def check_size(self) -> None:
        """IndexedDatasetError if it is shorter now. See [Note: a data file that shrinks]."""
        # size() is an fstat of the descriptor that the mapping keeps open.
        if self._mapping is not None and self._mapping.size() < len(self._mapping):
            raise _shrunk(self.path, len(self._mapping), self._mapping.size())


def _advice(error: Exception) -> str:
    """What to do about an error, where that is known."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"; the limit is {limit}: raise it (ulimit -n), or merge data sets"


def _shrunk(path: Path, before: int, now: int) -> IndexedDatasetError:
    expected = f"{before} bytes, as when it was opened"
    return IndexedDatasetError(
        f"{path}: expected {expected}, got {now}: it was cut while it was in use."
    )
