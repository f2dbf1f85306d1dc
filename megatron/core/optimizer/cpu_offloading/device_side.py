"""`DeviceSide`: the optimizer of the groups that stay on the device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from megatron.core.distributed.fsdp.optimizer_hooks import fully_shard_optimizer
from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.clip_grads import scale_grads
from megatron.core.optimizer.cpu_offloading.groups import OffloadGroup
from megatron.core.optimizer.cpu_offloading.hybrid_settings import HybridSettings
from megatron.core.optimizer.fused_adam import FusedAdam, FusedStep
from megatron.core.optimizer.state_loading import check_like
from megatron.core.optimizer.state_tensors import MASTER, like
from megatron.core.optimizer.state_units import StateUnit, state_units
from megatron.core.optimizer.step_inputs import IDENTITIES
from megatron.core.optimizer.torch_optimizer import (
    defaults_of,
    init_torch_states,
    load_torch_states,
)

_ParamGroups = Sequence[Mapping[str, Any]]


class DeviceSide:
    """The optimizer of the groups that stay on the device.

    Attributes:
        optimizer: None while everything is on the host.
    """

    def __init__(self, settings: HybridSettings) -> None:
        self.optimizer: torch.optim.Optimizer | None = None
        self._settings = settings
        self._own: set[torch.Tensor] = set()
        self._casts_gradients = False

    def add(self, groups: Sequence[OffloadGroup], param_groups: _ParamGroups) -> None:
        """Adds groups to the optimizer. `param_groups` have the parameters of both sides.

        Raises:
            ValueError: for parameters that the optimizer's class rejects; no group is added then.
        """
        # An earlier call may have added some of them before the host side ran out of memory.
        added = [p for group in groups for p in group.parameters if p not in self._own]
        if not added:
            return

        cls, options = self._settings.device_class()
        if self.optimizer is None:
            known = defaults_of(cls, options)
            self.optimizer = cls(_part_of(param_groups, set(added), known), **options)
        else:
            self.optimizer.add_param_group({"params": added})
        self._own.update(added)
        self.regroup(param_groups)
        if isinstance(self.optimizer, FusedAdam):
            self.optimizer.init_state(with_frozen=False)
        elif any(group.fsdp_groups for group in groups) and not self._casts_gradients:
            fully_shard_optimizer(self.optimizer)
            self._casts_gradients = True

    def regroup(self, param_groups: _ParamGroups) -> None:
        """Puts the optimizer's parameters into the groups in which both sides' are now."""
        if self.optimizer is not None:
            defaults = self.optimizer.defaults
            groups = _part_of(param_groups, self._own, defaults)
            self.optimizer.param_groups[:] = [defaults | group for group in groups]

    def plan_step(self, param_groups: _ParamGroups) -> FusedStep | None:
        """Takes the groups' options over, and plans; None for other optimizers than `FusedAdam`."""
        self.take_options(param_groups)
        return self.optimizer.plan_step() if isinstance(self.optimizer, FusedAdam) else None

    def take_options(self, param_groups: _ParamGroups) -> None:
        """Gives the optimizer's groups the options of `param_groups`."""
        optimizer = self.optimizer
        if optimizer is None:
            return

        for own, group in zip(optimizer.param_groups, param_groups, strict=True):
            # FusedAdam rejects options that it cannot honour. Groups of other classes may have
            # options of the host's class.
            names = group if isinstance(optimizer, FusedAdam) else own
            own.update(
                {name: group[name] for name in names if name not in IDENTITIES and name in group}
            )

    def step(self, grad_scale: float, planned: FusedStep | None) -> None:
        """Steps as planned by `plan_step`."""
        optimizer = self.optimizer
        if isinstance(optimizer, FusedAdam):
            optimizer.step(grad_scale=grad_scale, planned=planned)
        elif optimizer is not None:
            if grad_scale != 1:
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                scale_grads(parameters, torch.tensor(grad_scale, dtype=torch.float64))
            optimizer.step()

    def init_states(self, param_groups: _ParamGroups) -> None:
        """Allocates the states that are not there yet, without stepping."""
        self.take_options(param_groups)
        if isinstance(self.optimizer, FusedAdam):
            self.optimizer.init_state()
        elif self.optimizer is not None:
            init_torch_states(self.optimizer)

    def state_units(self) -> list[StateUnit]:
        """The units of the optimizer."""
        return [] if self.optimizer is None else state_units(self.optimizer)

    def masters(self) -> dict[torch.Tensor, torch.Tensor]:
        """The main weights of the parameters that are not these themselves; not copies."""
        optimizer = self.optimizer
        if not isinstance(optimizer, FusedAdam):
            return {}
        return {
            parameter: states[MASTER]
            for parameter, states in optimizer.state.items()
            if MASTER in states
        }

    def reload(self) -> None:
        """Makes main weights of the parameters' values."""
        if isinstance(self.optimizer, FusedAdam):
            for parameter in self.masters():
                values = like(parameter, local_tensor(parameter).detach().float())
                self.optimizer.set_scaled_state(parameter, MASTER, values)

    def check_states(self, parameter: torch.Tensor, states: Mapping[str, Any]) -> None:
        """ValueError for states that do not fit. `FusedAdam` checks them as it loads."""
        if self.optimizer is not None and not isinstance(self.optimizer, FusedAdam):
            check_like(self.optimizer.state.get(parameter, {}), states)

    def load(self, saved: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Takes over the states of all parameters; empty ones: never stepped."""
        if isinstance(self.optimizer, FusedAdam):
            self._load_fused(self.optimizer, saved)
        elif self.optimizer is not None:
            for parameter, states in saved.items():
                load_torch_states(self.optimizer, parameter, states)

    def _load_fused(
        self, optimizer: FusedAdam, saved: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> None:
        # Not of `state_dict()`, which fails where a parameter with a state has left the groups.
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        packed = [
            {**group, "params": [numbers[parameter] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        states = {
            numbers[parameter]: value
            for parameter, value in saved.items()
            if value and parameter in numbers
        }
        optimizer.load_state_dict({"state": states, "param_groups": packed})


def _part_of(
    param_groups: _ParamGroups, own: Collection[torch.Tensor], known: Collection[str]
) -> list[dict[str, Any]]:
    """The groups of both sides with one side's parameters, and the options that it supports.

    Groups without a parameter on that side stay: both sides' groups are matched by place.
    """
    return [
        {name: value for name, value in group.items() if name in known}
        | {"params": [parameter for parameter in group["params"] if parameter in own]}
        for group in param_groups
    ]
