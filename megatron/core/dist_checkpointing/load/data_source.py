"""Where loads get their data: a local file, or an object in a remote store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.core.files import open_regular

_REQUEST_BYTES = 1 << 22  # of an object, at a time

Then: TypeAlias = Callable[[memoryview], None]


def ignore(_buffer: memoryview) -> None:
    """Nothing to do when a buffer has been filled."""


def read_file(path: Path, offset: int, buffers: Iterable[memoryview], then: Then) -> None:
    """As `Store.read_into`, from a local file."""
    # Opened once for all buffers: each opened file has a read-ahead of its own.
    with open_regular(path) as file:
        file.seek(offset)
        for buffer in buffers:
            rest = buffer
            while rest:
                num_read = file.readinto(rest)
                if not num_read:
                    got = buffer.nbytes - rest.nbytes
                    raise _truncated(path, file.tell() - got, buffer.nbytes, got)
                rest = rest[num_read:]
            then(buffer)


def read_object(
    files: Any, path: str, source: str, offset: int, buffers: Iterable[memoryview], then: Then
) -> None:
    """As `Store.read_into`, from an fsspec file system.

    Args:
        files: the file system.
        path: in it.
        source: the same for messages.
    """
    # Each request has a latency, so it is for several buffers.
    for batch in _batches(buffers):
        nbytes = sum(buffer.nbytes for buffer in batch)
        content = files.cat_file(path, start=offset, end=offset + nbytes)
        if len(content) != nbytes:
            raise _truncated(source, offset, nbytes, len(content))

        offset, rest = offset + nbytes, memoryview(content)
        for buffer in batch:
            buffer[:], rest = rest[: buffer.nbytes], rest[buffer.nbytes :]
            then(buffer)


def _batches(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Buffers that are not empty, in lists for one request each."""
    batch: list[memoryview] = []
    for buffer in filter(len, buffers):
        batch.append(buffer)
        if sum(each.nbytes for each in batch) >= _REQUEST_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _truncated(source: Path | str, offset: int, nbytes: int, got: int) -> CheckpointDamagedError:
    return CheckpointDamagedError(
        f"Expected {nbytes} bytes at byte {offset} of {source}, got {got}: truncated."
    )
