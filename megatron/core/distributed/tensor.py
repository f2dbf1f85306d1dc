"""Tensor parallelism: the heads and channels of each layer divided over ranks.

`TensorGroup` takes the place of `tensor` in attention, gated delta nets, MLPs, the embedding and
the model; tensor_exchange.py describes how they use it. Between the layers each rank has some
positions of its rows (sequence parallelism), so a norm, a router or a residual addition is computed
once, and each of the two parts of a layer gathers its inputs and scatters its outputs:

                forward                                 backward
    gather      all-gather of the inputs                all-gather of the inputs again, for the
                                                        gradient of the weight; reduce-scatter of
                                                        the gradient of the inputs
    scatter     reduce-scatter of the outputs           all-gather of their gradients

A reduce-scatter is an all-to-all and a sum in fp32, in the order of the ranks, which is rounded
once: no rank sends more than in a reduce-scatter of the backend, and results are the same in every
run.

With context parallelism a rank first takes its slice of the rows and then its part of the slice's
positions. The ranks of a tensor group have the same slice.

Exchanges are collectives of the thread that computes, on its current stream; see [Note: order of
exchanges] in experts.py, whose invariant they keep: which exchanges there are does not depend on
the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.distributed.config import A2A, check_heads
from megatron.core.distributed.context import Record, mixers_of, slice_of
from megatron.core.distributed.fsdp.collectives import Label, all_gather, tag_of
from megatron.core.distributed.fsdp.context import is_backward_running
from megatron.core.distributed.fsdp.group_plan import THE_MODEL
from megatron.core.issued_collectives import issuing
from megatron.core.models.gpt.gpt_model import GPTModel, WordEmbeddings
from megatron.core.models.multimodal.vision_language_model import VisionLanguageModel
from megatron.core.products import linear, mm
from megatron.core.transformer.attention_core import Attention
from megatron.core.transformer.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe_layer import MoELayer
from megatron.core.transformer.router import Router
from megatron.core.transformer.sequence_slice import SequenceSlice
from megatron.core.transformer.tensor_cut import tensor_cuts

_TAG = tag_of(*b"tensor")  # of messages over a group that lanes may use, too


def divide_tensor(model: nn.Module, group: dist.ProcessGroup, record: Record | None = None) -> None:
    """Has the layers of a decoder in `model` compute with this rank's part of their weights, and
    reach the positions of all ranks of `group`.

    Does not divide the weights: the engine must show each rank its parts. Modules that declare no
    divided parameters, such as a vision tower's, stay whole on every rank.

    Args:
        model: with context parallelism, after `divide_context`.
        record: called with a module, and whether in backward, before its positions or sums, or
            their gradients, travel, in the thread that computes.

    Raises:
        ValueError: for heads, sections or columns that the ranks cannot divide.
    """
    cuts, num_ranks = tensor_cuts(model), dist.get_world_size(group)
    check_heads(mixers_of(model).values(), 1, A2A, num_ranks)
    for name, parameter in model.named_parameters():
        if parameter in cuts:
            cuts[parameter].check(parameter.shape, num_ranks, name)

    for name, module in model.named_modules():
        if isinstance(module, (Attention, GatedDeltaNet, GPTModel, MLP, WordEmbeddings)) and any(
            parameter in cuts for parameter in module.parameters()
        ):
            noted = None if record is None else partial(record, module)
            module.tensor = TensorGroup(group, name or THE_MODEL, noted)

    for part in model.modules():
        if isinstance(part, (MoELayer, Router, VisionLanguageModel)):
            part.sequence_slice = _divided(part.sequence_slice, slice_of(group))


def _divided(outer: SequenceSlice | None, own: SequenceSlice) -> SequenceSlice:
    """A part of a slice of each sequence."""
    if outer is None:
        return own

    def total(tensor: Tensor) -> Tensor:
        return outer.total(own.total(tensor))

    return SequenceSlice(outer.rank * own.size + own.rank, outer.size * own.size, total)


class TensorGroup:
    """The exchange of one module's positions and sums among the ranks of a group. Implements
    `TensorExchange`.

    All ranks of the group call its methods in the same order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str = THE_MODEL,
        record: Callable[[bool], None] | None = None,
    ) -> None:
        """
        Args:
            name: name of the module, for messages.
            record: called before an exchange in forward (False), and in backward (True).
        """
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._group = group
        self._name = name
        self._record = record

    def gather(self, part: Tensor) -> Tensor:
        """See `TensorExchange.gather`."""
        apply: Any = _Gather.apply  # torch declares it without types
        gathered: Tensor = apply(part, self)
        return gathered

    def gather_linear(self, part: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `TensorExchange.gather_linear`."""
        apply: Any = _GatherLinear.apply
        output: Tensor = apply(part, weight, bias, self)
        return output

    def scatter(self, sums: Tensor) -> Tensor:
        """See `TensorExchange.scatter`."""
        apply: Any = _Scatter.apply
        own: Tensor = apply(sums, self)
        return own

    def total(self, tensor: Tensor) -> Tensor:
        """See `TensorExchange.total`."""
        summed = self._all_reduce(tensor, dist.ReduceOp.SUM)
        # Zero, with the gradient of this rank's part.
        return summed + (tensor - tensor.detach()) if tensor.requires_grad else summed

    def maximum(self, tensor: Tensor) -> Tensor:
        """See `TensorExchange.maximum`."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def all_gather(self, part: Tensor, *, is_backward: bool) -> Tensor:
        """[batch, seq / ranks, channels] of each rank -> [batch, seq, channels]."""
        self._note(is_backward)
        part = part.contiguous()
        gathered = part.new_empty(self.num_ranks, *part.shape)
        label = Label(_TAG, f"positions of {self._name}")
        all_gather(gathered.flatten(), part.flatten(), self._group, label)
        return gathered.movedim(0, 1).flatten(1, 2)

    def reduce_scatter(self, sums: Tensor, *, is_backward: bool) -> Tensor:
        """[batch, seq, channels] -> the sum over the ranks of [batch, seq / ranks, channels]."""
        if sums.shape[1] % self.num_ranks:
            raise ValueError(
                f"Expected sequences that {self.num_ranks} ranks of tensor parallelism can divide "
                f"equally, got {sums.shape[1]} positions."
            )
        self._note(is_backward)
        sent = sums.unflatten(1, (self.num_ranks, -1)).movedim(1, 0).contiguous()
        received = torch.empty_like(sent)
        with issuing(f"reduce-scatter of {self._name}", sent):
            dist.all_to_all_single(received, sent, group=self._group)
        wide = torch.promote_types(sent.dtype, torch.float32)
        return received.sum(0, dtype=wide).to(sums.dtype)

    def _all_reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        # Losses of single tokens compute their logits, and these sums, again in backward.
        self._note(is_backward_running())
        reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
        with issuing(f"all-reduce of {self._name}", reduced):
            dist.all_reduce(reduced, operation, group=self._group)
        return reduced

    def _note(self, is_backward: bool) -> None:
        if self._record is not None:
            self._record(is_backward)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.all_gather(part, is_backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.reduce_scatter(gradient, is_backward=True), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.reduce_scatter(sums, is_backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.all_gather(gradient, is_backward=True), None


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Tensor, weight: Tensor, bias: Tensor | None, group: TensorGroup
    ) -> Tensor:
        ctx.save_for_backward(part, weight)
        ctx.group = group
        return linear(group.all_gather(part, is_backward=False), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        group: TensorGroup = ctx.group
        is_part_wanted, is_weight_wanted, is_bias_wanted = ctx.needs_input_grad[:3]
        rows = gradient.flatten(0, 1)
        grad_part = grad_weight = grad_bias = None
        if is_weight_wanted:
            whole = group.all_gather(part, is_backward=True).flatten(0, 1)
            grad_weight = _product(rows.t(), whole.to(rows.dtype)).to(weight.dtype)
            del whole
        if is_part_wanted:
            sums = _product(rows, weight.to(rows.dtype)).view(*gradient.shape[:2], -1)
            grad_part = group.reduce_scatter(sums, is_backward=True).to(part.dtype)
        if is_bias_wanted:
            grad_bias = rows.sum(0, dtype=weight.dtype)
        return grad_part, grad_weight, grad_bias, None


def _product(left: Tensor, right: Tensor) -> Tensor:
    return mm(left, right, left.new_empty(left.shape[0], right.shape[1]))
