"""The config.json of published models, read and written again; and refusals by name."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from typing import Any

import pytest
import torch

from megatron.core.models.description import ModelDescription
from megatron.core.models.families.config_json import read_config
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hugging_face import config_differences, hf_config
from megatron.core.options import ConfigError
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.spec import (
    AttentionSpec,
    LinearScaling,
    ModelSpec,
    RotarySpec,
)
from tests.unit_tests.core.models.families.helpers.published import (
    GEMMA_3_1B,
    LLAMA_3_2_1B,
    PUBLISHED,
    QWEN2_5_7B,
    QWEN3_5_35B_A3B_TEXT,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B_A3B,
    SMOLLM3_3B,
    STABLELM_2_1_6B,
)

# Where a file comes from, and what training and generation draw on.
UNWRITTEN = {
    "attention_dropout",
    "cache_implementation",
    "dtype",
    "embedding_dropout",
    "layer_types",
    "mamba_ssm_dtype",
    "max_window_layers",
    "mlp_only_layers",
    "mlp_type",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "norm_type",
    "pretraining_tp",
    "residual_dropout",
    "sliding_window",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "use_mrope",
}


def spec_of(content: dict[str, Any], **changes: Any) -> ModelSpec:
    return model_spec(read_config(content | changes, "config.json")[0])


def attention(spec: ModelSpec, layer: int) -> AttentionSpec:
    mixer = spec.layers[layer].mixer
    assert isinstance(mixer, AttentionSpec)
    return mixer


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_comes_back_as_it_was(name: str) -> None:
    content = PUBLISHED[name]
    config, vocab_size = read_config(content, "config.json")
    written = json.loads(json.dumps(hf_config(ModelDescription(config, vocab_size))))

    again, num_rows = read_config(written, "config.json")
    assert (model_spec(again), num_rows) == (model_spec(config), vocab_size)
    # The options, too, but for what YaRN derives from its factor,
    # and the width of an MLP that no layer has.
    unwritten = set(UNWRITTEN)
    if config.num_experts is not None and all(config.expert_layers()):
        again = dataclasses.replace(again, ffn_hidden_size=config.ffn_hidden_size)
        unwritten.add("intermediate_size")
    assert config in (again, dataclasses.replace(again, yarn_attention_factor=None))
    assert config_differences(content, "config.json", ModelDescription(config, vocab_size)) == []
    # Value by value, in the names of the version that wrote it. The null of a file is a default.
    for field, value in content.items():
        is_described = field in written and field not in unwritten
        if is_described and value is not None and not field.endswith("token_id"):
            if isinstance(value, dict):
                assert _older(value).items() <= _older(written[field]).items()
            else:
                assert written[field] == value


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_library_reads_a_published_config_as_it_is_read_here(name: str) -> None:
    """Its values for fields of earlier versions, and for missing ones, are in its module."""
    transformers = pytest.importorskip("transformers")
    content = PUBLISHED[name]
    # A copy, since the library writes into sections that it is given.
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(content))
    written = json.loads(theirs.to_json_string(use_diff=False))
    assert spec_of(written) == spec_of(content)


def _older(section: dict[str, Any]) -> dict[str, Any]:
    """A rotary section without what text does not need, and with one name for its kind."""
    return {
        {"type": "rope_type"}.get(name, name): value
        for name, value in section.items()
        if not name.startswith("mrope")
    }


def test_qwen_has_windows_where_they_are_switched_on() -> None:
    assert {layer.mixer.window for layer in spec_of(QWEN2_5_7B).layers} == {None}
    assert {layer.mixer.window for layer in spec_of(QWEN3_8B).layers} == {None}
    content = QWEN2_5_7B | {"use_sliding_window": True, "sliding_window": 64}
    assert {layer.mixer.window for layer in spec_of(content).layers} == {None}
    windows = [layer.mixer.window for layer in spec_of(content, max_window_layers=20).layers]
    assert windows == [None] * 20 + [64] * 8
    types = ["sliding_attention", "full_attention"] * 14
    windows = [layer.mixer.window for layer in spec_of(content, layer_types=types).layers]
    assert windows == [64, None] * 14


def test_gemma_3_has_a_base_for_each_kind_of_layer() -> None:
    spec = spec_of(GEMMA_3_1B)
    windows = [layer.mixer.window for layer in spec.layers]
    assert windows == ([512] * 5 + [None]) * 4 + [512] * 2
    assert attention(spec, 0).rotary == RotarySpec(256, 10000.0)
    assert attention(spec, 5).rotary == RotarySpec(256, 1000000.0)
    assert attention(spec, 0).scale == 1 / 16
    assert spec.embedding_scale == pytest.approx(1152**0.5)
    assert spec.is_tied, "its file does not specify it"
    assert spec.layers[0].post_norm == spec.final_norm

    scaled = spec_of(GEMMA_3_1B, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert attention(scaled, 0).rotary == RotarySpec(256, 10000.0)
    assert attention(scaled, 5).rotary == RotarySpec(256, 1000000.0, LinearScaling(8.0))
    everywhere = spec_of(GEMMA_3_1B, sliding_window_pattern=1)
    assert {layer.mixer.window for layer in everywhere.layers} == {None}


def test_smollm_3_leaves_every_fourth_layer_unrotated() -> None:
    rotated = [attention(spec_of(SMOLLM3_3B), layer).rotary is not None for layer in range(36)]
    assert rotated == [True, True, True, False] * 9
    assert spec_of(SMOLLM3_3B, no_rope_layers=None) == spec_of(SMOLLM3_3B)


def test_a_share_of_rotated_channels_comes_back_as_the_same_number_of_channels() -> None:
    """30 / 44, as a floating-point number, is less than 30 of 44 channels."""
    assert int(44 * (30 / 44)) == 29
    config, vocab_size = read_config(
        STABLELM_2_1_6B
        | {"hidden_size": 88, "num_attention_heads": 2, "num_key_value_heads": 2}
        | {"partial_rotary_factor": 0.69},
        "config.json",
    )
    assert attention(model_spec(config), 0).rotary == RotarySpec(30, 1e4)

    written = hf_config(ModelDescription(config, vocab_size))
    assert int(44 * written["partial_rotary_factor"]) == 30
    assert spec_of(written) == model_spec(config)


# Parameters in billions, all and the active ones of a token, which their cards round.
NUM_PARAMETERS = {
    "Qwen3 8B": (8.19, 8.19),
    "Qwen3 30B-A3B": (30.53, 3.35),
    "Qwen3.5 35B-A3B text": (34.66, 3.45),
    "OLMoE 1B-7B": (6.92, 1.28),
    "gpt-oss-20b": (20.91, 4.19),  # its card leaves out the embedding, 0.58
}


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_a_published_model_has_the_parameters_that_its_card_says(name: str) -> None:
    config, vocab_size = read_config(PUBLISHED[name], "config.json")
    with torch.device("meta"):
        model = GPTModel(config, vocab_size)
    total = sum(parameter.numel() for parameter in model.parameters())
    idle = sum(
        parameter.numel() * (1 - config.moe_router_topk / (config.num_experts or 1))
        for name, parameter in model.named_parameters()
        if ".experts." in name
    )
    assert (round(total / 1e9, 2), round((total - idle) / 1e9, 2)) == NUM_PARAMETERS[name]


def test_architectures_that_compute_the_same_keep_their_names() -> None:
    """Qwen3-Next and Qwen3.5 differ in how a delta net's weights are stored."""
    content = QWEN3_5_35B_A3B_TEXT
    config, vocab_size = read_config(content, "config.json")
    assert config.hf_architecture == "qwen3_5_moe_text"
    assert hf_config(ModelDescription(config, vocab_size))["model_type"] == "qwen3_5_moe_text"
    unknown = dataclasses.replace(config, hf_architecture=None)
    assert hf_config(ModelDescription(unknown, vocab_size))["model_type"] == "qwen3_next"
    # One that does not fit is no preference.
    other = dataclasses.replace(config, hf_architecture="llama")
    assert hf_config(ModelDescription(other, vocab_size))["model_type"] == "qwen3_next"


