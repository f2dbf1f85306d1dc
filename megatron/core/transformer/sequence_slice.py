"""The part of each sequence that one rank of context parallelism computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
