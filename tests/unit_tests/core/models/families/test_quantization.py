"""Quantized directories are rejected by name."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.models.families.config_json import read_config
from megatron.core.models.families.quantization import refuse_quantized_tensors
from megatron.core.options import ConfigError
from tests.unit_tests.core.models.families.helpers.published import (
    DEEPSEEK_V3,
    GPT_OSS_20B,
)


@pytest.mark.parametrize(
    ("content", "section", "got", "remedy"),
    [
        (
            DEEPSEEK_V3,
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
            "got quant_method 'fp8'",
            "quantization_config=FineGrainedFP8Config(dequantize=True)",
        ),
        (
            GPT_OSS_20B,
            {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
            "got quant_method 'mxfp4'",
            "quantization_config=Mxfp4Config(dequantize=True)",
        ),
        (GPT_OSS_20B, {"quant_method": "awq"}, "'awq'", "Dequantize them with the transformers"),
    ],
)
def test_a_config_of_quantized_weights_is_rejected_with_what_to_do(
    content: dict[str, Any], section: dict[str, Any], got: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(content | {"quantization_config": section}, "config.json")
    (line,) = str(caught.value).splitlines()
    assert got in line
    assert remedy in line


@pytest.mark.parametrize(
    ("names", "got"),
    [
        (
            [
                "lm_head.weight",
                "model.layers.0.self_attn.sinks",
                "model.layers.3.mlp.experts.0.up_proj.weight_scale_inv",
            ],
            "model.layers.3.mlp.experts.0.up_proj.weight_scale_inv, as of fp8. ",
        ),
        (
            ["model.layers.0.mlp.experts.down_proj_blocks", "a.mlp.experts.down_proj_scales"],
            "a.mlp.experts.down_proj_scales, as of mxfp4. ",
        ),
    ],
)
def test_tensors_with_scales_are_rejected_by_name_and_no_others(names: list[str], got: str) -> None:
    with pytest.raises(ConfigError, match="of 16 or 32 bits in models/x, got ") as caught:
        refuse_quantized_tensors(names, "models/x")
    assert got in str(caught.value)
