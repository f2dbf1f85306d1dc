"""Tensor parallelism as layers see it: ranks that have parts of a layer's heads or channels.

The residual stream is divided by positions: each rank has [batch, seq / ranks, hidden], the ranks
in the order of the positions. A layer gathers all positions, computes its rank's heads or channels
of them, and scatters the sums:

    norm     [batch, seq / ranks, hidden]     the positions of this rank
    gather   [batch, seq, hidden]             all positions
    layer    [batch, seq, channels / ranks]   this rank's part of the channels
    scatter  [batch, seq / ranks, hidden]     the sum over the ranks, for the positions of this rank

Layers take the sizes of their parts from their weights. The loss is the same number on every rank.
So the gradient of a divided weight is complete on its rank, and the gradient of a weight that is
whole on every rank is the sum over the ranks.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megatron.core.transformer.fused_weight import Linear


class TensorExchange(Protocol):
    """How the ranks that divide a layer exchange positions and sums. All ranks call it in the same
    order.

    Attributes:
        rank: number of this rank's part, and of its positions.
    """

    rank: int
    num_ranks: int

    def gather(self, part: Tensor) -> Tensor:
        """The positions of all ranks: [batch, seq / ranks, channels] -> [batch, seq, channels].

        Backward scatters the gradients, which are sums.
        """

    def gather_linear(self, part: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A linear layer of the positions of all ranks: [batch, seq / ranks, in] -> [batch, seq,
        out]. Backward gathers them again, and only `part` is kept for it.
        """

    def scatter(self, sums: Tensor) -> Tensor:
        """The sum over the ranks for the positions of this one: [batch, seq, channels] -> [batch,
        seq / ranks, channels]. Added in fp32, or wider, and rounded once.

        Backward gathers the gradients.

        Raises:
            ValueError: the ranks cannot divide the positions equally.
        """

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, the same bits on each. The gradient is of this rank's part."""

    def maximum(self, tensor: Tensor) -> Tensor:
        """The maximum over the ranks, element by element. Not differentiable."""


def gathered_linear(layer: Linear, hidden: Tensor, exchange: TensorExchange | None) -> Tensor:
    """The output of a layer that has a part of the output channels, or all without an exchange.

    Args:
        hidden: [batch, seq / ranks, in].

    Returns:
        [batch, seq, out / ranks].
    """
    if exchange is None:
        return layer(hidden)  # type: ignore[no-any-return]
    if layer.recipe is not None:
        # The codes of all positions are kept for backward.
        return layer(exchange.gather(hidden))  # type: ignore[no-any-return]
    return exchange.gather_linear(hidden, layer.weight, layer.bias)


def scattered_linear(layer: Linear, inner: Tensor, exchange: TensorExchange | None) -> Tensor:
    """The output of a layer that has a part of the input channels, or all without an exchange.

    Args:
        inner: [batch, seq, in / ranks].

    Returns:
        [batch, seq / ranks, out].
    """
    if exchange is None:
        return layer(inner)  # type: ignore[no-any-return]
    output = exchange.scatter(layer.product(inner))
    return output if layer.bias is None else output + layer.bias


def own_rows(numbers: Tensor, num_rows: int, exchange: TensorExchange) -> tuple[Tensor, Tensor]:
    """The rows of this rank's part of a table for the rows' numbers in the whole table.

    Args:
        num_rows: of the part.

    Returns:
        numbers in the part, 0 for rows of other ranks; and whether each is a row of this rank.
        Numbers of no row are in no part either, so that an operator that reads the part rejects
        them as it does for the whole table.
    """
    is_outside = (numbers < 0) | (numbers >= num_rows * exchange.num_ranks)
    numbers = numbers - exchange.rank * num_rows
    is_own = (numbers >= 0) & (numbers < num_rows)
    return numbers.where(is_own, 0).where(~is_outside, num_rows), is_own
