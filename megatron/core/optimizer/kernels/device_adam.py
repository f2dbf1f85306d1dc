"""Adam over flat arrays on a GPU, in Triton: one launch for each piece.

The results are bit-equal to [Note: arithmetic] in adam.py. Without Triton, or without a GPU,
importing this is fine and `run` is an error; `works_on` tells.

[Note: contraction] Compilers like to make one rounding of `a * b + c`. Bits would then depend on
where they see one, so `enable_fp_fusion=False` forbids it, and `tl.fma` marks where one rounding is
meant. Division and square root are the correctly rounded ones; Triton's plain ones on fp32 are
approximations.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from megatron.core.drivers import why_triton_fails
from megatron.core.log import printable
from megatron.core.optimizer.kernels.adam import AdamScalars, AdamStep
from megatron.core.optimizer.kernels.piece import Piece

logger = logging.getLogger(__name__)

# 70 MiB that a machine without a GPU has no use for, unless somebody has it already.
if torch.accelerator.is_available() or "triton" in sys.modules:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = None
else:
    triton = None

_BLOCK_NUMEL = 1024


@cache
def works_on(device: torch.device) -> bool:
    """Whether the kernel compiles and runs on a device: it steps a few elements. If not, one
    warning gives the reason.

    Callers ask while an optimizer is built, rather than after a whole forward and backward.
    """
    missing = why_triton_fails()
    if missing is None:
        try:
            arrays = {name: torch.ones(8, device=device) for name in ("exp_avg", "exp_avg_sq")}
            grad, weight = (torch.ones(8, device=device) for _ in range(2))
            run([Piece(AdamStep(1, lr=0.0), grad, weight, arrays)], grad_scale=1.0)
            weight.cpu()  # kernels fail later than their launch
        except Exception as error:  # of any compiler or driver
            missing = printable(f"{type(error).__name__}: {error}")
    if missing is not None:
        logger.warning(
            "AdamW runs with PyTorch's kernels on %s, which takes more time, and may round "
            "otherwise than the host's: %s",
            device,
            missing,
        )
    return missing is None


@torch.no_grad()
def run(pieces: Iterable[Piece], grad_scale: float) -> None:
    """Carries the pieces' steps out, in place, on the current stream of their device.

    Raises:
        ValueError: for a piece that `Piece.check` rejects.
        RuntimeError: if there is no Triton.
    """
    if triton is None:
        raise RuntimeError(
            "Expected Triton, which steps GPU tensors, got none: `pip install triton`."
        )
    for piece in pieces:
        piece.check()
        if piece.numel:
            piece.keep_old()
            _launch(piece, grad_scale)


def _launch(piece: Piece, grad_scale: float) -> None:
    device = piece.weight.device
    remainder, out = piece.remainder, piece.out
    is_split = remainder is not None

    # A kernel needs a pointer for every argument; pointers of absent arrays are not followed.
    arguments = (
        piece.grad,
        piece.weight.view(torch.int16) if is_split else piece.weight,
        piece.states["exp_avg"],
        piece.states["exp_avg_sq"],
        piece.weight if remainder is None else remainder,
        piece.weight if out is None else out,
    )
    scalars = AdamScalars.of(piece.step, grad_scale)

    # A block's size changes no bit: elements are independent.
    grid = (-(-piece.numel // _BLOCK_NUMEL),)
    # Triton launches on the current device, which need not be the tensors'.
    with nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index):
        _adam_kernel[grid](
            *arguments,
            piece.numel,
            **scalars._asdict(),
            has_l2=scalars.l2 != 0.0,
            is_split=is_split,
            has_out=out is not None,
            block_numel=_BLOCK_NUMEL,
            enable_fp_fusion=False,
        )


def _adam(  # type: ignore[no-untyped-def]
    grad,  # pointers to the arrays of Piece, a weight with a remainder as int16
    weight,
    exp_avg,
    exp_avg_sq,
    remainder,
    out,
    numel,
    grad_scale,
    l2,
    decay,
    lerp,
    square,
    beta2,
    minus_step_size,
    sqrt_correction2,
    eps,
    has_l2: tl.constexpr,
    lerps_from_grad: tl.constexpr,
    is_split: tl.constexpr,
    has_out: tl.constexpr,
    block_numel: tl.constexpr,
) -> None:
    """One block of elements. See [Note: arithmetic]."""
    offsets = tl.program_id(0).to(tl.int64) * block_numel + tl.arange(0, block_numel)
    mask = offsets < numel
    g = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32) * grad_scale
    m = tl.load(exp_avg + offsets, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + offsets, mask=mask, other=0.0).to(tl.float32)
    if is_split:
        high = tl.load(weight + offsets, mask=mask, other=0).to(tl.int32)
        low = tl.load(remainder + offsets, mask=mask, other=0).to(tl.int32)
        p = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        p = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)

    if has_l2:
        g = tl.fma(l2, p, g)
    m = tl.fma(lerp, g - m, g if lerps_from_grad else m)
    v = tl.fma(square * g, g, v * beta2)
    denominator = tl.div_rn(tl.sqrt_rn(v), sqrt_correction2) + eps
    p = p * decay + tl.div_rn(minus_step_size * m, denominator)

    tl.store(exp_avg + offsets, _narrowed(m, exp_avg.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq + offsets, _narrowed(v, exp_avg_sq.dtype.element_ty), mask=mask)
    new_out = _narrowed(p, out.dtype.element_ty)
    if is_split:
        bits = tl.where(p != p, 0x7FC00000, p.to(tl.int32, bitcast=True))
        new_high = ((bits + 0x8000) >> 16).to(tl.int16)
        tl.store(weight + offsets, new_high, mask=mask)
        tl.store(remainder + offsets, bits.to(tl.int16), mask=mask)
        if out.dtype.element_ty == tl.bfloat16:
            new_out = new_high.to(tl.bfloat16, bitcast=True)
    else:
        tl.store(weight + offsets, _narrowed(p, weight.dtype.element_ty), mask=mask)
    if has_out:
        tl.store(out + offsets, new_out, mask=mask)


def _narrow(values, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 rounded to nearest even."""
    # For bf16 in integers: what Triton makes of a cast depends on where it runs.
    if dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = (
            tl.where(values != values, 0x7FC0, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)
        )
    else:
        result = values.to(dtype)
    return result


_adam_kernel: Any = None if triton is None else triton.jit(_adam)
_narrowed: Any = None if triton is None else triton.jit(_narrow)
