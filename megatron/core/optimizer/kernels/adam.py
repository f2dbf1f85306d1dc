"""One step of Adam over flat arrays: its arguments and arithmetic, the same in every kernel.

[Note: arithmetic] Per element, in fp32, every operation rounded to nearest, `fma` rounded once; the
scalars are computed in fp64 and rounded once to fp32:

    g = grad * grad_scale
    g = fma(weight_decay, p, g)             L2 only
    p = p * (1 - lr * weight_decay)         decoupled only (AdamW)
    m = fma(1 - beta1, g - m, m)            beta1 above 0.5
    m = fma(-beta1, g - m, g)               beta1 at most 0.5, where this form rounds less
    v = fma((1 - beta2) * g, g, v * beta2)
    p = p + (-lr / correction1 * m) / (sqrt(v) / sqrt(correction2) + eps)

with correction1 = 1 - beta1**step and correction2 = 1 - beta2**step, or 1 without bias correction.
That is torch's fused AdamW, bit for bit, except for the last elements of a tensor whose length is
not a multiple of its vector width: torch rounds these differently. Here, an element's result
depends only on its values, never on its position. The bits of a resulting NaN are unspecified.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.optimizer.kernels.piece import check_betas, check_rates, check_unset

# Options of torch.optim.AdamW that change the result.
_OTHER_ALGORITHMS = ("amsgrad", "maximize", "capturable", "differentiable")


@dataclass(frozen=True)
class AdamStep:
    """The constants of one step. `step` counts from 1, this step included.

    Raises:
        ValueError: for a step below 1, for a beta outside [0, 1), for a rate that is negative or
            not finite.
    """

    step: int
    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    adam_w_mode: bool = True  # decoupled weight decay
    bias_correction: bool = True

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"Expected a step of at least 1, got {self.step}.")
        check_betas(beta1=self.beta1, beta2=self.beta2)
        check_rates(lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)

    @classmethod
    def of(cls, options: Mapping[str, Any], step: int, adam_w_mode: bool) -> AdamStep:
        """From the options of a parameter group. ValueError for another algorithm's."""
        check_unset(options, "AdamW", _OTHER_ALGORITHMS)
        is_decoupled = options.get("decoupled_weight_decay", adam_w_mode)
        if is_decoupled != adam_w_mode:
            raise ValueError(
                f"Expected decoupled_weight_decay={adam_w_mode} in a parameter group, as the "
                f"optimizer's adam_w_mode, got {is_decoupled}."
            )

        # Options may be tensors, as torch's optimizers allow.
        beta1, beta2 = options["betas"]
        return cls(
            step=step,
            lr=float(options["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(options["eps"]),
            weight_decay=float(options["weight_decay"]),
            adam_w_mode=adam_w_mode,
            bias_correction=bool(options.get("bias_correction", True)),
        )

    @property
    def correction1(self) -> float:
        """The divisor of `exp_avg`."""
        return 1.0 - self.beta1**self.step if self.bias_correction else 1.0

    @property
    def correction2(self) -> float:
        """The divisor of `exp_avg_sq`."""
        return 1.0 - self.beta2**self.step if self.bias_correction else 1.0


class AdamScalars(NamedTuple):
    """The scalars of [Note: arithmetic] as kernels take them: in fp64, rounded to fp32 once."""

    grad_scale: float
    l2: float  # the weight decay that is added to the gradient
    decay: float  # the factor of the weight
    # of exp_avg towards the gradient, or, with lerps_from_grad, of the gradient towards exp_avg
    lerp: float
    square: float
    beta2: float
    minus_step_size: float
    sqrt_correction2: float
    eps: float
    lerps_from_grad: bool

    @classmethod
    def of(cls, step: AdamStep, grad_scale: float) -> AdamScalars:
        """The scalars of a step whose gradients are multiplied by `grad_scale` as they are read."""
        # torch's lerp has two forms, and chooses by the rounded weight. See [Note: arithmetic].
        lerp = _rounded(1.0 - step.beta1)
        lerps_from_grad = lerp >= 0.5
        return cls(
            grad_scale=_rounded(grad_scale),
            l2=0.0 if step.adam_w_mode else _rounded(step.weight_decay),
            decay=_rounded(1.0 - step.lr * step.weight_decay) if step.adam_w_mode else 1.0,
            lerp=lerp - 1.0 if lerps_from_grad else lerp,
            square=_rounded(1.0 - step.beta2),
            beta2=_rounded(step.beta2),
            minus_step_size=_rounded(-(step.lr / step.correction1)),
            sqrt_correction2=_rounded(math.sqrt(step.correction2)),
            eps=_rounded(step.eps),
            lerps_from_grad=lerps_from_grad,
        )


def _rounded(value: float) -> float:
    """The nearest fp32 number."""
    return ctypes.c_float(value).value
