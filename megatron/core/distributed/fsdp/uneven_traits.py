"""`Traits`: the properties of an operator that decide how it runs on uneven DTensors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.uneven_rows import tensors_among

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
