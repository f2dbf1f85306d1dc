from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from megatron.core.device import Device, kind_of
from megatron.core.options import ConfigError
from tests.helpers.ranks import run_ranks


def test_a_missing_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match="--device: expected a device that this machine has, got 'cuda'"
    ):
        kind_of("cuda")


def test_more_ranks_than_gpus_are_rejected_on_all_of_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        ConfigError, match="at most one process for each of the 2 GPUs of this machine, got 3"
    ):
        Device.for_rank("cuda", 0, local_world_size=3)


SLURM = (
    "SLURM_LOCALID",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
    "SLURM_GPUS_ON_NODE",
    "SLURM_NTASKS_PER_NODE",
    "TORCHELASTIC_RUN_ID",
)


@pytest.mark.parametrize(
    ("environment", "is_bound"),
    [
        ({"SLURM_LOCALID": "3", "SLURM_GPUS_PER_TASK": "1"}, True),
        ({"SLURM_LOCALID": "3", "SLURM_GPUS_PER_TASK": "a100:1"}, True),
        ({"SLURM_LOCALID": "3", "SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "per_task:1"}, True),
        # A job script with CUDA_VISIBLE_DEVICES=0, on a machine with enough GPUs.
        ({"SLURM_LOCALID": "3", "SLURM_GPUS_ON_NODE": "4", "SLURM_NTASKS_PER_NODE": "4"}, False),
        ({"SLURM_LOCALID": "3", "SLURM_GPUS_ON_NODE": "4", "SLURM_GPU_BIND": "single:1"}, False),
        ({"SLURM_LOCALID": "3", "SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "map_gpu:0"}, False),
        ({"SLURM_LOCALID": "3", "SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "none"}, False),
        ({"SLURM_LOCALID": "3", "SLURM_GPUS_PER_TASK": "2"}, False),  # and yet it sees one
        ({"SLURM_LOCALID": "3", "SLURM_GPUS_PER_TASK": "a100:1,v100:1"}, False),
        ({"SLURM_LOCALID": "3", "SLURM_GPUS_ON_NODE": "1"}, False),
        ({"SLURM_LOCALID": "0", "SLURM_GPUS_PER_TASK": "1"}, False),  # a torchrun's, or a shell's
        ({"SLURM_LOCALID": "3", "SLURM_GPUS_PER_TASK": "1", "TORCHELASTIC_RUN_ID": "job"}, False),
        ({}, False),
    ],
)
def test_a_rank_takes_the_one_gpu_that_it_sees_only_if_slurm_gave_it_to_no_other(
    monkeypatch, environment, is_bound
):
    for name in SLURM:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    if is_bound:
        assert Device.for_rank("cuda", 3, local_world_size=4) == Device("cuda", 0)
        assert current == [0]
    else:
        with pytest.raises(
            ConfigError, match="at most one process for each of the 1 GPUs of this machine, got 4"
        ):
            Device.for_rank("cuda", 3, local_world_size=4)


def test_the_cpu_has_no_generator_of_its_own():
    device = Device.for_rank("cpu", 3, local_world_size=4)
    assert device == Device("cpu", 0)
    assert device.rng_state() is None
    with pytest.raises(RuntimeError, match="random generator"):
        device.set_rng_state(torch.zeros(1, dtype=torch.uint8))


def _peak_growth(extra: int) -> int:
    before = Device("cpu").peak_memory_bytes()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    held = torch.ones(before - resident + extra, dtype=torch.uint8)
    assert held.sum() > 0
    return Device("cpu").peak_memory_bytes() - before


def test_peak_memory_grows_with_what_is_allocated():
    # On a rank: this process may have held gigabytes before, which would have to be touched again.
    extra = 64 * 2**20
    assert run_ranks(1, _peak_growth, extra)[0] > 0.5 * extra


def test_a_device_is_deterministic_without_exceptions_for_a_while():
    def settings() -> tuple[bool, bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )

    before = settings()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        outside = settings()
        with Device("cpu").deterministic():
            assert settings() == (True, False, False)
        assert settings() == outside
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
