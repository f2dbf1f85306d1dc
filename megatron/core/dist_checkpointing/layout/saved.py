"""The tensors of a checkpoint: their chunks, the offsets of these in files, and proof that they
tile the tensors.

    box         a hyper-rectangle of a tensor (boxes.py)
    holding     a box, and the ranks that hold it (holdings.py)
    chunk       a box that one rank writes to one place in one file
    blob        what `torch.save` makes of a chunk in a `.distcp` file: data in a frame (blob.py)
    block       256 KiB of a chunk's data; each has a digest

Plain data is a tensor of bytes: the blob that `torch.save` makes of it, without a frame around it.

[Note: coverage] The corners of boxes prove that they tile a tensor exactly, in one pass for any
number of dimensions. In one dimension, write +1 at the start of each box and -1 at its end: the sum
from the left up to an element is the number of boxes that contain it. A box in d dimensions has 2^d
corners, alternately +1 and -1. Corners of neighbours cancel. Exactly the corners of the tensor are
left if and only if each element is in one chunk:

    0       4     6       9          chunks [0, 4), [4, 6), [6, 9) of [0, 9)
    +1     -1
           +1    -1
                 +1      -1
    -1                   +1          the tensor's own corners, subtracted: all are zero

The first corner that is left, in the order of rows, is an element that is not in one chunk. Its sum
plus 1 is the number of chunks that contain it.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, overload

import torch

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, few
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.holdings import Division

logger = logging.getLogger(__name__)

# "optimizer." in our checkpoints and Megatron-FSDP's; most programs save "optim." with DCP.
_STATE_KEY = re.compile(r"optim(?:izer)?\.state\.(.+)", re.DOTALL)


class SavedChunk(NamedTuple):
    """A box of a tensor in a file of a checkpoint. Its elements are stored row by row."""

    box: Box
    rank: int  # that writes it; -1 if unknown, in files of other programs
    file: str  # in the checkpoint's directory
    offset: int  # bytes from the beginning of the file to the data


class ChunkColumns(Sequence[SavedChunk]):
    """Chunks that take the memory of their offsets, as most tensors are divided like others."""

    def __init__(self, division: Division, offsets: Sequence[int]) -> None:
        self.division = division
        self.offsets = offsets

    @classmethod
    def of(cls, chunks: Sequence[SavedChunk]) -> ChunkColumns:
        """The same chunks."""
        if isinstance(chunks, ChunkColumns):
            return chunks
        *columns, offsets = map(list, zip(*chunks, strict=True)) if chunks else ([], [], [], [])
        return cls(Division(*columns), offsets)

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, number: int) -> SavedChunk: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[SavedChunk]: ...
    def __getitem__(self, number: int | slice) -> SavedChunk | Sequence[SavedChunk]:
        if isinstance(number, slice):
            return list(self)[number]
        boxes, ranks, files = self.division
        return SavedChunk(boxes[number], ranks[number], files[number], self.offsets[number])

    def __iter__(self) -> Iterator[SavedChunk]:
        return map(SavedChunk, *self.division, self.offsets)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


class SavedTensor(NamedTuple):
    """A tensor, and all of its chunks on all ranks."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Sequence[SavedChunk]

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return Box.whole(self.shape).numel * self.dtype.itemsize

    def chunk_nbytes(self, chunk: SavedChunk) -> int:
        """Of the data of one of its chunks."""
        return chunk.box.numel * self.dtype.itemsize


def differences(
    saved: SavedTensor, shape: tuple[int, ...], dtype: torch.dtype, *, may_round: bool = False
) -> list[str]:
    """How a saved tensor differs from the one it is to be loaded into, each as a clause. A dtype
    that represents every saved value is no difference.

    Args:
        may_round: whether any floating-point dtype will do for floating-point values.
    """
    found = []
    if saved.shape != shape:
        found.append(f"{saved.key} has shape {saved.shape} where the model has {shape}")
    is_loadable = (
        may_round and saved.dtype.is_floating_point and dtype.is_floating_point
    ) or not is_rounded(saved.dtype, dtype)
    if not is_loadable:
        found.append(f"{saved.key} is {saved.dtype} where the model has {dtype}")
    return found


