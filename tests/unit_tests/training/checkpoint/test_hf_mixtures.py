"""Mixtures of experts in the transformers library's files, with separate or stacked experts."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.formats import open_checkpoint
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.dtensors import local_tensor
from megatron.core.materialize import materialize
from megatron.core.models.families import config_json
from megatron.core.models.families.mixtures import QWEN3_MOE
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hugging_face import build_model
from megatron.core.options import ConfigError
from megatron.training.checkpoint.hf_config import read_folder
from megatron.training.checkpoint.hf_export import export_hf
from megatron.training.checkpoint.hf_weights import load_hf, save_hf
from tests.helpers.hf_models import save_model
from tests.helpers.ranks import run_ranks
from tests.unit_tests.training.helpers.hf_folders import (
    ARCHITECTURES,
    CPU,
    QWEN3,
    VOCAB,
    change_config,
    digests,
    plain_gpt,
    sharded_gpt,
)

WEIGHTS = "model.safetensors"
CONFIG = dataclasses.replace(QWEN3, **ARCHITECTURES["Qwen3Moe"], hf_architecture="qwen3_moe")
save_exactly = partial(save_hf, dtype=torch.float32)
on_ranks = partial(sharded_gpt, "megatron_fsdp", dtype=torch.float32, config=CONFIG)


def whole_gpt(seed: int) -> GPTModel:
    model = GPTModel(CONFIG, VOCAB)
    materialize(model, "cpu", seed)
    return model


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of all experts as one, as the library has them in memory and writes them again if
    it has read them so.
    """
    pattern = re.compile(r"(.*mlp\.experts)\.(\d+)\.(\w+)\.weight")
    kept = {name: tensor for name, tensor in tensors.items() if not pattern.fullmatch(name)}
    experts: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := pattern.fullmatch(name):
            prefix, number, part = match.groups()
            experts.setdefault(prefix, {}).setdefault(part, {})[int(number)] = tensor

    for prefix, parts in experts.items():
        whole = {
            part: torch.stack([own[number] for number in sorted(own)])
            for part, own in parts.items()
        }
        kept[f"{prefix}.gate_up_proj"] = torch.cat((whole["gate_proj"], whole["up_proj"]), 1)
        kept[f"{prefix}.down_proj"] = whole["down_proj"]
    return kept


