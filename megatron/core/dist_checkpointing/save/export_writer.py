"""One rank's rows of exported files, written beside its data file: through the same buffers, by the
same lane.

    rows of chunks  ->  a buffer, in the dtypes of the files  ->  their places in the files
             the thread that saves                      the lane for the disk

A buffer gathers the rows of many chunks, wherever they go. Rows of a page or more lie in it as they
will lie in the pages of the file, so that direct I/O can write them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from megatron.core.dist_checkpointing.format.manifest import (
    BLOCK_BYTES,
    DATA_ALIGNMENT,
)
from megatron.core.dist_checkpointing.save.data_file import DataFileWriter
from megatron.core.dist_checkpointing.save.export import ExportedRows
from megatron.core.dist_checkpointing.state.tensor_bytes import TensorBytes
from megatron.core.shared_file import SharedFile

_VALUE_ALIGNMENT = 16  # bytes; no value is larger


class _Segment(NamedTuple):
    """Bytes of a buffer that go to one place."""

    file: str
    offset: int  # in the file
    begin: int  # in the buffer
    end: int


class ExportWriter:
    """Writes rows of exported files. Used by the thread that uses the rank's data file."""

    def __init__(self, beside: DataFileWriter, open_file: Callable[[str], SharedFile]) -> None:
        """
        Args:
            beside: the rank's data file, from which buffers are taken. It raises the disk's errors.
            open_file: called on the disk's lane, when a file is first written to.
        """
        self._beside = beside
        self._open_file = open_file
        self._files: dict[str, SharedFile] = {}  # of the lane
        self._buffer: memoryview | None = None
        self._fill = 0  # bytes in it
        self._segments: list[_Segment] = []

    def write(
        self, rows: ExportedRows, tensor: torch.Tensor, scale: torch.Tensor | None = None
    ) -> tuple[str, ...]:
        """Has rows written. When this returns, the tensor has been read.

        Args:
            tensor: their values, of any dtype and strides, on any device.
            scale: as for `DataFileWriter.write_tensor`.

        Returns:
            The digest of each block of their bytes in the file.
        """

        def target_of(begin: int, nbytes: int) -> memoryview:
            return self._extend(rows.file, rows.offset + begin, nbytes)

        return TensorBytes(tensor, scale, rows.dtype).copy_out(target_of, self._beside.d2h)

    def finish(self) -> None:
        """Has all that was written brought to disk, before the data file that is written beside."""
        self._flush()
        self._beside.queue(self._close_files, name="close")

    def abort(self) -> None:
        """Lets go of the files, once the lane has. They are not this rank's to delete."""
        for file in self._files.values():
            file.abort()

    def _extend(self, file: str, offset: int, nbytes: int) -> memoryview:
        """The bytes of a file from `offset` on, to be filled: `nbytes`, or the blocks that fit."""
        unit = DATA_ALIGNMENT if nbytes >= DATA_ALIGNMENT else _VALUE_ALIGNMENT
        buffer, begin = self._buffer, self._fill + (offset - self._fill) % unit
        if buffer is None or buffer.nbytes - begin < min(nbytes, BLOCK_BYTES):
            self._flush()
            self._buffer = buffer = self._beside.take_buffer()
            begin = offset % unit
            if buffer.nbytes - begin < min(nbytes, BLOCK_BYTES):
                begin = 0  # a buffer that is no larger than a block

        room = buffer.nbytes - begin
        end = begin + (nbytes if nbytes <= room else room - room % BLOCK_BYTES)
        # Joined to the segment before, if it follows that here and in the file.
        last = self._segments[-1] if self._segments else None
        shift = offset - begin
        if last and (last.file, last.end, last.offset - last.begin) == (file, begin, shift):
            self._segments[-1] = last._replace(end=end)
        else:
            self._segments.append(_Segment(file, offset, begin, end))
        self._fill = end
        return buffer[begin:end]

    def _flush(self) -> None:
        """Hands the current buffer to the disk."""
        if self._buffer is not None:
            write = partial(self._write_out, self._buffer, self._segments)
            nbytes = sum(segment.end - segment.begin for segment in self._segments)
            self._beside.queue(write, self._buffer, nbytes=nbytes)
        self._buffer, self._fill, self._segments = None, 0, []

    # On the lane

    def _write_out(self, buffer: memoryview, segments: list[_Segment]) -> None:
        for file, offset, begin, end in segments:
            if file not in self._files:
                self._files[file] = self._open_file(file)
            self._files[file].write_at(offset, buffer[begin:end])

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
