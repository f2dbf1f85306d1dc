"""The product of two quantised matrices: PyTorch's operator where the device has one for their
scales, otherwise the product of the same operands' values in fp32.

What `torch.nn.functional.scaled_mm` takes differs between devices and versions of PyTorch and is
not asked by names: `_has_operator` multiplies two small matrices once and compares the result.

[Note: layouts] Written by PyTorch's and NVIDIA's documentation; only the CPU's have been run.

    scales               device                     constraints
    whole matrix, rows   CPU                        none
    whole matrix, rows   GPU, from Ada on           Both operands contiguous along the inner
                                                    size (Blackwell takes others, too), which is a
                                                    multiple of 16, as columns are; not e5m2 x e5m2.
    1 x 128, 128 x 128   Hopper, CUDA from 12.9 on  Scales of 1 x 128 are stored column by column;
                                                    those of 128 x 128 row by row, their rows padded
                                                    to a multiple of 4; not 128 x 128 times itself.
    1 x 32 in e8m0       Blackwell                  Scales in blocks of 128 x 4, see `swizzled`;
                                                    inner size a multiple of 32. Gathered weights
                                                    have scales of 32 x 32, each of which is
                                                    repeated for 32 rows.

(pytorch/pytorch, ScaledBlas.cpp; cuBLAS, "1D Block Scaling Factors
Layout" and "Narrow Precision Data Types Usage".) NVFP4 has an operator on Blackwell that takes its
two scales apart; here they are one, and its products are computed from values everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from megatron.core.low_precision.scaling import Operand, ScaleKind, Scaling

_TYPES = {
    (None, None): ScalingType.TensorWise,
    (1, None): ScalingType.RowWise,
    (1, 128): ScalingType.BlockWise1x128,
    (128, 128): ScalingType.BlockWise128x128,
    (1, 32): ScalingType.BlockWise1x32,
    (32, 32): ScalingType.BlockWise1x32,  # each scale is one of 32 rows
}
_ALIGNMENT = 16  # elements, on a GPU


def product(left: Operand, right: Operand, dtype: torch.dtype) -> Tensor:
    """left @ right.T of matrices [rows, inner] and [columns, inner]: [rows, columns] of `dtype`,
    summed in fp32.
    """
    device = left.codes.device
    is_aligned = device.type == "cpu" or right.shape[0] % _ALIGNMENT == 0
    if is_aligned and _has_operator(device, left.scaling, right.scaling, dtype):
        if device.type != "cpu":
            # The inner size of a layer's gradient is a number of tokens, of any size with experts.
            left, right = padded(left), padded(right)
        return _scaled_mm(left, right, dtype)
    return (left.dequantize() @ right.dequantize().t()).to(dtype)


def padded(operand: Operand) -> Operand:
    """An operand of 8 bits with zeros up to an inner size that operators of GPUs take."""
    rows, inner = operand.shape
    missing = -inner % (2 * _ALIGNMENT if operand.scaling.kind is ScaleKind.E8M0 else _ALIGNMENT)
    if not missing:
        return operand
    # A code of zero is a byte of zero. Tiles are wider than the padding, so no scale is missing.
    codes = F.pad(operand.codes.view(torch.uint8), (0, missing)).view(operand.codes.dtype)
    return replace(operand, codes=codes, shape=(rows, inner + missing))


@cache
def _has_operator(device: torch.device, left: Scaling, right: Scaling, dtype: torch.dtype) -> bool:
    """Whether PyTorch's operator takes operands of these scalings, with the right result."""
    if left.tile not in _TYPES or right.tile not in _TYPES:
        return False
    if ScaleKind.TWO_LEVELS in (left.kind, right.kind):
        return False
    # Tiles of different maxima, so that a scale that is read from a wrong place shows.
    numbers = torch.arange(256 * 256, device=device).view(256, 256)
    first = (numbers * 7919 % 1009 - 504.0) * (1 + numbers // 32 % 61)
    second = first.t().roll(13, 0)
    operands = left.quantize(first[:128]), right.quantize(second)
    expected = operands[0].dequantize() @ operands[1].dequantize().t()
    try:
        found = _scaled_mm(*operands, dtype).float()
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return bool((found - expected).norm() < 0.01 * expected.norm())


def _scaled_mm(left: Operand, right: Operand, dtype: torch.dtype) -> Tensor:
    """See [Note: layouts]."""
    options: dict[str, Any] = {}
    if left.scaling.kind is ScaleKind.E8M0 and left.codes.device.type != "cpu":
        options = dict.fromkeys(("swizzle_a", "swizzle_b"), SwizzleType.SWIZZLE_32_4_4)
    found: Tensor = F.scaled_mm(
        left.codes.contiguous(),
        right.codes.contiguous().t(),
        _scales(left, is_right=False),
        _TYPES[left.scaling.tile],
        _scales(right, is_right=True),
        _TYPES[right.scaling.tile],
        output_dtype=dtype,
        **options,
    )
    return found


def _scales(operand: Operand, *, is_right: bool) -> Tensor:
    """The scales as the operator reads them."""
    tile, scales = operand.scaling.tile, operand.scales
    if tile == (1, None):
        scales = scales.contiguous()
        return scales.t() if is_right else scales
    if tile == (1, 128):
        scales = scales.t().contiguous().t()
        return scales.t() if is_right else scales
    if tile == (128, 128):
        padded = F.pad(scales, (0, -scales.shape[1] % 4))[:, : scales.shape[1]]
        return padded.t() if is_right else padded
    if operand.scaling.kind is ScaleKind.E8M0:
        rows = scales.view(torch.uint8).repeat_interleave(tile[0] or 1, 0)[: operand.shape[0]]
        return swizzled(rows).view(scales.dtype)
    return scales


def swizzled(scales: Tensor) -> Tensor:
    """Scales [rows, tiles] in cuBLAS's order, flat: blocks of 128 x 4, padded with zeros, a row of
    blocks after another. Within a block, row r, column c is at 16 * (r % 32) + 4 * (r // 32) + c.
    """
    rows, tiles = scales.shape
    padded = F.pad(scales, (0, -tiles % 4, 0, -rows % 128))
    blocks = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return blocks.permute(0, 3, 2, 1, 4).flatten()
