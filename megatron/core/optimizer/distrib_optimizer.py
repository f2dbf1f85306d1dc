"""`DistributedOptimizer`: the only optimizer that the training loop sees, whatever stands behind
it.

It knows the norm of all ranks' gradients, clips by a coefficient that the optimizer takes in as it
reads gradients, and steps nothing where the norm is not finite. In fp16 it scales the loss, and the
same coefficient undoes that; what it says of gradients is of the unscaled ones. Behind it is
`FusedAdam`, `HybridDeviceOptimizer` over both sides, or one of others, as `OptimizerConfig` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.optimizer_hooks import fully_shard_optimizer
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.distributed.units import sharding_units
from megatron.core.dtypes import DTYPES
from megatron.core.host_memory import HostNeed
from megatron.core.optimizer.clip_grads import (
    clip_coefficient,
    global_grad_norm,
    global_num_zeros,
    scale_grads,
)
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.cpu_offloading.host_arrays import (
    check_memory_on_all_ranks,
    shares_memory,
)
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.cpu_offloading.plan import OffloadPlan
from megatron.core.optimizer.cpu_offloading.timings import OffloadTimings
from megatron.core.optimizer.cpu_offloading.units import Owner, Unit, place, sharded_owner
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.loss_scaler import LossScaler, build_loss_scaler
from megatron.core.optimizer.state_memory import StateBytes, state_memory
from megatron.core.optimizer.torch_optimizer import build_torch_optimizer, parameter_groups
from megatron.core.options import ConfigError

try:
    from transformer_engine.pytorch.optimizers import FusedAdam as TEFusedAdam
except ImportError:
    TEFusedAdam = None
try:
    from apex.optimizers import FusedAdam as ApexFusedAdam
except ImportError:
    ApexFusedAdam = None


class PlannedStep(Protocol):
    """The optimizer's step, of which only the factor of the gradients is missing."""

    def __call__(self, *, grad_scale: float) -> object: ...


