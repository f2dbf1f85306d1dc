"""Fields of a config.json about latent attention."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from megatron.core.models.description import ModelDescription
from megatron.core.models.families.config_json import read_config
from megatron.core.models.hugging_face import hf_config
from megatron.core.options import ConfigError
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.spec import LatentAttentionSpec, YarnScaling
from tests.unit_tests.core.models.families.helpers.published import (
    DEEPSEEK_V3,
    MOONLIGHT_16B_A3B,
)

YARN = {
    "type": "yarn",
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
# Weights as files have them: both, one, none, zeros, nulls; and a factor that is given.
WEIGHTS: tuple[dict[str, Any], ...] = (
    {"mscale": 1.0, "mscale_all_dim": 1.0},
    {"mscale": 0.707, "mscale_all_dim": 0.707},
    {"mscale": 1.3, "mscale_all_dim": 0.6},
    {"mscale": 0.1, "mscale_all_dim": 2.5},
    {"mscale": 0.7},
    {"mscale_all_dim": 0.7},
    {"mscale": 0.7, "mscale_all_dim": 0},
    {"mscale": 0, "mscale_all_dim": 0.7},
    {"mscale": None, "mscale_all_dim": None},
    {},
    {"mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": 1.25},
)


def config_with(weights: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return MOONLIGHT_16B_A3B | {"rope_scaling": {**YARN, **weights, **changes}}


def mixer_of(content: dict[str, Any]) -> LatentAttentionSpec:
    mixer = model_spec(read_config(content, "c.json")[0]).layers[0].mixer
    assert isinstance(mixer, LatentAttentionSpec)
    return mixer


def factor_of(mixer: LatentAttentionSpec) -> float:
    assert mixer.rotary is not None
    assert isinstance(mixer.rotary.scaling, YarnScaling)
    return mixer.rotary.scaling.attention_factor


@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_scale_and_rotation_match_transformers(factor: float, weights: dict[str, Any]) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    content = config_with(weights, factor=factor)
    theirs = modeling.DeepseekV3Config(**json.loads(json.dumps(content)))
    with torch.device("meta"):
        scale = modeling.DeepseekV3Attention(theirs, 0).scaling
        rotation = modeling.DeepseekV3RotaryEmbedding(theirs).attention_scaling

    mixer = mixer_of(content)
    assert mixer.scale == pytest.approx(scale, rel=1e-12)
    assert factor_of(mixer) == pytest.approx(rotation, rel=1e-12)


@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_weights_are_found_again(factor: float, weights: dict[str, Any]) -> None:
    config, vocab_size = read_config(config_with(weights, factor=factor), "c.json")
    written = hf_config(ModelDescription(config, vocab_size))
    assert model_spec(read_config(written, "c.json")[0]) == model_spec(config)
    if factor > 1.0 and all(weights.get(name) for name in ("mscale", "mscale_all_dim")):
        section = written["rope_scaling"]
        assert section["mscale_all_dim"] == weights["mscale_all_dim"]
        if "attention_factor" not in weights:
            assert section["mscale"] == weights["mscale"]
            assert "attention_factor" not in section
        both = section | {"rope_theta": written["rope_theta"]}
        assert both == written["rope_parameters"]


def test_a_scale_that_no_weight_gives_is_named_by_its_flag() -> None:
    config, vocab_size = read_config(DEEPSEEK_V3 | {"num_hidden_layers": 4}, "c.json")
    values = {"softmax_scale": 0.01, "yarn_attention_factor": 1.0}
    with pytest.raises(ConfigError, match=r"^--softmax-scale: expected .* DeepseekV3ForCausalLM"):
        hf_config(ModelDescription(dataclasses.replace(config, **values), vocab_size))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 4}, "num_key_value_heads in c.json to be num_attention_heads, 16"),
        ({"attention_bias": True}, "attention_bias in c.json to be False, got True"),
        ({"scoring_func": "softmax"}, "scoring_func in c.json to be 'sigmoid', got 'softmax'"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}},
            "mscale in c.json to be missing where rope_type is not yarn, got 1.0",
        ),
        ({"rope_scaling": {**YARN, "mscale": -1.0}}, "mscale in c.json to be a number >= 0"),
        (
            {"rope_scaling": {**YARN, "factor": 10**400, "mscale_all_dim": 1.0}},
            "factor in c.json to be a number >= 0 and <= 1048576",
        ),
    ],
)
def test_what_latent_attention_does_not_have_is_rejected_by_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(MOONLIGHT_16B_A3B | changes, "c.json")


@pytest.mark.parametrize(("given", "expected"), [({}, True), ({"rope_interleave": None}, False)])
def test_neighbours_are_rotated_unless_the_file_says_otherwise_and_null_does(
    given: dict[str, Any], expected: bool
) -> None:
    content = {name: value for name, value in MOONLIGHT_16B_A3B.items() if name[:6] != "rope_i"}
    rotary = mixer_of(content | given).rotary
    assert rotary is not None
    assert rotary.is_interleaved is expected


def test_latent_attention_without_experts_has_no_architecture() -> None:
    config = TransformerConfig(1, 64, 4, normalization="RMSNorm", multi_latent_attention=True)
    for one in (config, dataclasses.replace(config, hf_architecture="deepseek_v3")):
        with pytest.raises(ConfigError, match=r"^--multi-latent-attention: expected --num-exp"):
            hf_config(ModelDescription(one, 64))
