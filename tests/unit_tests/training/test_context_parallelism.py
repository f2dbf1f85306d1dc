"""Training with each sequence divided over ranks computes what training with whole ones does.

Four ranks train the same eight samples in a step, whose rows two or four of them divide, or none.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.config import ExecutionConfig
from megatron.core.device import Device
from megatron.core.dist_checkpointing.formats import open_checkpoint
from megatron.core.dist_checkpointing.store import open_store
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.multimodal.vision_language_model import Images
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.spec import ModelSpec
from megatron.training.config import EngineConfig
from megatron.training.engine import SaveLoadMeta
from megatron.training.engines import ModuleEngine, build_engine
from megatron.training.model_loss import mean_of_all
from megatron.training.step import Batch, ForwardStep, StepResult
from megatron_hybrid.pretrain_gpt import forward_step_of
from tests.helpers.engine_contents import contents_of, differing
from tests.helpers.ranks import random_delays, run_ranks
from tests.unit_tests.core.models.multimodal.helpers.their_images import image_batch
from tests.unit_tests.core.models.multimodal.helpers.vision_models import VISION
from tests.unit_tests.core.models.multimodal.helpers.vision_models import build as vision_model

VOCAB, SEQ, MICRO, GLOBAL = 61, 24, 2, 8
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
    """

    model: dict[str, Any] = {}  # noqa: RUF012  only read
    has_documents: bool = False
    has_images: bool = False
    expert_size: int = 1

    @property
    def config(self) -> TransformerConfig:
        return TransformerConfig(**{**SHAPE, **self.model})

    def build(self) -> nn.Module:
        if self.has_images:
            return vision_model(replace(VISION, vision_deepstack_layers=(0,)))
        return GPTModel(self.config, VOCAB)

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


CASES = {
    "windows, sinks and softcaps": Case(
        {
            "window_size": (6, 0),
            "window_attn_skip_freq": "[1,0]",
            "softmax_type": "learnable",
            "attn_logit_softcapping": 5.0,
        }
    ),
    "latent attention": Case(
        {
            "multi_latent_attention": True,
            "group_query_attention": False,
            "num_query_groups": None,
            "kv_channels": None,
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_head_dim": 6,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 6,
        },
        has_documents=True,
    ),
    "delta nets and documents": Case(
        {
            "linear_attention_freq": "[1,0]",
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "attention_output_gate": True,
            "qk_layernorm": True,
        },
        has_documents=True,
    ),
    "experts on two ranks": Case({**MIXTURE, "z_loss_coeff": 1e-2}, expert_size=2),
    "documents and experts": Case(
        {**MIXTURE, "moe_router_load_balancing_type": "seq_aux_loss"},
        has_documents=True,
        expert_size=2,
    ),
    "images": Case(has_images=True),
}


