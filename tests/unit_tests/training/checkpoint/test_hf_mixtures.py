"""Folders of DeepSeek-V3, GLM-4.5 and GPT-OSS."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.core.device import Device
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hugging_face import build_model
from megatron.core.options import ConfigError
from megatron.training.checkpoint.hf_weights import load_hf, save_hf
from megatron.training.hf_settings import read_folder
from tests.helpers.hf_models import save_model

WEIGHTS = "model.safetensors"


def model_of(folder: Path) -> GPTModel:
    described = read_folder(folder)
    return build_model(described.model)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "gpt_oss"])
def test_weights_come_back_to_the_bit(tmp_path: Path, family: str) -> None:
    folder = save_model(tmp_path / "theirs", family)
    model = model_of(folder)
    load_hf(model, folder)
    save_hf(model, tmp_path / "ours", Device("cpu"), dtype=torch.float32)

    expected, found = (load_file(path / WEIGHTS) for path in (folder, tmp_path / "ours"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


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


@pytest.mark.parametrize(("said", "taken"), [(3, 3), (0, 1), ("2", 1)])
def test_as_many_further_layers_are_passed_over_as_the_file_says(
    tmp_path: Path, said: object, taken: int
) -> None:
    folder = save_model(tmp_path / "theirs", "deepseek_v3")
    change_config(folder, num_nextn_predict_layers=said)
    model = model_of(folder)
    add_tensors(folder, *(f"model.layers.{2 + n}.eh_proj.weight" for n in range(taken)))
    load_hf(model, folder)
    add_tensors(folder, f"model.layers.{2 + taken}.eh_proj.weight")
    with pytest.raises(CheckpointError, match=rf"nothing here takes model\.layers\.{2 + taken}\."):
        load_hf(model, folder)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_matrices_without_elements_of_no_shared_experts_are_passed_over(
    tmp_path: Path, family: str
) -> None:
    folder = save_model(tmp_path / "theirs", family)
    change_config(folder, n_shared_experts=0)
    tensors = load_file(folder / WEIGHTS)
    shared = [name for name in tensors if ".shared_experts." in name]
    assert shared
    empty = {
        name: tensors[name][:, :0].contiguous() if "down" in name else tensors[name][:0]
        for name in shared
    }
    save_file(tensors | empty, folder / WEIGHTS)
    load_hf(model_of(folder), folder)
    save_file(tensors | empty | {shared[0]: torch.ones(1)}, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"nothing here takes {shared[0]}"):
        load_hf(model_of(folder), folder)


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
