"""Adam over flat arrays, and their squared norm, with torch alone: the kernel's bits, no compiler.

torch's fused AdamW computes [Note: arithmetic] of adam.py on fp32 arrays of whole vectors, which
torch_flat.py makes. Equal bits need a CPU whose torch has fused multiply-add (AVX2 or later).
Accelerators without Triton give the bits of their fused kernel.

[Note: squares in fp64] The square of a fp32 value is exact in fp64. Rows of 1024 squares, the last
filled up with zeros, are halved ten times, element i of the first half added to element i of the
second; the rows' sums, filled up with zeros to a power of two, are halved likewise until one is
left. That order is the same for any number of threads and width of vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatron.core.optimizer.kernels import torch_flat
from megatron.core.optimizer.kernels.adam import AdamStep
from megatron.core.optimizer.kernels.piece import Piece

NORM_ROW_NUMEL = 1024
_NORM_ROWS = 64  # of 1024 squares in fp64, 512 KiB, at a time: they stay in the caches
_NARROW = 64


def run(pieces: Iterable[Piece], grad_scale: float) -> None:
    """Carries the pieces' steps out, in place, with torch's fused kernel.

    Args:
        pieces: on any one device; `Piece.check` accepts them.
    """
    torch_flat.run(pieces, grad_scale, _fused_step)


@torch.no_grad()
def squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of squares. Scalar, fp64. See [Note: squares in fp64]."""
    flat = tensor.detach().reshape(-1)
    # Pieces of whole rows: the rows do not depend on the pieces' size.
    sums = [_row_sums(piece) for piece in flat.split(_NORM_ROWS * NORM_ROW_NUMEL) if piece.numel()]
    rows = torch.cat(sums) if sums else flat.new_zeros(1, dtype=torch.float64)

    power = 1 << (rows.numel() - 1).bit_length()
    return _halved(_padded(rows, power).view(1, power)).view(())


def _fused_step(
    step: AdamStep, grad: torch.Tensor, weight: torch.Tensor, states: Mapping[str, torch.Tensor]
) -> None:
    fused = torch._fused_adamw_ if step.adam_w_mode else torch._fused_adam_
    # beta to the power of infinity is zero, so both corrections are one.
    state_step = weight.new_full((), float(step.step) if step.bias_correction else float("inf"))
    fused(
        [weight],
        [grad],
        [states["exp_avg"]],
        [states["exp_avg_sq"]],
        [],
        [state_step],
        lr=step.lr,
        beta1=step.beta1,
        beta2=step.beta2,
        weight_decay=step.weight_decay,
        eps=step.eps,
        amsgrad=False,
        maximize=False,
    )


def _row_sums(piece: torch.Tensor) -> torch.Tensor:
    numel = -(-piece.numel() // NORM_ROW_NUMEL) * NORM_ROW_NUMEL
    return _halved(_padded(piece.double().square(), numel).view(-1, NORM_ROW_NUMEL))


def _padded(flat: torch.Tensor, numel: int) -> torch.Tensor:
    return torch.nn.functional.pad(flat, (0, numel - flat.numel()))


def _halved(rows: torch.Tensor) -> torch.Tensor:
    """Sums of rows whose length is a power of two: halves are added until one element is left."""
    while rows.shape[1] > _NARROW:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]

    # The same sums, transposed: torch is slow on many short rows.
    columns = rows.t().contiguous()
    while columns.shape[0] > 1:
        half = columns.shape[0] // 2
        columns = columns[:half] + columns[half:]
    return columns[0]
