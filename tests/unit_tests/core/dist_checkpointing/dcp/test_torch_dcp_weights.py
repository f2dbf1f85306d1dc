"""Weights in directories that torch.distributed.checkpoint wrote, under any prefix."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.fsdp import fully_shard

from megatron.core.device import Device
from megatron.core.dist_checkpointing.dcp.torch_dcp import (
    TorchDcpCheckpoint,
    load_model_weights,
    weights_prefix,
)
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.store import LocalStore, open_store
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.dtensors import local_tensor
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.training.checkpoint.loading import load_weights
from megatron.training.config import EngineConfig
from megatron.training.engine import SaveLoadMeta
from megatron.training.engines import build_engine
from megatron.training.step import StepInfo
from tests.helpers.ranks import run_ranks

NAMES = ["layers.0.weight", "layers.0.bias", "layers.1.weight", "head.weight"]


def under(*prefixes: str) -> list[str]:
    return [f"{prefix}{name}" for prefix in prefixes for name in NAMES]


@pytest.mark.parametrize(
    ("keys", "prefix"),
    [
        (under("model."), "model."),
        (under(""), ""),
        (under("app.model."), "app.model."),
        (under("ema.", "model."), "model."),
        (
            [*under("module."), *(f"optim.state.{name}.exp_avg" for name in NAMES), "step"],
            "module.",
        ),
        (under("model.")[:2], "model."),
        ([*under("state.")[:2], *under("old.")[:1]], "state."),
    ],
    ids=str,
)
def test_the_weights_are_found_under_the_one_prefix_that_has_them(keys, prefix):
    assert weights_prefix(NAMES, keys, "there") == prefix


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            [],
            "got nothing, where the model has layers.0.weight",
        ),
        (["other.weight", "step"], "got other.weight, step, where the model has layers.0.weight"),
        (
            under("a.", "b."),
            "under one prefix in there, got 4 of its 4 names under each of 'a.', 'b.'",
        ),
        ([*under("a.")[:1], *under("b.")[1:2]], "got 1 of its 4 names under each of 'a.', 'b.'"),
    ],
    ids=str,
)
def test_without_a_single_prefix_the_error_names_the_keys(keys, message):
    with pytest.raises(CheckpointError) as caught:
        weights_prefix(NAMES, keys, "there")
    assert message in str(caught.value)


class Net(nn.Module):
    """With a buffer, and shapes that two ranks do not divide."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(5, 7)
        self.head = nn.Linear(7, 3)
        self.register_buffer("seen", torch.full((3,), float(seed)))


def _save_as_any_user_does(folder: str) -> None:
    model = Net(seed=1)
    fully_shard(model.body)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model.body(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"app": {"model": weights, "optim": states}, "step": 3}, checkpoint_id=folder)
    dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}_bare")


def _load_in_an_engine(
    folder: str, parallel: DataParallelConfig
) -> tuple[list[bool], StepInfo, str]:
    config = EngineConfig(OptimizerConfig(), LRScheduleConfig(lr=1.0), parallel, train_iters=8)
    engine = build_engine(config, Device("cpu"), build_mesh("cpu", dist.get_world_size()))
    engine.initialize(Net(seed=2))
    engine.load(SaveLoadMeta(folder))
    plain = Net(seed=3)
    load_weights(open_store(Path(folder).parent), Path(folder).name, plain)
    expected = dict(plain.state_dict())
    same = []
    for name, parameter in engine.model.named_parameters():
        rows = local_tensor(parameter)
        first = [
            n
            for n in range(len(expected[name]))
            if torch.equal(expected[name][n : n + len(rows)], rows)
        ]
        same.append(bool(first) or not rows.numel())
    same.append(torch.equal(engine.model.seen, expected["seen"]))
    with pytest.raises(CheckpointError) as caught:
        engine.load(SaveLoadMeta(folder, with_optim=True))
    assert caught.type is CheckpointError, "not damaged"
    return same, engine.step_info(), str(caught.value)


@pytest.mark.parametrize(
    "parallel",
    [DataParallelConfig(), DataParallelConfig(use_torch_fsdp2=True)],
    ids=["megatron", "fsdp2"],
)
@pytest.mark.parametrize("name", ["saved", "saved_bare"])
def test_either_engine_loads_only_weights_from_a_checkpoint_of_fsdp2(tmp_path, name, parallel):
    run_ranks(2, _save_as_any_user_does, str(tmp_path / "saved"))
    for world_size in (1, 2):
        for same, step_info, message in run_ranks(
            world_size, _load_in_an_engine, str(tmp_path / name), parallel
        ):
            assert same == [True] * 5
            assert step_info == StepInfo()
            assert "it has no train_state.json" in message
            assert "with_optim=False" in message


def _plain(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("head.weight"), "it lacks model.head.weight"),
        (
            lambda state: state.update({"tail.weight": torch.ones(2)}),
            "it has unexpected keys model.tail.weight",
        ),
    ],
)
def test_weights_of_another_model_are_rejected_by_name_before_a_tensor_is_changed(
    tmp_path, change: Callable, message
):
    state, model = dict(Net(seed=1).state_dict()), Net(seed=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change(state)
    _plain(tmp_path / "there", {"model": state, "optim": {"tail.weight": torch.ones(2)}})
    with pytest.raises(CheckpointError) as caught:
        load_model_weights(TorchDcpCheckpoint.open(LocalStore(tmp_path), "there"), model)
    assert message in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_element_without_a_chunk_is_damage(tmp_path):
    folder = _plain(tmp_path / "there", {"model": dict(Net(seed=1).state_dict())})
    metadata = dcp.FileSystemReader(folder).read_metadata()
    chunk = metadata.state_dict_metadata["model.body.weight"].chunks[0]
    chunk.sizes = torch.Size((chunk.sizes[0] - 1, chunk.sizes[1]))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        CheckpointDamagedError, match=r"Expected each element of model\.body\.weight in one chunk"
    ):
        load_weights(open_store(tmp_path), "there", Net(seed=2))
