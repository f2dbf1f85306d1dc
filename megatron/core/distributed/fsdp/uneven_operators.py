"""Operators on uneven DTensors: what runs on the rows of each rank, and what needs all of them.

    operation                                       computed
    elementwise, on tensors cut alike               on local rows, nothing is sent
    elementwise, beside a tensor cut otherwise      the other one is brought to these rows first
    views that keep dim 0, or flatten from it on    as views of the local rows
    norms and sums of all elements                  on each rank, then one small reduction
    everything else                                 on all rows, which are gathered first

So every operation gives what it gives on one process, and the same on every rank. Those that reduce
or gather must be called by all ranks of the mesh, as with any DTensor that has to be redistributed.
What is a view on one process and would have to move rows (`p[0]`, `p.t()`) is a copy that refuses
to be written to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

import megatron.core.distributed.fsdp.collectives as collectives
from megatron.core.distributed.fsdp.uneven_reductions import REDUCTIONS, can_reduce, reduction
from megatron.core.distributed.fsdp.uneven_rows import (
    CopyOfView,
    UnevenRows,
    replicated,
    tensors_among,
    uneven_among,
    whole_tensor,
)
from megatron.core.distributed.fsdp.uneven_views import VIEWS

aten = torch.ops.aten


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operator of which at least one argument is uneven.

    Raises:
        RuntimeError: for a plain tensor beside an uneven one, as DTensor does (only `copy_` takes
            one, of the whole shape); for partial sums, unless they are scaled or added up.
    """
    for tensor in uneven_among(args, kwargs):
        tensor.wait_until_usable()

    if func in _WITHOUT_VALUES:
        return _WITHOUT_VALUES[func](*args, **kwargs)
    if torch.Tag.inplace_view in func.tags:
        raise NotImplementedError(f"Expected the shape of an uneven DTensor to stay, got {func}.")

    if func in VIEWS:
        result = VIEWS[func](*args, **kwargs)
        if result is not NotImplemented:
            return result

    traits = _traits(func)
    if traits.is_elementwise:
        result = _elementwise(func, traits, args, kwargs)
        if result is not NotImplemented:
            return result

    if func in REDUCTIONS and can_reduce(func, args, kwargs):
        return reduction(func, args, kwargs)
    if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
        # DTensor's own, which asks the other ranks what they have found.
        return func(*[_evenly(value) for value in args], **kwargs)

    return _on_all_rows(func, traits, args, kwargs)


class _Traits(NamedTuple):
    """What matters here of an operator.

    Attributes:
        is_elementwise: whether an element of a result depends on the same element of the arguments
            alone.
        is_on_lists: whether it does the same to each tensor of its lists, as those of optimizers.
        name: without its overload.
        is_random: whether it draws.
        written: the names of the arguments that it writes to.
        names: of the positional arguments.
    """

    is_elementwise: bool
    is_on_lists: bool
    name: str
    is_random: bool
    written: frozenset[str]
    names: tuple[str, ...]

    def tensors_written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        if not self.written:
            return []
        named = itertools.chain(zip(self.names, args, strict=False), kwargs.items())
        return list(tensors_among([value for name, value in named if name in self.written], {}))


@cache
def _traits(func: Any) -> _Traits:
    name = func._schema.name.removeprefix("aten::")
    is_on_lists = _is_pointwise_on_lists(name)
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    is_elementwise = torch.Tag.pointwise in func.tags or func in _ALSO_ELEMENTWISE or is_on_lists
    arguments = func._schema.arguments

    return _Traits(
        is_elementwise and not is_random and torch.Tag.data_dependent_output not in func.tags,
        is_on_lists,
        name,
        is_random,
        frozenset(each.name for each in arguments if each.alias_info and each.alias_info.is_write),
        tuple(each.name for each in arguments),
    )


def _is_pointwise_on_lists(name: str) -> bool:
    if name.removesuffix("_") in _FUSED_OPTIMIZERS:
        return True
    if not name.startswith("_foreach_"):
        return False
    single = name.removeprefix("_foreach_").removesuffix("_")
    packet = getattr(aten, single, None)
    if packet is None:
        return False

    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return single in ("copy", "zero") or any(torch.Tag.pointwise in each.tags for each in overloads)


# Elementwise operations

_FUSED_OPTIMIZERS = {"_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd"}

# Not tagged as pointwise, but each element of the result depends on the same element of the
# arguments.
_ALSO_ELEMENTWISE = {
    aten.alias.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.full_like.default,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.ones_like.default,
    aten.zero_.default,
    aten.zeros_like.default,
    aten._pin_memory.default,
    aten._to_copy.default,
}

