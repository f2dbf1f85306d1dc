"""The product of sorted tokens with the matrices of their experts.

Tokens of the first expert, then of the second, ..., each group with its expert's matrix:

    tokens [5, in]    counts [2, 0, 3]    output [5, out]

    0  1              x matrices[0]       0  1
    2  3  4           x matrices[2]       2  3  4

The cost follows the tokens: an expert without tokens costs only the zeros of its matrix's gradient.
Every group is summed by one kernel, in one order, so results are the same
bits each time.

[Note: two ways] PyTorch has one kernel for all groups in bf16 on recent accelerators. It reads the
groups' ends on the device, so the host need not wait for the counts. Elsewhere, on the CPU
too, PyTorch's function of that name is itself a loop over the groups and no faster than the one
here, which writes each product where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.autocast import without_autocast
from megatron.core.products import is_slow, mm

_ALIGNMENT = 16  # bytes, of the rows that the kernel for all groups reads and writes
_MOST_GROUPS = 1023  # of the kernel for all groups


def grouped_matmul(
    tokens: Tensor, matrices: Tensor, counts: Tensor, biases: Tensor | None = None
) -> Tensor:
    """Each token times its expert's matrix, plus its expert's bias. Under autocast tokens, matrices
    and biases are cast, as for any matrix product.

    Args:
        tokens: [tokens, in], tokens of the first expert, then of the second, ...
        matrices: [experts, in, out]; their gradient has their strides.
        counts: tokens of each expert, on the tokens' device: [experts] int64. Their sum is the
            number of tokens.
        biases: [experts, out].

    Returns:
        [tokens, out].

    Raises:
        ValueError: for mismatched shapes; for different dtypes, unless autocast casts them; for
            counts that do not add up to the tokens, where they are copied to the host anyway.
    """
    _check_shapes(tokens, matrices, counts, biases)
    dtype = _autocast_dtype(tokens)
    if dtype is not None:
        tokens, matrices = tokens.to(dtype), matrices.to(dtype)
        biases = None if biases is None else biases.to(dtype)
    dtypes = [x.dtype for x in (tokens, matrices, biases) if x is not None]
    if len(set(dtypes)) > 1:
        raise ValueError(f"Expected tokens, matrices and biases of one dtype, got {dtypes}.")

    apply: Any = _GroupedMatmul.apply  # torch declares it without types
    output: Tensor = apply(tokens, matrices, counts, biases)
    return output


def _check_shapes(tokens: Tensor, matrices: Tensor, counts: Tensor, biases: Tensor | None) -> None:
    if (
        tokens.dim() != 2
        or matrices.dim() != 3
        or tokens.shape[1] != matrices.shape[1]
        or counts.shape != matrices.shape[:1]
        or (biases is not None and biases.shape != (matrices.shape[0], matrices.shape[2]))
    ):
        shapes = [tuple(x.shape) for x in (tokens, matrices, counts)]
        bias_shape = None if biases is None else tuple(biases.shape)
        raise ValueError(
            "Expected tokens [tokens, in], matrices [experts, in, out], counts [experts] and "
            f"biases [experts, out] or None, got {shapes} and {bias_shape}."
        )


def _autocast_dtype(tokens: Tensor) -> torch.dtype | None:
    """The dtype to which autocast takes matrix products of these tokens; None: it takes none."""
    kind = tokens.device.type
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    # Autocast leaves fp64 as it is.
    if is_cast and tokens.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return None


class _GroupedMatmul(torch.autograd.Function):
    """See [Note: two ways]."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, matrices: Tensor, counts: Tensor, biases: Tensor | None
    ) -> Tensor:
        with without_autocast(tokens.device):
            sizes = ends = None
            if _is_one_kernel(tokens, matrices):
                ends = counts.cumsum(0, dtype=torch.int32)
                output = _of_all(tokens, matrices, ends, counts, biases)
            else:
                sizes = counts.tolist()
                if sum(sizes) != len(tokens):
                    raise ValueError(
                        f"Expected counts that add up to {len(tokens)} tokens, got {sum(sizes)}."
                    )
                output = _of_each(tokens, matrices, sizes, biases)

        ctx.save_for_backward(tokens, matrices, ends)
        ctx.sizes = sizes
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        tokens, matrices, ends = ctx.saved_tensors
        wants_tokens, wants_matrices, _, wants_biases = ctx.needs_input_grad
        grad_output = grad_output.contiguous()
        grad_tokens = grad_matrices = grad_biases = None

        with without_autocast(tokens.device):
            if ctx.sizes is None:
                if wants_tokens:
                    grad_tokens = torch._grouped_mm(grad_output, matrices.mT, offs=ends)
                if wants_matrices:
                    grad_matrices = _outer_of_all(tokens, grad_output, ends, matrices)
                if wants_biases:
                    grad_biases = _sums_of_all(grad_output, ends)
            else:
                if wants_tokens:
                    grad_tokens = _of_each(grad_output, matrices.mT, ctx.sizes, None)
                if wants_matrices:
                    grad_matrices = _outer_of_each(tokens, grad_output, ctx.sizes, matrices)
                if wants_biases:
                    grad_biases = _sums_of_each(grad_output, ctx.sizes)
        return grad_tokens, grad_matrices, None, grad_biases


