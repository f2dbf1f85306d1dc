"""What a step reads: gradients, where a program puts them, and options.

With `use_decoupled_grad`, gradients are read from `p.decoupled_grad`, in any dtype, and not from
`p.grad`, which has the parameter's. A parameter without a gradient is not stepped. A gradient in an
attribute that the optimizer does not read raises an error, since its parameter would silently not
be stepped.

`StepInputs` tells whether the plan of a step is stale before it is carried out. Planning takes
dozens of Python calls for each parameter; comparing inputs takes one. A plan is made while the
device still computes the gradients' norm, and hooks run between that and the step: most only wait
for something, but they may also replace gradients and change options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler, OptState

from megatron.core.distributed.fsdp.parameters import REPLACED
from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.clip_grads import global_grad_norm

# Where programs put gradients. `main_grad` is that of Megatron's DistributedDataParallel, which
# adds gradients up there; no optimizer here reads it.
_ATTRIBUTES = ("grad", "decoupled_grad", "main_grad")

IDENTITIES = ("params", "param_names")  # what a parameter group has besides options


class StepInputs(NamedTuple):
    """The gradients of all parameters, the options of all groups, a count of writes to states."""

    gradients: list[torch.Tensor | None]
    options: list[dict[str, Any]]
    revision: int

    @classmethod
    def of(
        cls, param_groups: Sequence[Mapping[str, Any]], use_decoupled_grad: bool, revision: int
    ) -> StepInputs:
        """The inputs of the moment.

        Args:
            revision: a number that grows with each step, and when states are loaded.
        """
        gradients = [
            gradient_of(parameter, use_decoupled_grad)
            for group in param_groups
            for parameter in group["params"]
        ]
        options = [
            {name: _snapshot(value) for name, value in group.items() if name not in IDENTITIES}
            for group in param_groups
        ]
        return cls(gradients, options, revision)

    def are_still(self, now: StepInputs) -> bool:
        """Whether gradients are the same tensors, whatever was written to them, and all else is
        equal.
        """
        if (self.revision, self.options) != (now.revision, now.options):
            return False

        # By their ids: comparing tensors would read their elements, on their device.
        return [*map(id, self.gradients)] == [*map(id, now.gradients)]


def gradient_of(parameter: torch.Tensor, use_decoupled_grad: bool) -> torch.Tensor | None:
    """The gradient that an optimizer reads; None if there is none."""
    found: torch.Tensor | None = getattr(parameter, _attribute(use_decoupled_grad), None)
    return found


def check_not_elsewhere(parameter: torch.Tensor, use_decoupled_grad: bool, place: str) -> None:
    """ValueError for a parameter whose gradient is in an attribute that is not read, RuntimeError
    for one that will have none because `fully_shard` replaced it.

    Args:
        place: the parameter, for the message.
    """
    read = _attribute(use_decoupled_grad)
    if gradient_of(parameter, use_decoupled_grad) is not None:
        return

    if REPLACED in vars(parameter):
        raise RuntimeError(
            f"fully_shard replaced {place} after the optimizer was built, so it will never have a "
            "gradient. Build the optimizer after sharding, or put the sharded parameters into its "
            "param_groups."
        )
    for name in _ATTRIBUTES:
        if getattr(parameter, name, None) is not None:
            raise ValueError(
                f"Expected the gradient of {place} in .{read}, as use_decoupled_grad="
                f"{use_decoupled_grad} says, got one in .{name} alone."
            )


def clear_gradients(
    parameters: Iterable[torch.Tensor],
    use_decoupled_grad: bool,
    set_to_none: bool,
) -> None:
    """Clears what an optimizer reads: to None, or in place to zero."""
    for parameter in parameters:
        gradient = gradient_of(parameter, use_decoupled_grad)
        if gradient is None:
            continue
        if set_to_none:
            setattr(parameter, _attribute(use_decoupled_grad), None)
        else:
            # In place, for programs that keep the tensor itself, as captured graphs do.
            local_tensor(gradient).detach().zero_()


@torch.no_grad()
def unscaling_factor(
    optimizer: torch.optim.Optimizer, grad_scaler: GradScaler | None, use_decoupled_grad: bool
) -> float | None:
    """What gradients have to be multiplied with for a GradScaler; None if one of them is not
    finite, on any rank. The scaler's `update` will know.

    Raises:
        NotImplementedError: for decoupled gradients, which a GradScaler does not see.
        RuntimeError: for a second step before the scaler's `update`.
    """
    if grad_scaler is None or not grad_scaler.is_enabled():
        return 1.0
    if use_decoupled_grad:
        raise NotImplementedError(
            "Expected gradients in .grad with a grad_scaler, got use_decoupled_grad=True."
        )

    # What torch's own optimizers are told by the scaler. After `unscale_`, which the program called
    # to clip, gradients are as they should be and have been looked at.
    state = grad_scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is OptState.STEPPED:
        raise RuntimeError(
            "Expected one step for each update of the grad_scaler, got a second one. Call its "
            "update() after step()."
        )
    if state["stage"] is OptState.UNSCALED:
        found = state["found_inf_per_device"].values()
        return None if any(float(each) for each in found) else 1.0

    # A rank that holds other shards than the one with the infinity must skip the step too. Norms
    # are summed up in fp64, but each row's may be fp32: on a device, gradients whose squares are
    # beyond fp32, from about 1e19 on, count as not finite.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_finite = bool(global_grad_norm(parameters).isfinite())
    device = local_tensor(parameters[0]).device
    state["found_inf_per_device"] = {device: torch.tensor(float(not is_finite), device=device)}
    return 1.0 / grad_scaler.get_scale() if is_finite else None


def mark_stepped(optimizer: torch.optim.Optimizer, grad_scaler: GradScaler | None) -> None:
    """Tells a GradScaler that the optimizer has stepped or skipped, as its own `step` would: it
    refuses another step, or `unscale_`, before its `update`.
    """
    if grad_scaler is not None and grad_scaler.is_enabled():
        grad_scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED


def _attribute(use_decoupled_grad: bool) -> str:
    return "decoupled_grad" if use_decoupled_grad else "grad"


def _snapshot(option: Any) -> Any:
    """A value that changes when an option does, in place too."""
    if isinstance(option, torch.Tensor):
        # Its value may be on a device, which this thread would have to wait for.
        return id(option), option._version
    return tuple(option) if isinstance(option, list) else option
