"""A tensor's values as the bytes of a file, computed piece by piece on the tensor's device.

[Note: one stream] On a GPU, the thread that saves has a separate current stream, and the stream
that copies bytes down does not wait for it. So whatever a save computes from a tensor on a device
(the product of a stored moment and its scale, a contiguous copy, another dtype) is issued by the
work that copies it down, on the same lane. Computed earlier, it might be copied before it is
finished: the file would contain whatever the memory contained, and the digests would match that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

import megatron.core.optimizer.scaled_states as scaled_states
from megatron.core.dist_checkpointing.format.manifest import BLOCK_BYTES, digests_of
from megatron.core.lanes import Lane


def lies_on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor has to be copied down before the host can read it."""
    return tensor.device.type != "cpu"


class TensorBytes:
    """The values of one tensor, row by row, for one save.

    Attributes:
        nbytes: of all values.
        is_on_device: whether they come down on a lane.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Does not read the tensor yet.

        Args:
            tensor: on any device, of any strides and dtype. It must not change until it is read.
            scale: of a state that is stored with one; its values are the fp32 products.
            dtype: of the values as they are read; None: their own.
        """
        own = tensor.dtype if scale is None else torch.float32
        self._dtype = dtype or own
        self._is_converted = self._dtype != own
        itemsize = self._dtype.itemsize
        self.nbytes = tensor.numel() * itemsize
        self.is_on_device = lies_on_device(tensor)
        self._tensor = tensor.detach()
        self._scale = scale
        self._itemsize = itemsize
        self._flat: torch.Tensor | None = None

    def in_host_memory(self) -> memoryview | None:
        """The bytes themselves, to be read in place; None if they have to be computed or reordered,
        or are on a device.
        """
        is_computed = self._is_converted or self._scale is not None
        if self.is_on_device or is_computed or not self._tensor.is_contiguous():
            return None
        return self._piece(0, self.nbytes).numpy().data

    def copy_out(self, target_of: Callable[[int, int], memoryview], d2h: Lane) -> tuple[str, ...]:
        """Copies all bytes, piece by piece, and hashes each at once. See `copy`.

        Args:
            target_of: given the first byte and how many there are at most, where they are to be
                copied: a whole number of blocks, or all the rest.

        Returns:
            The digest of each block.
        """
        # From a device, as much as there is room for. On the host, one block, which stays in the
        # cache until it is hashed.
        largest = self.nbytes if self.is_on_device else BLOCK_BYTES
        digests: list[str] = []
        begin = 0
        while begin < self.nbytes:
            target = target_of(begin, min(largest, self.nbytes - begin))
            self.copy(begin, target, d2h)
            digests += digests_of(target)
            begin += target.nbytes
        return tuple(digests)

    def copy(self, begin: int, target: memoryview, d2h: Lane) -> None:
        """Fills host memory with the bytes from `begin` on. When this returns, they have been read.

        Args:
            begin: a multiple of the size of a value, and so is the size of `target`.
            target: at most the rest of the bytes. From a device, products with a scale and values
                in another dtype take as much memory there.
            d2h: on which they come down from a device. See [Note: one stream].
        """
        if self.is_on_device:
            d2h.enqueue(partial(self._copy_down, begin, target)).synchronize()
        elif self._is_converted:
            # Straight to its place: a piece of memory for the new values would cost as much again.
            values = torch.frombuffer(target, dtype=self._dtype)
            values.copy_(self._values(begin, target.nbytes))
        else:
            # NumPy copies in this thread. torch would use many threads, and take the cores of the
            # computation during the save.
            np.copyto(np.frombuffer(target, np.uint8), self._piece(begin, target.nbytes).numpy())

    def _copy_down(self, begin: int, target: memoryview) -> None:
        # The piece may be freed before the copy is done: its memory belongs to the lane's stream,
        # which reuses it in order.
        piece = self._piece(begin, target.nbytes)
        torch.frombuffer(target, dtype=torch.uint8).copy_(piece, non_blocking=True)

    def _piece(self, begin: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], on the tensor's device."""
        return self._values(begin, nbytes).to(self._dtype).view(torch.uint8)

    def _values(self, begin: int, nbytes: int) -> torch.Tensor:
        """The values that will take these bytes, in the dtype that they have."""
        if self._flat is None:
            # `reshape` would keep the strides of a tensor of one element, which may be any.
            self._flat = self._tensor.contiguous().as_strided((self._tensor.numel(),), (1,))
        part = self._flat[begin // self._itemsize : (begin + nbytes) // self._itemsize]
        return part if self._scale is None else scaled_states.read(part, self._scale)
