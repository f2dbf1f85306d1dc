"""The host side's memory: what every bucket needs, added up, held against what there is, and
allocated once.

Four slabs, of which two may be pinned, since only they are copied from and to the device:

    gradients         on their way down                                             pinned with `pins_grads`
    compute weights   on their way up; none where they share the gradients' memory  pinned with `pins_params`
    main weights      which a model goes on using when its optimizer is gone        never pinned
    states            moments, and widened gradients                                never pinned

New compute weights are written over the gradients that they came from, where both have one dtype
and are pinned alike. Main weights that are in host memory already stay where they are.

Pinning takes seconds per GiB, and what is pinned can neither be moved nor swapped out. With bf16
compute and fp32 moments an element has 14 bytes on the host, and 2 of them travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.device import Device
from megatron.core.dtensors import local_tensor
from megatron.core.host_memory import (
    HostMemoryError,
    HostNeed,
    HostSlab,
    SlabBuilder,
    check_host_memory,
    format_bytes,
)
from megatron.core.issued_collectives import issuing
from megatron.core.local_ranks import local_world_size
from megatron.core.optimizer.cpu_offloading.device_link import DeviceLink

MASTER = "master_param"  # the state that is the main weight of a parameter which is not one itself


class BucketArrays:
    """The flat host arrays of one bucket, and the link to its device.

    Attributes:
        main_weight: [link.numel] of link.main_dtype.
        grad: [link.numel] of link.grad_dtype.
        weight: [link.numel] of link.weight_dtype, the new compute weights on their way; may be
            `grad` itself.
    """

    def __init__(
        self,
        link: DeviceLink,
        main_weight: torch.Tensor,
        grad: torch.Tensor,
        weight: torch.Tensor | None,
    ) -> None:
        self.link = link
        self.main_weight = main_weight
        self.grad = grad
        self.weight = grad if weight is None else weight

    def master(self, index: int) -> dict[str, torch.Tensor]:
        """The main weight of a slot as a state, where its parameter is only rounded from it; else
        nothing.
        """
        slot = self.link.slots[index]
        if slot.parameter.dtype == self.link.main_dtype:
            return {}
        return {MASTER: self.link.as_state(self.main_weight, index)}

    def forget_master(self, index: int) -> None:
        """The main weight of such a slot becomes its parameter's value again."""
        if self.master(index):
            slot = self.link.slots[index]
            slot.of(self.main_weight).copy_(local_tensor(slot.parameter).detach().reshape(-1))


