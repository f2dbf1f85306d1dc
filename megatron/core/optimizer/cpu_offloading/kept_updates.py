"""`KeptUpdates`: updates of the host that another process can finish if this one is killed.

The memory is a keeper's (host_keeper.py). An update of a bucket, in chunks of its arrays:

    started = step      once the counters of the bucket's chunks are reset
    row by row          old values go to an undo slot; the slot becomes valid; the row is updated
                        in place; its chunk's counter moves past it
    chunk by chunk      the sum of its new values is kept before its counter gets full
    done = step

A process that is killed leaves its stores in the order in which each thread made them. So a valid
slot of the step whose start equals its chunk's counter has the old values of a row that may be half
written. All other elements from a counter on have old values.

A kernel with threads does this by itself (`RowLog`), with two slots for each. For others a row is a
whole chunk, and there is one slot.

[Note: sums] `find_damage` compares chunks of weights and states with their sums after the step, or
after the one before it. The first sums are taken before the first step. Chunks that were being
updated have none, and neither have gradients and parameters without a gradient.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megatron.core.device import Device
from megatron.core.host_keeper import KeptMemory
from megatron.core.host_memory import HostSlab
from megatron.core.optimizer.cpu_offloading.bucket import Bucket
from megatron.core.optimizer.cpu_offloading.kept_layout import KeptBucket
from megatron.core.optimizer.kernels.host_adam import default_num_threads
from megatron.core.optimizer.kernels.piece import (
    COUNTER_STRIDE,
    NOT_STARTED,
    ROW_NUMEL,
    HostKernel,
    Piece,
    RowLog,
)

CHUNK_NUMEL = 1 << 16
_NUM_SLOTS = 1 << 10  # of kernels' threads, two for each; untouched ones take no memory
_WIDEST = 4  # bytes of an element of any array
_MOST_ARRAYS = 4  # weight, two states and the gradient
_HEADER_BYTES = 64
_STEP, _BUCKET, _CHUNK, _START, _NUMEL = range(5)  # of a header; step 0: not valid
_CHUNKS, _STARTED, _DONE, _HEAD = range(4)  # of a bucket's numbers
_NO_STEP = -1
_BITS: dict[int, type[np.unsignedinteger[Any]]] = {2: np.uint16, 4: np.uint32}  # by bytes


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
        self._memory = memory
        counts = [bucket.numel // CHUNK_NUMEL + len(bucket.slots) for bucket in buckets]
        sizes = [_Progress.size(count) for count in counts]
        numbers = HostSlab(8 * sum(sizes), device, is_pinned=False, purpose="progress", kept=memory)
        parts = numbers.tensor(0, sum(sizes), torch.int64).split(sizes)
        for part, count in zip(parts, counts, strict=True):
            part[_CHUNKS] = count
        self._progress = [_Progress(part) for part in parts]

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
        self._prepare_sums(progress, pieces)
        progress.counters.fill_(NOT_STARTED)
        progress.head[_STARTED] = self.step
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
            if progress.head[_STARTED] != self.step:
                self.start(kernel, number, own, grad_scale)()
            elif progress.head[_DONE] != self.step:
                sums = progress.sums[progress.side_of(self.step)]
                for index, chunk in enumerate(_chunks(own)):
                    if (done := int(progress.counters[index])) < chunk.numel:
                        sums[index] = _sum_of(chunk.part(0, max(0, done)))
                self._carry_on(kernel, number, own, grad_scale)()

    def _prepare_sums(self, progress: _Progress, pieces: Sequence[Piece]) -> None:
        """Makes room for the sums of the step. The sums before it are there afterwards."""
        done = int(progress.head[_DONE])
        old = progress.side_of(done)
        layout = progress.layouts[old]
        arrays = [(piece.weight.data_ptr(), piece.numel) for piece in pieces]
        if arrays != progress.arrays:
            progress.arrays, layout = arrays, progress.layout_of(pieces, self._memory)
            if not torch.equal(progress.layouts[old], layout):
                # The first step, or one with other parameters.
                old = 1 - old
                with ThreadPoolExecutor(default_num_threads()) as pool:
                    progress.fill(old, layout, list(pool.map(_sum_of, _chunks(pieces))), done)
        progress.fill(1 - old, layout, [], self.step)

    def _carry_on(
        self, kernel: HostKernel, number: int, pieces: Sequence[Piece], grad_scale: float
    ) -> Callable[[], None]:
        """Starts to update the elements after the counters of the chunks."""
        progress, step = self._progress[number], self.step
        counters, sums = progress.counters, progress.sums[progress.side_of(step)]
        if kernel.submit_logged is not None:
            log = RowLog(counters, sums, self._rows, CHUNK_NUMEL, step, number)
            wait = kernel.submit_logged(pieces, grad_scale, log)
        else:

            def wait() -> None:
                for index, chunk in enumerate(_chunks(pieces)):
                    start = max(0, int(counters[index]))
                    part = chunk.part(start, chunk.numel - start)
                    if part.numel:
                        counters[index] = start
                        self._slot.keep(part, step, number, index, start)
                        kernel([part], grad_scale)
                        sums[index] = _sum_of(chunk)
                        counters[index] = chunk.numel

        def finish() -> None:
            wait()
            progress.head[_DONE] = step

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
        if progress.is_updating(self.step) and progress.counters[index] == start:
            slot.restore(_chunks(pieces[number])[index].part(start, numel))


class _Progress:
    """The numbers of a bucket in kept memory, int64.

    Attributes:
        steps: of two sides with sums, which steps use in turn: after which step they were taken.
        layouts: of each side: of three arrays the number of the file, the first byte of the first
            piece, and the bytes of an element; then, from there, the first elements of all chunks,
            and their lengths. Zeros mark a missing array or chunk.
        sums: of each side and chunk.
        arrays: addresses and lengths of the weights that both layouts are of, once this process has
            written them.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        """`numbers`: of `size`, of which the first is set."""
        count = int(numbers[_CHUNKS])
        sizes = [_HEAD, COUNTER_STRIDE * count, 2, 2 * (9 + 2 * count), 2 * count]
        self.head, counters, self.steps, layouts, sums = numbers.split(sizes)
        self.counters = counters.view(count, COUNTER_STRIDE)[:, 0]
        self.layouts, self.sums = layouts.view(2, -1), sums.view(2, -1)
        self.arrays: list[tuple[int, int]] | None = None

    @staticmethod
    def size(num_chunks: int) -> int:
        return _HEAD + 2 + 2 * 9 + (COUNTER_STRIDE + 6) * num_chunks

    def is_updating(self, step: int) -> bool:
        return bool(self.head[_STARTED] == step and self.head[_DONE] != step)

    def side_of(self, step: int) -> int:
        """The side with the sums of a step. ValueError without any."""
        return int(self.steps.tolist().index(step))

    def layout_of(self, pieces: Sequence[Piece], memory: KeptMemory) -> torch.Tensor:
        """The layout of a step with these pieces."""
        layout = torch.zeros_like(self.layouts[0])
        arrays, starts, numels = layout.split([9, *2 * [len(self.counters)]])
        place = 0
        # A rank may have no elements of a bucket.
        first = _summed(pieces[0]) if pieces else []
        for row, array in zip(arrays.view(3, 3), first, strict=False):
            found = memory.place_of(array.data_ptr())
            assert found is not None, "weights and states are in kept memory"
            row.copy_(torch.tensor([*found, array.itemsize]))
        for piece in pieces:
            begin = (piece.weight.data_ptr() - first[0].data_ptr()) // first[0].itemsize
            own = torch.arange(0, piece.numel, CHUNK_NUMEL)
            starts[place : place + len(own)] = begin + own
            numels[place : place + len(own)] = (piece.numel - own).clamp(max=CHUNK_NUMEL)
            place += len(own)
        return layout

    def fill(self, side: int, layout: torch.Tensor, sums: Sequence[int], step: int) -> None:
        """Writes a side, which belongs to no step meanwhile."""
        self.steps[side] = _NO_STEP
        self.layouts[side] = layout
        self.sums[side].zero_()[: len(sums)] = torch.tensor(sums)
        self.steps[side] = step

    def summed(self, step: int) -> Iterator[_Summed]:
        """The chunks that have a sum, where `step` may have been killed."""
        is_updating = self.is_updating(step)
        old = list(self._chunks(self.side_of(int(self.head[_DONE]))))
        new = list(self._chunks(self.side_of(step))) if is_updating else old
        for index, counter in enumerate(self.counters.tolist()):
            numel = new[index].numel
            if is_updating and not NOT_STARTED <= counter <= numel:
                raise ValueError(f"Expected at most {numel} elements of a chunk, got {counter}.")
            if not is_updating or counter == numel:
                yield new[index]
            elif counter == NOT_STARTED:
                yield old[index]

    def _chunks(self, side: int) -> Iterator[_Summed]:
        arrays, places = self.layouts[side].split([9, 2 * len(self.counters)])
        columns = [*places.view(2, -1).tolist(), self.sums[side].tolist()]
        return map(partial(_Summed, arrays.view(3, 3).tolist()), *columns)


