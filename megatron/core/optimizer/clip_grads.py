"""The global norm of sharded gradients and clipping by it; how many of their elements are zero.

[Note: squares] Summing millions of fp32 squares one after another loses digits (0.4 % at 50M elements on a CPU), and
`vector_norm` of bf16 CPU tensors is wrong by percents even where fp32 is asked for. So on a CPU the host kernel adds
the squares in fp64, in an order that does not depend on the number of threads. Elsewhere 16-bit gradients are widened
piece by piece, the norm is taken in fp32 over rows of 256 elements, and the rows' squares are added in fp64. The
relative error is below 1e-7.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron.core.issued_collectives import issuing
from megatron.core.optimizer.kernels.adam import FLOAT_DTYPES
from megatron.core.optimizer.kernels.host_adam import shared_host_adam
from megatron.core.rank_waits import waits_for_ranks

_ROW_NUMEL = 256
_PIECE_NUMEL = 16384 * _ROW_NUMEL  # what is widened at a time: 16 MiB in fp32


def squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of squares of a local tensor of any shape and floating dtype. Scalar, fp64. See [Note: squares]."""
    if tensor.device.type == "cpu" and tensor.dtype in FLOAT_DTYPES:
        return shared_host_adam(os.getpid()).squared_norm(tensor)
    flat = tensor.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for piece in flat.split(flat.numel() if flat.dtype == torch.float32 else _PIECE_NUMEL):
        whole = piece.numel() // _ROW_NUMEL * _ROW_NUMEL
        for rows in (piece[:whole].view(-1, _ROW_NUMEL), piece[whole:].view(1, -1)):
            if rows.numel():
                total += torch.linalg.vector_norm(rows.float(), dim=1).double().square().sum()
    return total


def global_grad_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The L2 norm of all gradients, every element counted once however it is sharded or replicated.

    One all-reduce of one scalar for each set of mesh axes that shard gradients: one in all, on a one-axis mesh.
    Parameters without a gradient count as zero; at least one parameter must be given.

    Returns:
        Scalar, fp64, the same on every rank. Non-finite if a gradient is.

    Raises:
        NotImplementedError: for a gradient that is a partial sum, or not sharded evenly enough to be added up.
    """
    return _sum_over_gradients(parameters, squared_norm).sqrt()


def num_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """How many elements of a local tensor of any shape and dtype are zero, of either sign. Scalar, fp64."""
    return (tensor.numel() - torch.count_nonzero(tensor.detach())).double()


def global_num_zeros(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """How many elements of all gradients are zero, every element counted once however it is sharded or replicated.

    Communicates as `global_grad_norm` does. Parameters without a gradient have no elements to count.

    Returns:
        Scalar, fp64 (exact below 2^53), the same on every rank.

    Raises:
        NotImplementedError: as `global_grad_norm`.
    """
    return _sum_over_gradients(parameters, num_zeros)


@waits_for_ranks
def _sum_over_gradients(
    parameters: Iterable[nn.Parameter], measure: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The sum over all gradients of what `measure` (a local tensor -> scalar, fp64) says of the parts of each.

    A parameter that is given twice, being tied, counts once.
    """
    local: torch.Tensor | None = None
    sharded: dict[tuple[DeviceMesh, tuple[int, ...]], torch.Tensor] = {}
    for parameter in dict.fromkeys(parameters):
        grad = parameter.grad
        if grad is None:
            continue
        if isinstance(grad, DTensor):
            key = (grad.device_mesh, _sharding_axes(grad))
            part = measure(grad.to_local())
            sharded[key] = sharded[key] + part if key in sharded else part
        else:
            local = measure(grad) if local is None else local + measure(grad)
    for (mesh, axes), part in sharded.items():
        for axis in axes:
            with issuing("all-reduce of a measure of the gradients", part):
                dist.all_reduce(part, group=mesh.get_group(axis))
        local = part if local is None else local + part
    return torch.zeros((), dtype=torch.float64) if local is None else local


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients are multiplied with so that their norm is at most `max_norm`. Scalar, at most 1."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def scale_grads(parameters: Iterable[nn.Parameter], coefficient: torch.Tensor) -> None:
    """Multiplies every gradient in place. A coefficient of 1 changes no bit."""
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad
            (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(coefficient)


def _sharding_axes(grad: DTensor) -> tuple[int, ...]:
    for placement in grad.placements:
        if not isinstance(placement, (Shard, Replicate)):
            raise NotImplementedError(f"Expected a gradient that is sharded or replicated, got {grad.placements}.")
    return tuple(axis for axis, placement in enumerate(grad.placements) if isinstance(placement, Shard))
