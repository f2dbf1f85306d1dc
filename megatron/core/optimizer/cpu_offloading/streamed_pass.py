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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch

from megatron.core.device import Device
from megatron.core.host_memory import ARRAY_ALIGNMENT
from megatron.core.lane_timings import D2H, H2D, StepRecorder
from megatron.core.lanes import Event, RelayedEvent
from megatron.core.optimizer.cpu_offloading.bucket import Pending
from megatron.core.optimizer.kernels.piece import Kernel, Piece

# Elements of a slot. Adam's 12 bytes of each take 4 ms on a link of 50 GB/s: long compared with the
# launches for a chunk, and short compared with a forward, which waits for the first one.
SLOT_NUMEL = 16 << 20
NUM_SLOTS = 2


class StreamedPass:
    """The lanes and slots of one optimizer."""

    def __init__(
        self, device: Device, kernel: Kernel, numel: int, dtypes: Iterable[torch.dtype]
    ) -> None:
        """
        Args:
            kernel: the rule's, for tensors of the device.
            numel: of the longest bucket.
            dtypes: of main weights and states. Buckets with others do not fit.
        """
        self._kernel = kernel
        self._numel = min(numel, SLOT_NUMEL)
        self._issue = device.host_lane("optimizer states issue")
        self._up = device.lane("optimizer states up")
        self._update = device.lane("optimizer states update")
        self._down = device.lane("optimizer states down")
        memory = torch.empty(
            slots_nbytes(numel, dtypes), dtype=torch.uint8, device=device.torch_device
        )
        self._slots = memory.chunk(NUM_SLOTS)
        # By slot: the event after which it may be filled. Work of before may use the memory still.
        self._free: list[Event] = [device.event()] * NUM_SLOTS
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Of the slots, on the device."""
        return sum(slot.nbytes for slot in self._slots)

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
            for chunk in chunks(pieces, self._numel):
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
        at_home = _joined(parts)
        in_slot = _in_memory(at_home, self._slots[number])
        nbytes = sum(array.nbytes for array in at_home.values())
        staged, start = [], 0
        for part in parts:
            own = {name: a.narrow(0, start, part.numel) for name, a in in_slot.items()}
            staged.append(part._replace(weight=own.pop(_WEIGHT), states=own))
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


def slots_nbytes(numel: int, dtypes: Iterable[torch.dtype]) -> int:
    """Bytes of the slots for buckets of at most `numel` elements."""
    length = min(numel, SLOT_NUMEL)
    return NUM_SLOTS * sum(_aligned(length * dtype.itemsize) for dtype in dtypes)


# The main weights among the arrays of a chunk; the others are states.
_WEIGHT = "main weights"


def _joined(parts: Sequence[Piece]) -> dict[str, torch.Tensor]:
    """The main weights and states of adjacent pieces as one array each."""
    numel = sum(part.numel for part in parts)
    arrays = {_WEIGHT: parts[0].weight, **parts[0].states}
    return {name: array.as_strided((numel,), (1,)) for name, array in arrays.items()}


def _in_memory(arrays: Mapping[str, torch.Tensor], memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arrays like these in a slot."""
    found, offset = {}, 0
    for name, array in arrays.items():
        found[name] = memory.narrow(0, offset, array.nbytes).view(array.dtype)
        offset += _aligned(array.nbytes)
    return found


def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    for name, array in source.items():
        target[name].copy_(array, non_blocking=True)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ARRAY_ALIGNMENT) * ARRAY_ALIGNMENT
