"""The host side's memory: what every bucket needs, added up, held against what there is, and
allocated once.

Four slabs, of which two may be pinned, since only they are copied from and to the device:

    gradients         pinned with `pins_grads`    on their way down
    compute weights   pinned with `pins_params`   on their way up; none where gradients make room
    main weights      never pinned                a model keeps them when its optimizer is deleted
    states            never pinned                moments, and widened gradients

New compute weights are written over the gradients that they came from, where both have one dtype
and are pinned alike. Main weights that are in host memory already stay where they are.

Pinning takes seconds per GiB, and what is pinned can neither be moved nor swapped out. With bf16
compute and fp32 moments an element has 14 bytes on the host, and 2 of them travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from megatron.core.device import Device
from megatron.core.host_memory import HostNeed, HostSlab, SlabBuilder
from megatron.core.optimizer.cpu_offloading.bucket import Bucket
from megatron.core.optimizer.cpu_offloading.hybrid_settings import HybridSettings
from megatron.core.optimizer.host_preflight import shares_memory


class _Place(NamedTuple):
    """Where an array lies: in the slab of a purpose."""

    purpose: str
    offset: int
    numel: int
    dtype: torch.dtype


class HostAllocator:
    """See the module's docstring.

    Attributes:
        needs: what will be allocated.
    """

    def __init__(self, device: Device, buckets: Sequence[Bucket], settings: HybridSettings) -> None:
        """Takes in what every bucket needs, one kind of array after the other."""
        self._device = device
        self._pins = {
            "gradients": settings.pins_grads,
            "compute weights": settings.pins_params,
            "main weights": False,
            "states": False,
        }
        self._builders = {purpose: SlabBuilder() for purpose in self._pins}
        self._places: dict[tuple[int, str], _Place] = {}  # by id of the bucket, and what
        self._slabs: dict[str, HostSlab] = {}
        self._widest: Bucket | None = None
        self.needs: list[HostNeed] = []

        # By id of the bucket: main weights that are in host memory already.
        self._own = {id(b): own for b in buckets if (own := b.own_main_weight()) is not None}
        new = [bucket for bucket in buckets if id(bucket) not in self._own]
        self._add_each("main weights", "main weights", new, lambda bucket: bucket.main_dtype)
        if settings.host_is_flat:
            exp_avg, exp_avg_sq = settings.moment_dtypes
            self._add_each("exp_avg", "states", buckets, lambda _: exp_avg)
            self._add_each("exp_avg_sq", "states", buckets, lambda _: exp_avg_sq)

        self._add_each("gradients", "gradients", buckets, lambda bucket: bucket.grad_dtype)
        if not settings.host_is_flat:
            self._add_widened(buckets)
        apart = [bucket for bucket in buckets if not self._shares(bucket)]
        self._add_each("compute weights", "compute weights", apart, lambda b: b.weight_dtype)

    @property
    def nbytes(self) -> int:
        """Of host memory that the buckets lie in, with main weights that were there before."""
        return sum(self.nbytes_by_state.values())

    @property
    def nbytes_by_state(self) -> dict[str, int]:
        """`nbytes` by what it is for: what aligns an array counts with it."""
        own = sum(own.nbytes for own in self._own.values())
        by_state = {"main weights": own} if own else {}
        for need in self.needs:
            by_state[need.what] = by_state.get(need.what, 0) + need.nbytes
        return by_state

    def allocate(self) -> None:
        """Makes the slabs, which are zero.

        Raises:
            HostMemoryError, PinError: as `HostSlab` does; no slab is left then, and nothing pinned.
        """
        try:
            for purpose, builder in self._builders.items():
                self._slabs[purpose] = builder.build(
                    self._device, is_pinned=self._pins[purpose], purpose=purpose
                )
        except BaseException:
            # The traceback keeps this allocator alive, and a caller that catches the error, to try
            # again unpinned, needs the memory now.
            self._slabs.clear()
            raise

    def fill(self, bucket: Bucket) -> None:
        """Gives a bucket its arrays."""
        own = self._own.get(id(bucket))
        bucket.main_weight = self._array(bucket, "main weights") if own is None else own
        bucket.grad = self._array(bucket, "gradients")
        shares = self._shares(bucket)
        bucket.weight = bucket.grad if shares else self._array(bucket, "compute weights")

    def moments(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """AdamW's two."""
        return self._array(bucket, "exp_avg"), self._array(bucket, "exp_avg_sq")

    def widened(self) -> torch.Tensor | None:
        """Memory for the gradients of any one bucket in the dtype of its main weights, where they
        have another.
        """
        return None if self._widest is None else self._array(self._widest, "widened gradients")

    def _shares(self, bucket: Bucket) -> bool:
        return shares_memory(
            bucket.grad_dtype,
            bucket.weight_dtype,
            self._pins["gradients"],
            self._pins["compute weights"],
        )

    def _add_widened(self, buckets: Sequence[Bucket]) -> None:
        # Other optimizers take gradients in the main weights' dtype only. Buckets are updated one
        # after the other, so the largest one's memory serves all.
        narrow = [bucket for bucket in buckets if bucket.grad_dtype != bucket.main_dtype]
        self._widest = max(narrow, key=lambda b: b.numel * b.main_dtype.itemsize, default=None)
        if self._widest is not None:
            self._add_each("widened gradients", "states", [self._widest], lambda b: b.main_dtype)

    def _add_each(
        self,
        what: str,
        purpose: str,
        buckets: Iterable[Bucket],
        dtype_of: Callable[[Bucket], torch.dtype],
    ) -> None:
        builder = self._builders[purpose]
        before = builder.nbytes
        for bucket in buckets:
            dtype = dtype_of(bucket)
            offset = builder.add(bucket.numel, dtype)
            self._places[id(bucket), what] = _Place(purpose, offset, bucket.numel, dtype)

        if added := builder.nbytes - before:
            is_pinned = self._pins[purpose] and self._device.pins_host_memory
            self.needs.append(HostNeed(what, added, is_pinned))

    def _array(self, bucket: Bucket, what: str) -> torch.Tensor:
        place = self._places[id(bucket), what]
        return self._slabs[place.purpose].tensor(place.offset, place.numel, place.dtype)
