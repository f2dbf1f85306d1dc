"""The inputs of an optimizer step: gradients and options.

With `use_decoupled_grad`, a step reads gradients from `p.decoupled_grad`, in any dtype, instead of
`p.grad`. It skips a parameter without a gradient. A gradient in an attribute that the optimizer
does not read raises an error, since its parameter would be skipped silently.

`StepInputs` shows whether the plan of a step is stale before it is carried out. Planning takes
dozens of Python calls for each parameter; comparing inputs takes one. A plan is made while the
device still computes the gradients' norm, and hooks run between that and the step: most only wait
for something, but they may also replace gradients and change options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler, OptState

from megatron.core.distributed.fsdp.group_weights import REPLACED
from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.clip_grads import global_grad_norm

# The attributes in which programs store gradients. Megatron's DistributedDataParallel accumulates
# in `main_grad`, which no optimizer here reads.
_ATTRIBUTES = ("grad", "decoupled_grad", "main_grad")

# Entries of a parameter group that are no options.
IDENTITIES = ("params", "param_names", "matrix_rows")


class StepInputs(NamedTuple):
    """The gradients of all parameters, the options of all groups, a count of writes to states."""

    gradients: list[torch.Tensor | None]
    options: list[dict[str, Any]]
    revision: int

    @classmethod
    def of(
        cls, param_groups: Sequence[Mapping[str, Any]], use_decoupled_grad: bool, revision: int
    ) -> StepInputs:
        """Captures the current inputs.

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
    """Returns the gradient that an optimizer reads, or None."""
    found: torch.Tensor | None = getattr(parameter, _attribute(use_decoupled_grad), None)
    return found


def check_not_elsewhere(parameter: torch.Tensor, use_decoupled_grad: bool, place: str) -> None:
    """Checks that a parameter without a gradient has none in another attribute either.

    Args:
        place: describes the parameter in the error message.

    Raises:
        ValueError: for a gradient in an attribute that is not read.
        RuntimeError: for a parameter that `fully_shard` replaced, which never gets a gradient.
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
                f"Expected the gradient of {place} in .{read}, which use_decoupled_grad="
                f"{use_decoupled_grad} selects, got one in .{name} alone."
            )


def clear_gradients(
    parameters: Iterable[torch.Tensor],
    use_decoupled_grad: bool,
    set_to_none: bool,
) -> None:
    """Clears the gradients that an optimizer reads: sets them to None, or to zero in place."""
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
    """Returns the factor that undoes a GradScaler's scale; None if a gradient on any rank is not
    finite, which the scaler's `update` then takes into account.

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

    # The scaler passes this state to torch's optimizers. If the program has called `unscale_`, in
    # order to clip, gradients are already unscaled and checked.
    state = grad_scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is OptState.STEPPED:
        raise RuntimeError(
            "Expected one step for each update of the grad_scaler, got a second one. Call its "
            "update() after step()."
        )
    if state["stage"] is OptState.UNSCALED:
        found = state["found_inf_per_device"].values()
        return None if any(float(each) for each in found) else 1.0

    # Ranks with other shards than the infinite one must skip the step too. Norms are summed in
    # fp64, but a row's norm may be fp32: on a device, gradients above about 1e19, whose squares
    # overflow fp32, count as not finite.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_finite = bool(global_grad_norm(parameters).isfinite())
    device = local_tensor(parameters[0]).device
    found_inf = torch.tensor(float(not is_finite), dtype=torch.float32, device=device)
    state["found_inf_per_device"] = {device: found_inf}
    return 1.0 / grad_scaler.get_scale() if is_finite else None


def mark_stepped(optimizer: torch.optim.Optimizer, grad_scaler: GradScaler | None) -> None:
    """Records in a GradScaler that the optimizer has stepped or skipped, as the scaler's `step`
    does. The scaler then rejects another step or `unscale_` before its `update`.
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