class _Summed(NamedTuple):
    """A chunk of an earlier process, with its sum; see `_Progress`."""

    arrays: list[list[int]]
    start: int
    numel: int
    sum: int

    def is_damaged(self, memory: Sequence[mmap.mmap]) -> bool:
        """Whether the values have another sum. `memory`: all files, in the order of names."""
        if not 0 < self.numel <= CHUNK_NUMEL:
            return self.numel != 0
        try:
            arrays = [
                np.frombuffer(memory[file], _BITS[size], self.numel, begin + self.start * size)
                for file, begin, size in self.arrays
                if size
            ]
            return chunk_sum(arrays) != self.sum
        except (LookupError, ValueError):
            return True  # there are no such places


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
        written = dict(enumerate(_summed(row)))
        if row.out is not None and row.out.data_ptr() == row.grad.data_ptr():
            written[_MOST_ARRAYS - 1] = row.grad
        for place, own in written.items():
            yield self._quarters[place][: own.nbytes].view(own.dtype), own


def find_damage(files: Mapping[str, mmap.mmap], step: int) -> str:
    """Describes damage to weights and states of an earlier process; see [Note: sums].

    Args:
        files: all that it had, by name.
        step: its last, which may have been killed.

    Returns:
        Empty without damage.
    """
    numbers = torch.frombuffer(files["progress 0"], dtype=torch.int64)
    memory, chunks = [files[name] for name in sorted(files)], list[_Summed]()
    try:
        while len(numbers):
            own, numbers = numbers.tensor_split([_Progress.size(int(numbers[_CHUNKS]))])
            chunks += _Progress(own).summed(step)
    except (LookupError, RuntimeError, ValueError) as error:
        return f"invalid progress numbers: {error}"
    with ThreadPoolExecutor(default_num_threads()) as pool:
        num_damaged = sum(pool.map(lambda chunk: chunk.is_damaged(memory), chunks))
    return f"{num_damaged} of {len(chunks)} checksums differ" if num_damaged else ""


