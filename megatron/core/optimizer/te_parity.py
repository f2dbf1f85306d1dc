"""Features of TransformerEngine's `FusedAdam` that ours has too, and that no flag of a run reaches.

They serve programs that were written for that class. Their rules are kept apart here:

    use_decoupled_grad       gradients are read from `p.decoupled_grad`, where the program puts them
                             in any dtype, and not from `p.grad`, which has the parameter's
    master_weights           fp32 values of 16-bit parameters outside of our `fully_shard`
    master_weight_dtype      in which these are kept: fp32, or fp16 with a scale
    store_param_remainders   of a bf16 parameter's fp32 value, only what the parameter lacks; see
                             [Note: remainder] in kernels/adam.py
    set_grad_none            what `zero_grad` does if it is not told
    step(grad_scaler=)       torch's GradScaler, whose scale is divided out as gradients are read

A run asks for `master_weights` alone, for what an offloading optimizer leaves on the device, and
chooses dtypes by `--main-params-dtype`, `--main-grads-dtype` and `--exp-avg-dtype`.

A parameter without a gradient is not stepped. A gradient in an attribute that the optimizer does
not read raises an error, since its parameter would silently not be stepped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.amp.grad_scaler import GradScaler, OptState

from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.distributed.fsdp.parameters import REPLACED
from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.clip_grads import global_grad_norm

_MASTER_DTYPES = (torch.float32, torch.float16)
# `main_grad` is where Megatron's DistributedDataParallel adds gradients up.
_ATTRIBUTES = ("grad", "decoupled_grad", "main_grad")


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


@dataclass(frozen=True)
class MasterWeights:
    """How fp32 values of 16-bit parameters are kept, if they are.

    Raises:
        NotImplementedError: for another dtype than fp32 and fp16.
        ValueError: for remainders of anything but fp32.
    """

    is_kept: bool
    dtype: torch.dtype
    as_remainders: bool

    def __post_init__(self) -> None:
        if self.as_remainders and not (self.is_kept and self.dtype == torch.float32):
            raise ValueError(
                "Expected store_param_remainders with master_weights=True in torch.float32, got "
                f"master_weights={self.is_kept} in {self.dtype}."
            )
        check_dtype("master_weight_dtype", self.dtype, _MASTER_DTYPES)

    def dtype_of(self, parameter: torch.Tensor) -> torch.dtype | None:
        """Of a parameter's `master_param`, int16 for a remainder; None if it has none."""
        # Parameters of our `fully_shard` are main weights already.
        is_narrow = parameter.dtype.itemsize == 2
        if not (self.is_kept and is_narrow) or group_of(parameter) is not None:
            return None
        # fp16 has other exponents than fp32: no remainder of 16 bits completes it.
        if self.as_remainders and parameter.dtype == torch.bfloat16:
            return torch.int16
        return self.dtype


def check_dtype(name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> None:
    """NotImplementedError for a dtype that is not allowed; TransformerEngine's RuntimeError."""
    if dtype not in allowed:
        raise NotImplementedError(
            f"Expected {name} to be one of {', '.join(map(str, allowed))}, got {dtype}."
        )
