"""`FsdpParameterGroup`: the buffers behind the parameters of one module that have one dtype and one
requires_grad.

All of them have one layout; what differs is the dtype and the placements:

    main_weight                   optimizer   what the optimizer updates, on the device or in host memory; the sharded
                                              parameters are views of it
    model_weight                  parameter   compute weights between uses
    post_optimizer_model_weight   optimizer   the part of model_weight that the own main weights become; a view of it
    unsharded_weight              Replicate   compute weights in use; the full parameters are views of it
    gradients                                 see `GroupGradients`

Weight buffers that would hold the same are one; `unsharded_weight` has memory only while the
weights are in use.

A parameter is two: `full` takes part in forward and backward, `sharded` rests in the module and
goes to the optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from megatron.core.device import Device
from megatron.core.distributed.fsdp.collective_lane import CollectiveLane
from megatron.core.distributed.fsdp.collectives import NOTE_LENGTH
from megatron.core.distributed.fsdp.dbuffer import DBuffer, apart, dtensor_like
from megatron.core.distributed.fsdp.delivery import Delivery
from megatron.core.distributed.fsdp.gradients import GradientDtypes, GroupGradients
from megatron.core.distributed.fsdp.layout import GlobalLayout
from megatron.core.distributed.fsdp.placement import Placements
from megatron.core.distributed.fsdp.policy import MixedPrecisionPolicy, OffloadPolicy
from megatron.core.distributed.fsdp.uneven_dtensor import UnevenDTensor
from megatron.core.dtensors import local_tensor
from megatron.core.host_memory import HostSlab
from megatron.core.lanes import Event

# The attribute of a sharded parameter that leads to its group, weakly; read it with `group_of`.
_GROUP = "_fsdp_group"

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_GATHER, _REDUCE = 1, 2  # what a note says is about to happen
_MASK_BITS = 62  # parameters that one integer of a note tells of


@dataclass(frozen=True, eq=False)
class FsdpParameter:
    """One physical parameter, under all the names it has.

    Attributes:
        fqns: its names, from the module that was sharded.
        owners: the modules that have it, weakly, each with the name it has there.
        full: over the unsharded compute weights; without memory at rest.
        sharded: a DTensor over this rank's main weights.
    """

    fqns: tuple[str, ...]
    owners: tuple[tuple[weakref.ref[nn.Module], str], ...]
    full: nn.Parameter
    sharded: nn.Parameter

    def show(self, parameter: nn.Parameter) -> None:
        """Makes one of the two what the owning modules have."""
        for owner, name in self.owners:
            module = owner()
            if module is not None:
                module._parameters[name] = parameter

    def is_shown(self) -> bool:
        """Whether the owning modules have one of the two, and nothing that somebody has put in
        their place.
        """
        modules = [(owner(), name) for owner, name in self.owners]
        own = (id(self.full), id(self.sharded))
        return all(
            module is None or id(module._parameters.get(name)) in own for module, name in modules
        )


@dataclass(frozen=True, eq=False)
class OwnedParameter:
    """A parameter as `fully_shard` finds it."""

    fqns: tuple[str, ...]
    owners: tuple[tuple[nn.Module, str], ...]
    original: nn.Parameter


def group_of(parameter: torch.Tensor) -> FsdpParameterGroup | None:
    """The group of a sharded parameter; None for any other tensor."""
    reference = getattr(parameter, _GROUP, None)
    return None if reference is None else reference()


class FsdpParameterGroup:
    """See the module's docstring.

    What is put on a lane goes on after the call; the events are kept here, and `wait_unsharded` or
    the event that `reduce` answers say when a buffer may be touched again.

    Attributes:
        number: of the group in its context; the same on every rank.
        name: of the module, for messages; known once the context is complete.
        dtype: of the compute weights.
        requires_grad: whether there are gradients.
        delivery: the updates of an optimizer that copies the compute weights to the device itself.
        layout: of all buffers.
        fsdp_parameters: in the order of the layout's tensors.
    """

    main_weight: DBuffer
    model_weight: DBuffer
    post_optimizer_model_weight: DBuffer
    unsharded_weight: DBuffer

    def __init__(
        self,
        owned: Sequence[OwnedParameter],
        mesh: DeviceMesh,
        placements: Placements,
        policy: MixedPrecisionPolicy,
        grad_divisor: float,
        device: Device,
        number: int,
        offload: OffloadPolicy | None = None,
    ) -> None:
        first = owned[0].original
        self.number = number
        self.name = ""
        self.policy = policy.resolve(first.dtype)
        self.dtype = _known(self.policy.compute_dtype)
        self.requires_grad = first.requires_grad
        self.mesh = mesh
        self.placements = placements
        self.layout = GlobalLayout.build(
            [parameter.original.shape for parameter in owned], mesh.size()
        )
        self._device = device
        self._is_on_host = (
            self.requires_grad and offload is not None and offload.main_weights_on_host
        )
        self._make_weights()
        self.gradients = self._make_gradients(grad_divisor) if self.requires_grad else None
        self.fsdp_parameters = [
            self._make_parameter(index, parameter) for index, parameter in enumerate(owned)
        ]
        self._offsets = [self.main_weight.chunk(index).offset for index in range(len(owned))]
        if self.is_gathered:
            # Once there are views: of released storage none can be made.
            self.unsharded_weight.release_storage()
        self.delivery = Delivery()
        self._is_unsharded = False
        self._weights_ready: Event | None = None
        # After which the full parameters' memory may be written to.
        self._reserved: Event | None = None
        self._is_updated = True
        self._seen_versions = 0
        self._send_down: Callable[[Event], Event] | None = None
        self._main_grad_read: Event | None = None

    @property
    def main_grad(self) -> DBuffer | None:
        """What the optimizer reads; None in a frozen group."""
        return None if self.gradients is None else self.gradients.main

    # Weights

    @property
    def is_gathered(self) -> bool:
        """Whether compute weights in use are another buffer than compute weights at rest."""
        return self.unsharded_weight is not self.model_weight

    @property
    def is_unsharded(self) -> bool:
        """Whether the full parameters have their values, or will have after `wait_unsharded`."""
        return self._is_unsharded

    def mark_updated(self) -> None:
        """Says that the main weights have changed; the compute weights follow before they are used
        again.
        """
        self._is_updated = True

    # Main weights on the other side

    @property
    def is_on_host(self) -> bool:
        """Whether the main weights are in host memory, apart from any compute weights."""
        return self._is_on_host

    def put_main_weight(self, buffer: DBuffer) -> None:
        """Moves the main weights into another buffer of the same kind, in host memory, and keeps no
        other.

        The sharded parameters stay the objects that they are, over the new memory; their `device`
        stays the compute weights', as their gradients'.
        """
        expected = (self.placements.optimizer, self.layout, self.main_weight.dtype)
        got = (buffer.placements, buffer.layout, buffer.dtype)
        if expected != got:
            raise ValueError(f"Expected a buffer of {expected}, got {got}.")
        for index, parameter in enumerate(self.fsdp_parameters):
            self._check_is_view(index, parameter)
        self.wait_main_weight()
        buffer.local_buffer.copy_(self.main_weight.local_buffer)
        self.main_weight = buffer
        self._is_on_host = True
        for index, parameter in enumerate(self.fsdp_parameters):
            parameter.sharded._local_tensor = buffer.get_local_tensor(index)  # type: ignore[attr-defined]
        self._is_updated = True

    def wait_main_weight(self) -> None:
        """Blocks this thread until no update of the main weights is under way."""
        self.delivery.synchronize()

    def send_main_grad(self, send_down: Callable[[Event], Event] | None) -> None:
        """Has the reduced gradients of every last microbatch sent somewhere, as soon as they are
        there.

        Args:
            send_down: is given the event after which main_grad may be read, and answers the one
                after which it has been; called in the middle of the backward.
        """
        self._send_down = send_down

    def is_replicated(self, axis: int) -> bool:
        """Whether the ranks of a mesh axis hold the same main weights."""
        return not isinstance(self.placements.optimizer[axis], Shard) and self.mesh.size(axis) > 1

    def checksum(self) -> torch.Tensor:
        """A number that tells this rank's main weights from others, most likely. Scalar, int64."""
        self.wait_main_weight()
        integers = self.main_weight.local_buffer.view(_INTEGERS[self.main_weight.dtype.itemsize])
        return integers.sum(dtype=torch.int64).to(self._device.torch_device)

    def reserve(self) -> None:
        """Takes the full parameters' memory for an `unshard` to come, which then waits for nothing
        issued after this.

        What is issued in between must use neither the full parameters, of course, nor the main
        weights; if it writes to these, `unshard` waits for it all the same.
        """
        if not self._is_unsharded:
            if self.is_gathered:
                self.unsharded_weight.reallocate_storage()
            self._reserved = self._device.event()

    def unshard(self, lane: CollectiveLane) -> None:
        """Begins to bring the full parameters up to date, unless they are. Raises what an earlier
        `wait_unsharded` raised.
        """
        self.delivery.check()
        versions = self._versions()
        is_overwritten = self._is_updated or versions != self._seen_versions
        has_changed = is_overwritten or self.delivery.is_announced
        if self._is_unsharded and not has_changed:
            return

        if self.is_gathered:
            self.unsharded_weight.reallocate_storage()
        self._enqueue_gather(lane, is_overwritten, has_changed)
        if has_changed:
            # What autograd has saved of these weights is not what they will be.
            torch.autograd.graph.increment_version(
                [parameter.full for parameter in self.fsdp_parameters]
            )

        self._is_updated, self._seen_versions = False, versions
        self._is_unsharded, self._reserved = True, None

    def wait_unsharded(self) -> None:
        """Orders what this thread does next after the work of `unshard`."""
        if self._weights_ready is not None:
            gathered, self._weights_ready = self._weights_ready, None
            self.delivery.wait(gathered)

    def reshard(self) -> None:
        """Frees the full parameters' memory, if it is not also the compute weights'; a reservation
        ends.
        """
        if self._is_unsharded or self._reserved is not None:
            self.wait_unsharded()
            self._is_unsharded, self._reserved = False, None
            if self.is_gathered:
                self.unsharded_weight.release_storage()

    def index_of(self, sharded: torch.Tensor) -> int:
        """The place of one of the group's sharded parameters among them, which is that of its
        tensor in the layout.
        """
        return next(
            index
            for index, parameter in enumerate(self.fsdp_parameters)
            if parameter.sharded is sharded
        )

    def show_full(self) -> None:
        """Modules have the full parameters, which require a gradient where the sharded ones do.

        RuntimeError if a sharded parameter is no longer what it was: nothing would keep the two in
        step.
        """
        for index, parameter in enumerate(self.fsdp_parameters):
            self._check_is_view(index, parameter)
            if parameter.full.requires_grad != parameter.sharded.requires_grad:
                self._follow_requires_grad(parameter)
            parameter.show(parameter.full)

    def show_sharded(self) -> None:
        """Modules have the sharded parameters."""
        for parameter in self.fsdp_parameters:
            parameter.show(parameter.sharded)

    def reduce(self, lane: CollectiveLane, is_last: bool) -> Event:
        """Begins to reduce the gradients that were collected; see `GroupGradients.reduce`."""
        assert self.gradients is not None, "called for groups that have gradients"
        if self._main_grad_read is not None:
            event, self._main_grad_read = self._main_grad_read, None
            event.wait()
        work, notes = self.gradients.reduce(
            [parameter.sharded for parameter in self.fsdp_parameters], is_last
        )
        reduced = lane.enqueue(work, [self._device.event()], notes)
        if is_last and self._send_down is not None:
            self._main_grad_read = self._send_down(reduced)
        return reduced

    @property
    def reduction_takes_memory(self) -> bool:
        """Whether `reduce` would take memory now; see `GroupGradients.takes_memory_to_reduce`."""
        assert self.gradients is not None, "called for groups that have gradients"
        return self.gradients.takes_memory_to_reduce(
            [parameter.sharded for parameter in self.fsdp_parameters]
        )

    def release_gradients(self) -> None:
        """Frees what `reduce` has read. Call it after the event that it answered."""
        assert self.gradients is not None, "called for groups that have gradients"
        self.gradients.release([parameter.sharded for parameter in self.fsdp_parameters])

    def forget_gradients(self) -> None:
        """Drops what was collected and not reduced, after a backward that has failed."""
        for parameter in self.fsdp_parameters:
            parameter.full.grad = None
        if self.gradients is not None:
            self.gradients.forget()
            self.release_gradients()

    def describe(self, note: Sequence[int]) -> str:
        """What a rank with a note about this group is about to do."""
        module = self.name or "the model"
        if note[0] == _GATHER:
            return f"gather {module}"
        without = [
            name for index, name in enumerate(self.names) if not _is_in_mask(note[2:], index)
        ]
        return f"reduce the gradients of {module}" + (
            f", which has none for {', '.join(without)}" if without else ""
        )

    @property
    def names(self) -> list[str]:
        """The parameters' first names, with the module's."""
        prefix = f"{self.name}." if self.name else ""
        return [prefix + parameter.fqns[0] for parameter in self.fsdp_parameters]

    # Building

    def _make_weights(self) -> None:
        main_dtype = self.policy.main_params_dtype if self.requires_grad else self.dtype
        self.model_weight = self._buffer(self.placements.parameter, self.dtype)
        self.post_optimizer_model_weight = self.model_weight
        if self.placements.optimizer != self.placements.parameter:
            self.post_optimizer_model_weight = self.model_weight.view(self.placements.optimizer)
        self.main_weight = self.post_optimizer_model_weight
        if self._is_on_host:
            self.main_weight = self._host_buffer(self.placements.optimizer, _known(main_dtype))
        elif main_dtype != self.dtype:
            self.main_weight = self._buffer(self.placements.optimizer, main_dtype)
        elif self.main_weight is not self.model_weight:
            # Gathering the rest of the model weights is no change of the main weights.
            part = apart(self.main_weight.local_buffer)
            self.main_weight = DBuffer.from_local(
                part, self.mesh, self.placements.optimizer, self.layout
            )
            self.post_optimizer_model_weight = self.main_weight
        self.unsharded_weight = self.model_weight
        if self.model_weight.range.numel < self.layout.size:
            self.unsharded_weight = self._buffer([Replicate()] * self.mesh.ndim, self.dtype)

    def _make_gradients(self, divisor: float) -> GroupGradients:
        main, comm = _known(self.policy.main_grads_dtype), _known(self.policy.grad_comm_dtype)
        return GroupGradients(
            self.mesh,
            self.placements,
            self.layout,
            GradientDtypes(compute=self.dtype, main=main, comm=comm),
            divisor,
            self._device.torch_device,
            partial(_reduction_note, self.number),
        )

    def _buffer(self, placements: Sequence[Placement], dtype: torch.dtype | None) -> DBuffer:
        return DBuffer(self.mesh, placements, self.layout, _known(dtype), self._device.torch_device)

    def _host_buffer(self, placements: Sequence[Placement], dtype: torch.dtype) -> DBuffer:
        numel = DBuffer(self.mesh, placements, self.layout, dtype, "meta").range.numel
        # What never travels need not be pinned.
        slab = HostSlab(
            numel * dtype.itemsize, self._device, is_pinned=False, purpose="main weights"
        )
        return DBuffer.from_local(slab.tensor(0, numel, dtype), self.mesh, placements, self.layout)

    def _make_parameter(self, index: int, owned: OwnedParameter) -> FsdpParameter:
        # What gathers write must not count as a change of what autograd has saved.
        full = nn.Parameter(
            apart(self.unsharded_weight.get_local_tensor(index)), requires_grad=self.requires_grad
        )
        sharded = self._make_sharded(index)
        for parameter in (full, sharded):
            vars(parameter).update(vars(owned.original))
        setattr(sharded, _GROUP, weakref.ref(self))
        if self.main_grad is not None and self.main_grad.dtype != self.main_weight.dtype:
            sharded.grad_dtype = None  # any: it is fully_shard_optimizer that casts
        owners = tuple((weakref.ref(module), name) for module, name in owned.owners)
        return FsdpParameter(owned.fqns, owners, full, sharded)

    def _make_sharded(self, index: int) -> nn.Parameter:
        dtensor = self.main_weight.get_dtensor(index)
        local = dtensor._local_tensor

        # It must say that it is where its gradient is, or could not be given one.
        placeholder = local.new_empty((0, *local.shape[1:]), device=self._device.torch_device)
        sharded = nn.Parameter(dtensor_like(dtensor, placeholder), requires_grad=self.requires_grad)
        sharded._local_tensor = local  # type: ignore[attr-defined]
        if isinstance(dtensor, UnevenDTensor):
            sharded.precede_uses_by(self.wait_main_weight)  # type: ignore[attr-defined]
        return sharded

    def _check_is_view(self, index: int, parameter: FsdpParameter) -> None:
        sharded = parameter.sharded
        local, buffer = local_tensor(sharded), self.main_weight.local_buffer
        place = buffer.data_ptr() + self._offsets[index] * buffer.element_size()
        is_other = group_of(sharded) is not self or (
            local.numel() > 0 and local.data_ptr() != place
        )
        if is_other or not parameter.is_shown():
            raise RuntimeError(
                f"Expected {self.names[index]} to be the view of its buffer that fully_shard made, "
                "got another tensor; "
                "convert and replace parameters before."
            )

    def _follow_requires_grad(self, parameter: FsdpParameter) -> None:
        if parameter.sharded.requires_grad and not self.requires_grad:
            raise RuntimeError(
                f"Expected {parameter.fqns[0]} of {self.name or 'the model'} to stay frozen, as it "
                "was when it was "
                "sharded and got no gradient buffer, got requires_grad=True."
            )
        parameter.full.requires_grad_(parameter.sharded.requires_grad)

    # On lanes

    @property
    def _gather_note(self) -> list[int]:
        return [_GATHER, self.number]

    def _enqueue_gather(
        self, lane: CollectiveLane, is_overwritten: bool, has_changed: bool
    ) -> None:
        """Queues whatever work the compute weights need, which may be none."""
        is_stale = is_overwritten and self.main_weight is not self.post_optimizer_model_weight
        is_scattered = has_changed and self.post_optimizer_model_weight is not self.model_weight
        awaited = self.delivery.events
        if not (self.is_gathered or is_stale or is_scattered or awaited):
            return

        # A reservation lets the gather run beside kernels that were issued after it, unless these
        # may have written to the main weights.
        ready = self._reserved
        if ready is None or is_overwritten:
            ready = self._device.event()
        notes = [self._gather_note] if self.is_gathered or is_scattered else []
        self._weights_ready = lane.enqueue(
            lambda: self._gather(is_stale, is_scattered), [ready, *awaited], notes
        )
        self.delivery.gather_queued()

    def _gather(self, is_stale: bool, is_scattered: bool) -> None:
        note = self._gather_note
        if is_stale:
            self.post_optimizer_model_weight.local_buffer.copy_(self.main_weight.local_buffer)
        if is_scattered:
            self.post_optimizer_model_weight.redistribute(
                self.placements.parameter, out=self.model_weight, note=note
            )
        if self.is_gathered:
            self.model_weight.redistribute(
                self.unsharded_weight.placements, out=self.unsharded_weight, note=note
            )

    def _versions(self) -> int:
        """Counts writes to the main weights that autograd sees: through the parameters, or through
        the buffer.
        """
        versions = self.main_weight.local_buffer._version
        for parameter in self.fsdp_parameters:
            versions += parameter.sharded._version + local_tensor(parameter.sharded)._version
        return versions


def _known(dtype: torch.dtype | None) -> torch.dtype:
    assert dtype is not None, "the policy is resolved"
    return dtype


def _reduction_note(number: int, received: Collection[int]) -> list[int]:
    """Which group is about to be reduced, and which of its parameters have a gradient.

    Parameters beyond those that a note has room for share bits with earlier ones: a difference is
    still noticed, unless two cancel out, but the parameter is not named.
    """
    words = [0] * (NOTE_LENGTH - 2)
    for index in received:
        word, bit = divmod(index % (_MASK_BITS * len(words)), _MASK_BITS)
        words[word] ^= 1 << bit
    return [_REDUCE, number, *words]


def _is_in_mask(words: Sequence[int], index: int) -> bool:
    word, bit = divmod(index % (_MASK_BITS * len(words)), _MASK_BITS)
    return bool(words[word] >> bit & 1)
