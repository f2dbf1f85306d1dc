"""Context parallelism: the positions of each row divided over ranks.

Each rank of a group has a contiguous slice of each row. Most of a layer treats positions separately
and needs no other rank. Mixers do: `PositionExchange` takes the place of `Attention.exchange` and
`GatedDeltaNet.exchange`. Eight positions and four heads on two ranks.

With `a2a`:

    inputs      rank 0: positions 0-3 of heads 0-3      rank 1: positions 4-7 of heads 0-3
    to_heads    rank 0: positions 0-7 of heads 0, 1     rank 1: positions 0-7 of heads 2, 3
    core        whole rows: every kernel, window, mask and recurrence stays as it is
    to_positions: the reverse

Each is one all-to-all, and the backward of either is the other, on gradients. Both only copy, so
neither rounds. Queries, keys and values travel together, in the layout [positions, batch, channels
of the receiving rank]: packing is one copy, and what arrives is read in place.

With `all_gather` heads and positions stay, which any number of ranks can do. In attention every
rank gathers the keys and values of all positions; in backward each rank adds up its share of their
gradients, in fp32 and in the order of the ranks. Gated delta nets gather the last inputs of each
slice, which the convolution reads, and what slices do to the state: see [Note: slices] in
delta_rule.py.

Exchanges are collectives of the thread that computes, on its current stream; see [Note: order of
exchanges] in experts.py, whose invariant they keep: which exchanges there are does not depend on
the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.distributed.config import ALL_GATHER, check_heads
from megatron.core.distributed.fsdp.collectives import all_gather_on_device
from megatron.core.distributed.fsdp.group_plan import THE_MODEL
from megatron.core.issued_collectives import issuing
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.multimodal.vision_language_model import VisionLanguageModel
from megatron.core.transformer.attention_core import Attention
from megatron.core.transformer.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.moe_layer import MoELayer
from megatron.core.transformer.router import Router
from megatron.core.transformer.sequence_slice import SequenceSlice
from megatron.core.transformer.spec import Mixer

Record = Callable[[nn.Module, bool], None]


def divide_context(
    model: nn.Module,
    group: dist.ProcessGroup,
    comm_type: str,
    record: Record | None = None,
    tensor_size: int = 1,
) -> None:
    """Has every mixer of a decoder in `model` reach the positions of all ranks of `group`.

    A `GPTModel` cuts its slice of the rows that all ranks give it; layers without one must be given
    their slice. Attention that is not causal, to the patches of images, stays as it is.

    Args:
        comm_type: "a2a" or "all_gather", see above.
        record: called with a mixer, and whether in backward, before its heads or their gradients
            travel, in the thread that computes.
        tensor_size: ranks among which `divide_tensor` will divide the heads.

    Raises:
        ConfigError: see `check_heads`.
    """
    part, mixers = slice_of(group), mixers_of(model)
    check_heads(mixers.values(), part.size, comm_type, tensor_size)

    for name in mixers:
        module: Any = model.get_submodule(name)  # an Attention or a GatedDeltaNet
        noted = None if record is None else partial(record, module)
        module.exchange = PositionExchange(part, group, comm_type, name or THE_MODEL, noted)
    for each in model.modules():
        if isinstance(each, (GPTModel, VisionLanguageModel, MoELayer, Router)):
            each.sequence_slice = part


def mixers_of(model: nn.Module) -> dict[str, Mixer]:
    """The mixers of a decoder in `model`, by the names of their modules."""
    found: dict[str, Mixer] = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention) and module.core_spec.is_causal:
            found[name] = module.core_spec
        elif isinstance(module, GatedDeltaNet):
            found[name] = module.spec
    return found


def slice_of(group: dist.ProcessGroup) -> SequenceSlice:
    """The part of each sequence that is this rank's among the ranks of a group."""
    return SequenceSlice(dist.get_rank(group), dist.get_world_size(group), partial(_total, group))


