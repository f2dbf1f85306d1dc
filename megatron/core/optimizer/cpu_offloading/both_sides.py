"""`BothSides`: which parameter of `HybridDeviceOptimizer` is on which side, and its states there.

Programs change the parameters in an optimizer's groups. accelerate, for one, builds the optimizer,
then shards the model and replaces the parameters by sharded ones. `adopt` follows such changes: it
plans parameters that are new, and plans everything anew if they replace others.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.dtensors import local_tensor
from megatron.core.host_memory import check_memory_on_all_ranks
from megatron.core.optimizer.cpu_offloading.bucket import Slot
from megatron.core.optimizer.cpu_offloading.device_side import DeviceSide
from megatron.core.optimizer.cpu_offloading.groups import (
    among,
    buckets_of,
    build_plan,
    check_on_device,
    device_of,
    groups_of,
    mesh_of,
)
from megatron.core.optimizer.cpu_offloading.host_layout import HostAllocator
from megatron.core.optimizer.cpu_offloading.host_side import HostSide
from megatron.core.optimizer.cpu_offloading.hybrid_settings import HybridSettings
from megatron.core.optimizer.cpu_offloading.plan import OffloadPlan
from megatron.core.optimizer.state_loading import check_like
from megatron.core.optimizer.state_tensors import Mismatch, difference
from megatron.core.timeline import AnyTimeline

# A parameter's id, dtype and device, on which its memory depends. Not a class, and not its shape,
# which takes a DTensor long: these are compared between a step's scalars and its first kernel.
_Kind = tuple[int, torch.dtype, torch.device]


class BothSides:
    """The device side and the host side of one optimizer. They have no parameters until `adopt`.

    Attributes:
        plan: the groups of parameters that are on either side.
        device: the device of all parameters.
        device_side, host_side: replaced when other parameters take the place of all earlier ones.
    """

    plan: OffloadPlan
    device_side: DeviceSide
    host_side: HostSide

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        settings: HybridSettings,
        fraction: float,
        first: Iterable[nn.Parameter],
    ) -> None:
        """`first`: parameters whose groups go to the host before any other.

        Raises:
            ValueError: for `first` of other parameters, and for parameters on several devices.
        """
        self._settings = settings
        self._fraction = fraction
        self._first = among(first, parameters)
        self._timeline: AnyTimeline | None = None
        self._make(parameters)

    def _make(self, parameters: Sequence[nn.Parameter]) -> None:
        self.device = device_of(parameters)
        self.plan = OffloadPlan(())
        self.device_side = DeviceSide.make(self._settings)
        self.host_side = HostSide(self.device, self._settings)
        if self._timeline is not None:
            self.record_to(self._timeline)
        self._placed: dict[torch.Tensor, _Kind] = {}  # of all parameters that a side has
        # The parameters in the groups, and how many each has, as they were adopted last. The sizes
        # are None after an error, so that the next call compares everything again.
        self._adopted: list[_Kind] = []
        self._sizes: list[int] | None = None
        self._release = weakref.finalize(self, self.host_side.release)
        # Not at exit: a lane may wait for a peer that has exited.
        self._release.atexit = False

    def record_to(self, timeline: AnyTimeline) -> None:
        """Records the lanes' work in a timeline. RuntimeError without `records_timings`."""
        self.host_side.shown_timings.record_to(timeline)
        self._timeline = timeline

    # Changes of the groups

    def adopt(self, optimizer: torch.optim.Optimizer, *, has_states: bool) -> bool:
        """Follows changes of the optimizer's groups and their parameters.

        Without a change, this takes one comparison per parameter.

        Args:
            optimizer: updates the parameters of both sides.
            has_states: whether states belong to the parameters of before.

        Returns:
            Whether anything had changed.

        Raises:
            RuntimeError: for parameters that were replaced although there are states.
        """
        groups = optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        kinds: list[_Kind] = [(id(p), p.dtype, p.device) for p in parameters]
        sizes = [len(group["params"]) for group in groups]
        if kinds == self._adopted and sizes == self._sizes:
            return False

        def unknown() -> list[nn.Parameter]:
            pairs = zip(parameters, kinds, strict=True)
            return [parameter for parameter, kind in pairs if self._placed.get(parameter) != kind]

        self._sizes = None
        num_gone = len(set(self._adopted).difference(kinds))
        if num_gone and unknown():
            if has_states:
                raise RuntimeError(
                    f"{num_gone} parameters of this optimizer were replaced, cast or moved after "
                    "it had states, which belong to the old ones. Build the optimizer, or shard "
                    "the model, before the first step; or build a new one and load this one's "
                    "state_dict() from before."
                )
            self._start_over(parameters)

        self.device_side.regroup(groups)
        self._place(unknown(), optimizer)
        self._placed.update(zip(parameters, kinds, strict=True))
        self._adopted, self._sizes = kinds, sizes
        return True

    def _start_over(self, parameters: Sequence[nn.Parameter]) -> None:
        """Frees both sides before other parameters replace the current ones."""
        device_of(parameters)  # raises before anything is freed
        # The successor of a parameter that goes first goes first, too.
        first = set(map(id, self._first))
        places = {index for index, (number, *_) in enumerate(self._adopted) if number in first}
        self._first = [
            parameter
            for index, parameter in enumerate(parameters)
            if id(parameter) in first or (parameter not in self._placed and index in places)
        ]
        # First, since the memory of the old ones may be needed for the new ones.
        self._release()
        self._make(parameters)

    def _place(self, added: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Plans parameters, allocates host memory and moves what belongs there."""
        if not added:
            return

        groups, own = groups_of(optimizer.param_groups), set(added)
        new = [group for group in groups if own.intersection(group.parameters)]
        for group in new:
            if not own.issuperset(group.parameters):
                raise RuntimeError(
                    f"{group.name} got parameters after others of it were on a side of this "
                    "optimizer. Add all parameters of an FSDP module together."
                )
        first = [parameter for parameter in self._first if parameter in own]
        plan = build_plan(new, self._fraction, first)
        on_host = [group for index, group in enumerate(new) if plan.is_on_host(index)]
        on_device = [group for index, group in enumerate(new) if not plan.is_on_host(index)]
        check_on_device(on_device)
        buckets = buckets_of(on_host, self._settings, options_of(optimizer.param_groups))
        early_nbytes = self._settings.early_update_bytes - self.host_side.early_nbytes
        allocator = HostAllocator(self.device, buckets, self._settings, early_nbytes)
        mesh = mesh_of(new)
        kept = self._settings.kept
        if kept is None or not kept.is_restored:  # memory that is there is not needed again
            check_memory_on_all_ranks(allocator.needs, self._settings.num_local_ranks, mesh)

        # The device side first: if it rejects parameters, the host's groups must not have moved.
        self.device_side.add(on_device, optimizer.param_groups)
        self.host_side.add(buckets, allocator, optimizer, mesh)
        self.plan = OffloadPlan(self.plan.groups + plan.groups) if self.plan.groups else plan

    # Gradients and states

    def check_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Checks that a gradient is like its parameter, and both as their side expects.

        Raises:
            ValueError: for another gradient.
            RuntimeError: for a parameter of another shape than it had.
        """
        found = difference(gradient, parameter)
        if found is None and (
            gradient.layout is not torch.strided or not gradient.is_floating_point()
        ):
            got = f"{gradient.layout}, {gradient.dtype}"
            found = Mismatch("a dense, floating-point tensor", got)
        if found is None and gradient.device != parameter.device:
            found = Mismatch(str(parameter.device), str(gradient.device))

        place = self.host_side.place_of(parameter)
        if found is None and place is not None:
            self._check_numel(place[0].bucket.slots[place[1]])
            # A gradient that travelled in a narrower dtype than it has would be another one.
            accepted = place[0].bucket.accepted_grad_dtypes
            if gradient.dtype not in accepted:
                found = Mismatch(" or ".join(map(str, accepted)), str(gradient.dtype))
        if found is not None:
            raise ValueError(
                f"Expected a gradient of {found.expected} for a parameter of shape "
                f"{tuple(parameter.shape)}, got {found.got}."
            )

    def _check_numel(self, slot: Slot) -> None:
        numel = local_tensor(slot.parameter).numel()
        if numel != slot.numel:
            raise RuntimeError(
                f"A parameter of {slot.numel} elements on this rank has {numel} after its .data "
                "was assigned. Build the optimizer after parameters have been resized."
            )

    def init_states(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Allocates the states that are not there yet, without stepping."""
        self.host_side.init_states(options_of(param_groups))
        self.device_side.init_states(param_groups)

    def states(self) -> dict[torch.Tensor, Any]:
        """The states of all parameters that a side has, by name; not copies."""
        # Empty states count too: PyTorch's state-dict helpers treat an optimizer without any state
        # as not initialised, and would take a step to create one.
        states: dict[torch.Tensor, Any] = {
            slot.parameter: executor.states(index)
            for executor in self.host_side.executors
            for index, slot in enumerate(executor.bucket.slots)
        }
        on_device = self.device_side.optimizer
        return states if on_device is None else {**states, **on_device.state}

    def load(self, saved: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Loads states once all are known to fit. Empty ones: the parameter was never stepped."""
        # A rule's optimizer checks its own as it loads them, first of all.
        on_device: dict[torch.Tensor, Mapping[str, Any]] = {}
        on_host = []
        for parameter, states in saved.items():
            place = self.host_side.place_of(parameter)
            if place is None:
                on_device[parameter] = states
                self.device_side.check_states(parameter, states)
            else:
                executor, index = place
                on_host.append((executor, index, states))
                check_like(executor.states(index), states)

        self.device_side.load(on_device)
        for executor, index, states in on_host:
            executor.load(index, states)


def options_of(param_groups: Sequence[dict[str, Any]]) -> dict[nn.Parameter, dict[str, Any]]:
    """Each parameter's group."""
    return {parameter: group for group in param_groups for parameter in group["params"]}
