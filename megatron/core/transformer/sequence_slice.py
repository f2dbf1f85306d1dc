"""Context parallelism as a model sees it: the part of each sequence that one rank computes, and how
mixers reach the positions of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class SequenceSlice:
    """One of `size` equal parts of consecutive positions, the one with the number `rank`.

    Attributes:
        total: sums a tensor over the ranks that have the parts of the same sequences. The gradient
            is that of the sum of all ranks' losses. All of them call it together.
    """

    rank: int
    size: int
    total: Callable[[Tensor], Tensor]

    def of_rank(self, length: int) -> range:
        """The positions in the sequence of a part of this length."""
        return range(self.rank * length, (self.rank + 1) * length)

    def cut(self, tensor: Tensor) -> Tensor:
        """This part of a tensor [..., seq].

        Raises:
            ValueError: the sequence cannot be divided equally.
        """
        length, remainder = divmod(tensor.shape[-1], self.size)
        if remainder:
            raise ValueError(
                f"Expected sequences that {self.size} ranks can divide equally, got "
                f"{tensor.shape[-1]} positions."
            )
        return tensor.narrow(-1, self.of_rank(length).start, length).contiguous()


class ContextExchange(Protocol):
    """How a mixer reaches the positions of other ranks. Each rank has a slice of each row, in the
    order of the ranks, all of one length. All ranks call it in the same order.

    Attributes:
        part: this rank's slice.
        gathers: whether mixers compute slices of all heads, and gather keys, values or states of
            other slices; otherwise they exchange slices for whole rows of some heads.
    """

    part: SequenceSlice
    gathers: bool

    def to_heads(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Turns slices of all heads into whole rows of some heads. Differentiable.

        Args:
            parts: [batch, seq / ranks, heads, dim] each. Numbers of heads and dims may differ, and
                dtypes. Where ranks do not divide the heads, `own` selects the heads of a rank.

        Returns:
            [batch, seq, heads of this rank, dim] each.
        """

    def to_positions(self, part: Tensor) -> Tensor:
        """The reverse for one part: [batch, seq, heads / ranks, dim] -> [batch, seq / ranks, heads,
        dim]. Differentiable.
        """

    def own(self, per_head: Tensor) -> Tensor:
        """The rows of [heads, ...] that belong to the heads that `to_heads` gives to this rank.

        Of 8 heads on 4 ranks these are two. Of 2 heads each goes to two ranks, which need it for
        different query heads.
        """

    def gather(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """The positions of all ranks: [batch, seq / ranks, heads, dim] each, of one dtype ->
        [batch, seq, heads, dim]. Differentiable.
        """

    def all_gather(self, sent: Tensor, *, is_backward: bool) -> Tensor:
        """The tensor of each rank, [ranks, ...], in forward or in backward. Not differentiable."""
