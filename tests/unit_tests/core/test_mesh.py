from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.core.mesh import build_expert_mesh
from megatron.core.process_groups import set_timeout
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


@pytest.mark.parametrize(
    ("expert_size", "num_instances", "got"), [(3, 1, "3 in 1 instance"), (4, 2, "4 in 2 instances")]
)
def test_groups_that_do_not_divide_the_ranks_are_refused(expert_size, num_instances, got):
    expected = rf"divides 4 ranks, got {got}\.$"
    with pytest.raises(ValueError, match=expected):
        build_expert_mesh("cpu", 4, expert_size, num_instances)
