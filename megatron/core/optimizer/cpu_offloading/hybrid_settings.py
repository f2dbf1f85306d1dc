"""The settings of `HybridDeviceOptimizer`, and the rule or optimizer class of each side."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.core.host_keeper import KeptMemory
from megatron.core.optimizer.config import Overlap
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.rules import IMPLEMENTATIONS, Adam, ElementwiseRule, UpdateRule

# The options of FusedAdam and torch.optim.AdamW that the rule supports.
_ADAM_OPTIONS = ("lr", "betas", "eps", "weight_decay", "bias_correction", "adam_w_mode")


class Updater(NamedTuple):
    """The rule or optimizer class that updates the parameters of one side.

    Attributes:
        cls: the optimizer class; not used with a rule.
        options: the given options that the rule or class accepts.
        defaults: default options of its parameter groups.
    """

    cls: type[torch.optim.Optimizer]
    rule: UpdateRule | None
    options: dict[str, Any]
    defaults: dict[str, Any]

    @classmethod
    def of_rule(cls, rule: UpdateRule, options: Mapping[str, Any]) -> Updater:
        """Raises TypeError for unknown options of the rule, ValueError for invalid values."""
        defaults = rule.defaults_with(options)
        rule.scalars(defaults, 1)
        return cls(torch.optim.Optimizer, rule, dict(options), defaults)

    @classmethod
    def of_class(
        cls,
        optimizer_cls: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
        moment_dtypes: tuple[torch.dtype, torch.dtype],
    ) -> Updater:
        """Replaces `FusedAdam` and `torch.optim.AdamW` by the `Adam` rule, so that both sides are
        bit-equal.

        Raises:
            ValueError: for FusedAdam with options that the rule does not support.
        """
        taken = inspect.signature(optimizer_cls).parameters
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
        known = {name: value for name, value in options.items() if takes_any or name in taken}
        # foreach and fused choose an implementation, which the rule replaces.
        supported = {*_ADAM_OPTIONS, "foreach", "fused"}
        others = [name for name, value in known.items() if name not in supported and value]
        if optimizer_cls is FusedAdam and others:
            raise ValueError(
                f"Expected options among {', '.join(_ADAM_OPTIONS)} of FusedAdam, got "
                f"{', '.join(others)}."
            )
        is_adam = optimizer_cls is FusedAdam or (optimizer_cls is torch.optim.AdamW and not others)
        rule = Adam(*moment_dtypes, options.get("adam_w_mode", True)) if is_adam else None
        # The default options of groups are known only from an instance.
        example = optimizer_cls([nn.Parameter(torch.zeros(1))], **known)
        return cls(optimizer_cls, rule, known, dict(example.defaults))

    @property
    def name(self) -> str:
        """The name for messages."""
        is_class = self.cls is not torch.optim.Optimizer
        return self.cls.__name__ if is_class or self.rule is None else self.rule.name

    @property
    def rule_options(self) -> dict[str, Any]:
        """The options that the rule's groups take."""
        assert self.rule is not None, "only called with a rule"
        names = (*self.rule.defaults, *self.rule.optional)
        return {name: value for name, value in self.options.items() if name in names}


def updaters_of(
    host_cls: type[torch.optim.Optimizer] | None,
    device_cls: type[torch.optim.Optimizer] | None,
    moment_dtypes: tuple[torch.dtype, torch.dtype],
    rule: UpdateRule | None,
    options: Mapping[str, Any],
) -> tuple[Updater, Updater]:
    """Returns the updaters of host and device for the arguments of `HybridDeviceOptimizer`.

    Raises:
        ValueError: for a rule together with options that it replaces, for dtypes of moments without
            an AdamW side, and for invalid values of options.
        TypeError: for options that neither side accepts.
    """
    has_dtypes = moment_dtypes != (torch.float32, torch.float32)
    if rule is not None:
        if host_cls or device_cls or has_dtypes:
            raise ValueError(
                "Expected a rule without cpu_optimizer_cls, gpu_optimizer_cls, exp_avg_dtype and "
                "exp_avg_sq_dtype, got both. The dtypes of states are arguments of the rule."
            )
        both = Updater.of_rule(rule, options)
        return both, both

    host, device = (
        Updater.of_class(cls or FusedAdam, options, moment_dtypes) for cls in (host_cls, device_cls)
    )
    if has_dtypes and host.rule is None and device.rule is None:
        raise ValueError(
            f"Expected AdamW on a side for moments in {moment_dtypes}, got other classes on both."
        )
    unknown = options.keys() - host.options.keys() - device.options.keys()
    if unknown:
        classes = " or ".join(dict.fromkeys((host.name, device.name)))
        raise TypeError(f"Expected options of {classes}, got {', '.join(sorted(unknown))}.")
    return host, device


