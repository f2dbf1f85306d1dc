"""The operations and transfers of a rank in one step, for `step_time`."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch

from megatron.core.distributed.fsdp.group_plan import THE_MODEL
from megatron.core.dtypes import DTYPES
from megatron.core.models.gpt.activations import Microbatch
from megatron.core.models.gpt.flops import num_floating_point_operations
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.rules import rule_of
from megatron.core.transformer.spec import GatedDeltaNetSpec, LatentAttentionSpec, Mixer
from megatron_hybrid.plan.planned_run import PlannedRun
from megatron_hybrid.plan.step_time import Work


class _Part(NamedTuple):
    """Elements of one optimizer pass on this rank, and their dtypes."""

    numel: int
    is_on_host: bool
    main: torch.dtype
    grad: torch.dtype
    weight: torch.dtype


def work_of(run: PlannedRun, fraction: float | None) -> Work:
    """Returns one step of a rank at an offload fraction."""
    config = run.at(fraction)
    parts = _parts(run, fraction)
    host = [part for part in parts if part.is_on_host]
    moved = _traffic(run, fraction)
    forward = flops_of_microbatch(run) / 3
    repeats = forward if config.model.recompute_granularity == "full" else 0.0
    return Work(
        forward_flops=forward,
        backward_flops=2 * forward + repeats,
        num_microbatches=run.num_microbatches,
        host_pass=sum(_pass_bytes(part, config.optimizer) for part in host),
        device_pass=sum(
            # The norm reads all gradients once more, including the host's.
            part.numel * part.grad.itemsize
            + (0 if part.is_on_host else _pass_bytes(part, config.optimizer) + _cast_bytes(part))
            for part in parts
        ),
        down=sum(part.numel * part.grad.itemsize for part in host),
        up=sum(part.numel * part.weight.itemsize for part in host),
        states=sum(
            part.numel * (part.main.itemsize + _state_bytes(config.optimizer)) for part in host
        ),
        update_on_device=config.optimizer.update_on_device,
        activations=run.memory(fraction).activations_on_host,
        hides_activations=config.execution.activation_offload_fraction == "auto",
        overlap=config.optimizer.overlap,
        **moved,
    )


def flops_of_microbatch(run: PlannedRun) -> int:
    """Returns the FLOP of forward and backward of one rank, as Megatron counts them."""
    of_sequences = num_floating_point_operations(
        run.spec,
        run.model.vocab_size,
        run.config.data.seq_length,
        run.config.training.micro_batch_size,
    )
    return of_sequences // run.config.parallel.context_parallel_size


def checkpoint_nbytes(run: PlannedRun) -> int:
    """Returns a checkpoint's size over all ranks: main weights, and states of trained ones."""
    optimizer, total = run.config.optimizer, 0
    main = DTYPES[optimizer.main_params_dtype].itemsize
    for parameter in run.model.parameters():
        itemsize = main
        if not parameter.requires_grad and run.config.parallel.use_megatron_fsdp:
            itemsize = run.microbatch.itemsize
        total += parameter.numel() * itemsize
        if parameter.requires_grad:
            total += parameter.numel() * _state_bytes(optimizer)
    return total


