"""`StreamedPass`: the device updates main weights and states whose home is host memory.

    up       a chunk's main weights and states are copied to a slot on the device
    update   the rule's device kernel reads the gradients and writes the compute weights, both of
             which stay on the device, and updates the slot
    down     the slot is copied back to where it came from

The three steps are on lanes of their own, and two slots are in use at a time: while one chunk comes
up, the one before it is updated and goes down. The link carries 12 bytes an element in each
direction for Adam in fp32, instead of the 2 down and 2 up of the host's own pass; in exchange, the
host's cores and most of its memory bandwidth are free for other buckets. Both passes give the same
bits, so which of them updates a bucket is only a matter of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from megatron.core.device import Device
from megatron.core.host_memory import SlabBuilder
from megatron.core.lane_timings import D2H, H2D, StepRecorder
from megatron.core.lanes import Event, RelayedEvent
from megatron.core.optimizer.cpu_offloading.bucket import Pending
from megatron.core.optimizer.kernels.piece import Kernel, Piece, joined

# Elements of a slot. Adam's 12 bytes of each take 4 ms on a link of 50 GB/s: long compared with the
# launches for a chunk, and short compared with a forward, which waits for the first one.
SLOT_NUMEL = 16 << 20
NUM_SLOTS = 2


class SlotSize(NamedTuple):
    """The size of a slot: room for one chunk of any bucket.

    Attributes:
        numel: elements of a chunk, at most.
        dtypes: of main weights and states. Buckets with wider ones do not fit.
    """

    numel: int
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(
        cls, buckets: Iterable[tuple[int, torch.dtype]], states: Iterable[torch.dtype]
    ) -> SlotSize:
        """Of some buckets, one at least.

        Args:
            buckets: elements of each, and the dtype of its main weights.
            states: dtypes of the rule's states.
        """
        numels, mains = zip(*buckets, strict=True)
        widest = max(mains, key=lambda dtype: dtype.itemsize)
        return cls(min(SLOT_NUMEL, max(numels)), (widest, *states))

    @property
    def nbytes(self) -> int:
        """Of one slot."""
        builder = SlabBuilder()
        for dtype in self.dtypes:
            builder.add(self.numel, dtype)
        return builder.nbytes


class StreamedPass:
    """The lanes and slots of one optimizer.

    Attributes:
        size: of each slot.
    """

    def __init__(self, device: Device, kernel: Kernel, size: SlotSize) -> None:
        """`kernel`: the rule's, for tensors of the device."""
        self.size = size
        self._kernel = kernel
        self._issue = device.host_lane("optimizer states issue")
        self._up = device.lane("optimizer states up")
        self._update = device.lane("optimizer states update")
        self._down = device.lane("optimizer states down")
        self._slots = [
            torch.empty(size.nbytes, dtype=torch.uint8, device=device.torch_device)
            for _ in range(NUM_SLOTS)
        ]
        # By slot: the event after which it may be filled. Work of before may use the memory still.
        self._free: list[Event] = [device.event()] * NUM_SLOTS
        self._next = 0

    def queue(
        self,
        pieces: Sequence[Piece],
        grad_scale: float,
        now: Event,
        after: Sequence[Event],
        timings: StepRecorder,
        name: str,
    ) -> Pending:
        """Queues the update of one bucket.

        Args:
            pieces: gradients and `out` on the device, the other arrays in host memory.
            now: after which the gradients may be read and `out` be written to.
            after: after which the host's arrays may be read and written to. A thread waits for
                these events, which is not the caller's.
            name: of the bucket.
        """
        sent: list[Event] = []
        updated: list[Event] = []

        def issue() -> None:
            ends = now, now
            for chunk in chunks(pieces, self.size.numel):
                ends = self._issue_chunk(chunk, grad_scale, now, timings, name)
            sent.append(ends[0])
            updated.append(ends[1])

        issued = self._issue.enqueue(issue, after)
        is_updated = RelayedEvent(issued, updated)
        return Pending(is_updated, RelayedEvent(issued, sent), is_updated)

    def close(self) -> None:
        """Waits for queued work, and rejects more."""
        for lane in (self._issue, self._up, self._update, self._down):
            lane.close()

    def _issue_chunk(
        self,
        parts: Sequence[Piece],
        grad_scale: float,
        now: Event,
        timings: StepRecorder,
        name: str,
    ) -> tuple[Event, Event]:
        """Returns the events after the update and after the way down."""
        number, self._next = self._next, (self._next + 1) % NUM_SLOTS
        at_home = joined(parts)
        in_slot = _in_memory(at_home, self._slots[number])
        nbytes = sum(array.nbytes for array in _kept(at_home))
        staged, start = [], 0
        for part in parts:
            staged.append(in_slot.part(start, part.numel)._replace(step=part.step))
            start += part.numel

        up = timings.timed(H2D, partial(_copy, at_home, in_slot), nbytes, name)
        is_up = self._up.enqueue(up, [self._free[number]])
        update = partial(self._kernel, staged, grad_scale)
        is_updated = self._update.enqueue(update, [is_up, now])
        down = timings.timed(D2H, partial(_copy, in_slot, at_home), nbytes, name)
        self._free[number] = self._down.enqueue(down, [is_updated])
        return is_updated, self._free[number]


def chunks(pieces: Iterable[Piece], numel: int) -> Iterator[list[Piece]]:
    """The pieces, cut where necessary, in runs of adjacent ones of at most `numel` elements.

    Elements between two pieces are in no run: another optimizer may update them.

    Args:
        pieces: in the order of their addresses, of one storage of main weights and of one storage
            of each state.
    """
    chunk: list[Piece] = []
    begin = end = 0  # of the run, as offsets in the storage of the main weights
    for piece in pieces:
        place, done = int(piece.weight.storage_offset()), 0
        while done < piece.numel:
            if chunk and (end - begin == numel or place + done != end):
                yield chunk
                chunk = []
            if not chunk:
                begin = end = place + done
            length = min(piece.numel - done, begin + numel - end)
            chunk.append(piece.part(done, length))
            done, end = done + length, end + length
    if chunk:
        yield chunk


def _kept(piece: Piece) -> list[torch.Tensor]:
    """The arrays whose home is host memory: main weights and states."""
    return [piece.weight, *piece.states.values()]


def _in_memory(piece: Piece, memory: torch.Tensor) -> Piece:
    """The piece with its main weights and states in a slot."""
    builder = SlabBuilder()

    def take(array: torch.Tensor) -> torch.Tensor:
        begin = builder.add(array.numel(), array.dtype)
        return memory.narrow(0, begin, array.nbytes).view(array.dtype)

    weight = take(piece.weight)
    return piece._replace(weight=weight, states={n: take(s) for n, s in piece.states.items()})


def _copy(source: Piece, target: Piece) -> None:
    for array, copy in zip(_kept(source), _kept(target), strict=True):
        copy.copy_(array, non_blocking=True)
