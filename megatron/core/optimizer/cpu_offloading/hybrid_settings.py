"""The settings of `HybridDeviceOptimizer`, and the optimizer class and options of each side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from megatron.core.dtypes import UNSCALED_MOMENT_DTYPES
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.state_loading import ADAMW_OPTIONS, IMPLEMENTATIONS
from megatron.core.optimizer.torch_optimizer import defaults_of, known_to

# The options of FusedAdam and torch.optim.AdamW that the flat pass over a bucket supports.
_ADAM_OPTIONS = ("lr", "betas", "eps", "weight_decay", "bias_correction", "adam_w_mode")
# Options of torch.optim.AdamW that choose an implementation: the flat pass may replace it.
_IMPLEMENTATIONS = ("foreach", "fused")


class HybridSettings(NamedTuple):
    """The arguments of `HybridDeviceOptimizer` besides parameters and plan."""

    host_cls: type[torch.optim.Optimizer]
    device_cls: type[torch.optim.Optimizer]
    options: Mapping[str, Any]  # of either class
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

    @property
    def host_is_flat(self) -> bool:
        """Whether the host side is updated by our AdamW."""
        return is_flat_adam(self.host_cls, self.options)

    def check(self) -> None:
        """Rejects settings that contradict each other.

        Raises:
            ValueError: for overlaps without lanes, and for moment dtypes of AdamW that a side does
                not support, or if neither side has AdamW.
            NotImplementedError: for decoupled gradients with other classes than AdamW.
        """
        device_is_flat = is_flat_adam(self.device_cls, self.options)
        exp_avg, exp_avg_sq = self.moment_dtypes
        if self.host_is_flat and (exp_avg != exp_avg_sq or exp_avg not in UNSCALED_MOMENT_DTYPES):
            raise ValueError(
                f"Expected both moments in one of {UNSCALED_MOMENT_DTYPES} on the host, got "
                f"{self.moment_dtypes}."
            )
        is_fp32 = exp_avg == exp_avg_sq == torch.float32
        if not (self.host_is_flat or device_is_flat or is_fp32):
            raise ValueError(
                f"Expected AdamW on a side for moments in {self.moment_dtypes}, got other classes "
                "on both."
            )

        if (self.overlaps_forward or self.fetches_early) and not self.has_lanes:
            raise ValueError(
                "Expected overlap_cpu_optimizer_d2h_h2d, which the other overlaps need, got it off."
            )
        if self.use_decoupled_grad and not (self.host_is_flat and device_is_flat):
            raise NotImplementedError(
                "Expected FusedAdam on both sides with use_decoupled_grad, got "
                f"{self.host_cls.__name__} and {self.device_cls.__name__}."
            )

    def common_defaults(self) -> dict[str, Any]:
        """The defaults of both sides' groups.

        Raises:
            ValueError: where the classes' defaults differ.
            TypeError: for options of neither.
        """
        sides = [known_to(cls, self.options) for cls in (self.host_cls, self.device_cls)]
        names = (self.host_cls.__name__, self.device_cls.__name__)
        unknown = [name for name in self.options if not any(name in known for known in sides)]
        if unknown:
            classes = " or ".join(dict.fromkeys(names))
            raise TypeError(f"Expected options of {classes}, got {', '.join(unknown)}.")

        # A group has one value of each option, for both sides.
        host = self._defaults_of(self.host_cls, sides[0])
        device = self._defaults_of(self.device_cls, sides[1])
        for name in (host.keys() & device.keys()).difference(IMPLEMENTATIONS):
            if host[name] != device[name]:
                raise ValueError(
                    f"Expected {name} to be given, since {names[0]} takes {host[name]} by default "
                    f"and {names[1]} takes {device[name]}, got none."
                )
        return device | host

    def _defaults_of(
        self, cls: type[torch.optim.Optimizer], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        defaults = defaults_of(cls, options)
        # Groups that are shared with another class have that class's options of these names.
        others = {self.host_cls, self.device_cls} - {FusedAdam, torch.optim.AdamW}
        is_shared = cls is FusedAdam and others
        return {
            name: value
            for name, value in defaults.items()
            if not (is_shared and name in ADAMW_OPTIONS)
        }

    def device_class(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The device side's class, and all of its options."""
        # FusedAdam replaces torch's AdamW, because both sides must give the same bits.
        options = known_to(self.device_cls, self.options)
        if not is_flat_adam(self.device_cls, options):
            return self.device_cls, options
        return FusedAdam, {
            **{name: value for name, value in options.items() if name in _ADAM_OPTIONS},
            "exp_avg_dtype": self.moment_dtypes[0],
            "exp_avg_sq_dtype": self.moment_dtypes[1],
            "master_weights": self.in_fp32,
            "num_host_threads": self.num_host_threads,
            "use_decoupled_grad": self.use_decoupled_grad,
        }


def is_flat_adam(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> bool:
    """Whether a class with these options is the AdamW of our one pass.

    Raises:
        ValueError: for FusedAdam with options that the pass does not support.
    """
    known = {*_ADAM_OPTIONS, *_IMPLEMENTATIONS}
    others = [name for name, value in options.items() if name not in known and value]
    if cls is FusedAdam and others:
        raise ValueError(
            f"Expected options among {', '.join(_ADAM_OPTIONS)} of FusedAdam, got "
            f"{', '.join(others)}."
        )
    return cls is FusedAdam or (cls is torch.optim.AdamW and not others)
