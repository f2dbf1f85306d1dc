"""`DistributedOptimizer`: the only optimizer that the training loop sees, whatever stands behind it.

It knows the norm of all ranks' gradients, clips by a coefficient that the optimizer takes in as it reads gradients, and
steps nothing where the norm is not finite. Behind it is `FusedAdam`, `HybridDeviceOptimizer` over both sides, or one of
others, as `OptimizerConfig` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.fully_shard import fully_shard_optimizer
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.distributed.units import sharding_units
from megatron.core.host_memory import HostNeed
from megatron.core.optimizer.clip_grads import clip_coefficient, global_grad_norm, scale_grads
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.cpu_offloading.host_arrays import check_memory_on_all_ranks, shares_memory
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.cpu_offloading.plan import OffloadPlan
from megatron.core.optimizer.fused_adam import FusedAdam
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

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class DistributedOptimizer:
    """See the module's docstring.

    Attributes:
        optimizer: the one behind, for checkpoints.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, clip_grad: float) -> None:
        """
        Args:
            optimizer: over sharded or plain parameters.
            clip_grad: the norm to which gradients are clipped; 0 clips nothing.
        """
        self.optimizer = optimizer
        self._clip_grad = clip_grad

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own, to be changed at will."""
        return self.optimizer.param_groups

    @property
    def plan(self) -> OffloadPlan | None:
        """Which groups live in host memory; None without offloading."""
        return self.optimizer.plan if isinstance(self.optimizer, HybridDeviceOptimizer) else None

    def grad_norm(self) -> torch.Tensor:
        """The L2 norm of all gradients before clipping; see `global_grad_norm`. All ranks call it together."""
        return global_grad_norm(self._parameters())

    def step(self, grad_norm: float) -> bool:
        """Clips by the norm that `grad_norm` has given, and steps.

        Returns:
            Whether it did: with a norm that is not finite, nothing is stepped.
        """
        if not math.isfinite(grad_norm):
            return False
        scale = 1.0
        if self._clip_grad > 0:
            scale = float(clip_coefficient(torch.tensor(grad_norm, dtype=torch.float64), self._clip_grad))
        if isinstance(self.optimizer, (FusedAdam, HybridDeviceOptimizer)):
            self.optimizer.step(grad_scale=scale)
        else:
            scale_grads(self._parameters(), torch.tensor(scale, dtype=torch.float64))
            self.optimizer.step()
        return True

    def zero_grad(self) -> None:
        """Drops all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def synchronize(self) -> None:
        """Waits for updates under way in the background, and raises what failed there."""
        if isinstance(self.optimizer, HybridDeviceOptimizer):
            self.optimizer.synchronize()

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.optimizer.param_groups:
            yield from group["params"]


def build_optimizer(model: nn.Module, config: OptimizerConfig, lr: float, num_local_ranks: int) -> DistributedOptimizer:
    """The optimizer that `config` names over `model`'s parameters, sharded already.

    Args:
        lr: only the first value: the schedule sets it every step.
        num_local_ranks: ranks on this machine, which share its memory.

    Raises:
        ConfigError: for an implementation that is not installed, or not for these parameters.
        HostMemoryError, PinError: see `HybridDeviceOptimizer`.
    """
    groups = parameter_groups(model.named_parameters(), config.weight_decay)
    is_on_cpu = all(parameter.device.type == "cpu" for group in groups for parameter in group["params"])
    choice = _choice(config, is_on_cpu)
    optimizer: torch.optim.Optimizer
    if config.optimizer_cpu_offload:
        optimizer = _build_hybrid(groups, config, lr, num_local_ranks)
    elif choice == "native":
        optimizer = FusedAdam(
            groups,
            exp_avg_dtype=_DTYPES[config.exp_avg_dtype],
            exp_avg_sq_dtype=_DTYPES[config.exp_avg_sq_dtype],
            num_host_threads=config.cpu_optimizer_threads,
            **_options(config, lr),
        )
    else:
        optimizer = _other_optimizer(model, groups, config, lr, choice)
        if any(group_of(parameter) for group in groups for parameter in group["params"]):
            fully_shard_optimizer(optimizer)
    return DistributedOptimizer(optimizer, config.clip_grad)


def offloaded_units(model: nn.Module, config: OptimizerConfig) -> dict[nn.Module, int]:
    """The units of a model whose optimizer states `build_optimizer` will keep in host memory, before it is sharded.

    Main weights that are on the host from the start never need the device's memory.

    Returns:
        Some of `sharding_units(model)`, and `model` for what they leave, with their global element counts.
    """
    if not config.optimizer_cpu_offload:
        return {}
    owners = {id(parameter): unit for unit in sharding_units(model) for parameter in unit.parameters()}
    numels: dict[nn.Module, int] = {}
    for group in parameter_groups(model.named_parameters(), config.weight_decay):
        for parameter in group["params"]:
            unit = owners.get(id(parameter), model)
            numels[unit] = numels.get(unit, 0) + parameter.numel()
    plan = OffloadPlan.build([("", numel) for numel in numels.values()], config.optimizer_offload_fraction)
    return {unit: numel for index, (unit, numel) in enumerate(numels.items()) if plan.is_on_host(index)}


def check_host_memory_for(
    numel: int,
    config: OptimizerConfig,
    grad_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    num_local_ranks: int,
    mesh: DeviceMesh,
) -> None:
    """Refuses, before there are any weights, what `build_optimizer` would refuse once there are. All ranks together.

    Args:
        numel: elements that a rank will have on the host, but for padding.
        grad_dtype, weight_dtype: of gradients and compute weights as they travel.

    Raises:
        HostMemoryError: see `HybridDeviceOptimizer`.
    """
    needs = {"main weights": torch.float32.itemsize, "gradients": grad_dtype.itemsize}
    if config.optimizer == "adam":
        needs["moments"] = _DTYPES[config.exp_avg_dtype].itemsize + _DTYPES[config.exp_avg_sq_dtype].itemsize
    elif config.sgd_momentum:
        needs["momentum"] = torch.float32.itemsize
    if not shares_memory(grad_dtype, weight_dtype, config.pin_cpu_grads, config.pin_cpu_params):
        needs["compute weights"] = weight_dtype.itemsize
    check_memory_on_all_ranks(
        [HostNeed(what, numel * itemsize, is_pinned=False) for what, itemsize in needs.items()], num_local_ranks, mesh
    )


def _build_hybrid(
    groups: list[dict[str, Any]], config: OptimizerConfig, lr: float, num_local_ranks: int
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
        exp_avg_dtype=_DTYPES[config.exp_avg_dtype],
        exp_avg_sq_dtype=_DTYPES[config.exp_avg_sq_dtype],
        num_host_threads=config.cpu_optimizer_threads,
        num_local_ranks=num_local_ranks,
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
        raise ConfigError(f"--gpu-optimizer: expected auto, native or torch on the CPU, got {choice}.")
    return choice


def _other_optimizer(
    model: nn.Module, groups: list[dict[str, Any]], config: OptimizerConfig, lr: float, choice: str
) -> torch.optim.Optimizer:
    if choice == "torch":
        return build_torch_optimizer(model, config, lr)
    cls: type[torch.optim.Optimizer] | None = {"te": TEFusedAdam, "apex": ApexFusedAdam}[choice]
    if cls is None:
        package = {"te": "TransformerEngine", "apex": "NVIDIA's Apex"}[choice]
        raise ConfigError(f"--gpu-optimizer: expected {package} to be installed for {choice}, got no such package.")
    return cls(groups, **_options(config, lr))
