"""Adam over flat arrays, and their squared norm, with torch alone: the kernel's bits, no compiler.

[Note: chunks] torch's fused AdamW computes [Note: arithmetic] of adam.py on fp32 arrays only, and
its scalar tail rounds otherwise than its vectors. So other dtypes are widened into scratch memory,
a chunk at a time that stays in the caches, and a tail shorter than a vector is padded with zeros.
Equal bits need a CPU whose torch has fused multiply-add (AVX2 or later). Accelerators without
Triton give the bits of their fused kernel.

[Note: squares in fp64] The square of a fp32 value is exact in fp64. Rows of 1024 squares, the last
filled up with zeros, are halved ten times, element i of the first half added to element i of the
second; the rows' sums, filled up with zeros to a power of two, are halved likewise until one is
left. That order is the same for any number of threads and width of vectors.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.core.optimizer.kernels.adam import AdamPiece, AdamStep

CHUNK_NUMEL = 128 * 1024
NORM_ROW_NUMEL = 1024
_NORM_ROWS = 64  # of 1024 squares in fp64, 512 KiB, at a time: they stay in the caches
_NARROW = 64
_VECTOR_NUMEL = 64  # a multiple of every width that torch's vectors have


@torch.no_grad()
def run(pieces: Iterable[AdamPiece]) -> None:
    """Carries the pieces' steps out, in place.

    Args:
        pieces: on any one device; `AdamPiece.check` accepts them.
    """
    scratch = _Scratch()
    for piece in pieces:
        for start in range(0, piece.numel, CHUNK_NUMEL):
            _step(piece.part(start, min(CHUNK_NUMEL, piece.numel - start)), scratch)


@torch.no_grad()
def squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of squares. Scalar, fp64. See [Note: squares in fp64]."""
    flat = tensor.detach().reshape(-1)
    # Pieces of whole rows: the rows do not depend on the pieces' size.
    sums = [_row_sums(piece) for piece in flat.split(_NORM_ROWS * NORM_ROW_NUMEL) if piece.numel()]
    rows = torch.cat(sums) if sums else flat.new_zeros(1, dtype=torch.float64)

    power = 1 << (rows.numel() - 1).bit_length()
    return _halved(_padded(rows, power).view(1, power)).view(())


class _Scratch:
    """fp32 memory for one chunk of each array, made when first needed."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in fp32, zeros behind it up to whole vectors."""
        if name not in self._memory:
            self._memory[name] = torch.empty(CHUNK_NUMEL, device=tensor.device)

        # Whole vectors: torch's scalar tail rounds otherwise. See [Note: chunks].
        numel = tensor.numel()
        padded = self._memory[name][: -(-numel // _VECTOR_NUMEL) * _VECTOR_NUMEL]
        padded[:numel].copy_(tensor)
        padded[numel:].zero_()
        return padded

    def widened(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself where torch's kernel takes it as it is, otherwise a copy."""
        if tensor.dtype == torch.float32 and tensor.numel() % _VECTOR_NUMEL == 0:
            return tensor
        return self.copy(name, tensor)


def _step(piece: AdamPiece, scratch: _Scratch) -> None:
    """One chunk. `piece`'s arrays are one-dimensional."""
    grad = _scaled_grad(piece, scratch)
    weight = scratch.widened("weight", _full_weight(piece))
    exp_avg = scratch.widened("exp_avg", piece.exp_avg)
    exp_avg_sq = scratch.widened("exp_avg_sq", piece.exp_avg_sq)
    _fused_step(piece.step, grad, weight, exp_avg, exp_avg_sq)

    _store(exp_avg, piece.exp_avg)
    _store(exp_avg_sq, piece.exp_avg_sq)
    if piece.remainder is None:
        _store(weight, piece.weight)
    else:
        _split(weight[: piece.numel], piece.weight, piece.remainder)

    # With a remainder, `out` is the bf16 weight's bits: where two bf16 numbers are equally near,
    # rounding once more might choose the other one.
    if piece.out is not None:
        rounded_already = piece.remainder is not None and piece.out.dtype == torch.bfloat16
        _store(piece.weight if rounded_already else weight, piece.out)


def _scaled_grad(piece: AdamPiece, scratch: _Scratch) -> torch.Tensor:
    if piece.step.grad_scale == 1.0:
        return scratch.widened("grad", piece.grad)
    # Always a copy: the caller's gradient stays as it is.
    return scratch.copy("grad", piece.grad).mul_(piece.step.grad_scale)


def _fused_step(
    step: AdamStep,
    grad: torch.Tensor,
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
) -> None:
    """torch's fused kernel on fp32 arrays of whole vectors."""
    fused = torch._fused_adamw_ if step.adam_w_mode else torch._fused_adam_
    # beta to the power of infinity is zero, so both corrections are one.
    state_step = weight.new_full((), float(step.step) if step.bias_correction else float("inf"))
    fused(
        [weight],
        [grad],
        [exp_avg],
        [exp_avg_sq],
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


def _store(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source[: target.numel()])


def _full_weight(piece: AdamPiece) -> torch.Tensor:
    """The weight, in fp32 if there is a remainder. See [Note: remainder]."""
    if piece.remainder is None:
        return piece.weight

    # As integers: a negative remainder borrows from the upper half.
    bits = piece.weight.view(torch.int16).to(torch.int32) << 16
    return bits.add_(piece.remainder).view(torch.float32)


def _split(full: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """Writes fp32 values as bf16 and remainder. A NaN becomes the one whose remainder is zero."""
    bits = torch.where(full.isnan(), torch.nan, full).view(torch.int32)
    # On a little-endian machine the lower half comes first.
    remainder.copy_(bits.view(torch.int16)[0::2])
    weight.view(torch.int16).copy_(bits.add_(0x8000) >> 16)


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
