"""The groups that the plan assigns to a side, and the buckets of the host side.

The plan follows from the groups' global sizes and the fraction, so it is the same before a model is
sharded, when main weights are put into host memory and that memory is counted, and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron.core.device import Device
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup, group_of
from megatron.core.dtensors import local_tensor
from megatron.core.dtypes import FLOAT_DTYPES
from megatron.core.optimizer.cpu_offloading.bucket import (
    Bucket,
    FsdpBucket,
    StatePlaces,
    TensorBucket,
)
from megatron.core.optimizer.cpu_offloading.hybrid_settings import HybridSettings
from megatron.core.optimizer.cpu_offloading.plan import OffloadPlan

# Elements of a bucket of single tensors: enough that a pass costs more than starting it.
_BUCKET_NUMEL = 4 << 20


class OffloadGroup(NamedTuple):
    """Parameters that are on one side together: one FSDP module's, whatever their dtypes, or a
    single tensor.
    """

    name: str
    parameters: list[nn.Parameter]

    @property
    def fsdp_groups(self) -> list[FsdpParameterGroup]:
        """The FSDP groups of the parameters, one for each dtype; empty for a single tensor."""
        found = [group_of(parameter) for parameter in self.parameters]
        return list(dict.fromkeys(group for group in found if group is not None))

    @property
    def global_numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)


def device_of(parameters: Sequence[nn.Parameter]) -> Device:
    """The device of all parameters. ValueError unless they are on one, and not on meta."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) != 1:
        raise ValueError(
            f"Expected parameters on one device, got some on {sorted(map(str, devices)) or 'none'}."
        )
    device = devices.pop()
    if device.type == "meta":
        raise ValueError("Expected parameters that have memory, got some on meta.")
    return Device(device.type, device.index or 0)


def groups_of(
    param_groups: Sequence[Mapping[str, Any]],
    module_of: Callable[[nn.Parameter], str | None] = lambda _: None,
) -> list[OffloadGroup]:
    """Groups the parameters that are on one side together.

    Args:
        param_groups: the parameter groups of an optimizer.
        module_of: returns the name of the FSDP module that will shard a parameter, or None if none
            will. Not called for sharded parameters.

    Returns:
        The groups in the order of the first parameter of each.
    """
    groups: dict[Hashable, OffloadGroup] = {}
    for number, options in enumerate(param_groups):
        numbered = [f"group {number}, {n}" for n in range(len(options["params"]))]
        names = options.get("param_names") or numbered
        for name, parameter in zip(names, options["params"], strict=True):
            fsdp_group = group_of(parameter)
            if fsdp_group is None:
                module = module_of(parameter)
                key: Hashable = id(parameter) if module is None else module
            elif fsdp_group.requires_grad:
                # Not by name: without a sharded module around them, modules have the same one.
                module, key = fsdp_group.display_name, fsdp_group.unit
            else:
                continue  # it has no room for gradients, and never will

            group = groups.setdefault(key, OffloadGroup(module or name, []))
            group.parameters.append(parameter)
    return list(groups.values())


def build_plan(
    groups: Sequence[OffloadGroup], fraction: float, first: Iterable[nn.Parameter] = ()
) -> OffloadPlan:
    """The plan of these groups; see `OffloadPlan.build`.

    Args:
        first: parameters whose groups go first; parameters in no group, such as frozen ones, are
            ignored.
    """
    named = [(group.name, group.global_numel) for group in groups]
    own = {id(parameter) for parameter in first}
    indexes = [
        index
        for index, group in enumerate(groups)
        if any(id(parameter) in own for parameter in group.parameters)
    ]
    return OffloadPlan.build(named, fraction, indexes)


def among(first: Iterable[nn.Parameter], own: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that go first. ValueError unless all are an optimizer's own."""
    known, wanted = {id(parameter) for parameter in own}, list(first)
    for parameter in wanted:
        if id(parameter) not in known:
            raise ValueError(
                "Expected offload_first among this optimizer's parameters, got another one, of "
                f"shape {tuple(parameter.shape)}. Sharding replaces parameters: name them after it."
            )
    return wanted


def check_on_device(groups: Iterable[OffloadGroup]) -> None:
    """ValueError for main weights in host memory, which the device's optimizer could not update."""
    for group in groups:
        if any(fsdp_group.is_on_host for fsdp_group in group.fsdp_groups):
            raise ValueError(
                f"Expected the main weights of {group.name} on the device, where the plan has "
                "them, got them in host memory: shard with the OffloadPolicy that goes with the "
                "fraction."
            )


def buckets_of(
    groups: Sequence[OffloadGroup],
    settings: HybridSettings,
    options: Mapping[nn.Parameter, Mapping[str, Any]],
) -> list[Bucket]:
    """One for each FSDP group; other tensors of one dtype that follow each other share some.

    Args:
        options: each parameter's group.

    Raises:
        ValueError: for dtypes that a rule does not take, if the host carries out one.
    """
    buckets: list[Bucket] = []
    run: list[OffloadGroup] = []  # single tensors of one dtype

    def end_run() -> None:
        if run:
            parameters = [parameter for group in run for parameter in group.parameters]
            dtype = parameters[0].dtype
            main_dtype = torch.float32 if settings.in_fp32 and dtype.itemsize < 4 else dtype
            names = [group.name for group in run]
            buckets.append(TensorBucket(parameters, names, main_dtype, settings.use_decoupled_grad))
            run.clear()

    # FSDP groups end a run: buckets stay in the order of forward.
    for group in groups:
        size = sum(local_tensor(p).numel() for other in run for p in other.parameters)
        is_other = bool(run) and group.parameters[0].dtype != run[0].parameters[0].dtype
        if group.fsdp_groups or is_other or size >= _BUCKET_NUMEL:
            end_run()
        if not group.fsdp_groups:
            run.append(group)
        for fsdp_group in group.fsdp_groups:
            own = [p for p in group.parameters if group_of(p) is fsdp_group]
            buckets.append(FsdpBucket(fsdp_group, own))
    end_run()

    rule = settings.host.rule
    if rule is None:
        return buckets
    for bucket in buckets:
        if len(rule.parts) > 1:
            numels = [slot.numel for slot in bucket.slots]
            rules = [rule.part_for(options[slot.parameter]) for slot in bucket.slots]
            bucket.state_places = StatePlaces.of(numels, rules)
        if bucket.is_quantized and rule.takes_matrices:
            raise ValueError(
                f"Expected a rule without matrices for {bucket.name}, whose weights are kept as "
                f"codes and updated on the host, got {settings.host.name}."
            )
        dtypes = [bucket.main_dtype, bucket.grad_dtype]
        dtypes += [] if bucket.is_quantized else [bucket.weight_dtype]
        for dtype in dtypes:
            if dtype not in FLOAT_DTYPES:
                raise ValueError(
                    f"Expected parameters of {FLOAT_DTYPES} on the host, got {dtype} for "
                    f"{bucket.name}."
                )
    return buckets


def mesh_of(groups: Sequence[OffloadGroup]) -> DeviceMesh | None:
    """The mesh of the first parameter that has one."""
    parameters = [parameter for group in groups for parameter in group.parameters]
    return next((p.device_mesh for p in parameters if isinstance(p, DTensor)), None)
