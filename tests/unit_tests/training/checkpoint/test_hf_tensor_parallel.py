"""Hugging Face files are the same bytes however many ranks divide the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megatron.core.distributed import megatron_fsdp
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.materialize import seeded_reset
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig
from megatron.training.checkpoint.hf_weights import load_hf, save_hf
from tests.helpers.ranks import run_ranks
from tests.helpers.tensor_models import SECTIONS, Way, full, sharded
from tests.unit_tests.training.helpers.hf_folders import ARCHITECTURES, CPU, QWEN3, digests

VOCAB = 64
WAYS = [(4, Way(2)), (2, Way(2, "no_shard")), (4, Way(4, "optim")), (4, Way(2, num_instances=2))]


def _save(folder: str, way: Way) -> dict[str, Tensor]:
    model, _ = sharded(way)
    save_hf(model, folder, CPU, dtype=torch.float32)
    dist.barrier()
    return {name: full(own) for name, own in model.named_parameters()}


def _load(folder: str, way: Way) -> dict[str, Tensor]:
    model, _ = sharded(way, seed=4)
    load_hf(model, folder)
    return {name: full(own) for name, own in model.named_parameters()}


@pytest.mark.parametrize(("num_ranks", "way"), WAYS, ids=str)
def test_export_and_import_do_not_depend_on_tp(tmp_path: Path, num_ranks: int, way: Way) -> None:
    one, divided = str(tmp_path / "one"), str(tmp_path / "divided")
    (expected,) = run_ranks(1, _save, one, Way(1))
    run_ranks(num_ranks, _save, divided, way)
    (file,) = sorted(Path(one).glob("*.safetensors"))
    assert (Path(divided) / file.name).read_bytes() == file.read_bytes()
    gate = load_file(file)["layers.0.gate.weight"]
    assert torch.equal(gate, expected["layers.0.fused.weight"][: SECTIONS.sizes[0]])

    for loaded in run_ranks(num_ranks, _load, one, way):
        assert all(torch.equal(loaded[name], own) for name, own in expected.items())


def _gpt(config: TransformerConfig, parallel: DataParallelConfig, seed: int) -> GPTModel:
    with torch.device("meta"):
        model = GPTModel(config, VOCAB)
    megatron_fsdp.shard_model(
        model,
        build_mesh("cpu", dist.get_world_size()),
        CPU,
        parallel,
        compute_dtype=torch.float32,
        reset_parameters=seeded_reset(model, "cpu", seed),
    )
    return model


def _save_gpt(folder: str, config: TransformerConfig, parallel: DataParallelConfig) -> None:
    save_hf(_gpt(config, parallel, 3), folder, CPU, dtype=torch.float32)
    dist.barrier()


def _load_gpt(
    folder: str, config: TransformerConfig, parallel: DataParallelConfig
) -> dict[str, Tensor]:
    model = _gpt(config, parallel, 4)
    load_hf(model, folder)
    return {name: full(own) for name, own in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "tp", "ep"), [("Qwen3 tied", 4, 1), ("Qwen3Next", 2, 2), ("Llama biases", 2, 1)]
)
def test_exported_directories_do_not_depend_on_tp(
    tmp_path: Path, name: str, tp: int, ep: int
) -> None:
    config = replace(QWEN3, ffn_hidden_size=12, **ARCHITECTURES[name])
    one, divided = tmp_path / "one", tmp_path / "divided"
    alone = DataParallelConfig()
    parallel = DataParallelConfig(tensor_model_parallel_size=tp, expert_model_parallel_size=ep)
    run_ranks(1, _save_gpt, str(one), config, alone)
    run_ranks(4, _save_gpt, str(divided), config, parallel)
    assert digests(divided) == digests(one)

    (expected,) = run_ranks(1, _load_gpt, str(divided), config, alone)
    for loaded in run_ranks(4, _load_gpt, str(one), config, parallel):
        assert all(torch.equal(loaded[key], own) for key, own in expected.items())
