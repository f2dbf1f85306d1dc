"""Views of uneven DTensors that are views of the rows of each rank.

Each function has the result of the operator of its name on one process, or returns NotImplemented
if rows would have to move: dim 0 must stay as it is, or take in the dims behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.core.distributed.fsdp.uneven_rows import UnevenRows
from megatron.core.distributed.fsdp.uneven_shard import UnevenShard

aten = torch.ops.aten


def _view(tensor: UnevenRows, size: Sequence[int]) -> Any:
    known = math.prod(length for length in size if length != -1)
    shape = [tensor.numel() // known if length == -1 and known else length for length in size]
    if not shape or math.prod(shape) != tensor.numel():
        return NotImplemented
    # Rows that are joined need a cut that no group of them straddles.
    if tensor.shape[0] % shape[0] == 0 and shape[0] < tensor.shape[0]:
        return _grouped(tensor, shape)
    if shape[0] % tensor.shape[0]:
        return NotImplemented

    # Dims that are flattened into dim 0 make several rows of each.
    local, factor = tensor._local_tensor, shape[0] // tensor.shape[0]
    rows = local.view(local.shape[0] * factor, *shape[1:])
    return tensor.with_local(rows) if factor == 1 else tensor.flattened(rows)


def _grouped(tensor: UnevenRows, shape: Sequence[int]) -> Any:
    """A view that joins every so many rows, if no rank has only some of a group."""
    factor = tensor.shape[0] // shape[0]
    placements: list[Any] = [
        placement.grouped(factor) if isinstance(placement, UnevenShard) else placement
        for placement in tensor.placements
    ]
    if None in placements:
        return NotImplemented
    local = tensor._local_tensor

    return tensor.recut_view(local.view(local.shape[0] // factor, *shape[1:]), placements, shape)


def _slice(
    tensor: UnevenRows,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    is_everything = not start and (end is None or end >= tensor.shape[dim]) and step == 1
    if dim % tensor.dim() == 0 and not is_everything:
        return NotImplemented
    if is_everything:
        return tensor.with_local(aten.alias.default(tensor._local_tensor))

    return tensor.with_local(aten.slice.Tensor(tensor._local_tensor, dim, start, end, step))


def _select(tensor: UnevenRows, dim: int, index: int) -> Any:
    if dim % tensor.dim() == 0:
        return NotImplemented
    return tensor.with_local(aten.select.int(tensor._local_tensor, dim, index))


def _unsqueeze(tensor: UnevenRows, dim: int) -> Any:
    if dim % (tensor.dim() + 1) == 0:
        return NotImplemented
    return tensor.with_local(aten.unsqueeze.default(tensor._local_tensor, dim))


def _transpose(tensor: UnevenRows, first: int, second: int) -> Any:
    if 0 in (first % tensor.dim(), second % tensor.dim()):
        return NotImplemented
    return tensor.with_local(aten.transpose.int(tensor._local_tensor, first, second))


def _permute(tensor: UnevenRows, dims: Sequence[int]) -> Any:
    if dims[0] % tensor.dim():
        return NotImplemented
    return tensor.with_local(aten.permute.default(tensor._local_tensor, dims))


def _squeeze(tensor: UnevenRows, dims: Sequence[int] | int | None = None) -> Any:
    asked = range(tensor.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    flat = [dim % tensor.dim() for dim in asked if tensor.shape[dim] == 1]
    if 0 in flat:
        return NotImplemented
    return tensor.with_local(aten.squeeze.dims(tensor._local_tensor, flat))


def _expand(tensor: UnevenRows, size: Sequence[int], *, implicit: bool = False) -> Any:
    if len(size) != tensor.dim() or size[0] not in (-1, tensor.shape[0]):
        return NotImplemented
    return tensor.with_local(
        aten.expand.default(tensor._local_tensor, [-1, *size[1:]], implicit=implicit)
    )


def _split(tensor: UnevenRows, sizes: int | Sequence[int], dim: int = 0) -> Any:
    if dim % tensor.dim() == 0:
        return NotImplemented
    split = aten.split.Tensor if isinstance(sizes, int) else aten.split_with_sizes.default
    return [tensor.with_local(part) for part in split(tensor._local_tensor, sizes, dim)]


def _unbind(tensor: UnevenRows, dim: int = 0) -> Any:
    if dim % tensor.dim() == 0:
        return NotImplemented
    return [tensor.with_local(part) for part in aten.unbind.int(tensor._local_tensor, dim)]


def _view_dtype(tensor: UnevenRows, dtype: torch.dtype) -> Any:
    # Another size of elements would change the length of rows.
    if dtype.itemsize != tensor.dtype.itemsize:
        return NotImplemented
    return tensor.with_local(aten.view.dtype(tensor._local_tensor, dtype))


VIEWS: dict[Any, Callable[..., Any]] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.unsqueeze.default: _unsqueeze,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.expand.default: _expand,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.view.dtype: _view_dtype,
}