REFUSED = [
    (
        QWEN3_30B_A3B,
        {"num_local_experts": 64},
        "num_local_experts in c.json to be num_experts, 128, got 64",
    ),
    (QWEN3_NEXT_80B_A3B, {"shared_expert_intermediate_size": None}, "shared_expert_.* a value"),
    (
        LLAMA_3_2_1B,
        {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}},
        "model_type of llama, .* got .qwen3_5., a model of more than text",
    ),
    (LLAMA_3_2_1B, {"hidden_act": "relu"}, "hidden_act in c.json to be one of silu, .* got 'relu'"),
    (LLAMA_3_2_1B, {"sliding_window": 64}, "fields of llama .* got sliding_window 64"),
    (LLAMA_3_2_1B, {"tie_word_embeddings": None}, "tie_word_embeddings in c.json to be a value"),
    (
        LLAMA_3_2_1B,
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type in c.json to be one of default, linear, llama3, yarn, got 'dynamic'",
    ),
    (
        LLAMA_3_2_1B,
        {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
        "Expected low_freq_factor of a rotary embedding of type llama3 in c.json, got none",
    ),
    (
        LLAMA_3_2_1B,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        "rope_type in rope_scaling in c.json to be 'default' as elsewhere, got 'llama3'",
    ),
    (
        QWEN3_8B,
        {"layer_types": ["sliding_attention"] * 36},
        "use_sliding_window in c.json to be given where layer_types has sliding_attention",
    ),
    (
        QWEN3_8B,
        {"layer_types": ["chunked_attention"] * 36},
        "layer_types in c.json to be 36 times sliding_attention or full_attention",
    ),
    (GEMMA_3_1B, {"num_hidden_layers": 10**9}, "num_hidden_layers .* <= 65536, got 1000000000"),
    (GEMMA_3_1B, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar .* a number > 0, got 0"),
    (
        GEMMA_3_1B,
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default"},
                "sliding_attention": {"rope_type": "linear", "factor": 8.0},
            }
        },
        "rope_type in c.json to be one of default, got 'linear'",
    ),
    (SMOLLM3_3B, {"no_rope_layers": [1, 2] * 18}, "no_rope_layers .* 0 or 1 for each of 36"),
    (GEMMA_3_1B, {"hidden_size": 10**400}, "hidden_size .* an integer of at most 63 bits"),
]


