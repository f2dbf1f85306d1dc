"""The engines that are trained here, by name, and how: the same on every kind of device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.config import ExecutionConfig
from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.training.config import EngineConfig
from megatron.training.engines import ModuleEngine, build_engine
from tests.helpers.ranks import rank_device

Batch = dict[str, torch.Tensor]

_VOCABULARY = 64
# Attention on a GPU works in blocks of 64 or 128 positions: with one block there is one order.
_SEQ_LENGTH, _SEQ_LENGTH_OF_GPU = 16, 512


class Case(NamedTuple):
    """One engine's configuration."""

    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: DataParallelConfig = DataParallelConfig()
    dtype: str = "bf16"
    model: dict[str, Any] = {}  # noqa: RUF012  options of TransformerConfig, only read
    execution: ExecutionConfig = ExecutionConfig()


def _offloaded(fraction: float = 1.0, **options: Any) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer_cpu_offload=True,
        overlap_cpu_optimizer_d2h_h2d=True,
        optimizer_offload_fraction=fraction,
        **options,
    )


_ALL_OVERLAPS = {"overlap_optimizer_with_forward": True}
_TWO_INSTANCES = {"num_distributed_optimizer_instances": 2}
_SHORT_MOMENTS = {
    "exp_avg_dtype": "fp16",
    "exp_avg_sq_dtype": "fp16",
}

_ACTIVATIONS = ExecutionConfig(
    activation_offload=True, activation_offload_gib=1e-3, activation_offload_min_kib=0.5
)

CASES = {
    "zero3": Case(),
    "zero3 fp32": Case(dtype="fp32"),
    "zero3 kept": Case(parallel=DataParallelConfig(megatron_fsdp_reshard_after_forward=False)),
    "zero2": Case(parallel=DataParallelConfig(data_parallel_sharding_strategy="optim_grads")),
    "zero1": Case(parallel=DataParallelConfig(data_parallel_sharding_strategy="optim")),
    "zero1 fp32": Case(
        parallel=DataParallelConfig(data_parallel_sharding_strategy="optim"), dtype="fp32"
    ),
    "no_shard": Case(parallel=DataParallelConfig(data_parallel_sharding_strategy="no_shard")),
    "hsdp": Case(parallel=DataParallelConfig(**_TWO_INSTANCES)),
    "hfsdp": Case(
        parallel=DataParallelConfig(**_TWO_INSTANCES, outer_dp_sharding_strategy="optim")
    ),
    "recomputed": Case(model={"recompute_granularity": "full"}),
    "selective": Case(model={"recompute_granularity": "selective"}),
    "fp16": Case(OptimizerConfig(initial_loss_scale=2.0**12), dtype="fp16"),
    "fp16 moments": Case(OptimizerConfig(**_SHORT_MOMENTS)),
    "offload": Case(_offloaded()),
    "offload half": Case(_offloaded(0.5)),
    "offload forward": Case(_offloaded(**_ALL_OVERLAPS)),
    "offload forward half": Case(_offloaded(0.5, **_ALL_OVERLAPS)),
    "offload zero1": Case(
        _offloaded(0.5, **_ALL_OVERLAPS),
        DataParallelConfig(data_parallel_sharding_strategy="optim"),
    ),
    "offload hsdp": Case(_offloaded(**_ALL_OVERLAPS), DataParallelConfig(**_TWO_INSTANCES)),
    "offload fp16": Case(
        _offloaded(0.5, **_ALL_OVERLAPS, initial_loss_scale=2.0**12), dtype="fp16"
    ),
    "offload streamed": Case(_offloaded(**_ALL_OVERLAPS, optimizer_update_on_device=1.0)),
    "offload streamed half": Case(
        _offloaded(**_ALL_OVERLAPS, optimizer_update_on_device=0.5),
        DataParallelConfig(data_parallel_sharding_strategy="optim"),
    ),
    "offload early": Case(_offloaded(**_ALL_OVERLAPS, optimizer_early_update_gib=1.0)),
    "offload early half": Case(
        _offloaded(0.5, **_ALL_OVERLAPS, optimizer_early_update_gib=1.0),
        DataParallelConfig(data_parallel_sharding_strategy="optim"),
    ),
    "offload early fp16": Case(
        _offloaded(
            **_ALL_OVERLAPS,
            optimizer_early_update_gib=1.0,
            optimizer_update_on_device=0.5,
            initial_loss_scale=2.0**12,
            clip_grad=0.0,
        ),
        dtype="fp16",
    ),
    "offload in order": Case(OptimizerConfig(optimizer_cpu_offload=True)),
    "offload unpinned": Case(_offloaded(pin_cpu_grads=False, pin_cpu_params=False)),
    "activations": Case(execution=_ACTIVATIONS),
    "activations recomputed": Case(
        _offloaded(), model={"recompute_granularity": "full"}, execution=_ACTIVATIONS
    ),
    "activations offload forward": Case(
        _offloaded(0.5, **_ALL_OVERLAPS), dtype="fp32", execution=_ACTIVATIONS
    ),
    "activations no_shard": Case(
        parallel=DataParallelConfig(data_parallel_sharding_strategy="no_shard"),
        execution=_ACTIVATIONS,
    ),
    "activations fsdp2": Case(
        parallel=DataParallelConfig(use_torch_fsdp2=True), execution=_ACTIVATIONS
    ),
    "fsdp2": Case(parallel=DataParallelConfig(use_torch_fsdp2=True)),
    "offload fsdp2": Case(_offloaded(0.5), DataParallelConfig(use_torch_fsdp2=True)),
}


