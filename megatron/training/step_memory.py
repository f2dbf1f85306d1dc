"""The memory of a rank at the peak of a training step, at any offload fraction, and the smallest
fraction that fits: `--optimizer-offload-fraction auto`. `plan` shows the same figures.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.activation_offload import moving_layers
from megatron.core.device import Device
from megatron.core.distributed.config import ALL_GATHER
from megatron.core.distributed.units import sharding_units, units_of
from megatron.core.dtypes import DTYPES
from megatron.core.host_memory import format_bytes
from megatron.core.layer_execution import recipe_of
from megatron.core.mesh import all_reduce_over
from megatron.core.models.gpt.activations import ActivationBytes, Microbatch, activation_bytes
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import AUTO
from megatron.core.optimizer.cpu_offloading.plan import OffloadPlan
from megatron.core.optimizer.distrib_optimizer import plan_offload
from megatron.core.optimizer.planned_memory import PlannedMemory, StateSettings, plan_memory
from megatron.core.optimizer.state_memory import (
    COMPUTE,
    GRADIENTS,
    MAIN,
    SHOWN,
    SLOTS,
    StateBytes,
)
from megatron.core.options import ConfigError, expect
from megatron.training.config import EngineConfig

logger = logging.getLogger(__name__)

NEEDING_LESS = (
    "More ranks, shorter or fewer sequences a microbatch, --recompute-granularity full or "
    "--activation-offload need less."
)
_FLAG = "--optimizer-offload-fraction"

# The rows of a plan.
WHOLE_LAYERS, ACTIVATIONS, LOSS = "whole layers in use", "activations", "logits and loss"
MATRICES = "matrices of Muon"
ROUNDED = "new weights before they are codes"
IN_BACKWARD = "gradients in backward"
STATES = "optimizer states"  # of all names
_WEIGHTS = (COMPUTE, MAIN, GRADIENTS, SHOWN[COMPUTE])


class InUse(NamedTuple):
    """Bytes of whole weights and gradients, in addition to the states at rest.

    Attributes:
        root_weights: weights of the module that contains the layers: embedding and head, which are
            whole during the step.
        in_backward: these, their gradients, and weights and gradients of two layers: one is
            gathered or reduced while the other computes.
        sums: sums over earlier microbatches whose reduction is deferred, a part of `in_backward`.
        earlier_gradients: the part of the gradients at rest that earlier microbatches have left.
        layer_gradients: gradients at rest of the largest layer that the last microbatch reduces.
    """

    root_weights: int
    in_backward: int
    sums: int
    earlier_gradients: int
    layer_gradients: int


class Moment(NamedTuple):
    """Bytes on the device, without weights and states, at a moment that may be a step's peak."""

    gradients: int
    whole_layers: int
    activations: int
    loss: int
    matrices: int
    rounded: int


class RunMemory(NamedTuple):
    """The memory of one rank at an offload fraction.

    Attributes:
        states: weights, gradients and the optimizer's states at rest.
        activations: the activations of one microbatch.
        activations_on_host: bytes of activations in host memory (--activation-offload).
        activations_room: bytes of host memory for them.
        in_use: whole weights and gradients of modules.
    """

    states: PlannedMemory
    activations: ActivationBytes
    activations_on_host: int
    activations_room: int
    in_use: InUse

    @property
    def _gradients_nbytes(self) -> int:
        return self.states.at_rest.get(GRADIENTS, StateBytes(0, 0)).device

    @property
    def peak(self) -> Moment:
        """The step's peak: in the loss, in the backward of the last layer or of the first, or in
        the optimizer's step. Gradients come as activations go.
        """
        matrices = self.states.matrices
        rounded = self.states.rounded_nbytes
        in_step = Moment(self._gradients_nbytes, 0, 0, 0, matrices.in_step, rounded)
        loss, *others = self._moments
        # Updates of the last step continue in the forward.
        return max(loss._replace(matrices=matrices.in_forward), *others, in_step, key=sum)

    @property
    def _moments(self) -> list[Moment]:
        """The moments that may be the peak, without matrices."""
        use, activations = self.in_use, self.activations
        at_loss = use.root_weights + use.sums
        kept = activations.kept - self.activations_on_host
        in_layer = activations.recomputed + activations.exchanged  # only in a layer's backward
        last = use.earlier_gradients + use.layer_gradients
        first = max(activations.layers, default=0) + in_layer
        return [
            Moment(use.earlier_gradients, at_loss, kept, activations.loss, 0, 0),
            Moment(last, use.in_backward, kept + in_layer, 0, 0, 0),
            Moment(self._gradients_nbytes, use.in_backward, first, 0, 0, 0),
        ]

    @property
    def device_nbytes(self) -> int:
        """Bytes at the step's peak."""
        return self._at_rest_nbytes + sum(self.peak)

    @property
    def falling_nbytes(self) -> int:
        """Bytes at the step's peak that fall as the offload fraction grows: all but streamed
        states, weights that are not codes yet, and matrices.
        """
        slots = self.states.at_rest.get(SLOTS, StateBytes(0, 0)).device
        return self._at_rest_nbytes - slots + max(map(sum, self._moments))

    @property
    def _at_rest_nbytes(self) -> int:
        """Bytes on the device that stay as they are in a step."""
        return self.states.device_nbytes - self._gradients_nbytes

    @property
    def host_nbytes(self) -> int:
        return self.states.host_nbytes + self.activations_room


