"""Holds a loaded optimizer state dict against the optimizer that is to take it, before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron.core.optimizer import scaled_states
from megatron.core.optimizer.state_tensors import difference

STEP = "step"


def checked_states(
    own_groups: Sequence[dict[str, Any]],
    state_dict: Mapping[str, Any],
    state_dtypes: Callable[[torch.Tensor], dict[str, torch.dtype]],
) -> dict[torch.Tensor, dict[str, Any]]:
    """The loaded states by parameter, once they and the loaded groups are known to fit.

    Args:
        own_groups: the optimizer's.
        state_dict: `{"state": {number: states}, "param_groups": groups}`. A group's `step` counts for its parameters
            whose states have none.
        state_dtypes: which states a parameter has besides `step`, and how they are kept.

    Raises:
        ValueError: saying what does not fit.
    """
    states, groups = state_dict["state"], state_dict["param_groups"]
    own_sizes = [len(group["params"]) for group in own_groups]
    sizes = [len(group["params"]) for group in groups]
    if own_sizes != sizes:
        raise ValueError(f"Expected groups of {own_sizes} parameters, got {sizes}.")
    numbers = [number for group in groups for number in group["params"]]
    if unknown := set(states).difference(numbers):
        raise ValueError(f"Expected states of parameters that are in a group, got some of {sorted(unknown)}.")
    parameters = [parameter for group in own_groups for parameter in group["params"]]
    steps = [group.get(STEP) for group in groups for _ in group["params"]]
    checked = {}
    for parameter, number, step in zip(parameters, numbers, steps, strict=True):
        if number in states:
            loaded = dict(states[number])
            if step is not None:
                loaded.setdefault(STEP, step)
            _check_states(loaded, parameter, number, state_dtypes(parameter))
            checked[parameter] = loaded
    return checked


def check_state(name: str, tensor: Any, parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """ValueError unless `tensor` is one of this dtype, distributed and shaped as the parameter."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"Expected {name} to be a tensor, got {type(tensor).__name__}.")
    if tensor.dtype != dtype:
        raise ValueError(f"Expected {name} in {dtype}, got {tensor.dtype}.")
    found = difference(tensor, parameter)
    if found is not None:
        raise ValueError(f"Expected {name} with {found.expected} as its parameter has, got {found.got}.")


def _check_states(
    loaded: Mapping[str, Any], parameter: torch.Tensor, number: Any, dtypes: Mapping[str, torch.dtype]
) -> None:
    if loaded.keys() != {STEP, *dtypes}:
        raise ValueError(f"Expected states {sorted([STEP, *dtypes])} of parameter {number}, got {sorted(loaded)}.")
    step = float(loaded[STEP])
    if not (step >= 0 and step.is_integer()):
        raise ValueError(f"Expected a number of steps of parameter {number}, got {step}.")
    for name, dtype in dtypes.items():
        expected = torch.float32 if scaled_states.is_scaled(dtype) else dtype
        check_state(f"{name} of parameter {number}", loaded[name], parameter, expected)