class DistributedOptimizer:
    """See the module's docstring.

    Attributes:
        optimizer: the one behind, for checkpoints.
        loss_scaler: how the loss of the next step is scaled, for checkpoints; None: not at all.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grad: float,
        *,
        loss_scaler: LossScaler | None = None,
        counts_zeros: bool = False,
    ) -> None:
        """
        Args:
            optimizer: over sharded or plain parameters.
            clip_grad: the norm to which gradients are clipped; 0 clips nothing.
            loss_scaler: for gradients in fp16.
            counts_zeros: whether `num_zeros` is asked for.

        Raises:
            NotImplementedError: for an optimizer that reads decoupled gradients, whose norm nothing
                here would take.
        """
        if (
            isinstance(optimizer, (FusedAdam, HybridDeviceOptimizer))
            and optimizer.use_decoupled_grad
        ):
            raise NotImplementedError(
                "Expected an optimizer of .grad, got use_decoupled_grad=True."
            )
        self.optimizer = optimizer
        self.loss_scaler = loss_scaler
        self._clip_grad = clip_grad
        self._counts_zeros = counts_zeros

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own, to be changed at will."""
        return self.optimizer.param_groups

    @property
    def plan(self) -> OffloadPlan | None:
        """Which groups live in host memory; None without offloading."""
        return self.optimizer.plan if isinstance(self.optimizer, HybridDeviceOptimizer) else None

    @property
    def loss_scale(self) -> float:
        """What `scale_loss` multiplies with: 1 without a scaler. `step` changes it."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to run the backward of: scaled, or `loss` itself without a scaler.

        Args:
            loss: scalar, fp32: in fp16 the product would overflow.
        """
        return loss if self.loss_scaler is None else loss * self.loss_scaler.scale

    def grad_norm(self) -> torch.Tensor:
        """The L2 norm of all gradients before clipping, unscaled; see `global_grad_norm`. All ranks
        call it together.

        Not finite where a scaled gradient is not.
        """
        return global_grad_norm(self._parameters()) / self.loss_scale

    def num_zeros(self) -> torch.Tensor | None:
        """How many elements of all gradients are zero; see `global_num_zeros`. None unless it is
        asked for.
        """
        return global_num_zeros(self._parameters()) if self._counts_zeros else None

    def plan_step(self) -> PlannedStep | None:
        """What `step` can know before the norm: for callers with nothing else to do until the
        device has told it.

        Steps nothing. None where `step` has to find all of it out itself.

        Raises:
            ValueError, RuntimeError: for gradients that the optimizer cannot step with.
        """
        if isinstance(self.optimizer, FusedAdam):
            return partial(self.optimizer.step, planned=self.optimizer.plan_step())
        if isinstance(self.optimizer, HybridDeviceOptimizer):
            return partial(self.optimizer.step, planned=self.optimizer.plan_step())
        return None

    def step(self, grad_norm: float, planned: PlannedStep | None = None) -> bool:
        """Clips by the norm that `grad_norm` has given, and steps. The loss scaler learns how it
        went.

        Args:
            grad_norm: the same on every rank. Not finite: the gradients are not to be used.
            planned: what `plan_step` has answered since the gradients are there.

        Returns:
            Whether it did: with a norm that is not finite, nothing is stepped.
        """
        loss_scale, is_finite = self.loss_scale, math.isfinite(grad_norm)
        if self.loss_scaler is not None:
            self.loss_scaler = self.loss_scaler.after(found_inf=not is_finite)
        if is_finite:
            self._step_scaled(grad_norm, loss_scale, planned)
        return is_finite

    def _step_scaled(
        self, grad_norm: float, loss_scale: float, planned: PlannedStep | None
    ) -> None:
        """Steps with gradients that are `loss_scale` times too large, and are left so where the
        optimizer can.
        """
        scale = 1.0
        if self._clip_grad > 0:
            scale = float(
                clip_coefficient(torch.tensor(grad_norm, dtype=torch.float64), self._clip_grad)
            )
        scale /= loss_scale
        if planned is not None:
            planned(grad_scale=scale)
        elif isinstance(self.optimizer, (FusedAdam, HybridDeviceOptimizer)):
            self.optimizer.step(grad_scale=scale)
        else:
            scale_grads(self._parameters(), torch.tensor(scale, dtype=torch.float64))
            self.optimizer.step()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def synchronize(self) -> None:
        """Waits for updates under way in the background, and raises what failed there."""
        if isinstance(self.optimizer, HybridDeviceOptimizer):
            self.optimizer.synchronize()

    def state_memory(self, model: nn.Module) -> dict[str, StateBytes]:
        """The bytes of each state of this rank; see `state_memory`. Allocates AdamW's states, where
        there are none yet.

        Args:
            model: whose parameters these are.
        """
        if isinstance(self.optimizer, FusedAdam):
            self.optimizer.init_state()
        return state_memory(model, self.optimizer)

    def timings(self) -> OffloadTimings | None:
        """What the offloaded optimizer's lanes took in the steps completed since the last call, on
        this rank.

        None if there were none, if nothing is offloaded, or if `build_optimizer` was not asked to
        record.
        """
        return (
            self.optimizer.timings() if isinstance(self.optimizer, HybridDeviceOptimizer) else None
        )

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.optimizer.param_groups:
            yield from group["params"]


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    lr: float,
    num_local_ranks: int,
    *,
    scales_loss: bool = False,
    records_timings: bool = False,
) -> DistributedOptimizer:
    """The optimizer that `config` names over `model`'s parameters, sharded already.

    Args:
        lr: only the first value: the schedule sets it every step.
        num_local_ranks: ranks on this machine, which share its memory.
        scales_loss: whether the model computes in fp16.
        records_timings: whether an offloaded optimizer records what `DistributedOptimizer.timings`
            tells.

    Raises:
        ConfigError: for an implementation that is not installed, or not for these parameters.
        HostMemoryError, PinError: see `HybridDeviceOptimizer`.
    """
    groups = parameter_groups(model.named_parameters(), config.weight_decay)
    is_on_cpu = all(
        parameter.device.type == "cpu" for group in groups for parameter in group["params"]
    )
    choice = _choice(config, is_on_cpu)
    optimizer: torch.optim.Optimizer
    if config.optimizer_cpu_offload:
        optimizer = _build_hybrid(groups, config, lr, num_local_ranks, records_timings)
    elif choice == "native":
        optimizer = FusedAdam(
            groups,
            exp_avg_dtype=DTYPES[config.exp_avg_dtype],
            exp_avg_sq_dtype=DTYPES[config.exp_avg_sq_dtype],
            num_host_threads=config.cpu_optimizer_threads,
            **_options(config, lr),
        )
    else:
        optimizer = _other_optimizer(model, groups, config, lr, choice)
        if any(group_of(parameter) for group in groups for parameter in group["params"]):
            fully_shard_optimizer(optimizer)
    return DistributedOptimizer(
        optimizer,
        config.clip_grad,
        loss_scaler=build_loss_scaler(config) if scales_loss else None,
        counts_zeros=config.log_num_zeros_in_grad,
    )


def offloaded_units(model: nn.Module, config: OptimizerConfig) -> dict[nn.Module, int]:
    """The units of a model whose optimizer states `build_optimizer` will keep in host memory,
    before it is sharded.

    Main weights that are on the host from the start never need the device's memory.

    Returns:
        Some of `sharding_units(model)`, and `model` for what they leave, with their global element
        counts.
    """
    owners = {
        id(parameter): unit for unit in sharding_units(model) for parameter in unit.parameters()
    }

    def owner_of(parameter: nn.Parameter, _: str) -> Owner:
        return Owner(owners.get(id(parameter), model), "")

    offloaded = _offloaded(model, config, owner_of)
    return {owners.get(id(unit.parameters[0]), model): unit.global_numel for unit in offloaded}


