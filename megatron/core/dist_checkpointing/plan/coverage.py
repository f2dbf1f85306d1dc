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
from typing import NoReturn

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import Metadata

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError

# With sizes of 0 counted as 1: torch overflows beyond this even in a tensor without elements.
_MAX_ELEMENTS = 1 << 59
_MAX_CUT_DIMS = 8  # a box cut along so many dimensions has 256 corners


def check_coverage(metadata: Metadata, source: str) -> None:
    """Proves that the chunks of every tensor tile it, and that every blob has a place in a file.

    Raises:
        CheckpointDamagedError: naming the key and the place, for a chunk outside of its tensor, an
            element in no chunk or in several, or a chunk or plain value without a place in a file.
    """
    # Looked up a hundred thousand times; hashing a `MetadataIndex` runs Python code.
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

    # Corners matter only in the dimensions that are cut; mostly it is one.
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
            f"{tuple(place)} in {left[wrong] + 1}."
        )


def _cut_dims(key: str, tensor: dcp.TensorStorageMetadata, source: str) -> list[int]:
    """The dimensions along which chunks are cut. CheckpointDamagedError for a chunk outside."""
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
