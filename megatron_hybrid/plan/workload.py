"""The operations and transfers of a rank in one step, for `step_time`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from megatron.core.distributed.fsdp.group_plan import THE_MODEL
from megatron.core.dtypes import DTYPES
from megatron.core.models.gpt.activations import Microbatch
from megatron.core.models.gpt.flops import num_floating_point_operations
from megatron.core.optimizer.config import Overlap
from megatron.core.optimizer.cpu_offloading.plan import PlannedGroup
from megatron.core.optimizer.cpu_offloading.streamed_pass import SLOT_NUMEL
from megatron.core.transformer.fused_weight import matrices_of
from megatron.core.transformer.spec import (
    AttentionSpec,
    DenseSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mixer,
    ModelSpec,
)
from megatron.training.config import RunConfig
from megatron_hybrid.plan.planned_run import PlannedRun
from megatron_hybrid.plan.step_time import GroupWork, Work


class _Part(NamedTuple):
    """A group of parameters on this rank: elements of one optimizer pass, and their dtypes.

    Attributes:
        weight_nbytes: of its new compute weights.
        is_cast: whether these are another array than the main weights.
        collectives: its gathers and reductions, without other work.
    """

    name: str
    numel: int
    is_on_host: bool
    main: torch.dtype
    grad: torch.dtype
    weight_nbytes: int
    is_cast: bool
    collectives: GroupWork


def work_of(run: PlannedRun, fraction: float | None) -> Work:
    """Returns one step of a rank at an offload fraction."""
    config = run.at(fraction)
    parts = _parts(run, fraction)
    exchanged, num_exchanges = _exchanges(run)
    return Work(
        groups=_groups(run, parts, config),
        num_microbatches=run.num_microbatches,
        norm=sum(part.numel * part.grad.itemsize for part in parts),
        device_pass=sum(
            _pass_bytes(part, run.state_bytes) + _cast_bytes(part)
            for part in parts
            if not part.is_on_host
        ),
        update_on_device=config.optimizer.update_on_device,
        activations=run.memory(fraction).activations_on_host,
        hides_activations=config.execution.activation_offload_fraction == "auto",
        exchanged=exchanged,
        exchanges=num_exchanges,
        overlap=_overlap(config, run.world_size),
    )


def _groups(run: PlannedRun, parts: Sequence[_Part], config: RunConfig) -> tuple[GroupWork, ...]:
    """Returns the groups in the order of forward, and one that has no layer: the loss."""
    of_layers = _layer_flops(run)
    counts = Counter(_layer_of(part.name) for part in parts)
    rest = flops_of_microbatch(run) / 3
    backward = 3 if config.model.recompute_granularity == "full" else 2
    groups = list[GroupWork]()
    for part in parts:
        layer = _layer_of(part.name)
        forward = of_layers.get(layer, 0.0) / counts[layer]
        rest -= forward
        made = replace(part.collectives, forward=forward, backward=backward * forward)
        if part.is_on_host:
            states = part.numel * (part.main.itemsize + run.state_bytes)
            # Matrices of Muon go up and come down, which the host writes, updates and reads.
            rows = part.numel * run.matrix_share * torch.bfloat16.itemsize
            made = replace(
                made,
                host_pass=_pass_bytes(part, run.state_bytes) + 3 * rows,
                down=part.numel * part.grad.itemsize + rows,
                up=part.weight_nbytes + rows,
                states=states,
                chunks=max(1, math.ceil(part.numel / SLOT_NUMEL)),
            )
        groups.append(made)
    left: float = config.optimizer.early_update_bytes
    for index in reversed(range(len(groups))):
        group = groups[index]
        # Of the undo log, and of weights that otherwise take the place of their gradients.
        cost = group.states + (group.up if group.up == group.down else 0)
        if 0 < cost <= left:
            left -= cost
            groups[index] = replace(group, early_pass=group.host_pass + group.states)
    # Once a step; a rank's part is as large as its part of the elements.
    muon = newton_schulz_flops(run) * sum(part.numel for part in parts) / run.trained_numel
    return (*groups, GroupWork(rest, backward * rest + muon / run.num_microbatches))


def _overlap(config: RunConfig, world_size: int) -> Overlap:
    """Returns what overlaps: a step waits for matrices with rows on several ranks."""
    strategy = config.parallel.data_parallel_sharding_strategy
    is_exchanged = world_size > 1 and strategy != "no_shard"
    overlap = config.optimizer.overlap
    waits = config.optimizer.optimizer == "muon" and is_exchanged and overlap.in_forward
    return Overlap.FETCH if waits else overlap


def _layer_flops(run: PlannedRun) -> dict[int, float]:
    """Returns the FLOP of a microbatch's forward by layer."""
    spec = run.spec
    others = {name: getattr(spec, name) for name in vars(spec) if name != "layers"}
    kinds = {
        layer: num_floating_point_operations(
            ModelSpec(**others, layers=(layer,)),
            0,
            run.config.data.seq_length,
            run.config.training.micro_batch_size,
        )
        for layer in set(spec.layers)
    }
    num_parts = 3 * run.config.parallel.ranks_per_sample
    return {number: kinds[layer] / num_parts for number, layer in enumerate(spec.layers)}


