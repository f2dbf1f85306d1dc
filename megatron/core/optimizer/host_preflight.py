"""Whether the host side's memory fits, asked by all ranks together.

It is asked twice, of the same bytes: before there are any weights, when a plan is all that there
is (planned_memory.py), and by the optimizer, before it allocates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.host_memory import HostMemoryError, HostNeed, check_host_memory, format_bytes
from megatron.core.issued_collectives import issuing
from megatron.core.local_ranks import local_world_size


def check_memory_on_all_ranks(
    needs: Sequence[HostNeed], num_local_ranks: int | None, mesh: DeviceMesh | None
) -> None:
    """Checks that every rank's machine has the memory that its ranks need.

    All ranks share the result: no rank continues alone, or allocates while another still looks.

    Raises:
        HostMemoryError: on all ranks of the mesh, with the sum that does not fit, or with the
            needs of the rank that failed.
    """
    if num_local_ranks is None:
        num_local_ranks = local_world_size()
    # Each rank checks its own machine, whose limits other ranks cannot read.
    failure = None
    try:
        check_host_memory(needs, num_local_ranks=num_local_ranks)
    except HostMemoryError as error:
        failure = error

    # The largest sum that does not fit anywhere; 0 where all fit.
    failed_bytes = 0 if failure is None else sum(need.nbytes for need in needs) * num_local_ranks
    device = "cpu" if mesh is None else mesh.device_type
    most = torch.tensor(failed_bytes, dtype=torch.int64, device=device)
    if mesh is not None:
        for axis in range(mesh.ndim):
            with issuing("all-reduce of the host memory that is missing", most):
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))

    if failure is not None:
        raise failure
    if most:
        raise HostMemoryError(
            "Expected host memory on every rank's machine, got one that needs "
            f"{format_bytes(int(most))} for its ranks and has less."
        )
