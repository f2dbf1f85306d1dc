"""What the plan keeps together, and the buckets that it becomes on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron.core.device import Device
from megatron.core.distributed.fsdp.gradients import local_tensor
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup, group_of
from megatron.core.optimizer.cpu_offloading.device_link import DeviceLink, GroupLink, TensorLink
from megatron.core.optimizer.kernels.adam import FLOAT_DTYPES

_BUCKET_NUMEL = 4 << 20  # elements of a bucket of single tensors: enough that a pass costs more than starting it


class Unit(NamedTuple):
    """The parameters of one FSDP group, or a single tensor."""

    name: str
    parameters: list[nn.Parameter]
    group: FsdpParameterGroup | None

    @property
    def global_numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)


def device_of(parameters: Sequence[nn.Parameter]) -> Device:
    devices = {parameter.device for parameter in parameters}
    if len(devices) != 1:
        raise ValueError(f"Expected parameters on one device, got some on {sorted(map(str, devices)) or 'none'}.")
    device = devices.pop()
    if device.type == "meta":
        raise ValueError("Expected parameters that have memory, got some on meta.")
    return Device(device.type, device.index or 0)


def units_of(groups: Sequence[Mapping[str, Any]]) -> list[Unit]:
    """In the order of the first parameter of each."""
    units: dict[int, Unit] = {}
    for number, options in enumerate(groups):
        names = options.get("param_names") or [f"group {number}, {n}" for n in range(len(options["params"]))]
        for name, parameter in zip(names, options["params"], strict=True):
            group = group_of(parameter)
            if group is not None and not group.requires_grad:
                continue  # it has no room for gradients, and never will
            key, title = (id(parameter), name) if group is None else (id(group), group.name or "the model")
            units.setdefault(key, Unit(title, [], group)).parameters.append(parameter)
    return list(units.values())


def links_of(units: Sequence[Unit], in_fp32: bool) -> list[DeviceLink]:
    """One for each FSDP group; other tensors of one dtype that follow each other share links of some millions."""
    links: list[DeviceLink] = []
    run: list[Unit] = []

    def end_run() -> None:
        if run:
            parameters = [parameter for unit in run for parameter in unit.parameters]
            dtype = parameters[0].dtype
            main_dtype = torch.float32 if in_fp32 and dtype.itemsize < 4 else dtype
            links.append(TensorLink(parameters, [unit.name for unit in run], main_dtype))
            run.clear()

    for unit in units:
        size = sum(local_tensor(parameter).numel() for other in run for parameter in other.parameters)
        if run and (unit.group or unit.parameters[0].dtype != run[0].parameters[0].dtype or size >= _BUCKET_NUMEL):
            end_run()
        if unit.group is None:
            run.append(unit)
        else:
            links.append(GroupLink(unit.group, unit.parameters))
    end_run()
    return links


def check_sides(on_device: Sequence[Unit]) -> None:
    for unit in on_device:
        if unit.group is not None and unit.group.is_on_host:
            raise ValueError(
                f"Expected the main weights of {unit.name} on the device, where the plan has them, got them in host "
                "memory: shard with the OffloadPolicy that goes with the fraction."
            )


def check_dtypes(links: Sequence[DeviceLink]) -> None:
    for link in links:
        for dtype in (link.main_dtype, link.grad_dtype, link.weight_dtype):
            if dtype not in FLOAT_DTYPES:
                raise ValueError(f"Expected AdamW over {FLOAT_DTYPES} on the host, got {dtype} for {link.name}.")


def mesh_of(units: Sequence[Unit]) -> DeviceMesh | None:
    tensors = [parameter for unit in units for parameter in unit.parameters if isinstance(parameter, DTensor)]
    return tensors[0].device_mesh if tensors else None
