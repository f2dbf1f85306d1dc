"""Folders of DeepSeek-V3, GLM-4.5 and GPT-OSS."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.core.device import Device
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.options import ConfigError
from megatron.training.checkpoint.hf_weights import load_hf, save_hf
from megatron.training.hf_settings import read_folder
from tests.helpers.hf_models import save_model

WEIGHTS = "model.safetensors"


def model_of(folder: Path) -> GPTModel:
    described = read_folder(folder)
    return GPTModel(described.config, described.num_rows)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "gpt_oss"])
def test_weights_come_back_to_the_bit(tmp_path: Path, family: str) -> None:
    folder = save_model(tmp_path / "theirs", family)
    model = model_of(folder)
    load_hf(model, folder)
    save_hf(model, tmp_path / "ours", Device("cpu"), dtype=torch.float32)

    expected, found = (load_file(path / WEIGHTS) for path in (folder, tmp_path / "ours"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def add_tensors(folder: Path, *names: str) -> None:
    tensors = load_file(folder / WEIGHTS) | {name: torch.ones(2) for name in names}
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path, family: str) -> None:
    folder = save_model(tmp_path / "theirs", family)
    add_tensors(folder, "model.layers.2.eh_proj.weight", "model.layers.2.self_attn.q_a_proj.weight")
    model = model_of(folder)
    load_hf(model, folder)
    head = load_file(folder / WEIGHTS)["lm_head.weight"]
    assert torch.equal(model.get_parameter("output_layer.weight"), head)


@pytest.mark.parametrize(
    ("family", "name", "method"),
    [
        ("deepseek_v3", "model.layers.0.self_attn.o_proj.weight_scale_inv", "fp8"),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj_scales", "mxfp4"),
    ],
)
def test_weights_with_scales_are_refused_by_name_whatever_the_config_says(
    tmp_path: Path, family: str, name: str, method: str
) -> None:
    folder = save_model(tmp_path / "theirs", family)
    model = model_of(folder)
    before = [parameter.clone() for parameter in model.parameters()]
    add_tensors(folder, name)
    with pytest.raises(ConfigError, match=rf"got {name}, as of {method}\. Dequantize them"):
        load_hf(model, folder)
    assert all(map(torch.equal, before, model.parameters()))
