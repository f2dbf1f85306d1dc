"""`HostLayout`: the host memory of all buckets, exact to the byte, from shapes alone.

Five slabs, pinned where they are copied from and to the device:

    gradients         pinned with `pins_grads`    copied down
    compute weights   pinned with `pins_params`   copied up; none where gradients make room
    main weights      pinned with `pins_states`   a model keeps them when its optimizer is deleted
    states            pinned with `pins_states`   states of a rule, and widened gradients
    undo log          never pinned                old main weights and states of early updates

New compute weights are written over the gradients that they came from, where both have one dtype
and are pinned alike, but not in buckets that may be updated early, whose gradients may be needed
again. Main weights that are in host memory already stay where they are. `HostAllocator` makes the
slabs; a plan made before there are weights only needs their sizes. Pinning takes seconds per GiB,
and pinned memory can neither be moved nor swapped out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from megatron.core.device import Device
from megatron.core.host_memory import HostNeed, HostSlab, SlabBuilder
from megatron.core.optimizer.cpu_offloading.bucket import Bucket
from megatron.core.optimizer.cpu_offloading.hybrid_settings import HybridSettings

UNDO = "undo log"


class BucketShape(NamedTuple):
    """A bucket's arrays, without memory.

    Attributes:
        numel: elements of each array, padding included.
        main_dtype, grad_dtype, weight_dtype: of the arrays.
        has_main: whether its main weights are in host memory already, in as many elements.
        main_numel: elements of the array of main weights otherwise; None: as of the others.
        weight_numel: elements of the array of compute weights; None: as of the others.
        is_watched: see `Bucket`: only then it may be updated early.
        state_numels: elements of each state; None: `numel` of every one.
    """

    numel: int
    main_dtype: torch.dtype
    grad_dtype: torch.dtype
    weight_dtype: torch.dtype
    has_main: bool
    main_numel: int | None = None
    weight_numel: int | None = None
    is_watched: bool = False
    state_numels: Mapping[str, int] | None = None

    def state_numel(self, name: str) -> int:
        """Elements of a state of the rule."""
        return self.numel if self.state_numels is None else self.state_numels.get(name, 0)


class HostRules(NamedTuple):
    """What decides which arrays a bucket has, and which of them are pinned.

    Attributes:
        state_dtypes: dtypes of the rule's states, by name; None for other optimizers, which
            allocate their states themselves.
        pins_memory: whether the device pins host memory at all.
        early_nbytes: bytes that early updates may take in addition.
    """

    state_dtypes: Mapping[str, torch.dtype] | None
    pins_grads: bool
    pins_params: bool
    pins_states: bool
    pins_memory: bool
    early_nbytes: int = 0


class SlabRange(NamedTuple):
    """The offset of an array in the slab of its purpose."""

    purpose: str
    offset: int  # bytes
    numel: int
    dtype: torch.dtype


class HostLayout:
    """Offsets of all arrays in the slabs.

    Attributes:
        pins: whether the slab of a purpose is to be pinned.
        builders: the slabs' sizes, by purpose.
        arrays: their ranges, by the number of the bucket and the kind of array.
        early: the numbers of the buckets that may be updated early, and have an undo log.
        early_nbytes: bytes that they take in addition.
        widest: the number of the bucket whose gradients take the most memory once they are
            widened; None if none are.
        needs: allocations to make.
    """

    def __init__(self, buckets: Sequence[BucketShape], rules: HostRules) -> None:
        """Adds the needs of every bucket, one kind of array after the other."""
        self._buckets = buckets
        self._rules = rules
        self.pins = {
            "gradients": rules.pins_grads,
            "compute weights": rules.pins_params,
            "main weights": rules.pins_states,
            "states": rules.pins_states,
            UNDO: False,
        }
        self.builders = {purpose: SlabBuilder() for purpose in self.pins}
        self.arrays: dict[tuple[int, str], SlabRange] = {}
        self.widest: int | None = None
        self.needs: list[HostNeed] = []
        self.early, self.early_nbytes = self._choose_early()

        numbered = list(enumerate(buckets))
        mains = [
            (i, b.numel if b.main_numel is None else b.main_numel, b.main_dtype)
            for i, b in numbered
            if not b.has_main
        ]
        self._add("main weights", "main weights", mains)
        for name, dtype in (rules.state_dtypes or {}).items():
            self._add(name, "states", [(i, b.state_numel(name), dtype) for i, b in numbered])

        self._add("gradients", "gradients", [(i, b.numel, b.grad_dtype) for i, b in numbered])
        if rules.state_dtypes is None:
            self._add_widened()
        apart = [
            (i, b.numel if b.weight_numel is None else b.weight_numel, b.weight_dtype)
            for i, b in numbered
            if not self.shares(i)
        ]
        self._add("compute weights", "compute weights", apart)
        logs = [(i, self._undo_nbytes(buckets[i]), torch.uint8) for i in sorted(self.early)]
        self._add(UNDO, UNDO, logs)

    @property
    def nbytes_by_state(self) -> dict[str, int]:
        """Bytes of the buckets' host memory by purpose, with main weights that were on the host
        before. The alignment of an array counts with it.
        """
        own = sum(b.numel * b.main_dtype.itemsize for b in self._buckets if b.has_main)
        by_state = {"main weights": own} if own else {}
        for need in self.needs:
            by_state[need.what] = by_state.get(need.what, 0) + need.nbytes
        return by_state

    def shares(self, index: int) -> bool:
        """Whether a bucket's new compute weights are written over its gradients."""
        return index not in self.early and self._may_share(self._buckets[index])

    def _may_share(self, bucket: BucketShape) -> bool:
        rules = self._rules
        return bucket.grad_dtype == bucket.weight_dtype and rules.pins_grads == rules.pins_params

    def _choose_early(self) -> tuple[frozenset[int], int]:
        """The last buckets of the network, whose gradients come first, as far as memory reaches."""
        chosen, taken = set(), 0
        for index, bucket in reversed([*enumerate(self._buckets)]):
            cost = self._undo_nbytes(bucket)
            if self._may_share(bucket):
                cost += bucket.numel * bucket.weight_dtype.itemsize
            if bucket.is_watched and 0 < cost <= self._rules.early_nbytes - taken:
                taken += cost
                chosen.add(index)
        return frozenset(chosen), taken

    def _undo_nbytes(self, bucket: BucketShape) -> int:
        dtypes = [bucket.main_dtype, *(self._rules.state_dtypes or {}).values()]
        return arranged([(bucket.numel, dtype) for dtype in dtypes]).nbytes

    def _add_widened(self) -> None:
        # Other optimizers take gradients in the main weights' dtype only. Buckets are updated one
        # after the other, so the largest one's memory serves all.
        buckets = self._buckets
        narrow = [i for i, one in enumerate(buckets) if one.grad_dtype != one.main_dtype]
        self.widest = max(
            narrow, key=lambda i: buckets[i].numel * buckets[i].main_dtype.itemsize, default=None
        )
        if self.widest is not None:
            widest = buckets[self.widest]
            array = (self.widest, widest.numel, widest.main_dtype)
            self._add("widened gradients", "states", [array])

    def _add(self, what: str, purpose: str, arrays: Iterable[tuple[int, int, torch.dtype]]) -> None:
        """Adds arrays of one kind: the number of the bucket, elements, dtype of each."""
        builder = self.builders[purpose]
        before = builder.nbytes
        for index, numel, dtype in arrays:
            offset = builder.add(numel, dtype)
            self.arrays[index, what] = SlabRange(purpose, offset, numel, dtype)

        if added := builder.nbytes - before:
            is_pinned = self.pins[purpose] and self._rules.pins_memory
            self.needs.append(HostNeed(what, added, is_pinned))


