"""Writes a rank's data file, and its rows of exported files, through buffers that all saves share.

    d2h lane        copies tensors of a device down, piece by piece, into pinned memory
    saving thread   copies a block into the current buffer, and hashes it while it is cached
    disk lane       opens the files and writes the full buffers, in order, to the store's sink

The memory of a save therefore does not grow with the state, and copying and hashing are hidden as
long as the disk is slower. Copies, digests and writes all release the GIL.

[Note: in place] Large tensors in host memory are hashed and written from their own memory, together
with the contents of the buffer before and after them: one system call takes several spans. Their
memory must not change until the event of `read_in_place`, so an update waits for the disk. It would
also wait without this, whenever the tensors are larger than the buffers.

[Note: staging] The next optimizer step waits until its states have been read. States on a device
would wait for the disk, buffer by buffer. For them the pool grows instead: when all buffers are
queued for the disk, more are added. The step continues once the states have been copied to host
memory. The pool grows up to a share of the free memory, and keeps its buffers for later saves.
Beyond that share, the save waits for the disk.

The buffers are not pinned: that would take seconds per GiB in the middle of training, whose kernel
launches would wait for the driver meanwhile. Only two small pieces are, from the start, through
which all bytes of a device come down: while one is copied to a buffer and hashed, the link fills
the other. This has not been measured on a GPU; copying and hashing probably limit the speed.

States in host memory are not staged, since a copy would need as much host memory again.

[Note: rows] Rows of exported files use the same buffers and the same lane, in the dtypes of these
files. A buffer gathers the rows of many chunks, whatever their files. Rows of a page or more have
the same alignment in the buffer as in the file, so that direct I/O can write them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from megatron.core.device import Device
from megatron.core.dist_checkpointing.format.index import ExportedRows
from megatron.core.dist_checkpointing.format.manifest import BLOCK_BYTES, DATA_ALIGNMENT, digests_of
from megatron.core.dist_checkpointing.state.entries import Landing, TensorBytes
from megatron.core.host_memory import HostLimits, HostMemoryError, HostSlab, format_bytes
from megatron.core.lanes import Event, Lane
from megatron.core.shared_file import MEMORY_ALIGNMENT, SharedFile, address_of
from megatron.core.timeline import NO_TIMELINE, AnyTimeline
from megatron.core.trace_file import DISK

logger = logging.getLogger(__name__)

NUM_BUFFERS = 3  # one is being filled, one is being written, one is ready for whichever is faster
BUFFER_BYTES = 8 << 20  # at 4 MiB a fast disk waits noticeably between one write and the next
# Staging adds at most so many at once: 256 MiB. Large states would take thousands of mappings and
# calls of the driver if buffers came one by one.
SLAB_BUFFERS = 32
_IN_PLACE_BYTES = 1 << 16  # of a tensor; the system takes longer over many small spans than a copy
_GATHERED_BYTES = 4 * BUFFER_BYTES  # for one call; between two of them a fast disk waits
_VALUE_ALIGNMENT = 16  # bytes; no value of an exported file is larger


class LocalSink:
    """A new local file, written with direct I/O where possible.

    The page cache would cost a copy, and evict pages that are in use.
    """

    def __init__(self, path: Path) -> None:
        path.open("xb").close()
        self._path = path
        self._nbytes = 0
        self._file = SharedFile(path)

    def write(self, spans: Sequence[memoryview]) -> None:
        """Appends spans of bytes. The size of each is a multiple of DATA_ALIGNMENT, except for the
        last span of the last write.

        Direct I/O also needs memory at a multiple of MEMORY_ALIGNMENT.
        """
        self._file.write_at(self._nbytes, *spans)
        self._nbytes += sum(span.nbytes for span in spans)

    def close(self) -> None:
        """Closes the file, which is then durable."""
        # Publishing syncs the directory once for the files of all ranks.
        self._file.close(syncs_name=False)

    def abort(self) -> None:
        """Closes and deletes the file. May be called in any state; never raises."""
        self._file.abort()
        with contextlib.suppress(OSError):
            self._path.unlink()


class RemoteSink:
    """A new file of a remote store, which appears when it is closed, or part by part. Has the
    interface of `LocalSink`.
    """

    def __init__(self, files: Any, path: str) -> None:
        self._files = files
        self._path = path
        self._file = files.open(path, "wb")

    def write(self, spans: Sequence[memoryview]) -> None:
        for span in spans:
            self._file.write(span)

    def close(self) -> None:
        self._file.close()

    def abort(self) -> None:
        # Implementations differ in how they discard a file, and in their errors. All of them can
        # close and delete.
        for end in (self._file.close, lambda: self._files.rm_file(self._path)):
            with contextlib.suppress(Exception):
                end()


DataSink: TypeAlias = LocalSink | RemoteSink


class BufferPool:
    """Page-aligned buffers for a rank's data files. One file at a time uses them.

    Attributes:
        buffer_bytes: of each buffer.
        landing: where bytes of a device arrive, pinned on a GPU.
        staged_bytes: of the buffers that have been added; see [Note: staging].
    """

    def __init__(
        self,
        device: Device,
        num_buffers: int = NUM_BUFFERS,
        buffer_bytes: int = BUFFER_BYTES,
        *,
        staging_share: float = 0.0,
        num_local_ranks: int = 1,
    ) -> None:
        """Allocates the memory and makes it resident.

        Args:
            num_buffers: initial number, at least two.
            buffer_bytes: of each; at least a block, and a multiple of DATA_ALIGNMENT.
            staging_share: of the free host memory, for more buffers; see [Note: staging].
            num_local_ranks: ranks on this machine, which divide that share.

        Raises:
            HostMemoryError, PinError: as `HostSlab` does.
        """
        self.buffer_bytes = buffer_bytes
        self.staged_bytes = 0
        self._device = device
        self._staging_share = staging_share
        self._num_local_ranks = num_local_ranks

        # Zeroed, to touch every page here and not within the first save.
        nbytes = num_buffers * buffer_bytes
        slab = HostSlab(nbytes, device, is_pinned=False, purpose="checkpoint buffers")
        slab.tensor(0, slab.nbytes, torch.uint8).zero_()
        self._buffers = _cut(slab, buffer_bytes)

        # Tensors are copied while the device computes. (Not run on a GPU yet.) Without one,
        # the pieces are never touched and cost addresses only.
        piece_bytes = max(1, buffer_bytes // 2 // BLOCK_BYTES) * BLOCK_BYTES
        pieces = HostSlab(2 * piece_bytes, device, is_pinned=True, purpose="copies of checkpoints")
        lane = device.lane("checkpoint d2h")
        self.landing = Landing(lane, tuple(_cut(pieces, piece_bytes)))
        self._is_lent = threading.Lock()

    def lend(self) -> list[memoryview]:
        """Lends the buffers until `take_back`. RuntimeError if they are lent already."""
        if not self._is_lent.acquire(blocking=False):
            raise RuntimeError(
                "Expected free buffers, got buffers that are in use by a data file that is still "
                "being written."
            )
        return list(self._buffers)

    def lend_more(self) -> list[memoryview]:
        """Adds and lends more buffers: a slab, or as many as there is room for."""
        num_buffers = min(SLAB_BUFFERS, self._room())
        if not num_buffers:
            return []

        nbytes = num_buffers * self.buffer_bytes
        try:
            slab = HostSlab(nbytes, self._device, is_pinned=False, purpose="staging a checkpoint")
        except HostMemoryError as error:
            # The save continues with the buffers it has, and takes longer.
            logger.warning(
                "Staging checkpoints in %s, and no more: %s", format_bytes(self.staged_bytes), error
            )
            self._staging_share = 0.0
            return []

        added = _cut(slab, self.buffer_bytes)
        self._buffers += added
        self.staged_bytes += nbytes
        return added

    def take_back(self) -> None:
        """Ends the loan of the buffers."""
        self._is_lent.release()

    def _room(self) -> int:
        """The number of buffers that may still be added."""
        if not self._staging_share:
            return 0
        available = HostLimits.read().available
        if available is None:
            return 0  # the free memory is unknown, so none is taken

        # The share is of the memory that was free before this rank staged anything.
        part = available / self._num_local_ranks + self.staged_bytes
        return max(0, int(self._staging_share * part - self.staged_bytes) // self.buffer_bytes)


def _cut(slab: HostSlab, nbytes: int) -> list[memoryview]:
    """A slab's buffers of this size, which keep it alive."""
    whole = slab.tensor(0, slab.nbytes, torch.uint8).numpy().data
    return [whole[begin : begin + nbytes] for begin in range(0, slab.nbytes, nbytes)]


