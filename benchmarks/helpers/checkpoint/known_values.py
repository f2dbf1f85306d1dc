"""Values that each place of a tensor is known to have, so that a load can be checked."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

PIECE = 1 << 20  # elements that are made or checked at a time


class Part(NamedTuple):
    """A rank's rows of a tensor."""

    key: str
    begin: int  # elements before it in the whole tensor
    values: torch.Tensor  # fp32


def pattern(part: Part, start: int, stop: int) -> torch.Tensor:
    """What belongs at these elements of a part: positive numbers about 0.01, as bits."""
    places = torch.arange(part.begin + start, part.begin + stop, dtype=torch.int32)
    return (
        places.mul_(-1640531527)
        .add_(zlib.crc32(part.key.encode()) & 0xFFFFFF)
        .bitwise_and_(0x7FFFFF)
        .add_(0x3C000000)
    )


def pieces(part: Part) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The memory of a part as bits, and what belongs there."""
    bits = part.values.detach().view(torch.int32).view(-1)
    for start in range(0, bits.numel(), PIECE):
        stop = min(start + PIECE, bits.numel())
        yield bits[start:stop], pattern(part, start, stop)


def fill(parts: Sequence[Part]) -> None:
    """Writes into every place what belongs there."""
    for part in parts:
        for bits, wanted in pieces(part):
            bits.copy_(wanted)


def clear(parts: Sequence[Part]) -> None:
    for part in parts:
        part.values.detach().zero_()


def check(parts: Sequence[Part]) -> None:
    """Raises RuntimeError if a value has changed."""
    for part in parts:
        for bits, wanted in pieces(part):
            if not torch.equal(bits, wanted):
                raise RuntimeError(
                    f"Expected the values that were saved in {part.key}, got others."
                )
