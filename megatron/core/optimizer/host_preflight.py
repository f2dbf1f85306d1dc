"""Whether the host side's memory fits, asked by all ranks together.

It is asked twice: before there are any weights, when the plan is all that is known, and by the
optimizer, to the byte, before it allocates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.dtypes import DTYPES
from megatron.core.host_memory import HostMemoryError, HostNeed, check_host_memory, format_bytes
from megatron.core.issued_collectives import issuing
from megatron.core.local_ranks import local_world_size
from megatron.core.optimizer.config import OptimizerConfig


class HostPart(NamedTuple):
    """Elements that a rank has on the host, but for padding, and the dtypes they come in."""

    numel: int
    main_dtype: torch.dtype
    grad_dtype: torch.dtype  # of gradients as they travel
    weight_dtype: torch.dtype  # of compute weights as they travel


def host_needs(parts: Sequence[HostPart], config: OptimizerConfig) -> list[HostNeed]:
    """What the host side of a rank takes, by what it is for."""
    nbytes: dict[str, int] = {}
    for part in parts:
        for what, itemsize in _itemsizes(part, config).items():
            nbytes[what] = nbytes.get(what, 0) + part.numel * itemsize
    return [HostNeed(what, size, is_pinned=False) for what, size in nbytes.items()]


def check_host_memory_for(
    parts: Sequence[HostPart],
    config: OptimizerConfig,
    num_local_ranks: int,
    mesh: DeviceMesh,
    others: Sequence[HostNeed] = (),
) -> None:
    """Refuses, before there are any weights, what `build_optimizer` would refuse once there are.
    All ranks together.

    Args:
        others: what a rank needs besides.

    Raises:
        HostMemoryError: see `HybridDeviceOptimizer`.
    """
    check_memory_on_all_ranks([*host_needs(parts, config), *others], num_local_ranks, mesh)


def _itemsizes(part: HostPart, config: OptimizerConfig) -> dict[str, int]:
    """Bytes of an element by what they are for."""
    sizes = {"main weights": part.main_dtype.itemsize, "gradients": part.grad_dtype.itemsize}
    if config.optimizer == "adam":
        sizes["moments"] = (
            DTYPES[config.exp_avg_dtype].itemsize + DTYPES[config.exp_avg_sq_dtype].itemsize
        )
    elif config.sgd_momentum:
        sizes["momentum"] = torch.float32.itemsize

    # Elsewhere new weights are written over the gradients that they came from.
    if not shares_memory(
        part.grad_dtype, part.weight_dtype, config.pin_cpu_grads, config.pin_cpu_params
    ):
        sizes["compute weights"] = part.weight_dtype.itemsize
    return sizes


def shares_memory(
    grad_dtype: torch.dtype, weight_dtype: torch.dtype, pins_grads: bool, pins_params: bool
) -> bool:
    """Whether weights on their way up are written over the gradients that they came from."""
    return grad_dtype == weight_dtype and pins_grads == pins_params


def check_memory_on_all_ranks(
    needs: Sequence[HostNeed], num_local_ranks: int | None, mesh: DeviceMesh | None
) -> None:
    """Checks that every rank's machine has the memory that its ranks need.

    All ranks share the result: no rank continues alone, or allocates while another still looks.

    Raises:
        HostMemoryError: on all ranks of the mesh, with the sum that does not fit, or what it comes
            to elsewhere.
    """
    if num_local_ranks is None:
        num_local_ranks = local_world_size()
    # Each rank looks at its own machine, whose limits nobody else can read.
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
