"""Published models with mixtures of experts: their sizes, on meta, and what they compute."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.core.models.families.config_json import read_config
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hugging_face import hf_rows
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.spec import (
    AttentionSpec,
    LatentAttentionSpec,
    MoeSpec,
    Sinks,
    YarnScaling,
)
from tests.unit_tests.core.models.families.helpers.published_mixtures import (
    DEEPSEEK_V3,
    GLM_4_5_AIR,
    GPT_OSS_20B,
    MOONLIGHT_16B_A3B,
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
    [(DEEPSEEK_V3, 671.0, 37.0), (GLM_4_5_AIR, 106.0, 12.0), (GPT_OSS_20B, 20.91, 3.61)],
    ids=["DeepSeek-V3", "GLM-4.5-Air", "gpt-oss-20b"],
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


def test_deepseek_v3_attends_with_yarns_scale_and_plain_rotations() -> None:
    mixers = {layer.mixer for layer in model_spec(read_config(DEEPSEEK_V3, "c.json")[0]).layers}
    (mixer,) = mixers
    assert isinstance(mixer, LatentAttentionSpec)
    assert mixer.scale == pytest.approx((1 + 0.1 * math.log(40)) ** 2 / math.sqrt(192))
    assert mixer.rotary is not None
    assert mixer.rotary.is_interleaved
    assert isinstance(mixer.rotary.scaling, YarnScaling)
    assert mixer.rotary.scaling.attention_factor == 1.0


def test_norms_of_latents_have_the_librarys_epsilon_whatever_the_others_have() -> None:
    spec = model_spec(read_config(MOONLIGHT_16B_A3B, "c.json")[0])
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, LatentAttentionSpec)
    assert mixer.latent_norm is not None
    assert (mixer.query_rank, mixer.latent_norm.eps, spec.final_norm.eps) == (None, 1e-6, 1e-5)


def test_gpt_oss_is_made_of_parts_that_others_have() -> None:
    layers = model_spec(read_config(GPT_OSS_20B, "c.json")[0]).layers
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionSpec)]
    assert [mixer.window for mixer in mixers] == [128, None] * 12
    assert {(one.sinks, one.has_qkv_bias, one.has_output_bias) for one in mixers} == {
        (Sinks.LEARNED, True, True)
    }
    (mixture,) = {layer.feed_forward for layer in layers}
    assert isinstance(mixture, MoeSpec)
    assert mixture.rows_are_inputs
    assert mixture.router.has_bias
    assert not mixture.router.is_scored_first
    assert (mixture.expert.clamp, mixture.expert.up_offset, mixture.expert.size) == (7.0, 1.0, 2880)
