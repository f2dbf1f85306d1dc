"""The tensors in the inputs and outputs of a module: containers in containers, and dataclasses."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

# No tensor can hide in a value of these types.
_PLAIN = (int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors that can be found in a value."""
    return (leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor))


def is_opaque(value: Any) -> bool:
    """Whether a value may hold tensors that `tensors_in` does not find."""
    return not all(isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in _leaves(value))


# Not a function inside its user: calling itself, that would be a reference cycle, which keeps the
# views, and with them every layer's inputs, until Python collects garbage.
def with_views(value: Any, views: dict[int, torch.Tensor]) -> Any:
    """`value` with views instead of the tensors that require a gradient, one for each tensor.

    Args:
        views: gets the views, by the id of the tensor.
    """
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return views.setdefault(id(value), value.view_as(value))

    # Only tuples: lists and dicts belong to the caller, who may continue to fill them.
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        items = [with_views(item, views) for item in value]
        if any(item is not before for item, before in zip(items, value, strict=True)):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating-point tensors in `dtype`, in new containers.

    Dataclasses are built anew, so they compute a field that is no argument again.
    """
    return tree_map(partial(_cast_leaf, dtype=dtype), value)


def _cast_leaf(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.to(dtype) if leaf.is_floating_point() else leaf

    # PyTorch's trees end at dataclasses and at subclasses of dicts, which FSDP2's casts enter.
    if is_dataclass(leaf) and not isinstance(leaf, type):
        changes = {
            field.name: cast_floats(getattr(leaf, field.name), dtype)
            for field in fields(leaf)
            if field.init
        }
        return replace(leaf, **changes)
    if isinstance(leaf, dict):
        changed = copy.copy(leaf)
        for key, value in leaf.items():
            changed[key] = cast_floats(value, dtype)
        return changed
    return leaf


def _leaves(value: Any) -> Iterator[Any]:
    for leaf in tree_leaves(value):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                yield from _leaves(getattr(leaf, field.name))
        else:
            yield leaf