def rows_of(memory: RunMemory) -> dict[str, StateBytes]:
    """Returns bytes by kind, whose sum is the peak of a step."""
    rows = dict.fromkeys((COMPUTE, MAIN, GRADIENTS), StateBytes(0, 0))
    for name, row in memory.states.at_rest.items():
        kind = name if name in _WEIGHTS else STATES
        before = rows.get(kind, StateBytes(0, 0))
        rows[kind] = StateBytes(before.device + row.device, before.host + row.host)
    peak = memory.peak
    rows[GRADIENTS] = rows[GRADIENTS]._replace(device=peak.gradients)

    # If weights are whole at rest, as on one rank, only gradients come on top.
    in_use = WHOLE_LAYERS if memory.in_use.root_weights else IN_BACKWARD
    rows[in_use] = StateBytes(peak.whole_layers, 0)
    rows[ACTIVATIONS] = StateBytes(peak.activations, memory.activations_room)
    rows[LOSS] = StateBytes(peak.loss, 0)
    rows[MATRICES] = StateBytes(peak.matrices, 0)
    rows[ROUNDED] = StateBytes(peak.rounded, 0)
    return {name: row for name, row in rows.items() if any(row)}


def state_settings(config: EngineConfig, world_size: int, *, is_accelerator: bool) -> StateSettings:
    """The settings that determine the memory of weights, gradients and states."""
    dtype = DTYPES[config.compute_dtype]
    return StateSettings(config.optimizer, config.parallel, dtype, world_size, is_accelerator)


def microbatch_of(config: EngineConfig, device_kind: str) -> Microbatch:
    """Returns one microbatch of a config with `batch`."""
    assert config.batch is not None, "callers check"
    recipe = recipe_of(config.low_precision)
    return Microbatch(
        config.batch.micro_batch_size,
        config.batch.seq_length,
        DTYPES[config.compute_dtype].itemsize,
        device_kind,
        exchanges_tokens=config.parallel.expert_model_parallel_size > 1,
        context_size=config.parallel.context_parallel_size,
        gathers=config.parallel.cp_comm_type == ALL_GATHER,
        tensor_size=config.parallel.tensor_model_parallel_size,
        code_nbytes=None if recipe is None else recipe.kept_nbytes,
    )


def at_fraction(config: EngineConfig, fraction: float) -> EngineConfig:
    """Returns the config with this offload fraction."""
    return replace(config, optimizer=replace(config.optimizer, optimizer_offload_fraction=fraction))


def offload_plan(model: nn.Module, config: EngineConfig) -> OffloadPlan | None:
    """Returns the side of each of the model's groups; None without offloading."""
    by_module = bool(config.parallel.use_megatron_fsdp)
    return plan_offload(model, config.optimizer, by_module=by_module)


