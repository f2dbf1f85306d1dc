"""`DeviceSide`: the optimizer of the groups that stay on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch

from megatron.core.distributed.fsdp.optimizer_hooks import fully_shard_optimizer
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.clip_grads import scale_grads
from megatron.core.optimizer.cpu_offloading.groups import OffloadGroup
from megatron.core.optimizer.cpu_offloading.hybrid_settings import HybridSettings, Updater
from megatron.core.optimizer.planning_optimizer import state_units
from megatron.core.optimizer.rule_optimizer import RuleOptimizer, RuleStep
from megatron.core.optimizer.rules import UpdateRule
from megatron.core.optimizer.state_loading import check_like
from megatron.core.optimizer.state_tensors import MASTER, like
from megatron.core.optimizer.state_units import StateUnit
from megatron.core.optimizer.step_inputs import IDENTITIES
from megatron.core.optimizer.torch_optimizer import init_torch_states, load_torch_states

_ParamGroups = Sequence[Mapping[str, Any]]
_States = Mapping[torch.Tensor, Mapping[str, Any]]


class DeviceSide(ABC):
    """The optimizer of the groups that stay on the device.

    Attributes:
        optimizer: None while everything is on the host.
    """

    optimizer: torch.optim.Optimizer | None
    _takes_all_options: ClassVar[bool]  # copy all options of a group, or only known ones

    @classmethod
    def make(cls, settings: HybridSettings) -> DeviceSide:
        """Returns the device side of an optimizer with these settings."""
        rule = settings.device.rule
        return _TorchSide(settings.device) if rule is None else _RuleSide(rule, settings)

    def __init__(self) -> None:
        self._own: set[torch.Tensor] = set()

    def add(self, groups: Sequence[OffloadGroup], param_groups: _ParamGroups) -> None:
        """Adds groups to the optimizer. `param_groups` have the parameters of both sides.

        Raises:
            ValueError: for parameters that the optimizer rejects; no group is added then.
        """
        # If the host side ran out of memory, an earlier call has added some of the parameters.
        added = [p for group in groups for p in group.parameters if p not in self._own]
        if not added:
            return

        if self.optimizer is None:
            self._make(param_groups, set(added))
        else:
            for group in _part_of(param_groups, set(added), self.optimizer.defaults):
                if group["params"]:
                    self.optimizer.add_param_group(group)
        self._own.update(added)
        self.regroup(param_groups)
        self._complete()

    @abstractmethod
    def _make(self, param_groups: _ParamGroups, own: set[torch.Tensor]) -> None:
        """Creates the optimizer, for the first parameters."""

    @abstractmethod
    def _complete(self) -> None:
        """Called after parameters were added."""

    def regroup(self, param_groups: _ParamGroups) -> None:
        """Moves the parameters to the groups that they have in `param_groups` of both sides."""
        if self.optimizer is not None:
            defaults = self.optimizer.defaults
            groups = _part_of(param_groups, self._own, defaults)
            self.optimizer.param_groups[:] = [defaults | group for group in groups]

    def take_options(self, param_groups: _ParamGroups) -> None:
        """Copies the options of `param_groups` to the optimizer's groups."""
        if self.optimizer is None:
            return

        for own, group in zip(self.optimizer.param_groups, param_groups, strict=True):
            names = group if self._takes_all_options else own
            own.update(
                {name: group[name] for name in names if name not in IDENTITIES and name in group}
            )

    @abstractmethod
    def plan_step(self, param_groups: _ParamGroups) -> RuleStep | None:
        """Copies the groups' options, and plans the step if the optimizer supports plans."""

    @abstractmethod
    def step(self, grad_scale: float, planned: RuleStep | None) -> None:
        """Runs the step that `plan_step` planned."""

    @abstractmethod
    def init_states(self, param_groups: _ParamGroups) -> None:
        """Allocates missing states, without stepping."""

    def state_units(self) -> list[StateUnit]:
        """Returns the optimizer's state units."""
        return [] if self.optimizer is None else state_units(self.optimizer)

    def masters(self) -> dict[torch.Tensor, torch.Tensor]:
        """Returns the main weights, not copies, of parameters that have separate ones."""
        return {}

    def reload(self) -> None:  # noqa: B027
        """Sets main weights to the parameters' values."""

    def check_states(self, parameter: torch.Tensor, states: Mapping[str, Any]) -> None:  # noqa: B027
        """Raises ValueError for invalid states, unless `load` checks all states first."""

    @abstractmethod
    def load(self, saved: _States) -> None:
        """Loads the states of all parameters. Empty states: never stepped."""


