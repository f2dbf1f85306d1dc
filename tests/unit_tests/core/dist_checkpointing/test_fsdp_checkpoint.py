"""`save_checkpoint` and `load_checkpoint` in a user's training loop."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.device import Device
from megatron.core.dist_checkpointing.errors import CheckpointError, CheckpointNotFoundError
from megatron.core.dist_checkpointing.formats import open_checkpoint
from megatron.core.dist_checkpointing.fsdp_checkpoint import load_checkpoint, save_checkpoint
from megatron.core.dist_checkpointing.store import open_store
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp import fully_shard
from megatron.core.mesh import build_mesh
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.training.config import EngineConfig
from megatron.training.engine import SaveLoadMeta
from megatron.training.engines import MegatronEngine
from tests.helpers.ranks import run_ranks


def build(seed: int, rows: int = 17) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, rows), nn.Tanh(), nn.Linear(rows, 5))
    fully_shard(model[0])
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    torch.manual_seed(seed)
    loss = model(torch.randn(6, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [
        tensor for p in model.parameters() for tensor in (p.detach(), *optimizer.state[p].values())
    ]
    return [
        tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
        for tensor in tensors
    ]


def _save(folder: str) -> tuple[list[torch.Tensor], float]:
    model, optimizer = build(0)
    train(model, optimizer, 0)
    save_checkpoint(model, optimizer, folder)
    return whole(model, optimizer), train(model, optimizer, 1)


def _load(folder: str) -> tuple[list[torch.Tensor], float, float]:
    model, optimizer = build(1)
    load_checkpoint(model, optimizer, folder)
    return whole(model, optimizer), train(model, optimizer, 1), optimizer.param_groups[0]["lr"]


def test_a_directory_saved_on_two_ranks_loads_on_three_and_vanilla_dcp_reads_it(tmp_path):
    folder = str(tmp_path / "mine")
    saved, loss = run_ranks(2, _save, folder)[0]
    loaded, other_loss, rate = run_ranks(3, _load, folder)[0]
    assert all(torch.equal(got, expected) for got, expected in zip(loaded, saved, strict=True))
    assert abs(loss - other_loss) < 1e-6
    assert rate == 0.01
    weight = {"model": {"0.weight": torch.zeros(17, 8)}}
    dcp.load(weight, checkpoint_id=folder, no_dist=True)
    assert torch.equal(weight["model"]["0.weight"], saved[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


def _refused(folder: str) -> list[str]:
    messages = []
    model, optimizer = build(0)
    save_checkpoint(model, optimizer, folder)
    others, other_optimizer = build(0, rows=16)
    train(others, other_optimizer, 0)  # has states, so that nothing but a load could change any
    before = whole(others, other_optimizer)
    for call in (
        lambda: save_checkpoint(model, optimizer, folder),
        lambda: load_checkpoint(others, other_optimizer, folder),
        lambda: load_checkpoint(model, optimizer, folder + "/none"),
    ):
        try:
            call()
        except CheckpointError as error:
            messages.append(str(error))
        dist.barrier()
    after = whole(others, other_optimizer)
    assert all(torch.equal(got, expected) for got, expected in zip(after, before, strict=True))
    return messages


def test_an_existing_directory_another_model_and_no_directory_are_errors_on_all_ranks(tmp_path):
    for messages in run_ranks(2, _refused, str(tmp_path / "mine")):
        there, other, none = messages
        assert f"{tmp_path}/mine" in there
        assert "model.0.weight has shape (17, 8) where the model has (16, 8)" in other
        assert "/none" in none


def _missing(folder: str) -> list[type[Exception]]:
    model, optimizer = build(0)
    store, config = open_store(folder), DataParallelConfig()
    schedule = LRScheduleConfig(lr=1e-3)
    settings = EngineConfig(OptimizerConfig(), schedule, config, train_iters=1)
    engine = MegatronEngine(settings, Device("cpu"), build_mesh("cpu"))
    engine.initialize(lambda: nn.Linear(2, 2))
    found: list[type[Exception]] = []
    for load in (
        lambda: load_checkpoint(model, optimizer, f"{folder}/none"),
        lambda: open_checkpoint(store, "none"),
        lambda: engine.load(SaveLoadMeta(f"{folder}/none", "dcp")),
        lambda: engine.load(SaveLoadMeta(f"{folder}/none", "hf")),
    ):
        try:
            load()
        except FileNotFoundError as error:
            found.append(type(error))
    return found


def test_a_missing_directory_is_not_found_whatever_loads_it(tmp_path):
    for found in run_ranks(2, _missing, str(tmp_path)):
        assert found == [CheckpointNotFoundError] * 4


@pytest.mark.parametrize("name", [".", ".."])
def test_a_path_without_a_name_is_rejected(name):
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        save_checkpoint(layer, torch.optim.AdamW(layer.parameters()), name)


def _load_other_steps(folder: str, step: float) -> str:
    model, optimizer = build(0)
    train(model, optimizer, 0)
    for state in optimizer.state.values():
        state["step"].fill_(step)
    save_checkpoint(model, optimizer, folder)

    others, other_optimizer = build(1)
    train(others, other_optimizer, 0)
    before = whole(others, other_optimizer)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(others, other_optimizer, folder)
    after = whole(others, other_optimizer)
    assert all(torch.equal(got, expected) for got, expected in zip(after, before, strict=True))
    return str(caught.value)


@pytest.mark.parametrize("step", [0.5, float("nan")])
def test_a_step_that_is_no_count_is_rejected_before_anything_is_changed(tmp_path, step):
    """Or the optimizer would find out, with the weights in place already."""
    for message in run_ranks(2, _load_other_steps, str(tmp_path / "mine"), step):
        assert "Expected a number of steps of optimizer.state." in message
        assert str(tmp_path) in message


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ASGD", {}),
        ("NAdam", {"weight_decay": 0.5, "decoupled_weight_decay": True}),
    ],
)
@pytest.mark.parametrize("steps", [0, 2])
def test_every_class_resumes_with_its_options_also_before_its_first_step(
    tmp_path, steps, name, options
):
    run_ranks(1, _resumes, str(tmp_path / "saved"), steps, name, options)


def _resumes(path: str, steps: int, name: str, options: dict[str, object]) -> None:
    def build(seed: int, **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 3)
        return model, getattr(torch.optim, name)(model.parameters(), **options)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    expected, reference = build(0, lr=0.03, **options)
    model, optimizer = build(0, lr=0.03, **options)
    for number in range(steps):
        step(expected, reference, number)
        step(model, optimizer, number)
    save_checkpoint(model, optimizer, path)
    other, loading = build(1)
    load_checkpoint(other, loading, path)
    for number in range(10, 13):
        for each in ((expected, reference), (model, optimizer), (other, loading)):
            step(*each, number)
    for own, saved, right in zip(
        other.parameters(), model.parameters(), expected.parameters(), strict=True
    ):
        assert torch.equal(saved, right)
        assert torch.equal(own, right)
