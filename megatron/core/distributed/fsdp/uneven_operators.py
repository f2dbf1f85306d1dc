"""Operators on uneven DTensors: which run on the rows of each rank, and which need all rows.

    operation                                       computed
    elementwise, on tensors of one shape            on local rows, without communication
    elementwise, with a tensor cut otherwise        the other one is brought to these rows first
    views that keep dim 0 as it is                  as views of the local rows
    norms and sums of all elements                  on each rank, then one small reduction
    on lists with other tensors among them          on the uneven ones apart from the others
    everything else                                 on all rows, which are gathered first

Optimizers, clipping, averages of weights and checkpoints need the operators before the last line.
Every operation has the result that it has on one process, the same on every rank. All ranks of
the mesh must call operations that reduce or gather, as with any DTensor that has to be
redistributed. A view that would have to move rows (`p[0]`, `p.t()`) is a copy instead, which
rejects writes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

import megatron.core.distributed.fsdp.collectives as collectives
from megatron.core.distributed.fsdp.collective_history import compare_over
from megatron.core.distributed.fsdp.uneven_rows import UnevenRows, recut, replicated, whole_tensor
from megatron.core.dtensors import local_tensor

aten = torch.ops.aten

_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default
_LIST_NORM = aten._foreach_norm.Scalar
_NORMS = {aten.linalg_vector_norm.default, _LIST_NORM}
_FUSED_OPTIMIZERS = {"_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd"}

# Not tagged as pointwise by torch, though each element of the result depends on the same element of
# the arguments.
_ALSO_ELEMENTWISE = {
    aten.alias.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.full_like.default,
    aten.ones_like.default,
    aten.zero_.default,
    aten.zeros_like.default,
    aten._pin_memory.default,
    aten._to_copy.default,
}

# Operators, in place and on lists as well, that turn partial sums into the partial sums of the
# result: the first set if no other argument is a tensor with rows, the second if all are partial
# sums.
_SCALING = {
    "_to_copy",
    "alias",
    "clone",
    "detach",
    "div",
    "empty_like",
    "mul",
    "zero",
    "zeros_like",
}
_ADDING = {"add", "copy"}


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operator of which at least one argument is uneven.

    Raises:
        RuntimeError: for a plain tensor together with an uneven one, as DTensor does (only `copy_`
            takes one, of the whole shape); for partial sums, unless they are scaled or added up.
    """
    # The rows may be main weights that an optimizer updates in the background.
    for tensor in _uneven_among(args, kwargs):
        tensor.wait_until_usable()

    if func in _WITHOUT_VALUES:
        return _WITHOUT_VALUES[func](*args, **kwargs)
    if torch.Tag.inplace_view in func.tags:
        raise NotImplementedError(f"Expected the shape of an uneven DTensor to stay, got {func}.")

    result = _computed(func, args, kwargs)
    count_writes(func, args, kwargs)
    return result


def _computed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    # A way that cannot serve returns NotImplemented, on all ranks alike and before it sends
    # anything.
    result: Any = NotImplemented
    if func is _UNSCALE:
        return _unscale(*args)
    if func in _VIEWS:
        result = _view(func, *args, **kwargs)
    elif (_is_on_lists(func) or func is _LIST_NORM) and len(parts := _parts(args, kwargs)) > 1:
        result = _in_parts(func, parts, args, kwargs)
    elif _is_elementwise(func):
        result = _elementwise(func, args, kwargs)
    elif func in _NORMS or func is aten.sum.default:
        result = _aggregate(func, args, kwargs)

    return _on_all_rows(func, args, kwargs) if result is NotImplemented else result


# Properties of operators, by their schemas


def _name(func: Any) -> str:
    """The operator's name, without its overload."""
    name: str = func._schema.name
    return name.removeprefix("aten::")


@cache
def _is_elementwise(func: Any) -> bool:
    """Whether an element of a result depends on the same element of the arguments alone."""
    if torch.Tag.data_dependent_output in func.tags or _is_random(func):
        return False
    return torch.Tag.pointwise in func.tags or func in _ALSO_ELEMENTWISE or _is_on_lists(func)