def _layer_of(name: str) -> int:
    """Returns the number of a group's layer; -1: it is in none."""
    found = re.search(r"\blayers\.(\d+)", name)
    return int(found[1]) if found else -1


def flops_of_microbatch(run: PlannedRun) -> int:
    """Returns the FLOP of forward and backward of one rank, as Megatron counts them."""
    of_sequences = num_floating_point_operations(
        run.spec,
        run.model.vocab_size,
        run.config.data.seq_length,
        run.config.training.micro_batch_size,
    )
    return of_sequences // run.config.parallel.ranks_per_sample


def newton_schulz_flops(run: PlannedRun) -> int:
    """Returns the FLOP of Newton-Schulz over all matrices; 0 for optimizers other than Muon."""
    optimizer = run.config.optimizer
    if optimizer.optimizer != "muon":
        return 0
    matrices = matrices_of(run.model, by_head=optimizer.muon_split_heads)
    shapes = [
        sorted((num_rows, parameter.shape[1]))
        for parameter, rows in matrices.items()
        if parameter.requires_grad
        for num_rows in rows
    ]
    # x x^T, its square, and the product with x, of x [less, more].
    of_one_step = sum(4 * less**2 * more + 2 * less**3 for less, more in shapes)
    return of_one_step * optimizer.muon_num_ns_steps


def checkpoint_nbytes(run: PlannedRun) -> int:
    """Returns a checkpoint's size over all ranks: main weights, and states of trained ones."""
    total = run.trained_numel * run.state_bytes
    main = DTYPES[run.config.optimizer.main_params_dtype].itemsize
    for parameter in run.model.parameters():
        itemsize = main
        if not parameter.requires_grad and run.config.parallel.use_megatron_fsdp:
            itemsize = run.microbatch.itemsize
        total += parameter.numel() * itemsize
    return round(total)


def _parts(run: PlannedRun, fraction: float | None) -> list[_Part]:
    """Returns the groups in the order of forward."""
    shards, config = run.memory(fraction).states.shards, run.at(fraction)
    if not shards.units:
        return _parts_of_tensors(run, fraction)
    parts = []
    # The root module has the embedding, and a layer without its experts precedes them.
    for unit in sorted(shards.units, key=lambda unit: (_layer_of(unit.name), unit.name)):
        # It keeps its weights between forward and backward.
        reshards = config.parallel.megatron_fsdp_reshard_after_forward and unit.name != THE_MODEL
        for group in unit.groups:
            gathered, is_gathered = group.gathered_nbytes, group.is_gathered
            moved = GroupWork(
                gathered_forward=gathered if is_gathered else 0,
                gathered_backward=gathered if is_gathered and reshards else 0,
                reduced=group.reduced_nbytes,
                gathered_once=group.maxima_nbytes + (0 if is_gathered else gathered),
                reduced_once=group.reduced_last_nbytes,
            )
            numel = group.optimizer_numel if group.requires_grad else 0
            written = group.weight_numel(numel) * group.weight_dtype.itemsize
            is_cast = group.main_dtype != group.weight_dtype
            dtypes = group.main_dtype, group.grad_dtype
            parts.append(
                _Part(unit.name, numel, group.is_on_host, *dtypes, written, is_cast, moved)
            )
    return parts


def _parts_of_tensors(run: PlannedRun, fraction: float | None) -> list[_Part]:
    """Returns the groups of other engines than Megatron-FSDP."""
    plan, fp32 = run.plan(fraction), torch.float32
    trained = run.trained_numel
    groups = [PlannedGroup("", trained, False)] if plan is None else plan.groups
    parts = []
    for group in groups:
        moved = GroupWork()
        if run.config.parallel.use_torch_fsdp2:
            # PyTorch FSDP2 gathers in the compute dtype and reduces in fp32.
            others = run.numel * (run.world_size - 1) / run.world_size * group.numel / trained
            gathered = others * run.microbatch.itemsize
            reduced = others * torch.float32.itemsize
            moved = GroupWork(
                gathered_forward=gathered, gathered_backward=gathered, reduced=reduced
            )
        numel = group.numel // run.world_size
        written = numel * fp32.itemsize
        parts.append(_Part(group.name, numel, group.is_on_host, fp32, fp32, written, False, moved))
    return parts


def _pass_bytes(part: _Part, state_bytes: float) -> float:
    """Returns the bytes that one pass reads and writes."""
    read_and_written = 2 * (part.main.itemsize + state_bytes)
    # On the host the pass also writes the new compute weight.
    written = part.weight_nbytes if part.is_on_host else 0
    return part.numel * (part.grad.itemsize + read_and_written) + written