class _RuleSide(DeviceSide):
    """Applies an update rule."""

    optimizer: RuleOptimizer | None
    _takes_all_options = True  # the rule rejects unsupported options

    def __init__(self, rule: UpdateRule, settings: HybridSettings) -> None:
        super().__init__()
        self.optimizer = None
        self._rule = rule
        self._settings = settings

    def _make(self, param_groups: _ParamGroups, own: set[torch.Tensor]) -> None:
        rule, options = self._rule, self._settings.device.rule_options
        self.optimizer = RuleOptimizer(
            _part_of(param_groups, own, rule.defaults_with(options)),
            rule,
            master_weights=self._settings.in_fp32,
            use_decoupled_grad=self._settings.use_decoupled_grad,
            num_host_threads=self._settings.num_host_threads,
            **options,
        )

    def _complete(self) -> None:
        if self.optimizer is not None:
            self.optimizer.init_state(with_frozen=False)

    def plan_step(self, param_groups: _ParamGroups) -> RuleStep | None:
        self.take_options(param_groups)
        return None if self.optimizer is None else self.optimizer.plan_step()

    def step(self, grad_scale: float, planned: RuleStep | None) -> None:
        if self.optimizer is not None:
            self.optimizer.step(grad_scale=grad_scale, planned=planned)

    def init_states(self, param_groups: _ParamGroups) -> None:
        self.take_options(param_groups)
        if self.optimizer is not None:
            self.optimizer.init_state()

    def masters(self) -> dict[torch.Tensor, torch.Tensor]:
        states = {} if self.optimizer is None else self.optimizer.state
        return {parameter: own[MASTER] for parameter, own in states.items() if MASTER in own}

    def reload(self) -> None:
        if self.optimizer is not None:
            for parameter in self.masters():
                values = like(parameter, local_tensor(parameter).detach().float())
                self.optimizer.set_scaled_state(parameter, MASTER, values)

    def load(self, saved: _States) -> None:
        if self.optimizer is None:
            return

        # `state_dict()` would fail if a parameter with states was removed from the groups.
        groups = self.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        packed = [
            {**group, "params": [numbers[parameter] for parameter in group["params"]]}
            for group in groups
        ]
        states = {
            numbers[parameter]: value
            for parameter, value in saved.items()
            if value and parameter in numbers
        }
        self.optimizer.load_state_dict({"state": states, "param_groups": packed})


class _TorchSide(DeviceSide):
    """Steps a `torch.optim.Optimizer`."""

    _takes_all_options = False  # groups may have options of the host's class

    def __init__(self, updater: Updater) -> None:
        super().__init__()
        self.optimizer: torch.optim.Optimizer | None = None
        self._updater = updater
        self._casts_gradients = False

    def _make(self, param_groups: _ParamGroups, own: set[torch.Tensor]) -> None:
        groups = _part_of(param_groups, own, self._updater.defaults)
        self.optimizer = self._updater.cls(groups, **self._updater.options)

    def _complete(self) -> None:
        has_groups = any(group_of(parameter) is not None for parameter in self._own)
        if self.optimizer is not None and has_groups and not self._casts_gradients:
            fully_shard_optimizer(self.optimizer)
            self._casts_gradients = True

    def plan_step(self, param_groups: _ParamGroups) -> RuleStep | None:
        self.take_options(param_groups)
        return None

    def step(self, grad_scale: float, planned: RuleStep | None) -> None:
        del planned
        if self.optimizer is not None:
            step_scaled(self.optimizer, grad_scale)

    def init_states(self, param_groups: _ParamGroups) -> None:
        self.take_options(param_groups)
        if self.optimizer is not None:
            init_torch_states(self.optimizer)

    def check_states(self, parameter: torch.Tensor, states: Mapping[str, Any]) -> None:
        if self.optimizer is not None:
            check_like(self.optimizer.state.get(parameter, {}), states)

    def load(self, saved: _States) -> None:
        if self.optimizer is not None:
            for parameter, states in saved.items():
                load_torch_states(self.optimizer, parameter, states)


def step_scaled(optimizer: torch.optim.Optimizer, grad_scale: float) -> None:
    """Multiplies the gradients by a factor in place, and steps the optimizer."""
    if grad_scale != 1:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        scale_grads(parameters, torch.tensor(grad_scale, dtype=torch.float64))
    optimizer.step()


def _part_of(
    param_groups: _ParamGroups, own: Collection[torch.Tensor], known: Collection[str]
) -> list[dict[str, Any]]:
    """Returns the groups with only the parameters and options of one side.

    Groups without a parameter on that side are kept, because the groups of both sides are matched
    by index.
    """
    found = []
    for group in param_groups:
        part = {name: value for name, value in group.items() if name in known}
        part["params"] = [parameter for parameter in group["params"] if parameter in own]
        # `matrix_rows` has one entry per parameter, so it is filtered as well.
        if group.get("matrix_rows"):
            pairs = zip(group["params"], group["matrix_rows"], strict=True)
            part["matrix_rows"] = [rows for parameter, rows in pairs if parameter in own]
        found.append(part)
    return found
