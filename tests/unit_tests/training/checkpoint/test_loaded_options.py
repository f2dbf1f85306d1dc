"""The options of an optimizer after a run's checkpoint is loaded, and the data read for them, in
both formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron.core.device import Device
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.state.param_groups import check_param_groups
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.dtensors import local_tensor
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.options import ConfigError
from megatron.training.checkpoint import run_state as checkpointing
from megatron.training.checkpoint.load_extras import options_to_load
from megatron.training.config import EngineConfig
from megatron.training.engine import SaveLoadMeta
from megatron.training.engines import ModuleEngine, build_engine
from megatron.training.rng import rng_state
from tests.helpers.checkpoints import install_param_groups
from tests.helpers.ranks import run_ranks

FORMATS = {
    "fsdp_dtensor": DataParallelConfig(),
    "torch_dcp": DataParallelConfig(use_torch_fsdp2=True),
}
SAVED = OptimizerConfig(weight_decay=0.5, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-4)
OWN = OptimizerConfig(weight_decay=0.25, adam_beta1=0.7, adam_beta2=0.9, adam_eps=1e-6)
OVERRIDE, USE = {"override_opt_param_scheduler": True}, {"use_checkpoint_opt_param_scheduler": True}
SCHEDULE = LRScheduleConfig(lr=1e-2, lr_decay_style="cosine")


class Net(nn.Module):
    """Matrices and vectors: two groups."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(6, 10)
        self.head = nn.Linear(10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def make(ckpt_format: str, optimizer: OptimizerConfig, **flags: Any) -> ModuleEngine:
    config = EngineConfig(
        optimizer, replace(SCHEDULE, **flags), FORMATS[ckpt_format], train_iters=8
    )
    engine = build_engine(config, Device("cpu"), build_mesh("cpu", dist.get_world_size()))
    engine.initialize(Net())
    return engine


def step(engine: ModuleEngine) -> float:
    x = torch.arange(24, dtype=torch.float32).reshape(4, 6) / 24

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(model(batch["x"]), batch["x"].sum(1, keepdim=True))

    return engine.train_batch([{"x": x}], loss).loss


def options(engine: ModuleEngine) -> list[dict[str, Any]]:
    groups = engine.state.optimizer.param_groups
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def summary(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(group["weight_decay"], tuple(group["betas"]), group["eps"]) for group in found]


def weights(engine: ModuleEngine) -> list[torch.Tensor]:
    engine.state.optimizer.synchronize()
    return [local_tensor(parameter).detach().clone() for parameter in engine.model.parameters()]


def _save(
    folder: str, ckpt_format: str, change: Callable[[list[dict[str, Any]]], None] | None
) -> SaveLoadMeta:
    """One step with the saved options, and a checkpoint of it, whose groups have been changed."""
    meta = SaveLoadMeta(f"{folder}/saved", with_optim=True)
    engine = make(ckpt_format, SAVED)
    step(engine)
    if change is not None:
        change(engine.state.optimizer.param_groups)
    engine.save(meta)
    return meta


def _load(
    folder: str, ckpt_format: str, change: Any, flags: dict[str, Any]
) -> tuple[list[Any], list[Any], str]:
    """Returns the options before and after a load, and its error."""
    meta = _save(folder, ckpt_format, change)
    engine = make(ckpt_format, OWN, **flags)
    before, own = weights(engine), options(engine)
    try:
        engine.load(meta)
    except CheckpointError as error:
        assert all(map(torch.equal, before, weights(engine))), "the weights have changed"
        return own, options(engine), str(error)
    assert not all(map(torch.equal, before, weights(engine)))
    assert engine.step_info().iteration == 1
    return own, options(engine), ""


MINE = [(0.25, (0.7, 0.9), 1e-6), (0.0, (0.7, 0.9), 1e-6)]
THEIRS = [(0.5, (0.8, 0.95), 1e-4), (0.0, (0.8, 0.95), 1e-4)]


@pytest.mark.parametrize("ckpt_format", FORMATS)
@pytest.mark.parametrize(
    ("flags", "expected"), [({}, MINE), (OVERRIDE, MINE), (USE, THEIRS)], ids=str
)
def test_options_are_this_runs_unless_a_flag_requests_the_checkpoints(
    tmp_path, ckpt_format, flags, expected
):
    for before, after, error in run_ranks(2, _load, str(tmp_path), ckpt_format, None, flags):
        assert error == ""
        assert summary(before) == MINE
        assert summary(after) == expected
        assert [group.keys() for group in after] == [group.keys() for group in before]


def _other_rates_and_options(groups: list[dict[str, Any]]) -> None:
    groups[0]["lr"], groups[1]["lr"] = 0.3, 0.4
    for group in groups:
        group |= {"lr_mult": 0.1, "maximize_more": [True, None]}


def _ill_typed(groups: list[dict[str, Any]]) -> None:
    groups[0]["weight_decay"] = "heavy"


def _ill_shaped(groups: list[dict[str, Any]]) -> None:
    groups[0]["betas"] = (0.8, 0.95, 0.99)


def _not_finite(groups: list[dict[str, Any]]) -> None:
    groups[1]["eps"] = float("nan")


@pytest.mark.parametrize("ckpt_format", FORMATS)
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_ill_typed, "weight_decay of parameter group 0 to be a finite number, got 'heavy'"),
        (_ill_shaped, "betas of parameter group 0 to be like (0.7, 0.9), got "),
        (_not_finite, "eps of parameter group 1 to be a finite number, got nan"),
    ],
)
def test_damaged_options_are_an_error_only_where_they_are_used(
    tmp_path, ckpt_format, change, expected
):
    for flags, message in (({}, ""), (USE, expected)):
        arguments = (str(tmp_path / str(len(flags))), ckpt_format, change, flags)
        ((before, after, error),) = run_ranks(1, _load, *arguments)
        assert message in error
        assert bool(error) == bool(message)
        assert after == before


