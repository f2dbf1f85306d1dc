"""Models of the transformers library become this project's and back, and compute the same.

Each is tiny and uses all fields that its architecture has. All of their config.json is read, as the
library writes it, and every row of their weights.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.models.description import ModelDescription
from megatron.core.models.families.config_json import FAMILIES
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hugging_face import config_differences, config_from_hf, hf_config
from megatron.core.transformer.layer_specs import model_spec
from tests.unit_tests.core.models.families.helpers.their_models import (
    CASES,
    VOCAB,
    build,
    content_of,
    copy_from_theirs,
    copy_to_theirs,
    their_model,
)

# Longer than every window and than the original lengths of scaled rotary embeddings.
TOKENS = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


def test_every_family_is_compared() -> None:
    assert {case.split()[0] for case in CASES} == {family.model_type for family in FAMILIES}


def logits_of(theirs: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = theirs(TOKENS).logits
    return logits


def train(model: GPTModel) -> None:
    """Three steps that move every weight."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(3):
        optimizer.zero_grad()
        model(TOKENS[:, :-1], TOKENS[:, 1:]).mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers_in_both_directions(transformers: Any, case: str) -> None:
    theirs = their_model(transformers, case)
    content = content_of(theirs)

    # From the library's model to this project's.
    config, vocab_size, _ = config_from_hf(content, "config.json")
    model = GPTModel(config, vocab_size).eval()
    copy_from_theirs(model, theirs)
    expected = logits_of(theirs)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-4)

    # From this project's model to the library's, by a config written here, after training here.
    train(model)
    own = json.loads(json.dumps(hf_config(ModelDescription(config, vocab_size))))
    assert own["architectures"] == [type(theirs).__name__]
    again = build(
        transformers, transformers.AutoConfig.for_model(own.pop("model_type"), **own)
    ).eval()
    copy_to_theirs(model, again)
    trained = logits_of(again)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), trained, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(trained, expected, rtol=0.01, atol=0.01), "training changed them"

    # The library's file for our config is the same model, as a load compares it.
    assert (
        config_differences(content_of(again), "config.json", ModelDescription(config, vocab_size))
        == []
    )
    assert model_spec(config_from_hf(content_of(again), "config.json")[0]) == model_spec(config)


# Options that change the results of the same weights. Each must show in the logits, or the
# comparison above would prove no such thing.
VISIBLE: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": (
        {"norm_epsilon": 1e-5},
        {"rotary_base": 600.0},
        {"rope_scaling_factor": 4.0},
        {"rope_scaling_original_max_position_embeddings": 32},
        {"use_rope_scaling": False, "rope_scaling_original_max_position_embeddings": 8192},
    ),
    "llama biases": (
        {"swiglu": True, "activation_func": "silu", "gated_linear_unit": False},
        {"rotary_seq_len_interpolation_factor": 2.0},
    ),
    "llama yarn": (
        {"yarn_attention_factor": 1.2},
        {"yarn_beta_fast": 1.5},
        {"yarn_beta_slow": 0.5},
        {"yarn_correction_range_round_to_int": True},
        {"yarn_rotary_scaling_factor": 3.0},
    ),
    "qwen2 listed": (
        {"window_size": (5, 0)},
        {"window_attn_skip_freq": "[1,0,1,0]"},
        {"activation_func": "gelu"},
    ),
    "gemma3_text untied": (
        {"window_rotary_base": 900.0},
        {"softmax_scale": None},
        {"embedding_multiplier": 5.0},
        {"final_logit_softcapping": None},
        {"layernorm_zero_centered_gamma": False},
    ),
    "smollm3": ({"no_rope_freq": "[0,1,0,0]"},),
    "stablelm": ({"rotary_percent": 0.25},),
    "deepseek_v3": (
        {"rotary_interleaved": False},
        {"mscale": 0.2},
        {"mscale_all_dim": 1.0},
        {"latent_norm_epsilon": 0.1},
        {"moe_router_topk_scaling_factor": 1.0},
        {"moe_router_norm_topk": False},
        {"moe_router_num_groups": None, "moe_router_group_topk": None},
        {"moe_router_group_topk": 3},
    ),
    "glm4_moe": (
        {"rotary_percent": 0.5},
        {"moe_router_num_groups": None, "moe_router_group_topk": None},
    ),
    "gpt_oss": (
        {"activation_func_clamp_value": None},
        {"glu_linear_offset": 0.0},
        {"activation_func": "silu"},
        {"window_attn_skip_freq": "[0,1,1,0]"},
        {"moe_router_pre_softmax": True, "moe_router_norm_topk": False},
        {"yarn_correction_range_round_to_int": True},
    ),
    "qwen3_5_text": ({"rotary_percent": 0.25}, {"layernorm_zero_centered_gamma": False}),
    "qwen3_moe": (
        {"moe_router_topk": 2},
        {"moe_router_pre_softmax": True, "moe_router_norm_topk": False},
        {"moe_router_topk_scaling_factor": 1.5},
    ),
    "qwen3_next": (
        {"moe_router_topk": 2},
        {"moe_router_score_function": "sigmoid"},
        {"layernorm_zero_centered_gamma": False},
    ),
    "olmoe": ({"moe_router_topk": 2}, {"moe_router_norm_topk": True}),
}


@pytest.mark.parametrize("case", VISIBLE)
def test_each_option_shows_in_the_logits(transformers: Any, case: str) -> None:
    theirs = their_model(transformers, case)
    config, vocab_size, _ = config_from_hf(content_of(theirs), "config.json")
    model = GPTModel(config, vocab_size).eval()
    copy_from_theirs(model, theirs)
    with torch.no_grad():
        expected = model(TOKENS)
        for change in VISIBLE[case]:
            other = GPTModel(dataclasses.replace(config, **change), vocab_size).eval()
            other.load_state_dict(model.state_dict())
            assert (other(TOKENS) - expected).abs().max() > 1e-3, change
