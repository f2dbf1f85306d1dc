"""Pseudo-random order without a stored shuffle.

A shuffled index of n entries costs 8 n bytes on every process and a pass over all of them before
the first sample. `RandomPermutation` computes entry i when it is asked for: a Feistel network
permutes the 2^k numbers of the smallest sufficient power of two, and a result outside range(n) is
permuted again until it falls inside (cycle walking, fewer than two evaluations on average).

    shuffled = RandomPermutation(5, derive_key(1234, "documents", 0))
    [shuffled(i) for i in range(5)]        # each of 0..4 once
    shuffled(np.arange(5))                 # the same numbers as one array
"""

from __future__ import annotations

import json
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import xxhash

_MASK_64 = (1 << 64) - 1
_NUM_ROUNDS = 6
# Few enough values that all the scratch arrays stay in the second-level cache, enough to hide
# numpy's cost per call.
_CHUNK = 1 << 15
_MAX_SIZE = 1 << 62  # positions are int64
# Up to this size the shuffle is stored after all: over a handful of bits, a network yields some
# orders far more often than others.
_TABLE_SIZE = 256


def derive_key(*parts: int | str) -> int:
    """A 64-bit key that depends on every part, its type and its place: `derive_key(seed,
    "documents", epoch)`.
    """
    return xxhash.xxh3_64_intdigest(json.dumps(parts, separators=(",", ":")).encode())


def mix64(values: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """A well mixed 64-bit number per value, for counter-based random draws: uint64 [n] -> uint64
    [n].

    The finalizer of SplitMix64 (Steele, Lea, Flood 2014) over `key + value * golden gamma`.
    """
    mixed: npt.NDArray[np.uint64] = values * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
        key & _MASK_64
    )
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


class RandomPermutation:
    """A bijection of range(size) chosen by `key`; a pure function that holds at most a few hundred
    integers.

    Args:
        size: number of positions, 1 to 2^62.
        key: 64 bits, as `derive_key` gives them.

    Raises:
        ValueError: a size out of these bounds.
    """

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size <= _MAX_SIZE:
            raise ValueError(f"Expected a size from 1 to 2^62, got {size}.")
        self.size = size
        self._table: npt.NDArray[np.int64] | None = None
        if size <= _TABLE_SIZE:
            self._table = np.argsort(
                mix64(np.arange(size, dtype=np.uint64), key), kind="stable"
            ).astype(np.int64)
            return

        bits = (size - 1).bit_length()
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits
        words = mix64(np.arange(3 * _NUM_ROUNDS, dtype=np.uint64), key).astype(np.uint32)
        # Per round: an addend and two odd multipliers.
        self._rounds = [
            (a, b | np.uint32(1), c | np.uint32(1)) for a, b, c in words.reshape(_NUM_ROUNDS, 3)
        ]

    def __len__(self) -> int:
        return self.size

    @overload
    def __call__(self, positions: int) -> int: ...
    @overload
    def __call__(self, positions: npt.NDArray[Any]) -> npt.NDArray[np.int64]: ...
    def __call__(self, positions: int | npt.NDArray[Any]) -> int | npt.NDArray[np.int64]:
        """Where the positions go: an int for an int, int64 [n] for an integer array [n].

        Raises:
            IndexError: a position outside range(size).
        """
        if not isinstance(positions, np.ndarray):
            return int(self(np.array([positions], dtype=np.int64))[0])
        if positions.size and (int(positions.min()) < 0 or int(positions.max()) >= self.size):
            raise IndexError(
                f"Expected positions in range({self.size}), got {positions.min()} to "
                f"{positions.max()}."
            )

        if self._table is not None:
            return self._table.take(positions)
        permuted = positions.astype(np.uint64)
        for begin in range(0, len(permuted), _CHUNK):
            self._walk(permuted[begin : begin + _CHUNK])
        return permuted.view(np.int64)

    def _walk(self, values: npt.NDArray[np.uint64]) -> None:
        """Permutes `values` in place until each is in range(size)."""
        size = np.uint64(self.size)
        self._permute_domain(values)
        outside = np.flatnonzero(values >= size)
        while outside.size:
            again = values[outside]
            self._permute_domain(again)
            values[outside] = again
            outside = outside[again >= size]

    def _permute_domain(self, values: npt.NDArray[np.uint64]) -> None:
        """One pass through the network over the 2^bits numbers, in place.

        The halves differ by one bit where the number of bits is odd: each round changes one half by
        a function of the other, which is invertible whatever their widths.
        """
        low_bits = np.uint64(self._low_bits)
        high = (values >> low_bits).astype(np.uint32)
        low = (values & ((np.uint64(1) << low_bits) - np.uint64(1))).astype(np.uint32)
        mixed = np.empty_like(low)
        scratch = np.empty_like(low)
        for number, (addend, first, second) in enumerate(self._rounds):
            source, target, bits = (
                (low, high, self._high_bits) if number % 2 == 0 else (high, low, self._low_bits)
            )
            # A product's upper bits depend on all lower bits of its factor: two products with the
            # upper half folded down in between let every bit of the source reach every bit that is
            # kept, the topmost ones.
            np.add(source, addend, out=mixed)
            np.multiply(mixed, first, out=mixed)
            np.right_shift(mixed, np.uint32(16), out=scratch)
            np.bitwise_xor(mixed, scratch, out=mixed)
            np.multiply(mixed, second, out=mixed)
            np.right_shift(mixed, np.uint32(32 - bits), out=mixed)
            np.bitwise_xor(target, mixed, out=target)

        np.left_shift(high, low_bits, out=values, dtype=np.uint64)
        np.bitwise_or(values, low, out=values)
