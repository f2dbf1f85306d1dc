"""Operators on uneven DTensors: which run on the rows of each rank, and which need all rows.

    operation                                       computed
    elementwise, on tensors cut alike               on local rows, without communication
    elementwise, with a tensor cut otherwise        the other one is brought to these rows first
    views that keep dim 0, or flatten from it on    as views of the local rows
    norms and sums of all elements                  on each rank, then one small reduction
    on lists with other tensors among them          on the uneven ones apart from the others
    everything else                                 on all rows, which are gathered first

So every operation has the result that it has on one process, the same on every rank. All ranks of
the mesh must call operations that reduce or gather, as with any DTensor that has to be
redistributed. A view that would have to move rows (`p[0]`, `p.t()`) is a copy instead, which
rejects writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

import megatron.core.distributed.fsdp.collectives as collectives
from megatron.core.distributed.fsdp.collective_history import compare_over
from megatron.core.distributed.fsdp.uneven_elementwise import Traits, elementwise, traits_of
from megatron.core.distributed.fsdp.uneven_rows import (
    CopyOfView,
    UnevenRows,
    mixed_error,
    replicated,
    tensors_among,
    uneven_among,
    whole_tensor,
)
from megatron.core.distributed.fsdp.uneven_views import VIEWS

aten = torch.ops.aten

_LIST_NORMS = {aten._foreach_norm.Scalar}
_NORMS = {aten.linalg_vector_norm.default, *_LIST_NORMS}
_AGGREGATES = {*_NORMS, aten.sum.default}


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operator of which at least one argument is uneven.

    Raises:
        RuntimeError: for a plain tensor together with an uneven one, as DTensor does (only `copy_`
            takes one, of the whole shape); for partial sums, unless they are scaled or added up.
    """
    # The rows may be main weights that an optimizer updates in the background.
    for tensor in uneven_among(args, kwargs):
        tensor.wait_until_usable()

    if func in _WITHOUT_VALUES:
        return _WITHOUT_VALUES[func](*args, **kwargs)
    if torch.Tag.inplace_view in func.tags:
        raise NotImplementedError(f"Expected the shape of an uneven DTensor to stay, got {func}.")

    traits = traits_of(func)
    result = _computed(func, traits, args, kwargs)
    traits.count_writes(args, kwargs)
    return result