@cache
def _is_on_lists(func: Any) -> bool:
    """Whether an operator is elementwise on the tensors in its lists, as operators for optimizers
    are.
    """
    name = _name(func).removesuffix("_")
    single = name.removeprefix("_foreach_")
    packet = getattr(aten, single, None)
    # `max` of two tensors is pointwise, while `_foreach_max` reduces each tensor.
    if single == name or packet is None or single == "max":
        return name in _FUSED_OPTIMIZERS

    # torch tags the single operators, not their forms for lists.
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return single in ("copy", "zero") or any(torch.Tag.pointwise in each.tags for each in overloads)


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def _gives_views(func: Any) -> bool:
    """Whether an operator returns memory of an argument."""
    return any(each.alias_info is not None for each in func._schema.returns)


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """The position and name of each argument that an operator writes to."""
    return tuple(
        (position, each.name)
        for position, each in enumerate(func._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    )


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes to."""
    found = [
        args[position] if position < len(args) else kwargs.get(name)
        for position, name in _written_arguments(func)
    ]
    return list(_tensors_among(found, {}))


def count_writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Increments the version counters of the DTensors that an operator has written to.

    Compute weights, and gradients that were copied to host memory, detect writes by them.
    """
    # torch counts most writes too, but not writes by `_foreach_mul_` to DTensors, nor writes of
    # `_amp_foreach_non_finite_check_and_unscale_` and `_fused_adamw_`. Counting twice is harmless.
    written = [
        tensor
        for tensor in _written(func, args, kwargs)
        if isinstance(tensor, DTensor) and not tensor.is_inference()
    ]
    if written:
        torch.autograd.graph.increment_version(written)


def _tensors_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments, also in lists."""
    # Faster than a walk through nested containers, which operators do not take.
    for value in itertools.chain(args, kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, torch.Tensor):
                    yield item


def _uneven_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[UnevenRows]:
    return (tensor for tensor in _tensors_among(args, kwargs) if isinstance(tensor, UnevenRows))


# Operations that need no values


def _new(func: Any) -> Callable[..., DTensor]:
    """`new_zeros` and its like: cut as the tensor if of the same shape, else replicated."""

    def new(tensor: UnevenRows, size: Sequence[int], *args: Any, **kwargs: Any) -> DTensor:
        local = tensor._local_tensor
        if tuple(size) == tuple(tensor.shape):
            return tensor.with_local(func(local, local.shape, *args, **kwargs))
        return replicated(func(local, size, *args, **kwargs), tensor.device_mesh)

    return new


_WITHOUT_VALUES: dict[Any, Callable[..., Any]] = {
    aten.is_same_size.default: lambda first, second: first.shape == second.shape,
    aten.is_pinned.default: lambda tensor, *_: tensor._local_tensor.is_pinned(),
    **{
        func: _new(func)
        for func in (
            aten.new_empty.default,
            aten.new_empty_strided.default,
            aten.new_full.default,
            aten.new_ones.default,
            aten.new_zeros.default,
        )
    },
}


# Views

_VIEWS = {
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._unsafe_view.default,
}
_WITH_SIZE = {aten.expand.default, aten.view.default, aten._unsafe_view.default}


def _view(func: Any, tensor: UnevenRows, *args: Any, **kwargs: Any) -> Any:
    """A view of the local rows. NotImplemented where dim 0 of the result is not dim 0 of the
    tensor.
    """
    # By the shape, which is the same on all ranks: strides of empty shards have no meaning.
    shell = torch.empty(tensor.shape, device="meta")
    views = func(shell, *args, **kwargs)
    # Where there is only one row, dim 0 may be a new dim of the same size and stride.
    if len(shell) < 2 or not all(
        view.dim() and len(view) == len(shell) and view.stride(0) == shell.stride(0)
        for view in tree_leaves(views)
    ):
        return NotImplemented

    local = tensor._local_tensor
    tails = [view.shape[1:] for view in tree_leaves(views)]
    if tensor.cut.has_parts_of_rows:
        # Columns are on other ranks.
        if any(tail != shell.shape[1:] for tail in tails):
            return NotImplemented
        tails = [local.shape[1:]]
    if func in _WITH_SIZE:
        args = ([len(local), *tails[0]], *args[1:])
    return tree_map(tensor.with_local, func(local, *args, **kwargs))


# Lists


def _parts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[list[int]]:
    """The indices into an operator's lists of tensors, by the mesh and dtype of the first uneven
    tensor there; entries without an uneven tensor are one more part.
    """
    parts: dict[tuple[DeviceMesh, torch.dtype] | None, list[int]] = {}
    for index, column in enumerate(_columns([*args, *kwargs.values()], are_lists=True)):
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


# Elementwise


def _elementwise(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operation on local rows. NotImplemented where it has to see all rows."""
    is_on_lists = _is_on_lists(func)
    columns = _columns([*args, *kwargs.values()], are_lists=is_on_lists)
    written = {id(tensor) for tensor in _written(func, args, kwargs)}
    references = [_reference(column, written) for column in columns]

    # Before any communication. Ranks come to the same result, since they only read global facts.
    for column, reference in zip(columns, references, strict=True):
        if not _can_stay_local(func, column, reference, written):
            return NotImplemented

    outer: dict[int, torch.Tensor] = {}

    def local(tensor: torch.Tensor, reference: UnevenRows | None) -> torch.Tensor:
        """The local tensor of an argument, with which `outer` finds that again."""
        found = _localised(func, tensor, reference)
        outer[id(found)] = tensor
        return found

    # Not recursive: a function that refers to itself is a cycle, which would keep these tensors.
    def own(value: Any, reference: UnevenRows | None) -> Any:
        if isinstance(value, torch.Tensor):
            return local(value, reference)
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return [local(*each) for each in zip(value, references, strict=True)]
        return value

    # A tensor next to lists holds numbers, one for all or one for each.
    one = None if is_on_lists else references[0]
    result = func(
        *[own(value, one) for value in args],
        **{name: own(value, one) for name, value in kwargs.items()},
    )

    if not isinstance(result, (list, tuple)):
        return _outer_result(result, references[0], outer)
    cuts = references if is_on_lists else references * len(result)
    return type(result)(
        [_outer_result(item, cut, outer) for item, cut in zip(result, cuts, strict=True)]
    )


def _columns(values: Sequence[Any], *, are_lists: bool) -> list[Sequence[torch.Tensor]]:
    """The tensors that meet element by element: all of them, or the tensors at one index of all
    lists.
    """
    if not are_lists:
        return [[value for value in values if isinstance(value, torch.Tensor)]]
    lists = [value for value in values if isinstance(value, (list, tuple)) and value]
    return list(zip(*(each for each in lists if isinstance(each[0], torch.Tensor)), strict=True))


def _reference(column: Sequence[torch.Tensor], written: set[int]) -> UnevenRows:
    """The tensor whose rows the others of a column are brought to: one that is written to cannot
    move.
    """
    found = [tensor for tensor in column if isinstance(tensor, UnevenRows)]
    return next((tensor for tensor in found if id(tensor) in written), found[0])


def _can_stay_local(
    func: Any, column: Sequence[torch.Tensor], reference: UnevenRows, written: set[int]
) -> bool:
    """Whether an operation on these tensors can run on the rows of `reference`."""
    if any(isinstance(tensor, UnevenRows) and tensor.is_partial() for tensor in column):
        _check_partial(func, column, reference)

    for tensor in column:
        if isinstance(tensor, UnevenRows) and tensor.is_cut_as(reference):
            continue
        # Every rank has all of a plain scalar, such as the number of steps.
        if not tensor.dim() and not (isinstance(tensor, DTensor) and id(tensor) in written):
            continue
        # A plain tensor may be the source of a copy; otherwise it is an error later.
        can_move = tensor.shape == reference.shape or not isinstance(tensor, DTensor)
        if id(tensor) in written or not can_move:
            return False

    return True


def _check_partial(func: Any, column: Sequence[torch.Tensor], reference: UnevenRows) -> None:
    """RuntimeError if an operation on partial sums would not give the partial sums of the
    result.
    """
    name = _name(func).removeprefix("_foreach_").removesuffix("_")
    is_scaled = name in _SCALING and "mode" not in func._overloadname and column[0] is reference
    is_scaled = is_scaled and all(tensor.dim() == 0 for tensor in column[1:])
    is_added = name in _ADDING and len(column) > 1
    is_added = is_added and all(
        isinstance(each, UnevenRows) and each.is_cut_as(reference) for each in column
    )

    if not is_scaled and not is_added:
        reference.check_whole(str(func))


def _localised(func: Any, tensor: torch.Tensor, reference: UnevenRows | None) -> torch.Tensor:
    """The part of a tensor that meets the rows of `reference`; all of one without dims."""
    if reference is None or tensor.dim() == 0:
        return whole_tensor(tensor)
    if isinstance(tensor, UnevenRows) and tensor.is_cut_as(reference):
        return tensor._local_tensor

    if not isinstance(tensor, DTensor):
        # Loading a whole tensor into a parameter needs no communication.
        if func is aten.copy_.default and tensor.shape == reference.shape:
            return reference.own_rows(tensor)
        _check_mixed(func, [tensor], {})
    return local_tensor(recut(tensor, reference))


def _outer_result(value: Any, reference: UnevenRows, outer: Mapping[int, torch.Tensor]) -> Any:
    """The argument that the operation has written to, or a new tensor cut as `reference`."""
    if id(value) in outer:
        return outer[id(value)]
    return reference.with_local(value) if isinstance(value, torch.Tensor) else value


# Norms and sums. DTensor would return partial results, whose `item()` is another number on every
# rank. Optimizers that take the norm of a parameter (Adafactor, LAMB) would step each rank's rows
# by another factor.


def _aggregate(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The norm or sum of each tensor, the same on all ranks; one small message for a whole list.
    NotImplemented for norms over single dims.
    """
    is_norm, tensors = func in _NORMS, list(_uneven_among(args, {}))
    order = float(kwargs.get("ord", args[1] if len(args) > 1 else 2)) if is_norm else 1.0
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    # With an order below 0, the zeros of a rank without rows would count.
    if (func is not _LIST_NORM and dims is not None) or order <= 0:
        return NotImplemented
    for tensor in tensors:
        tensor.check_whole(str(func))

    # Ranks whose gradients differ would send messages of different lengths, or more of them. A norm
    # of weights, as in a loss, must not cost a comparison, which one replica might not join.
    if is_norm and not tensors[0].requires_grad:
        compare_over(tensors)

    # torch would round each rank's part to 16 bits where the rows have 16.
    dtype = kwargs.get("dtype") or tensors[0].dtype
    is_narrow = dtype.is_floating_point and dtype.itemsize < 4
    if is_narrow:
        kwargs = {**kwargs, "dtype": torch.float32}
    own = func(*tree_map(partial(_own_rows, is_norm=is_norm), args), **kwargs)
    # One message for all tensors, in fp64, where rounding between the ranks is negligible.
    found = torch.stack([own] if isinstance(own, torch.Tensor) else list(own))
    wide = found.double() if found.is_floating_point() else found

    is_maximum, mesh = math.isinf(order), tensors[0].device_mesh
    powers = wide if is_maximum or order == 1 else wide.pow(order)
    for axis, placement in enumerate(tensors[0].placements):
        if placement.is_shard():
            collectives.combine(powers, mesh.get_group(axis), by_maximum=is_maximum)
    whole = powers if is_maximum or order == 1 else powers.pow(1 / order)

    whole = whole.to(dtype if is_narrow else found.dtype)
    results = [replicated(each, mesh) for each in whole.unbind()]
    return results[0] if isinstance(own, torch.Tensor) else results


def _own_rows(value: Any, *, is_norm: bool) -> Any:
    if not isinstance(value, UnevenRows):
        return value
    local = value._local_tensor

    # torch has no maximum of no elements. A row of zeros does not change any norm.
    return local if local.numel() or not is_norm else local.new_zeros((1, *local.shape[1:]))


def _unscale(
    gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> Any:
    """Multiplies gradients with `inverse_scale`, and sets `found_inf` on all ranks if one of them
    has found a number that is not finite.
    """
    uneven = [gradient for gradient in gradients if isinstance(gradient, UnevenRows)]
    others = [gradient for gradient in gradients if not isinstance(gradient, UnevenRows)]
    # NaN of ranks that disagree would be taken for an overflow, in every step.
    compare_over(gradients)
    _UNSCALE([gradient._local_tensor for gradient in uneven], found_inf, inverse_scale)
    if others:
        _UNSCALE(others, found_inf, inverse_scale)

    # DTensor's own operator looks at the first gradient alone to determine the ranks.
    axes = {
        (gradient.device_mesh, axis): None
        for gradient in uneven
        for axis, placement in enumerate(gradient.placements)
        if not placement.is_replicate()
    }
    for mesh, axis in axes:
        collectives.combine(found_inf, mesh.get_group(axis), by_maximum=True)


# Everything else


def _on_all_rows(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operation on whole tensors, as one process would, and copies the results back."""
    _check_mixed(func, args, kwargs)
    mesh = next(_uneven_among(args, kwargs)).device_mesh
    tensors = {id(tensor): tensor for tensor in _tensors_among(args, kwargs)}
    wholes = {number: whole_tensor(tensor) for number, tensor in tensors.items()}

    def whole(value: Any) -> Any:
        return wholes[id(value)] if isinstance(value, torch.Tensor) else value

    result = func(*tree_map(whole, args), **tree_map(whole, kwargs))

    written = _written(func, args, kwargs)
    if _is_random(func):
        # Ranks may be seeded differently: the first rank's draw is everyone's.
        for drawn in [*(wholes[id(tensor)] for tensor in written), *tree_leaves(result)]:
            if isinstance(drawn, torch.Tensor):
                for axis in range(mesh.ndim):
                    collectives.broadcast(drawn, mesh.get_group(axis))
    for tensor in written:
        _put_back(tensor, wholes[id(tensor)])

    # Not in a backward: gradients are no views, and autograd adds to them in place.
    is_backward = torch._C._current_graph_task_id() != -1
    kind = CopyOfView if _gives_views(func) and not written and not is_backward else DTensor
    outer = {id(wholes[id(tensor)]): tensor for tensor in written}

    def distributed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return outer[id(value)] if id(value) in outer else replicated(value, mesh, kind)

    return tree_map(distributed, result)


def _put_back(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Copies this rank's part of a result to the tensor that an operation has written to."""
    if isinstance(tensor, UnevenRows):
        tensor._local_tensor.copy_(tensor.own_rows(whole))
    elif isinstance(tensor, DTensor):
        own = replicated(whole, tensor.device_mesh).redistribute(placements=tensor.placements)
        tensor._local_tensor.copy_(own._local_tensor)


class CopyOfView(DTensor):
    """A gathered copy of what would be a view on one process: the same on all ranks, read-only.

    Writes to it would be lost, so in-place operators raise an error. All others are DTensor's.
    """

    @classmethod
    @_disable_dynamo  # as DTensor's
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(tensor, CopyOfView) for tensor in _written(func, args, kwargs)):
            raise RuntimeError(
                f"Expected memory of the parameter's own to write to in {func}, got a gathered "
                "copy, since the view would move rows between ranks. Write to the parameter, or to "
                "its to_local()."
            )
        _check_mixed(func, args, kwargs)

        result = func(*tree_map(_as_dtensor, args), **tree_map(_as_dtensor, kwargs))
        return tree_map(_as_copy, result) if _gives_views(func) else result


def _as_dtensor(value: Any) -> Any:
    if not isinstance(value, CopyOfView):
        return value
    return replicated(value._local_tensor, value.device_mesh)


def _as_copy(value: Any) -> Any:
    if type(value) is not DTensor:
        return value
    return replicated(value._local_tensor, value.device_mesh, CopyOfView)


def _check_mixed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """RuntimeError for a plain tensor and a sharded one as arguments of one operator."""
    for tensor in _tensors_among(args, kwargs):
        if tensor.dim() and not isinstance(tensor, DTensor):
            raise RuntimeError(
                f"{func} got a sharded tensor, such as a weight, and a plain one of shape "
                f"{tuple(tensor.shape)}. Take full_tensor() of the sharded one, whose gradient is "
                "the mean of the ranks' gradients. Or keep the weights of its module whole from "
                "forward to backward, with fully_shard(..., reshard_after_forward=False). "
                "to_local() has the rows of this rank."
            )
