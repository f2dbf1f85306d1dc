"""What connects a bucket in host memory with the device: where its gradients come from and its
weights go.

A bucket's parameters are either one FSDP group's, whose shards on the device are flat too and move
with one copy, or any tensors, plain ones or DTensors of others, which move one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.aliases import apart
from megatron.core.distributed.fsdp.dbuffer import DBuffer
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.kernels.adam import FLOAT_DTYPES
from megatron.core.optimizer.state_tensors import like

_SLOT_ALIGNMENT = 64  # elements


class Slot(NamedTuple):
    """One parameter's place in a bucket: this rank's elements of it, which may be none."""

    parameter: nn.Parameter
    offset: int  # elements
    numel: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's part of one of the bucket's arrays."""
        return flat.narrow(0, self.offset, self.numel)


class DeviceLink(Protocol):
    """See the module's docstring.

    Attributes:
        name: for messages and the plan.
        slots: of the parameters that are stepped.
        numel: elements of the bucket's arrays, padding included.
        global_numel: elements of the parameters, over all ranks.
        main_dtype, grad_dtype, weight_dtype: of the main weights in the bucket, and of gradients
            and compute weights as they travel.
        accepted_grad_dtypes: of gradients that lose nothing on their way.
        delivers: whether the device itself waits for weights that have been sent; else whoever
            sends has to.
    """

    name: str
    numel: int
    global_numel: int
    main_dtype: torch.dtype
    grad_dtype: torch.dtype
    weight_dtype: torch.dtype
    accepted_grad_dtypes: Sequence[torch.dtype]

    @property
    def slots(self) -> Sequence[Slot]: ...

    @property
    def delivers(self) -> bool: ...

    def own_main_weight(self) -> torch.Tensor | None:
        """The main weights as a flat array, if they are in host memory already."""

    def adopt(self, main_weight: torch.Tensor, owner: object) -> None:
        """Moves the main weights into an array of the bucket's, unless they are there; `owner`
        updates them now.
        """

    def check(self, owner: object) -> None:
        """RuntimeError if somebody else updates them."""

    def keep_main_weight(self, main_weight: torch.Tensor, stepped: Sequence[Slot]) -> None:
        """Before an update: takes over what others have written to the parameters since the last
        one.
        """

    def fetch_early(self, grad: torch.Tensor, seen_versions: int | None = None) -> None:
        """Copies gradients to the bucket's array as soon as they are there.

        Args:
            seen_versions: what `main_versions` was when the copy was asked for, if writes after
                that are not in it.
        """

    def fetch(self, grad: torch.Tensor, gradients: Sequence[tuple[Slot, torch.Tensor]]) -> None:
        """Copies the gradients of a step to the bucket's array, unless it has these already."""

    def send(self, weight: torch.Tensor, stepped: Sequence[Slot]) -> None:
        """Copies new compute weights to the device."""

    def as_state(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """A slot's part of an array in the shape of its parameter: a DTensor if that is one."""


class GroupLink:
    """The link of one FSDP group's parameters."""

    delivers = True

    def __init__(self, group: FsdpParameterGroup, stepped: Iterable[nn.Parameter]) -> None:
        main_grad = group.main_grad
        assert main_grad is not None, "parameters that are stepped require gradients"
        self.group = group
        self.name = group.name or "the model"
        self._indices = sorted(group.index_of(parameter) for parameter in stepped)
        self.slots = [self._slot(index) for index in self._indices]
        self.numel = group.main_weight.range.numel
        self.global_numel = sum(slot.parameter.numel() for slot in self.slots)
        self.main_dtype = group.main_weight.dtype
        self.grad_dtype = main_grad.dtype
        self.accepted_grad_dtypes: Sequence[torch.dtype] = (self.grad_dtype,)
        self.weight_dtype = group.dtype
        self._main_grad = main_grad
        self._fetched: int | None = None  # main_versions of the gradients in the bucket

    def own_main_weight(self) -> torch.Tensor | None:
        # For autograd, updating the bucket's array is no change of the parameters: whoever updates
        # it delivers.
        return apart(self.group.main_weight.local_buffer) if self.group.is_on_host else None

    def adopt(self, main_weight: torch.Tensor, owner: object) -> None:
        if not self.group.is_on_host:
            self.group.put_main_weight(self._as_buffer(apart(main_weight)))
        self.group.delivery.claim(owner)

    def check(self, owner: object) -> None:
        if not self.group.delivery.is_claimed_by(owner):
            raise RuntimeError(
                f"Expected to be the one optimizer of {self.name}, got another one, made later, "
                "that updates its main "
                "weights."
            )

    def keep_main_weight(self, main_weight: torch.Tensor, stepped: Sequence[Slot]) -> None:
        """The parameters are the main weights themselves."""

    def main_versions(self) -> int:
        """Counts the writes to the group's gradients."""
        assert self.group.gradients is not None, "checked when this was made"
        return self.group.gradients.main_versions()

    def fetch_early(self, grad: torch.Tensor, seen_versions: int | None = None) -> None:
        # Before the copy: what is written while it runs must count as written after it.
        self._fetched = self.main_versions() if seen_versions is None else seen_versions
        grad.copy_(self._main_grad.local_buffer, non_blocking=True)

    def fetch(self, grad: torch.Tensor, gradients: Sequence[tuple[Slot, torch.Tensor]]) -> None:
        assert self.group.gradients is not None, "checked when this was made"
        indices = {
            id(slot.parameter): index for slot, index in zip(self.slots, self._indices, strict=True)
        }
        others = [
            (slot, gradient)
            for slot, gradient in gradients
            if not self.group.gradients.is_main(indices[id(slot.parameter)], gradient)
        ]
        if len(others) < len(gradients) and self._fetched != self.main_versions():
            grad.copy_(self._main_grad.local_buffer, non_blocking=True)
        self._fetched = None
        _fetch_each(grad, others)

    def send(self, weight: torch.Tensor, stepped: Sequence[Slot]) -> None:
        target = self.group.post_optimizer_model_weight.local_buffer
        for offset, numel in _ranges(stepped):
            target.narrow(0, offset, numel).copy_(
                weight.narrow(0, offset, numel), non_blocking=True
            )

    def as_state(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        return self._as_buffer(flat).get_dtensor(self._indices[index])

    def _as_buffer(self, flat: torch.Tensor) -> DBuffer:
        return DBuffer.from_local(
            flat, self.group.mesh, self.group.placements.optimizer, self.group.layout
        )

    def _slot(self, index: int) -> Slot:
        parameter = self.group.fsdp_parameters[index].sharded
        return Slot(
            parameter, self.group.main_weight.chunk(index).offset, local_tensor(parameter).numel()
        )


class TensorLink:
    """The link of parameters that are tensors of their own, of one dtype."""

    delivers = False

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        main_dtype: torch.dtype,
        use_decoupled_grad: bool = False,
    ) -> None:
        """`use_decoupled_grad`: gradients may have other dtypes than parameters; they go in
        fp32.
        """
        self.name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        self.slots = []
        self.numel = 0
        for parameter in parameters:
            numel = local_tensor(parameter).numel()
            self.slots.append(Slot(parameter, self.numel, numel))
            # Every parameter begins on a cache line.
            self.numel += math.ceil(numel / _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        self.global_numel = sum(parameter.numel() for parameter in parameters)
        self.main_dtype = main_dtype
        self.weight_dtype = parameters[0].dtype
        self.grad_dtype = torch.float32 if use_decoupled_grad else self.weight_dtype
        accepted = FLOAT_DTYPES if use_decoupled_grad else (self.grad_dtype,)
        self.accepted_grad_dtypes: Sequence[torch.dtype] = accepted
        self._versions: dict[int, int] = {}  # by the parameter's id

    def own_main_weight(self) -> torch.Tensor | None:
        return None

    def adopt(self, main_weight: torch.Tensor, owner: object) -> None:
        del owner  # nobody else knows these arrays
        self.reload(main_weight)

    def reload(self, main_weight: torch.Tensor) -> None:
        """Takes over the parameters' values, whatever they were."""
        for slot in self.slots:
            self._versions[id(slot.parameter)] = _version(slot.parameter)
            slot.of(main_weight).copy_(_flat(slot.parameter))

    def check(self, owner: object) -> None:
        """They are the bucket's own."""

    def keep_main_weight(self, main_weight: torch.Tensor, stepped: Sequence[Slot]) -> None:
        for slot in stepped:
            version = _version(slot.parameter)
            if self._versions[id(slot.parameter)] != version:
                self._versions[id(slot.parameter)] = version
                own, given = slot.of(main_weight), _flat(slot.parameter)
                # What has only been loaded beside its main weight is that, rounded, and says less
                # than it.
                if own.dtype == given.dtype or not torch.equal(
                    own.to(given.dtype), given.to(own.device)
                ):
                    own.copy_(given)

    def fetch_early(self, grad: torch.Tensor, seen_versions: int | None = None) -> None:
        """Nothing tells when these gradients are there."""

    def fetch(self, grad: torch.Tensor, gradients: Sequence[tuple[Slot, torch.Tensor]]) -> None:
        _fetch_each(grad, gradients)

    def send(self, weight: torch.Tensor, stepped: Sequence[Slot]) -> None:
        for slot in stepped:
            target = local_tensor(slot.parameter).detach()
            target.copy_(slot.of(weight).view(target.shape), non_blocking=True)
            self._versions[id(slot.parameter)] = _version(slot.parameter)

    def as_state(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        slot = self.slots[index]
        return like(slot.parameter, slot.of(flat).view(local_tensor(slot.parameter).shape))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor).detach().reshape(-1)


def _fetch_each(grad: torch.Tensor, gradients: Sequence[tuple[Slot, torch.Tensor]]) -> None:
    for slot, gradient in gradients:
        slot.of(grad).copy_(_flat(gradient), non_blocking=True)


def _version(parameter: torch.Tensor) -> int:
    """Counts the writes to a parameter that autograd sees."""
    version: int = parameter._version
    return version + local_tensor(parameter)._version if isinstance(parameter, DTensor) else version


def _ranges(slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """(offset, numel) of what the slots cover, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for slot in sorted(slots, key=lambda slot: slot.offset):
        if ranges and sum(ranges[-1]) == slot.offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + slot.numel)
        elif slot.numel:
            ranges.append((slot.offset, slot.numel))
    return ranges
