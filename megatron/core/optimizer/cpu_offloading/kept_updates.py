"""`KeptUpdates`: updates of the host that another process can finish if this one is killed.

The memory is a keeper's (host_keeper.py). An update of a bucket, in chunks of its arrays:

    started = step      once the counters of the bucket's chunks are zero
    row by row          old values go to an undo slot; the slot becomes valid; the row is updated
                        in place; its chunk's counter moves past it
    done = step

A process that is killed leaves its stores in the order in which each thread made them. So a valid
slot of the step whose start equals its chunk's counter has the old values of a row that may be half
written. All other elements from a counter on have old values.

A kernel with threads does this by itself (`RowLog`), with two slots for each. For others a row is a
whole chunk, and there is one slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from megatron.core.device import Device
from megatron.core.host_keeper import KeptMemory
from megatron.core.host_memory import HostSlab
from megatron.core.optimizer.cpu_offloading.bucket import Bucket
from megatron.core.optimizer.cpu_offloading.kept_layout import KeptBucket
from megatron.core.optimizer.kernels.piece import ROW_NUMEL, HostKernel, Piece, RowLog

CHUNK_NUMEL = 1 << 16
_NUM_SLOTS = 1 << 10  # of kernels' threads, two for each; untouched ones take no memory
_WIDEST = 4  # bytes of an element of any array
_MOST_ARRAYS = 4  # weight, two states and the gradient
_HEADER_BYTES = 64
_STEP, _BUCKET, _CHUNK, _START, _NUMEL = range(5)  # of a header; step 0: not valid
_STARTED, _DONE, _COUNTERS = range(3)  # of a bucket's numbers; its chunks' counters follow


class Landed(NamedTuple):
    """One bucket before a step.

    Attributes:
        counts: the steps that each of its parameters has taken.
        stepped: the numbers of the slots that have a gradient.
    """

    counts: list[int]
    stepped: list[int]


class KeptUpdates:
    """Carries out the updates of all buckets of one optimizer.

    Attributes:
        step: the number of the step whose updates are carried out, more than 0.
    """

    def __init__(
        self, memory: KeptMemory, device: Device, buckets: Sequence[Bucket | KeptBucket]
    ) -> None:
        """Maps the numbers and the undo slots."""
        self.step = 0
        sizes = [_COUNTERS + _num_chunks(bucket) for bucket in buckets]
        numbers = HostSlab(8 * sum(sizes), device, is_pinned=False, purpose="progress", kept=memory)
        self._progress = numbers.tensor(0, sum(sizes), torch.int64).split(sizes)

        chunk, rows = slot_bytes(CHUNK_NUMEL), slot_bytes(ROW_NUMEL)
        nbytes = chunk + _NUM_SLOTS * rows
        slots = HostSlab(nbytes, device, is_pinned=False, purpose="undo", kept=memory)
        self._slot = _UndoSlot(slots.tensor(0, chunk, torch.uint8), CHUNK_NUMEL)
        self._rows = slots.tensor(chunk, _NUM_SLOTS * rows, torch.uint8).view(-1, rows)

    def start(
        self, kernel: HostKernel, number: int, pieces: Sequence[Piece], grad_scale: float
    ) -> Callable[[], None]:
        """Starts the update of a bucket, and returns a function that waits until it is done."""
        progress = self._progress[number]
        progress[_COUNTERS:].zero_()
        progress[_STARTED] = self.step
        return self._carry_on(kernel, number, pieces, grad_scale)

    def finish(
        self, kernel: HostKernel, pieces: Mapping[int, Sequence[Piece]], grad_scale: float
    ) -> None:
        """Finishes the updates of a step, by number of the bucket, which another process may have
        started.
        """
        # All before the first row is updated, which takes a slot.
        for slot in self._valid_slots():
            self._restore(slot, pieces)
        for number, own in pieces.items():
            progress = self._progress[number]
            if progress[_STARTED] != self.step:
                self.start(kernel, number, own, grad_scale)()
            elif progress[_DONE] != self.step:
                self._carry_on(kernel, number, own, grad_scale)()

    def _carry_on(
        self, kernel: HostKernel, number: int, pieces: Sequence[Piece], grad_scale: float
    ) -> Callable[[], None]:
        """Starts to update the elements after the counters of the chunks."""
        progress, step = self._progress[number], self.step
        counters = progress[_COUNTERS:]
        if kernel.submit_logged is not None:
            log = RowLog(counters, self._rows, CHUNK_NUMEL, step, number)
            wait = kernel.submit_logged(pieces, grad_scale, log)
        else:

            def wait() -> None:
                for index, chunk in enumerate(_chunks(pieces)):
                    start = int(counters[index])
                    part = chunk.part(start, chunk.numel - start)
                    if part.numel:
                        self._slot.keep(part, step, number, index, start)
                        kernel([part], grad_scale)
                        counters[index] = chunk.numel

        def finish() -> None:
            wait()
            progress[_DONE] = step

        return finish

    def _valid_slots(self) -> Iterator[_UndoSlot]:
        """The slots of the step."""
        if self._slot.header[_STEP] == self.step:
            yield self._slot
        steps = self._rows[:, :_HEADER_BYTES].view(torch.int64)[:, _STEP]
        for index in (steps == self.step).nonzero().flatten().tolist():
            yield _UndoSlot(self._rows[index], ROW_NUMEL)

    def _restore(self, slot: _UndoSlot, pieces: Mapping[int, Sequence[Piece]]) -> None:
        """Restores the old values of a row that may be half written."""
        _, number, index, start, numel = slot.header[: _NUMEL + 1].tolist()
        progress = self._progress[number]
        is_updating = progress[_STARTED] == self.step and progress[_DONE] != self.step
        if is_updating and progress[_COUNTERS + index] == start:
            slot.restore(_chunks(pieces[number])[index].part(start, numel))


class _UndoSlot:
    """Memory for the old values of a row: a header, then a quarter of the rest for each array."""

    def __init__(self, memory: torch.Tensor, numel: int) -> None:
        """`memory`: uint8, of `slot_bytes(numel)`."""
        self.header = memory[:_HEADER_BYTES].view(torch.int64)
        self._quarters = memory[_HEADER_BYTES:].view(_MOST_ARRAYS, numel * _WIDEST)

    def keep(self, row: Piece, step: int, bucket: int, chunk: int, start: int) -> None:
        """Keeps the old values. The slot is not valid meanwhile."""
        self.header[_STEP] = 0
        for kept, own in self._pairs(row):
            kept.copy_(own)
        place = torch.tensor([bucket, chunk, start, row.numel])
        self.header[_BUCKET : _NUMEL + 1].copy_(place)
        self.header[_STEP] = step

    def restore(self, row: Piece) -> None:
        """Copies the old values back."""
        for kept, own in self._pairs(row):
            own.copy_(kept)

    def _pairs(self, row: Piece) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Kept and own values of the arrays that an update reads and writes over."""
        arrays = [row.weight, *row.states.values()]
        written = dict(enumerate(arrays))
        if row.out is not None and row.out.data_ptr() == row.grad.data_ptr():
            written[_MOST_ARRAYS - 1] = row.grad
        for place, own in written.items():
            yield self._quarters[place][: own.nbytes].view(own.dtype), own


def slot_bytes(numel: int) -> int:
    """The bytes of an undo slot for rows of `numel` elements."""
    return _HEADER_BYTES + numel * _WIDEST * _MOST_ARRAYS


def _num_chunks(bucket: Bucket | KeptBucket) -> int:
    """At most: pieces are of whole parameters."""
    return bucket.numel // CHUNK_NUMEL + len(bucket.slots)


def _chunks(pieces: Sequence[Piece]) -> list[Piece]:
    return [chunk for piece in pieces for chunk in piece.parts(CHUNK_NUMEL)]
