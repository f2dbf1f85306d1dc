"""Parallel degrees -> `DeviceMesh`. A mesh is passed to whoever needs it; none is kept in a global."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DATA_PARALLEL_AXIS = "dp"


def build_mesh(device_kind: str, data_parallel_size: int) -> DeviceMesh:
    """A one-axis mesh over all ranks, for data parallelism.

    Args:
        device_kind: `Device.kind` of the ranks.
        data_parallel_size: the number of ranks; the default process group must have as many.
    """
    return init_device_mesh(device_kind, (data_parallel_size,), mesh_dim_names=(DATA_PARALLEL_AXIS,))
