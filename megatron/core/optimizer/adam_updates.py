"""Converts local tensors to the flat arrays that the Adam kernels take, and back.

Kernels work on the tensors themselves where they can: contiguous ones, with both moments in fp32 or
both in bf16. Scaled and strided tensors are copied for the kernel, and the result is stored again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

import megatron.core.optimizer.scaled_states as scaled_states
from megatron.core.dtypes import FLOAT_DTYPES, UNSCALED_MOMENT_DTYPES
from megatron.core.optimizer.kernels.adam import (
    AdamPiece,
    AdamStep,
    merged,
    with_grad_scale,
)
from megatron.core.optimizer.state_tensors import MOMENTS

Run = Callable[[Sequence[AdamPiece]], None]


class LocalArray(NamedTuple):
    """A local tensor of any strides, with its scale if it has one; see [Note: scales]."""

    tensor: torch.Tensor
    scale: torch.Tensor | None = None


class Update(NamedTuple):
    """One parameter's step over local tensors of one shape and device, named as in AdamPiece."""

    step: AdamStep
    arrays: Mapping[str, LocalArray]

    @property
    def is_direct(self) -> bool:
        """Whether kernels can work on the tensors themselves."""
        # Kernels have one dtype for both moments, and see memory, neither shapes nor scales.
        moments = self.arrays["exp_avg"].tensor.dtype
        return (
            moments in UNSCALED_MOMENT_DTYPES
            and moments == self.arrays["exp_avg_sq"].tensor.dtype
            and self.arrays["grad"].tensor.dtype in FLOAT_DTYPES
            and all(
                array.scale is None and array.tensor.is_contiguous()
                for array in self.arrays.values()
            )
        )


class PlannedUpdates(NamedTuple):
    """Updates as they will be handed to kernels, but for the factor of the gradients."""

    pieces: list[AdamPiece]  # arrays that kernels update in place, joined
    others: list[Update]


def plan(updates: Sequence[Update]) -> PlannedUpdates:
    """Puts together what there is to do. Reads and writes no array."""
    pieces = [
        AdamPiece(update.step, **{name: array.tensor for name, array in update.arrays.items()})
        for update in updates
        if update.is_direct
    ]
    return PlannedUpdates(merged(pieces), [update for update in updates if not update.is_direct])


def carry_out(planned: PlannedUpdates, grad_scale: float, run: Run) -> None:
    """Has `run` do all updates."""
    run(with_grad_scale(planned.pieces, grad_scale))

    # One after the other, so that the copies take the memory of one.
    for update in planned.others:
        copies = {name: _working_copy(name, array) for name, array in update.arrays.items()}
        run(with_grad_scale([AdamPiece(update.step, **copies)], grad_scale))
        for name, array in update.arrays.items():
            # A gradient is only read.
            if copies[name] is not array.tensor and name != "grad":
                _write_back(name, array, copies[name])


def _working_copy(name: str, array: LocalArray) -> torch.Tensor:
    """A tensor that kernels can work on: contiguous, moments and unusual gradients in fp32.

    It is the array's own tensor if that is so already.
    """
    # Both moments go to fp32, though one alone may be what kernels do not take: they must be alike.
    tensor = array.tensor
    if array.scale is not None:
        tensor = scaled_states.read(tensor, array.scale)
    elif name in MOMENTS or tensor.dtype not in (*FLOAT_DTYPES, torch.int16):
        tensor = tensor.float()
    return tensor.contiguous()


def _write_back(name: str, array: LocalArray, values: torch.Tensor) -> None:
    if array.scale is None:
        array.tensor.copy_(values)
    else:
        scaled_states.write(array.tensor, array.scale, values, is_weight=name == "weight")
