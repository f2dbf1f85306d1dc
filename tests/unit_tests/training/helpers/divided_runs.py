"""Models and data, with eight samples per step, to compare runs with different parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.config import ExecutionConfig
from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.multimodal.vision_language_model import Images
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.parts import freeze
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.spec import ModelSpec
from megatron.training.config import EngineConfig
from megatron.training.engines import ModuleEngine, build_engine
from megatron.training.model_loss import mean_of_all
from megatron.training.step import Batch, ForwardStep, StepResult
from megatron_hybrid.pretrain_gpt import forward_step_of
from tests.unit_tests.core.models.multimodal.helpers.their_images import image_batch
from tests.unit_tests.core.models.multimodal.helpers.vision_models import VISION
from tests.unit_tests.core.models.multimodal.helpers.vision_models import build as vision_model

VOCAB, SEQ, MICRO, GLOBAL = 64, 24, 2, 8
SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "group_query_attention": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 40,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method_std": 0.2,
}
MIXTURE: dict[str, Any] = {
    "num_experts": 8,
    "moe_ffn_hidden_size": 12,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 1e-2,
    "moe_shared_expert_intermediate_size": 16,
}
OFFLOADED = OptimizerConfig(
    optimizer_cpu_offload=True,
    overlap_cpu_optimizer_d2h_h2d=True,
    overlap_optimizer_with_forward=True,
)
MOVING = ExecutionConfig(
    activation_offload=True, activation_offload_gib=1e-3, activation_offload_min_kib=0.5
)


class Case(NamedTuple):
    """A model, and data to train it on.

    Attributes:
        model: options of TransformerConfig beyond `SHAPE`.
        has_documents: whether rows hold documents, of which some cross the cuts, and padding.
        has_images: whether the model reads images, of which each microbatch but one has five.
        expert_size: ranks that divide the experts.
        frozen: names of parts that are not trained.
    """

    model: dict[str, Any] = {}  # noqa: RUF012  only read
    has_documents: bool = False
    has_images: bool = False
    expert_size: int = 1
    frozen: tuple[str, ...] = ()

    @property
    def config(self) -> TransformerConfig:
        return TransformerConfig(**{**SHAPE, **self.model})

    def build(self) -> nn.Module:
        model: nn.Module
        if self.has_images:
            vision = replace(VISION, vision_deepstack_layers=(0,))
            model = vision_model(vision, VOCAB, **self.model)
        else:
            model = GPTModel(self.config, VOCAB)
        freeze(model, self.frozen, "--freeze")
        return model

    def forward_step(self) -> ForwardStep:
        return read_images if self.has_images else forward_step_of(self.spec, is_per_token=True)

    @property
    def spec(self) -> ModelSpec:
        return model_spec(self.config)


def read_images(model: nn.Module, batch: Batch) -> torch.Tensor:
    images = Images(batch["patches"], batch["grids"]) if batch["grids"] else None
    weights = mean_of_all(batch["labels"])
    loss: torch.Tensor = model(
        batch["tokens"],
        batch["labels"],
        images=images,
        positions=batch["positions"],
        loss_weights=weights,
    ).loss
    return loss


def engine_for(
    case: Case,
    optimizer: OptimizerConfig | None = None,
    execution: ExecutionConfig | None = None,
    **parallel: Any,
) -> ModuleEngine:
    """Builds an engine with the model of a case, on all ranks.

    Args:
        parallel: options of DataParallelConfig.
    """
    config = EngineConfig(
        optimizer or OptimizerConfig(),
        LRScheduleConfig(lr=1e-3, lr_decay_style="constant"),
        DataParallelConfig(expert_model_parallel_size=case.expert_size, **parallel),
        99,
        seed=7,
        execution=execution or ExecutionConfig(),
    )
    engine = build_engine(config, Device("cpu"), build_mesh("cpu", dist.get_world_size()))
    engine.initialize(case.build)
    return engine


def samples(step: int, case: Case) -> list[Batch]:
    """Returns the microbatches of a step over all ranks."""
    if case.has_images:
        return [_with_images(10 * step + number) for number in range(GLOBAL // MICRO)]

    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(VOCAB, (GLOBAL // MICRO, MICRO, SEQ + 1), generator=generator)
    # One microbatch has no loss in its second half, so the loss of some ranks is zero.
    masks = (torch.rand(rows[..., 1:].shape, generator=generator) < 0.7).float()
    masks[1, :, SEQ // 2 :] = 0.0
    # One microbatch of the second step has no loss at all.
    masks[2] *= step != 1
    found: list[Batch] = []
    for row, mask in zip(rows, masks, strict=True):
        batch: Batch = {"tokens": row[:, :-1], "labels": row[:, 1:].contiguous(), "loss_mask": mask}
        if case.has_documents:
            # The second row ends with padding, which covers some slices and half of another.
            batch |= {"lengths": (5, 12, 7, 3, 6, 15), "padding": (0, 15)}
            mask[1, 9:] = 0.0
        found.append(batch)
    return found


def _with_images(number: int) -> Batch:
    batch = image_batch()
    tokens = batch.tokens[:, :20]  # all but filler
    has_images = number != 11
    tokens = tokens if has_images else tokens % 7 + 1
    return {
        "tokens": tokens,
        "labels": (tokens + number) % VOCAB,
        "positions": batch.positions[..., :20],
        "patches": batch.images.patches + 0.1 * number,
        "grids": batch.images.grids if has_images else (),
    }


def own_samples(engine: ModuleEngine, step: int, case: Case) -> list[Batch]:
    """Returns this rank's microbatches, as from the loop's sampler."""
    parallel, mesh = engine.config.parallel, engine.mesh
    rank = parallel.data_parallel_rank(mesh.get_rank())
    return samples(step, case)[rank :: parallel.data_parallel_size(mesh.size())]


def train(engine: ModuleEngine, case: Case, steps: range = range(2)) -> list[StepResult]:
    return [
        engine.train_batch(own_samples(engine, step, case), case.forward_step()) for step in steps
    ]


def expect_same(found: list[StepResult], expected: list[StepResult]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)
        assert one.auxiliary == pytest.approx(other.auxiliary, rel=1e-6)
        assert one.num_samples == other.num_samples == GLOBAL
        if other.expert_load is not None:
            assert one.expert_load is not None
            assert torch.equal(one.expert_load, other.expert_load)
