"""The groups that the plan puts on one side or the other, and the buckets that the host's become.

A model is planned once, before it is sharded: main weights that begin in host memory, what that
memory must hold, and the optimizer all go by this plan. Sharding replaces parameters, so the
optimizer finds its groups anew and holds them against the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import zip_longest
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


THE_MODEL = "the model"  # the name of the module that has no other


class Unit(NamedTuple):
    """Parameters that are on one side together: one FSDP module's, whatever their dtypes, or a
    single tensor.
    """

    name: str
    parameters: list[nn.Parameter]

    @property
    def groups(self) -> list[FsdpParameterGroup]:
        """The FSDP groups of the parameters: one for each dtype; none of a single tensor."""
        found = [group_of(parameter) for parameter in self.parameters]
        return list(dict.fromkeys(group for group in found if group is not None))

    @property
    def global_numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)


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


def sharded_module(parameter: nn.Parameter) -> str | None:
    """The name of a parameter's FSDP module; None for any other tensor."""
    group = group_of(parameter)
    return None if group is None else group.name or THE_MODEL


def units_of(
    param_groups: Sequence[Mapping[str, Any]],
    module_of: Callable[[nn.Parameter], str | None] = sharded_module,
) -> list[Unit]:
    """What goes to one side as a whole, from parameter groups as optimizers have them.

    Args:
        module_of: the name of the FSDP module that a parameter belongs to, or will belong to; None
            if it stays by itself.

    Returns:
        The units in the order of the first parameter of each.
    """
    units: dict[Hashable, Unit] = {}
    for number, options in enumerate(param_groups):
        numbered = [f"group {number}, {n}" for n in range(len(options["params"]))]
        names = options.get("param_names") or numbered
        for name, parameter in zip(names, options["params"], strict=True):
            group = group_of(parameter)
            if group is not None and not group.requires_grad:
                continue  # it has no room for gradients, and never will

            module = module_of(parameter)
            key = id(parameter) if module is None else module
            units.setdefault(key, Unit(module or name, [])).parameters.append(parameter)
    return list(units.values())


def build_plan(units: Sequence[Unit], fraction: float) -> OffloadPlan:
    """The plan of these units; see `OffloadPlan.build`."""
    return OffloadPlan.build([(unit.name, unit.global_numel) for unit in units], fraction)


def check_plan(plan: OffloadPlan, units: Sequence[Unit]) -> None:
    """ValueError unless a plan is of these units."""
    planned = [(group.name, group.numel) for group in plan.groups]
    for expected, unit in zip_longest(planned, units):
        got = None if unit is None else (unit.name, unit.global_numel)
        if got != expected:
            raise ValueError(
                f"Expected the parameters that were planned, {expected} next, got {got}."
            )


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
