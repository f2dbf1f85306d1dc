"""`KeptBucket`: a bucket in kept memory as plain data, from which another process finishes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron.core.host_keeper import KeptMemory
from megatron.core.optimizer.kernels.piece import Piece, merged
from megatron.core.optimizer.rules import UpdateRule


class KeptArray(NamedTuple):
    """A contiguous array in kept memory.

    Attributes:
        file, offset: see `KeptMemory.place_of`.
        dtype: name of its dtype in torch.
    """

    file: int
    offset: int
    shape: Sequence[int]
    dtype: str

    @classmethod
    def of(cls, tensor: torch.Tensor, memory: KeptMemory) -> KeptArray | None:
        """A contiguous tensor; None if it is elsewhere, or empty."""
        found = memory.place_of(tensor.data_ptr()) if tensor.numel() else None
        dtype = str(tensor.dtype).removeprefix("torch.")
        return None if found is None else cls(*found, tensor.shape, dtype)

    def tensor(self, memory: KeptMemory) -> torch.Tensor:
        """The array in the files of an earlier process."""
        dtype, numel = getattr(torch, self.dtype), math.prod(self.shape)
        file = memory.files[sorted(memory.files)[self.file]]
        flat = torch.frombuffer(file, dtype=dtype, count=numel, offset=self.offset)
        return flat.view(self.shape)


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


class Landed(NamedTuple):
    """One bucket before a step.

    Attributes:
        counts: the steps that each of its parameters has taken.
        stepped: the numbers of the slots that have a gradient.
    """

    counts: list[int]
    stepped: list[int]

    def counts_after(self, is_stepped: bool) -> list[int]:
        """`counts` after the step, unless that was skipped."""
        stepped = set(self.stepped) if is_stepped else ()
        return [count + (index in stepped) for index, count in enumerate(self.counts)]


class KeptBucket(NamedTuple):
    """A bucket.

    Attributes:
        arrays: its arrays (`RuleExecutor.arrays`), if it has elements.
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
        memory: KeptMemory,
        landed: Landed,
        groups: Sequence[Mapping[str, Any]],
    ) -> list[Piece]:
        """The pieces of a step, as `RuleExecutor.prepare` planned them.

        Args:
            memory: of the earlier process.
            groups: the options of the param groups in the step.
        """
        if not self.arrays:
            return []
        flat = {name: array.tensor(memory) for name, array in self.arrays.items()}
        states = {name: flat[name] for name in rule.state_dtypes}
        whole = Piece(None, flat["grad"], flat["weight"], states, out=flat["out"])
        found = []
        for index in landed.stepped:
            slot = self.slots[index]
            step = rule.scalars(groups[slot.group], landed.counts[index] + 1)
            found.append(whole.part(slot.offset, slot.numel)._replace(step=step))
        return merged(found)
