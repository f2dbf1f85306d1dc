from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron.core.device import Device
from megatron.core.options import ConfigError
from megatron.training.launch import Launch, process_group
from tests.ranks import run_ranks

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def test_without_torchrun_a_process_is_a_world_of_one(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert Launch.from_environment() == Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)


def test_torchruns_variables_are_read(monkeypatch):
    for name, value in zip(NAMES, ("5", "8", "1", "4"), strict=True):
        monkeypatch.setenv(name, value)
    assert Launch.from_environment() == Launch(rank=5, world_size=8, local_rank=1, local_world_size=4)


def test_half_an_environment_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="torchrun: expected integers in RANK, WORLD_SIZE"):
        Launch.from_environment()


def test_a_process_alone_opens_and_closes_its_own_group(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert not dist.is_initialized()
    with process_group(Launch(), Device("cpu"), timeout_minutes=1.0):
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()


def _existing_group() -> bool:
    with process_group(Launch.from_environment(), Device("cpu"), timeout_minutes=1.0):
        pass
    with (
        pytest.raises(RuntimeError, match="Expected a process group of 3 ranks, got one of 2"),
        process_group(Launch(world_size=3), Device("cpu"), timeout_minutes=1.0),
    ):
        pass
    return dist.is_initialized()


def test_a_group_that_is_there_is_used_and_left_standing():
    assert run_ranks(2, _existing_group) == [True, True]
