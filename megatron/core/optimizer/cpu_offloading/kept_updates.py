"""`KeptUpdates`: updates of the host that another process can finish if this one is killed.

The memory is a keeper's (host_keeper.py). An update of a bucket, in chunks of its arrays:

    started = step      once the counters of the bucket's chunks are zero
    chunk by chunk      old values go to an undo slot; the slot becomes valid; the chunk is
                        updated in place; its counter moves past the elements that are done
    done = step

A process that is killed leaves its stores in the order in which each thread made them. So a valid
slot of the step whose start equals its chunk's counter has the old values of elements that may be
half written. All other elements from a counter on have old values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from megatron.core.device import Device
from megatron.core.host_keeper import KeptMemory
from megatron.core.host_memory import HostSlab
from megatron.core.optimizer.cpu_offloading.bucket import Bucket
from megatron.core.optimizer.kernels.piece import HostKernel, Piece

CHUNK_NUMEL = 1 << 16
_WIDEST = 4  # bytes of an element of any array
_MOST_ARRAYS = 4  # weight, two states and the gradient
_HEADER = 8  # int64 numbers before the arrays of a slot: one cache line
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

    def __init__(self, memory: KeptMemory, device: Device, buckets: Sequence[Bucket]) -> None:
        """Maps the numbers and the undo slot."""
        self.step = 0
        sizes = [_COUNTERS + _num_chunks(bucket) for bucket in buckets]
        progress = _mapped(memory, device, sum(sizes), "progress")
        self._progress = progress.split(sizes)
        slot = _mapped(memory, device, _HEADER + CHUNK_NUMEL * _WIDEST * _MOST_ARRAYS // 8, "undo")
        self._header, self._values = slot[:_HEADER], slot[_HEADER:].view(torch.uint8)

    def start(
        self, kernel: HostKernel, number: int, pieces: Sequence[Piece], grad_scale: float
    ) -> Callable[[], None]:
        """Starts the update of a bucket, and returns a function that waits until it is done."""
        progress, step = self._progress[number], self.step

        def update() -> None:
            progress[_COUNTERS:].zero_()
            progress[_STARTED] = step
            self._carry_out(kernel, number, pieces, grad_scale)
            progress[_DONE] = step

        return update

    def finish(
        self, kernel: HostKernel, pieces: Mapping[int, Sequence[Piece]], grad_scale: float
    ) -> None:
        """Finishes the updates of a step, by number of the bucket, which another process may have
        started.
        """
        self._restore(pieces)
        for number, own in pieces.items():
            progress = self._progress[number]
            if progress[_STARTED] != self.step:
                self.start(kernel, number, own, grad_scale)()
            elif progress[_DONE] != self.step:
                self._carry_out(kernel, number, own, grad_scale)
                progress[_DONE] = self.step

    def _carry_out(
        self, kernel: HostKernel, number: int, pieces: Sequence[Piece], grad_scale: float
    ) -> None:
        """Updates what the counters of the chunks leave."""
        counters = self._progress[number][_COUNTERS:]
        for index, chunk in enumerate(_chunks(pieces)):
            start = int(counters[index])
            part = chunk.part(start, chunk.numel - start)
            if part.numel:
                self._keep(number, index, start, part)
                kernel([part], grad_scale)
                counters[index] = chunk.numel

    def _keep(self, number: int, index: int, start: int, part: Piece) -> None:
        header = self._header
        header[_STEP] = 0
        for kept, own in zip(self._kept(part), _written(part), strict=True):
            kept.copy_(own)
        header[_BUCKET], header[_CHUNK] = number, index
        header[_START], header[_NUMEL] = start, part.numel
        header[_STEP] = self.step

    def _restore(self, pieces: Mapping[int, Sequence[Piece]]) -> None:
        """Restores the old values of elements that may be half written."""
        step, number, index, start, numel = self._header[: _NUMEL + 1].tolist()
        if step != self.step or number not in pieces:
            return
        progress = self._progress[number]
        is_updating = progress[_STARTED] == step and progress[_DONE] != step
        if not is_updating or progress[_COUNTERS + index] != start:
            return
        part = _chunks(pieces[number])[index].part(start, numel)
        for kept, own in zip(self._kept(part), _written(part), strict=True):
            own.copy_(kept)

    def _kept(self, part: Piece) -> list[torch.Tensor]:
        """The slot's arrays, like those of a piece that are written."""
        room = CHUNK_NUMEL * _WIDEST
        return [
            self._values[place * room :][: own.nbytes].view(own.dtype)
            for place, own in enumerate(_written(part))
        ]


def _num_chunks(bucket: Bucket) -> int:
    """At most: pieces are of whole parameters."""
    return bucket.numel // CHUNK_NUMEL + len(bucket.slots)


def _chunks(pieces: Sequence[Piece]) -> list[Piece]:
    return [chunk for piece in pieces for chunk in piece.parts(CHUNK_NUMEL)]


def _written(piece: Piece) -> list[torch.Tensor]:
    """The arrays that an update reads and writes over."""
    arrays = [piece.weight, *piece.states.values()]
    overlaid = piece.out is not None and piece.out.data_ptr() == piece.grad.data_ptr()
    return [*arrays, piece.grad] if overlaid else arrays


def _mapped(memory: KeptMemory, device: Device, count: int, purpose: str) -> torch.Tensor:
    slab = HostSlab(8 * count, device, is_pinned=False, purpose=purpose, kept=memory)
    return slab.tensor(0, count, torch.int64)
