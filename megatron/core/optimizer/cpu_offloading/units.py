"""What the plan keeps together, on which side, and the buckets that it becomes on the host.

`place` is the one computation of who goes where. It is asked before a model is sharded, for the
main weights that begin in host memory and for what that memory must hold, and again by the
optimizer: the caller says which parameters belong together, everything else is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron.core.device import Device
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup, group_of
from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.cpu_offloading.device_link import DeviceLink, GroupLink, TensorLink
from megatron.core.optimizer.cpu_offloading.plan import OffloadPlan
from megatron.core.optimizer.kernels.adam import FLOAT_DTYPES

_BUCKET_NUMEL = (
    4 << 20
)  # elements of a bucket of single tensors: enough that a pass costs more than starting it


class Owner(NamedTuple):
    """What parameters belong to. `key` tells owners apart; `name` is for messages and the plan."""

    key: Hashable
    name: str


class Unit(NamedTuple):
    """The parameters of one owner: of one FSDP module, in all of its groups, or a single tensor."""

    owner: Owner
    parameters: list[nn.Parameter]

    @property
    def name(self) -> str:
        return self.owner.name

    @property
    def groups(self) -> list[FsdpParameterGroup]:
        """The FSDP groups of the parameters: one for each dtype; none of a single tensor."""
        found = [group_of(parameter) for parameter in self.parameters]
        return list(dict.fromkeys(group for group in found if group is not None))

    @property
    def global_numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)


class Placed(NamedTuple):
    """The units on each side, in the order of forward."""

    plan: OffloadPlan
    on_device: list[Unit]
    on_host: list[Unit]


def device_of(parameters: Sequence[nn.Parameter]) -> Device:
    devices = {parameter.device for parameter in parameters}
    if len(devices) != 1:
        raise ValueError(
            f"Expected parameters on one device, got some on {sorted(map(str, devices)) or 'none'}."
        )
    device = devices.pop()
    if device.type == "meta":
        raise ValueError("Expected parameters that have memory, got some on meta.")
    return Device(device.type, device.index or 0)


def place(
    param_groups: Sequence[Mapping[str, Any]],
    fraction: float,
    owner_of: Callable[[nn.Parameter, str], Owner],
) -> Placed:
    """Plans which units go to the host, from parameter groups as optimizers have them.

    Args:
        fraction: see `OffloadPlan.build`.
        owner_of: what a parameter, with its name in its group, belongs to. Units are in the order
            of the first parameter of each.
    """
    units: dict[Hashable, Unit] = {}
    for number, options in enumerate(param_groups):
        numbered = [f"group {number}, {n}" for n in range(len(options["params"]))]
        names = options.get("param_names") or numbered
        for name, parameter in zip(names, options["params"], strict=True):
            group = group_of(parameter)
            if group is not None and not group.requires_grad:
                continue  # it has no room for gradients, and never will
            owner = owner_of(parameter, name)
            units.setdefault(owner.key, Unit(owner, [])).parameters.append(parameter)

    plan = OffloadPlan.build([(unit.name, unit.global_numel) for unit in units.values()], fraction)
    sides: dict[bool, list[Unit]] = {False: [], True: []}
    for index, unit in enumerate(units.values()):
        sides[plan.is_on_host(index)].append(unit)
    return Placed(plan, on_device=sides[False], on_host=sides[True])


def sharded_owner(parameter: nn.Parameter, name: str) -> Owner:
    """The FSDP module of a parameter, or the parameter itself.

    A module, not a group: the weights of a module begin on one side, whatever their dtypes.
    """
    group = group_of(parameter)
    if group is None:
        return Owner(id(parameter), name)
    return Owner(group.name, group.name or "the model")


def links_of(units: Sequence[Unit], in_fp32: bool, use_decoupled_grad: bool) -> list[DeviceLink]:
    """One for each FSDP group; other tensors of one dtype that follow each other share some."""
    links: list[DeviceLink] = []
    run: list[Unit] = []

    def end_run() -> None:
        if run:
            parameters = [parameter for unit in run for parameter in unit.parameters]
            dtype = parameters[0].dtype
            main_dtype = torch.float32 if in_fp32 and dtype.itemsize < 4 else dtype
            names = [unit.name for unit in run]
            links.append(TensorLink(parameters, names, main_dtype, use_decoupled_grad))
            run.clear()

    for unit in units:
        size = sum(
            local_tensor(parameter).numel() for other in run for parameter in other.parameters
        )
        is_other = bool(run) and unit.parameters[0].dtype != run[0].parameters[0].dtype
        if unit.groups or is_other or size >= _BUCKET_NUMEL:
            end_run()
        if not unit.groups:
            run.append(unit)
        for group in unit.groups:
            links.append(GroupLink(group, [p for p in unit.parameters if group_of(p) is group]))
    end_run()
    return links


def check_sides(on_device: Sequence[Unit]) -> None:
    for unit in on_device:
        if any(group.is_on_host for group in unit.groups):
            raise ValueError(
                f"Expected the main weights of {unit.name} on the device, where the plan has them, "
                "got them in host "
                "memory: shard with the OffloadPolicy that goes with the fraction."
            )


def check_dtypes(links: Sequence[DeviceLink]) -> None:
    for link in links:
        for dtype in (link.main_dtype, link.grad_dtype, link.weight_dtype):
            if dtype not in FLOAT_DTYPES:
                raise ValueError(
                    f"Expected AdamW over {FLOAT_DTYPES} on the host, got {dtype} for {link.name}."
                )


def mesh_of(units: Sequence[Unit]) -> DeviceMesh | None:
    tensors = [
        parameter
        for unit in units
        for parameter in unit.parameters
        if isinstance(parameter, DTensor)
    ]
    return tensors[0].device_mesh if tensors else None
