"""Where our tensors lie in those of an architecture that fuses or interleaves them otherwise."""

from __future__ import annotations

import pytest

from megatron.core.models.families.config_json import FAMILIES, family_of
from megatron.core.models.families.dense import QWEN3_5
from megatron.core.models.families.layer_fields import pattern_of
from megatron.core.models.families.row_map import RowMap
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.layer_pattern import layer_pattern
from megatron.core.transformer.layer_specs import model_spec

HYBRID = TransformerConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    kv_channels=16,
    ffn_hidden_size=24,
    normalization="RMSNorm",
    layernorm_zero_centered_gamma=True,
    qk_layernorm=True,
    attention_output_gate=True,
    rotary_percent=0.25,
    swiglu=True,
    add_bias_linear=False,
    linear_attention_freq="4",
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=6,
    linear_value_head_dim=10,
)


def place(own: str) -> RowMap:
    return QWEN3_5.rows_of(own, 1, model_spec(HYBRID).layers)


def test_a_query_is_followed_by_its_gate() -> None:
    assert family_of(model_spec(HYBRID)) is QWEN3_5
    prefix = "model.layers.3.self_attn"
    within = "decoder.layers.3.self_attention"
    assert place(f"{within}.query.weight") == RowMap(f"{prefix}.q_proj.weight", 0, 16, 32)
    assert place(f"{within}.gate.weight") == RowMap(f"{prefix}.q_proj.weight", 16, 16, 32)
    assert place(f"{within}.key.weight") == RowMap(f"{prefix}.k_proj.weight")
    assert place(f"{within}.q_layernorm.weight") == RowMap(f"{prefix}.q_norm.weight")


def test_a_delta_net_has_three_of_its_six_sections_in_one() -> None:
    prefix = "model.layers.0.linear_attn"
    within = "decoder.layers.0.self_attention"
    fused = f"{prefix}.in_proj_qkv.weight"
    assert place(f"{within}.query.weight") == RowMap(fused)
    assert place(f"{within}.key.weight") == RowMap(fused, start=12)
    assert place(f"{within}.value.weight") == RowMap(fused, start=24)
    assert place(f"{within}.beta.weight") == RowMap(f"{prefix}.in_proj_b.weight")
    assert place(f"{within}.alpha.weight") == RowMap(f"{prefix}.in_proj_a.weight")
    assert place(f"{within}.decay.A_log") == RowMap(f"{prefix}.A_log")
    assert place(f"{within}.out_norm.weight") == RowMap(f"{prefix}.norm.weight")


def test_families_are_told_apart_by_their_name_in_the_file() -> None:
    assert len({family.model_type for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize("every_nth", [True, False])
@pytest.mark.parametrize(
    "kinds", [(1, 0, 0, 1), (1, 1, 0), (0, 0, 1), (0,), (1,), (0, 0), (1, 0, 1, 0), (0, 1, 0, 1)]
)
def test_the_text_of_a_pattern_stands_for_its_layers(
    kinds: tuple[int, ...], every_nth: bool
) -> None:
    wanted = tuple(kind == 1 for kind in kinds)
    text = pattern_of(wanted, every_nth=every_nth)
    assert layer_pattern("", text, len(kinds), every_nth=every_nth) == wanted
