"""Training with each sequence divided over ranks computes what training with whole ones does.

Four ranks train the same eight samples in a step, whose rows two or four of them divide, or none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron.core.config import ExecutionConfig
from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.layer_specs import model_spec
from megatron.training.config import EngineConfig
from megatron.training.engines import ModuleEngine, build_engine
from megatron.training.step import Batch, StepResult
from megatron_hybrid.pretrain_gpt import forward_step_of
from tests.helpers.ranks import run_ranks

VOCAB, SEQ, MICRO, GLOBAL = 61, 24, 2, 8
SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "ffn_hidden_size": 40,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method_std": 0.2,
}
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
MIXTURE = {
    "num_experts": 8,
    "moe_ffn_hidden_size": 12,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 1e-2,
    "moe_shared_expert_intermediate_size": 16,
}


class Case(NamedTuple):
    """A model, and data to train it on.

    Attributes:
        model: options of TransformerConfig beyond `SHAPE`.
        has_documents: whether rows hold documents, of which some cross the cuts, and padding.
        expert_size: ranks that divide the experts.
    """

    model: dict[str, Any]
    has_documents: bool = False
    expert_size: int = 1


CASES = {
    "grouped queries and a z-loss": Case({**GROUPED, "z_loss_coeff": 1e-2}),
    "experts on two ranks": Case({**GROUPED, **MIXTURE}, expert_size=2),
    "documents and experts": Case(
        {**GROUPED, **MIXTURE, "moe_router_load_balancing_type": "seq_aux_loss"},
        has_documents=True,
        expert_size=2,
    ),
}


def build(
    case: Case,
    context_size: int,
    optimizer: OptimizerConfig | None = None,
    execution: ExecutionConfig | None = None,
    **parallel: Any,
) -> ModuleEngine:
    config = EngineConfig(
        optimizer or OptimizerConfig(),
        LRScheduleConfig(lr=1e-2, lr_decay_style="constant"),
        DataParallelConfig(
            context_parallel_size=context_size,
            expert_model_parallel_size=case.expert_size,
            **parallel,
        ),
        99,
        seed=7,
        execution=execution or ExecutionConfig(),
    )
    engine = build_engine(config, Device("cpu"), build_mesh("cpu", dist.get_world_size()))
    engine.initialize(lambda: GPTModel(TransformerConfig(**{**SHAPE, **case.model}), VOCAB))
    return engine


def samples(step: int, case: Case) -> list[Batch]:
    """The microbatches of a step over all ranks."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(VOCAB, (GLOBAL // MICRO, MICRO, SEQ + 1), generator=generator)
    # One microbatch has nothing to learn in its second half: the loss of some ranks is zero.
    masks = (torch.rand(rows[..., 1:].shape, generator=generator) < 0.7).float()
    masks[1, :, SEQ // 2 :] = 0.0
    found = []
    for row, mask in zip(rows, masks, strict=True):
        batch: Batch = {"tokens": row[:, :-1], "labels": row[:, 1:].contiguous(), "loss_mask": mask}
        if case.has_documents:
            # Four slices of the batch have 12 positions each; one is half padding, one all of it.
            batch |= {"lengths": (5, 12, 7, 3, 4, 17), "padding": (0, 17)}
            batch["loss_mask"] = mask * torch.tensor([[1.0] * SEQ, [1.0] * 7 + [0.0] * 17])
        found.append(batch)
    return found


def own_samples(engine: ModuleEngine, step: int, case: Case) -> list[Batch]:
    """This rank's, as the loop's sampler deals them."""
    parallel, mesh = engine.config.parallel, engine.mesh
    rank = parallel.data_parallel_rank(mesh.get_rank())
    return samples(step, case)[rank :: parallel.data_parallel_size(mesh.size())]


def train(engine: ModuleEngine, case: Case, steps: range = range(2)) -> list[StepResult]:
    spec = model_spec(TransformerConfig(**{**SHAPE, **case.model}))
    forward_step = forward_step_of(spec, is_per_token=True)
    return [engine.train_batch(own_samples(engine, step, case), forward_step) for step in steps]


def expect_same(found: list[StepResult], expected: list[StepResult]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)
        assert one.auxiliary == pytest.approx(other.auxiliary, rel=1e-6)
        assert one.num_samples == other.num_samples == GLOBAL
        if other.expert_load is not None:
            assert one.expert_load is not None
            assert torch.equal(one.expert_load, other.expert_load)


def _compare(name: str, sizes: tuple[int, ...], **parallel: Any) -> None:
    case = CASES[name]
    whole = build(case, 1)
    expected = train(whole, case)
    forward_step = forward_step_of(model_spec(TransformerConfig(**{**SHAPE, **case.model})))
    evaluation = whole.eval_batch(own_samples(whole, 5, case), forward_step)
    for size in sizes:
        engine = build(case, size, **parallel)
        expect_same(train(engine, case), expected)
        found = engine.eval_batch(own_samples(engine, 5, case), forward_step)
        assert found == pytest.approx(evaluation, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_losses_norms_and_loads_are_those_of_whole_sequences(name: str) -> None:
    run_ranks(4, _compare, name, (2, 4))
