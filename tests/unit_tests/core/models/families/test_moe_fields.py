"""Fields of a config.json about mixtures of experts: their meaning, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.models.description import ModelDescription
from megatron.core.models.families.config_json import read_config
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hugging_face import hf_config, hf_rows
from megatron.core.options import ConfigError
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.spec import RouterSpec
from tests.unit_tests.core.models.families.helpers.published import (
    DEEPSEEK_V3,
    GLM_4_5_AIR,
    GPT_OSS_20B,
    OLMOE_1B_7B,
    QWEN3_30B_A3B,
)


def without(content: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name not in names}


def router_of(content: dict[str, Any]) -> RouterSpec:
    return model_spec(read_config(content, "c.json")[0]).mixtures[0].router


@pytest.mark.parametrize("content", [QWEN3_30B_A3B, OLMOE_1B_7B, DEEPSEEK_V3, GLM_4_5_AIR])
@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize("top_k", [1, 8])
def test_normalized_weights_come_back_as_they_were(
    content: dict[str, Any], is_normalized: bool, top_k: int
) -> None:
    changes = {"norm_topk_prob": is_normalized, "num_experts_per_tok": top_k}
    config, vocab_size = read_config(content | changes, "c.json")
    router = model_spec(config).mixtures[0].router
    assert (router.is_normalized or not router.is_scored_first) is is_normalized
    written = hf_config(ModelDescription(config, vocab_size))
    assert {name: written[name] for name in changes} == changes
    assert router_of(written) == router


@pytest.mark.parametrize("content", [DEEPSEEK_V3, GLM_4_5_AIR])
def test_shared_experts_are_as_many_as_the_file_says_which_must_say_it(
    content: dict[str, Any],
) -> None:
    def shared(count: int) -> object:
        changed = content | {"n_shared_experts": count, "moe_intermediate_size": 10}
        mixture = model_spec(read_config(changed, "c.json")[0]).mixtures[0]
        return None if mixture.shared is None else mixture.shared.size

    assert (shared(0), shared(3)) == (None, 30)
    with pytest.raises(ConfigError, match=r"^Expected n_shared_experts in c\.json, got none\.$"):
        read_config(without(content, "n_shared_experts"), "c.json")


@pytest.mark.parametrize("others", [(), ("rope_scaling",), ("rope_parameters",)])
def test_gpt_oss_without_a_section_of_its_rotary_embedding_is_rejected(
    others: tuple[str, ...],
) -> None:
    sections = ("rope_parameters", "rope_scaling")
    content = without(GPT_OSS_20B, *sections) | {"rope_theta": 150000.0}
    with pytest.raises(
        ConfigError, match=r"^Expected rope_parameters or rope_scaling in c\.json, got none\.$"
    ):
        read_config(content | dict.fromkeys(others), "c.json")


def test_gpt_oss_has_a_window_in_every_other_layer_if_its_file_lists_none() -> None:
    assert read_config(without(GPT_OSS_20B, "layer_types"), "c") == read_config(GPT_OSS_20B, "c")


NO_EXPERTS = r"^Expected at least one layer with experts in c\.json, got none\.$"


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (DEEPSEEK_V3, {"first_k_dense_replace": 61}, NO_EXPERTS),
        (GLM_4_5_AIR, {"first_k_dense_replace": 99}, NO_EXPERTS),
        (QWEN3_30B_A3B, {"mlp_only_layers": list(range(48))}, NO_EXPERTS),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 49}, NO_EXPERTS),
        (OLMOE_1B_7B, {"clip_qkv": 0.0}, r"^Expected clip_qkv in c\.json to be None, got 0\.0\.$"),
        (
            DEEPSEEK_V3,
            {"n_group": 256, "topk_group": 16},
            r"^Expected n_group in c\.json to be at most half of 256 experts, got 256\.$",
        ),
    ],
)
def test_what_the_library_or_the_architecture_cannot_run_is_rejected_in_one_line(
    content: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(content | changes, "c.json")


def test_every_tensor_of_deepseek_v3_has_a_place() -> None:
    with torch.device("meta"):
        model = GPTModel(*read_config(DEEPSEEK_V3 | {"num_hidden_layers": 4}, "config.json"))
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
