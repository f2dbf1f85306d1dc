"""Muon's matrices: which parameters of each kind of model it updates, and in which parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.multimodal.vision_config import VisionConfig
from megatron.core.models.multimodal.vision_language_model import VisionLanguageModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.optimizer.torch_optimizer import format_muon_groups, parameter_groups
from megatron.core.transformer.config import TransformerConfig
from megatron.training.config import EngineConfig
from megatron.training.engines import build_engine
from tests.helpers.ranks import on_ranks

SIZES: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "normalization": "RMSNorm",
}
GATED = {**SIZES, "swiglu": True, "add_bias_linear": False}
EXPERTS = {**GATED, "num_experts": 3, "moe_ffn_hidden_size": 12, "moe_router_topk": 2}
LATENT = {
    **GATED,
    "position_embedding_type": "rope",
    "multi_latent_attention": True,
    "kv_lora_rank": 8,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 7,
}
VISION = VisionConfig(
    vision_num_layers=1,
    vision_hidden_size=24,
    vision_ffn_hidden_size=20,
    vision_num_attention_heads=3,
    vision_patch_size=4,
    vision_num_position_embeddings=25,
    image_token_id=3,
)
QKV, MLP = {"self_attention.linear_qkv": (32, 32, 32), "self_attention.linear_proj": (32,)}, {}
QKV_OF_GROUPS = {"self_attention.linear_qkv": (32, 16, 16), "self_attention.linear_proj": (32,)}
GATED_MLP = {"mlp.linear_fc1": (48, 48), "mlp.linear_fc2": (32,)}
LATENT_PARTS = {
    "self_attention.linear_kv_down_proj": (8, 2),
    "self_attention.linear_kv_up_proj": (24, 28),
    "self_attention.linear_proj": (32,),
}

# Every matrix of a layer by its name without ".weight", and the rows of its parts.
MODELS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "without gates": (SIZES, {**QKV, "mlp.linear_fc1": (48,), "mlp.linear_fc2": (32,)}),
    "untied": ({**GATED, "untie_embeddings_and_output_weights": True}, {**QKV, **GATED_MLP}),
    "grouped queries": (
        {**GATED, "group_query_attention": True, "num_query_groups": 2},
        {**QKV_OF_GROUPS, **GATED_MLP},
    ),
    "output gate": (
        {**GATED, "attention_output_gate": True, "num_query_groups": 2}
        | {"group_query_attention": True},
        {**QKV_OF_GROUPS, "self_attention.linear_qkv": (32, 32, 16, 16), **GATED_MLP},
    ),
    "latent attention": (
        {**LATENT, "q_lora_rank": 5},
        {
            "self_attention.linear_q_down_proj": (5,),
            "self_attention.linear_q_up_proj": (32,),
            **LATENT_PARTS,
            **GATED_MLP,
        },
    ),
    "latent keys only": (
        LATENT,
        {"self_attention.linear_q_proj": (32,), **LATENT_PARTS, **GATED_MLP},
    ),
    "delta net": (
        {
            **GATED,
            "linear_attention_freq": "[1]",
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 6,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        {
            "self_attention.in_proj": (8, 8, 24, 24, 4, 4),
            "self_attention.out_proj": (32,),
            **GATED_MLP,
        },
    ),
    "experts": (
        {
            **EXPERTS,
            "moe_shared_expert_intermediate_size": 9,
            "moe_shared_expert_gate": True,
        },
        {
            **QKV,
            "mlp.experts.linear_fc1": (12,) * 6,
            "mlp.experts.linear_fc2": (32,) * 3,
            "mlp.shared_experts.linear_fc1": (9, 9),
            "mlp.shared_experts.linear_fc2": (32,),
        },
    ),
    "experts with input rows": (
        {**EXPERTS, "moe_expert_rows": "inputs"},
        {
            **QKV,
            "mlp.experts.linear_fc1": (32,) * 3,
            "mlp.experts.linear_fc2": (12,) * 3,
        },
    ),
}


def build(options: dict[str, Any]) -> GPTModel:
    with torch.device("meta"):
        return GPTModel(TransformerConfig(**options), 40)


def rows_by_name(model: nn.Module, **options: Any) -> dict[str, tuple[int, ...] | None]:
    """The rows of each trained parameter's matrices; None: the scalar optimizer's."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, tuple[int, ...] | None] = {}
    for group in parameter_groups(model, OptimizerConfig(optimizer="muon", **options)):
        rows = group["matrix_rows"] if group["use_muon"] else [None] * len(group["params"])
        assert ("matrix_rows" in group) == group["use_muon"]
        for parameter, own in zip(group["params"], rows, strict=True):
            assert names[parameter] not in found, "one group each"
            assert own is None or sum(own) == parameter.shape[0]
            found[names[parameter]] = own
    return found


def matrices(model: nn.Module, **options: Any) -> dict[str, tuple[int, ...]]:
    return {
        name.removesuffix(".weight"): rows
        for name, rows in rows_by_name(model, **options).items()
        if rows is not None
    }


def in_layer(parts: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"decoder.layers.0.{name}": rows for name, rows in parts.items()}