@pytest.mark.parametrize(("content", "changes", "message"), REFUSED)
def test_what_a_model_here_does_not_have_is_rejected_by_name_and_value(
    content: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(content | changes, "c.json")
    assert "\n" not in str(caught.value)


# Of each, what decides arithmetic and has had other defaults, or none.
NEEDED = {
    "Llama 3.2 1B": ("hidden_act", "tie_word_embeddings", "rms_norm_eps", "num_attention_heads"),
    "Qwen3.5 27B text": ("head_dim", "linear_conv_kernel_dim", "tie_word_embeddings"),
    "Qwen3 30B-A3B": (
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
    ),
    "OLMoE 1B-7B": ("num_experts", "norm_topk_prob", "intermediate_size"),
    "Gemma 3 1B": (
        "query_pre_attn_scalar",
        "hidden_activation",
        "sliding_window",
        "sliding_window_pattern",
        "rope_theta",
        "rope_local_base_freq",
    ),
    "StarCoder2 3B": ("use_bias", "hidden_act", "norm_epsilon"),
    "StableLM 2 1.6B": ("layer_norm_eps", "num_key_value_heads"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_field_that_decides_arithmetic_must_be_there(name: str) -> None:
    for field in NEEDED[name]:
        content = {key: value for key, value in PUBLISHED[name].items() if key != field}
        with pytest.raises(ConfigError, match=rf"Expected {field}\b.*got none\.$"):
            read_config(content, "config.json")


def test_fields_without_effect_are_accepted_under_any_name() -> None:
    harmless = {"new_switch": False, "new_list": [], "new_value": None, "temperature": 0.6}
    assert read_config(LLAMA_3_2_1B | harmless, "c.json") == read_config(LLAMA_3_2_1B, "c.json")
    with pytest.raises(ConfigError, match="got new_switch True"):
        read_config(LLAMA_3_2_1B | {"new_switch": True}, "c.json")


def test_differences_between_a_config_and_a_model_are_named() -> None:
    config, vocab_size = read_config(GEMMA_3_1B, "config.json")

    def differences(**changes: Any) -> list[str]:
        return config_differences(
            GEMMA_3_1B | changes, "c.json", ModelDescription(config, vocab_size)
        )

    assert differences() == []
    assert differences(tie_word_embeddings=False) == [], "the weights tell"
    assert differences(max_position_embeddings=77) == [], "no arithmetic"
    assert differences(rms_norm_eps=1e-3, vocab_size=7) == [
        "c.json says final_norm.eps 0.001 where the model has 1e-06",
        "c.json says vocab_size 7 where the model has 262144",
    ]
    assert differences(rope_theta=7.0) == [
        "c.json says rotary.base of layer 5 7.0 where the model has 1000000"
    ]
    assert differences(sliding_window=7) == [
        "c.json says window of layer 0 7 where the model has 512"
    ]
    (problem,) = differences(hidden_activation="relu")
    assert re.match("Expected hidden_activation in c.json to be .* got 'relu'$", problem)


STRANGE = (
    None,
    "x",
    -1,
    1.5,
    float("inf"),
    10**30,
    [1],
    {"rope_type": ["a"]},
    {"full_attention": 3},
    {"sliding_attention": {"rope_type": "yarn", "factor": "x"}},
)


@pytest.mark.parametrize(
    "name",
    [
        "Gemma 3 1B",
        "Qwen3.5 27B text",
        "DeepSeek-V3",
    ],
)
def test_any_value_anywhere_is_understood_or_refused_in_one_line(name: str) -> None:
    messages = []
    for field in (*PUBLISHED[name], "rope_parameters", "rope_scaling", "layer_types"):
        for value in STRANGE:
            try:
                read_config(PUBLISHED[name] | {field: value}, "c.json")
            except ConfigError as error:
                messages.append(str(error))
    assert len(messages) > 90
    assert not any("\n" in message for message in messages)
