"""The memory of a rank's weights, gradients and optimizer states, on the device and on the host.

The bytes include padding and alignment. Memory that several tensors share is counted once, under
the first of the names below. Scalars, such as a parameter's step counter, are not counted. If the
CPU is the device, its memory is the device's; host memory is the memory of `HybridDeviceOptimizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup, group_of
from megatron.core.dtensors import local_tensor
from megatron.core.host_memory import format_bytes
from megatron.core.optimizer.planning_optimizer import PlanningOptimizer
from megatron.core.optimizer.state_tensors import MASTER

COMPUTE, MAIN, GRADIENTS = "compute weights", "main weights", "gradients"
SLOTS = "streamed states"  # buffers on the device for states that it updates
_FIRST = (COMPUTE, MAIN, GRADIENTS)
SHOWN = {COMPUTE: "new compute weights"}  # labels of the host's states


class StateBytes(NamedTuple):
    """The bytes of one state on this rank."""

    device: int
    host: int


def state_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, StateBytes]:
    """Returns the bytes of each state on this rank, between two steps.

    Gradients that the optimizer reads are always counted, although they are allocated only from the
    backward until they are cleared. Gathered weights and whole gradients are counted while they are
    allocated, and states once the optimizer has them.

    Args:
        model: plain, FSDP2's, or with FSDP groups; its parameters at rest.
        optimizer: any, over its parameters.

    Returns:
        Bytes by name, in the order of the table. The sum of the host's bytes is
        `HybridDeviceOptimizer.host_bytes` plus the states of PyTorch optimizers.
    """
    counter = _Counter(next((parameter.device.type for parameter in model.parameters()), "cpu"))
    ours = PlanningOptimizer.of(optimizer)

    # Reading `state` of an offloaded optimizer would wait for all updates.
    parameters = list(model.parameters())
    on_device = optimizer if ours is None else ours.device_optimizer
    states: Mapping[torch.Tensor, Mapping[str, Any]] = {} if on_device is None else on_device.state
    for name, nbytes in {} if ours is None else ours.host_bytes_by_state().items():
        counter.add_host(SHOWN.get(name, name), nbytes)
    counter.add_device(SLOTS, 0 if ours is None else ours.slots_nbytes)

    # Groups come first: their parameters are views of their buffers.
    for group in _groups_of(parameters):
        _count_group(counter, group, optimizer)
    for parameter in parameters:
        if group_of(parameter) is None:
            has_main = MASTER in states.get(parameter, {}) or (
                ours is not None and ours.holds(parameter)
            )
            # FSDP2's shards are cast and gathered before they compute.
            is_main = isinstance(parameter, DTensor) and not has_main
            counter.add(MAIN if is_main else COMPUTE, parameter)
            if parameter.grad is not None:
                counter.add(GRADIENTS, parameter.grad)
            elif parameter.requires_grad:
                counter.add_device(GRADIENTS, local_tensor(parameter).nbytes)

    for own in states.values():
        for name, value in own.items():
            if isinstance(value, torch.Tensor) and value.dim():
                counter.add(MAIN if name == MASTER else name, value)
    return counter.table()


def format_state_memory(table: Mapping[str, StateBytes]) -> str:
    """Returns a table with a line per state: name, device bytes, host bytes; and the sums."""
    total = StateBytes(
        sum(row.device for row in table.values()), sum(row.host for row in table.values())
    )
    rows = [("", "device", "host")]
    rows += [
        (name, _shown(row.device), _shown(row.host))
        for name, row in (*table.items(), ("in all", total))
    ]

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{name:{widths[0]}}  {device:>{widths[1]}}  {host:>{widths[2]}}"
        for name, device, host in rows
    ]
    return "\n".join(lines)


def in_order(device: Mapping[str, int], host: Mapping[str, int]) -> dict[str, StateBytes]:
    """Returns the rows of the table: weights and gradients first, then states by name. Rows without
    memory are left out.
    """
    ordered = [*_FIRST, *sorted((device.keys() | host.keys()).difference(_FIRST))]
    table = {name: StateBytes(device.get(name, 0), host.get(name, 0)) for name in ordered}
    return {name: row for name, row in table.items() if any(row)}


def _shown(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


class _Counter:
    """Sums memory by name and side. Each storage is counted once."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._seen: set[tuple[torch.device, int]] = set()
        self._device: dict[str, int] = {}
        self._host: dict[str, int] = {}

    def add(self, name: str, tensor: torch.Tensor, *, is_on_host: bool = False) -> None:
        """Adds the whole storage of a tensor."""
        local = local_tensor(tensor)
        storage = local.untyped_storage()
        key = (local.device, storage.data_ptr())
        if storage.nbytes() and key not in self._seen:
            self._seen.add(key)
            # With an accelerator, CPU tensors are on the host.
            is_on_host |= local.device.type == "cpu" and self._device_type != "cpu"
            (self.add_host if is_on_host else self.add_device)(name, storage.nbytes())

    def add_device(self, name: str, nbytes: int) -> None:
        self._device[name] = self._device.get(name, 0) + nbytes

    def add_host(self, name: str, nbytes: int) -> None:
        self._host[name] = self._host.get(name, 0) + nbytes

    def table(self) -> dict[str, StateBytes]:
        """Returns the bytes added so far, as `in_order`."""
        return in_order(self._device, self._host)


def _groups_of(parameters: Iterable[torch.Tensor]) -> list[FsdpParameterGroup]:
    groups = [group for parameter in parameters if (group := group_of(parameter)) is not None]
    return list({id(group): group for group in groups}.values())


def _count_group(
    counter: _Counter, group: FsdpParameterGroup, optimizer: torch.optim.Optimizer
) -> None:
    for weight in (group.model_weight, group.post_optimizer_model_weight, group.unsharded_weight):
        counter.add(COMPUTE, weight.local_buffer)
    for tensor in group.codes.shown_tensors if group.codes is not None else ():
        counter.add(COMPUTE, tensor)
    # The offloaded optimizer has already counted the main weights that it updates.
    if not group.delivery.is_claimed_by(optimizer):
        counter.add(MAIN, group.main_weight.local_buffer, is_on_host=group.is_on_host)
    if group.main_grad is None:
        counter.add_device(GRADIENTS, group.plan.grad_nbytes)
    if group.gradients is not None:
        for gradient in (group.gradients.main, group.gradients.unsharded, group.gradients.partial):
            if gradient is not None:
                counter.add(GRADIENTS, gradient.local_buffer)