def memory_of(
    model: GPTModel, config: EngineConfig, world_size: int, device_kind: str
) -> RunMemory:
    """Returns the memory of the first rank, which is the largest.

    Args:
        model: on meta or real, not sharded.
        config: with `batch`, and an offload fraction that is a number.
    """
    settings = state_settings(config, world_size, is_accelerator=device_kind != "cpu")
    states = plan_memory(model, settings, offload_plan(model, config))
    activations = activation_bytes(
        model.spec,
        model.vocab_size,
        microbatch_of(config, device_kind),
        model.config.recompute_granularity,
        config.low_precision.num_bf16_layers,
    )
    room = config.execution.nbytes_of_host
    moving = moving_layers(len(activations.layers), config.execution.activation_offload_fraction)
    on_host = min(room, sum(activations.layers[number] for number in moving))
    return RunMemory(states, activations, on_host, room, _in_use(model, states, config, world_size))


def fractions_of(model: nn.Module, config: EngineConfig) -> list[float]:
    """The fractions at which one more group is offloaded, in two digits where possible. The first
    is 0, the last 1.
    """
    everything = offload_plan(model, at_fraction(config, 1.0))
    assert everything is not None, "the optimizer is offloaded"
    order = sorted(
        range(len(everything.groups)),
        key=lambda index: (not everything.groups[index].goes_first, -index),
    )
    held, shares = 0, [0.0]
    for index in order:
        held += everything.groups[index].numel
        shares.append(held / everything.total_numel if everything.total_numel else 1.0)
    shares[-1] = 1.0
    found = [0.0, *(_shortest(low, high) for low, high in pairwise(shares) if high > low)]
    return list(dict.fromkeys(found))


def first_fitting(
    fractions: Sequence[float], limit: int | None, memory_at: Callable[[float], RunMemory]
) -> int:
    """Returns the index of the smallest fraction that fits, or their number if none does.

    Args:
        limit: bytes of the device; None: all fit.
    """
    if limit is None:
        return 0

    # Slots grow with the largest group, and each side has buffers for its matrices. So the first
    # fraction that fits is this one, or one of the next ones.
    def may_fit(fraction: float) -> bool:
        return memory_at(fraction).falling_nbytes <= limit

    number = bisect_left(fractions, True, key=may_fit)
    while number < len(fractions) and memory_at(fractions[number]).device_nbytes > limit:
        number += 1
    return number


def fit(
    model: GPTModel, config: EngineConfig, world_size: int, device_kind: str, limit: int
) -> tuple[float, RunMemory]:
    """Returns the smallest fraction at which a rank takes at most `limit` bytes of its device, or 1
    if none does, and the memory at it.
    """

    @cache
    def memory(fraction: float) -> RunMemory:
        return memory_of(model, at_fraction(config, fraction), world_size, device_kind)

    fractions = fractions_of(model, config)
    number = first_fitting(fractions, limit, memory)
    fraction = fractions[min(number, len(fractions) - 1)]
    return fraction, memory(fraction)


def with_known_fraction(
    config: EngineConfig, model: nn.Module, device: Device, mesh: DeviceMesh
) -> EngineConfig:
    """Returns the config with the smallest offload fraction that fits the device of every rank, if
    its fraction is `auto`. All ranks call it together, before anything of the model is allocated.

    Raises:
        ConfigError: on all ranks, if no fraction fits, or the model's memory is unknown.
    """
    if config.optimizer.optimizer_offload_fraction != AUTO:
        return config
    if not device.is_accelerator:
        logger.info("%s auto: 0 on the CPU, where all memory is the host's", _FLAG)
        return at_fraction(config, 0.0)
    if not isinstance(model, GPTModel):
        raise ConfigError(f"{_FLAG}: expected a number for a {type(model).__name__}, got 'auto'.")
    expect(config.batch is not None, _FLAG, "EngineConfig.batch for auto", None)

    limit, free = _least_memory(device, mesh)
    fraction, memory = fit(model, config, mesh.size(), device.kind, limit)
    rows, total = rows_of(memory), memory.device_nbytes
    terms = [f"{name} {format_bytes(row.device)}" for name, row in rows.items() if row.device]
    needed = f"{' + '.join(terms)} = {format_bytes(total)} a rank"
    got = f"{format_bytes(free)} free, of which {format_bytes(free - limit)} are kept in reserve"
    if total > limit:
        raise ConfigError(
            f"{_FLAG}: expected device memory for {needed} at 1, the most, got {got}: "
            f"{format_bytes(total - limit)} too little. {NEEDING_LESS}"
        )

    text = "%s auto: %g, the smallest that fits: %s; %s"
    logger.info(text, _FLAG, fraction, needed, got)
    return at_fraction(config, fraction)