class HybridSettings(NamedTuple):
    """The arguments of `HybridDeviceOptimizer` that do not name parameters.

    Attributes:
        host, device: the rule or optimizer class of each side.
    """

    host: Updater
    device: Updater
    in_fp32: bool
    pins_grads: bool
    pins_params: bool
    overlap: Overlap
    use_decoupled_grad: bool
    num_host_threads: int | None
    num_local_ranks: int | None
    records_timings: bool
    update_on_device: float | None
    early_update_bytes: int
    kept: KeptMemory | None

    @property
    def pins_states(self) -> bool:
        """Whether main weights and states are pinned, since streaming copies them."""
        return self.update_on_device != 0 and self.pins_params

    def check(self) -> None:
        """Rejects settings that contradict each other.

        Raises:
            ValueError: for dtypes of states that the host does not support.
            NotImplementedError: for decoupled gradients with a torch optimizer.
        """
        rules = [side.rule for side in (self.host, self.device) if side.rule is not None]
        if self.host.rule is not None:
            self.host.rule.check_on_host()

            if self.host.rule.takes_matrices and (
                self.update_on_device != 0 or self.early_update_bytes
            ):
                raise ValueError(
                    f"Expected update_on_device=0 and early_update_bytes=0 with {self.host.name}, "
                    "whose matrices all ranks orthogonalize in the step, got "
                    f"{self.update_on_device} and {self.early_update_bytes}."
                )
        fraction = self.update_on_device
        if fraction is not None and not 0 <= fraction <= 1:
            raise ValueError(f"Expected update_on_device from 0 to 1, or None, got {fraction}.")
        if fraction != 0 and (len(rules) < 2 or not self.overlap.has_lanes):
            raise ValueError(
                "Expected a rule on both sides and overlap_cpu_optimizer_d2h_h2d with "
                f"update_on_device={fraction}, got {self.host.name} and {self.device.name}, "
                f"{'with' if self.overlap.has_lanes else 'without'} overlap."
            )
        # Only these kernels write the old values to an undo log.
        can_undo = isinstance(self.host.rule, (Adam, ElementwiseRule))
        if self.early_update_bytes < 0 or (
            self.early_update_bytes
            and not (can_undo and self.overlap.in_backward and not self.use_decoupled_grad)
        ):
            raise ValueError(
                "Expected an elementwise rule on the host, fetch_during_backward, and gradients in "
                f".grad with early_update_bytes={self.early_update_bytes}, got {self.host.name}, "
                f"{self.overlap}, use_decoupled_grad={self.use_decoupled_grad}."
            )
        if self.kept is not None and (
            fraction != 0 or self.early_update_bytes or self.host.rule is None
        ):
            raise ValueError(
                "Expected a rule on the host, update_on_device=0 and early_update_bytes=0 with "
                f"kept memory, got {self.host.name}, {fraction} and {self.early_update_bytes}."
            )
        if self.use_decoupled_grad and len(rules) < 2:
            raise NotImplementedError(
                "Expected FusedAdam or a rule on both sides with use_decoupled_grad, got "
                f"{self.host.name} and {self.device.name}."
            )

    def common_defaults(self) -> dict[str, Any]:
        """Returns the defaults of both sides' groups. Raises ValueError if they differ."""
        names = (self.host.name, self.device.name)
        # Both sides share the options of a group.
        host, device = self._shared_defaults(self.host), self._shared_defaults(self.device)
        for name in (host.keys() & device.keys()).difference(IMPLEMENTATIONS):
            if host[name] != device[name]:
                raise ValueError(
                    f"Expected {name} to be given, since {names[0]} takes {host[name]} by default "
                    f"and {names[1]} takes {device[name]}, got none."
                )
        return device | host

    def _shared_defaults(self, side: Updater) -> dict[str, Any]:
        # Groups that FusedAdam shares with another class have that class's other options.
        is_shared = side.cls is FusedAdam and None in (self.host.rule, self.device.rule)
        return {
            name: value
            for name, value in side.defaults.items()
            if not is_shared or name in _ADAM_OPTIONS
        }
