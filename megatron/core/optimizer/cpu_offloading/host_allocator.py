"""The host side's memory: the needs of all buckets, summed, compared with the available memory,
and allocated once. `HostLayout` lists the arrays and their offsets.

Pinning takes seconds per GiB, and pinned memory can neither be moved nor swapped out. With AdamW,
bf16 compute and fp32 moments an element has 14 bytes on the host, and 2 of them travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megatron.core.device import Device
from megatron.core.host_memory import HostNeed, HostSlab
from megatron.core.optimizer.cpu_offloading.bucket import Bucket
from megatron.core.optimizer.cpu_offloading.host_layout import BucketShape, HostLayout, HostRules
from megatron.core.optimizer.cpu_offloading.hybrid_settings import HybridSettings


class HostAllocator:
    """Allocates the arrays of the host's buckets.

    Attributes:
        needs: what will be allocated.
        nbytes_by_state: bytes of the buckets' host memory by purpose, with main weights that were
            on the host before; the alignment of an array counts with it.
    """

    def __init__(self, device: Device, buckets: Sequence[Bucket], settings: HybridSettings) -> None:
        """Adds the needs of every bucket, one kind of array after the other."""
        self._device = device
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
            )
            for bucket in buckets
        ]
        self._layout = HostLayout(
            shapes,
            HostRules(
                None if settings.host.rule is None else settings.host.rule.state_dtypes,
                settings.pins_grads,
                settings.pins_params,
                device.pins_host_memory,
            ),
        )
        self.needs: list[HostNeed] = self._layout.needs
        self.nbytes_by_state: dict[str, int] = self._layout.nbytes_by_state

    @property
    def nbytes(self) -> int:
        """Bytes of the buckets' host memory, with main weights that were on the host before."""
        return sum(self.nbytes_by_state.values())

    def allocate(self) -> None:
        """Makes the slabs, which are zero.

        Raises:
            HostMemoryError, PinError: as `HostSlab` does; all slabs are freed and unpinned then.
        """
        try:
            for purpose, builder in self._layout.builders.items():
                self._slabs[purpose] = builder.build(
                    self._device, is_pinned=self._layout.pins[purpose], purpose=purpose
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

    def widened(self) -> torch.Tensor | None:
        """Memory for the gradients of any one bucket in the dtype of its main weights, where they
        have another.
        """
        widest = self._layout.widest
        return None if widest is None else self._array(widest, "widened gradients")

    def _array(self, number: int, what: str) -> torch.Tensor:
        array = self._layout.arrays[number, what]
        return self._slabs[array.purpose].tensor(array.offset, array.numel, array.dtype)