def _cast_bytes(part: _Part) -> int:
    """Returns the bytes of casting main weights to compute weights on the device."""
    return part.numel * part.main.itemsize + part.weight_nbytes if part.is_cast else 0


def _exchanges(run: PlannedRun) -> tuple[float, int]:
    """Returns the bytes that ranks of expert, context and tensor parallelism exchange in a
    microbatch, and the number of exchanges.
    """
    nbytes, number, batch = 0.0, 0, run.microbatch
    size = run.config.parallel.expert_model_parallel_size
    if size > 1:
        choices = sum(mixture.router.top_k for mixture in run.spec.mixtures)
        of_token = run.spec.hidden_size * batch.itemsize
        nbytes += 4.0 * batch.num_tokens * choices * of_token * (size - 1) / size
        number += 4 * len(run.spec.mixtures)
    if batch.context_size > 1:
        mixers = [layer.mixer for layer in run.spec.layers]
        nbytes += sum(exchanged_by(mixer, batch) for mixer in mixers)
        number += sum(_num_exchanges(mixer, batch) for mixer in mixers)
    if batch.tensor_size > 1:
        # Embedding and loss: a reduce-scatter and an all-gather each, in forward or backward.
        size = run.spec.hidden_size
        nbytes += 4 * size * batch.itemsize * batch.num_tokens * (batch.tensor_size - 1)
        nbytes += sum(sent_by_layer(layer, size, batch) for layer in run.spec.layers)
        number += 4 + 5 * sum(_num_divided(layer) for layer in run.spec.layers)
    return nbytes, number


def sent_by_layer(layer: LayerSpec, hidden_size: int, batch: Microbatch) -> int:
    """Returns the bytes that a rank of tensor parallelism sends in a layer's forward and backward.

    docs/training.md has the formulas.
    """
    # Inputs are gathered, again in backward, and their gradients scattered; outputs are scattered,
    # and their gradients gathered.
    elements, mixer = 5 * hidden_size * _num_divided(layer), layer.mixer
    if isinstance(mixer, LatentAttentionSpec):
        query_size = hidden_size if mixer.query_rank is None else mixer.query_rank
        elements += 3 * query_size + 2 * (mixer.key_value_rank + mixer.rotary_dim) - 3 * hidden_size
    elif isinstance(mixer, AttentionSpec) and mixer.num_key_value_heads < batch.tensor_size:
        elements += 2 * 2 * mixer.key_value_size  # parts of keys and values, and their gradients
    return elements * batch.itemsize * batch.num_tokens * (batch.tensor_size - 1)


def _num_divided(layer: LayerSpec) -> int:
    """Returns the number of blocks of a layer that tensor parallelism divides."""
    network = layer.feed_forward
    return 2 if isinstance(network, DenseSpec) or network.shared is not None else 1


def exchanged_by(mixer: Mixer, batch: Microbatch) -> float:
    """Returns the bytes that a rank of context parallelism sends in a layer's forward and backward.

    docs/long_context.md has the formulas.
    """
    if batch.gathers and isinstance(mixer, GatedDeltaNetSpec):
        inputs = (mixer.conv_kernel - 1) * (2 * mixer.key_size + mixer.value_size)
        states = mixer.num_value_heads * mixer.key_head_dim
        states *= mixer.key_head_dim + mixer.value_head_dim
        of_sequence = inputs * batch.itemsize + states * torch.float32.itemsize
        return 2.0 * batch.size * (batch.context_size - 1) * of_sequence
    others = (batch.context_size - 1) / batch.context_size
    return batch.num_tokens * _sent_of_token(mixer, batch) * others


def _sent_of_token(mixer: Mixer, batch: Microbatch) -> int:
    """Returns a token's bytes in all exchanges, the part that stays included."""
    itemsize = batch.itemsize
    if isinstance(mixer, GatedDeltaNetSpec):
        keys = 2 * mixer.key_size * batch.num_head_copies(mixer.num_key_heads)
        rates = 2 * mixer.num_value_heads * torch.float32.itemsize
        return 2 * ((keys + 2 * mixer.value_size) * itemsize + rates)

    if isinstance(mixer, LatentAttentionSpec):
        keys, result = mixer.query_size + mixer.value_size, mixer.value_size
        copies = batch.num_head_copies(mixer.num_heads)
    else:
        keys, result = 2 * mixer.key_value_size, mixer.query_size
        copies = batch.num_head_copies(mixer.num_key_value_heads)
    if batch.gathers:
        # In forward, again in backward, and their gradients.
        return 3 * itemsize * keys * batch.context_size
    return 2 * itemsize * (copies * keys + mixer.query_size + result)


def _num_exchanges(mixer: Mixer, batch: Microbatch) -> int:
    is_gathered = batch.gathers and not isinstance(mixer, GatedDeltaNetSpec)
    return 3 if is_gathered else 4
