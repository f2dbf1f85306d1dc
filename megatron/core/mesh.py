"""From parallel degrees to a `DeviceMesh`, which is passed to whoever needs it."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.core.process_groups import inherit_timeouts

DATA_PARALLEL_AXIS = "dp"
OUTER_AXIS, INNER_AXIS = "dp_outer", "dp_inner"


def build_mesh(device_kind: str, data_parallel_size: int) -> DeviceMesh:
    """A one-axis mesh over all ranks, for data parallelism.

    Args:
        device_kind: `Device.kind` of the ranks.
        data_parallel_size: the number of ranks; the default process group must have as many.
    """
    return init_device_mesh(
        device_kind, (data_parallel_size,), mesh_dim_names=(DATA_PARALLEL_AXIS,)
    )


def build_hybrid_mesh(device_kind: str, data_parallel_size: int, num_instances: int) -> DeviceMesh:
    """A mesh of two axes for hybrid sharding; the outer has `num_instances` groups of consecutive
    ranks.

    Raises:
        ValueError: if the ranks cannot be divided into as many equal groups.
    """
    if data_parallel_size % num_instances:
        raise ValueError(
            f"Expected a number of instances that divides {data_parallel_size} ranks, got "
            f"{num_instances}."
        )

    shape = (num_instances, data_parallel_size // num_instances)
    mesh = init_device_mesh(device_kind, shape, mesh_dim_names=(OUTER_AXIS, INNER_AXIS))
    for axis in range(mesh.ndim):
        inherit_timeouts(mesh.get_group(axis))
    return mesh
