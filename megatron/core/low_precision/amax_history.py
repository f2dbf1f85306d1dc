"""Delayed scaling's maxima of earlier steps, one history for each operand of a layer.

`AmaxHistory.maximum` records an operand's maximum and returns that of earlier steps. After the
backward, `update_histories` takes the maxima over all ranks, in one all-reduce. It comes before the
optimizer's step, which may make the codes of the next step's weights.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.issued_collectives import issuing
from megatron.core.low_precision.recipes import HistoryOptions


class Slot(enum.IntEnum):
    """An operand's row in the buffers."""

    INPUTS = 0
    WEIGHT = 1
    GRADIENT = 2


class AmaxHistory(nn.Module):
    """The maxima of one layer's operands. Buffers are the same on every rank between steps.

    Attributes:
        maxima: fp32 [operands, steps], the latest step last; 0 of steps that have not been.
        current: fp32 [operands], of this rank in this step so far; not saved.
    """

    maxima: Tensor
    current: Tensor

    def __init__(self, options: HistoryOptions) -> None:
        super().__init__()
        self.options = options
        # On the CPU, even where parameters are made on meta: no other code would fill them.
        self.register_buffer("maxima", torch.zeros(len(Slot), options.length, device="cpu"))
        self.register_buffer("current", torch.zeros(len(Slot), device="cpu"), persistent=False)

    def chosen(self, slot: Slot) -> Tensor:
        """The maximum that a scale is computed from: fp32 []; 0 before the first step."""
        own = self.maxima[slot]
        return own[-1] if self.options.algorithm == "most_recent" else own.amax()

    def maximum(self, slot: Slot, own: Tensor) -> Tensor:
        """The maximum that an operand's scale is computed from, [1, 1] fp32: the chosen one; before
        there is one, the operand's own, where TransformerEngine's first scale is 1. Small gradients
        would be lost, and more of them the more microbatches divide the loss.

        In training the operand's own raises the step's. A recomputed layer records the same again.

        Args:
            own: the operand's maxima, fp32 of any shape.
        """
        own = own.amax()
        if self.training:
            torch.maximum(self.current[slot], own, out=self.current[slot])
        return self.chosen_or(slot, own).view(1, 1)

    def chosen_or(self, slot: Slot, own: Tensor) -> Tensor:
        """The chosen maximum, or, before there is one, these: fp32 of the shape of `own`."""
        chosen = self.chosen(slot).to(own.device)
        return chosen.where(chosen > 0, own)


def is_history(key: str) -> bool:
    """Whether a key of a checkpoint is of a history. Runs with another recipe have none."""
    return key.endswith(".amax_history.maxima")


@torch.no_grad()
def update_histories(histories: Sequence[AmaxHistory], group: dist.ProcessGroup) -> None:
    """Ends a step of the histories of a model, which is the same on all ranks of `group`."""
    if not histories:
        return
    current = torch.stack([history.current for history in histories])
    with issuing("all-reduce of delayed scaling's maxima", current):
        dist.all_reduce(current, dist.ReduceOp.MAX, group=group)
    advance(histories, current)


def advance(histories: Sequence[AmaxHistory], current: Tensor) -> None:
    """Ends a step of histories of one length whose maxima over all ranks these are, [histories,
    operands]. A maximum that is 0 or not finite changes nothing.
    """
    maxima = torch.stack([history.maxima for history in histories])
    rolled = torch.cat((maxima[..., 1:], current[..., None]), dim=-1)
    is_known = current.isfinite() & (current > 0)
    for history, own in zip(histories, rolled.where(is_known[..., None], maxima), strict=True):
        history.maxima.copy_(own)
        history.current.zero_()
