"""Loss scaling: what keeps fp16 gradients above the smallest number that fp16 has.

The loss is multiplied by a power of two before the backward, gradients are divided by it before
they are used. A scale that is too large makes gradients infinite; that step is skipped. A dynamic
scale (Micikevicius et al. 2017, arXiv:1710.03740) follows from that, with the rules and defaults of
Megatron's `DynamicGradScaler`:

    window 2, hysteresis 2      clean  clean  inf  inf  inf  clean  clean  inf
    scale after the step    8     8     16    16    8    4     4      8     8
    hysteresis left         2     2      2     1    0   -1    -1      2     1

A scaler is a value: `after` gives the scaler of the next step.
"""

from __future__ import annotations

import dataclasses
import reprlib
import sys
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.core.optimizer.config import OptimizerConfig

GROWTH_FACTOR = 2.0
BACKOFF_FACTOR = 0.5
_MAX_STEPS = 2**63  # that a tracker can have counted


class LossScaler(Protocol):
    """The scale of the loss, and how it changes after each step."""

    @property
    def scale(self) -> float:
        """The factor of this step's loss."""

    def after(self, found_inf: bool) -> LossScaler:
        """The scaler of the next step.

        Args:
            found_inf: whether the loss or a gradient of this step was not finite; the same on every
                rank.
        """

    def state(self) -> dict[str, Any]:
        """The part that training changes, as plain data."""

    def from_state(self, state: dict[str, Any]) -> LossScaler:
        """A scaler with this one's settings that resumes from what any scaler's `state()` gave.

        Raises:
            ValueError: for something else, such as a scale that is not positive and finite.
        """


@dataclass(frozen=True)
class ConstantLossScaler:
    """The scale never changes. Steps that overflow are skipped all the same."""

    scale: float

    def after(self, found_inf: bool) -> ConstantLossScaler:  # noqa: ARG002 (the scale is constant)
        """Itself."""
        return self

    def state(self) -> dict[str, Any]:
        """Empty: a constant scaler is all settings."""
        return {}

    def from_state(self, state: dict[str, Any]) -> ConstantLossScaler:  # noqa: ARG002
        """Itself: the scale that this run was given holds."""
        return self


@dataclass(frozen=True)
class DynamicLossScaler:
    """Doubles the scale after `window` finite steps in a row, halves it after too many others.

    At `min_scale` a step that is not finite is skipped like any other, and the scale stays: the run
    continues, and its count of skipped iterations shows that training has stalled.

    Attributes:
        scale: of this step.
        min_scale: below which it is not halved.
        window: finite steps in a row after which it is doubled.
        hysteresis: how many steps that are not finite there may be between two doublings; the last
            of them, and each further one, halves the scale.
        growth_tracker: finite steps in a row so far.
        hysteresis_tracker: the rest of `hysteresis`; zero or less once it is used up.
    """

    scale: float
    min_scale: float
    window: int
    hysteresis: int
    growth_tracker: int
    hysteresis_tracker: int

    def after(self, found_inf: bool) -> DynamicLossScaler:
        """See `LossScaler`."""
        if found_inf:
            # Only a doubling restores the hysteresis, as in Megatron: once it is used up, every
            # overflow halves.
            left = self.hysteresis_tracker - 1
            scale = max(self.scale * BACKOFF_FACTOR, self.min_scale) if left <= 0 else self.scale
            return dataclasses.replace(self, scale=scale, growth_tracker=0, hysteresis_tracker=left)

        if self.growth_tracker + 1 < self.window:
            return dataclasses.replace(self, growth_tracker=self.growth_tracker + 1)
        # Without an upper bound, as in Megatron: an overflow brings it down again.
        return dataclasses.replace(
            self,
            scale=self.scale * GROWTH_FACTOR,
            growth_tracker=0,
            hysteresis_tracker=self.hysteresis,
        )

    def state(self) -> dict[str, Any]:
        """The scale and both trackers."""
        return {
            "scale": self.scale,
            "growth_tracker": self.growth_tracker,
            "hysteresis_tracker": self.hysteresis_tracker,
        }

    def from_state(self, state: dict[str, Any]) -> DynamicLossScaler:
        """See `LossScaler`. From a constant scaler's state it starts over."""
        # A constant scaler has no state.
        if state == {}:
            return self
        if not isinstance(state, dict) or state.keys() != self.state().keys():
            raise ValueError(f"Expected a scale and two trackers, got {reprlib.repr(state)}.")

        scale, growth = state["scale"], state["growth_tracker"]
        hysteresis = state["hysteresis_tracker"]

        # Exact types: a bool is an int, too, and int() would make 2 of 2.7.
        if type(scale) not in (int, float) or not 0 < scale <= sys.float_info.max:
            raise _error("scale", "a finite number > 0", scale)
        if type(growth) is not int or not 0 <= growth < _MAX_STEPS:
            raise _error("growth_tracker", "an integer >= 0", growth)
        if type(hysteresis) is not int or abs(hysteresis) >= _MAX_STEPS:
            raise _error("hysteresis_tracker", "an integer", hysteresis)

        return dataclasses.replace(
            self,
            scale=float(scale),
            growth_tracker=growth,
            hysteresis_tracker=hysteresis,
        )


def _error(name: str, expected: str, got: object) -> ValueError:
    return ValueError(f"Expected {name} to be {expected}, got {reprlib.repr(got)}.")


def build_loss_scaler(config: OptimizerConfig) -> LossScaler:
    """A new scaler for `config`."""
    if config.loss_scale is not None:
        return ConstantLossScaler(config.loss_scale)

    return DynamicLossScaler(
        scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        window=config.loss_scale_window,
        hysteresis=config.hysteresis,
        growth_tracker=0,
        hysteresis_tracker=config.hysteresis,
    )