class HostAllocator:
    """See the module's docstring."""

    def __init__(
        self, device: Device, pins_grads: bool, pins_params: bool, has_moments: bool
    ) -> None:
        self._device = device
        self._pins = {
            "gradients": pins_grads,
            "compute weights": pins_params,
            "main weights": False,
            "states": False,
        }
        self._has_moments = has_moments
        self._builders = {purpose: SlabBuilder() for purpose in self._pins}
        self._places: dict[
            tuple[int, str], tuple[str, int, int, torch.dtype]
        ] = {}  # by id of the link, and what
        self._slabs: dict[str, HostSlab] = {}
        self._own: dict[int, torch.Tensor] = {}  # by id of the link: main weights that are there
        self._widest: DeviceLink | None = None
        self.needs: list[HostNeed] = []

    def plan(
        self, links: Sequence[DeviceLink], moment_dtypes: tuple[torch.dtype, torch.dtype]
    ) -> None:
        """Takes in what every bucket needs, one kind of array after the other."""
        self._own = {id(link): own for link in links if (own := link.own_main_weight()) is not None}
        new = [link for link in links if id(link) not in self._own]
        self._add_each("main weights", "main weights", new, lambda link: link.main_dtype)
        if self._has_moments:
            for name, dtype in zip(("exp_avg", "exp_avg_sq"), moment_dtypes, strict=True):
                self._add_each(name, "states", links, partial(_same, dtype))
        self._add_each("gradients", "gradients", links, lambda link: link.grad_dtype)
        if not self._has_moments:
            # What other optimizers are given has the main weights' dtype; buckets are updated one
            # after the other.
            narrow = [link for link in links if link.grad_dtype != link.main_dtype]
            self._widest = max(
                narrow, key=lambda link: link.numel * link.main_dtype.itemsize, default=None
            )
            if self._widest is not None:
                self._add_each(
                    "widened gradients", "states", [self._widest], lambda link: link.main_dtype
                )
        others = [link for link in links if not self._shares(link)]
        self._add_each("compute weights", "compute weights", others, lambda link: link.weight_dtype)

    @property
    def nbytes(self) -> int:
        """Of host memory that the buckets lie in, main weights that were there before included."""
        return sum(builder.nbytes for builder in self._builders.values()) + sum(
            own.nbytes for own in self._own.values()
        )

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
            HostMemoryError, PinError: as `HostSlab` does; then there is no slab, and nothing is
                pinned any more.
        """
        try:
            for purpose, builder in self._builders.items():
                self._slabs[purpose] = builder.build(
                    self._device, is_pinned=self._pins[purpose], purpose=purpose
                )
        except BaseException:
            # The traceback keeps this allocator. Whoever catches the error, to go on unpinned,
            # needs the memory now.
            self._slabs.clear()
            raise

    def arrays(self, link: DeviceLink) -> BucketArrays:
        """The arrays of a bucket's that every optimizer needs."""
        weight = None if self._shares(link) else self._array(link, "compute weights")
        own = self._own.get(id(link))
        main_weight = self._array(link, "main weights") if own is None else own
        return BucketArrays(link, main_weight, self._array(link, "gradients"), weight)

    def moments(self, link: DeviceLink) -> tuple[torch.Tensor, torch.Tensor]:
        """AdamW's two."""
        return self._array(link, "exp_avg"), self._array(link, "exp_avg_sq")

    def widened(self) -> torch.Tensor | None:
        """Memory for the gradients of any one bucket in the dtype of its main weights, where they
        have another.
        """
        return None if self._widest is None else self._array(self._widest, "widened gradients")

    def _shares(self, link: DeviceLink) -> bool:
        return shares_memory(
            link.grad_dtype,
            link.weight_dtype,
            self._pins["gradients"],
            self._pins["compute weights"],
        )

    def _add_each(
        self,
        what: str,
        purpose: str,
        links: Iterable[DeviceLink],
        dtype_of: Callable[[DeviceLink], torch.dtype],
    ) -> None:
        before = self._builders[purpose].nbytes
        for link in links:
            dtype = dtype_of(link)
            offset = self._builders[purpose].add(link.numel, dtype)
            self._places[id(link), what] = (purpose, offset, link.numel, dtype)
        added = self._builders[purpose].nbytes - before
        if added:
            is_pinned = self._pins[purpose] and self._device.pins_host_memory
            self.needs.append(HostNeed(what, added, is_pinned))

    def _array(self, link: DeviceLink, what: str) -> torch.Tensor:
        purpose, offset, numel, dtype = self._places[id(link), what]
        return self._slabs[purpose].tensor(offset, numel, dtype)


def _same(dtype: torch.dtype, _: DeviceLink) -> torch.dtype:
    return dtype


def shares_memory(
    grad_dtype: torch.dtype, weight_dtype: torch.dtype, pins_grads: bool, pins_params: bool
) -> bool:
    """Whether weights on their way up are written over the gradients that they came from."""
    return grad_dtype == weight_dtype and pins_grads == pins_params


def check_memory_on_all_ranks(
    needs: Sequence[HostNeed], num_local_ranks: int | None, mesh: DeviceMesh | None
) -> None:
    """The preflight, whose result all ranks share: none may go on alone, or allocate while others
    still look.

    Raises:
        HostMemoryError: on all ranks of the mesh, with the sum that does not fit, or what it comes
            to elsewhere.
    """
    if num_local_ranks is None:
        num_local_ranks = local_world_size()
    failure = None
    try:
        check_host_memory(needs, num_local_ranks=num_local_ranks)
    except HostMemoryError as error:
        failure = error
    failed_bytes = 0 if failure is None else sum(need.nbytes for need in needs) * num_local_ranks
    most = torch.tensor(
        failed_bytes, dtype=torch.int64, device="cpu" if mesh is None else mesh.device_type
    )
    if mesh is not None:
        for axis in range(mesh.ndim):
            with issuing("all-reduce of the host memory that is missing", most):
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    if failure is not None:
        raise failure
    if most:
        raise HostMemoryError(
            "Expected host memory on every rank's machine, got one that needs "
            f"{format_bytes(int(most))} for its ranks "
            "and has less."
        )
