from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import process_groups

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_no_group_of_one_is_made_where_another_launcher_has_started_several_ranks(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(name, "2")
    with pytest.raises(RuntimeError, match=f"Expected RANK, since {name} says"):
        process_groups.ensure_default_group("gloo")
    assert not dist.is_initialized()


class Failing:
    """A backend that has found something."""

    def __init__(self, error: str, is_wrapped: bool = False) -> None:
        self._error = SimpleNamespace(name=error)
        if is_wrapped:
            self.wrapped_pg = Failing(error)

    def get_error(self) -> Any:
        if hasattr(self, "wrapped_pg"):
            raise RuntimeError("Backend gloo does not support getError")
        return self._error


def _group(name: str, backend: object) -> SimpleNamespace:
    return SimpleNamespace(
        group_desc=name, _device_types=[CPU], _get_backend=lambda _device: backend
    )


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("SUCCESS", None),
        ("COMM_ERROR", "the communication of a collective failed, in the group 'outer'"),
        ("TIMEOUT", "a collective timed out, in the group 'outer'"),
        ("REMOTE_ERROR", "a collective failed on another rank, in the group 'outer'"),
        ("SOMETHING_NEW", "SOMETHING_NEW, in the group 'outer'"),
    ],
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_failure_that_a_backend_has_found_is_told_with_its_group(
    error, text, is_wrapped, monkeypatch
):
    groups = [_group("default", Failing("SUCCESS")), _group("outer", Failing(error, is_wrapped))]
    monkeypatch.setattr(process_groups, "_world", SimpleNamespace(pg_map=groups))
    assert process_groups.failed_collective() == text


def test_devices_are_connected_where_the_backend_can_do_so_early(monkeypatch):
    connected: list[torch.device] = []
    backend = SimpleNamespace(supports_splitting=True, eager_connect_single_device=connected.append)
    monkeypatch.setattr(process_groups, "_get_default_group", lambda: _group("default", backend))
    process_groups.connect(CPU)
    backend.supports_splitting = False
    process_groups.connect(CPU)
    assert connected == [CPU]
