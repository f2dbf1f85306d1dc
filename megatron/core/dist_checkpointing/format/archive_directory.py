"""The directory of the zip archives that `torch.save` writes, and the bytes of their records.

Nothing that the directory says is believed before it has been held against the archive: each record
lies within it, is neither compressed nor encrypted, and has a name of its own.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from typing import IO, NamedTuple, TypeAlias, cast

from megatron.core.dist_checkpointing.errors import UntrustedReader, reason, shown

# `zipfile` makes an object for each entry of an archive's directory, of eleven times the bytes of
# the entry. These bounds leave a file some 400,000 tensors, and a blob more than it ever has.
MAX_DIRECTORY_BYTES = 1 << 25
MAX_BLOB_DIRECTORY_BYTES = 1 << 20
_MAX_NAME_CHARS = 1024  # of a record: names are put together for every tensor that refers to one

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature; lengths of the name and of what follows it
_LOCAL_SIGNATURE = b"PK\x03\x04"
_ENCRYPTED = 1  # bit of a record's flags
_PICKLE_BEGIN = b"\x80"  # the opcode that says a pickle's protocol


# The bytes of an archive from a place on: as many as are asked for, fewer only at its end.
ReadAt: TypeAlias = Callable[[int, int], bytes]


class ArchiveRecord(NamedTuple):
    """One record of an archive."""

    begin: int  # bytes from the beginning of the archive
    nbytes: int
    crc: int  # of the bytes, as the archive's directory says


class ArchiveBytes(UntrustedReader):
    """An archive that has not been checked yet."""

    def __init__(self, read_at: ReadAt, nbytes: int, source: str) -> None:
        """As `Archive`."""
        super().__init__(source)
        self.nbytes = nbytes
        self._read_at = read_at

    def directory(self, max_nbytes: int) -> dict[str, ArchiveRecord]:
        """The records by name, each within the archive and stored as it is.

        Args:
            max_nbytes: bound on the directory, which takes eleven times that in memory.

        Raises:
            CheckpointDamagedError: if it is not the directory of a whole archive of torch.save.
            OSError: if it cannot be read.
        """
        records: dict[str, ArchiveRecord] = {}
        for entry in self._entries(max_nbytes):
            name = entry.filename
            if len(name) > _MAX_NAME_CHARS:
                self._fail(f"names of at most {_MAX_NAME_CHARS} characters", f"one of {len(name)}")
            if name in records:
                self._fail("each record once", f"several of {shown(name)}")
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _ENCRYPTED:
                self._fail(f"the record {shown(name)} as it is", "it compressed or encrypted")

            # The directory gives the place of the local header, whose length is known only to it.
            header = self.read_at(entry.header_offset, _LOCAL_HEADER.size)
            signature, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
            begin = entry.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
            is_inside = (
                begin + entry.file_size <= self.nbytes and entry.compress_size == entry.file_size
            )
            if signature != _LOCAL_SIGNATURE or not is_inside:
                self._fail(
                    f"the record {shown(name)} within {self.nbytes} bytes",
                    f"{entry.file_size} bytes at {begin}",
                )
            records[name] = ArchiveRecord(begin, entry.file_size, entry.CRC)

        # A million records could share the same bytes, each to be read for its checksum.
        total = sum(record.nbytes for record in records.values())
        if total > self.nbytes:
            self._fail(f"records of {self.nbytes} bytes together", f"{total}")
        return records

    def read_at(self, begin: int, nbytes: int) -> bytes:
        """Exactly these bytes. CheckpointDamagedError if the archive does not have them."""
        # Checked before the read, which allocates as much as it is asked for.
        if begin < 0 or begin + nbytes > self.nbytes:
            self._fail(f"{nbytes} bytes within {self.nbytes}", f"some at {begin}")
        content = self._read_at(begin, nbytes)
        if len(content) != nbytes:
            self._fail(f"{nbytes} bytes at {begin}", f"{len(content)}")
        return content

    def _entries(self, max_nbytes: int) -> list[zipfile.ZipInfo]:
        bounded = _DirectoryReads(self._read_at, self.nbytes, max_nbytes)
        try:
            with zipfile.ZipFile(cast(IO[bytes], bounded)) as archive:
                return archive.infolist()
        except _TooLargeError as error:
            self._fail(f"a directory of at most {max_nbytes} bytes", f"one of {error.nbytes}")
        except Exception as error:  # damaged archives raise almost anything
            if isinstance(error, OSError) and not isinstance(error, _OutsideError):
                raise

            # Before torch 1.6, torch.save wrote one pickle after the other and no archive.
            hint = ""
            if self.nbytes and self.read_at(0, 1) == _PICKLE_BEGIN:
                hint = (
                    "; it may have been written with _use_new_zipfile_serialization=False: "
                    "load it with torch.load and save it again without that"
                )
            self._fail("what torch.save writes", f"no archive ({reason(error)}){hint}", error)


class _TooLargeError(Exception):
    """A directory of more bytes than `zipfile` may be given."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


class _OutsideError(OSError):
    """A place before the beginning of a file. `zipfile` asks for one, and expects an OSError."""


class _DirectoryReads:
    """An archive as a file for `zipfile`, which reads the directory in one piece, however large.

    Checking the directory's length beforehand would take another parser of zip archives, and the
    two might find different directories.
    """

    def __init__(self, read_at: ReadAt, nbytes: int, max_nbytes: int) -> None:
        self._read_at = read_at
        self._nbytes = nbytes
        self._max_nbytes = max_nbytes
        self._position = 0

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        if base + offset < 0:
            raise _OutsideError(f"Expected a place in the file, got {base + offset}.")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        # Without a size `zipfile` reads the last 64 KiB, where a comment may be.
        if size > self._max_nbytes:
            raise _TooLargeError(size)
        rest = max(0, self._nbytes - self._position)
        content = self._read_at(self._position, rest if size < 0 else min(size, rest))
        self._position += len(content)
        return content