def _total(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    """See `SequenceSlice.total`."""
    apply: Any = _Total.apply
    summed: Tensor = apply(tensor, group)
    return summed


class PositionExchange:
    """The exchange of one mixer's positions among the ranks of a group. Implements
    `ContextExchange`.

    All ranks of the group call its methods in the same order.
    """

    def __init__(
        self,
        part: SequenceSlice,
        group: dist.ProcessGroup,
        comm_type: str,
        name: str = THE_MODEL,
        record: Callable[[bool], None] | None = None,
    ) -> None:
        """
        Args:
            group: the ranks that have the slices, of which `part` is this rank's.
            comm_type: "a2a" or "all_gather".
            name: name of the mixer, for messages.
            record: called before heads travel (False), and before their gradients do (True).
        """
        self.part = part
        self.gathers = comm_type == ALL_GATHER
        self._group = group
        self._name = name
        self._record = record

    def to_heads(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """See `ContextExchange.to_heads`."""
        apply: Any = _ToHeads.apply  # torch declares it without types
        received: tuple[Tensor, ...] = apply(self, *(self._repeated(part, 2) for part in parts))
        return received

    def to_positions(self, part: Tensor) -> Tensor:
        """See `ContextExchange.to_positions`."""
        apply: Any = _ToPositions.apply
        received: Tensor = apply(self, part)
        return received

    def gather(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """See `ContextExchange.gather`."""
        apply: Any = _Gather.apply
        gathered: tuple[Tensor, ...] = apply(self, *parts)
        return gathered

    def own(self, per_head: Tensor) -> Tensor:
        """See `ContextExchange.own`."""
        return self._repeated(per_head, 0).chunk(self.part.size)[self.part.rank]

    def all_to_all(self, sent: Tensor, *, is_backward: bool) -> Tensor:
        """Sends each rank its row of [ranks, ...]. The same shape, with the row of each rank."""
        self._note(is_backward)
        received = torch.empty_like(sent)
        with issuing(f"all-to-all of the heads of {self._name}", sent):
            dist.all_to_all_single(received, sent, group=self._group)
        return received

    def all_gather(self, sent: Tensor, *, is_backward: bool) -> Tensor:
        """See `ContextExchange.all_gather`."""
        self._note(is_backward)
        received = sent.new_empty(self.part.size, *sent.shape)
        with issuing(f"all-gather of the slices of {self._name}", sent):
            all_gather_on_device(received.flatten(), sent.flatten(), group=self._group)
        return received

    def _note(self, is_backward: bool) -> None:
        if self._record is not None:
            self._record(is_backward)

    def _repeated(self, part: Tensor, dim: int) -> Tensor:
        """With each head as often as there are ranks to have it, so that ranks divide the heads.
        The gradient of a head is the sum over its copies.
        """
        num_heads = part.shape[dim]
        num_copies = math.lcm(num_heads, self.part.size) // num_heads
        return part if num_copies == 1 else part.repeat_interleave(num_copies, dim=dim)


def _send_heads(
    exchange: PositionExchange, parts: Sequence[Tensor], *, is_backward: bool
) -> tuple[Tensor, ...]:
    """[batch, seq / ranks, heads, dim] -> [batch, seq, heads / ranks, dim]."""
    num_ranks = exchange.part.size
    # By the rank that gets them: [ranks, seq / ranks, batch, heads / ranks, dim]
    divided = [part.unflatten(2, (num_ranks, -1)).permute(2, 1, 0, 3, 4) for part in parts]
    sent = _packed(divided)
    received = exchange.all_to_all(sent, is_backward=is_backward)
    return tuple(part.flatten(0, 1).transpose(0, 1) for part in _unpacked(received, divided))


def _send_positions(
    exchange: PositionExchange, parts: Sequence[Tensor], *, is_backward: bool
) -> tuple[Tensor, ...]:
    """[batch, seq, heads / ranks, dim] -> [batch, seq / ranks, heads, dim]."""
    # By the rank that gets them: [ranks, seq / ranks, batch, heads / ranks, dim]
    divided = [part.transpose(0, 1).unflatten(0, (exchange.part.size, -1)) for part in parts]
    received = exchange.all_to_all(_packed(divided), is_backward=is_backward)
    return tuple(part.permute(2, 1, 0, 3, 4).flatten(2, 3) for part in _unpacked(received, divided))


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """Parts [..., heads, dim] as one tensor [..., channels of all], in the narrowest dtype, as
    elements of which wider ones travel.
    """
    dtype = _narrowest(parts)
    flat = [part.flatten(-2) for part in parts]
    return torch.cat(
        [part if part.dtype == dtype else part.contiguous().view(dtype) for part in flat], dim=-1
    )


def _unpacked(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The reverse: parts of the shapes and dtypes of `like`."""
    itemsize = packed.dtype.itemsize
    widths = [math.prod(part.shape[-2:]) * part.dtype.itemsize // itemsize for part in like]
    return [
        (flat if flat.dtype == part.dtype else flat.contiguous().view(part.dtype)).unflatten(
            -1, part.shape[-2:]
        )
        for flat, part in zip(packed.split(widths, dim=-1), like, strict=True)
    ]


def _narrowest(parts: Sequence[Tensor]) -> torch.dtype:
    return min((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: PositionExchange, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return _send_heads(exchange, parts, is_backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_send_positions(ctx.exchange, gradients, is_backward=True)


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: PositionExchange, part: Tensor) -> Tensor:
        ctx.exchange = exchange
        return _send_positions(exchange, (part,), is_backward=False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_send_heads(ctx.exchange, (gradient,), is_backward=True)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: PositionExchange, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        own = [part.transpose(0, 1) for part in parts]  # [seq / ranks, batch, heads, dim]
        gathered = exchange.all_gather(_packed(own), is_backward=False).flatten(0, 1)
        return tuple(part.transpose(0, 1) for part in _unpacked(gathered, own))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        whole = [part.transpose(0, 1) for part in gradients]  # [seq, batch, heads, dim]
        sent = _packed(whole).unflatten(0, (exchange.part.size, -1))
        received = exchange.all_to_all(sent, is_backward=True)
        wide = torch.promote_types(sent.dtype, torch.float32)
        own = received.sum(0, dtype=wide).to(sent.dtype)
        return None, *(part.transpose(0, 1) for part in _unpacked(own, whole))


class _Total(torch.autograd.Function):
    """The sum over ranks, and in backward the sum of the gradients of all ranks' losses."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _summed(gradient, ctx.group), None


def _summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    summed = tensor.clone(memory_format=torch.contiguous_format)
    with issuing("all-reduce over ranks that divide sequences", summed):
        dist.all_reduce(summed, group=group)
    return summed
