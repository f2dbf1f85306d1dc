"""The memory of a rank's weights, gradients and optimizer states, on the device and on the host.

Memory is counted, not elements: padding and what aligns an array count with it, and what two
tensors share counts once, under the first of the names below. Single numbers, such as a parameter's
count of steps, are left out. The memory of the CPU as a device counts as the device's; host memory
is what `HybridDeviceOptimizer` holds.
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
SLOTS = "states on their way through"  # the device, which updates them
_FIRST = (COMPUTE, MAIN, GRADIENTS)
SHOWN = {COMPUTE: "weights on their way up"}  # labels of the host's states


class StateBytes(NamedTuple):
    """The bytes of one state on this rank."""

    device: int
    host: int


def state_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, StateBytes]:
    """The bytes of each state on this rank, between two steps.

    Gradients that the optimizer reads count from the start, though they have memory only from the
    backward until they are cleared. Weights and gradients that have memory only while a group is in
    use count if it is. States count once the optimizer has them.

    Args:
        model: plain, FSDP2's, or with FSDP groups; its parameters at rest.
        optimizer: any, over its parameters.

    Returns:
        By name, in the order of a table. The host's numbers add up to
        `HybridDeviceOptimizer.host_bytes`, and the states of optimizers that carry out no rule.
    """
    counter = _Counter(next((parameter.device.type for parameter in model.parameters()), "cpu"))
    ours = PlanningOptimizer.of(optimizer)

    # Reading an offloaded optimizer's `state` would gather and wait for all of it.
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
    """Aligned lines: a state, its bytes on the device, and in host memory; and the sums."""
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
    """Bytes by name on each side as a table's rows: weights and gradients first, the rest by name.
    States without memory have no row.
    """
    ordered = [*_FIRST, *sorted((device.keys() | host.keys()).difference(_FIRST))]
    table = {name: StateBytes(device.get(name, 0), host.get(name, 0)) for name in ordered}
    return {name: row for name, row in table.items() if any(row)}


def _shown(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


class _Counter:
    """Adds up memory by name and side, every storage once."""

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
        """All bytes added so far; see `in_order`."""
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
    # An offloaded optimizer has counted the main weights that it updates.
    if not group.delivery.is_claimed_by(optimizer):
        counter.add(MAIN, group.main_weight.local_buffer, is_on_host=group.is_on_host)
    if group.main_grad is None:
        counter.add_device(GRADIENTS, group.plan.grad_nbytes)
    if group.gradients is not None:
        for gradient in (group.gradients.main, group.gradients.unsharded, group.gradients.partial):
            if gradient is not None:
                counter.add(GRADIENTS, gradient.local_buffer)