def engine_of(
    case: Case,
    context_size: int,
    optimizer: OptimizerConfig | None = None,
    execution: ExecutionConfig | None = None,
    **parallel: Any,
) -> ModuleEngine:
    config = EngineConfig(
        optimizer or OptimizerConfig(),
        LRScheduleConfig(lr=1e-3, lr_decay_style="constant"),
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
    engine.initialize(case.build)
    return engine


def samples(step: int, case: Case) -> list[Batch]:
    """The microbatches of a step over all ranks."""
    if case.has_images:
        return [_with_images(10 * step + number) for number in range(GLOBAL // MICRO)]

    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(VOCAB, (GLOBAL // MICRO, MICRO, SEQ + 1), generator=generator)
    # One microbatch has nothing to learn in its second half: the loss of some ranks is zero.
    masks = (torch.rand(rows[..., 1:].shape, generator=generator) < 0.7).float()
    masks[1, :, SEQ // 2 :] = 0.0
    # And one of the second step has nothing at all.
    masks[2] *= step != 1
    found: list[Batch] = []
    for row, mask in zip(rows, masks, strict=True):
        batch: Batch = {"tokens": row[:, :-1], "labels": row[:, 1:].contiguous(), "loss_mask": mask}
        if case.has_documents:
            # The second row ends with padding, which all of some slices are, and half of another.
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
    """This rank's, as the loop's sampler deals them."""
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


def _compare(case: Case) -> None:
    whole = engine_of(case, 1)
    expected = train(whole, case)
    evaluation = whole.eval_batch(own_samples(whole, 5, case), case.forward_step())
    for size, kind in itertools.product((2, 4), ("a2a", "all_gather")):
        engine = engine_of(case, size, cp_comm_type=kind)
        expect_same(train(engine, case), expected)
        found = engine.eval_batch(own_samples(engine, 5, case), case.forward_step())
        assert found == pytest.approx(evaluation, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_losses_norms_and_loads_are_those_of_whole_sequences(name: str) -> None:
    run_ranks(4, _compare, CASES[name])


def _patches_in_the_tower() -> set[int]:
    case, seen = CASES["images"], set[int]()
    engine = engine_of(case, 4)
    engine.model.vision_model.register_forward_pre_hook(lambda _, inputs: seen.add(len(inputs[0])))
    train(engine, case, range(1))
    return seen


def test_ranks_that_divide_a_sequence_divide_its_images() -> None:
    # Images of 24, 4, 16, 8 and 4 patches.
    assert run_ranks(4, _patches_in_the_tower) == [{24}, {4}, {16}, {8 + 4}]


def _with_other_sharding() -> None:
    case = CASES["experts on two ranks"]
    expected = train(engine_of(case, 1), case)
    for strategy in ("no_shard", "optim", "optim_grads"):
        engine = engine_of(case, 2, data_parallel_sharding_strategy=strategy)
        expect_same(train(engine, case), expected)
    for outer in ("no_shard", "optim"):
        engine = engine_of(
            case, 4, num_distributed_optimizer_instances=2, outer_dp_sharding_strategy=outer
        )
        expect_same(train(engine, case), expected)


def test_sequences_are_divided_under_every_sharding_of_parameters() -> None:
    run_ranks(4, _with_other_sharding)


def _offloaded(name: str, kind: str, granularity: str | None) -> None:
    case = CASES[name]
    recomputing = case._replace(model={**case.model, "recompute_granularity": granularity})
    on_device = engine_of(case, 2, cp_comm_type=kind)
    results = train(on_device, case)
    with random_delays(seed=3):
        offloaded = engine_of(recomputing, 2, OFFLOADED, MOVING, cp_comm_type=kind)
        assert train(offloaded, case) == results
    assert differing(contents_of(offloaded), contents_of(on_device)) == []


@pytest.mark.parametrize("granularity", [None, "full", "selective"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("documents and experts", "a2a"), ("delta nets and documents", "all_gather")],
)
def test_neither_offloading_nor_recomputation_changes_a_bit(
    name: str, kind: str, granularity: str | None
) -> None:
    run_ranks(4, _offloaded, name, kind, granularity)


def _compiled() -> None:
    case = CASES["documents and experts"]
    expected = [result.loss for result in train(engine_of(case, 1), case)]
    engine = engine_of(case, 2, execution=ExecutionConfig(compile_layers=True))
    found = [result.loss for result in train(engine, case)]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.wide
def test_layers_are_compiled_around_what_ranks_exchange() -> None:
    run_ranks(2, _compiled)


def _saved(folder: str) -> None:
    """Saves the first state from whole sequences and from divided ones, and a later one."""
    case = CASES["experts on two ranks"]
    for size in (1, 4):
        engine = engine_of(case, size)
        engine.save(SaveLoadMeta(f"{folder}/first_{size}", with_optim=True))
    train(engine, case, range(1))
    engine.save(SaveLoadMeta(f"{folder}/later", with_optim=True))
    expected = train(engine, case, range(1, 3))

    for size in (1, 2):
        other = engine_of(case, size)
        other.load(SaveLoadMeta(f"{folder}/later", with_optim=True))
        assert other.step_info().consumed_samples == GLOBAL
        expect_same(train(other, case, range(1, 3)), expected)


def test_a_checkpoint_is_that_of_whole_sequences_and_resumes_with_others(tmp_path: Path) -> None:
    run_ranks(4, _saved, str(tmp_path))
    whole, divided = (
        open_checkpoint(open_store(str(tmp_path)), f"first_{size}") for size in (1, 4)
    )
    assert whole.tensors.keys() == divided.tensors.keys()
    files = sorted(path.name for path in (tmp_path / "first_1").glob("*.distcp"))
    assert len(files) == 4
    for name in files:
        one, other = ((tmp_path / f"first_{size}" / name).read_bytes() for size in (1, 4))
        assert one == other


def _exchanges_once_more() -> str:
    engine = engine_of(Case(), 2)
    train(engine, Case(), range(1))
    if dist.get_rank() == 1:
        engine.model.decoder.layers[1].self_attention.exchange._note(is_backward=True)
    with pytest.raises(RuntimeError) as caught:
        train(engine, Case(), range(1))
    return str(caught.value)


def test_ranks_that_do_not_exchange_alike_are_told_before_the_step() -> None:
    for message in run_ranks(2, _exchanges_once_more):
        assert "rank 1 exchanged gradients of tokens for decoder.layers.1" in message


def _uneven() -> None:
    engine = engine_of(Case(), 4)
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"4 ranks .* 6 positions"):
        engine.model(tokens, tokens)


def test_sequences_that_ranks_cannot_divide_are_refused() -> None:
    run_ranks(4, _uneven)