# What gives, of partial sums, the partial sums of the result: whatever the other arguments are, if
# no other is a tensor with rows, and only if all of them are partial sums.
_SCALING = {
    "_foreach_div_",
    "_foreach_mul_",
    "_foreach_zero_",
    "_to_copy",
    "alias",
    "clone",
    "detach",
    "div",
    "div_",
    "empty_like",
    "mul",
    "mul_",
    "neg",
    "zero_",
    "zeros_like",
}
_ADDING = {"_foreach_add_", "add", "add_", "copy_"}


def _elementwise(func: Any, traits: _Traits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operation on local rows. NotImplemented where it has to see all rows."""
    columns = _columns(traits, [*args, *kwargs.values()])
    if columns is NotImplemented:
        return NotImplemented

    written = traits.tensors_written(args, kwargs)
    written_ids = {id(tensor) for tensor in written}
    references = [_reference(column, written_ids) for column in columns]

    # Before anything is sent: ranks agree on all of this.
    for column, reference in zip(columns, references, strict=True):
        if not _can_stay_local(func, traits, column, reference, written_ids):
            return NotImplemented

    outer: dict[int, torch.Tensor] = {}
    own_args = [_local_argument(value, traits, references, outer, func) for value in args]
    own_kwargs = {
        name: _local_argument(value, traits, references, outer, func)
        for name, value in kwargs.items()
    }
    result = func(*own_args, **own_kwargs)

    # Operations on lists move no version counters, and compute weights would not follow.
    if traits.is_on_lists and written:
        changed = [
            tensor
            for tensor in written
            if isinstance(tensor, UnevenRows) and not tensor.is_inference()
        ]
        torch.autograd.graph.increment_version(changed)

    if not isinstance(result, (list, tuple)):
        return _outer_result(result, references[0] if references else None, outer)
    cuts = references if traits.is_on_lists else references * len(result)
    return type(result)(
        [_outer_result(item, cut, outer) for item, cut in zip(result, cuts, strict=True)]
    )


def _columns(traits: _Traits, values: Sequence[Any]) -> Any:
    """The tensors that meet element by element: all of them, or those at one place of all lists.

    NotImplemented for lists of other operators, and for lists of different lengths.
    """
    lists = [value for value in values if isinstance(value, (list, tuple)) and value]
    lists = [value for value in lists if isinstance(value[0], torch.Tensor)]
    if not traits.is_on_lists:
        return (
            NotImplemented
            if lists
            else [[value for value in values if isinstance(value, torch.Tensor)]]
        )
    if any(len(items) != len(lists[0]) for items in lists):
        return NotImplemented

    return list(zip(*lists, strict=True))


def _reference(column: Sequence[torch.Tensor], written: set[int]) -> UnevenRows | None:
    """The tensor whose rows the others of a column are brought to; None if none is uneven."""
    found = [tensor for tensor in column if isinstance(tensor, UnevenRows)]
    if len(found) < 2:
        return found[0] if found else None
    targets = [tensor for tensor in found if id(tensor) in written]

    return max(targets or found, key=lambda tensor: (tensor.dim(), tensor.shape[0]))


def _can_stay_local(
    func: Any,
    traits: _Traits,
    column: Sequence[torch.Tensor],
    reference: UnevenRows | None,
    written: set[int],
) -> bool:
    """Whether an operation on these tensors can run on the rows of `reference`."""
    if reference is None:
        return not any(isinstance(tensor, DTensor) for tensor in column)

    if any(isinstance(tensor, UnevenRows) and tensor.is_partial() for tensor in column):
        _check_partial(func, traits, column, reference)

    for tensor in column:
        if isinstance(tensor, UnevenRows) and tensor.is_cut_as(reference):
            continue
        if id(tensor) in written:
            return False
        # Then dim 0 of the result would not be the reference's.
        dims, rows = tensor.dim(), tensor.shape[0] if tensor.dim() else 1
        if dims > reference.dim() or (dims == reference.dim() and rows > reference.shape[0]):
            return False

    return True


def _check_partial(
    func: Any, traits: _Traits, column: Sequence[torch.Tensor], reference: UnevenRows
) -> None:
    """RuntimeError if an operation on partial sums would not give those of the result."""
    is_scaled = (
        traits.name in _SCALING and "mode" not in func._overloadname and column[0] is reference
    )
    is_scaled = is_scaled and all(tensor.dim() == 0 for tensor in column[1:])
    is_added = traits.name in _ADDING and len(column) > 1
    is_added = is_added and all(
        isinstance(each, UnevenRows) and each.is_cut_as(reference) for each in column
    )

    if not is_scaled and not is_added:
        reference.check_whole(str(func))


def _local_argument(
    value: Any,
    traits: _Traits,
    references: Sequence[UnevenRows | None],
    outer: dict[int, torch.Tensor],
    func: Any,
) -> Any:
    """An argument with local tensors for distributed ones, which `outer` then finds by the ids of
    the local ones.
    """
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        found = [
            _localised(item, reference, func)
            for item, reference in zip(value, references, strict=True)
        ]
        outer.update(zip(map(id, found), value, strict=True))
        return found
    if not isinstance(value, torch.Tensor):
        return value

    # A tensor beside lists holds numbers, one for all or one for each.
    reference = None if traits.is_on_lists or not references else references[0]
    own = _localised(value, reference, func)
    outer[id(own)] = value
    return own


def _outer_result(
    value: Any, reference: UnevenRows | None, outer: Mapping[int, torch.Tensor]
) -> Any:
    """What the operation has written to, or a new tensor cut as `reference`."""
    if id(value) in outer:
        return outer[id(value)]
    if reference is None or not isinstance(value, torch.Tensor):
        return value
    return reference.with_local(value)


def _localised(tensor: torch.Tensor, reference: UnevenRows | None, func: Any) -> torch.Tensor:
    """The rows of `reference` of a tensor that is about to meet it; the tensor itself if it
    broadcasts.
    """
    if isinstance(tensor, UnevenRows) and reference is not None and tensor.is_cut_as(reference):
        return tensor._local_tensor
    if not isinstance(tensor, DTensor):
        is_source = (
            func is aten.copy_.default and reference is not None and tensor.shape == reference.shape
        )
        if is_source:
            assert reference is not None, "just asked"
            return reference.own_rows(tensor)
        if reference is None or tensor.dim() == 0:
            return tensor
        raise _mixed(tensor, func)
    if tensor.dim() == 0 or reference is None:
        return whole_tensor(tensor)

    whole = whole_tensor(tensor)
    has_rows = whole.dim() == reference.dim() and whole.shape[0] == reference.shape[0]

    return reference.own_rows(whole) if has_rows else whole


# Operations that need no values


def _is_same_size(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape


def _is_pinned(tensor: UnevenRows, *_: Any, **__: Any) -> bool:
    return tensor._local_tensor.is_pinned()


def _new(func: Any) -> Callable[..., DTensor]:
    """`new_zeros` and its like: cut as the tensor if it has the same shape, else the same on all
    ranks.
    """

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


def _evenly(value: Any) -> Any:
    """An argument with DTensors that claim even shards, where it does not matter."""
    if isinstance(value, (list, tuple)):
        return [_evenly(item) for item in value]
    if not isinstance(value, UnevenRows):
        return value
    return DTensor(value._local_tensor, value._spec, requires_grad=False)


# Everything else


def _on_all_rows(func: Any, traits: _Traits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operation on whole tensors, as one process would, and puts back what it has
    written.
    """
    mesh = next(iter(uneven_among(args, kwargs))).device_mesh
    tensors = {id(tensor): tensor for tensor in tensors_among(args, kwargs)}
    wholes = {number: _whole_argument(tensor, func) for number, tensor in tensors.items()}

    def whole(value: Any) -> Any:
        return wholes[id(value)] if isinstance(value, torch.Tensor) else value

    result = func(*tree_map(whole, args), **tree_map(whole, kwargs))

    written = traits.tensors_written(args, kwargs)
    if traits.is_random:
        # Ranks may be seeded alike or not; what one of them has drawn holds for all.
        for drawn in [*(wholes[id(tensor)] for tensor in written), *tree_leaves(result)]:
            if isinstance(drawn, torch.Tensor):
                _agree(drawn, mesh)
    for tensor in written:
        _put_back(tensor, wholes[id(tensor)])

    originals = {id(wholes[id(tensor)]): tensor for tensor in written}
    # Autograd adds gradients up in place, and they are views of nothing.
    is_backward = torch._C._current_graph_task_id() != -1
    kind = CopyOfView if _gives_views(func) and not written and not is_backward else DTensor
    return tree_map(partial(_whole_result, mesh=mesh, originals=originals, kind=kind), result)


@cache
def _gives_views(func: Any) -> bool:
    """Whether what an operator returns is memory of an argument."""
    return any(each.alias_info is not None for each in func._schema.returns)


def _whole_argument(tensor: torch.Tensor, func: Any) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return whole_tensor(tensor)
    if tensor.dim():
        raise _mixed(tensor, func)
    return tensor


def _put_back(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Writes this rank's part of what an operation has made of a tensor."""
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


def _mixed(tensor: torch.Tensor, func: Any) -> RuntimeError:
    return RuntimeError(
        f"Expected DTensors beside an uneven DTensor in {func}, got a plain tensor of shape "
        f"{tuple(tensor.shape)}. Distribute it, or call to_local() or full_tensor() on the other."
    )


def _agree(whole: torch.Tensor, mesh: DeviceMesh) -> None:
    """Makes a tensor that all ranks have whole the same on all of them: that of the first."""
    for axis in range(mesh.ndim):
        collectives.broadcast(whole, mesh.get_group(axis))
