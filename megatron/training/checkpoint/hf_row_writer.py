"""Safetensors files that all ranks write together, each the rows that it holds.

Rank 0 makes the files with their headers, at their full sizes. Every rank knows all offsets
(`hf_layout.py`) and which of the chunks that several ranks hold are its own to write (`chunks.py`),
so the ranks write side by side without a message:

    rows of this rank  ->  a buffer, in the file's dtype  ->  their places in the file
                   this thread                        a lane for the disk

A piece of a few MiB is converted where it lies; from a device it comes down in the file's dtype.
What host memory holds in that dtype already is written from where it lies.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.core.device import Device
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.layout.boxes import Box, pieces
from megatron.core.dist_checkpointing.layout.holdings import shares
from megatron.core.dist_checkpointing.save.data_file import BufferPool
from megatron.core.dist_checkpointing.state.entries import Entry
from megatron.core.dist_checkpointing.state.tensor_bytes import TensorBytes
from megatron.core.host_memory import format_bytes
from megatron.core.lanes import Event, ThreadEvent
from megatron.core.models.families.row_map import RowMap
from megatron.core.shared_file import SharedFile
from megatron.training.checkpoint.hf_layout import (
    FolderLayout,
    Part,
    Place,
    rows_in_file,
    shifted,
    tensors_of_parts,
)


class OwnRows(NamedTuple):
    """A share of one of our tensors that this rank writes."""

    entry: Entry
    rows: RowMap  # of the whole entry
    place: Place
    box: Box  # of the entry's global tensor


@dataclass(frozen=True)
class RowPlan:
    """What all ranks write together, and what of it is this rank's.

    Attributes:
        layout: of the folder, the same on every rank.
        own: what this rank writes.
    """

    layout: FolderLayout
    own: tuple[OwnRows, ...]

    @classmethod
    def of(
        cls,
        entries: Sequence[Entry],
        rows: Mapping[str, RowMap],
        dtypes: Mapping[str, torch.dtype],
        rank: int,
        max_shard_bytes: int,
    ) -> RowPlan:
        """By arithmetic, without a message between ranks.

        Args:
            entries: the same on every rank.
            rows: where the rows of each entry go, by its key.
            dtypes: in which they are written, by the same key.
            max_shard_bytes: as for `FolderLayout.of`.

        Raises:
            CheckpointError: as `tensors_of_parts` and `FolderLayout.of`.
        """
        parts = [Part(rows[own.key], own.saved_as.shape, dtypes[own.key]) for own in entries]
        layout = FolderLayout.of(tensors_of_parts(parts), max_shard_bytes)

        held = [
            (own.saved_as.holdings, part.dtype.itemsize)
            for own, part in zip(entries, parts, strict=True)
        ]
        return cls(layout, tuple(_own(entries, parts, layout, shares(held, rank))))


def _own(
    entries: Sequence[Entry],
    parts: Sequence[Part],
    layout: FolderLayout,
    own: Iterator[tuple[int, Box, int]],
) -> Iterator[OwnRows]:
    for number, box, _ in own:
        rows = parts[number].rows
        yield OwnRows(entries[number], rows, layout.places[rows.name], box)


def make_files(folder: Path, layout: FolderLayout) -> None:
    """Makes all files of weights in an empty folder, at their full sizes, without the tensors.

    Raises:
        CheckpointError: if the file system lacks the room.
        OSError: if it fails.
    """
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    # The files have holes at first, so a full disk would only show up gigabytes later. Some network
    # file systems know no sizes.
    if system.f_blocks and free < layout.nbytes:
        raise CheckpointError(
            f"Expected room for {format_bytes(layout.nbytes)} of weights in {folder.parent}, got "
            f"{format_bytes(free)}: No space left on device."
        )

    for file in layout.files:
        with (folder / file.name).open("xb") as stream:
            stream.write(file.header)
            stream.truncate(file.nbytes)


def check_files(folder: Path, layout: FolderLayout) -> None:
    """CheckpointError if a file has another size or header than `make_files` gave it.

    A file system that is not shared properly may lose either while several machines write.
    """
    for file in layout.files:
        path = folder / file.name
        with path.open("rb") as stream:
            header, size = stream.read(len(file.header)), os.fstat(stream.fileno()).st_size
        if size != file.nbytes:
            raise CheckpointError(f"Expected {path} to have {file.nbytes} bytes, got {size}.")
        if header != file.header:
            raise CheckpointError(f"Expected {path} to begin with its header, got other bytes.")


def expect_same_layout(layout: FolderLayout, fingerprint: str) -> None:
    """CheckpointError unless rank 0 has the same layout, which its fingerprint tells."""
    if layout.fingerprint != fingerprint:
        raise CheckpointError(
            "Expected the same tensors, dtypes and shard size on all ranks, got "
            f"{layout.fingerprint} here and {fingerprint} on rank 0."
        )


def expect_all_bytes(written: int, layout: FolderLayout) -> None:
    """CheckpointError unless the ranks have written as much as the tensors take: rows that no rank
    holds would be zeros.
    """
    expected = sum(tensor.nbytes for tensor in layout.tensors)
    if written != expected:
        raise CheckpointError(
            f"Expected the ranks to write {expected} bytes of weights, got {written}: some rows "
            "are on no rank, or on several."
        )


def write_own_rows(folder: Path, plan: RowPlan, device: Device) -> int:
    """Writes this rank's rows into the files, and brings them to disk. Returns the number of bytes.

    Args:
        folder: of `make_files`, on a file system that all ranks see.
        device: on which tensors may lie; its work up to here is waited for.

    Raises:
        CheckpointError: if the files cannot be found here.
        OSError: if the file system failed.
    """
    with ExitStack() as stack:
        files = {}
        for name in sorted({own.place.file for own in plan.own}):
            files[name] = open_rows(folder / name)
            stack.callback(files[name].abort)
        with _Staging(device) as staging:
            for own in plan.own:
                _stage(own, files[own.place.file], staging)
        for file in files.values():
            file.close()
    return sum(own.box.numel * own.place.tensor.dtype.itemsize for own in plan.own)


def _stage(own: OwnRows, file: SharedFile, staging: _Staging) -> None:
    """Queues the writes of a share, piece by piece."""
    entry, rows, place, box = own
    stored = entry.values.as_stored()
    tensor = entry.part_of(stored.tensor)
    if box.sizes:
        tensor = tensor[box.within(entry.offsets).slices()]
    source = TensorBytes(tensor, stored.scale, place.tensor.dtype)

    begin = 0
    in_place = source.in_host_memory()
    for piece in pieces(box.sizes, staging.buffer_bytes // place.tensor.dtype.itemsize):
        nbytes = piece.numel * place.tensor.dtype.itemsize
        write = partial(write_rows, file, rows, shifted(piece, box.offsets), place)
        if in_place is None:
            staging.copy(source, begin, nbytes, write)
        else:
            staging.enqueue(partial(write, in_place[begin : begin + nbytes]))
        begin += nbytes


def write_rows(file: SharedFile, rows: RowMap, box: Box, place: Place, content: memoryview) -> None:
    """Writes the bytes of a box of one of our tensors to where they belong.

    Args:
        rows: of our tensor, in the one at `place`.
        content: in the file's dtype, row by row.
    """
    begin = 0
    for part in rows_in_file(rows, box, place):
        file.write_at(part.offset, content[begin : begin + part.nbytes])
        begin += part.nbytes


def open_rows(path: Path) -> SharedFile:
    """A file of `make_files`, to write rows to. CheckpointError if it cannot be found here."""
    try:
        return SharedFile(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"Expected every rank to see {path}, which rank 0 has made, got no such file. Save to "
            "a file system that all ranks share."
        ) from error


class _Staging:
    """A few buffers on their way to the disk's lane and back. Entered once."""

    def __init__(self, device: Device) -> None:
        device.event().synchronize()
        self._pool = BufferPool(device)
        self._disk = device.host_lane("rows to disk")
        # Each with the event after which it is free.
        done: Event = ThreadEvent.done()
        self._buffers = deque((buffer, done) for buffer in self._pool.lend())
        self._last = done  # after which all writes so far are done

    @property
    def buffer_bytes(self) -> int:
        return self._pool.buffer_bytes

    def __enter__(self) -> _Staging:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Whatever has failed: nothing may write once the files are closed.
        self._disk.close()
        if kind is None:
            self._last.synchronize()

    def copy(
        self, source: TensorBytes, begin: int, nbytes: int, write: Callable[[memoryview], None]
    ) -> None:
        """Has some bytes of a tensor written. When this returns, they have been read.

        Raises what an earlier write has raised.
        """
        buffer, is_free = self._buffers.popleft()
        is_free.synchronize()
        source.copy(begin, buffer[:nbytes], self._pool.d2h)
        self.enqueue(partial(write, buffer[:nbytes]))
        self._buffers.append((buffer, self._last))

    def enqueue(self, write: Callable[[], None]) -> None:
        """Queues a write. After one that fails, no other is carried out."""
        self._last = self._disk.enqueue(write)
