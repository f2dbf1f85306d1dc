"""Context parallelism as layers see it: ranks that have the positions of each row in slices."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ContextExchange(Protocol):
    """How a mixer reaches the positions of other ranks. Each rank has a slice of each row, in the
    order of the ranks, all of one length. Differentiable; all ranks call it in the same order.

    Attributes:
        rank: number of this rank's slice.
        gathers_keys: whether attention gathers keys and values, where it would exchange heads.
    """

    rank: int
    gathers_keys: bool

    def to_heads(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Turns slices of all heads into whole rows of some heads.

        Args:
            parts: [batch, seq / ranks, heads, dim] each. Numbers of heads and dims may differ, and
                dtypes. Where ranks do not divide the heads, `own` says which ones a rank gets.

        Returns:
            [batch, seq, heads of this rank, dim] each.
        """

    def to_positions(self, part: Tensor) -> Tensor:
        """The reverse for one part: [batch, seq, heads / ranks, dim] -> [batch, seq / ranks, heads,
        dim].
        """

    def gather(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """The positions of all ranks: [batch, seq / ranks, heads, dim] each, of one dtype ->
        [batch, seq, heads, dim].
        """

    def own(self, per_head: Tensor) -> Tensor:
        """The rows of [heads, ...] that belong to the heads that `to_heads` gives to this rank.

        Of 8 heads on 4 ranks these are two. Of 2 heads each goes to two ranks, which need it for
        different query heads.
        """
