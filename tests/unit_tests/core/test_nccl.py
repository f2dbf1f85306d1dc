from __future__ import annotations

import os

import pytest

from megatron.core.device import Device
from megatron.core.nccl import leave_failures_to_watchdog

OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def test_pytorch_finds_failures_and_ends_no_rank(caplog):
    environment: dict[str, str] = {}
    leave_failures_to_watchdog(environment)
    assert environment == OURS
    assert caplog.records == []


@pytest.mark.parametrize(
    ("name", "value", "warns"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", True),
        ("TORCH_NCCL_ENABLE_MONITORING", "False", False),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", False),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", False),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", True),
        ("TORCH_NCCL_DESYNC_DEBUG", "1", True),
        ("NCCL_BLOCKING_WAIT", "1", True),
    ],
)
def test_what_the_user_has_set_stays_with_one_warning(name, value, warns, caplog):
    environment = {name: value}
    leave_failures_to_watchdog(environment)
    assert environment == {**OURS, name: value}
    warnings = [record.getMessage().endswith(f": {name}={value}") for record in caplog.records]
    assert warnings == [True] * warns


def test_an_old_name_counts_as_long_as_the_new_one_is_not_set():
    """PyTorch prefers the new one, so that setting it would go over the user's head."""
    environment = {"NCCL_ASYNC_ERROR_HANDLING": "1"}
    leave_failures_to_watchdog(environment)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in environment


def test_a_gpu_prepares_for_a_watchdog_and_the_cpu_need_not(monkeypatch):
    for name in OURS:
        monkeypatch.setenv(name, "")  # so that later settings go again
        monkeypatch.delenv(name)
    Device("cpu").prepare_collectives()
    assert not OURS.keys() & os.environ.keys()
    Device("cuda").prepare_collectives()
    assert {name: os.environ[name] for name in OURS} == OURS