@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_the_rate_is_the_schedules_and_unknown_options_are_ignored(tmp_path, ckpt_format):
    arguments = (str(tmp_path), ckpt_format, _other_rates_and_options, USE)
    ((before, after, error),) = run_ranks(1, _load, *arguments)
    assert error == ""
    assert summary(after) == THEIRS
    assert [group["lr"] for group in after] == [group["lr"] for group in before]
    assert [group.keys() for group in after] == [group.keys() for group in before]


def _load_mixed(folder: str, ckpt_format: str, option: str, flags: dict[str, Any]) -> str:
    """Two parameters of one group had separate groups, which differed in one option."""
    meta = SaveLoadMeta(f"{folder}/saved", with_optim=True)
    engine = make(ckpt_format, SAVED)
    groups = engine.state.optimizer.param_groups
    step(engine)
    *rest, last = groups[0]["params"]
    groups[0]["params"] = rest
    groups.append({**groups[0], "params": [last], option: 0.125})
    engine.save(meta)
    other = make(ckpt_format, OWN, **flags)
    try:
        other.load(meta)
    except CheckpointError as error:
        return str(error)
    return step(other) > 0 and summary(options(other)) == (THEIRS if flags else MINE) and "loaded"


@pytest.mark.parametrize("ckpt_format", FORMATS)
@pytest.mark.parametrize(
    ("option", "flags", "outcome"),
    [
        ("weight_decay", {}, "loaded"),
        ("weight_decay", USE, "options that are alike for the parameters of group 0"),
        ("lr", USE, "loaded"),
    ],
)
def test_other_groups_are_an_error_only_where_their_options_are_used(
    tmp_path, ckpt_format, option, flags, outcome
):
    (found,) = run_ranks(1, _load_mixed, str(tmp_path), ckpt_format, option, flags)
    assert outcome in found


