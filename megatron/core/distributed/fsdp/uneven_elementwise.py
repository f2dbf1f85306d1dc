"""Traits of operators, and elementwise operators on uneven DTensors, which run on the rows of each
rank.

Tensors that are cut otherwise are brought to the rows of the one that is written to, or of the
largest.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.uneven_rows import (
    UnevenRows,
    mixed_error,
    tensors_among,
    whole_tensor,
)

aten = torch.ops.aten

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

# Operators that turn partial sums into the partial sums of the result: the first set if no other
# argument is a tensor with rows, the second if all are partial sums.
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


class Traits(NamedTuple):
    """Properties of an operator that decide how it runs on uneven DTensors.

    Attributes:
        is_elementwise: whether an element of a result depends on the same element of the arguments
            alone.
        is_on_lists: whether it does the same to each tensor of its lists, as optimizers' operators
            do.
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

    def count_writes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Increments the version counters of the DTensors that the operator has written to.

        Compute weights, and gradients that were copied to host memory, detect writes by them.
        """
        # torch counts most writes too, but not writes by `_foreach_mul_` to DTensors, nor writes of
        # `_amp_foreach_non_finite_check_and_unscale_` and `_fused_adamw_`. Counting twice is
        # harmless.
        written = [
            tensor
            for tensor in self.tensors_written(args, kwargs)
            if isinstance(tensor, DTensor) and not tensor.is_inference()
        ]
        if written:
            torch.autograd.graph.increment_version(written)


@cache
def traits_of(func: Any) -> Traits:
    name = func._schema.name.removeprefix("aten::")
    is_on_lists = _is_pointwise_on_lists(name)
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    is_elementwise = torch.Tag.pointwise in func.tags or func in _ALSO_ELEMENTWISE or is_on_lists
    arguments = func._schema.arguments

    return Traits(
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
    # `max` of two tensors is pointwise, while `_foreach_max` reduces each tensor.
    if packet is None or single == "max":
        return False

    # torch tags the single operators, not their forms for lists.
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return single in ("copy", "zero") or any(torch.Tag.pointwise in each.tags for each in overloads)


def elementwise(func: Any, traits: Traits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operation on local rows. NotImplemented where it has to see all rows."""
    columns = _columns(traits, [*args, *kwargs.values()])
    if columns is NotImplemented:
        return NotImplemented

    written_ids = {id(tensor) for tensor in traits.tensors_written(args, kwargs)}
    references = [_reference(column, written_ids) for column in columns]

    # Before any communication. Ranks come to the same result, since they only read global facts.
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

    if not isinstance(result, (list, tuple)):
        return _outer_result(result, references[0] if references else None, outer)
    cuts = references if traits.is_on_lists else references * len(result)
    return type(result)(
        [_outer_result(item, cut, outer) for item, cut in zip(result, cuts, strict=True)]
    )


def _columns(traits: Traits, values: Sequence[Any]) -> Any:
    """The tensors that meet element by element: all of them, or the tensors at one index of all
    lists.

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
    # A tensor that is written to cannot move; otherwise the largest decides the shape of the
    # result.
    targets = [tensor for tensor in found if id(tensor) in written]
    return max(targets or found, key=lambda tensor: (tensor.dim(), tensor.shape[0]))


def _can_stay_local(
    func: Any,
    traits: Traits,
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
    func: Any, traits: Traits, column: Sequence[torch.Tensor], reference: UnevenRows
) -> None:
    """RuntimeError if an operation on partial sums would not give the partial sums of the
    result.
    """
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
    traits: Traits,
    references: Sequence[UnevenRows | None],
    outer: dict[int, torch.Tensor],
    func: Any,
) -> Any:
    """An argument with local tensors instead of distributed ones.

    Args:
        outer: gets the distributed ones, by the ids of the local ones.
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

    # A tensor next to lists holds numbers, one for all or one for each.
    reference = None if traits.is_on_lists or not references else references[0]
    own = _localised(value, reference, func)
    outer[id(own)] = value
    return own


def _outer_result(
    value: Any, reference: UnevenRows | None, outer: Mapping[int, torch.Tensor]
) -> Any:
    """The argument that the operation has written to, or a new tensor cut as `reference`."""
    if id(value) in outer:
        return outer[id(value)]
    if reference is None or not isinstance(value, torch.Tensor):
        return value
    return reference.with_local(value)


def _localised(tensor: torch.Tensor, reference: UnevenRows | None, func: Any) -> torch.Tensor:
    """The part of a tensor that meets the rows of `reference`; all of it if it broadcasts."""
    if isinstance(tensor, UnevenRows) and reference is not None and tensor.is_cut_as(reference):
        return tensor._local_tensor
    if not isinstance(tensor, DTensor):
        is_source = (
            func is aten.copy_.default and reference is not None and tensor.shape == reference.shape
        )
        if is_source:
            # Loading a whole tensor into a parameter needs no communication.
            assert reference is not None, "just asked"
            return reference.own_rows(tensor)
        if reference is None or tensor.dim() == 0:
            return tensor
        raise mixed_error(tensor, func)
    if tensor.dim() == 0 or reference is None:
        return whole_tensor(tensor)

    whole = whole_tensor(tensor)
    has_rows = whole.dim() == reference.dim() and whole.shape[0] == reference.shape[0]

    return reference.own_rows(whole) if has_rows else whole
