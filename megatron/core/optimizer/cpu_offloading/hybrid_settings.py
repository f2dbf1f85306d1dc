"""The settings of `HybridDeviceOptimizer`, and what updates the parameters of each side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.rules import IMPLEMENTATIONS, Adam, UpdateRule
from megatron.core.optimizer.torch_optimizer import defaults_of, known_to

# The options of FusedAdam and torch.optim.AdamW that the rule supports.
_ADAM_OPTIONS = ("lr", "betas", "eps", "weight_decay", "bias_correction", "adam_w_mode")
# Options of torch.optim.AdamW that choose an implementation: the rule may replace it.
_IMPLEMENTATIONS = ("foreach", "fused")


class Updater(NamedTuple):
    """What updates the parameters of one side: a rule, or an optimizer class.

    Attributes:
        cls: the class, which a rule replaces if there is one.
        options: those of the given options that it takes.
        defaults: options of its parameter groups.
    """

    cls: type[torch.optim.Optimizer]
    rule: UpdateRule | None
    options: dict[str, Any]
    defaults: dict[str, Any]

    @classmethod
    def of_rule(cls, rule: UpdateRule, options: Mapping[str, Any]) -> Updater:
        """TypeError for options that the rule does not have."""
        return cls(torch.optim.Optimizer, rule, dict(options), rule.defaults_with(options))

    @classmethod
    def of_class(
        cls,
        optimizer_cls: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
        moment_dtypes: tuple[torch.dtype, torch.dtype],
    ) -> Updater:
        """`FusedAdam` and `torch.optim.AdamW` become the `Adam` rule: both sides must give the same
        bits.

        Raises:
            ValueError: for FusedAdam with options that the rule does not support.
        """
        known = known_to(optimizer_cls, options)
        supported = {*_ADAM_OPTIONS, *_IMPLEMENTATIONS}
        others = [name for name, value in known.items() if name not in supported and value]
        if optimizer_cls is FusedAdam and others:
            raise ValueError(
                f"Expected options among {', '.join(_ADAM_OPTIONS)} of FusedAdam, got "
                f"{', '.join(others)}."
            )
        is_adam = optimizer_cls is FusedAdam or (optimizer_cls is torch.optim.AdamW and not others)
        rule = Adam(*moment_dtypes, options.get("adam_w_mode", True)) if is_adam else None
        return cls(optimizer_cls, rule, known, defaults_of(optimizer_cls, known))

    @property
    def name(self) -> str:
        """For messages."""
        is_class = self.cls is not torch.optim.Optimizer
        return self.cls.__name__ if is_class or self.rule is None else self.rule.name

    @property
    def rule_options(self) -> dict[str, Any]:
        """The options that the rule's groups take."""
        assert self.rule is not None, "asked for where there is one"
        names = (*self.rule.defaults, *self.rule.optional)
        return {name: value for name, value in self.options.items() if name in names}


class HybridSettings(NamedTuple):
    """The arguments of `HybridDeviceOptimizer` besides parameters and plan.

    Attributes:
        options: of either side.
        moment_dtypes: of Adam.
    """

    host: Updater
    device: Updater
    options: Mapping[str, Any]
    in_fp32: bool
    pins_grads: bool
    pins_params: bool
    has_lanes: bool
    fetches_early: bool
    overlaps_forward: bool
    use_decoupled_grad: bool
    moment_dtypes: tuple[torch.dtype, torch.dtype]
    num_host_threads: int | None
    num_local_ranks: int | None
    records_timings: bool

    def check(self) -> None:
        """Rejects settings that contradict each other.

        Raises:
            ValueError: for overlaps without lanes, and for dtypes of states that a side does not
                support, or that no side has.
            NotImplementedError: for decoupled gradients with a class of torch's.
        """
        rules = [side.rule for side in (self.host, self.device) if side.rule is not None]
        if self.host.rule is not None:
            self.host.rule.check_on_host()
        if not rules and self.moment_dtypes != (torch.float32, torch.float32):
            raise ValueError(
                f"Expected AdamW on a side for moments in {self.moment_dtypes}, got other classes "
                "on both."
            )

        if (self.overlaps_forward or self.fetches_early) and not self.has_lanes:
            raise ValueError(
                "Expected overlap_cpu_optimizer_d2h_h2d, which the other overlaps need, got it off."
            )
        if self.use_decoupled_grad and len(rules) < 2:
            raise NotImplementedError(
                "Expected FusedAdam or a rule on both sides with use_decoupled_grad, got "
                f"{self.host.name} and {self.device.name}."
            )

    def common_defaults(self) -> dict[str, Any]:
        """The defaults of both sides' groups.

        Raises:
            ValueError: where the sides' defaults differ.
            TypeError: for options of neither.
        """
        names = (self.host.name, self.device.name)
        unknown = self.options.keys() - self.host.options.keys() - self.device.options.keys()
        if unknown:
            classes = " or ".join(dict.fromkeys(names))
            raise TypeError(f"Expected options of {classes}, got {', '.join(sorted(unknown))}.")

        # A group has one value of each option, for both sides.
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