def _another_schedule(folder: str, ckpt_format: str) -> list[Any]:
    meta = _save(folder, ckpt_format, None)
    found: list[Any] = []
    for flags in ({}, OVERRIDE, USE):
        engine = make(ckpt_format, OWN, lr=2e-2, **flags)
        try:
            engine.load(meta)
        except ConfigError as error:
            assert engine.step_info().iteration == 0
            found.append(str(error))
        else:
            found.append((engine.state.schedule.peak, summary(options(engine)) == THEIRS))
    return found


@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_another_schedule_is_an_error_until_a_flag_chooses(tmp_path, ckpt_format):
    for refusal, own, saved in run_ranks(2, _another_schedule, str(tmp_path), ckpt_format):
        assert "peak 0.01 (checkpoint) and 0.02 (this run)" in refusal
        assert own == (2e-2, False)
        assert saved == (1e-2, True)


def test_saved_options_are_read_only_where_they_are_used():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    assert options_to_load(SCHEDULE, optimizer, {}, pytest.fail) is None


# Random states


def _load_random_states(folder: str, ckpt_format: str, name: str, value: int) -> tuple[str, bool]:
    """Loads a checkpoint with correct digests and an invalid random state."""
    meta = SaveLoadMeta(f"{folder}/saved", with_optim=True)
    engine = make(ckpt_format, SAVED)
    step(engine)

    def changed(device: Device) -> dict[str, torch.Tensor]:
        states = rng_state(device)
        states[name] = states[name].clone()
        states[name].view(-1)[-2] = value
        return states

    checkpointing.rng_state = changed
    try:
        engine.save(meta)
    finally:
        checkpointing.rng_state = rng_state
    other = make(ckpt_format, SAVED)
    before, states = weights(other), rng_state(Device("cpu"))
    try:
        other.load(meta)
    except CheckpointError as error:
        after = rng_state(Device("cpu"))
        is_same = all(torch.equal(states[kind], after[kind]) for kind in states)
        return str(error), is_same and all(map(torch.equal, before, weights(other)))
    return "loaded", False


@pytest.mark.parametrize("ckpt_format", FORMATS)
@pytest.mark.parametrize(
    ("name", "value"), [("numpy", 10**6), ("python", 2**40), ("python_gauss", 7)]
)
def test_an_invalid_random_state_is_an_error_before_anything_is_changed(
    tmp_path, ckpt_format, name, value
):
    """numpy would read a million words beyond its state and crash."""
    for message, is_untouched in run_ranks(
        2, _load_random_states, str(tmp_path), ckpt_format, name, value
    ):
        assert f"Expected {name} to be" in message
        assert str(tmp_path) in message
        assert is_untouched


# A loop without the training loop


def test_a_program_without_the_training_loop_loads_all_options_as_from_torch():
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([{"params": [parameter], "lr": 0.5}])
    expected = torch.optim.AdamW([{"params": [parameter], "lr": 0.5}])
    saved = {
        **expected.state_dict()["param_groups"][0],
        "lr": 0.125,
        "betas": (0.5, 0.75),
        "lr_mult": 0.1,
    }
    expected.load_state_dict({"state": {}, "param_groups": [saved]})
    install_param_groups(
        optimizer, {parameter: ["w"]}, [{**saved, "params": ["w"], "betas": [0.5, 0.75]}]
    )
    assert optimizer.param_groups == expected.param_groups
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer.param_groups[0]["lr_mult"] == 0.1


def test_options_with_tensors_are_an_error_that_names_them():
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters)
    saved = [{"params": [name], "betas": [torch.ones(2), 0.5]} for name in ("v", "w")]
    names = {parameter: [name] for parameter, name in zip(parameters, ("v", "w"), strict=True)}
    with pytest.raises(CheckpointError, match="'betas'"):
        install_param_groups(optimizer, names, saved)


@pytest.mark.parametrize(
    "saved",
    [None, [7], [{}], [{"params": "w"}], [{"params": [1]}], [{"params": ["w"], 3: 4}]],
    ids=str,
)
def test_other_data_than_parameter_groups_is_an_error(saved):
    with pytest.raises(CheckpointError, match="Expected parameter groups in there"):
        check_param_groups(saved, "there")
