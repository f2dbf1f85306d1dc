"""Whether the chunks of a checkpoint's tensors tile them: no gap, no overlap, nothing outside.

[Note: coverage] Their corners prove that boxes tile a tensor exactly, in one pass for any number of
dimensions. The indicator of a box [a, b) is the running sum, from the left, of +1 at a and -1 at b;
a box in d dimensions has 2^d such corners, alternately +1 and -1. Corners of neighbours cancel. The
corners left over are exactly those of the tensor if and only if the chunks cover each element once:

    0       4     6       9          chunks [0, 4), [4, 6), [6, 9) of [0, 9)
    +1     -1
           +1    -1
                 +1      -1
    -1                   +1          the tensor's own, subtracted: nothing is left

The first corner left over, in the order of rows, is an element that is not covered once: its number
tells whether it is covered too rarely (-1) or too often.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.core.dist_checkpointing.layout.saved import SavedTensor

# With sizes of 0 counted as 1: torch overflows beyond this even in a tensor without elements.
_MAX_ELEMENTS = 1 << 59
_MAX_CUT_DIMS = 8  # a box cut along so many dimensions has 256 corners


def check_coverage(tensors: Iterable[SavedTensor], source: str) -> None:
    """Proves that the chunks of every tensor tile it. See [Note: coverage].

    Raises:
        CheckpointDamagedError: naming the key and the place, for a chunk outside of its tensor, and
            for an element in no chunk or in several.
    """
    for tensor in tensors:
        _check_tiling(tensor, source)


def _check_tiling(tensor: SavedTensor, source: str) -> None:
    key, shape = tensor.key, tensor.shape
    if math.prod(max(size, 1) for size in shape) > _MAX_ELEMENTS:
        raise CheckpointDamagedError(
            f"Expected {key} in {source} to have at most {_MAX_ELEMENTS} elements, got {shape}."
        )

    # Corners matter only in the dimensions that are cut; mostly it is one.
    cut_dims = _cut_dims(tensor, source)
    if 0 in shape:
        return
    signs = [math.prod(choice) for choice in itertools.product((1, -1), repeat=len(cut_dims))]
    own_corners = itertools.product(*((0, shape[dim]) for dim in cut_dims))
    left = {corner: -sign for corner, sign in zip(own_corners, signs, strict=True)}
    for chunk in tensor.chunks:
        offsets, sizes = chunk.box
        corners = itertools.product(
            *[(offsets[dim], offsets[dim] + sizes[dim]) for dim in cut_dims]
        )
        for corner, sign in zip(corners, signs, strict=True):
            left[corner] = left.get(corner, 0) + sign

    wrong = min((corner for corner, number in left.items() if number), default=None)
    if wrong is not None:
        place = [0] * len(shape)
        for dim, offset in zip(cut_dims, wrong, strict=True):
            place[dim] = offset
        raise CheckpointDamagedError(
            f"Expected each element of {key} in one chunk in {source}, got the one at "
            f"{tuple(place)} in {left[wrong] + 1}."
        )


def _cut_dims(tensor: SavedTensor, source: str) -> list[int]:
    """The dimensions along which chunks are cut. CheckpointDamagedError for a chunk outside."""
    shape = tensor.shape
    cut_dims: set[int] = set()
    for chunk in tensor.chunks:
        offsets, sizes = chunk.box
        is_inside = len(offsets) == len(sizes) == len(shape)
        for dim, size in enumerate(sizes if is_inside else ()):
            is_inside = is_inside and offsets[dim] + size <= shape[dim]
            if size != shape[dim]:
                cut_dims.add(dim)
        if not is_inside:
            raise CheckpointDamagedError(
                f"Expected chunks of {tensor.key} inside {shape} in {source}, got {sizes} at "
                f"{offsets}."
            )
    if len(cut_dims) > _MAX_CUT_DIMS:
        raise CheckpointDamagedError(
            f"Expected {tensor.key} in {source} to be cut along at most {_MAX_CUT_DIMS} "
            f"dimensions, got {len(cut_dims)}."
        )
    return sorted(cut_dims)
