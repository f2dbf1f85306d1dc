"""Host memory of which the last piece taken comes back first, as a rule."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.device import Device
from megatron.core.host_memory import ARRAY_ALIGNMENT, HostSlab


class HostPiece:
    """A piece of host memory: [nbytes] uint8, until it is given back."""

    def __init__(self, memory: Tensor, end: int) -> None:
        self.memory = memory
        self.end = end  # bytes from the beginning of the stack
        self.is_free = False

    def give_back(self) -> None:
        """Its holder does not need it any more. Any thread, at any time."""
        self.is_free = True


class HostStack:
    """One pinned slab, and the pieces of it that are taken. A piece that comes back early is free
    when the pieces above it are.

    Attributes:
        nbytes: of the slab.
        peak_nbytes: the most of it that was in use.
    """

    def __init__(self, nbytes: int, device: Device) -> None:
        self._slab = HostSlab(nbytes, device, is_pinned=True, purpose="activations")
        self._pieces: list[HostPiece] = []
        self.nbytes = nbytes
        self.peak_nbytes = 0

    def take(self, nbytes: int) -> HostPiece | None:
        """A piece of so many bytes; None if there is no room for it now."""
        while self._pieces and self._pieces[-1].is_free:
            self._pieces.pop()

        top = self._pieces[-1].end if self._pieces else 0
        begin = -(-top // ARRAY_ALIGNMENT) * ARRAY_ALIGNMENT
        end = begin + nbytes
        if end > self.nbytes:
            return None

        self.peak_nbytes = max(self.peak_nbytes, end)
        piece = HostPiece(self._slab.tensor(begin, nbytes, torch.uint8), end)
        self._pieces.append(piece)
        return piece
