"""Safetensors files, checked before their library opens them.

The library maps a file before it looks at it. A sparse file of a terabyte, which takes no room on
disk, then causes a MemoryError wherever address space is limited. So the first eight bytes, the
length of the header, are checked here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.core.files import open_regular
from megatron.core.json_reading import parse_json
from megatron.core.log import printable

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit


class Safetensors(NamedTuple):
    """A file that is open.

    Attributes:
        reader: of the safetensors library, which has mapped the file.
        num_bytes: of the file.
    """

    reader: Any
    num_bytes: int


@contextmanager
def open_safetensors(path: Path) -> Iterator[Safetensors]:
    """Opens a file for the length of a block.

    Raises:
        CheckpointDamagedError: if it is not a safetensors file, or not a whole one.
        UnusableFileError: for a folder, a FIFO, a socket or a device.
        OSError: as `open`.
    """
    # The library opens by name as well, and would block on a FIFO.
    with open_regular(path, "a safetensors file") as stream:
        num_bytes = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    most = min(num_bytes - _LENGTH_BYTES, _MAX_HEADER_BYTES)
    if not 0 < length <= most:
        raise _not_whole(path, f"a header of {length} bytes in a file of {num_bytes}")

    try:
        opened = safe_open(path, framework="pt")
    except SafetensorError as error:
        whole = _size_by_header(path, length)
        if whole is not None and whole > num_bytes:
            raise _not_whole(path, f"{num_bytes} of {whole} bytes") from error
        raise _not_whole(path, printable(str(error))) from error
    except MemoryError:
        got = f"{num_bytes} bytes, which this process has no room to map"
        raise _not_whole(path, got) from None
    with opened as reader:
        yield Safetensors(reader, num_bytes)


def _size_by_header(path: Path, length: int) -> int | None:
    """The bytes that a file has if its header is right; None for a header that says nothing."""
    with open_regular(path, "a safetensors file") as stream:
        stream.seek(_LENGTH_BYTES)
        text = stream.read(length)
    try:
        header = parse_json(text, max_depth=4)
    except ValueError:
        return None

    ends = []
    for entry in header.values() if isinstance(header, dict) else ():
        match entry:
            case {"data_offsets": [int(), int(end)]}:
                ends.append(end)
    return _LENGTH_BYTES + length + max(ends) if ends else None


def _not_whole(path: Path, got: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(f"Expected a whole safetensors file at {path}, got: {got}.")
