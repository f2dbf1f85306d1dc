"""Norms and sums of uneven DTensors: every rank reduces its own rows, and the results are combined.

DTensor would return partial results, whose `item()` is another number on every rank. Optimizers
that take the norm of a parameter (Adafactor, LAMB) would step each rank's rows by another factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import megatron.core.distributed.fsdp.collectives as collectives
from megatron.core.distributed.fsdp.collective_history import compare
from megatron.core.distributed.fsdp.uneven_rows import (
    UnevenRows,
    replicated,
    tensors_among,
    uneven_among,
)

aten = torch.ops.aten

LIST_NORMS = {aten._foreach_norm.Scalar}
_NORMS = {aten.linalg_vector_norm.default, *LIST_NORMS}
AGGREGATES = {*_NORMS, aten.sum.default}


def can_aggregate(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `aggregate` computes this: one of AGGREGATES, over all elements."""
    if func not in _NORMS:
        return True
    dims = kwargs.get(
        "dim", args[2] if len(args) > 2 and func is aten.linalg_vector_norm.default else None
    )
    tensors: list[Any] = list(tensors_among(args, {}))
    meshes = [tensor.device_mesh if isinstance(tensor, UnevenRows) else None for tensor in tensors]
    is_of_one_mesh = None not in meshes and all(mesh == meshes[0] for mesh in meshes)

    # With another order, the zeros of a rank without rows would count.
    return is_of_one_mesh and dims is None and _order(args, kwargs) > 0


def _order(args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    return float(kwargs.get("ord", args[1] if len(args) > 1 else 2))


def aggregate(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The norm or sum of each tensor, the same on all ranks; one small message for a whole list."""
    tensors = list(uneven_among(args, {}))
    for tensor in tensors:
        tensor.check_whole(str(func))

    # Ranks whose gradients differ would send messages of different lengths.
    if func in LIST_NORMS:
        compare([tensors[0].device_mesh])

    # torch would round each rank's part to 16 bits where the rows have 16.
    dtype = kwargs.get("dtype") or tensors[0].dtype
    is_narrow = dtype.is_floating_point and dtype.itemsize < 4
    if is_narrow:
        kwargs = {**kwargs, "dtype": torch.float32}
    own = func(*[_own_rows(value, func) for value in args], **kwargs)
    # One message for all tensors, in fp64, where rounding between the ranks is negligible.
    found = torch.stack([own] if isinstance(own, torch.Tensor) else list(own))
    wide = found.double() if found.is_floating_point() else found

    order = _order(args, kwargs) if func in _NORMS else 1.0
    is_maximum = math.isinf(order)
    powers = wide if is_maximum or order == 1 else wide.pow(order)
    for axis in _cut_axes(tensors[0]):
        collectives.combine(powers, tensors[0].device_mesh.get_group(axis), by_maximum=is_maximum)
    whole = powers if is_maximum or order == 1 else powers.pow(1 / order)

    whole = whole.to(dtype if is_narrow else found.dtype)
    results = [replicated(each, tensors[0].device_mesh) for each in whole.unbind()]
    return results[0] if isinstance(own, torch.Tensor) else results


def _own_rows(value: Any, func: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_own_rows(item, func) for item in value]
    if not isinstance(value, UnevenRows):
        return value
    local = value._local_tensor

    # torch has no maximum of no elements. A row of zeros does not change any norm.
    return local if func not in _NORMS or local.numel() else local.new_zeros((1, *local.shape[1:]))


def _cut_axes(tensor: UnevenRows) -> list[int]:
    return [axis for axis, placement in enumerate(tensor.placements) if placement.is_shard()]
