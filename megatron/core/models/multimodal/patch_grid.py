"""Patches of an image: their order, and the position of each.

Patches come in the order in which the projector takes them together: the blocks of `merge` x
`merge` patches row by row, and within a block its patches row by row. For a grid of 2 rows and 4
columns, merged by 2:

    patch     0 1 2 3   4 5 6 7
    row       0 0 1 1   0 0 1 1
    column    0 1 0 1   2 3 2 3
    token     0         1

All of it is computed on the host and depends on the grid alone, so it is kept for the grids that
come again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.core.log import counted

_KEPT_GRIDS = 1024


class PatchGrid(NamedTuple):
    """How many patches an image has: in time, one below the other, and side by side."""

    frames: int
    rows: int
    columns: int

    @property
    def num_patches(self) -> int:
        return self.frames * self.rows * self.columns

    def check(self, merge: int) -> None:
        """ValueError unless the rows and columns are whole blocks."""
        if min(self) < 1 or self.rows % merge or self.columns % merge:
            raise ValueError(
                f"Expected a grid of patches with rows and columns in multiples of {merge}, "
                f"got {tuple(self)}."
            )


class PatchPlaces(NamedTuple):
    """Positions of the patches of images, on the host.

    Attributes:
        rows, columns: [patches] int64.
        taps: [patches, 4] int64, the learned positions around each in their grid.
        tap_weights: [patches, 4] fp32, factors of the taps.
    """

    rows: Tensor
    columns: Tensor
    taps: Tensor
    tap_weights: Tensor


def patch_places(grids: Sequence[PatchGrid], merge: int, side: int) -> PatchPlaces:
    """The places of all patches of images.

    Args:
        side: the learned positions are a grid of `side` x `side`.

    Raises:
        ValueError: for a grid that cannot be merged.
    """
    places = [_places_of_grid(grid, merge, side) for grid in grids]
    return PatchPlaces(*(torch.cat(parts) for parts in zip(*places, strict=True)))


@lru_cache(_KEPT_GRIDS)
def _places_of_grid(grid: PatchGrid, merge: int, side: int) -> PatchPlaces:
    grid.check(merge)
    rows, columns = torch.meshgrid(
        torch.arange(grid.rows), torch.arange(grid.columns), indexing="ij"
    )
    rows, columns = (_in_blocks(part, merge) for part in (rows, columns))

    low_row, high_row, row_share = _between(rows, grid.rows, side)
    low_column, high_column, column_share = _between(columns, grid.columns, side)
    taps = torch.stack(
        [
            row * side + column
            for row in (low_row, high_row)
            for column in (low_column, high_column)
        ],
        dim=-1,
    )
    weights = torch.stack(
        [
            row * column
            for row in (1 - row_share, row_share)
            for column in (1 - column_share, column_share)
        ],
        dim=-1,
    )
    one_frame = (rows, columns, taps, weights)
    return PatchPlaces(*(torch.cat([part] * grid.frames) for part in one_frame))


def _in_blocks(of_patches: Tensor, merge: int) -> Tensor:
    """[rows, columns] -> [patches], in the order of patches."""
    rows, columns = of_patches.shape
    blocks = of_patches.reshape(rows // merge, merge, columns // merge, merge)
    return blocks.transpose(1, 2).flatten()


def _between(indices: Tensor, size: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where points of an axis of `size` fall on one of `side`, whose ends are the same: the points
    before and behind, and the share of the one behind.
    """
    # The product before the quotient: the last point of an axis then falls on the last one.
    places = indices.float() * (side - 1) / max(size - 1, 1)
    low = places.long().clamp(max=side - 1)
    return low, (low + 1).clamp(max=side - 1), places - low


def decoder_positions(
    tokens: NDArray[np.integer], image_token: int, grids: Sequence[PatchGrid], merge: int
) -> NDArray[np.int64]:
    """The positions of a document's tokens: in time, of rows and of columns.

    Text counts up by one in all three. The tokens of an image have the time of the position where
    it starts, and count its rows and columns from there; the text behind it continues where the
    longer of the two ends (Wang et al. 2024, arXiv:2409.12191).

    Args:
        tokens: [tokens], with `image_token` instead of each merged block of patches.
        grids: of the images, in their order, each of one frame.

    Returns:
        [3, tokens].

    Raises:
        ValueError: the places of images in the text differ from the grids', or an image has
            more than one frame.
    """
    positions = np.empty((3, len(tokens)), np.int64)
    is_image = np.asarray(tokens) == image_token
    given = sum(grid.num_patches for grid in grids) // merge**2
    if int(is_image.sum()) != given:
        raise ValueError(
            f"Expected {given} tokens for the patches of {counted(len(grids), 'image')}, got "
            f"{int(is_image.sum())}."
        )

    start = position = 0
    for grid in grids:
        grid.check(merge)
        if grid.frames != 1:
            raise ValueError(f"Expected images of one frame, got {grid.frames}.")
        rows, columns = grid.rows // merge, grid.columns // merge
        begin = start + int(np.argmax(is_image[start:]))
        stop = begin + rows * columns
        if not is_image[begin:stop].all():
            raise ValueError(
                f"Expected {rows * columns} tokens of an image one behind the other from token "
                f"{begin} on, got text between them."
            )

        positions[:, start:begin] = np.arange(position, position + begin - start)
        position += begin - start
        positions[0, begin:stop] = position
        positions[1, begin:stop] = position + np.repeat(np.arange(rows), columns)
        positions[2, begin:stop] = position + np.tile(np.arange(columns), rows)
        position += max(rows, columns)
        start = stop
    positions[:, start:] = np.arange(position, position + len(tokens) - start)
    return positions
