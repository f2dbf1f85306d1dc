"""Checks a loaded optimizer state dict against its optimizer, before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import megatron.core.optimizer.scaled_states as scaled_states
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.distributed.fsdp.uneven_rows import recut
from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.rules import IMPLEMENTATIONS, UpdateRule
from megatron.core.optimizer.state_tensors import STEP, difference
from megatron.core.optimizer.step_inputs import IDENTITIES


def kept_options(own: Mapping[str, Any]) -> tuple[str, ...]:
    """The options that a group keeps when another group is loaded: they follow from the machine and
    from the optimizer's class.
    """
    # Of Adam and AdamW it is the difference. NAdam and RAdam, which have no amsgrad, take it as an
    # argument.
    return (*IMPLEMENTATIONS, *(["decoupled_weight_decay"] if "amsgrad" in own else []))


def loaded_options(own: Mapping[str, Any], loaded: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a group takes from a loaded group."""
    found = {
        name: copy.deepcopy(value)
        for name, value in loaded.items()
        if name not in (*IDENTITIES, STEP, *kept_options(own))
    }
    # TransformerEngine's groups always have it. AdamW's never do, and would look for it.
    if found.get("bias_correction") is True and "bias_correction" not in own:
        del found["bias_correction"]
    return found


def check_options(rule: UpdateRule, own: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """ValueError if a loaded group has options that the rule cannot honour, or other states."""
    options = {**own, **loaded_options(own, loaded)}
    rule.scalars(options, 1)
    if rule.part_for(options) != rule.part_for(own):
        raise ValueError(
            f"Expected a group of {rule.part_for(own).name}, got one of "
            f"{rule.part_for(options).name}."
        )


def can_be_trained(parameter: torch.Tensor) -> bool:
    """Whether a parameter has gradients, or will have some once it is unfrozen."""
    group = group_of(parameter)
    if group is not None:
        return group.requires_grad  # one that was sharded frozen has no buffer for gradients
    return parameter.is_floating_point()


def states_by_parameter(
    own_groups: Sequence[Mapping[str, Any]],
    state_dict: Mapping[str, Any],
    rule: UpdateRule | None,
) -> dict[torch.Tensor, dict[str, Any]]:
    """The loaded states of the parameters that have any; on each rank, of the rows that it has.

    Args:
        own_groups: the optimizer's.
        state_dict: `{"state": {number: states}, "param_groups": groups}`. A group's `step` counts
            for its parameters whose states have none.
        rule: the rule that has these states; None for an optimizer of torch's.

    Raises:
        ValueError: for groups of other sizes, and for states of parameters that are in none.
    """
    states, groups = state_dict["state"], state_dict["param_groups"]
    own_sizes = [len(group["params"]) for group in own_groups]
    sizes = [len(group["params"]) for group in groups]
    if own_sizes != sizes:
        raise ValueError(f"Expected groups of {own_sizes} parameters, got {sizes}.")

    numbers = [number for group in groups for number in group["params"]]
    if unknown := set(states).difference(numbers):
        raise ValueError(
            f"Expected states of parameters that are in a group, got some of {sorted(unknown)}."
        )

    # By their places in the groups: the numbers are the state dict's own.
    parameters = [parameter for group in own_groups for parameter in group["params"]]
    steps = [group.get(STEP) for group in groups for _ in group["params"]]
    may_lack_step = [
        rule is not None and not rule.part_for(group).counts_steps
        for group in own_groups
        for _ in group["params"]
    ]

    found = {}
    for parameter, number, step, may_lack in zip(
        parameters, numbers, steps, may_lack_step, strict=True
    ):
        if number in states:
            # PyTorch's loaders may cut rows otherwise than the parameter's.
            found[parameter] = {
                name: recut(value, parameter) for name, value in states[number].items()
            }
            if step is not None:
                found[parameter].setdefault(STEP, step)
            elif may_lack:
                found[parameter].setdefault(STEP, torch.zeros(()))
    return found


def check_like(own: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Raises ValueError unless loaded states are empty or like the parameter's states."""
    if loaded and loaded.keys() != own.keys():
        raise ValueError(f"Expected the states {sorted(own)} of a parameter, got {sorted(loaded)}.")
    if STEP in loaded:
        check_step(loaded[STEP], "a parameter")
    for name in loaded:
        expected, got = _description(own[name]), _description(loaded[name])
        if expected != got:
            raise ValueError(f"Expected {name} of {expected}, got one of {got}.")


def check_state(name: str, tensor: Any, parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """ValueError unless `tensor` is one of this dtype, distributed and shaped as the parameter."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"Expected {name} to be a tensor, got {type(tensor).__name__}.")
    if tensor.dtype != dtype:
        raise ValueError(f"Expected {name} in {dtype}, got {tensor.dtype}.")
    found = difference(tensor, parameter)
    if found is not None:
        raise ValueError(
            f"Expected {name} with {found.expected} as its parameter has, got {found.got}."
        )


def check_step(step: Any, whose: str) -> None:
    """ValueError unless a state is a number of steps."""
    try:
        # float() of a tensor of several elements is a RuntimeError.
        is_count = float(step) >= 0 and float(step).is_integer()
    except (TypeError, ValueError, RuntimeError):
        is_count = False
    if not is_count:
        raise ValueError(f"Expected a number of steps of {whose}, got {step!r}.")


def check_states(
    loaded: Mapping[str, Any],
    parameter: torch.Tensor,
    number: int,
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """ValueError unless a parameter's loaded states are `step` and these, as state dicts give
    them.
    """
    if loaded.keys() != {STEP, *dtypes}:
        raise ValueError(
            f"Expected states {sorted([STEP, *dtypes])} of parameter {number}, got "
            f"{sorted(loaded)}."
        )
    check_step(loaded[STEP], f"parameter {number}")
    for name, dtype in dtypes.items():
        # State dicts hold the values of scaled states.
        expected = torch.float32 if scaled_states.is_scaled(dtype) else dtype
        check_state(f"{name} of parameter {number}", loaded[name], parameter, expected)


def _description(value: Any) -> str:
    """The properties that a state shares with the one that is loaded into it."""
    if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0):
        return "one number"
    if not isinstance(value, torch.Tensor):
        return f"type {type(value).__name__}"
    local = tuple(local_tensor(value).shape)
    return f"shape {tuple(value.shape)}, {local} of it here, in {value.dtype}"
