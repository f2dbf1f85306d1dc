"""Where arrays of buckets are in kept memory, as plain data for a process that has other buckets.

After a change of the number of ranks, new ranks finish the updates of earlier ones from it.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron.core.optimizer.kernels.piece import Piece, merged
from megatron.core.optimizer.rules import UpdateRule


class KeptArray(NamedTuple):
    """A contiguous array in a file of kept memory.

    Attributes:
        offset: bytes from the beginning of the file.
        dtype: name of its dtype in torch.
    """

    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: str


class KeptSlot(NamedTuple):
    """One parameter's place in a bucket; see `Slot`.

    Attributes:
        group: the number of its param group.
        names: its names in checkpoints, one for each section.
    """

    offset: int
    numel: int
    group: int
    names: list[str]


class KeptBucket(NamedTuple):
    """A bucket.

    Attributes:
        arrays: its gradients, main weights and compute weights (`RuleExecutor.arrays`), and its
            states.
    """

    numel: int
    slots: list[KeptSlot]
    arrays: dict[str, KeptArray]

    @classmethod
    def from_plain(cls, numel: int, slots: list[Any], arrays: dict[str, Any]) -> KeptBucket:
        """What JSON has made of a bucket."""
        own = {name: KeptArray(*array) for name, array in arrays.items()}
        return cls(numel, [KeptSlot(*slot) for slot in slots], own)

    def pieces(
        self,
        rule: UpdateRule,
        files: KeptFiles,
        counts: Sequence[int],
        stepped: Sequence[int],
        groups: Sequence[Mapping[str, Any]],
    ) -> list[Piece]:
        """The pieces of a step, as `RuleExecutor.prepare` planned them.

        Args:
            counts, stepped: see `Landed`.
            groups: the options of the param groups in the step.
        """
        arrays = {name: files.tensor(array) for name, array in self.arrays.items()}
        found = []
        for index in stepped:
            slot = self.slots[index]
            if not slot.numel:
                continue
            own = {n: each.narrow(0, slot.offset, slot.numel) for n, each in arrays.items()}
            step = rule.scalars(groups[slot.group], counts[index] + 1)
            states = {name: own[name] for name in rule.state_dtypes}
            found.append(Piece(step, own["grad"], own["weight"], states, out=own["out"]))
        return merged(found)


class KeptFiles:
    """Files of kept memory that are mapped here, with arrays in them."""

    def __init__(self, mapped: Mapping[str, mmap.mmap]) -> None:
        self._bytes = {
            name: torch.frombuffer(mapping, dtype=torch.uint8) for name, mapping in mapped.items()
        }

    def place(self, array: torch.Tensor) -> KeptArray | None:
        """Where a contiguous array is; None if it is elsewhere, or empty."""
        for file, content in self._bytes.items():
            offset = array.data_ptr() - content.data_ptr()
            if array.numel() and 0 <= offset < content.numel():
                dtype = str(array.dtype).removeprefix("torch.")
                return KeptArray(file, offset, tuple(array.shape), dtype)
        return None

    def tensor(self, array: KeptArray) -> torch.Tensor:
        """The array."""
        dtype = getattr(torch, array.dtype)
        nbytes = math.prod(array.shape) * dtype.itemsize
        content = self._bytes[array.file][array.offset : array.offset + nbytes]
        return content.view(dtype).view(array.shape)