def offloaded_numel(model: nn.Module, config: OptimizerConfig) -> int:
    """The elements that `build_optimizer` will offload, of a model without FSDP groups."""
    return sum(unit.global_numel for unit in _offloaded(model, config, sharded_owner))


def _offloaded(
    model: nn.Module,
    config: OptimizerConfig,
    owner_of: Callable[[nn.Parameter, str], Owner],
) -> list[Unit]:
    if not config.optimizer_cpu_offload:
        return []
    groups = parameter_groups(model.named_parameters(), config.weight_decay)
    return place(groups, config.optimizer_offload_fraction, owner_of).on_host


def check_host_memory_for(
    numel: int,
    config: OptimizerConfig,
    grad_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    num_local_ranks: int,
    mesh: DeviceMesh,
) -> None:
    """Refuses, before there are any weights, what `build_optimizer` would refuse once there are.
    All ranks together.

    Args:
        numel: elements that a rank will have on the host, but for padding.
        grad_dtype, weight_dtype: of gradients and compute weights as they travel.

    Raises:
        HostMemoryError: see `HybridDeviceOptimizer`.
    """
    needs = {
        "main weights": DTYPES[config.main_params_dtype].itemsize,
        "gradients": grad_dtype.itemsize,
    }
    if config.optimizer == "adam":
        needs["moments"] = (
            DTYPES[config.exp_avg_dtype].itemsize + DTYPES[config.exp_avg_sq_dtype].itemsize
        )
    elif config.sgd_momentum:
        needs["momentum"] = torch.float32.itemsize
    if not shares_memory(grad_dtype, weight_dtype, config.pin_cpu_grads, config.pin_cpu_params):
        needs["compute weights"] = weight_dtype.itemsize
    check_memory_on_all_ranks(
        [HostNeed(what, numel * itemsize, is_pinned=False) for what, itemsize in needs.items()],
        num_local_ranks,
        mesh,
    )


def _build_hybrid(
    groups: list[dict[str, Any]],
    config: OptimizerConfig,
    lr: float,
    num_local_ranks: int,
    records_timings: bool,
) -> HybridDeviceOptimizer:
    cls = torch.optim.SGD if config.optimizer == "sgd" else None
    return HybridDeviceOptimizer(
        groups,
        config.optimizer_offload_fraction,
        cpu_optimizer_cls=cls,
        gpu_optimizer_cls=cls,
        param_update_in_fp32=True,
        pin_cpu_grads=config.pin_cpu_grads,
        pin_cpu_params=config.pin_cpu_params,
        overlap_cpu_optimizer_d2h_h2d=config.overlap_cpu_optimizer_d2h_h2d,
        # Between backward and step nothing here writes to gradients: clipping is a factor.
        fetch_during_backward=config.overlap_cpu_optimizer_d2h_h2d,
        overlap_step_with_forward=config.overlap_optimizer_with_forward,
        exp_avg_dtype=DTYPES[config.exp_avg_dtype],
        exp_avg_sq_dtype=DTYPES[config.exp_avg_sq_dtype],
        num_host_threads=config.cpu_optimizer_threads,
        num_local_ranks=num_local_ranks,
        records_timings=records_timings,
        **_options(config, lr),
    )


def _options(config: OptimizerConfig, lr: float) -> dict[str, Any]:
    if config.optimizer == "sgd":
        return {"lr": lr, "momentum": config.sgd_momentum}
    return {"lr": lr, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}


def _choice(config: OptimizerConfig, is_on_cpu: bool) -> str:
    """`--gpu-optimizer` with `auto` resolved. ConfigError for one that cannot do what is asked."""
    choice = config.gpu_optimizer
    if choice == "auto":
        return "torch" if config.optimizer == "sgd" else "native"
    if choice in ("te", "apex") and is_on_cpu:
        raise ConfigError(
            f"--gpu-optimizer: expected auto, native or torch on the CPU, got {choice}."
        )
    return choice


def _other_optimizer(
    model: nn.Module, groups: list[dict[str, Any]], config: OptimizerConfig, lr: float, choice: str
) -> torch.optim.Optimizer:
    if choice == "torch":
        return build_torch_optimizer(model, config, lr)
    cls: type[torch.optim.Optimizer] | None = {"te": TEFusedAdam, "apex": ApexFusedAdam}[choice]
    if cls is None:
        package = {"te": "TransformerEngine", "apex": "NVIDIA's Apex"}[choice]
        raise ConfigError(
            f"--gpu-optimizer: expected {package} to be installed for {choice}, got no such "
            "package."
        )
    return cls(groups, **_options(config, lr))