class Arranged(NamedTuple):
    """Arrays in one piece of memory: the offset of each, in bytes, and the bytes of all."""

    offsets: list[int]
    nbytes: int


def arranged(arrays: Iterable[tuple[int, torch.dtype]]) -> Arranged:
    """Puts arrays, by elements and dtype, one after the other."""
    builder = SlabBuilder()
    offsets = [builder.add(numel, dtype) for numel, dtype in arrays]
    return Arranged(offsets, builder.nbytes)


class HostAllocator:
    """Allocates the arrays of the host's buckets.

    Attributes:
        needs: what will be allocated.
        nbytes_by_state: bytes of the buckets' host memory by purpose, with main weights that were
            on the host before; the alignment of an array counts with it.
    """

    def __init__(
        self,
        device: Device,
        buckets: Sequence[Bucket],
        settings: HybridSettings,
        early_nbytes: int = 0,
    ) -> None:
        """Adds the needs of every bucket, one kind of array after the other.

        Args:
            early_nbytes: bytes that early updates may take in addition.
        """
        self._device = device
        self._kept = settings.kept
        self._slabs: dict[str, HostSlab] = {}
        self._numbers = {id(bucket): number for number, bucket in enumerate(buckets)}

        # By id of the bucket: main weights that are in host memory already.
        self._own = {id(b): own for b in buckets if (own := b.own_main_weight()) is not None}
        shapes = [
            BucketShape(
                bucket.numel,
                bucket.main_dtype,
                bucket.grad_dtype,
                bucket.weight_dtype,
                has_main=id(bucket) in self._own,
                main_numel=bucket.main_numel,
                weight_numel=bucket.weight_numel,
                is_watched=bucket.is_watched,
                state_numels=None if bucket.state_places is None else bucket.state_places.numels,
            )
            for bucket in buckets
        ]
        self._layout = HostLayout(
            shapes,
            HostRules(
                None if settings.host.rule is None else settings.host.rule.all_state_dtypes,
                settings.pins_grads,
                settings.pins_params,
                # States of other buckets never travel.
                settings.pins_states and any(bucket.is_delivered for bucket in buckets),
                device.pins_host_memory,
                early_nbytes,
            ),
        )
        self.needs: list[HostNeed] = self._layout.needs
        self.nbytes_by_state: dict[str, int] = self._layout.nbytes_by_state

    @property
    def nbytes(self) -> int:
        """Bytes of the buckets' host memory, with main weights that were on the host before."""
        return sum(self.nbytes_by_state.values())

    @property
    def early_nbytes(self) -> int:
        """Bytes that early updates take."""
        return self._layout.early_nbytes

    def allocate(self) -> None:
        """Makes the slabs, which are zero, unless an earlier process's are restored.

        Raises:
            HostMemoryError, PinError: as `HostSlab` does; all slabs are freed and unpinned then.
        """
        try:
            for purpose, builder in self._layout.builders.items():
                self._slabs[purpose] = builder.build(
                    self._device,
                    is_pinned=self._layout.pins[purpose],
                    purpose=purpose,
                    kept=self._kept,
                )
        except BaseException:
            # The traceback keeps this allocator alive, and a caller that catches the error, to try
            # again unpinned, needs the memory now.
            self._slabs.clear()
            raise

    def fill(self, bucket: Bucket) -> None:
        """Gives a bucket its arrays."""
        number, own = self._numbers[id(bucket)], self._own.get(id(bucket))
        bucket.main_weight = self._array(number, "main weights") if own is None else own
        bucket.grad = self._array(number, "gradients")
        shares = self._layout.shares(number)
        bucket.weight = bucket.grad if shares else self._array(number, "compute weights")

    def states(self, bucket: Bucket, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The memory of a rule's states."""
        number = self._numbers[id(bucket)]
        return {name: self._array(number, name) for name in names}

    def undo(self, bucket: Bucket, states: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
        """The undo log of a bucket that may be updated early: an array like its main weights, and
        one like each state. Empty for others.
        """
        number = self._numbers[id(bucket)]
        if number not in self._layout.early:
            return {}
        memory, dtypes = self._array(number, UNDO), {"weight": bucket.main_dtype, **states}
        offsets = arranged([(bucket.numel, dtype) for dtype in dtypes.values()]).offsets
        return {
            name: memory.narrow(0, offset, bucket.numel * dtype.itemsize).view(dtype)
            for (name, dtype), offset in zip(dtypes.items(), offsets, strict=True)
        }

    def widened(self) -> torch.Tensor | None:
        """Memory for the gradients of any one bucket in the dtype of its main weights, where they
        have another.
        """
        widest = self._layout.widest
        return None if widest is None else self._array(widest, "widened gradients")

    def _array(self, number: int, what: str) -> torch.Tensor:
        array = self._layout.arrays[number, what]
        return self._slabs[array.purpose].tensor(array.offset, array.numel, array.dtype)
