"""Published models with mixtures of experts: their sizes, on meta, and what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.models.families.config_json import read_config
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hugging_face import hf_rows
from megatron.core.transformer.spec import (
    MoeSpec,
)
from tests.unit_tests.core.models.families.helpers.published import (
    DEEPSEEK_V3,
    GLM_4_5_AIR,
    GPT_OSS_20B,
)


def on_meta(content: dict[str, Any], num_layers: int | None = None) -> GPTModel:
    if num_layers is not None:
        content = content | {"num_hidden_layers": num_layers}
    with torch.device("meta"):
        return GPTModel(*read_config(content, "config.json"))


def num_parameters(model: GPTModel) -> tuple[int, int]:
    """All of a model, and those that compute a token: without other experts, and the embedding, of
    which it takes one row.
    """
    whole = active = 0
    for name, parameter in model.named_parameters():
        whole += parameter.numel()
        if ".experts." in name:
            router = next(
                layer.feed_forward.router
                for layer in model.spec.layers
                if isinstance(layer.feed_forward, MoeSpec)
            )
            active += parameter.numel() * router.top_k // router.num_experts
        elif "word_embeddings" not in name:
            active += parameter.numel()
    return whole, active


@pytest.mark.parametrize(
    ("content", "whole", "active"),
    [(GLM_4_5_AIR, 106.0, 12.0), (GPT_OSS_20B, 20.91, 3.61)],
    ids=["GLM-4.5-Air", "gpt-oss-20b"],
)
def test_parameters_are_as_many_as_published(
    content: dict[str, Any], whole: float, active: float
) -> None:
    # Whether embedding and output layer count among those of a token differs.
    counted = [number / 1e9 for number in num_parameters(on_meta(content))]
    assert counted == [pytest.approx(whole, rel=0.01), pytest.approx(active, rel=0.07)]


def test_every_tensor_of_deepseek_v3_has_a_place() -> None:
    model = on_meta(DEEPSEEK_V3, num_layers=4)
    names = {rows.name for rows in hf_rows(model).values()}
    layer = {name.removeprefix("model.layers.3.") for name in names if ".3." in name[:16]}
    assert {name for name in layer if ".experts." not in name} == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.q_a_proj.weight",
        "self_attn.q_a_layernorm.weight",
        "self_attn.q_b_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        "self_attn.kv_a_layernorm.weight",
        "self_attn.kv_b_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
        "mlp.shared_experts.down_proj.weight",
    }
    assert {name for name in layer if ".experts.255." in name} == {
        f"mlp.experts.255.{matrix}_proj.weight" for matrix in ("gate", "up", "down")
    }
    assert "model.layers.2.mlp.gate_proj.weight" in names, "the first layers are dense"
