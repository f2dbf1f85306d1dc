"""The global norm of sharded gradients and clipping by it; how many of their elements are zero.

[Note: squares] Summing millions of fp32 squares one after another loses digits (0.4 % at 50M
elements on a CPU), and `vector_norm` of bf16 CPU tensors is wrong by percents even where fp32 is
asked for. So on a CPU the host kernel adds the squares in fp64, in an order that does not depend on
the number of threads. Elsewhere the norm is taken in fp32 over rows of 256 elements, and the rows'
squares are added in fp64. The relative error is below 2e-7. CUDA's kernel widens 16-bit elements as
it reads them; for other devices they are copied into fp32 first, 64 MiB at a time. The rows' norms
of one run take 12 bytes for 256 elements, and are gone before the next run is read.

[Note: runs] Launching a kernel takes longer than reading a bias does, so gradients are not measured
one by one, but in runs: tensors that are adjacent in memory count as one. The gradients of an
FSDP group are views of one flat buffer:

    |weight      |bias|padding|weight      |    two runs
    |weight      |none|padding|weight      |    two runs: the bias has no gradient in this step

Padding and stale gradients thus belong to no run and are not read. The order of the
sums follows from the order of the parameters and from places in storages, never from an address: it
is the same each time a program runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron.core.drivers import driver_of, kinds_of_accelerators
from megatron.core.dtypes import FLOAT_DTYPES
from megatron.core.issued_collectives import issuing
from megatron.core.optimizer.kernels.host_adam import shared_host_adam
from megatron.core.timeline import NO_TIMELINE, RANKS, AnyTimeline

_ROW_NUMEL = 256
# Elements copied into fp32 at a time where a device has no kernel that widens as it reads: 64 MiB,
# whole rows.
_PIECE_NUMEL = 65536 * _ROW_NUMEL

# (local tensors of one device, at least one, which may lack elements) -> scalar, fp64: of all of
# them together
_Measure = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of squares of a local tensor. Scalar, fp64. See [Note: squares]."""
    return _squared_norm_of_all([tensor])


def global_grad_norm(
    parameters: Iterable[nn.Parameter], timeline: AnyTimeline = NO_TIMELINE
) -> torch.Tensor:
    """The L2 norm of all gradients, every element counted once however it is sharded or replicated.

    One all-reduce of one scalar for each set of mesh axes that shard gradients: one in all, on a
    one-axis mesh. Parameters without a gradient count as zero, even where a rank has no gradient;
    at least one must be given.

    Returns:
        Scalar, fp64, the same on every rank. Non-finite if a gradient is.

    Raises:
        NotImplementedError: for a gradient that is a partial sum, or not sharded evenly enough to
            be added up.
    """
    return _sum_over_gradients(parameters, _squared_norm_of_all, timeline).sqrt()


def num_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """How many elements of a local tensor are zero, of either sign. Scalar, fp64."""
    return _num_zeros_of_all([tensor])


def global_num_zeros(
    parameters: Iterable[nn.Parameter], timeline: AnyTimeline = NO_TIMELINE
) -> torch.Tensor:
    """How many elements of all gradients are zero, every element counted once however it is sharded
    or replicated.

    Communicates as `global_grad_norm` does. Parameters without a gradient have no elements to
    count.

    Returns:
        Scalar, fp64 (exact below 2^53), the same on every rank.

    Raises:
        NotImplementedError: as `global_grad_norm`.
    """
    return _sum_over_gradients(parameters, _num_zeros_of_all, timeline)


