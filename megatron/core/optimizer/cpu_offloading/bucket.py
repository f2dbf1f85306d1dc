"""`Bucket`: flat arrays in host memory that move together between device and host.

    grad           gradients, copied down
    main_weight    weights that the host updates
    weight         new compute weights, copied up; may share the memory of `grad`

A bucket holds the parameters of one FSDP group (`FsdpBucket`), whose shards on the device are flat
too and move with one copy, or other tensors, plain ones or DTensors (`TensorBucket`), which move
one by one. A `Slot` is the place of a parameter in the arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from megatron.core.dtensors import local_tensor
from megatron.core.lane_timings import Recorder, StepRecorder
from megatron.core.lanes import Event, Lane, RelayedEvent
from megatron.core.optimizer.state_tensors import MASTER


class Slot(NamedTuple):
    """One parameter's place in a bucket: this rank's elements of it, which may be none."""

    parameter: nn.Parameter
    offset: int  # elements
    numel: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's part of one of the bucket's arrays."""
        return flat.narrow(0, self.offset, self.numel)


class Bucket(ABC):
    """Arrays of one bucket, which are set once host memory has been allocated.

    Attributes:
        name: for messages.
        slots: of the parameters that are stepped.
        numel: elements of each array, padding included.
        main_dtype, grad_dtype, weight_dtype: of the arrays.
        accepted_grad_dtypes: dtypes of gradients that are copied without loss.
        is_delivered: whether the device itself waits for weights that have been sent; otherwise
            the sender must.
        sent: the new weights have gone up, and the arrays of gradients and weights are free again;
            None before the first step.
        reads: events after which readers on other threads have read states and main weights. The
            next update waits for these.
    """

    is_delivered: ClassVar[bool]

    main_weight: torch.Tensor
    grad: torch.Tensor
    weight: torch.Tensor

    def __init__(
        self,
        name: str,
        slots: Sequence[Slot],
        numel: int,
        *,
        main_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        weight_dtype: torch.dtype,
        accepted_grad_dtypes: Sequence[torch.dtype],
    ) -> None:
        self.name = name
        self.slots = slots
        self.numel = numel
        self.main_dtype = main_dtype
        self.grad_dtype = grad_dtype
        self.weight_dtype = weight_dtype
        self.accepted_grad_dtypes = accepted_grad_dtypes
        self.sent: RelayedEvent | None = None
        self.reads: list[Event] = []

    def own_main_weight(self) -> torch.Tensor | None:
        """The main weights as a flat array, if they are in host memory already."""
        return None

    @abstractmethod
    def adopt(self, owner: object) -> None:
        """Moves the main weights into the bucket, unless they are there; `owner` updates them."""

    @abstractmethod
    def reload(self) -> None:
        """Takes over the parameters' values, whatever was written to them."""

    def check(self, owner: object) -> None:  # noqa: B027
        """RuntimeError if another optimizer updates the main weights."""

    def fetch_during_backward(self, lane: Lane, timings: Recorder) -> None:  # noqa: B027
        """Fetches gradients as soon as they are reduced from here on, if the group reports it."""

    def keep_main_weight(self, stepped: Sequence[Slot]) -> None:  # noqa: B027
        """Before an update: takes over writes of others to the parameters since the last one."""

    def main_weight_loaded(self, index: int) -> None:  # noqa: B027
        """A slot's main weight was loaded: it takes precedence over the parameter's value."""

    @abstractmethod
    def fetch(self, gradients: Sequence[tuple[Slot, torch.Tensor]]) -> None:
        """Copies the gradients of a step into `grad`, unless they are there already."""

    @abstractmethod
    def send(self, stepped: Sequence[Slot]) -> None:
        """Copies new compute weights to the device."""

    def deliver(self, timings: StepRecorder) -> None:  # noqa: B027
        """Makes the device wait for `sent` before it uses the weights."""

    @abstractmethod
    def as_state(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """A slot's part of an array in the shape of its parameter: a DTensor if that is one."""

    def queue_fetch(
        self, lane: Lane, work: Callable[[], object], after: Sequence[Event] = ()
    ) -> Event:
        """Queues work that writes to `grad`."""
        # New weights, which share its memory, may still be in flight.
        return lane.enqueue(work, after=after if self.sent is None else [*after, self.sent])

    def take_reads(self) -> list[Event]:
        """Hands over the events that the next update waits for."""
        # A new list: the one that is handed over must not grow while its events are awaited.
        reads, self.reads = self.reads, []
        return reads

    def master(self, index: int) -> dict[str, torch.Tensor]:
        """The main weight of a slot as a state; empty where the parameter is the main weight."""
        if self.slots[index].parameter.dtype == self.main_dtype:
            return {}
        return {MASTER: self.as_state(self.main_weight, index)}

    def forget_master(self, index: int) -> None:
        """The main weight of a slot becomes its parameter's value again."""
        if self.master(index):
            slot = self.slots[index]
            slot.of(self.main_weight).copy_(flat_local(slot.parameter))


def flat_local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements, in a row."""
    return local_tensor(tensor).detach().reshape(-1)


def fetch_each(grad: torch.Tensor, gradients: Sequence[tuple[Slot, torch.Tensor]]) -> None:
    """Copies gradients into a bucket's array one by one."""
    for slot, gradient in gradients:
        slot.of(grad).copy_(flat_local(gradient), non_blocking=True)
