"""One rank's data file on its way to disk, through a few buffers that are made once and serve every save.

    the thread that saves   copies a block into the buffer at hand, and hashes it there while it is in the cache
    a lane, for the disk    writes the buffers that are full, in order

So a save takes no memory that grows with the state, and copying and hashing cost no time as long as the disk is slower.
Copies, digests and writes all run without the interpreter's lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.core.device import Device
from megatron.core.dist_checkpointing.data_sink import DataSink
from megatron.core.dist_checkpointing.manifest import BLOCK_BYTES, DATA_ALIGNMENT, digests_of
from megatron.core.host_memory import HostSlab
from megatron.core.lanes import Event, Lane

NUM_BUFFERS = 3  # one is being filled, one is being written, one is ready for whichever is faster
BUFFER_BYTES = 8 << 20  # at 4 MiB a fast disk waits noticeably between one write and the next


class BufferPool:
    """Page-aligned host memory for a rank's data files, pinned on a GPU. One file at a time has it.

    Attributes:
        buffer_bytes: of each buffer.
        d2h: the lane on which a device fills them.
    """

    def __init__(self, device: Device, num_buffers: int = NUM_BUFFERS, buffer_bytes: int = BUFFER_BYTES) -> None:
        """Allocates the memory and makes it resident.

        Args:
            buffer_bytes: of each; room for a block at least, and a multiple of DATA_ALIGNMENT.

        Raises:
            ValueError: for fewer than two buffers, or another size.
            HostMemoryError, PinError: as `HostSlab` does.
        """
        if num_buffers < 2 or buffer_bytes < BLOCK_BYTES or buffer_bytes % DATA_ALIGNMENT:
            raise ValueError(
                f"Expected at least 2 buffers of at least {BLOCK_BYTES} bytes, multiples of {DATA_ALIGNMENT}, got "
                f"{num_buffers} of {buffer_bytes}."
            )
        self.buffer_bytes = buffer_bytes
        # Tensors on a device come down beside its computation. (Not run on a GPU yet.)
        self.d2h = device.lane("checkpoint d2h")
        slab = HostSlab(num_buffers * buffer_bytes, device, is_pinned=True, purpose="checkpoint buffers")
        whole = slab.tensor(0, slab.nbytes, torch.uint8).zero_().numpy().data
        self._buffers = [whole[begin : begin + buffer_bytes] for begin in range(0, slab.nbytes, buffer_bytes)]
        self._is_lent = threading.Lock()

    def lend(self) -> list[memoryview]:
        """The buffers, until `take_back`. RuntimeError if they are lent already."""
        if not self._is_lent.acquire(blocking=False):
            raise RuntimeError("Expected buffers that are free, got those of a data file that is still being written.")
        return self._buffers

    def take_back(self) -> None:
        """The buffers are free again."""
        self._is_lent.release()


class DataFileWriter:
    """Writes one data file from its beginning to its end.

    An error of the disk comes up once, in the first call after it has happened; the file is gone then, and the buffers
    are free for the next save. Used by one thread at a time, which is not the lane's.

    Attributes:
        position: bytes so far.
    """

    def __init__(self, sink: DataSink, pool: BufferPool, disk: Lane) -> None:
        """Takes over the sink, and the pool until the file has ended.

        Args:
            disk: a host lane. It outlives every error of the disk.

        Raises:
            RuntimeError: if another file has the pool.
        """
        self.position = 0
        self._buffers = pool.lend()
        self._pool = pool
        self._sink = sink
        self._disk = disk
        self._is_open = True
        self._is_given_up = False
        self._error: BaseException | None = None  # the disk's first
        self._current = 0  # number of the buffer that is being filled
        self._fill = 0  # bytes in it
        self._queued: deque[Event] = deque()  # writes of the other buffers, the oldest first

    def write(self, content: bytes) -> None:
        """Appends bytes, such as a blob's header."""
        self._check()
        rest = memoryview(content)
        while rest:
            span = self._extend(rest.nbytes)
            span[:] = rest[: span.nbytes]
            rest = rest[span.nbytes :]

    def pad_to(self, offset: int) -> None:
        """Appends zeros up to `offset`, in bytes from the beginning of the file. ValueError if that has been passed."""
        self._check()
        if offset < self.position:
            raise ValueError(f"Expected to pad a data file of {self.position} bytes so far, got up to {offset}.")
        while self.position < offset:
            np.frombuffer(self._extend(offset - self.position), np.uint8).fill(0)

    def write_tensor(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """Appends a tensor's bytes. When this returns, the tensor has been read.

        Args:
            tensor: contiguous, of any dtype, on any device. `position` must be a multiple of DATA_ALIGNMENT.

        Returns:
            The digest of each block of its bytes, as they are in the file.
        """
        self._check()
        if not tensor.is_contiguous() or self.position % DATA_ALIGNMENT:
            raise ValueError(
                f"Expected a contiguous tensor at a multiple of {DATA_ALIGNMENT} bytes, got strides {tensor.stride()} "
                f"for shape {tuple(tensor.shape)} at byte {self.position}."
            )
        nbytes = tensor.nbytes
        source = _bytes_of(tensor)
        # From a device as much as there is room for; on the host a block, which the cache holds until it is hashed.
        largest = nbytes if isinstance(source, torch.Tensor) else BLOCK_BYTES
        digests: list[str] = []
        begin = 0
        while begin < nbytes:
            span = self._extend(min(largest, nbytes - begin), BLOCK_BYTES)
            self._copy(span, source[begin : begin + span.nbytes])
            digests += digests_of(span)
            begin += span.nbytes
        return tuple(digests)

    def finish(self) -> int:
        """Ends the file, which is durable then. Returns its size in bytes. Raises what the disk raised."""
        self._check()
        if self._fill:
            self._queue_buffer()
        self._wait(self._disk.enqueue(partial(self._carry_out, partial(self._sink.close, self.position))))
        self._check()
        self._end()
        return self.position

    def abort(self) -> None:
        """Gives the file up, if it has not ended. Returns when the disk does nothing for it any more."""
        if self._is_open:
            self._is_given_up = True
            while self._queued:
                self._wait(self._queued.popleft())
            self._sink.abort()
            self._end()

    def _copy(self, target: memoryview, source: NDArray[np.uint8] | torch.Tensor) -> None:
        if isinstance(source, torch.Tensor):
            copy = partial(torch.frombuffer(target, dtype=torch.uint8).copy_, source, non_blocking=True)
            self._pool.d2h.enqueue(copy).synchronize()
        else:
            # In this thread alone: torch would divide the work among as many as the computation next to it has.
            np.copyto(np.frombuffer(target, np.uint8), source)

    def _extend(self, nbytes: int, step: int = 1) -> memoryview:
        """The next bytes of the file, to be filled in: `nbytes`, or as many multiples of `step` as one buffer takes."""
        if self._pool.buffer_bytes - self._fill < min(nbytes, step):
            self._queue_buffer()
        room = self._pool.buffer_bytes - self._fill
        length = nbytes if nbytes <= room else room - room % step
        span = self._buffers[self._current][self._fill : self._fill + length]
        self._fill += length
        self.position += length
        return span

    def _queue_buffer(self) -> None:
        """Has the current buffer written, and goes on to the next one, as soon as that is free."""
        full = self._buffers[self._current][: self._fill]
        self._queued.append(self._disk.enqueue(partial(self._carry_out, partial(self._sink.write, full))))
        self._current = (self._current + 1) % len(self._buffers)
        self._fill = 0
        if len(self._queued) == len(self._buffers):
            self._wait(self._queued.popleft())
        self._check()

    def _carry_out(self, work: Callable[[], None]) -> None:
        """For the lane, which an error would end for good."""
        if self._error is None and not self._is_given_up:
            try:
                work()
            except BaseException as error:
                self._error = error

    def _wait(self, event: Event) -> None:
        try:
            event.synchronize()
        except Exception as error:  # of other work, by which the lane has ended
            self._error = self._error or error

    def _check(self) -> None:
        """Raises the disk's error, if there is one. RuntimeError if the file has ended."""
        if not self._is_open:
            raise RuntimeError("Expected a data file that is being written, got one that has ended.")
        if self._error is not None:
            error = self._error
            self.abort()
            raise error

    def _end(self) -> None:
        self._is_open = False
        self._error = None
        self._pool.take_back()


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8] | torch.Tensor:
    """A tensor's own memory, flat, where it lies."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    return data.numpy() if data.device.type == "cpu" else data