def is_rounded(saved: torch.dtype, own: torch.dtype) -> bool:
    """Whether `own` cannot represent every value of `saved`."""
    if saved == own:
        return False
    if not (saved.is_floating_point and own.is_floating_point):
        return True
    narrow, wide = torch.finfo(saved), torch.finfo(own)
    return not (
        wide.eps <= narrow.eps
        and wide.max >= narrow.max
        and wide.smallest_normal <= narrow.smallest_normal
    )


class FrozenChanges(NamedTuple):
    """How the set of frozen parameters differs from that of the run that saved.

    Attributes:
        fresh: keys of optimizer states that the checkpoint lacks, by the name of a parameter of
            which it has none.
        left_out: keys of optimizer states in the checkpoint, by the name of a parameter that has
            none here.
        rounded: keys of frozen weights that are saved in a wider dtype than they have here.
    """

    fresh: Mapping[str, list[str]]
    left_out: Mapping[str, list[str]]
    rounded: Collection[str]

    @classmethod
    def of(
        cls, own: Collection[str], saved: Collection[str], names: Collection[str]
    ) -> FrozenChanges:
        """Compares the keys of optimizer states. A checkpoint without any was saved without its
        optimizer, and an optimizer without any keeps none: that is no change.

        Args:
            own, saved: the keys here and in the checkpoint.
            names: of the parameters whose weights are in both.
        """
        known = set(names)
        own_states, saved_states = _states_by_name(own, known), _states_by_name(saved, known)
        if not own_states or not saved_states:
            return cls({}, {}, [])
        return cls(
            {name: keys for name, keys in own_states.items() if name not in saved_states},
            {name: keys for name, keys in saved_states.items() if name not in own_states},
            [],
        )

    @property
    def fresh_keys(self) -> set[str]:
        return {key for keys in self.fresh.values() for key in keys}

    @property
    def left_out_keys(self) -> set[str]:
        return {key for keys in self.left_out.values() for key in keys}

    def log(self) -> None:
        """Logs a line for each kind of change."""
        fresh = (
            "%d parameters start with fresh optimizer states, since they were frozen when the "
            "checkpoint was saved: %s"
        )
        left_out = (
            "the optimizer states of %d parameters are left out, since they are frozen now: %s"
        )
        rounded = "%d frozen weights are rounded to the dtype in which frozen weights are kept: %s"

        for message, names in zip((fresh, left_out, rounded), self, strict=True):
            if names:
                logger.info(message, len(names), few(list(names)))


def _states_by_name(keys: Collection[str], names: Collection[str]) -> dict[str, list[str]]:
    """The keys of optimizer states, by the parameter that they belong to."""
    found: dict[str, list[str]] = {}
    for key in keys:
        match = _STATE_KEY.fullmatch(key)
        parts = match[1].split(".") if match is not None else []
        for length in range(len(parts) - 1, 0, -1):
            if (name := ".".join(parts[:length])) in names:
                found.setdefault(name, []).append(key)
                break
    return found


# With sizes of 0 counted as 1: torch overflows beyond this even in a tensor without elements.
_MAX_ELEMENTS = 1 << 59
_MAX_CUT_DIMS = 8  # a box cut along so many dimensions has 256 corners


def check_coverage(tensors: Iterable[SavedTensor], source: str) -> None:
    """Proves that the chunks of every tensor tile it. See [Note: coverage].

    Raises:
        CheckpointDamagedError: naming the key and the place, for a chunk outside of its tensor, and
            for an element in no chunk or in several.
    """
    # With the divisions themselves, whose ids no other objects have while they exist.
    proven: dict[tuple[int, tuple[int, ...]], Division] = {}
    for tensor in tensors:
        division = ChunkColumns.of(tensor.chunks).division
        if (id(division), tensor.shape) not in proven:
            _check_tiling(tensor, source)
            proven[id(division), tensor.shape] = division


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