def make_engine(name: str, kind: str, *, records_timings: bool = False) -> ModuleEngine:
    """The engine of this case, on this rank's device."""
    case, world_size = CASES[name], dist.get_world_size()
    device = Device(kind, rank_device().index or 0)
    config = EngineConfig(
        case.optimizer,
        LRScheduleConfig(lr=1e-2, lr_decay_style="constant"),
        case.parallel,
        train_iters=99,
        compute_dtype=case.dtype,
        records_timings=records_timings,
        execution=case.execution,
    )
    engine = build_engine(config, device, build_mesh(kind, world_size), num_local_ranks=world_size)
    engine.initialize(lambda: _gpt(case))
    return engine


def _gpt(case: Case) -> nn.Module:
    config = TransformerConfig(
        num_layers=3,
        hidden_size=32,
        num_attention_heads=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        swiglu=True,
        normalization="RMSNorm",
        **case.model,
    )
    return GPTModel(config, _VOCABULARY)


def forward_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch["tokens"], batch["labels"]).mean()


def seq_length(kind: str) -> int:
    """Of the batches for a kind of device."""
    return _SEQ_LENGTH_OF_GPU if kind == "cuda" else _SEQ_LENGTH


def batches(step: int, kind: str, length: int | None = None) -> list[Batch]:
    """This rank's of one step; pinned for an accelerator, as the loop's are."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    shape = (2, 2, (length or seq_length(kind)) + 1)
    windows = torch.randint(_VOCABULARY, shape, generator=generator)
    made = [{"tokens": w[:, :-1].contiguous(), "labels": w[:, 1:].contiguous()} for w in windows]
    if kind == "cpu":
        return made
    return [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in made]


class Course(NamedTuple):
    """Results of a training on one rank, and the values of `look` before and after each step."""

    losses: list[float]
    norms: list[float]
    evaluated: float
    seen: list[tuple[Any, Any]]

    @property
    def numbers(self) -> tuple[list[float], list[float], float]:
        return self.losses, self.norms, self.evaluated


def train(
    engine: ModuleEngine,
    kind: str,
    steps: range,
    look: Callable[[], Any] = lambda: None,
    length: int | None = None,
) -> Course:
    """Some steps, and an evaluation in the middle."""
    losses, norms, evaluated, seen = [], [], 0.0, []
    # The CPU's own kernel rounds otherwise than the one that the simulator has. A GPU's own must
    # give the same bits each time.
    with nullcontext() if kind == "cuda" else sdpa_kernel(SDPBackend.MATH):
        for step in steps:
            prepared, before = batches(step, kind, length), look()
            result = engine.train_batch(prepared, forward_step)
            seen.append((before, look()))
            losses.append(result.loss)
            norms.append(result.grad_norm)
            if step == steps[len(steps) // 2]:
                evaluated = engine.eval_batch(batches(step, kind, length), forward_step)
    return Course(losses, norms, evaluated, seen)
