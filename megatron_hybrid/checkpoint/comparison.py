"""Compares two checkpoints key by key, in pieces: no whole tensor is in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megatron.core.dist_checkpointing.formats import (
    ReadableCheckpoint,
    pieces_of,
    read_piece,
)
from megatron.core.dist_checkpointing.layout.saved import SavedTensor

Outcome = Literal["equal", "values", "shape", "dtype", "kind", "only in A", "only in B"]


@dataclass(frozen=True)
class KeyComparison:
    """The difference of one key between A and B.

    Attributes:
        outcome: bit-equal, or the kind of difference; `kind`: a tensor in one and plain data in the
            other.
        num_different: the number of elements of a tensor that are not bit-equal.
        max_difference: the largest absolute difference of elements; infinity if one is not finite.
        detail: the two shapes, dtypes, or values of plain data.
    """

    key: str
    outcome: Outcome
    num_different: int = 0
    max_difference: float | None = None
    detail: str = ""


def compare(
    a: ReadableCheckpoint,
    b: ReadableCheckpoint,
    keys: Sequence[str],
    progress: Callable[[int], object],
) -> Iterator[KeyComparison]:
    """Compares two checkpoints under these keys, in order.

    Args:
        keys: keys of at least one checkpoint.
        progress: called with the number of bytes of each tensor of A when it is done.
    """
    ours, theirs = a.tensors, b.tensors
    for key in keys:
        if key not in ours and key not in a.plain:
            yield KeyComparison(key, "only in B")
        elif key in ours and key in theirs:
            yield _compare_tensor(a, b, key, ours[key], theirs[key], progress)
        elif key not in b.plain or key in ours:
            is_in_both = key in theirs or key in b.plain
            yield KeyComparison(key, "kind" if is_in_both else "only in A")
            progress(ours[key].nbytes if key in ours else 0)
        else:
            yield _compare_plain(key, a.read_plain(key), b.read_plain(key))


def _compare_tensor(
    a: ReadableCheckpoint,
    b: ReadableCheckpoint,
    key: str,
    ours: SavedTensor,
    theirs: SavedTensor,
    progress: Callable[[int], object],
) -> KeyComparison:
    if ours.shape != theirs.shape:
        progress(ours.nbytes)
        return KeyComparison(key, "shape", detail=f"{ours.shape} and {theirs.shape}")
    if ours.dtype != theirs.dtype:
        progress(ours.nbytes)
        return KeyComparison(key, "dtype", detail=f"{ours.dtype} and {theirs.dtype}")

    num_different, largest = 0, 0.0
    for box in pieces_of(ours):
        one_piece, other_piece = read_piece(a, key, box), read_piece(b, key, box)
        number, difference = _differences(one_piece, other_piece)
        num_different, largest = num_different + number, max(largest, difference)
        progress(one_piece.nbytes)
    if not num_different:
        return KeyComparison(key, "equal", 0, 0.0)
    return KeyComparison(key, "values", num_different, largest)


def _differences(one: torch.Tensor, other: torch.Tensor) -> tuple[int, float]:
    """Returns the number of elements that are not bit-equal, and the largest difference."""
    itemsize = one.element_size()
    bits = [tensor.reshape(-1).view(torch.uint8).reshape(-1, itemsize) for tensor in (one, other)]
    if torch.equal(*bits):
        return 0, 0.0

    differs = (bits[0] != bits[1]).any(dim=1)
    wide = torch.complex128 if one.is_complex() else torch.float64
    values = [tensor.reshape(-1)[differs].to(wide) for tensor in (one, other)]
    # A difference of infinities, or with a NaN, is NaN; bit-equal elements are left out.
    largest = (values[0] - values[1]).abs().nan_to_num(nan=math.inf, posinf=math.inf).max()
    return int(differs.sum()), float(largest)


def _compare_plain(key: str, one: object, other: object) -> KeyComparison:
    if _is_equal(one, other):
        return KeyComparison(key, "equal")
    return KeyComparison(key, "values", detail=f"{_shown(one)} and {_shown(other)}")


def _is_equal(one: object, other: object) -> bool:
    """Whether plain data, which may contain tensors, is equal. NaNs are equal to each other."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        is_alike = (one.shape, one.dtype) == (other.shape, other.dtype)
        return is_alike and _differences(one, other)[0] == 0
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and one == other


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]} ..."