@pytest.mark.parametrize(("options", "expected"), MODELS.values(), ids=MODELS)
def test_muon_updates_the_matrices_of_hidden_layers_each_in_its_parts(options, expected):
    model = build(options)
    assert matrices(model) == in_layer(expected)
    assert len(rows_by_name(model)) == len([*model.parameters()]), "all others have a group, too"


def test_a_model_that_reads_images_has_matrices_in_both_halves():
    with torch.device("meta"):
        model = VisionLanguageModel(TransformerConfig(**GATED), VISION, 40)
    assert matrices(model) == {
        **{f"language_model.{n}": rows for n, rows in in_layer({**QKV, **GATED_MLP}).items()},
        "vision_model.layers.0.self_attention.linear_qkv": (24, 24, 24),
        "vision_model.layers.0.self_attention.linear_proj": (24,),
        "vision_model.layers.0.mlp.linear_fc1": (20,),
        "vision_model.layers.0.mlp.linear_fc2": (24,),
        "vision_projection.linear_fc1": (96,),
        "vision_projection.linear_fc2": (32,),
    }


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("output gate", {"linear_qkv": (8,) * 12}),
        (
            "latent attention",
            {"linear_q_up_proj": (8,) * 4, "linear_kv_up_proj": (6,) * 4 + (7,) * 4},
        ),
        ("latent keys only", {"linear_q_proj": (8,) * 4}),
        ("delta net", {"in_proj": (4,) * 4 + (6,) * 8 + (4, 4)}),
    ],
)
def test_split_heads_makes_a_matrix_of_every_head_and_changes_no_other(model, expected):
    options, whole = MODELS[model]
    changed = {f"self_attention.{name}": rows for name, rows in expected.items()}
    if model == "latent keys only":
        changed["self_attention.linear_kv_up_proj"] = (6,) * 4 + (7,) * 4
    assert matrices(build(options), muon_split_heads=True) == in_layer({**whole, **changed})


def test_frozen_weights_have_no_group_and_factors_and_decay_divide_muons_groups():
    model = build(GATED)
    model.get_parameter("decoder.layers.0.mlp.linear_fc1.weight").requires_grad_(False)
    groups = parameter_groups(
        model,
        OptimizerConfig(
            optimizer="muon", weight_decay=0.3, lr_multipliers=("decoder.layers.0.mlp=0.5",)
        ),
    )
    names = {parameter: name for name, parameter in model.named_parameters()}
    layer = "decoder.layers.0."
    assert [
        (
            [names[p].removeprefix(layer).removesuffix(".weight") for p in group["params"]],
            (group["use_muon"], group["weight_decay"], group.get("lr_mult")),
        )
        for group in groups
    ] == [
        (["self_attention.linear_qkv", "self_attention.linear_proj"], (True, 0.3, None)),
        (["embedding.word_embeddings"], (False, 0.3, None)),
        (
            ["input_layernorm", "pre_mlp_layernorm", "decoder.final_layernorm"],
            (False, 0.0, None),
        ),
        (["mlp.linear_fc2"], (True, 0.3, 0.5)),
    ]


def test_plain_linear_layers_are_matrices_unless_they_share_their_weight_or_have_one_row():
    model = nn.ModuleDict(
        {
            "words": nn.Embedding(7, 4),
            "inner": nn.Linear(4, 5),
            "score": nn.Linear(5, 1),
            "head": nn.Linear(4, 7),
            "kernel": nn.Conv1d(4, 4, 3),
        }
    )
    model["head"].weight = model["words"].weight
    assert matrices(model) == {"inner": (5,)}


@on_ranks(2)
def test_sharded_models_have_the_matrices_of_whole_ones():
    options, expected = MODELS["experts"]
    for config in (
        DataParallelConfig(),
        DataParallelConfig(expert_model_parallel_size=2),
        DataParallelConfig(use_torch_fsdp2=True),
    ):
        model = GPTModel(TransformerConfig(**{**options, "num_experts": 4}), 40)
        engine = build_engine(
            EngineConfig(OptimizerConfig(), LRScheduleConfig(lr=0.1), config, train_iters=1),
            Device("cpu"),
            build_mesh("cpu", 2),
        )
        engine.initialize(model)
        four = {
            "mlp.experts.linear_fc1": (12,) * 8,
            "mlp.experts.linear_fc2": (32,) * 4,
        }
        assert matrices(model) == in_layer({**expected, **four})


def test_the_table_has_a_line_for_the_same_weights_of_all_layers():
    model = build({**EXPERTS, "num_layers": 2, "group_query_attention": True})
    groups = parameter_groups(model, OptimizerConfig(optimizer="muon"))
    lines = [line.split(maxsplit=2) for line in format_muon_groups(model, groups).splitlines()]
    rows = {name.removeprefix("decoder.layers.*."): rest for name, *rest in lines}
    assert len(rows) == len(lines) == 9
    assert rows["self_attention.linear_qkv.weight"] == ["muon", "2 x (32, 2 x 8) x 32"]
    assert rows["mlp.experts.linear_fc1.weight"] == ["muon", "2 x (6 x 12) x 32"]
    assert rows["mlp.experts.linear_fc2.weight"] == ["muon", "2 x (3 x 32) x 12"]
    assert rows["mlp.router.weight"] == ["adam", "2 x 3 x 32"]
    assert rows["embedding.word_embeddings.weight"] == ["adam", "1 x 40 x 32"]
