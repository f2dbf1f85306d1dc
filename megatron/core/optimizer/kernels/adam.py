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

[Note: remainder] A fp32 weight is kept as its bf16 rounding, `weight`, and a signed 16-bit
`remainder`: as integers, the weight's bits shifted left by 16 plus the remainder are the fp32
weight's bits. This is lossless, but of two equally near bf16 values `weight` is always the one of
larger magnitude: one in 65536 random weights is such a tie, and half of these go the other way in
rounding to nearest even. A NaN becomes the one whose remainder is zero.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from megatron.core.dtypes import FLOAT_DTYPES, UNSCALED_MOMENT_DTYPES

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
    grad_scale: float = 1.0  # gradients are multiplied with it as they are read

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"Expected a step of at least 1, got {self.step}.")
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Expected {name} in [0, 1), got {beta}.")

        rates = {"lr": self.lr, "eps": self.eps, "weight_decay": self.weight_decay}
        for name, value in rates.items():
            if not 0.0 <= value < math.inf:
                raise ValueError(f"Expected a finite {name} of at least 0, got {value}.")

    @classmethod
    def of(
        cls, options: Mapping[str, Any], step: int, grad_scale: float, adam_w_mode: bool
    ) -> AdamStep:
        """From the options of a parameter group. ValueError for another algorithm's."""
        others = [name for name in _OTHER_ALGORITHMS if options.get(name)]
        if others:
            raise ValueError(
                f"Expected a parameter group of AdamW without {' and '.join(others)}, got some set."
            )
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
            grad_scale=grad_scale,
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
    def of(cls, step: AdamStep) -> AdamScalars:
        """The scalars of a step."""
        # torch's lerp has two forms, and chooses by the rounded weight. See [Note: arithmetic].
        lerp = _rounded(1.0 - step.beta1)
        lerps_from_grad = lerp >= 0.5
        return cls(
            grad_scale=_rounded(step.grad_scale),
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


class AdamPiece(NamedTuple):
    """Flat, contiguous arrays of one length and device, and the step that they take."""

    step: AdamStep
    grad: torch.Tensor  # fp32, bf16, fp16; only read
    weight: torch.Tensor  # fp32, bf16, fp16; with a remainder: bf16
    exp_avg: torch.Tensor  # fp32, bf16
    exp_avg_sq: torch.Tensor  # as exp_avg
    remainder: torch.Tensor | None = None  # int16, see [Note: remainder]
    # fp32, bf16, fp16: takes the new weight, rounded from fp32 to nearest even; in bf16 with a
    # remainder, the value that `weight` takes. May be `grad` itself, which is then written over as
    # it is read.
    out: torch.Tensor | None = None

    @property
    def numel(self) -> int:
        """Elements of each array."""
        return self.weight.numel()

    def check(self) -> None:
        """Raises for pieces that no kernel can run.

        Raises:
            ValueError: for arrays of unequal length or device, not contiguous, of a dtype that is
                not listed above, and for an `out` that shares only a part of `grad`'s memory.
        """
        _check_dtype("grad", self.grad, FLOAT_DTYPES)
        _check_dtype(
            "weight", self.weight, FLOAT_DTYPES if self.remainder is None else (torch.bfloat16,)
        )
        _check_dtype("exp_avg", self.exp_avg, UNSCALED_MOMENT_DTYPES)
        _check_dtype("exp_avg_sq", self.exp_avg_sq, (self.exp_avg.dtype,))

        if self.remainder is not None:
            _check_dtype("remainder", self.remainder, (torch.int16,))
        if self.out is not None:
            _check_dtype("out", self.out, FLOAT_DTYPES)
            self._check_overlap(self.out)

        # Kernels get addresses and one length.
        for name, tensor in self.arrays().items():
            if tensor.numel() != self.numel:
                raise ValueError(
                    f"Expected {name} of {self.numel} elements as weight has, got {tensor.numel()}."
                )
            if tensor.device != self.weight.device:
                raise ValueError(
                    f"Expected {name} on {self.weight.device} as weight is, got {tensor.device}."
                )
            if not tensor.is_contiguous():
                raise ValueError(f"Expected a contiguous {name}, got strides {tensor.stride()}.")

    def arrays(self) -> dict[str, torch.Tensor]:
        """The tensors that are there, by name."""
        tensors = {name: getattr(self, name) for name in _ARRAYS}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def part(self, start: int, numel: int) -> AdamPiece:
        """The arrays' elements from `start` on, as views."""
        flat = {name: tensor.detach().view(-1) for name, tensor in self.arrays().items()}
        return self.with_arrays(
            {name: tensor[start : start + numel] for name, tensor in flat.items()}
        )

    def with_arrays(self, arrays: Mapping[str, torch.Tensor]) -> AdamPiece:
        """The same step with the named arrays replaced."""
        changes: dict[str, Any] = {**arrays}
        return self._replace(**changes)

    def _check_overlap(self, out: torch.Tensor) -> None:
        # Element by element, each gradient is read before its place is written to.
        begin, end = self.grad.data_ptr(), self.grad.data_ptr() + self.grad.nbytes
        apart = out.data_ptr() >= end or out.data_ptr() + out.nbytes <= begin
        same = out.data_ptr() == begin and out.element_size() == self.grad.element_size()
        if not apart and not same:
            raise ValueError(
                f"Expected out apart from grad or over it element by element, got {out.dtype} at "
                f"byte {out.data_ptr() - begin} of a {self.grad.dtype} grad."
            )


_ARRAYS = ("grad", "weight", "exp_avg", "exp_avg_sq", "remainder", "out")


def merged(pieces: Iterable[AdamPiece]) -> list[AdamPiece]:
    """The same work in fewer, longer pieces: pieces whose arrays are all adjacent are joined.

    Pieces are put in the order of their weights' addresses; empty ones are left out. Only pieces of
    equal steps, dtypes and storages join. Pass pieces that `AdamPiece.check` accepts.
    """
    # Pieces join only if all of their arrays do: sorting by one of these finds the neighbours.
    ordered = sorted((piece for piece in pieces if piece.numel), key=_address)
    runs: list[list[AdamPiece]] = []
    for piece in ordered:
        if runs and _continues(runs[-1][-1], piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [_joined(run) for run in runs]


def check_grad_scale(grad_scale: float) -> None:
    """ValueError for the factor that the norm of gradients that are not finite gives."""
    if not math.isfinite(grad_scale):
        raise ValueError(
            f"Expected a finite grad_scale, got {grad_scale}: a gradient is not finite. Nothing "
            "was stepped. Look at the loss, or skip such steps: zero_grad() without step()."
        )


def with_grad_scale(pieces: Iterable[AdamPiece], grad_scale: float) -> list[AdamPiece]:
    """The same pieces with another factor of the gradients, which is known last."""
    # By the id of the step that is scaled: hashing takes longer than scaling.
    steps: dict[int, AdamStep] = {}
    scaled = []
    for piece in pieces:
        if id(piece.step) not in steps:
            steps[id(piece.step)] = replace(piece.step, grad_scale=grad_scale)
        scaled.append(piece._replace(step=steps[id(piece.step)]))
    return scaled


def _address(piece: AdamPiece) -> tuple[str, int]:
    return str(piece.weight.device), piece.weight.data_ptr()


def _continues(piece: AdamPiece, following: AdamPiece) -> bool:
    """Whether every array of `following` starts where that of `piece` ends."""
    if piece.step != following.step:
        return False

    ends, begins = piece.arrays(), following.arrays()
    return ends.keys() == begins.keys() and all(
        _adjacent(ends[name], begins[name]) for name in ends
    )


def _adjacent(tensor: torch.Tensor, following: torch.Tensor) -> bool:
    return (
        tensor.data_ptr() + tensor.nbytes == following.data_ptr()
        and tensor.dtype == following.dtype
        and tensor.untyped_storage().data_ptr() == following.untyped_storage().data_ptr()
    )


def _joined(run: list[AdamPiece]) -> AdamPiece:
    if len(run) == 1:
        return run[0]

    # `_adjacent` has made sure that the storage reaches so far.
    numel = sum(piece.numel for piece in run)
    arrays = {
        name: tensor.detach().as_strided((numel,), (1,)) for name, tensor in run[0].arrays().items()
    }
    return run[0].with_arrays(arrays)


def _check_dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        raise ValueError(
            f"Expected {name} of {' or '.join(map(str, allowed))}, got {tensor.dtype}."
        )
