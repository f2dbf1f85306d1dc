"""Whether the chunks of a checkpoint's tensors tile them: no gap, no overlap, nothing outside.

[Note: coverage] That boxes tile a tensor exactly is proven by their corners, in one pass for any
number of dimensions. A box [a, b) is what remains of +1 at a and -1 at b, summed up from the left;
a box in d dimensions has 2^d such corners, +1 and -1 by turns. Corners of neighbours cancel. What
is left of all chunks is exactly the corners of the tensor if and only if the chunks cover each
element once:

    0       4     6       9          chunks [0, 4), [4, 6), [6, 9) of [0, 9)
    +1     -1
           +1    -1
                 +1      -1
    -1                   +1          the tensor's own, subtracted: nothing is left

The first corner that is left over, in the order of rows, is an element that is covered not once:
its number says whether too rarely (-1) or too often.
"""

from __future__ import annotations

import itertools
import math
from typing import NoReturn

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import Metadata

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError

# Sizes of 1 for those of 0: torch cannot count more, not even in a tensor that has no elements.
_MAX_ELEMENTS = 1 << 59
_MAX_CUT_DIMS = 8  # a box cut along so many dimensions has 256 corners


def check_coverage(metadata: Metadata, source: str) -> None:
    """Proves that the chunks of every tensor tile it exactly, and that it is known where each blob
    lies.

    Raises:
        CheckpointDamagedError: for a chunk outside of its tensor, an element that lies in no chunk
            or in several, or a chunk or plain value without a place in a file; with the key and the
            place.
    """
    stored = {(index.fqn, index.offset) for index in metadata.storage_data}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, dcp.TensorStorageMetadata):
            _check_tiling(key, entry, source)
            needed: list[torch.Size | None] = [chunk.offsets for chunk in entry.chunks]
        else:
            needed = [None]
        for offsets in needed:
            if (key, offsets) not in stored:
                place = "" if offsets is None else f" at {tuple(offsets)}"
                raise CheckpointDamagedError(
                    f"Expected {source} to say where {key}{place} is stored, got no place."
                )


def _check_tiling(key: str, tensor: dcp.TensorStorageMetadata, source: str) -> None:
    """Proves that the chunks are a tiling. See [Note: coverage]."""
    if math.prod(max(size, 1) for size in tensor.size) > _MAX_ELEMENTS:
        raise CheckpointDamagedError(
            f"Expected {key} in {source} to have at most {_MAX_ELEMENTS} elements, got "
            f"{tuple(tensor.size)}."
        )
    cut_dims = _cut_dims(key, tensor, source)
    if 0 in tensor.size:
        return
    signs = [math.prod(choice) for choice in itertools.product((1, -1), repeat=len(cut_dims))]
    own_corners = itertools.product(*((0, tensor.size[dim]) for dim in cut_dims))
    left = {corner: -sign for corner, sign in zip(own_corners, signs, strict=True)}
    for chunk in tensor.chunks:
        offsets, sizes = chunk.offsets, chunk.sizes
        corners = itertools.product(
            *[(offsets[dim], offsets[dim] + sizes[dim]) for dim in cut_dims]
        )
        for corner, sign in zip(corners, signs, strict=True):
            left[corner] = left.get(corner, 0) + sign
    wrong = min((corner for corner, number in left.items() if number), default=None)
    if wrong is not None:
        place = [0] * len(tensor.size)
        for dim, offset in zip(cut_dims, wrong, strict=True):
            place[dim] = offset
        raise CheckpointDamagedError(
            f"Expected each element of {key} in one chunk in {source}, got the one at "
            f"{tuple(place)} in "
            f"{left[wrong] + 1}."
        )


def _cut_dims(key: str, tensor: dcp.TensorStorageMetadata, source: str) -> list[int]:
    """The dimensions that not every chunk has all of. CheckpointDamagedError for a chunk that is
    not in the tensor.
    """
    shape = tuple(tensor.size)
    cut_dims: set[int] = set()
    for chunk in tensor.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            _fail_outside(key, shape, chunk, source)
        for dim, size in enumerate(chunk.sizes):
            if size != shape[dim]:
                cut_dims.add(dim)
            if chunk.offsets[dim] + size > shape[dim]:
                _fail_outside(key, shape, chunk, source)
    if len(cut_dims) > _MAX_CUT_DIMS:
        raise CheckpointDamagedError(
            f"Expected {key} in {source} to be cut along at most {_MAX_CUT_DIMS} dimensions, got "
            f"{len(cut_dims)}."
        )
    return sorted(cut_dims)


def _fail_outside(
    key: str, shape: tuple[int, ...], chunk: dcp.ChunkStorageMetadata, source: str
) -> NoReturn:
    raise CheckpointDamagedError(
        f"Expected chunks of {key} inside {shape} in {source}, got {tuple(chunk.sizes)} at "
        f"{tuple(chunk.offsets)}."
    )
