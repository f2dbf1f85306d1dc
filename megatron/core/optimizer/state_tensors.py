"""Optimizer states as tensors like their parameter: distributed, shaped and strided as it is.

The states of `fully_shard`'s parameters are in flat buffers with the layout of their group, one for
each state, so that a step over a group is a few long passes. The states of other DTensors are
wrapped in the parameter's description; their local shards may be uneven, or empty. No operation of
DTensor is called on any of them.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.aliases import dtensor_like
from megatron.core.distributed.fsdp.dbuffer import DBuffer
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup, group_of
from megatron.core.dtensors import local_tensor

# The names of the states that every rule has: a parameter's own count of steps, and the main weight
# of a parameter which is not one itself.
STEP = "step"
MASTER = "master_param"


class StateMemory:
    """Allocates states. A group's parameters share one buffer for each name that all of them
    have.
    """

    def __init__(self) -> None:
        self._buffers: WeakKeyDictionary[FsdpParameterGroup, dict[str, DBuffer]] = (
            WeakKeyDictionary()
        )

    def __reduce__(self) -> tuple[type[StateMemory], tuple[()]]:
        # A copy of a parameter has no group, so a copy of its optimizer shares no buffers.
        return StateMemory, ()

    def empty(
        self, parameter: torch.Tensor, name: str, dtype: torch.dtype, *, of_all: bool = True
    ) -> torch.Tensor:
        """An uninitialised state on the device of the parameter's local tensor.

        Every parameter of a group must request a name with the same dtype, and once.

        Args:
            of_all: whether all parameters of the group have this state. A buffer of one that few
                have would be mostly empty.
        """
        group = group_of(parameter)
        if group is None or not of_all:
            local = torch.empty_like(local_tensor(parameter), dtype=dtype, requires_grad=False)
            return like(parameter, local)

        # All buffers of a group have one layout: parts that are adjacent in one are so in all, and
        # kernels take them in one pass.
        buffers = self._buffers.setdefault(group, {})
        if name not in buffers:
            device = local_tensor(parameter).device
            buffers[name] = DBuffer(
                group.mesh, group.placements.optimizer, group.layout, dtype, device
            )
        return buffers[name].get_dtensor(group.index_of(parameter))


def like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` itself, or a DTensor over it if the parameter is one, described as the parameter."""
    return dtensor_like(parameter, local) if isinstance(parameter, DTensor) else local


class TensorWrites:
    """Detects writes to tensors, such as parameters whose main weights are kept elsewhere.

    Version counters show what autograd sees, and addresses a `.data` that was assigned. A write
    into `.data`, by numpy or by a collective shows in neither.
    """

    def __init__(self) -> None:
        self._seen: dict[torch.Tensor, tuple[int, int, int]] = {}

    def __reduce__(self) -> tuple[type[TensorWrites], tuple[()]]:
        # Copies of the tensors have other counters and addresses.
        return TensorWrites, ()

    def see(self, tensor: torch.Tensor) -> None:
        """Marks all writes up to now as known."""
        self._seen[tensor] = _mark(tensor)

    def forget(self, tensor: torch.Tensor) -> None:
        """Makes `are_new` true until the next `see`."""
        self._seen.pop(tensor, None)

    def are_new(self, tensor: torch.Tensor) -> bool:
        """Whether there were writes since `see`, or there was no `see`."""
        return self._seen.get(tensor) != _mark(tensor)


def _mark(tensor: torch.Tensor) -> tuple[int, int, int]:
    local = local_tensor(tensor)
    return tensor._version, local._version, local.data_ptr()


def is_rounding(narrow: torch.Tensor, wide: torch.Tensor, step: float = 0.0) -> bool:
    """Whether one local tensor is another of a wider dtype, rounded.

    A parameter that was loaded separately from its main weight is: taking it over would lose the
    low bits of the main weight.

    Args:
        step: between the smallest numbers that `wide` can be, if these are fp16 numbers with a
            scale. `narrow` is then a rounding of what `wide` was before it became such a number.
    """
    narrow = narrow.to(wide.device)
    if not step:
        return narrow.dtype != wide.dtype and torch.equal(wide.to(narrow.dtype), narrow)

    # Rounding is monotonic: a value within an error of `wide` is within the error's roundings.
    error = wide.abs() * torch.finfo(torch.float16).eps + step
    lowest, highest = (wide - error).to(narrow.dtype), (wide + error).to(narrow.dtype)
    return bool(((lowest <= narrow) & (narrow <= highest)).all())


class Mismatch(NamedTuple):
    """Of a tensor from its parameter."""

    expected: str
    got: str


def difference(tensor: torch.Tensor, parameter: torch.Tensor) -> Mismatch | None:
    """The first respect in which a gradient or state is not distributed or shaped as its
    parameter; None if it is.
    """
    # Local shapes too: uneven DTensors of one description may hold different rows.
    if isinstance(parameter, DTensor) != isinstance(tensor, DTensor):
        return Mismatch(_kind(parameter), _kind(tensor))
    if tensor.shape != parameter.shape:
        return Mismatch(f"shape {tuple(parameter.shape)}", f"{tuple(tensor.shape)}")
    if isinstance(parameter, DTensor) and isinstance(tensor, DTensor):
        if tensor.device_mesh != parameter.device_mesh:
            return Mismatch(f"mesh {parameter.device_mesh}", f"{tensor.device_mesh}")
        if tensor.placements != parameter.placements:
            return Mismatch(f"placements {parameter.placements}", f"{tensor.placements}")
        own, local = local_tensor(parameter), local_tensor(tensor)
        if own.shape != local.shape:
            return Mismatch(f"a local shape of {tuple(own.shape)}", f"{tuple(local.shape)}")
    return None


def _kind(tensor: torch.Tensor) -> str:
    return "a DTensor" if isinstance(tensor, DTensor) else "a plain tensor"
