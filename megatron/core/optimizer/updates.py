"""Converts local tensors to the flat arrays that kernels take, and back.

Kernels work on the tensors themselves where they can: contiguous ones, with all states in fp32 or
all in bf16. Scaled and strided tensors are copied for the kernel, and the result is stored again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

import megatron.core.optimizer.scaled_states as scaled_states
from megatron.core.dtypes import FLOAT_DTYPES, UNSCALED_STATE_DTYPES
from megatron.core.optimizer.kernels.piece import Kernel, Piece, merged

# The names of arrays that are not states.
_COMMON = ("grad", "weight", "remainder", "out")


class LocalArray(NamedTuple):
    """A local tensor of any strides, with its scale if it has one; see [Note: scales]."""

    tensor: torch.Tensor
    scale: torch.Tensor | None = None


class Update(NamedTuple):
    """One parameter's step over local tensors of one shape and device: those of `Piece`, and states
    by name.
    """

    step: Any
    arrays: Mapping[str, LocalArray]

    @property
    def is_direct(self) -> bool:
        """Whether kernels can work on the tensors themselves."""
        # Kernels have one dtype for all states, and see memory, neither shapes nor scales.
        dtypes = {array.tensor.dtype for name, array in self.arrays.items() if _is_state(name)}
        return (
            len(dtypes) <= 1
            and dtypes <= {*UNSCALED_STATE_DTYPES}
            and self.arrays["grad"].tensor.dtype in FLOAT_DTYPES
            and all(
                array.scale is None and array.tensor.is_contiguous()
                for array in self.arrays.values()
            )
        )


class PlannedUpdates(NamedTuple):
    """Updates as they will be handed to kernels, but for the factor of the gradients."""

    pieces: list[Piece]  # arrays that kernels update in place, joined
    others: list[Update]


def plan(updates: Sequence[Update]) -> PlannedUpdates:
    """Puts together what there is to do. Reads and writes no array."""
    pieces = [
        _piece(update.step, {name: array.tensor for name, array in update.arrays.items()})
        for update in updates
        if update.is_direct
    ]
    return PlannedUpdates(merged(pieces), [update for update in updates if not update.is_direct])


def carry_out(planned: PlannedUpdates, grad_scale: float, kernel: Kernel) -> None:
    """Has the kernel do all updates."""
    kernel(planned.pieces, grad_scale)

    # One after the other, so that the copies take the memory of one.
    for update in planned.others:
        copies = {name: _working_copy(name, array) for name, array in update.arrays.items()}
        kernel([_piece(update.step, copies)], grad_scale)
        for name, array in update.arrays.items():
            # A gradient is only read.
            if copies[name] is not array.tensor and name != "grad":
                _write_back(name, array, copies[name])


def _piece(step: Any, arrays: Mapping[str, torch.Tensor]) -> Piece:
    return Piece(
        step,
        arrays["grad"],
        arrays["weight"],
        {name: array for name, array in arrays.items() if _is_state(name)},
        arrays.get("remainder"),
        arrays.get("out"),
    )


def _is_state(name: str) -> bool:
    return name not in _COMMON


def _working_copy(name: str, array: LocalArray) -> torch.Tensor:
    """A tensor that kernels can work on: contiguous, states and unusual gradients in fp32.

    It is the array's own tensor if that is so already.
    """
    # All states go to fp32, though one alone may be what kernels do not take: they must be alike.
    tensor = array.tensor
    if array.scale is not None:
        tensor = scaled_states.read(tensor, array.scale)
    elif _is_state(name) or tensor.dtype not in (*FLOAT_DTYPES, torch.int16):
        tensor = tensor.float()
    return tensor.contiguous()


def _write_back(name: str, array: LocalArray, values: torch.Tensor) -> None:
    if array.scale is None:
        array.tensor.copy_(values)
    else:
        scaled_states.write(array.tensor, array.scale, values, is_weight=name == "weight")
