"""`KeptRank`: the records of a rank in kept memory (kept_state.py). `EarlierRanks`: the ranks whose
state a start continues from, with the same number of them or another.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.dist_checkpointing.agreement import on_all_ranks
from megatron.core.dist_checkpointing.errors import CheckpointError, few
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.saved import SavedTensor
from megatron.core.dist_checkpointing.load.reader import check_contents, load_entries
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.dist_checkpointing.state.param_groups import PARAM_GROUPS
from megatron.core.host_keeper import Keeper, KeeperError, KeptMemory, Records
from megatron.core.host_memory import HostLimits
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.cpu_offloading.kept_layout import KeptArray, KeptBucket, Landed
from megatron.core.optimizer.cpu_offloading.kept_updates import find_damage
from megatron.core.optimizer.state_tensors import STEP

logger = logging.getLogger(__name__)

KINDS = ("built", "ended", "landed", "decided")
SOURCE = "the kept host state"


class KeptRank(Records):
    """The records of one rank.

    Attributes:
        keeper: the rank's.
        memory: its memory, in which the records are.
        built: the record of `write_built` of an earlier process, once its files are mapped.
    """

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.memory = KeptMemory(keeper)
        self.built: dict[str, Any] = {}
        super().__init__(self.memory, KINDS)

    def write_built(
        self, identity: str, model: nn.Module, optimizer: HybridDeviceOptimizer
    ) -> None:
        """Records the settings and the contents of the files."""
        contents = _contents(model, optimizer)
        placed = [
            (entry.key, entry.saved_as.shape, entry.offsets, array)
            for entry in contents.entries
            if (array := KeptArray.of(entry.part_of(entry.values.stored), self.memory)) is not None
        ]
        built = {
            "identity": identity,
            "sizes": self.keeper.files,
            "tensors": placed,
            "buckets": optimizer.kept_buckets(self.memory, contents.names),
        }
        self.write("built", 1, json.dumps(built).encode())

    @property
    def buckets(self) -> list[KeptBucket]:
        """Its buckets, of `built`."""
        return [KeptBucket.from_plain(*bucket) for bucket in self.built["buckets"]]

    def map_files(self, identity: str) -> bool:
        """Maps all files if a run with these settings has written them. KeeperError if some are
        missing or have another size.
        """
        built = json.loads(self.read("built").get(1, b"{}"))
        if built.get("identity") != identity:
            return False
        self.memory.map_files(built["sizes"])
        self.built = built
        return True

    def last_decided(self) -> int:
        """The number of the last step that the rank has decided; 0 without any."""
        return max(self.read("decided"), default=0) if self.built else 0

    def can_finish(self, number: int) -> bool:
        """Whether the rank has the records to finish a step that was decided."""
        return bool(self.built) and all(number in self.read(kind) for kind in ("landed", "ended"))

    def is_damaged(self, number: int, rank: int) -> bool:
        """Whether weights and states are not as a step left them; warns if so."""
        damage = find_damage(self.memory.files, number)
        if damage:
            logger.warning("the kept host state of rank %d is damaged: %s", rank, damage)
        return bool(damage)


class EarlierRanks:
    """Ranks that have ended, whose state this start continues from: in place, the earlier process
    of this rank; otherwise, all of another number of ranks. This is a `ReadableTensors` of their
    main weights and states while it loads.

    Attributes:
        ranks: in order.
        number: of the step to finish, the last one that any rank has decided.
        is_in_place: whether this process uses the memory of the earlier one.
        path, tensors, plain: see `ReadableTensors`.
    """

    def __init__(self, ranks: Sequence[KeptRank], number: int, *, is_in_place: bool) -> None:
        self.ranks = ranks
        self.number = number
        self.is_in_place = is_in_place
        self.path = SOURCE
        self.tensors: dict[str, SavedTensor] = {}
        self.plain: Sequence[str] = ()
        self._parts: dict[str, dict[Box, torch.Tensor]] = {}  # by key

    @classmethod
    def find(cls, keeper: Keeper, identity: str) -> EarlierRanks | None:
        """The ranks with the newest state that ranks with these settings can continue from, and
        that were all on this machine; None without any.
        """
        newest = None
        for world_size, keepers in keeper.earlier.items():
            with suppress(KeeperError):
                ranks = [KeptRank(keepers[rank]) for rank in sorted(keepers)]
                if len(ranks) == world_size and all(rank.map_files(identity) for rank in ranks):
                    number = max(rank.last_decided() for rank in ranks)
                    can_finish = all(rank.can_finish(number) for rank in ranks)
                    if can_finish and (newest is None or number > newest.number):
                        newest = cls(ranks, number, is_in_place=False)
        return newest

    def fit(self) -> bool:
        """Whether the machine has memory for a second state."""
        sizes = [size for rank in self.ranks for size in rank.keeper.files.items()]
        sparse = ("records", "undo")
        needed = sum(nbytes for name, nbytes in sizes if not name.startswith(sparse))
        available = HostLimits.read().available
        return available is None or needed <= available

    def are_damaged(self) -> bool:
        """`KeptRank.is_damaged` for this process's share of the ranks."""
        return any(self.ranks[rank].is_damaged(self.number, rank) for rank in self._share)

    def finish(
        self,
        model: nn.Module,
        optimizer: HybridDeviceOptimizer,
        landed: Sequence[Sequence[Landed]],
        grad_scale: float | None,
    ) -> None:
        """Finishes the step of the ranks in their memory, and takes over this process's main
        weights and states, or loads them from there. All processes call it together.

        Args:
            landed: of every one of `ranks`.
            grad_scale: the factor of the gradients; None: the step was skipped.

        Raises:
            CheckpointError: on all processes, for damage, and if the ranks lack some elements.
        """
        if grad_scale is not None:
            on_all_ranks(lambda: self._finish_share(optimizer, landed, grad_scale))
        counts = [own.counts_after(grad_scale is not None) for own in landed[0]]
        if self.is_in_place:
            optimizer.take_over(counts)
        else:
            on_all_ranks(lambda: self._load(model, optimizer, counts))

    def read(self, key: str, offsets: Sequence[int], out: torch.Tensor) -> int:
        """As `PublishedCheckpoint.read`."""
        wanted = Box(tuple(offsets), tuple(out.shape))
        for box, part in self._parts[key].items():
            overlap = wanted.overlap(box)
            if overlap is not None:
                own = part[overlap.within(box.offsets).slices()]
                out[overlap.within(wanted.offsets).slices()].copy_(own)
        return out.nbytes

    @property
    def _share(self) -> range:
        """The numbers of the ranks whose memory this process verifies and finishes."""
        if self.is_in_place:
            return range(1)
        return range(dist.get_rank(), len(self.ranks), dist.get_world_size())

    def _finish_share(
        self,
        optimizer: HybridDeviceOptimizer,
        landed: Sequence[Sequence[Landed]],
        grad_scale: float,
    ) -> None:
        for number in self._share:
            rank, own = self.ranks[number], landed[number]
            optimizer.finish_kept(self.number, rank.memory, rank.buckets, own, grad_scale)

    def _load(
        self, model: nn.Module, optimizer: HybridDeviceOptimizer, counts: Sequence[Sequence[int]]
    ) -> None:
        self._add_parts()
        self._add_counts(counts)
        contents = _contents(model, optimizer)
        load_entries(self, contents, check_contents(self, contents, [PARAM_GROUPS]))

    def _add_parts(self) -> None:
        """Adds the tensors of which each rank has some boxes."""
        for rank in self.ranks:
            for key, shape, offsets, array in rank.built["tensors"]:
                part = KeptArray(*array).tensor(rank.memory)
                self.tensors[key] = SavedTensor(key, part.dtype, tuple(shape), ())
                # Ranks may have the same box.
                self._parts.setdefault(key, {})[Box(tuple(offsets), tuple(part.shape))] = part
        missing = [
            key
            for key, parts in self._parts.items()
            if sum(box.numel for box in parts) != math.prod(self.tensors[key].shape)
        ]
        if missing:
            raise CheckpointError(
                f"Expected whole tensors in {SOURCE}, got parts of {few(missing)}."
            )

    def _add_counts(self, counts: Sequence[Sequence[int]]) -> None:
        """Adds the parameters' counters of steps, which are not in kept memory."""
        for bucket, own in zip(self.ranks[0].buckets, counts, strict=True):
            for slot, count in zip(bucket.slots, own, strict=True):
                for name in slot.names:
                    key, step = f"optimizer.state.{name}.{STEP}", torch.tensor(float(count))
                    self.tensors[key] = SavedTensor(key, step.dtype, (), ())
                    self._parts[key] = {Box.whole(()): step}


def _contents(model: nn.Module, optimizer: HybridDeviceOptimizer) -> Contents:
    """The main weights and states of a checkpoint."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    contents = collect(model, optimizer, rank=rank, world_size=world_size)
    return replace(contents, groups=[own for own in contents.groups if own.unit is not None])
