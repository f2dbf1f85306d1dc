"""What ranks record in kept memory (kept_state.py), and `EarlierRanks`, which another number of
ranks continues from: they finish the last step in the memory of the earlier ranks, and load main
weights and states from there as from a checkpoint.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.dist_checkpointing.errors import CheckpointError, few
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.saved import SavedChunk, SavedTensor
from megatron.core.dist_checkpointing.load.reader import check_contents, load_entries
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.dist_checkpointing.state.param_groups import PARAM_GROUPS
from megatron.core.host_keeper import Keeper, KeeperError, KeptMemory, Records
from megatron.core.host_memory import HostLimits
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.cpu_offloading.kept_layout import KeptArray, KeptBucket, KeptFiles
from megatron.core.optimizer.cpu_offloading.kept_updates import Landed
from megatron.core.optimizer.state_tensors import STEP

KINDS = ("built", "ended", "landed", "decided")
SOURCE = "the kept host state"


class RankRecords(Records):
    """The records of one rank."""

    def __init__(self, memory: KeptMemory) -> None:
        super().__init__(memory, KINDS)
        self._files = memory

    def write_built(
        self, identity: str, model: nn.Module, optimizer: HybridDeviceOptimizer
    ) -> None:
        """Records the settings and what the files contain."""
        files, contents = KeptFiles(self._files.mapped), contents_of(model, optimizer)
        placed = [
            (entry.key, entry.saved_as.shape, entry.offsets, array)
            for entry in contents.entries
            if (array := files.place(entry.part_of(entry.values.stored))) is not None
        ]
        built = {
            "identity": identity,
            "sizes": self._files.sizes,
            "tensors": placed,
            "buckets": optimizer.kept_buckets(files, contents.names),
        }
        self.write("built", 1, json.dumps(built).encode())

    def built(self) -> dict[str, Any]:
        """The record of `write_built`; empty without one."""
        content = self.read("built").get(1)
        return {} if content is None else json.loads(content)

    def are_of(self, identity: str) -> bool:
        """Whether the settings were these. KeeperError if files are missing or damaged."""
        built = self.built()
        if built.get("identity") != identity:
            return False
        self._files.check(built["sizes"])
        return True

    def last_decided(self) -> int:
        """The number of the last step; 0 without any."""
        return max(self.read("decided"), default=0)

    def can_finish(self, number: int) -> bool:
        """Whether the rank has what it needs to finish a step that was decided."""
        return number in self.read("landed") and number in self.read("ended")


class _Rank(NamedTuple):
    keeper: Keeper
    memory: KeptMemory
    records: RankRecords

    @classmethod
    def of(cls, keeper: Keeper) -> _Rank:
        memory = KeptMemory(keeper)
        return cls(keeper, memory, RankRecords(memory))


class EarlierRanks:
    """All ranks of a job from when it had another number of them. `ReadableTensors` once the step
    has been finished.

    Attributes:
        number: of the last step that any of the ranks has decided.
        path, tensors, plain: see `ReadableTensors`.
    """

    def __init__(self, ranks: Sequence[_Rank]) -> None:
        """Use `find`."""
        self.number = max(rank.records.last_decided() for rank in ranks)
        self.path = SOURCE
        self.tensors: dict[str, SavedTensor] = {}
        self.plain: Sequence[str] = ()
        self._ranks = ranks
        self._files: list[KeptFiles] = []
        self._counts: dict[str, int] = {}  # steps by key

    @classmethod
    def find(cls, keeper: Keeper, identity: str) -> EarlierRanks | None:
        """The ranks with the newest state that ranks with these settings can continue from, and
        that are all on this machine; None without any.
        """
        newest = None
        for world_size, keepers in keeper.earlier.items():
            with suppress(KeeperError):
                found = cls([_Rank.of(keepers[rank]) for rank in sorted(keepers)])
                if (
                    len(keepers) == world_size
                    and all(records.are_of(identity) for records in found.records)
                    and all(records.can_finish(found.number) for records in found.records)
                    and found.number > (0 if newest is None else newest.number)
                ):
                    newest = found
        return newest

    @property
    def records(self) -> list[RankRecords]:
        return [rank.records for rank in self._ranks]

    @property
    def keepers(self) -> list[Keeper]:
        return [rank.keeper for rank in self._ranks]

    def finish(
        self,
        optimizer: HybridDeviceOptimizer,
        landed: Sequence[Sequence[Landed]],
        grad_scale: float | None,
    ) -> None:
        """Finishes the last step of this process's share of the ranks.

        Args:
            landed: of every rank.
            grad_scale: see `HybridDeviceOptimizer.finish_step`.
        """
        buckets = [
            [KeptBucket.from_plain(*bucket) for bucket in records.built()["buckets"]]
            for records in self.records
        ]
        if grad_scale is not None:
            for number in range(dist.get_rank(), len(self._ranks), dist.get_world_size()):
                memory, own = self._ranks[number].memory, landed[number]
                optimizer.finish_earlier(self.number, memory, buckets[number], own, grad_scale)
        for bucket, before in zip(buckets[0], landed[0], strict=True):
            for index, (slot, count) in enumerate(zip(bucket.slots, before.counts, strict=True)):
                is_stepped = grad_scale is not None and index in before.stepped
                for name in slot.names:
                    self._counts[f"optimizer.state.{name}.{STEP}"] = count + is_stepped

    def load(self, model: nn.Module, optimizer: HybridDeviceOptimizer) -> None:
        """Loads this process's main weights and states, once all processes have finished the step.

        CheckpointError if the ranks do not have all of them.
        """
        self.tensors = _tensors(records.built()["tensors"] for records in self.records)
        for key in self._counts:
            self.tensors[key] = SavedTensor(key, torch.float32, (), ())
        self._files = [KeptFiles(rank.memory.map_all()) for rank in self._ranks]
        contents = contents_of(model, optimizer)
        load_entries(self, contents, check_contents(self, contents, [PARAM_GROUPS]))
        self._files = []

    def read(self, key: str, offsets: Sequence[int], out: torch.Tensor) -> int:
        """As `PublishedCheckpoint.read`."""
        if key in self._counts:
            out.fill_(self._counts[key])
        saved, wanted = self.tensors[key], Box(tuple(offsets), tuple(out.shape))
        dtype = str(saved.dtype).removeprefix("torch.")
        for box, rank, file, offset in saved.chunks:
            overlap = wanted.overlap(box)
            if overlap is not None:
                kept = self._files[rank].tensor(KeptArray(file, offset, box.sizes, dtype))
                part = kept[overlap.within(box.offsets).slices()]
                out[overlap.within(wanted.offsets).slices()].copy_(part)
        return out.nbytes

    def fits(self) -> bool:
        """Whether the machine has memory for a second state."""
        sizes = [size for rank in self._ranks for size in rank.keeper.files.items()]
        sparse = ("records", "undo")
        needed = sum(nbytes for name, nbytes in sizes if not name.startswith(sparse))
        available = HostLimits.read().available
        return available is None or needed <= available


def contents_of(model: nn.Module, optimizer: HybridDeviceOptimizer) -> Contents:
    """The main weights and states of a checkpoint."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    contents = collect(model, optimizer, rank=rank, world_size=world_size)
    return replace(contents, groups=[own for own in contents.groups if own.unit is not None])


def packed(content: Mapping[str, Any]) -> bytes:
    """A record with tensors."""
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def unpacked(content: bytes) -> dict[str, Any]:
    """What `packed` got."""
    found: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    return found


def _tensors(placed: Iterable[Sequence[Any]]) -> dict[str, SavedTensor]:
    """The tensors of which each rank has some boxes. CheckpointError if elements are missing."""
    chunks: dict[str, dict[Box, SavedChunk]] = {}
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for rank, own in enumerate(placed):
        for key, shape, offsets, (file, offset, sizes, dtype) in own:
            box = Box(tuple(offsets), tuple(sizes))
            kinds[key] = getattr(torch, dtype), tuple(shape)
            # Ranks may have the same box.
            chunks.setdefault(key, {}).setdefault(box, SavedChunk(box, rank, file, offset))

    missing = [
        key
        for key, (_, shape) in kinds.items()
        if sum(box.numel for box in chunks[key]) != math.prod(shape)
    ]
    if missing:
        raise CheckpointError(f"Expected whole tensors in {SOURCE}, got parts of {few(missing)}.")
    return {
        key: SavedTensor(key, dtype, shape, list(chunks[key].values()))
        for key, (dtype, shape) in kinds.items()
    }