def _least_memory(device: Device, mesh: DeviceMesh) -> tuple[int, int]:
    """Returns the bytes that can be planned, and the free ones, on the device with the least."""
    own = [device.spare_memory_bytes(), device.memory_info()[0]]
    least = torch.tensor(own, dtype=torch.int64, device=device.torch_device)
    all_reduce_over(mesh, least, dist.ReduceOp.MIN, "the least device memory")
    limit, free = least.tolist()
    return limit, free


def _in_use(model: GPTModel, states: PlannedMemory, config: EngineConfig, world_size: int) -> InUse:
    is_one = _num_microbatches(config, world_size) == 1
    if not states.shards.units:
        at_rest = states.at_rest.get(GRADIENTS, StateBytes(0, 0)).device
        return _tensors_in_use(model, config, 0 if is_one else at_rest)
    layers = sharding_units(model)
    owners = {module: number for number, layer in enumerate(layers) for module in layer.modules()}

    weights, gradients = [0] * len(layers), [0] * len(layers)
    root_weights = root_gradients = partial = of_one = lane = largest = earlier = 0
    reduced = [0] * len(layers)  # by the last microbatch
    for unit, planned in zip(units_of(model), states.shards.units, strict=True):
        for group in planned.groups:
            partial += group.partial_grads_nbytes
            lane = max(lane, group.reduction_nbytes)
            is_reduced_now = is_one or group.defers_reduction
            earlier += 0 if is_reduced_now else group.grad_nbytes
            if not group.defers_all_axes:
                of_one = max(of_one, group.partial_grads_nbytes)
            numel = max(math.prod(parameter.shape) for parameter in group.parameters)
            if group.requires_grad:
                largest = max(largest, numel // group.layout.num_blocks * group.dtype.itemsize)
            if unit.module is model:
                root_weights += group.whole_weights_nbytes
                root_gradients += group.whole_grads_nbytes
            else:
                weights[owners[unit.module]] += group.whole_weights_nbytes
                gradients[owners[unit.module]] += group.whole_grads_nbytes
                reduced[owners[unit.module]] += group.grad_nbytes if is_reduced_now else 0

    of_layers = _largest_two(weights)
    if not config.parallel.megatron_fsdp_reshard_after_forward:
        of_layers = sum(weights)
    # Sums of several microbatches wait for their reduction. Sums of one are reduced over the other
    # axes at once, in the two groups that are in flight.
    deferred = min(partial, 2 * of_one) if is_one else partial
    # A gradient of autograd, before its module has room for more.
    of_backward = root_gradients + _largest_two(gradients) + largest + deferred + lane
    in_backward = root_weights + of_layers + of_backward
    sums = 0 if is_one else partial
    return InUse(root_weights, in_backward, sums, earlier, max(reduced, default=0))


def _tensors_in_use(model: GPTModel, config: EngineConfig, earlier_gradients: int) -> InUse:
    """Returns the bytes for PyTorch FSDP2, which reduces gradients in fp32; 0 otherwise."""
    if not config.parallel.use_torch_fsdp2:
        return InUse(0, 0, 0, earlier_gradients, 0)
    itemsize = DTYPES[config.compute_dtype].itemsize
    layers = [sum(p.numel() for p in u.parameters()) for u in sharding_units(model)]
    root, two = sum(p.numel() for p in model.parameters()) - sum(layers), _largest_two(layers)
    in_backward = (root + two) * (itemsize + torch.float32.itemsize)
    return InUse(root * itemsize, in_backward, 0, earlier_gradients, 0)


def _num_microbatches(config: EngineConfig, world_size: int) -> int:
    assert config.batch is not None, "callers check"
    return config.batch.num_microbatches(config.parallel.data_parallel_size(world_size))


def _largest_two(numbers: Sequence[int]) -> int:
    return sum(sorted(numbers, reverse=True)[:2])


def _shortest(low: float, high: float) -> float:
    """Returns the largest decimal in (low, high] with the fewest digits, at least two."""
    for digits in range(2, 17):
        scale = 10.0**digits
        rounded = int(high * scale) / scale
        if low < rounded <= high:
            return rounded
    return high
