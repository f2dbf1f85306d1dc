"""From parallel degrees to a `DeviceMesh`, which is passed to its users."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.core.device import Device
from megatron.core.log import counted
from megatron.core.process_groups import ensure_default_group, inherit_timeouts

DATA_PARALLEL_AXIS = "dp"
OUTER_AXIS, INNER_AXIS = "dp_outer", "dp_inner"
# Of experts: ranks of one place in different groups of ranks, and the groups that have all experts.
EXPERT_DATA_AXIS, EXPERT_AXIS = "edp", "ep"


def build_mesh(device_kind: str, data_parallel_size: int | None = None) -> DeviceMesh:
    """A one-axis mesh over all ranks, for data parallelism. As PyTorch's `fully_shard`, it makes a
    missing default process group.

    Args:
        device_kind: `Device.kind` of the ranks.
        data_parallel_size: the number of ranks; the default process group must have as many.
    """
    ensure_default_group(Device(device_kind, 0).collective_backend)
    size = dist.get_world_size() if data_parallel_size is None else data_parallel_size
    return init_device_mesh(device_kind, (size,), mesh_dim_names=(DATA_PARALLEL_AXIS,))


def build_hybrid_mesh(device_kind: str, data_parallel_size: int, num_instances: int) -> DeviceMesh:
    """A mesh of two axes for hybrid sharding; the outer has `num_instances` groups of consecutive
    ranks.

    Raises:
        ValueError: if the ranks cannot be divided into as many equal groups.
    """
    shape = hybrid_shape(data_parallel_size, num_instances)
    return _build(device_kind, shape, (OUTER_AXIS, INNER_AXIS))


def hybrid_shape(data_parallel_size: int, num_instances: int) -> tuple[int, int]:
    """Ranks along the axes of `build_hybrid_mesh`, which documents the error."""
    if data_parallel_size % num_instances:
        raise ValueError(
            f"Expected a number of instances that divides {data_parallel_size} ranks, got "
            f"{num_instances}."
        )
    return (num_instances, data_parallel_size // num_instances)


def build_expert_mesh(
    device_kind: str, data_parallel_size: int, expert_size: int, num_instances: int = 1
) -> DeviceMesh:
    """A mesh for the experts of a mixture, over the ranks of `build_mesh` or `build_hybrid_mesh`.

    Its last axis has `expert_size` consecutive ranks, which divide the experts among themselves and
    exchange tokens. The ranks of the axis before it hold the same experts, of which each has a
    part, in one instance of hybrid sharding. With several instances these are the first axis. Eight
    ranks, expert size 2:

        1 instance, (edp 4, ep 2)            2 instances, (dp_outer 2, edp 2, ep 2)
        0 1 | 2 3 | 4 5 | 6 7                0 1 | 2 3 || 4 5 | 6 7

    Raises:
        ValueError: if the ranks of an instance cannot be divided into groups of `expert_size`.
    """
    axes = expert_axes(data_parallel_size, expert_size, num_instances)
    return _build(device_kind, tuple(axes.values()), tuple(axes))


def expert_axes(
    data_parallel_size: int, expert_size: int, num_instances: int = 1
) -> dict[str, int]:
    """Ranks along each axis of `build_expert_mesh`, which documents the error, by its name."""
    unit = expert_size * num_instances
    if data_parallel_size % unit:
        raise ValueError(
            f"Expected an expert-parallel size that divides {data_parallel_size} ranks, got "
            f"{expert_size} in {counted(num_instances, 'instance')}."
        )

    outer = {OUTER_AXIS: num_instances} if num_instances > 1 else {}
    return {**outer, EXPERT_DATA_AXIS: data_parallel_size // unit, EXPERT_AXIS: expert_size}


def _build(device_kind: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    ensure_default_group(Device(device_kind, 0).collective_backend)
    mesh = init_device_mesh(device_kind, shape, mesh_dim_names=names)
    for axis in range(mesh.ndim):
        inherit_timeouts(mesh.get_group(axis))
    return mesh
