"""Which part of each sequence a rank's model computes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.issued_collectives import issuing
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe_layer import MoELayer
from megatron.core.transformer.router import Router
from megatron.core.transformer.sequence_slice import SequenceSlice


def slice_sequences(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Has `model` compute this rank's part of each sequence that it is given. All ranks of `group`
    give it the same sequences.
    """
    size = dist.get_world_size(group)

    def total(tensor: Tensor) -> Tensor:
        apply: Any = _Total.apply  # torch declares it without types
        summed: Tensor = apply(tensor, group, size)
        return summed

    own = SequenceSlice(dist.get_rank(group), size, total)
    for module in model.modules():
        if isinstance(module, (GPTModel, MoELayer, Router)):
            module.sequence_slice = own


class _Total(torch.autograd.Function):
    """The sum over ranks. All of them make the same loss of it, so each gradient is `size` times
    that of one rank's loss, without communication.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
        ctx.size = size
        summed = tensor.clone(memory_format=torch.contiguous_format)
        with issuing("all-reduce of a router's statistics", summed):
            dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient * ctx.size, None, None