def _computed(func: Any, traits: Traits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    # From the cheapest to the dearest way. A way that cannot serve returns NotImplemented, on all
    # ranks alike and before it sends anything.
    if func in VIEWS:
        result = VIEWS[func](*args, **kwargs)
        if result is not NotImplemented:
            return result

    if (traits.is_on_lists or func in _LIST_NORMS) and len(func._schema.returns) < 2:
        parts = _parts_of_lists(args, kwargs)
        if len(parts) > 1:
            return _in_parts(func, parts, args, kwargs)
    if traits.is_elementwise:
        result = elementwise(func, traits, args, kwargs)
        if result is not NotImplemented:
            return result

    if func in _AGGREGATES and _can_aggregate(func, args, kwargs):
        return _aggregate(func, args, kwargs)
    if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
        return _unscale(func, *args, **kwargs)

    return _on_all_rows(func, traits, args, kwargs)


# Operations that need no values


def _is_same_size(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape


def _is_pinned(tensor: UnevenRows, *_: Any, **__: Any) -> bool:
    return tensor._local_tensor.is_pinned()


def _new(func: Any) -> Callable[..., DTensor]:
    """`new_zeros` and its like: cut as the tensor if of the same shape, else replicated."""

    def new(tensor: UnevenRows, size: Sequence[int], *args: Any, **kwargs: Any) -> DTensor:
        local = tensor._local_tensor
        if tuple(size) == tuple(tensor.shape):
            return tensor.with_local(func(local, local.shape, *args, **kwargs))
        return replicated(func(local, size, *args, **kwargs), tensor.device_mesh)

    return new


_WITHOUT_VALUES: dict[Any, Callable[..., Any]] = {
    aten.is_same_size.default: _is_same_size,
    aten.is_pinned.default: _is_pinned,
    **{
        func: _new(func)
        for func in (
            aten.new_empty.default,
            aten.new_full.default,
            aten.new_ones.default,
            aten.new_zeros.default,
        )
    },
}


# Lists


def _parts_of_lists(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[list[int]]:
    """The indices into an operator's lists of tensors, by the mesh and dtype of the first uneven
    tensor there; entries without an uneven tensor are one more part.
    """
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    columns = zip(*(items for items in lists if items), strict=False)
    parts: dict[tuple[DeviceMesh, torch.dtype] | None, list[int]] = {}
    for index, column in enumerate(columns):
        kinds = [(item.device_mesh, item.dtype) for item in column if isinstance(item, UnevenRows)]
        parts.setdefault(kinds[0] if kinds else None, []).append(index)

    return list(parts.values())


def _in_parts(
    func: Any, parts: Sequence[Sequence[int]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Runs an operator on lists once for each part of them."""
    length = sum(map(len, parts))

    def part(value: Any, indices: Sequence[int]) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == length:
            return [value[index] for index in indices]
        # One number for each tensor of the lists.
        if isinstance(value, torch.Tensor) and value.shape == (length,):
            return value[[*indices]]
        return value

    found: dict[int, Any] = {}
    for indices in parts:
        results = func(
            *[part(value, indices) for value in args],
            **{name: part(value, indices) for name, value in kwargs.items()},
        )
        found.update(zip(indices, results or (), strict=False))

    return [found[index] for index in range(length)] if found else None


def _unscale(
    func: Any,
    gradients: Sequence[torch.Tensor],
    found_inf: torch.Tensor,
    inverse_scale: torch.Tensor,
) -> None:
    """Multiplies gradients with `inverse_scale`, and sets `found_inf` on all ranks if one of them
    has found a number that is not finite.
    """
    uneven = [gradient for gradient in gradients if isinstance(gradient, UnevenRows)]
    others = [gradient for gradient in gradients if not isinstance(gradient, UnevenRows)]
    # NaN of ranks that disagree would be taken for an overflow, in every step.
    compare_over(gradients)
    func([gradient._local_tensor for gradient in uneven], found_inf, inverse_scale)
    if others:
        func(others, found_inf, inverse_scale)

    # DTensor's own operator looks at the first gradient alone to determine the ranks.
    axes = {
        (gradient.device_mesh, axis): None
        for gradient in uneven
        for axis, placement in enumerate(gradient.placements)
        if not placement.is_replicate()
    }
    for mesh, axis in axes:
        collectives.combine(found_inf, mesh.get_group(axis), by_maximum=True)


# Norms and sums. DTensor would return partial results, whose `item()` is another number on every
# rank. Optimizers that take the norm of a parameter (Adafactor, LAMB) would step each rank's rows
# by another factor.


def _can_aggregate(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `_aggregate` computes this: one of _AGGREGATES, over all elements."""
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


def _aggregate(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The norm or sum of each tensor, the same on all ranks; one small message for a whole list."""
    tensors = list(uneven_among(args, {}))
    for tensor in tensors:
        tensor.check_whole(str(func))

    # Ranks whose gradients differ would send messages of different lengths, or more of them. A norm
    # of weights, as in a loss, must not cost a comparison, which one replica might not join.
    if func in _NORMS and not tensors[0].requires_grad:
        compare_over(tensors)

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


# Everything else


def _on_all_rows(func: Any, traits: Traits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operation on whole tensors, as one process would, and copies the results back."""
    mesh = next(iter(uneven_among(args, kwargs))).device_mesh
    tensors = {id(tensor): tensor for tensor in tensors_among(args, kwargs)}
    wholes = {number: _whole_argument(tensor, func) for number, tensor in tensors.items()}

    def whole(value: Any) -> Any:
        return wholes[id(value)] if isinstance(value, torch.Tensor) else value

    result = func(*tree_map(whole, args), **tree_map(whole, kwargs))

    written = traits.tensors_written(args, kwargs)
    if traits.is_random:
        # Ranks may be seeded differently: the first rank's draw is everyone's.
        for drawn in [*(wholes[id(tensor)] for tensor in written), *tree_leaves(result)]:
            if isinstance(drawn, torch.Tensor):
                _agree(drawn, mesh)
    for tensor in written:
        _put_back(tensor, wholes[id(tensor)])

    originals = {id(wholes[id(tensor)]): tensor for tensor in written}
    # Not in a backward: gradients are no views, and autograd adds to them in place.
    is_backward = torch._C._current_graph_task_id() != -1
    kind = CopyOfView if _gives_views(func) and not written and not is_backward else DTensor
    return tree_map(partial(_whole_result, mesh=mesh, originals=originals, kind=kind), result)


@cache
def _gives_views(func: Any) -> bool:
    """Whether an operator returns memory of an argument."""
    return any(each.alias_info is not None for each in func._schema.returns)


def _whole_argument(tensor: torch.Tensor, func: Any) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return whole_tensor(tensor)
    if tensor.dim():
        raise mixed_error(tensor, func)
    return tensor


def _put_back(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Copies this rank's part of a result to the tensor that an operation has written to."""
    if isinstance(tensor, UnevenRows):
        tensor._local_tensor.copy_(tensor.own_rows(whole))
    elif isinstance(tensor, DTensor):
        own = replicated(whole, tensor.device_mesh).redistribute(placements=tensor.placements)
        tensor._local_tensor.copy_(own._local_tensor)


def _whole_result(
    value: Any, *, mesh: DeviceMesh, originals: Mapping[int, torch.Tensor], kind: type[DTensor]
) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return originals[id(value)] if id(value) in originals else replicated(value, mesh, kind)


def _agree(whole: torch.Tensor, mesh: DeviceMesh) -> None:
    """Makes a tensor that all ranks have whole the same on all of them: that of the first."""
    for axis in range(mesh.ndim):
        collectives.broadcast(whole, mesh.get_group(axis))
