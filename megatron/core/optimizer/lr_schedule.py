"""Learning-rate schedules: a pure function of the iteration.

A schedule holds no state that could get out of step with the run: resuming needs the iteration
alone. A checkpoint holds the schedule's settings, and a run that resumes with others is told.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron.core.options import ConfigError, check_options, expect, option

_STYLES = ("constant", "linear", "cosine", "WSD")
_WSD_STYLES = ("exponential", "linear", "cosine")
_MAX_ITERS = 2**63 - 1


@dataclass(frozen=True)
class LRScheduleConfig:
    """The learning rate over the iterations. Names and defaults are Megatron's."""

    lr: float = option(help="peak learning rate", at_least=0)
    min_lr: float = option(0.0, "learning rate at the end of the decay and afterwards", at_least=0)
    lr_decay_style: str = option(
        "linear",
        "shape of the decay after the warm-up; WSD: constant until the last phase",
        choices=_STYLES,
    )
    lr_decay_iters: int | None = option(
        None,
        "iterations until --min-lr is reached, warm-up included (default: --train-iters)",
        more_than=0,
    )
    lr_warmup_iters: int = option(0, "iterations of linear warm-up", at_least=0)
    lr_warmup_fraction: float | None = option(
        None,
        "warm-up as a fraction of --lr-decay-iters, instead of --lr-warmup-iters (default: none)",
        at_least=0,
        at_most=1,
    )
    lr_warmup_init: float = option(0.0, "learning rate at the start of the warm-up", at_least=0)
    lr_wsd_decay_style: str = option(
        "exponential", "shape of the last phase of WSD", choices=_WSD_STYLES
    )
    lr_wsd_decay_iters: int | None = option(
        None, "iterations of the last phase of WSD; must be given with WSD", more_than=0
    )
    override_opt_param_scheduler: bool = option(
        False,
        "on load, use this run's schedule where it differs from the checkpoint's",
        requires="load",
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        "on load, use the checkpoint's schedule where it differs from this run's",
        requires="load",
    )

    def __post_init__(self) -> None:
        check_options(self)
        expect(self.min_lr <= self.lr, "--min-lr", f"at most --lr {self.lr}", self.min_lr)
        expect(
            self.lr_warmup_init <= self.lr,
            "--lr-warmup-init",
            f"at most --lr {self.lr}",
            self.lr_warmup_init,
        )

        if self.lr_warmup_fraction is not None and self.lr_warmup_iters:
            raise ConfigError(
                "--lr-warmup-fraction: expected it alone, without --lr-warmup-iters, "
                f"got {self.lr_warmup_fraction} and {self.lr_warmup_iters}."
            )

        is_wsd = self.lr_decay_style == "WSD"
        expect(
            is_wsd == (self.lr_wsd_decay_iters is not None),
            "--lr-wsd-decay-iters",
            "a value exactly when --lr-decay-style is WSD",
            self.lr_wsd_decay_iters,
        )
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise ConfigError(
                "--override-opt-param-scheduler: expected it or "
                "--use-checkpoint-opt-param-scheduler, got both."
            )


