"""Hugging Face files are the same bytes however many ranks divide the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megatron.core.device import Device
from megatron.training.checkpoint.hf_weights import load_hf, save_hf
from tests.helpers.ranks import run_ranks
from tests.helpers.tensor_models import SECTIONS, Way, full, sharded

WAYS = [(4, Way(2)), (2, Way(2, "no_shard")), (4, Way(4, "optim")), (4, Way(2, num_instances=2))]


def _save(folder: str, way: Way) -> dict[str, Tensor]:
    model, _ = sharded(way)
    save_hf(model, folder, Device("cpu"), dtype=torch.float32)
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
