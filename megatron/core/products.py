"""Matrix products in 16 bits that are fast on any CPU.

PyTorch multiplies bf16 matrices by a reference loop on CPUs without AVX-512, and fp16 ones without
AVX512-FP16. It takes up to a hundred times as long as the product in fp32. On such a CPU the
functions of this file compute in fp32, a block at a time, and round the result, as kernels with
fp32 sums do. Elsewhere, and under autocast, they are PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows, inner elements and columns of a block: at most 16 MiB in fp32 for each of the matrices.
_ROWS, _INNER, _COLUMNS = 1024, 1024, 4096


def _find_slow_dtypes() -> frozenset[torch.dtype]:
    mkldnn = torch.ops.mkldnn
    is_supported = {
        torch.bfloat16: mkldnn._is_mkldnn_bf16_supported,
        torch.float16: mkldnn._is_mkldnn_fp16_supported,
    }
    return frozenset(dtype for dtype, ask in is_supported.items() if not ask())


# Of this machine's CPU. Not a function, so that torch.compile sees a constant.
_SLOW_DTYPES = _find_slow_dtypes() if torch.backends.mkldnn.is_available() else frozenset()


def is_slow(tensor: Tensor) -> bool:
    """Whether PyTorch has no fast products of such matrices. False under autocast, which decides
    about their dtype later.
    """
    return (
        tensor.device.type == "cpu"
        and tensor.dtype in _SLOW_DTYPES
        and not torch.is_autocast_enabled("cpu")
    )


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: [..., in], [out, in], [out] -> [..., out], differentiable."""
    dtypes = {weight.dtype} if bias is None else {weight.dtype, bias.dtype}
    # What does not fit is left to PyTorch, for its error.
    if not is_slow(inputs) or {inputs.dtype} != dtypes or inputs.shape[-1] != weight.shape[1]:
        return F.linear(inputs, weight, bias)
    product: Any = _mm_in_fp32  # torch declares custom operators without types
    rows = inputs.reshape(inputs.shape[:-1].numel(), inputs.shape[-1])
    output: Tensor = product(rows, weight.t()).view(*inputs.shape[:-1], len(weight))
    return output if bias is None else output + bias


def mm(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """`torch.mm(left, right, out=out)`: [rows, inner], [inner, columns] -> [rows, columns]. Not
    differentiable.
    """
    if not is_slow(left):
        return torch.mm(left, right, out=out)
    return _multiply(left, right, out)


def addmm(added: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float) -> Tensor:
    """`torch.addmm`: beta * added + alpha * (left @ right), rounded once: [rows, columns], [rows,
    inner], [inner, columns] -> [rows, columns]. Not differentiable.
    """
    if not is_slow(left):
        return torch.addmm(added, left, right, beta=beta, alpha=alpha)
    return _multiply(left, right, added.new_empty(added.shape), added, beta, alpha)


def _multiply(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    added: Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> Tensor:
    for rows in slices(left.shape[0], _ROWS):
        for columns in slices(right.shape[1], _COLUMNS):
            block = out[rows, columns]
            total = torch.zeros_like(block, dtype=torch.float32)
            if added is not None:
                total.add_(added[rows, columns], alpha=beta)
            for inner in slices(left.shape[1], _INNER):
                total.addmm_(left[rows, inner].float(), right[inner, columns].float(), alpha=alpha)
            block.copy_(total)
    return out


def slices(count: int, step: int) -> Iterator[slice]:
    """Divides `count` elements into slices of `step`, or of 1 if that is less."""
    for start in range(0, count, max(1, step)):
        yield slice(start, min(start + step, count))


# An operator, so that torch.compile does not trace the loops.
@torch.library.custom_op("megatron_hybrid::mm_in_fp32", mutates_args=())
def _mm_in_fp32(left: Tensor, right: Tensor) -> Tensor:
    return _multiply(left, right, left.new_empty(left.shape[0], right.shape[1]))


@_mm_in_fp32.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    left, right = inputs
    is_left_wanted, is_right_wanted = ctx.needs_input_grad[:2]
    # As PyTorch's product: the inputs of a frozen layer are not kept.
    ctx.save_for_backward(left if is_right_wanted else None, right if is_left_wanted else None)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    left, right = ctx.saved_tensors
    product: Any = _mm_in_fp32
    grad_left = product(grad, right.t()) if ctx.needs_input_grad[0] else None
    # Contiguous for `linear`, whose `right` is the weight's transpose.
    grad_right = product(grad.t(), left).t() if ctx.needs_input_grad[1] else None
    return grad_left, grad_right


_mm_in_fp32.register_autograd(_backward, setup_context=_save)
