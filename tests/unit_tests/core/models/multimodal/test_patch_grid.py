"""Positions of patches and tokens of images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.models.multimodal.patch_grid import PatchGrid, decoder_positions, patch_places

IMAGE = 9


def test_patches_come_block_by_block() -> None:
    places = patch_places([PatchGrid(1, 2, 4)], merge=2, side=4)
    assert places.rows.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert places.columns.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    twice = patch_places([PatchGrid(2, 2, 4)], merge=2, side=4)
    assert twice.rows.tolist() == places.rows.tolist() * 2, "each frame is like the first"


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.integers(2, 9), st.integers(0, 99)
)
def test_learned_positions_are_those_that_torch_interpolates(
    rows: int, columns: int, merge: int, side: int, seed: int
) -> None:
    grid = PatchGrid(1, rows * merge, columns * merge)
    table = torch.randn(side * side, 5, generator=torch.Generator().manual_seed(seed))
    places = patch_places([grid], merge, side)
    found = (table[places.taps] * places.tap_weights.unsqueeze(-1)).sum(1)
    image = table.view(1, side, side, 5).permute(0, 3, 1, 2)
    size = (grid.rows, grid.columns)
    whole = torch.nn.functional.interpolate(image, size, mode="bilinear", align_corners=True)
    expected = whole[0, :, places.rows, places.columns].T
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(places.tap_weights.sum(1), torch.ones(len(places.taps)))


def test_text_counts_up_and_an_image_spans_rows_and_columns() -> None:
    tokens = np.array([1, 2, *[IMAGE] * 6, 3, 4, *[IMAGE] * 1, 5])
    found = decoder_positions(tokens, IMAGE, [PatchGrid(1, 4, 6), PatchGrid(1, 2, 2)], merge=2)
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
    ]
    assert decoder_positions(np.arange(3), IMAGE, [], 2).tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize(
    ("tokens", "grids", "told"),
    [
        ([1, IMAGE], [], r"Expected 0 tokens for the patches of 0 images, got 1"),
        ([1], [PatchGrid(1, 2, 2)], "Expected 1 tokens .* got 0"),
        ([IMAGE, 1, IMAGE], [PatchGrid(1, 2, 4)], "Expected 2 tokens of an image .* from token 0"),
        ([IMAGE] * 2, [PatchGrid(2, 2, 2)], "Expected images of one frame, got 2"),
        ([], [PatchGrid(1, 1, 2)], "multiples of 2"),
        ([], [PatchGrid(1, 0, 2)], "multiples of 2"),
    ],
)
def test_images_that_the_tokens_do_not_name_are_rejected(
    tokens: list[int], grids: list[PatchGrid], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        decoder_positions(np.array(tokens, np.int64), IMAGE, grids, merge=2)
