"""`DistributedOptimizer`: the only optimizer that the training loop sees.

It computes the norm of all ranks' gradients, clips by a coefficient that the optimizer applies as
it reads gradients, and skips steps whose norm is not finite. In fp16 it scales the loss, and the
same coefficient unscales the gradients; reported norms are of unscaled gradients. It wraps
`RuleOptimizer`, `HybridDeviceOptimizer` over both sides, or another class, according to
`OptimizerConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from megatron.core.distributed.fsdp.optimizer_hooks import fully_shard_optimizer
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.distributed.units import expert_units, units_of
from megatron.core.host_keeper import KeptMemory
from megatron.core.lane_timings import LaneTimings
from megatron.core.optimizer.clip_grads import (
    clip_coefficient,
    global_grad_norm,
    global_num_zeros,
)
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.cpu_offloading.device_side import step_scaled
from megatron.core.optimizer.cpu_offloading.groups import OffloadGroup, build_plan, groups_of
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.cpu_offloading.plan import OffloadPlan
from megatron.core.optimizer.loss_scaler import LossScaler, build_loss_scaler
from megatron.core.optimizer.planning_optimizer import PlanningOptimizer
from megatron.core.optimizer.rule_optimizer import RuleOptimizer
from megatron.core.optimizer.rules import options_of, rule_of
from megatron.core.optimizer.state_memory import StateBytes, state_memory
from megatron.core.optimizer.torch_optimizer import build_torch_optimizer, parameter_groups
from megatron.core.options import ConfigError
from megatron.core.timeline import NO_TIMELINE, AnyTimeline

# Neither is a dependency: `--gpu-optimizer te` or `apex` requires them.
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
    """Clips, scales and steps one optimizer.

    Attributes:
        optimizer: the one behind, for checkpoints.
        loss_scaler: how the loss of the next step is scaled, for checkpoints; None: not at all.
        timeline: see `record_to`.
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
            clip_grad: the norm to which gradients are clipped; 0 disables clipping.
            loss_scaler: for gradients in fp16.
            counts_zeros: whether `num_zeros` is asked for.

        Raises:
            NotImplementedError: for an optimizer that reads decoupled gradients, whose norm is not
                computed.
        """
        # The norm is computed from .grad, which such an optimizer does not step with.
        self._ours = PlanningOptimizer.of(optimizer)
        if self._ours is not None and self._ours.use_decoupled_grad:
            raise NotImplementedError(
                "Expected an optimizer of .grad, got use_decoupled_grad=True."
            )
        self.optimizer = optimizer
        self.loss_scaler = loss_scaler
        self.timeline: AnyTimeline = NO_TIMELINE
        self._clip_grad = clip_grad
        self._counts_zeros = counts_zeros

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own, to be changed at will."""
        return self.optimizer.param_groups

    @property
    def plan(self) -> OffloadPlan | None:
        """Which groups live in host memory; None without offloading."""
        return None if self._ours is None else self._ours.plan

    @property
    def loss_scale(self) -> float:
        """The factor that `scale_loss` applies: 1 without a scaler. `step` changes it."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss whose backward to run: scaled, or `loss` itself without a scaler.

        Args:
            loss: scalar, fp32: in fp16 the product would overflow.
        """
        if self.loss_scaler is None:
            return loss
        if self._ours is not None:
            self._ours.expect_grad_scale(1.0 / self.loss_scaler.scale)
        return loss * self.loss_scaler.scale

    def grad_norm(self) -> torch.Tensor:
        """The L2 norm of all gradients before clipping, unscaled; see `global_grad_norm`. All ranks
        call it together.

        Not finite where a scaled gradient is not.
        """
        return global_grad_norm(self._parameters(), self.timeline) / self.loss_scale

    def num_zeros(self) -> torch.Tensor | None:
        """How many elements of all gradients are zero; None unless `counts_zeros` was set."""
        if not self._counts_zeros:
            return None
        return global_num_zeros(self._parameters(), self.timeline)

    def plan_step(self) -> PlannedStep | None:
        """Plans the next step, while the caller waits for the device to compute the norm.

        Does not step. None for optimizers that cannot plan.

        Raises:
            ValueError, RuntimeError: for gradients that the optimizer cannot step with.
        """
        if self._ours is None:
            return None
        return partial(self._ours.step, planned=self._ours.plan_step())

    def step(
        self, grad_norm: float, planned: PlannedStep | None = None, *, grad_divisor: float = 1.0
    ) -> bool:
        """Clips by the norm of the gradients, and steps. The loss scaler is told.

        Args:
            grad_norm: what `grad_norm` returned, divided by `grad_divisor`; the same on every rank.
                Not finite: the gradients are not to be used.
            planned: what `plan_step` has answered since the gradients are there, or what steps
                instead.
            grad_divisor: a divisor of the gradients, besides the loss scale; the
                same on every rank.

        Returns:
            Whether it stepped: with a norm that is not finite, it does not.
        """
        # These gradients have the present scale; the next backward has the next one.
        loss_scale, is_finite = self.loss_scale, math.isfinite(grad_norm)
        if self.loss_scaler is not None:
            self.loss_scaler = self.loss_scaler.after(found_inf=not is_finite)
        if is_finite:
            self._step_scaled(self._grad_scale(grad_norm, loss_scale * grad_divisor), planned)
        return is_finite

    def _grad_scale(self, grad_norm: float, divisor: float) -> float:
        """The factor of gradients that are `divisor` times too large."""
        # In fp64: our kernels round the factor once, to fp32.
        scale = 1.0
        if self._clip_grad > 0:
            norm = torch.tensor(grad_norm, dtype=torch.float64)
            scale = float(clip_coefficient(norm, self._clip_grad))
        return scale / divisor

    def _step_scaled(self, scale: float, planned: PlannedStep | None) -> None:
        """Steps with gradients that are multiplied with a factor."""
        # Where the optimizer takes a factor, gradients are left as they are: that saves a pass.
        if planned is not None:
            planned(grad_scale=scale)
        elif self._ours is not None:
            self._ours.step(grad_scale=scale)
        else:
            step_scaled(self.optimizer, scale)

    def zero_grad(self) -> None:
        """Drops all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def synchronize(self) -> None:
        """Waits for pending background updates, and raises their errors."""
        if self._ours is not None:
            self._ours.synchronize()

    def state_memory(self, model: nn.Module) -> dict[str, StateBytes]:
        """The bytes of each state of this rank; see `state_memory`.

        Allocates the states of a rule, which are then counted too.

        Args:
            model: whose parameters these are.
        """
        if self._ours is not None and self._ours.plan is None:
            self._ours.init_state()
        return state_memory(model, self.optimizer)

    def record_to(self, timeline: AnyTimeline) -> None:
        """Records the lanes, and the ranks' waits for the norm, to a timeline.

        RuntimeError for an offloaded optimizer that `build_optimizer` was not asked to record.
        """
        if self._ours is not None:
            self._ours.record_to(timeline)
        self.timeline = timeline

    def timings(self) -> LaneTimings | None:
        """How long the offloaded optimizer's lanes took in the steps completed since the last call.

        None if there were none, if nothing is offloaded, or if `build_optimizer` was not asked to
        record.
        """
        return None if self._ours is None else self._ours.timings()

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
    kept: KeptMemory | None = None,
) -> DistributedOptimizer:
    """The optimizer that `config` names over `model`'s parameters, sharded already.

    Args:
        lr: only the first value: the schedule sets it every step.
        num_local_ranks: ranks on this machine, which share its memory.
        scales_loss: whether the model computes in fp16.
        records_timings: whether an offloaded optimizer records timings for
            `DistributedOptimizer.timings`.
        kept: where the host memory of an offloaded optimizer comes from, if it is to survive the
            process.

    Raises:
        ConfigError: for an implementation that is not installed, or not for these parameters.
        HostMemoryError, PinError: see `HybridDeviceOptimizer`.
    """
    groups = parameter_groups(model, config)
    is_on_cpu = all(
        parameter.device.type == "cpu" for group in groups for parameter in group["params"]
    )
    choice = _choice(config, is_on_cpu)

    optimizer: torch.optim.Optimizer
    if config.optimizer_cpu_offload:
        optimizer = _build_hybrid(model, groups, config, lr, num_local_ranks, records_timings, kept)
    elif choice == "native":
        optimizer = RuleOptimizer(
            groups,
            rule_of(config),
            num_host_threads=config.host_threads,
            lr=lr,
            **options_of(config),
        )
    else:
        optimizer = _other_optimizer(model, groups, config, lr, choice)
        if any(group_of(parameter) for group in groups for parameter in group["params"]):
            # These do not support main gradients in another dtype than their parameters.
            fully_shard_optimizer(optimizer)

    return DistributedOptimizer(
        optimizer,
        config.clip_grad,
        loss_scaler=build_loss_scaler(config) if scales_loss else None,
        counts_zeros=config.log_num_zeros_in_grad,
    )


def plan_offload(
    model: nn.Module, config: OptimizerConfig, *, by_module: bool = True
) -> OffloadPlan | None:
    """Which groups of a model will be in host memory, before the model is sharded. The optimizer
    makes the same plan of the sharded one.

    Args:
        by_module: mixtures' experts, layers without these, and the remainder are each moved as a
            whole, like the engine's units; otherwise each tensor is moved alone.

    Returns:
        For `shard_model` and `plan_memory`; None without offloading.
    """
    if not config.optimizer_cpu_offload:
        return None

    groups = offload_groups(model, config, by_module=by_module)
    return build_plan(groups, config.offload_fraction, _goes_first(model, config))


def offload_groups(
    model: nn.Module, config: OptimizerConfig, *, by_module: bool
) -> list[OffloadGroup]:
    """The groups of a model that is not sharded yet, in the order in which the optimizer will find
    them; see `plan_offload`.
    """
    units: dict[int, str] = {}
    for unit in units_of(model) if by_module else ():
        for parameter in unit.module.parameters():
            units.setdefault(id(parameter), unit.name)
    return groups_of(parameter_groups(model, config), lambda parameter: units.get(id(parameter)))


def _goes_first(model: nn.Module, config: OptimizerConfig) -> Iterator[nn.Parameter]:
    """The parameters whose groups go to the host before any other."""
    if config.optimizer_offload_experts_first:
        for unit in expert_units(model):
            yield from unit.parameters()


def _build_hybrid(
    model: nn.Module,
    groups: list[dict[str, Any]],
    config: OptimizerConfig,
    lr: float,
    num_local_ranks: int,
    records_timings: bool,
    kept: KeptMemory | None,
) -> HybridDeviceOptimizer:
    has_lanes, in_backward, in_forward = config.overlap.value
    return HybridDeviceOptimizer(
        groups,
        config.offload_fraction,
        param_update_in_fp32=True,
        pin_cpu_grads=config.pin_cpu_grads,
        pin_cpu_params=config.pin_cpu_params,
        overlap_cpu_optimizer_d2h_h2d=has_lanes,
        fetch_during_backward=in_backward,
        overlap_step_with_forward=in_forward,
        num_host_threads=config.host_threads,
        num_local_ranks=num_local_ranks,
        records_timings=records_timings,
        offload_first=_goes_first(model, config),
        rule=rule_of(config),
        update_on_device=config.update_on_device,
        early_update_bytes=config.early_update_bytes,
        kept=kept,
        lr=lr,
        **options_of(config),
    )


def _choice(config: OptimizerConfig, is_on_cpu: bool) -> str:
    """`--gpu-optimizer` with `auto` resolved. ConfigError if it does not support the settings."""
    choice = config.gpu_optimizer
    if choice == "auto":
        return "native"

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

    cls: Any = {"te": TEFusedAdam, "apex": ApexFusedAdam}[choice]
    if cls is None:
        package = {"te": "TransformerEngine", "apex": "NVIDIA's Apex"}[choice]
        raise ConfigError(
            f"--gpu-optimizer: expected {package} to be installed for {choice}, got no such "
            "package."
        )
    optimizer: torch.optim.Optimizer = cls(groups, lr=lr, **options_of(config))
    return optimizer
