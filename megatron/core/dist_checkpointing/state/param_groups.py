"""The options of an optimizer's parameter groups, as plain data and back.

A checkpoint names the parameters of each group. So a load finds the options of every parameter,
however its own optimizer divides them into groups.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from megatron.core.dist_checkpointing.errors import CheckpointError, few, shown
from megatron.core.optimizer.step_inputs import IDENTITIES

PARAM_GROUPS = "optimizer.param_groups"


def as_plain(value: Any, what: str) -> Any:
    """An option as numbers, strings and lists; a tensor of one element becomes its number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)):
        return [as_plain(item, what) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(f"Expected plain data, got {type(value).__name__} for {what}.")


def check_param_groups(saved: object, path: str) -> list[dict[str, Any]]:
    """Saved parameter groups, checked to be dicts of options with the names of their parameters.

    Raises:
        CheckpointError: for anything else.
    """
    # Anything but a list of groups is rejected below, as a wrong group.
    groups: list[Any] = saved if isinstance(saved, list) else [saved]
    for group in groups:
        is_group = isinstance(group, dict) and all(isinstance(option, str) for option in group)
        names = group.get("params") if is_group else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(
                f"Expected parameter groups in {path}, with options and the names of parameters, "
                f"got {reprlib.repr(group)}."
            )
    return groups


def match_param_groups(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, Sequence[str]],
    saved: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Finds the saved options of each group by the names of its parameters, without changes.

    Args:
        names: of the parameters whose options are wanted; see `Contents`.
        saved: the checkpoint's groups.

    Raises:
        CheckpointError: for a parameter without a saved group, a group whose parameters had
            different options, or a value of another type than the optimizer has.
    """
    for group in saved:
        for option, value in group.items():
            # Options are compared below, and a comparison of tensors has no single truth value.
            if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
                what = f"the saved {shown(option)} of a parameter group"
                raise CheckpointError(f"Expected plain data as {what}, got tensors.")

    # By parameter, because the groups of this optimizer may be divided in another way.
    by_name = {
        name: {key: value for key, value in group.items() if key not in IDENTITIES}
        for group in saved
        for name in group["params"]
    }
    found: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        wanted = [name for parameter in group["params"] for name in names.get(parameter, ())]
        if missing := [name for name in wanted if name not in by_name]:
            got = few(missing)
            raise CheckpointError(
                f"Expected a saved parameter group for every parameter, got none for {got}."
            )

        options = [by_name[name] for name in wanted]
        if any(other != options[0] for other in options[1:]):
            raise CheckpointError(
                f"Expected saved options that are alike for the parameters of group {number}, got "
                f"{wanted[0]}: {options[0]} and others."
            )

        chosen = options[0] if options else {}
        found.append(
            {
                option: _as_own(option, value, group.get(option), number)
                for option, value in chosen.items()
            }
        )
    return found


def _as_own(option: str, value: Any, own: Any, number: int) -> Any:
    """A saved value in the type that the optimizer has: JSON, for one, turns tuples into lists."""
    if isinstance(own, tuple | list):
        is_alike = isinstance(value, tuple | list) and len(value) == len(own)
        if is_alike:
            pairs = zip(value, own, strict=True)
            return type(own)(_as_own(option, item, mine, number) for item, mine in pairs)
    elif isinstance(own, bool):  # before the numbers, since a bool is an int
        is_alike = value is None or isinstance(value, bool)
    elif isinstance(own, int | float) or (isinstance(own, torch.Tensor) and own.numel() == 1):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # False also for NaN, and for an integer that no float can represent.
        is_alike = is_number and abs(value) <= sys.float_info.max
    else:
        is_alike = own is None or isinstance(value, type(own))

    if not is_alike:
        kind = "a finite number" if isinstance(own, int | float | torch.Tensor) else f"like {own!r}"
        got = reprlib.repr(value)
        raise CheckpointError(
            f"Expected the saved {option} of parameter group {number} to be {kind}, got {got}."
        )
    return value


def install_options(optimizer: torch.optim.Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
    """Installs what `match_param_groups` has found."""
    for group, chosen in zip(optimizer.param_groups, options, strict=True):
        for key, value in chosen.items():
            own = group.get(key)
            if isinstance(own, torch.Tensor):
                own.fill_(value)  # it stays a tensor, as a `capturable` optimizer needs it
            else:
                group[key] = value
