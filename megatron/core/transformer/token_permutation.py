"""Tokens in the order of their experts, and back.

Each token is there as often as it has experts. Two tokens, of which the first chose experts 2 and 0
and the second 1 and 2:

    choices of tokens [2, 2]       places in it: 0 1     experts there: 2 0
                                                 2 3                    1 2
    sorted by expert:              1 2 0 3       experts 0 1 2 2, tokens 0 1 0 1
    where each choice has gone:    2 0
                                   1 3

Both ways gather, forward and backward: no two threads add to one place, so results
are the same bits each time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.transformer.spec import DropPolicy

# Elements that the CPU multiplies and adds up at once, so that they stay in a core's cache.
_CACHED_NUMEL = 1 << 17


class TokenOrder(NamedTuple):
    """The choices of a microbatch's tokens, sorted by expert.

    Attributes:
        choices: places in the flattened choices, in the order of experts, then of tokens: [kept]
            int64.
        places: where each choice is in `choices`; 0 for dropped ones: [tokens, top_k] int64.
        is_kept: [tokens, top_k] bool; None: all are kept.
        counts: tokens of each expert: [experts] int64.
    """

    choices: Tensor
    places: Tensor
    is_kept: Tensor | None
    counts: Tensor

    @property
    def tokens(self) -> Tensor:
        """The token of each choice: [kept] int64."""
        return self.choices // self.places.shape[1]


def order_by_expert(experts: Tensor, load: Tensor) -> TokenOrder:
    """The order in which no choice is dropped.

    Args:
        experts: that each token chose: [tokens, top_k] int64.
        load: tokens of each expert: [all experts] int64.
    """
    choices = experts.flatten().int().argsort(stable=True)
    places = places_of(choices, len(choices))
    return TokenOrder(choices, places.view_as(experts), None, load)


def order_within_capacity(
    experts: Tensor, load: Tensor, capacity: int, policy: DropPolicy, weights: Tensor
) -> TokenOrder:
    """The order in which no expert has more than `capacity` tokens. Of equal weights the first ones
    are kept. The host waits for the number of choices that are.

    Args:
        experts, load: as for `order_by_expert`.
        weights: of the choices: [tokens, top_k].
    """
    flat = experts.flatten().int()
    if policy is DropPolicy.PROBS:
        by_weight = weights.detach().flatten().argsort(descending=True, stable=True)
        choices = by_weight[flat[by_weight].argsort(stable=True)]
    else:
        choices = flat.argsort(stable=True)

    # How many choices of its expert come before each one.
    starts = load.cumsum(0) - load
    rank = torch.arange(len(choices), device=choices.device) - starts[flat[choices]]
    kept = choices[rank < capacity]

    places = places_of(kept, len(choices))
    is_kept = torch.zeros_like(choices, dtype=torch.bool).index_fill_(0, kept, True)
    return TokenOrder(
        kept, places.view_as(experts), is_kept.view_as(experts), load.clamp(max=capacity)
    )


def places_of(order: Tensor, size: int) -> Tensor:
    """The inverse of an order: for each of `size` rows its place there, 0 for a row left out.

    Args:
        order: the rows that are kept, each once: [rows kept] int64.
        size: rows before any was left out.

    Returns:
        [size] int64.
    """
    here = torch.arange(len(order), device=order.device)
    return order.new_zeros(size).scatter_(0, order, here)


def permute_tokens(tokens: Tensor, order: TokenOrder) -> Tensor:
    """[tokens, hidden] -> [kept, hidden]: the tokens of the choices, by expert."""
    apply: Any = _Permute.apply  # torch declares it without types
    permuted: Tensor = apply(tokens, order)
    return permuted


def combine_tokens(outputs: Tensor, weights: Tensor, order: TokenOrder) -> Tensor:
    """[kept, hidden] -> [tokens, hidden]: of each token, the weighted sum over its choices. Dropped
    ones have no part in it; the weights of the others stay as they are.

    Args:
        outputs: the experts' results for the permuted tokens.
        weights: [tokens, top_k], in any dtype; the outputs' dtype is the one of the computation.
    """
    apply: Any = _Combine.apply
    combined: Tensor = apply(outputs, weights, order)
    return combined


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: TokenOrder) -> Tensor:
        ctx.order = order
        return tokens.index_select(0, order.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        order: TokenOrder = ctx.order
        return _sum_choices(grad, order, None), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, order: TokenOrder) -> Tensor:
        ctx.save_for_backward(outputs, weights)
        ctx.order = order
        return _sum_choices(outputs, order, weights.to(outputs.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        outputs, weights = ctx.saved_tensors
        order: TokenOrder = ctx.order
        grad_weights = None
        rows = grad.index_select(0, order.tokens)

        if ctx.needs_input_grad[1]:
            dots = _row_dots(rows, outputs, weights.dtype)
            grad_weights = weights.new_zeros(weights.numel()).scatter_(0, order.choices, dots)
            grad_weights = grad_weights.view_as(weights)

        chosen = weights.flatten().index_select(0, order.choices)
        return rows.mul_(chosen.to(rows.dtype)[:, None]), grad_weights, None


def _sum_choices(rows: Tensor, order: TokenOrder, weights: Tensor | None) -> Tensor:
    """[kept, hidden] -> [tokens, hidden], times `weights` [tokens, top_k] if any. Summed
    in fp32. Dropped choices are left out: zero times a row that is not finite would be NaN.
    """
    if not len(rows):
        return rows.new_zeros(len(order.places), rows.shape[1])
    is_kept = order.is_kept
    if rows.device.type == "cpu":
        # Adds rows up in place, ten times as fast as with a tensor of all of them.
        if is_kept is None:
            return F.embedding_bag(order.places, rows, per_sample_weights=weights, mode="sum")
        sizes = is_kept.sum(1)
        return F.embedding_bag(
            order.places[is_kept],
            rows,
            sizes.cumsum(0) - sizes,
            per_sample_weights=None if weights is None else weights[is_kept],
            mode="sum",
        )

    chosen = rows.index_select(0, order.places.flatten()).unflatten(0, order.places.shape)
    if weights is not None:
        chosen.mul_(weights[..., None])
    if is_kept is not None:
        chosen.masked_fill_(~is_kept[..., None], 0)
    # With a dtype given, autocast does not choose one.
    total: Tensor = chosen.sum(1, dtype=rows.dtype)
    return total


def _row_dots(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The dot product of each row of one with that of the other, summed in `dtype`: [rows]."""
    dots = a.new_empty(len(a), dtype=dtype)
    step = max(1, _CACHED_NUMEL // max(1, a.shape[1])) if a.device.type == "cpu" else len(a)
    for x, y, out in zip(*(t.split(max(1, step)) for t in (a, b, dots)), strict=True):
        torch.sum(x * y, -1, dtype=dtype, out=out)
    return dots