def runs(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Joins tensors into fewer, longer flat tensors. See [Note: runs].

    Tensors that are not contiguous are returned unchanged. Within one storage, tensors are sorted
    by offset; storages and other tensors keep the order of first appearance. Tensors without
    elements are left out.
    """
    found: dict[int, list[torch.Tensor]] = {}  # by storage
    for tensor in tensors:
        if tensor.numel():
            found.setdefault(tensor.untyped_storage()._cdata, []).append(tensor.detach())

    joined: list[torch.Tensor] = []
    for together in found.values():
        # Most plain tensors have a separate storage, which needs no sorting.
        is_shared = len(together) > 1
        joined += _runs_of_storage(sorted(together, key=_first_byte)) if is_shared else together
    return joined


@torch.no_grad()
def _sum_over_gradients(
    parameters: Iterable[nn.Parameter], measure: _Measure, timeline: AnyTimeline
) -> torch.Tensor:
    """Sums `measure` of the local parts over all gradients.

    A parameter that is given twice, being tied, counts once.
    """
    plain: list[torch.Tensor] = []
    sharded: dict[tuple[DeviceMesh, tuple[int, ...]], list[torch.Tensor]] = {}
    for parameter in dict.fromkeys(parameters):
        grad = parameter.grad
        if isinstance(grad, DTensor):
            sharded.setdefault((grad.device_mesh, _sharding_axes(grad)), []).append(grad.to_local())
        elif grad is not None:
            plain.append(grad)
        elif isinstance(parameter, DTensor) and parameter.requires_grad:
            # Another rank may have one, and waits in its sum for this rank.
            nothing = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            key = (parameter.device_mesh, _sharding_axes(parameter))
            sharded.setdefault(key, []).append(nothing)

    totals = [_measure_by_device(plain, measure)] if plain else []
    # In the order of the parameters, which is the same on every rank: so are the collectives.
    for (mesh, axes), local in sharded.items():
        total = _measure_by_device(local, measure)
        for axis in axes:
            name = "all-reduce of a measure of the gradients"
            with timeline.waiting(RANKS), issuing(name, total):
                dist.all_reduce(total, group=mesh.get_group(axis))
        totals.append(total)
    return sum(totals[1:], totals[0]) if totals else torch.zeros((), dtype=torch.float64)


def _measure_by_device(tensors: Sequence[torch.Tensor], measure: _Measure) -> torch.Tensor:
    """Applies `measure` to at least one tensor, on any devices. See [Note: runs].

    Where the CPU and a device both have some, the result is on the device: torch passes a CPU
    scalar to the kernel by value, without a wait. Devices come in the order of first
    appearance, and so do their sums.
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)

    # A rank that holds no element of any of them takes part in the sum all the same.
    totals = [measure(runs(local) or local) for local in by_device.values()]
    return sum(totals[1:], totals[0])


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor of gradients that brings their norm to `max_norm` at most. Scalar, at most 1; NaN
    for a norm that is not finite, which optimizers reject as `grad_scale`.
    """
    # The epsilon is Megatron's and torch's, to be comparable with them. An infinite norm would give
    # 0, and 0 times infinity is NaN.
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) + 0.0 * norm


def scale_grads(parameters: Iterable[nn.Parameter], coefficient: torch.Tensor) -> None:
    """Multiplies every gradient in place. A coefficient of 1 changes no bit."""
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad
            # DTensor's operators would dispatch in Python for every one of them.
            (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(coefficient)


def _sharding_axes(grad: DTensor) -> tuple[int, ...]:
    for placement in grad.placements:
        if not isinstance(placement, (Shard, Replicate)):
            raise NotImplementedError(
                f"Expected a gradient that is sharded or replicated, got {grad.placements}."
            )

    return tuple(
        axis for axis, placement in enumerate(grad.placements) if isinstance(placement, Shard)
    )


def _squared_norm_of_all(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if all(tensor.device.type == "cpu" and tensor.dtype in FLOAT_DTYPES for tensor in tensors):
        kernel = shared_host_adam(os.getpid())
        sums = [kernel.squared_norm(tensor) for tensor in tensors]
        return sum(sums[1:], sums[0])

    # On a device: three kernels, and three or four for each tensor.
    norms = [_norm_on_device(tensor.detach().reshape(-1)) for tensor in tensors]
    return torch.stack(norms).square().sum()


def _norm_on_device(flat: torch.Tensor) -> torch.Tensor:
    """Scalar, fp64."""
    # Of each tensor by itself: the norms of its rows are freed before the next one's are made.
    dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
    norms = flat.new_empty(-(-flat.numel() // _ROW_NUMEL), dtype=dtype)

    done = 0
    for rows in _rows(flat):
        torch.linalg.vector_norm(rows, dim=1, dtype=norms.dtype, out=norms[done : done + len(rows)])
        done += len(rows)
    norm: torch.Tensor = torch.linalg.vector_norm(norms, dtype=torch.float64)
    return norm


def _num_zeros_of_all(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    # torch's kernel for counting nonzero elements makes no mask.
    total = sum(tensor.numel() for tensor in tensors)
    others = torch.stack([torch.count_nonzero(tensor.detach()) for tensor in tensors]).sum()
    return total - others.double()


def _rows(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields all elements as matrices; the last one has the remainder as a single row."""
    for piece in [flat] if _is_widened_while_read(flat) else flat.split(_PIECE_NUMEL):
        whole = piece.numel() // _ROW_NUMEL * _ROW_NUMEL
        if whole:
            yield piece[:whole].view(-1, _ROW_NUMEL)
        if whole < piece.numel():
            yield piece[whole:].view(1, -1)


def _is_widened_while_read(tensor: torch.Tensor) -> bool:
    """Whether `vector_norm` computes a result in fp32 or wider without a copy."""
    if tensor.dtype.itemsize >= torch.float32.itemsize:
        return True

    kind = tensor.device.type
    return kind in kinds_of_accelerators() and driver_of(kind).widens_as_it_reads


def _runs_of_storage(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The runs of tensors of one storage, in the order of their places."""
    found: list[list[torch.Tensor]] = []
    for tensor in tensors:
        if found and _continues(found[-1][-1], tensor):
            found[-1].append(tensor)
        else:
            found.append([tensor])
    return [_joined(run) for run in found]


def _first_byte(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _continues(tensor: torch.Tensor, following: torch.Tensor) -> bool:
    """Whether `following`, of the same storage, starts where `tensor` ends."""
    return (
        tensor.dtype == following.dtype
        and tensor.is_contiguous()
        and following.is_contiguous()
        and tensor.storage_offset() + tensor.numel() == following.storage_offset()
    )


def _joined(run: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(run) == 1:
        return run[0]
    return run[0].as_strided((sum(tensor.numel() for tensor in run),), (1,))
