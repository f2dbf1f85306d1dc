"""PyTorch's own optimizers over the parameters of a model, sharded by FSDP2 or not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.planning_optimizer import PlanningOptimizer
from megatron.core.optimizer.state_loading import can_be_trained
from megatron.core.parts import factors_of
from megatron.core.transformer.fused_weight import matrices_of


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Parameter groups with and without weight decay, of each factor of the learning rate; groups
    that would be empty are left out.

    Matrices decay; vectors (biases, norm weights) and scalars do not, as in Megatron. Frozen
    parameters have no group. A group with a factor has it as `lr_mult`, which is Megatron's name.

    With Muon, `use_muon` of every group is whether it is Muon's or the scalar optimizer's. Groups
    of Muon have `matrix_rows`: for each parameter, the rows of the matrices stacked in it.

    Raises:
        ConfigError: for a factor of a part that the model does not have.
    """
    factors = factors_of(model, config.lr_factors, "--lr-multipliers")
    is_muon = config.optimizer == "muon"
    matrices = matrices_of(model, by_head=config.muon_split_heads) if is_muon else {}
    found: dict[tuple[float, bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            kind = (factors.get(parameter, 1.0), parameter.ndim < 2, parameter not in matrices)
            found.setdefault(kind, []).append(parameter)

    groups: list[dict[str, Any]] = []
    # Parameters with weight decay come first.
    for (factor, is_vector, is_scalar), parameters in sorted(
        found.items(), key=lambda one: (-one[0][0], *one[0][1:])
    ):
        group: dict[str, Any] = {
            "params": parameters,
            "weight_decay": 0.0 if is_vector else config.weight_decay,
            **({} if factor == 1.0 else {"lr_mult": factor}),
        }
        if is_muon:
            group["use_muon"] = not is_scalar
        if not is_scalar:
            group["matrix_rows"] = [matrices[parameter] for parameter in parameters]
        groups.append(group)
    return groups


def format_muon_groups(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> str:
    """Aligned lines: which parameters Muon updates, as which matrices, and which the scalar
    optimizer does. Parameters of layers that differ in their number only share a line.

    Args:
        groups: an optimizer's, as `parameter_groups` returns them.
    """
    rows_of = {
        parameter: rows
        for group in groups
        if group["use_muon"]
        for parameter, rows in zip(group["params"], group["matrix_rows"], strict=True)
    }
    lines: Counter[tuple[str, str, str]] = Counter()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rows = rows_of.get(parameter)
            shape = " x ".join(map(str, parameter.shape))
            if rows is not None:
                shape = f"{_shown_rows(rows)} x {parameter.shape[1]}"
            kind = re.sub(r"\.[0-9]+\.", ".*.", name)
            lines[kind, shape, "adam" if rows is None else "muon"] += 1
    width = max((len(kind) for kind, _, _ in lines), default=0)
    return "\n".join(
        f"{kind:{width}}  {rule}  {count} x {shape}" for (kind, shape, rule), count in lines.items()
    )


def _shown_rows(rows: Sequence[int]) -> str:
    """Rows of matrices in a few characters: "512", or "(512, 2 x 128)"."""
    if len(rows) == 1:
        return str(rows[0])
    runs = [(size, len([*run])) for size, run in groupby(rows)]
    return f"({', '.join(str(size) if n == 1 else f'{n} x {size}' for size, n in runs)})"


def build_torch_optimizer(
    model: nn.Module, config: OptimizerConfig, lr: float
) -> torch.optim.Optimizer:
    """AdamW or SGD over `model`'s parameters. `lr` is only the first: the schedule sets it."""
    groups = parameter_groups(model, config)
    if config.optimizer == "sgd":
        # Not fused: that kernel takes no DTensors.
        return torch.optim.SGD(groups, lr=lr, momentum=config.sgd_momentum)
    # Fused, not foreach: its arithmetic is correctly rounded and therefore the same on every
    # machine.
    return torch.optim.AdamW(
        groups, lr=lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=True
    )


def init_states(optimizer: torch.optim.Optimizer) -> None:
    """Allocates the states that an optimizer does not have yet. It counts no step for that."""
    ours = PlanningOptimizer.of(optimizer)
    if ours is None:
        init_torch_states(optimizer)
    else:
        ours.init_state()


# States in torch that start with another number than zero, or with an option.
_FIRST_VALUES: Mapping[type[torch.optim.Optimizer], Mapping[str, float | str]] = {
    torch.optim.ASGD: {"eta": "lr", "mu": 1.0},
    torch.optim.NAdam: {"mu_product": 1.0},
    torch.optim.Rprop: {"step_size": "lr"},
}


def init_torch_states(optimizer: torch.optim.Optimizer) -> None:
    """Allocates the states of the parameters that have none, for any optimizer, by a step that
    does not count.

    It is PyTorch's way, a step with zero gradients and a zero rate, with two corrections: there is
    no weight decay, which some optimizers add to the gradients, and so to the states; and all
    changes by the step, such as counters, are reset, or a run saved before its first step would
    resume with another bias correction.
    """
    options = [dict(group) for group in optimizer.param_groups]
    owners = {parameter: group for group in options for parameter in group["params"]}
    parameters = list(owners)
    new = [
        parameter
        for parameter in parameters
        if can_be_trained(parameter) and not optimizer.state.get(parameter)
    ]
    if not new:
        return

    grads = [parameter.grad for parameter in parameters]
    for group in optimizer.param_groups:
        lr = group["lr"]
        group["lr"] = torch.zeros_like(lr) if isinstance(lr, torch.Tensor) else 0.0
        if "weight_decay" in group:
            group["weight_decay"] = 0.0

    # Parameters that have states keep them.
    for parameter in parameters:
        parameter.grad = None
    for parameter in new:
        parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    finally:
        # After an error too: no optimizer may be left with a rate of zero.
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        for group, own in zip(optimizer.param_groups, options, strict=True):
            group.update(own)

    first: dict[str, float | str] = {"step": 0.0}
    for cls, values in _FIRST_VALUES.items():
        first.update(values if isinstance(optimizer, cls) else {})
    for parameter in new:
        states = optimizer.state.get(parameter, {})
        for name, value in first.items():
            if isinstance(states.get(name), torch.Tensor):
                number = owners[parameter][value] if isinstance(value, str) else value
                local_tensor(states[name]).fill_(float(number))


def reset_states(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Resets the states of some parameters, as if they had never been stepped."""
    if PlanningOptimizer.of(optimizer) is None:
        for parameter in parameters:
            optimizer.state.pop(parameter, None)
        init_torch_states(optimizer)
        return

    # Parameters without a state in a state dict start over. All others share its memory.
    state_dict = optimizer.state_dict()
    fresh = {id(parameter) for parameter in parameters}
    numbers = {
        number
        for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
        for parameter, number in zip(group["params"], packed["params"], strict=True)
        if id(parameter) in fresh
    }
    states = {
        number: states for number, states in state_dict["state"].items() if number not in numbers
    }
    optimizer.load_state_dict({**state_dict, "state": states})


def load_torch_states(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, states: Mapping[str, Any]
) -> None:
    """Takes over one parameter's states, into the memory that it has for them.

    Args:
        states: empty if the parameter was never stepped.
    """
    if not states:
        optimizer.state.pop(parameter, None)
        return

    own = optimizer.state[parameter]
    for name, value in states.items():
        if isinstance(own.get(name), torch.Tensor):
            copy_state(own[name], value)
        else:
            own[name] = value


def copy_state(own: torch.Tensor, value: Any) -> None:
    """Writes a state, a tensor or a number, into the existing tensor."""
    target = local_tensor(own)
    if not isinstance(value, torch.Tensor):
        target.fill_(value)
    # A dict that shares the optimizer's memory needs no copy.
    elif local_tensor(value).data_ptr() != target.data_ptr() or target.numel() == 0:
        target.copy_(local_tensor(value))