def stack(folder: Path) -> None:
    save_file(stacked(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def are_equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(
        torch.equal(local_tensor(a), local_tensor(b))
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_exactly(whole_gpt(0), tmp_path / "gpt", CPU)
    return tmp_path / "gpt"


def in_either_form(monkeypatch: pytest.MonkeyPatch, is_stacked: bool) -> None:
    """Has all experts of a layer written as one tensor."""
    if is_stacked:
        family = dataclasses.replace(QWEN3_MOE, experts=QWEN3_MOE.experts[::-1])
        monkeypatch.setattr(config_json, "FAMILIES", (family,))


@pytest.mark.parametrize("is_stacked", [False, True], ids=["one by one", "stacked"])
def test_ranks_write_the_files_that_one_writes_and_read_their_rows_of_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_stacked: bool
) -> None:
    in_either_form(monkeypatch, is_stacked)
    save_exactly(whole_gpt(0), tmp_path / "whole", CPU, max_shard_bytes=20000)

    def save_and_load() -> None:
        with pytest.MonkeyPatch.context() as patch:
            in_either_form(patch, is_stacked)
            save_exactly(
                on_ranks(seed=0),
                tmp_path / "ranks",
                CPU,
                max_shard_bytes=20000,
            )
            model = on_ranks(seed=1)
            assert not are_equal(model, on_ranks(seed=0))
            load_hf(model, tmp_path / "ranks")
            assert are_equal(model, on_ranks(seed=0))

    run_ranks(3, save_and_load)
    assert digests(tmp_path / "ranks") == digests(tmp_path / "whole")
    weights: dict[str, torch.Tensor] = {}
    for path in tmp_path.glob("whole/*.safetensors"):
        weights |= load_file(path)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert (name in weights) == is_stacked
    if is_stacked:
        assert weights[name].shape == (5, 24, 24)


def test_stacked_experts_are_loaded_and_saved_as_separate_tensors(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder, out = tmp_path / "model", tmp_path / "out"
    save_model(folder, "qwen3_moe")
    tensors = load_file(folder / WEIGHTS)
    stack(folder)
    model = build_model(read_folder(folder).model)
    load_hf(model, folder)
    save_exactly(model, out, CPU)
    found = load_file(out / WEIGHTS)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    _, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())


EXPERT = "model.layers.1.mlp.experts.3"
ALL_UP = "model.layers.1.mlp.experts.gate_up_proj"


def without(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def narrow(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()})


@pytest.mark.parametrize(
    ("is_stacked", "spoil", "message"),
    [
        (False, without(f"{EXPERT}.up_proj.weight"), f"it lacks {EXPERT}.up_proj.weight$"),
        (
            True,
            narrow(ALL_UP),
            rf"{ALL_UP} has shape \(4, 24, 24\) where the model has \(5, 24, 24\)$",
        ),
        (
            True,
            lambda tensors: tensors.update({ALL_UP: tensors[ALL_UP].flatten(0, 1)}),
            rf"{ALL_UP} has shape \(120, 24\) where the model has \(5, 24, 24\)$",
        ),
        (
            True,
            lambda tensors: tensors.update({f"{EXPERT}.up_proj.weight": ONE}),
            f"it has unexpected keys {EXPERT}.up_proj.weight$",
        ),
    ],
)
def test_an_expert_that_is_missing_additional_or_of_another_shape_is_one_error(
    folder: Path, is_stacked: bool, spoil: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    if is_stacked:
        stack(folder)
    tensors = load_file(folder / WEIGHTS)
    spoil(tensors)
    save_file(tensors, folder / WEIGHTS)
    model = whole_gpt(1)
    with pytest.raises(CheckpointError, match=message.replace("$", r"\.?$")) as caught:
        load_hf(model, folder)
    assert "\n" not in str(caught.value)
    assert are_equal(model, whole_gpt(1)), "nothing was changed"


ONE = torch.ones(12, 24)


def test_a_directory_is_read_by_the_names_of_its_architecture(tmp_path: Path) -> None:
    """Qwen3-Next and Qwen3.5 compute the same."""
    same = {"moe_router_pre_softmax": False, "moe_router_norm_topk": True}
    config = dataclasses.replace(QWEN3, **{**ARCHITECTURES["Qwen3Next"], **same})
    model = plain_gpt(dataclasses.replace(config, hf_architecture="qwen3_5_moe_text"))
    save_exactly(model, tmp_path / "gpt", CPU)
    content = json.loads((tmp_path / "gpt" / "config.json").read_text())
    assert content["model_type"] == "qwen3_5_moe_text"
    assert "model.layers.0.linear_attn.in_proj_qkv.weight" in load_file(tmp_path / "gpt" / WEIGHTS)
    other = plain_gpt(config, seed=1)
    load_hf(other, tmp_path / "gpt")
    assert are_equal(other, model)


# DeepSeek-V3, GLM-4.5 and GPT-OSS


def model_of(folder: Path) -> GPTModel:
    described = read_folder(folder)
    return build_model(described.model)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "gpt_oss"])
def test_loaded_and_saved_weights_are_bit_equal(tmp_path: Path, family: str) -> None:
    folder = save_model(tmp_path / "theirs", family)
    model = model_of(folder)
    load_hf(model, folder)
    save_hf(model, tmp_path / "ours", CPU, dtype=torch.float32)

    expected, found = (load_file(path / WEIGHTS) for path in (folder, tmp_path / "ours"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_biases_of_experts_stay_fp32_in_files_of_bf16(tmp_path: Path) -> None:
    """Their updates are smaller than a step of bf16."""
    theirs = save_model(tmp_path / "theirs", "deepseek_v3")
    model = model_of(theirs)
    load_hf(model, theirs)
    save_hf(model, tmp_path / "saved", CPU)
    with CheckpointManager(LocalStore(tmp_path), CPU, 0, 1, "0" * 16) as manager:
        manager.save(1, collect(model), {}, name="own")
        manager.finish()
    checkpoint = open_checkpoint(LocalStore(tmp_path), "own")
    export_hf(checkpoint, tmp_path / "exported", read_folder(theirs).model)

    assert digests(tmp_path / "saved") == digests(tmp_path / "exported")
    tensors = load_file(tmp_path / "saved" / WEIGHTS)
    in_fp32 = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert in_fp32 == {name for name in tensors if name.endswith("e_score_correction_bias")}
    assert in_fp32


def add_tensors(folder: Path, *names: str) -> None:
    tensors = load_file(folder / WEIGHTS) | {name: torch.ones(2) for name in names}
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("family", "said", "taken"),
    [("deepseek_v3", 3, 3), ("deepseek_v3", "2", 1), ("glm4_moe", 0, 1)],
)
def test_layers_that_predict_further_tokens_are_skipped_by_the_number_in_the_file(
    tmp_path: Path, family: str, said: object, taken: int
) -> None:
    folder = save_model(tmp_path / "theirs", family)
    change_config(folder, num_nextn_predict_layers=said)
    model = model_of(folder)
    add_tensors(folder, *(f"model.layers.{2 + n}.eh_proj.weight" for n in range(taken)))
    load_hf(model, folder)
    add_tensors(folder, f"model.layers.{2 + taken}.eh_proj.weight")
    with pytest.raises(
        CheckpointError, match=rf"it has unexpected keys model\.layers\.{2 + taken}\."
    ):
        load_hf(model, folder)


def test_empty_matrices_of_missing_shared_experts_are_skipped(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "theirs", "glm4_moe")
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
    with pytest.raises(CheckpointError, match=f"it has unexpected keys {shared[0]}"):
        load_hf(model_of(folder), folder)


@pytest.mark.parametrize(
    ("family", "name", "method"),
    [
        ("deepseek_v3", "model.layers.0.self_attn.o_proj.weight_scale_inv", "fp8"),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj_scales", "mxfp4"),
    ],
)
def test_quantized_weights_are_an_error_that_names_them(
    tmp_path: Path, family: str, name: str, method: str
) -> None:
    folder = save_model(tmp_path / "theirs", family)
    model = model_of(folder)
    add_tensors(folder, name)
    with pytest.raises(ConfigError, match=rf"got {name}, as of {method}"):
        load_hf(model, folder)