@dataclass(frozen=True)
class LRSchedule:
    """A resolved schedule: `schedule(iteration)` is that iteration's learning rate, from 0 on."""

    peak: float
    least: float
    style: str
    decay_iters: int
    warmup_iters: int
    warmup_init: float
    wsd_style: str | None
    wsd_iters: int | None

    @classmethod
    def build(cls, config: LRScheduleConfig, train_iters: int) -> LRSchedule:
        """Resolves the defaults that depend on the run's length.

        Raises:
            ConfigError: if the phases do not fit into it.
        """
        decay_iters = config.lr_decay_iters or train_iters
        warmup_iters = config.lr_warmup_iters
        if config.lr_warmup_fraction is not None:
            warmup_iters = int(config.lr_warmup_fraction * decay_iters)

        most = f"at most the {decay_iters} decay iterations"
        expect(warmup_iters <= decay_iters, "--lr-warmup-iters", most, warmup_iters)
        if config.lr_wsd_decay_iters is not None:
            expect(
                warmup_iters + config.lr_wsd_decay_iters <= decay_iters,
                "--lr-wsd-decay-iters",
                f"at most {decay_iters - warmup_iters}: {decay_iters} decay iterations less "
                f"{warmup_iters} of warm-up",
                config.lr_wsd_decay_iters,
            )

        is_wsd = config.lr_decay_style == "WSD"
        return cls(
            peak=config.lr,
            least=config.min_lr,
            style=config.lr_decay_style,
            # A constant rate has no end, so a longer run has the same schedule.
            decay_iters=0 if config.lr_decay_style == "constant" else decay_iters,
            warmup_iters=warmup_iters,
            warmup_init=config.lr_warmup_init,
            wsd_style=config.lr_wsd_decay_style if is_wsd else None,
            wsd_iters=config.lr_wsd_decay_iters,
        )

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> LRSchedule:
        """Takes back what `state()` gave.

        Raises:
            ValueError: for anything that `state()` does not give; it names the field.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(state, dict) or state.keys() != set(names):
            raise ValueError(f"Expected the fields {', '.join(names)}, got {reprlib.repr(state)}.")

        # A file may hold anything: each field is checked before others are compared with it.
        for name in ("peak", "least", "warmup_init"):
            _check(_is_rate(state[name]), name, "a finite number >= 0", state[name])
        for name in ("decay_iters", "warmup_iters"):
            _check(_is_count(state[name]), name, "an integer >= 0", state[name])
        _check(state["style"] in _STYLES, "style", f"one of {', '.join(_STYLES)}", state["style"])

        style, wsd_style = state["style"], state["wsd_style"]
        if style == "WSD":
            styles = ", ".join(_WSD_STYLES)
            _check(wsd_style in _WSD_STYLES, "wsd_style", f"one of {styles}", wsd_style)
            _check(
                _is_count(state["wsd_iters"]), "wsd_iters", "an integer >= 0", state["wsd_iters"]
            )
        else:
            for name in ("wsd_style", "wsd_iters"):
                _check(state[name] is None, name, f"null for the style {style}", state[name])

        # `build` has made sure of this, and `__call__` divides by the phases' lengths.
        peak = state["peak"]
        for name in ("least", "warmup_init"):
            _check(state[name] <= peak, name, f"at most peak, {peak}", state[name])
        if state["style"] != "constant":
            phases = state["warmup_iters"] + (state["wsd_iters"] or 0)
            most = f"at least {phases}, as its phases take"
            _check(state["decay_iters"] >= phases, "decay_iters", most, state["decay_iters"])
        return cls(**state)

    @property
    def last_change(self) -> int | None:
        """The number of iterations after which the rate stays at `least`; None if it never does."""
        return None if self.style == "constant" else self.decay_iters

    def state(self) -> dict[str, Any]:
        """The settings, as plain data."""
        return asdict(self)

    def __call__(self, iteration: int) -> float:
        """The learning rate of the iteration that follows `iteration` completed ones."""
        # The first step of a warm-up over n takes 1/n of the way. (Megatron's has the initial rate,
        # which is 0 by default.)
        step = iteration + 1
        if self.warmup_iters and step <= self.warmup_iters:
            return self.warmup_init + (self.peak - self.warmup_init) * step / self.warmup_iters

        if self.style == "constant":
            return self.peak
        if step >= self.decay_iters:
            return self.least
        # The warm-up counts as a part of the decay's iterations, as in Megatron.
        if self.style == "WSD":
            return self._stable_then_decay(step)

        done = (step - self.warmup_iters) / (self.decay_iters - self.warmup_iters)
        return self._between(self.style, done)

    def apply(self, param_groups: Iterable[dict[str, Any]], iteration: int) -> float:
        """Sets every parameter group's learning rate for this iteration, times its `lr_mult` if it
        has one. Returns the one without factors.
        """
        lr = self(iteration)
        for group in param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
        return lr

    def _stable_then_decay(self, step: int) -> float:
        if self.wsd_iters is None or self.wsd_style is None:
            raise RuntimeError(f"Expected a WSD schedule with its last phase, got {self}.")

        start = self.decay_iters - self.wsd_iters
        if step <= start:
            return self.peak
        return self._between(self.wsd_style, (step - start) / self.wsd_iters)

    def _between(self, style: str, done: float) -> float:
        """From `peak` at 0 to `least` at 1."""
        if style == "cosine":
            weight = 0.5 * (1.0 + math.cos(math.pi * done))
        elif style == "exponential":
            # MiniCPM's (arXiv:2404.06395): halved with every unit, moved so that it ends at 0.
            weight = 2.0 * 0.5**done - 1.0
        else:
            weight = 1.0 - done
        return self.least + (self.peak - self.least) * weight


def _check(is_met: bool, name: str, expected: str, got: object) -> None:
    if not is_met:
        raise ValueError(f"Expected {name} to be {expected}, got {reprlib.repr(got)}.")


def _is_rate(value: object) -> bool:
    # An int of a thousand digits is less than infinity, and no float.
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= sys.float_info.max


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_ITERS
