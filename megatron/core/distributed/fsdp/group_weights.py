"""The parts of a parameter group's weights.

    FsdpParameter   one parameter, whole while its module computes, sharded at rest
    WeightBuffers   the flat buffers behind the parameters of a group
    MemoryPhase     the state of the memory of the full weights
    Delivery        updates by an optimizer in host memory

`FsdpParameterGroup` combines them.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from megatron.core.device import Device
from megatron.core.distributed.fsdp.aliases import apart, dtensor_like
from megatron.core.distributed.fsdp.dbuffer import DBuffer
from megatron.core.distributed.fsdp.group_plan import GroupPlan
from megatron.core.distributed.fsdp.replica import ReplicaDTensor
from megatron.core.distributed.fsdp.uneven_dtensor import UnevenDTensor
from megatron.core.host_memory import HostSlab
from megatron.core.lanes import Event

# Left on a parameter that `fully_shard` has replaced and whose memory it has freed: the group that
# has it now, weakly, and its index there.
REPLACED = "_fsdp_replaced"

# Left on the whole side of a parameter, which no optimizer may have.
WHOLE = "_fsdp_whole"


@dataclass(frozen=True, eq=False)
class FsdpParameter:
    """One physical parameter, under all the names it has.

    Attributes:
        fqns: its names, from the module that was sharded.
        owners: the modules that have it, weakly, each with the name it has there.
        full: over the unsharded compute weights; without memory at rest. For weights kept as
            codes see group_codes.py.
        sharded: a DTensor over this rank's main weights.
    """

    fqns: tuple[str, ...]
    owners: tuple[tuple[weakref.ref[nn.Module], str], ...]
    full: nn.Parameter
    sharded: nn.Parameter

    def show(self, parameter: nn.Parameter) -> None:
        """Puts `full` or `sharded` into the owning modules."""
        for owner, name in self.owners:
            module = owner()
            if module is not None:
                module._parameters[name] = parameter

    def is_shown(self) -> bool:
        """Whether the owning modules still have `full` or `sharded`, and no replacement."""
        modules = [(owner(), name) for owner, name in self.owners]
        own = (id(self.full), id(self.sharded))
        return all(
            module is None or id(module._parameters.get(name)) in own for module, name in modules
        )


def sharded_parameter(
    dtensor: DTensor, device: torch.device, requires_grad: bool, before_use: Callable[[], None]
) -> nn.Parameter:
    """Makes a parameter over a DTensor of the main weights.

    Args:
        device: of its gradients.
        before_use: a method, called before each use of a parameter that is cut. Its object is held
            weakly.
    """
    local = dtensor._local_tensor

    # Main weights in host memory have gradients on the device, and torch accepts gradients only on
    # the device that a parameter reports. So it reports the gradients' device.
    if isinstance(dtensor, UnevenDTensor):
        placeholder = local.new_empty((0, *local.shape[1:]), device=device)
        data = dtensor_like(dtensor, placeholder)
    else:
        data = ReplicaDTensor.over(dtensor, device)

    sharded = nn.Parameter(data, requires_grad=requires_grad)
    sharded._local_tensor = local  # type: ignore[attr-defined]
    if isinstance(dtensor, UnevenDTensor):
        sharded.precede_uses_by(before_use)  # type: ignore[attr-defined]
    return sharded


@dataclass(frozen=True, eq=False)
class OwnedParameter:
    """A parameter as `fully_shard` finds it."""

    fqns: tuple[str, ...]
    owners: tuple[tuple[nn.Module, str], ...]
    original: nn.Parameter


class WeightBuffers(NamedTuple):
    """The buffers of a parameter group's weights.

        buffer                placements   contents
        main                  optimizer    updated by the optimizer, on the device or in host memory
        model                 parameter    compute weights between uses
        post_optimizer_model  optimizer    the part of `model` that this rank's main weights become,
                                           a view of it
        unsharded             in_use       compute weights in use: all rows, or, where axes are
                                           kept, this rank's block of them

    Buffers that would hold the same are one.
    """

    main: DBuffer
    model: DBuffer
    post_optimizer_model: DBuffer
    unsharded: DBuffer

    @classmethod
    def make(cls, plan: GroupPlan, mesh: DeviceMesh, device: Device) -> WeightBuffers:
        """Allocates them, uninitialised."""
        placements, layout = plan.placements, plan.layout

        def allocate(where: Sequence[Placement]) -> DBuffer:
            return DBuffer(mesh, where, plan.weight_layout, plan.weight_dtype, device.torch_device)

        model = post_optimizer_model = allocate(placements.parameter)
        if placements.optimizer != placements.parameter:
            post_optimizer_model = model.view(placements.optimizer)

        main = post_optimizer_model
        if plan.is_on_host:
            main = _host_buffer(plan, mesh, device)
        elif plan.has_own_main:
            main = DBuffer(mesh, placements.optimizer, layout, plan.main_dtype, device.torch_device)
        elif main is not model:
            # Gathering the rest of the model weights is no change of the main weights.
            part = apart(main.local_buffer)
            main = DBuffer.from_local(part, mesh, placements.optimizer, layout)
            post_optimizer_model = main

        unsharded = allocate(placements.in_use) if plan.is_gathered else model
        return cls(main, model, post_optimizer_model, unsharded)


def _host_buffer(plan: GroupPlan, mesh: DeviceMesh, device: Device) -> DBuffer:
    is_pinned, kept = plan.offload.pin_memory, plan.offload.kept
    slab = HostSlab(
        plan.main_nbytes, device, is_pinned=is_pinned, purpose="main weights", kept=kept
    )
    flat = slab.tensor(0, plan.optimizer_numel, plan.main_dtype)
    return DBuffer.from_local(flat, mesh, plan.placements.optimizer, plan.layout)


class MemoryPhase(enum.Enum):
    """The state of the memory of a group's full weights.

        phase      the memory of the full weights     next
        SHARDED    is free                            RESERVED by `reserve`, GATHERING by `unshard`
        RESERVED   is taken, and has no values        GATHERING by `unshard`, SHARDED by `reshard`
        GATHERING  is being written to on a lane      WHOLE or FAILED by `wait_unsharded`, GATHERING
                                                      by `unshard` after a write to main weights
        WHOLE      has the values                     SHARDED by `reshard`, GATHERING by `unshard`
                                                      after a write to main weights
        FAILED     has no values, after an error      SHARDED by `recover`

    Where weights at rest are whole already, they rest in this memory, which is never free.
    """

    SHARDED = "sharded"
    RESERVED = "reserved"
    GATHERING = "gathering"
    WHOLE = "whole"
    FAILED = "failed"

    @property
    def is_unsharded(self) -> bool:
        """Whether the full weights have their values, or will have after `wait_unsharded`."""
        return self is MemoryPhase.GATHERING or self is MemoryPhase.WHOLE

    def to(self, other: MemoryPhase) -> MemoryPhase:
        """Returns `other`. RuntimeError unless it is a next phase of this one."""
        if other not in _NEXT_PHASES[self]:
            raise RuntimeError(
                f"Full weights that are {self.value} cannot become {other.value}; next is one of "
                f"{[phase.value for phase in _NEXT_PHASES[self]]}."
            )
        return other


_NEXT_PHASES: dict[MemoryPhase, tuple[MemoryPhase, ...]] = {
    MemoryPhase.SHARDED: (MemoryPhase.RESERVED, MemoryPhase.GATHERING),
    MemoryPhase.RESERVED: (MemoryPhase.GATHERING, MemoryPhase.SHARDED),
    MemoryPhase.GATHERING: (MemoryPhase.WHOLE, MemoryPhase.FAILED, MemoryPhase.GATHERING),
    MemoryPhase.WHOLE: (MemoryPhase.SHARDED, MemoryPhase.GATHERING),
    MemoryPhase.FAILED: (MemoryPhase.SHARDED,),
}


class Delivery:
    """How the compute weights of a group get the updates of an optimizer that works elsewhere.

    Usually a group copies its main weights to the compute weights itself, before their next use. An
    optimizer that updates main weights in host memory copies them to the device too, on
    separate lanes. It claims its parameters' delivery and announces each update with an event; the
    next gather comes after that event. Several optimizers may have claimed some of the parameters
    each.

    Attributes:
        status: see `Status`.
    """

    class Status(enum.Enum):
        """Where the last announced update is.

            status      the compute weights                    next
            IDLE        no announced update is missing         ANNOUNCED
            ANNOUNCED   an update is missing, and no gather    AWAITED, or ANNOUNCED by a newer one
                        has been queued after it
            AWAITED     a gather has been queued after the     IDLE or FAILED by `wait`, or
                        update                                 ANNOUNCED by a newer one
            FAILED      may have a part of an update only      none

        A group whose delivery has failed cannot recover.
        """

        IDLE = "idle"
        ANNOUNCED = "announced"
        AWAITED = "awaited"
        FAILED = "failed"

    def __init__(self) -> None:
        self.status = Delivery.Status.IDLE
        self._owners: dict[int, weakref.ref[object]] = {}  # by index of the parameter
        # By the first index of the updated parameters: the event after their last announced update,
        # until that is done, and what to call before its weights are used.
        self._updates: dict[int, Event] = {}
        self._before_use: dict[int, Callable[[], None]] = {}
        self._settle: dict[int, weakref.WeakMethod[Callable[[], None]]] = {}

    def claim(self, owner: object, indices: Iterable[int]) -> None:
        """Makes `owner` the only one that updates some parameters' main weights and delivers their
        compute weights.

        The group does not copy them after the owner's steps. The reference to it is weak.
        """
        self.synchronize()
        for index in indices:
            self._owners[index] = weakref.ref(owner)

    def settle_by(self, settle: Callable[[], None], first: int = 0) -> None:
        """Has a method called before main weights are read or written: it undoes updates that are
        not announced yet. Its object is held weakly.

        Args:
            first: see `announce`.
        """
        self._settle[first] = weakref.WeakMethod(settle)

    def settle(self) -> None:
        """Undoes updates of main weights that are not announced yet."""
        for reference in self._settle.values():
            method = reference()
            if method is not None:
                method()

    def is_claimed_by(self, owner: object, indices: Iterable[int] | None = None) -> bool:
        """Whether `owner` was the last to claim all of these parameters; default: any of the
        group's.
        """
        own = {index for index, claimed in self._owners.items() if claimed() is owner}
        return bool(own) if indices is None else own.issuperset(indices)

    def announce(
        self, updated: Event, before_use: Callable[[], None] | None = None, first: int = 0
    ) -> None:
        """Announces an update of main weights and of this rank's part of
        post_optimizer_model_weight.

        Args:
            updated: both are up to date after this event.
            before_use: called by the thread that uses the weights, just before it waits for them,
                unless another update of the same parameters was announced before. It may wait for
                the event itself, to see how long that takes.
            first: index of the first updated parameter: an update takes the place of the last one
                with the same first parameter.
        """
        self._updates[first] = updated
        self._before_use.pop(first, None)
        if before_use is not None:
            self._before_use[first] = before_use
        if self.status is not Delivery.Status.FAILED:
            self.status = Delivery.Status.ANNOUNCED

    @property
    def is_announced(self) -> bool:
        """Whether the next gather must come after an update."""
        return self.status is Delivery.Status.ANNOUNCED

    @property
    def events(self) -> list[Event]:
        """The events that the next gather must come after."""
        return list(self._updates.values()) if self.is_announced else []

    def gather_queued(self) -> None:
        """Records that a gather has been queued after `events`."""
        if self.is_announced:
            self.status = Delivery.Status.AWAITED

    def wait(self, gathered: Event) -> None:
        """Waits for the compute weights. Raises the error of the gather, or of the update before
        it.
        """
        if self.status is not Delivery.Status.AWAITED:
            gathered.wait()
            return

        self.status = Delivery.Status.IDLE
        before_uses, self._before_use = list(self._before_use.values()), {}
        try:
            for before_use in before_uses:
                before_use()
            gathered.wait()
        except Exception:
            # Perhaps the gather's own error, but an update that failed cannot be repeated.
            self.status = Delivery.Status.FAILED
            raise

    def synchronize(self) -> None:
        """Blocks this thread until the last announced updates are done, and undoes others. Raises
        their error.
        """
        self.settle()
        for updated in self._updates.values():
            updated.synchronize()
        # Only now, since after a failure the next call must fail too; and not while a gather has
        # yet to be queued after them.
        if not self.is_announced:
            self._updates.clear()
