from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import local_ranks, mesh
from megatron.core.mesh import (
    build_context_mesh,
    build_expert_mesh,
    group_over,
    ranks_over,
    second_group,
    set_timeout,
)
from tests.helpers.ranks import on_ranks


@on_ranks(4)
def test_experts_are_divided_over_consecutive_ranks() -> None:
    mesh = build_expert_mesh("cpu", 4, 2)
    assert (mesh.mesh_dim_names, mesh.mesh.tolist()) == (("edp", "ep"), [[0, 1], [2, 3]])
    own = dist.get_process_group_ranks(mesh.get_group("ep"))
    assert own == [[0, 1], [0, 1], [2, 3], [2, 3]][dist.get_rank()]


@on_ranks(4)
def test_instances_of_hybrid_sharding_are_consecutive_ranks_as_well() -> None:
    mesh = build_expert_mesh("cpu", 4, 2, num_instances=2)
    assert mesh.mesh_dim_names == ("dp_outer", "edp", "ep")
    assert mesh.mesh.tolist() == [[[0, 1]], [[2, 3]]]


@on_ranks(4)
def test_ranks_along_several_axes_have_one_group() -> None:
    mesh, rank = build_expert_mesh("cpu", 4, 2, num_instances=2), dist.get_rank()
    expected = [rank % 2, rank % 2 + 2]
    assert ranks_over(mesh, (0, 1)) == expected
    group = group_over(mesh, (0, 1))
    assert dist.get_process_group_ranks(group) == expected
    assert group_over(mesh, (0, 1)) is group
    total = torch.tensor(rank)
    dist.all_reduce(total, group=group)
    assert int(total) == sum(expected)
    # No other group is made where there is one already.
    assert group_over(mesh, (2,)) is mesh.get_group(2)
    assert group_over(mesh, (0, 1, 2)) is dist.group.WORLD


@on_ranks(4)
def test_sequences_are_divided_over_consecutive_ranks() -> None:
    mesh = build_context_mesh("cpu", 4, 2)
    assert (mesh.mesh_dim_names, mesh.mesh.tolist()) == (("samples", "cp"), [[0, 1], [2, 3]])


@on_ranks(4)
def test_ranks_that_divide_layers_are_closer_than_those_that_divide_sequences() -> None:
    mesh = build_context_mesh("cpu", 4, 2, tensor_size=2)
    assert (mesh.mesh_dim_names, mesh.mesh.tolist()) == (
        ("samples", "cp", "tp"),
        [[[0, 1], [2, 3]]],
    )
    with pytest.raises(ValueError, match="4 ranks"):
        build_context_mesh("cpu", 4, 4, tensor_size=2)


@on_ranks(2)
def test_the_groups_of_the_mesh_have_the_timeout_of_the_run() -> None:
    cpu, timeout = torch.device("cpu"), timedelta(seconds=77)
    set_timeout(cpu, timeout)
    try:
        mesh = build_expert_mesh("cpu", 2, 2)
        for axis in range(mesh.ndim):
            assert mesh.get_group(axis)._get_backend(cpu).options._timeout == timeout
    finally:
        set_timeout(cpu, timedelta(minutes=30))


@on_ranks(2)
def test_a_second_group_is_made_only_where_its_ranks_would_name_it_alike() -> None:
    cpu, rank = torch.device("cpu"), dist.get_rank()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_ranks, "machine", lambda: f"machine {rank}")
        assert second_group(groups[0], cpu) is not None
        if rank == 0:
            dist.new_group([0], use_local_synchronization=True)
        assert second_group(groups[1], cpu) is None


@pytest.mark.parametrize(
    ("expert_size", "num_instances", "got"), [(3, 1, "3 in 1 instance"), (4, 2, "4 in 2 instances")]
)
def test_groups_that_do_not_divide_the_ranks_are_rejected(expert_size, num_instances, got):
    expected = rf"divides 4 ranks, got {got}\.$"
    with pytest.raises(ValueError, match=expected):
        build_expert_mesh("cpu", 4, expert_size, num_instances)


def test_sequences_are_not_divided_over_ranks_of_which_some_are_left_over():
    with pytest.raises(ValueError, match=r"divides 6 ranks, got 4\.$"):
        build_context_mesh("cpu", 6, 4)


CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_no_group_of_one_is_made_where_another_launcher_has_started_several_ranks(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(name, "2")
    with pytest.raises(RuntimeError, match=f"Expected RANK, since {name} "):
        mesh.ensure_default_group("gloo")
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
    monkeypatch.setattr(mesh, "_world", SimpleNamespace(pg_map=groups))
    assert mesh.failed_collective() == text


def test_devices_are_connected_where_the_backend_can_do_so_early(monkeypatch):
    connected: list[torch.device] = []
    backend = SimpleNamespace(supports_splitting=True, eager_connect_single_device=connected.append)
    monkeypatch.setattr(mesh, "_get_default_group", lambda: _group("default", backend))
    mesh.connect(CPU)
    backend.supports_splitting = False
    mesh.connect(CPU)
    assert connected == [CPU]
