"""Runs whose weights are gathered as codes, and the runs that they are compared with."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.low_precision.config import LowPrecisionConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.training.config import EngineConfig
from megatron.training.engines import ModuleEngine, build_engine
from tests.helpers.ranks import rank_device

VOCAB = 64
SIZES: dict[str, Any] = {
    "num_layers": 2,
    # Blocks of 128 x 128 and of 32 x 32 are cut, by rows of ranks and at the ends of weights.
    "hidden_size": 144,
    "num_attention_heads": 4,
    "ffn_hidden_size": 160,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
MIXTURE = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 48,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 64,
}
ON_DEVICE = OptimizerConfig()
LARGEST_OF_STEPS = "delayed, by the largest of several steps"


def on_host(fraction: float, **options: Any) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=fraction,
        overlap_cpu_optimizer_d2h_h2d=True,
        overlap_optimizer_with_forward=True,
        **options,
    )


def low_precision(recipe: str, fp8_format: str = "hybrid") -> LowPrecisionConfig:
    """The settings of a recipe of either format."""
    if recipe == "nvfp4":
        return LowPrecisionConfig(fp4_format="e2m1")
    if recipe == LARGEST_OF_STEPS:
        return LowPrecisionConfig(
            fp8_format=fp8_format,
            fp8_margin=1,
            fp8_amax_history_len=3,
            fp8_amax_compute_algo="max",
        )
    return LowPrecisionConfig(fp8_format=fp8_format, fp8_recipe=recipe)


def gathering(recipe: str, gathers_codes: bool = True) -> dict[str, bool]:
    """The flag that gathers the weights of a recipe as codes."""
    return {f"{'fp4' if recipe == 'nvfp4' else 'fp8'}_param_gather": gathers_codes}


def engine_for(
    gathers_codes: bool,
    recipe: str = "blockwise",
    optimizer: OptimizerConfig = ON_DEVICE,
    **parallel: Any,
) -> ModuleEngine:
    config = EngineConfig(
        optimizer,
        LRScheduleConfig(lr=1e-2, lr_decay_style="constant"),
        DataParallelConfig(**gathering(recipe, gathers_codes), **parallel),
        train_iters=8,
        compute_dtype="bf16",
        low_precision=low_precision(recipe),
    )
    options = {**SIZES, **(MIXTURE if "expert_model_parallel_size" in parallel else {})}
    own, world_size = rank_device(), dist.get_world_size()
    device, mesh = Device(own.type, own.index or 0), build_mesh(own.type, world_size)
    engine = build_engine(config, device, mesh, num_local_ranks=world_size)
    engine.initialize(lambda: GPTModel(TransformerConfig(**options), VOCAB))
    groups = {id(group): group for p in engine.model.parameters() if (group := group_of(p))}
    assert gathers_codes == any(group.codes is not None for group in groups.values())
    return engine


def same_attention() -> AbstractContextManager[None]:
    """While open, every kind of device computes attention by the same kernel."""
    return sdpa_kernel(SDPBackend.MATH)


def train(engine: ModuleEngine, steps: range, tensor_size: int = 1) -> list[tuple[float, float]]:
    """The loss and the gradients' norm of each step of two microbatches, which `tensor_size` ranks
    share.
    """
    found = []
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank() // tensor_size)
        windows = torch.randint(VOCAB, (2, 2, 13), generator=generator)
        batches = [
            {"tokens": w[:, :-1].contiguous(), "labels": w[:, 1:].contiguous()} for w in windows
        ]
        result = engine.train_batch(batches, lambda model, batch: model(**batch).mean())
        found.append((result.loss, result.grad_norm))
    return found


def expect_same(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    """Equal losses. Norms, in fp64 on the CPU, are added up group by group, and codes have other
    groups.
    """
    tolerance = 1e-12 if rank_device().type == "cpu" else 1e-6
    assert [loss for loss, _ in found] == [loss for loss, _ in expected]
    for (_, norm), (_, other) in zip(found, expected, strict=True):
        assert norm == pytest.approx(other, rel=tolerance)