def chunk_sum(arrays: Iterable[npt.NDArray[np.unsignedinteger]]) -> int:
    """A sum of a chunk's values and their places, modulo 2**32. It differs after any change of one
    value, and after nearly any other damage, such as values that were exchanged.

    Args:
        arrays: bits of weights and states.
    """
    total = np.zeros(1, np.uint32)
    for number, bits in enumerate(arrays):
        # Multiplication with an odd number loses no bit.
        total = total + np.multiply(bits, 2 * number + 1, dtype=np.uint32)
    total ^= total >> 15  # or changes of two signs would cancel
    total *= np.arange(1, 2 * len(total), 2, dtype=np.uint32)
    return int(total.sum(dtype=np.uint32))


def _sum_of(chunk: Piece) -> int:
    return chunk_sum(
        array.view(torch.uint8).numpy().view(_BITS[array.itemsize]) for array in _summed(chunk)
    )


def _summed(piece: Piece) -> list[torch.Tensor]:
    """The arrays that an update reads and writes over."""
    return [piece.weight, *piece.states.values()]


def slot_bytes(numel: int) -> int:
    """The bytes of an undo slot for rows of `numel` elements."""
    return _HEADER_BYTES + numel * _WIDEST * _MOST_ARRAYS


def _chunks(pieces: Sequence[Piece]) -> list[Piece]:
    return [chunk for piece in pieces for chunk in piece.parts(CHUNK_NUMEL)]