class _Segment(NamedTuple):
    """Bytes of a buffer that go to one place of an exported file."""

    file: str
    offset: int  # in the file
    begin: int  # in the buffer
    end: int


def _export_nothing(file: str) -> SharedFile:
    raise RuntimeError(f"Expected no exported file, got {file}.")


class DataFileWriter:
    """Writes a data file sequentially, and rows of exported files.

    An error of the disk is raised once, by the next call. The data file is then deleted, and the
    buffers are free for the next save. Used by one thread at a time, which is not the lane's.

    Attributes:
        position: bytes of the data file so far.
        is_staging: whether to add buffers, if the pool has room, instead of waiting for the disk.
            May be set at any time.
    """

    def __init__(
        self,
        open_sink: Callable[[], DataSink] | None,
        pool: BufferPool,
        disk: Lane,
        timeline: AnyTimeline = NO_TIMELINE,
        *,
        open_exported: Callable[[str], SharedFile] = _export_nothing,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Borrows the pool until the file is finished or aborted.

        Args:
            open_sink: creates the data file. Called on the lane before the first write, because
                creating a file may be slow, and the optimizer waits for the saving thread. None: no
                data file, only rows of exported files.
            disk: a host lane. It continues after errors of the disk.
            timeline: records the work of the disk.
            open_exported: opens an exported file. Called on the lane before the first write to it.
            check: called before each write. If it raises, the queued writes are skipped, so a
                cancelled save ends early.

        Raises:
            RuntimeError: if another file has the pool.
        """
        self.position = 0
        self.is_staging = False
        self._free = deque(pool.lend())  # the disk gives them back, on its lane
        self._current = self._free.popleft()
        self._begin = self._fill = 0  # the range of it that is not among the spans yet
        self._spans: list[memoryview] = []  # the next spans of the data file
        self._has_in_place = False  # since the last call of `read_in_place`
        self._row_buffer: memoryview | None = None  # see [Note: rows]
        self._segments: list[_Segment] = []  # of it
        self._pool = pool
        self._open_sink = open_sink
        self._open_exported = open_exported
        self._check_before_write = check
        self._disk = disk
        self._timeline = timeline
        self._is_open = True
        self._is_given_up = False
        self._error: BaseException | None = None  # the disk's first
        self._queued: deque[Event] = deque()  # writes, the oldest first; some may be done
        # On the lane:
        self._sink: DataSink | None = None
        self._exported: dict[str, SharedFile] = {}

    def write(self, content: bytes | memoryview) -> None:
        """Appends a copy of bytes, such as a blob's header."""
        self._check()
        rest = memoryview(content)
        while rest:
            span = self._extend(rest.nbytes)
            span[:] = rest[: span.nbytes]
            rest = rest[span.nbytes :]

    def pad_to(self, offset: int) -> None:
        """Appends zeros up to `offset` in the file. ValueError if the file is longer already."""
        self._check()
        if offset < self.position:
            raise ValueError(
                f"Expected to pad a data file of {self.position} bytes so far, got up to {offset}."
            )
        while self.position < offset:
            np.frombuffer(self._extend(offset - self.position), np.uint8).fill(0)

    def write_tensor(
        self, tensor: torch.Tensor, scale: torch.Tensor | None = None
    ) -> tuple[str, ...]:
        """Appends a tensor's values, row by row. Afterwards the tensor has been read, or will have
        been at the event of `read_in_place`.

        Args:
            tensor: of any dtype and strides, on any device. `position` must be a multiple of
                DATA_ALIGNMENT.
            scale: scale of a state that is stored with one; its fp32 values are written.

        Returns:
            The digest of each block of its bytes in the file.
        """
        self._check()
        if self.position % DATA_ALIGNMENT:
            raise ValueError(
                f"Expected a tensor at a multiple of {DATA_ALIGNMENT} bytes, got shape "
                f"{tuple(tensor.shape)} at byte {self.position}."
            )

        source = TensorBytes(tensor, scale)
        in_place = source.in_host_memory() if source.nbytes >= _IN_PLACE_BYTES else None
        if in_place is not None and address_of(in_place) % MEMORY_ALIGNMENT == 0:
            return self._write_in_place(in_place)

        return source.copy_out(
            lambda _, nbytes: self._extend(nbytes, BLOCK_BYTES), self._pool.landing
        )

    def write_rows(
        self, rows: ExportedRows, tensor: torch.Tensor, scale: torch.Tensor | None = None
    ) -> tuple[str, ...]:
        """Writes rows of an exported file. Afterwards the tensor has been read.

        Args:
            tensor: values of the rows, of any dtype and strides, on any device.
            scale: as for `write_tensor`.

        Returns:
            The digest of each block of their bytes in the file.
        """
        self._check()

        def target_of(begin: int, nbytes: int) -> memoryview:
            return self._extend_rows(rows.file, rows.offset + begin, nbytes)

        return TensorBytes(tensor, scale, rows.dtype).copy_out(target_of, self._pool.landing)

    def read_in_place(self) -> Event | None:
        """Returns an event after which no tensor so far is read; None if all have been read."""
        self._check()
        if not self._has_in_place:
            return None
        self._has_in_place = False
        self._queue_spans()
        return self._queued[-1]

    def finish(self, meanwhile: Callable[[], None] = lambda: None) -> int:
        """Closes all files, which are then durable. Returns the data file's size in bytes.

        Args:
            meanwhile: called while the disk is still writing.
        """
        self._check()
        self.is_staging = False
        self._queue_rows()
        self._close_span()
        self._queue_spans()
        self._queue(self._close_files, name="close")
        meanwhile()
        self._wait(self._queued[-1])
        self._check()
        self._end()
        return self.position

    def abort(self) -> None:
        """Closes the files unless they are finished, waits for the lane, and deletes the data file.
        Exported files are not deleted, since other ranks write to them too.
        """
        if self._is_open:
            self._is_given_up = True
            while self._queued:
                self._wait(self._queued.popleft())
            if self._sink is not None:
                self._sink.abort()
            for file in self._exported.values():
                file.abort()
            self._end()

    def _write_in_place(self, content: memoryview) -> tuple[str, ...]:
        """Appends a tensor from its own memory. See [Note: in place]."""
        self._has_in_place = True
        digests: list[str] = []
        step = self._pool.buffer_bytes // BLOCK_BYTES * BLOCK_BYTES
        for begin in range(0, content.nbytes, step):
            piece = content[begin : begin + step]
            digests += digests_of(piece)
            self._close_span()
            end = piece.nbytes - piece.nbytes % DATA_ALIGNMENT
            self._spans.append(piece[:end])
            self.position += end
            # An idle disk gets the spans at once, and a busy disk more of them with one call.
            is_idle = not self._queued or self._queued[-1].is_done()
            least = self._pool.buffer_bytes if is_idle else _GATHERED_BYTES
            if sum(span.nbytes for span in self._spans) >= least:
                self._queue_spans()
            if end < piece.nbytes:
                self.write(piece[end:])
            self._check()
        return tuple(digests)

    def _extend(self, nbytes: int, step: int = 1) -> memoryview:
        """Returns the next bytes of the file: `nbytes`, or the multiple of `step` that fits.

        For tensors, `step` is a block: one split over two buffers could not be hashed at once.
        """
        if self._pool.buffer_bytes - self._fill < min(nbytes, step):
            self._queue_buffer()

        room = self._pool.buffer_bytes - self._fill
        length = nbytes if nbytes <= room else room - room % step
        span = self._current[self._fill : self._fill + length]
        self._fill += length
        self.position += length
        return span

    def _extend_rows(self, file: str, offset: int, nbytes: int) -> memoryview:
        """Returns bytes of an exported file at `offset`: `nbytes`, or the blocks that fit."""
        unit = DATA_ALIGNMENT if nbytes >= DATA_ALIGNMENT else _VALUE_ALIGNMENT
        last = self._segments[-1] if self._segments else None
        fill = 0 if last is None else last.end
        buffer, begin = self._row_buffer, fill + (offset - fill) % unit
        if buffer is None or buffer.nbytes - begin < min(nbytes, BLOCK_BYTES):
            self._queue_rows()
            self._row_buffer = buffer = self._next_buffer()
            self._check()
            last, begin = None, offset % unit
            if buffer.nbytes - begin < min(nbytes, BLOCK_BYTES):
                begin = 0  # a buffer that is no larger than a block

        room = buffer.nbytes - begin
        end = begin + (nbytes if nbytes <= room else room - room % BLOCK_BYTES)
        # Merged with the previous segment if it follows it in the buffer and in the file.
        shift = offset - begin
        if last and (last.file, last.end, last.offset - last.begin) == (file, begin, shift):
            self._segments[-1] = last._replace(end=end)
        else:
            self._segments.append(_Segment(file, offset, begin, end))
        return buffer[begin:end]

    def _queue_rows(self) -> None:
        """Queues the rows that are in the buffer."""
        if self._row_buffer is not None:
            write = partial(self._write_rows, self._row_buffer, self._segments)
            nbytes = sum(segment.end - segment.begin for segment in self._segments)
            self._queue(write, self._row_buffer, nbytes=nbytes)
        self._row_buffer, self._segments = None, []

    def _close_span(self) -> None:
        """Adds the filled range of the current buffer to the spans."""
        if self._begin < self._fill:
            self._spans.append(self._current[self._begin : self._fill])
        self._begin = self._fill

    def _queue_spans(self, buffer: memoryview | None = None) -> None:
        """Queues the spans. They end with a whole page, or with the file.

        Args:
            buffer: a buffer that is free after the write.
        """
        spans, self._spans = self._spans, []
        nbytes = sum(span.nbytes for span in spans)
        self._queue(partial(self._write_spans, spans), buffer, nbytes=nbytes)

    def _queue_buffer(self) -> None:
        """Queues everything so far, and takes the next buffer."""
        self._close_span()
        self._queue_spans(self._current)
        self._current = self._next_buffer()
        self._begin = self._fill = 0
        self._check()

    def _next_buffer(self) -> memoryview:
        """Returns a free buffer, a new one when staging, or the next one that the disk releases."""
        if self.is_staging and not self._free:
            self._free.extend(self._pool.lend_more())

        while not self._free:
            self._wait(self._queued.popleft())
            self._check()  # a closed lane releases no buffers
        return self._free.popleft()

    def _queue(
        self,
        work: Callable[[], None],
        buffer: memoryview | None = None,
        *,
        name: str = "write",
        nbytes: int = 0,
    ) -> None:
        """Queues work on the disk's lane, which skips it if something has failed before.

        Args:
            buffer: a buffer that is free after the work.
            name, nbytes: for a timeline, the name of the work and the bytes that it writes.
        """
        carry_out = partial(self._carry_out, work, buffer)
        timed = self._timeline.timed(DISK, name, carry_out, nbytes)
        self._queued.append(self._disk.enqueue(timed))

    # On the lane

    def _write_spans(self, spans: list[memoryview]) -> None:
        if spans:
            self._check_before_write()
            self._opened().write(spans)

    def _write_rows(self, buffer: memoryview, segments: list[_Segment]) -> None:
        self._check_before_write()
        for file, offset, begin, end in segments:
            if file not in self._exported:
                self._exported[file] = self._open_exported(file)
            self._exported[file].write_at(offset, buffer[begin:end])

    def _close_files(self) -> None:
        for file in self._exported.values():
            file.close()
        if self._open_sink is not None:
            self._opened().close()

    def _opened(self) -> DataSink:
        if self._sink is None:
            assert self._open_sink is not None, "something is written to it"
            self._sink = self._open_sink()
        return self._sink

    def _carry_out(self, work: Callable[[], None], buffer: memoryview | None) -> None:
        self._attempt(work)
        if buffer is not None:
            self._free.append(buffer)

    def _attempt(self, work: Callable[[], None]) -> None:
        # An error would close the lane, so it is kept for the saving thread.
        if self._error is None and not self._is_given_up:
            try:
                work()
            except BaseException as error:
                self._error = error

    # On the saving thread

    def _wait(self, event: Event) -> None:
        try:
            event.synchronize()
        except Exception as error:  # raised by other work, which has closed the lane
            self._error = self._error or error

    def _check(self) -> None:
        """Raises the disk's error, if any."""
        if self._error is not None:
            error = self._error
            self.abort()
            raise error

    def _end(self) -> None:
        self._is_open = False
        self._error = None
        self._pool.take_back()