# One kernel for each group.


def _spans(sizes: list[int]) -> Iterator[tuple[int, slice]]:
    """The experts that have tokens, and where these are."""
    start = 0
    for expert, size in enumerate(sizes):
        if size:
            yield expert, slice(start, start + size)
        start += size


def _of_each(tokens: Tensor, matrices: Tensor, sizes: list[int], biases: Tensor | None) -> Tensor:
    output = tokens.new_empty(len(tokens), matrices.shape[2])
    for expert, span in _spans(sizes):
        if biases is not None and not is_slow(tokens):
            torch.addmm(biases[expert], tokens[span], matrices[expert], out=output[span])
            continue
        product = mm(tokens[span], matrices[expert], output[span])
        if biases is not None:
            product += biases[expert]
    return output


def _outer_of_each(
    tokens: Tensor, grad_output: Tensor, sizes: list[int], matrices: Tensor
) -> Tensor:
    """The gradient of the matrices: [experts, in, out]."""
    grad = torch.empty_like(matrices)
    for expert, span in _spans(sizes):
        mm(tokens[span].T, grad_output[span], grad[expert])
    return _zero_empty(grad, sizes)


def _sums_of_each(grad_output: Tensor, sizes: list[int]) -> Tensor:
    """The gradient of the biases: [experts, out]."""
    grad = grad_output.new_empty(len(sizes), grad_output.shape[1])
    for expert, span in _spans(sizes):
        torch.sum(grad_output[span], 0, out=grad[expert])
    return _zero_empty(grad, sizes)


def _zero_empty(grad: Tensor, sizes: list[int]) -> Tensor:
    """Writes zeros for the experts that have no tokens."""
    for expert, size in enumerate(sizes):
        if not size:
            grad[expert].zero_()
    return grad


# One kernel for all groups.


def _is_one_kernel(tokens: Tensor, matrices: Tensor) -> bool:
    """Whether the kernel for all groups takes these, and is worth taking."""
    if tokens.device.type == "cpu" or tokens.dtype is not torch.bfloat16 or not len(tokens):
        return False
    if len(matrices) > _MOST_GROUPS:
        return False
    numbers = _ALIGNMENT // tokens.itemsize
    is_aligned = not (
        matrices.shape[1] % numbers
        or matrices.shape[2] % numbers
        or tokens.data_ptr() % _ALIGNMENT
        or matrices.data_ptr() % _ALIGNMENT
    )
    is_dense = matrices.is_contiguous() or matrices.mT.is_contiguous()
    return is_aligned and is_dense and tokens.is_contiguous() and _has_kernel(tokens.device)


@cache
def _has_kernel(device: torch.device) -> bool:
    """Whether PyTorch has the kernel for this device, tried on a small product: neither its version
    nor the kind of device is enough.
    """
    if not hasattr(torch, "_grouped_mm"):
        return False
    tokens = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    ends = torch.full((1,), 16, dtype=torch.int32, device=device)
    try:
        torch._grouped_mm(tokens, tokens[None], offs=ends)
        torch._grouped_mm(tokens.T, tokens, offs=ends)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _of_all(
    tokens: Tensor, matrices: Tensor, ends: Tensor, counts: Tensor, biases: Tensor | None
) -> Tensor:
    output: Tensor = torch._grouped_mm(tokens, matrices, offs=ends)
    if biases is not None:
        # With the size given, the host does not wait for the counts.
        output += biases.repeat_interleave(counts, dim=0, output_size=len(output))
    return output


def _outer_of_all(tokens: Tensor, grad_output: Tensor, ends: Tensor, matrices: Tensor) -> Tensor:
    """The gradient of the matrices: [experts, in, out]."""
    if matrices.is_contiguous():
        grad: Tensor = torch._grouped_mm(tokens.T, grad_output, offs=ends)
        return _zero_between(grad, ends)
    grad = torch._grouped_mm(grad_output.T, tokens, offs=ends)
    return _zero_between(grad, ends).mT


def _sums_of_all(grad_output: Tensor, ends: Tensor) -> Tensor:
    """The gradient of the biases: [experts, out], as a product with ones, which is summed in fp32.
    The fewest columns that are aligned.
    """
    ones = grad_output.new_ones(len(grad_output), _ALIGNMENT // grad_output.itemsize)
    grad: Tensor = torch._grouped_mm(grad_output.T, ones, offs=ends)
    return _zero_between(grad[..., 0].contiguous(), ends)


def _zero_between(grad: Tensor, ends: Tensor) -> Tensor:
    """Writes zeros for the experts that have no tokens: there the kernel leaves memory unwritten on
    some devices (pytorch/pytorch#172439).
    """
    is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    return grad.masked_fill_(is_empty.view(-1, *[1] * (grad.dim() - 1)), 0)