def _parts(run: PlannedRun, fraction: float | None) -> list[_Part]:
    shards = run.memory(fraction).states.shards
    if shards.units:
        return [
            _Part(
                group.optimizer_numel,
                group.is_on_host,
                group.main_dtype,
                group.grad_dtype,
                group.dtype,
            )
            for group in shards.groups
            if group.requires_grad
        ]

    plan, fp32 = run.plan(fraction), torch.float32
    trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    on_host = 0 if plan is None else plan.host_numel
    return [
        _Part(numel // run.world_size, is_on_host, fp32, fp32, fp32)
        for numel, is_on_host in ((trained - on_host, False), (on_host, True))
        if numel
    ]


def _state_bytes(optimizer: OptimizerConfig) -> int:
    """Returns the bytes of an element's optimizer states."""
    return sum(dtype.itemsize for dtype in rule_of(optimizer).state_dtypes.values())


def _pass_bytes(part: _Part, optimizer: OptimizerConfig) -> int:
    """Returns the bytes that one pass reads and writes."""
    read_and_written = 2 * (part.main.itemsize + _state_bytes(optimizer))
    # On the host the pass also writes the new compute weight.
    written = part.weight.itemsize if part.is_on_host else 0
    return part.numel * (part.grad.itemsize + read_and_written + written)


def _cast_bytes(part: _Part) -> int:
    """Returns the bytes of casting main weights to compute weights on the device."""
    is_apart = part.main != part.weight
    return part.numel * (part.main.itemsize + part.weight.itemsize) if is_apart else 0


def _traffic(run: PlannedRun, fraction: float | None) -> dict[str, Any]:
    """Returns the bytes and the numbers of this rank's collectives."""
    shards, config = run.memory(fraction).states.shards, run.at(fraction)
    moved: dict[str, Any] = Counter()
    for unit in shards.units:
        # The root module keeps its weights between forward and backward.
        reshards = config.parallel.megatron_fsdp_reshard_after_forward and unit.name != THE_MODEL
        for group in unit.groups:
            if not group.is_gathered:
                moved["gathered_once"] += group.gathered_nbytes
            else:
                moved["gathered_forward"] += group.gathered_nbytes
                moved["collectives_forward"] += 1
                if reshards:
                    moved["gathered_backward"] += group.gathered_nbytes
                    moved["collectives_backward"] += 1
            if group.reduced_nbytes:
                moved["reduced"] += group.reduced_nbytes
                moved["collectives_backward"] += 1
            moved["reduced_once"] += group.reduced_last_nbytes
    if config.parallel.expert_model_parallel_size > 1:
        moved["exchanged"] += _exchanged(run)
        moved["exchanges"] += 4 * len(run.spec.mixtures)
    if config.parallel.context_parallel_size > 1:
        mixers = [layer.mixer for layer in run.spec.layers]
        moved["exchanged"] += sum(exchanged_by(mixer, run.microbatch) for mixer in mixers)
        moved["exchanges"] += sum(_num_exchanges(mixer, run.microbatch) for mixer in mixers)
    if shards.units or not config.parallel.use_torch_fsdp2:
        return {**moved}

    # PyTorch FSDP2 gathers in the compute dtype and reduces in fp32.
    others = run.numel * (run.world_size - 1) / run.world_size
    gathered = others * run.microbatch.itemsize
    return {
        "gathered_forward": gathered,
        "gathered_backward": gathered,
        "reduced": others * torch.float32.itemsize,
    }


def _exchanged(run: PlannedRun) -> float:
    """Returns the bytes of tokens exchanged with experts on other ranks, and of gradients."""
    size = run.config.parallel.expert_model_parallel_size
    choices = sum(mixture.router.top_k for mixture in run.spec.mixtures)
    batch = run.microbatch
    of_token = run.spec.hidden_size * batch.itemsize
    return 4.0 * batch.num_tokens * choices * of_token * (size - 1) / size


def exchanged_by(mixer: Mixer, batch: Microbatch) -> float:
    """Returns the bytes that a rank of context parallelism sends in a layer's forward and backward.

    docs/long_context.md has the formulas.
    """
    others = (batch.context_size - 1) / batch.context_size
    return 2.0 * batch.num_tokens * _sent_of_token(mixer, batch) * others


def _sent_of_token(mixer: Mixer, batch: Microbatch) -> int:
    """Returns a token's bytes in the exchanges of a forward, the part that stays included."""
    itemsize = batch.itemsize
    if isinstance(mixer, GatedDeltaNetSpec):
        keys = 2 * mixer.key_size * batch.num_head_copies(mixer.num_key_heads)
        rates = 2 * mixer.num_value_heads * torch.float32.itemsize
        return (keys + 2 * mixer.value_size) * itemsize + rates

    if isinstance(mixer, LatentAttentionSpec):
        keys, result = mixer.query_size + mixer.value_size, mixer.value_size
        keys *= batch.num_key_copies(mixer.num_heads)
    else:
        keys, result = 2 * mixer.key_value_size, mixer.query_size
        keys *= batch.num_key_copies(mixer.num_key_value_heads)
    return itemsize * (keys if batch.gathers_keys else keys + mixer.query_size + result)


def _num_exchanges(mixer: Mixer, batch: Microbatch) -> int:
    is_gathered = batch.gathers_keys and not isinstance(mixer, GatedDeltaNetSpec)
    return 2 if is_gathered else 4
