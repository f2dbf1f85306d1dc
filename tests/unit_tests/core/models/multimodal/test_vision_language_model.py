"""A model that reads images: its inputs, and results without images."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron.core.models.multimodal.patch_grid import PatchGrid
from megatron.core.models.multimodal.vision_language_model import Images, VisionLanguageModel
from megatron.core.options import ConfigError
from megatron.core.transformer.documents import Documents
from tests.unit_tests.core.models.families.helpers.their_models import VOCAB
from tests.unit_tests.core.models.multimodal.helpers.their_images import (
    IMAGE,
    ImageBatch,
    image_batch,
)
from tests.unit_tests.core.models.multimodal.helpers.vision_models import VISION, build


def losses_of(model: VisionLanguageModel, batch: ImageBatch, **more: Any) -> torch.Tensor:
    labels = batch.tokens.roll(-1, dims=1)
    found = model(batch.tokens, labels, images=batch.images, positions=batch.positions, **more)
    assert isinstance(found, torch.Tensor)
    return found


def test_recomputation_changes_no_bit() -> None:
    batch, grads = image_batch(), []
    for granularity in (None, "full"):
        model = build(recompute_granularity=granularity)
        losses_of(model, batch).sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*grads, strict=True):
        assert one is not None
        assert one.abs().sum() > 0
        assert torch.equal(one, other)


def test_without_images_all_parts_have_a_gradient_which_is_zero_in_the_tower() -> None:
    model = build()
    tokens = torch.randint(0, IMAGE, (2, 9), generator=torch.Generator().manual_seed(0))
    losses = model(tokens, tokens)
    assert torch.equal(losses, model.language_model(tokens, tokens))
    losses.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool((parameter.grad == 0).all()) == name.startswith("vision_"), name


def test_rows_packed_with_their_images_have_the_losses_of_each_by_itself() -> None:
    model, batch = build().eval(), image_batch()
    rows = batch.tokens.shape[1]
    expected = losses_of(model, batch)
    packed = ImageBatch(
        batch.tokens.view(1, -1), batch.positions.flatten(1).unsqueeze(1), batch.images
    )
    found = model(
        packed.tokens,
        batch.tokens.roll(-1, dims=1).view(1, -1),
        images=packed.images,
        positions=packed.positions,
        documents=Documents((rows, rows)),
    )
    torch.testing.assert_close(found.view(2, rows), expected, rtol=1e-5, atol=1e-5)


def test_each_image_is_seen_by_itself_and_each_frame_too() -> None:
    model = build().eval()
    width = 3 * 2 * 4 * 4
    grids = (PatchGrid(2, 2, 4), PatchGrid(1, 4, 2))
    patches = torch.randn(24, width, generator=torch.Generator().manual_seed(0))
    whole = model.vision_model(patches, grids).last
    alone = [
        model.vision_model(part, (grid,)).last
        for part, grid in zip(
            patches.split(8), (PatchGrid(1, 2, 4), PatchGrid(1, 2, 4), grids[1]), strict=True
        )
    ]
    torch.testing.assert_close(whole, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_inputs_that_do_not_fit_are_rejected() -> None:
    model, batch = build(), image_batch()
    cases: list[tuple[str, dict[str, Any]]] = [
        ("Expected positions with images", {"images": batch.images}),
        ("Expected 0 image tokens for the patches of 0", {"positions": batch.positions}),
        (
            "image tokens for the patches of 1 image",
            {
                "images": Images(batch.images.patches[:4], (PatchGrid(1, 2, 2),)),
                "positions": batch.positions,
            },
        ),
        (
            "Expected positions of shape",
            {"images": batch.images, "positions": batch.positions[0]},
        ),
        (
            r"floating point patches of shape \(56, 96\)",
            {
                "images": Images(batch.images.patches[:, :5], batch.images.grids),
                "positions": batch.positions,
            },
        ),
        (
            "floating point patches",
            {
                "images": Images(batch.images.patches.byte(), batch.images.grids),
                "positions": batch.positions,
            },
        ),
    ]
    for told, inputs in cases:
        with pytest.raises(ValueError, match=told):
            model(batch.tokens, **inputs)


@pytest.mark.parametrize(
    ("vision", "options", "told"),
    [
        ({"image_token_id": None}, {}, "--image-token-id: expected one of the 61 tokens, got None"),
        ({"image_token_id": VOCAB}, {}, "--image-token-id: expected one of the 61 tokens, got 61"),
        ({}, {"position_embedding_type": "none"}, "--position-embedding-type: expected rotary"),
        ({"vision_deepstack_layers": (0, 1)}, {"num_layers": 1}, "at most 1, one for each layer"),
    ],
)
def test_decoders_that_cannot_take_images_are_rejected(
    vision: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        build(dataclasses.replace(VISION, **vision), **options)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"vision_hidden_size": 30}, "--vision-hidden-size: expected a multiple of 12"),
        ({"vision_num_position_embeddings": 24}, "expected a square number, got 24"),
        ({"vision_deepstack_layers": (2,)}, "the layers 0 to 1 in their order, got"),
        ({"vision_deepstack_layers": (1, 0)}, "in their order"),
        ({"mrope_section": (1, 2)}, "--mrope-section: expected three numbers"),
        ({"vision_activation": "tanh"}, "--vision-activation: expected one of"),
    ],
)
def test_towers_that_cannot_be_built_are_rejected(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        dataclasses.replace(VISION, **changed)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_of_images_are_all_of_them_in_their_order(count: int) -> None:
    images = image_batch().images
    shares = [images.share(number, count) for number in range(count)]
    assert [index for share in shares for index in share] == [*range(len(images.grids))]
    parts = [images.of(share) for share in shares]
    assert torch.equal(torch.cat([part.patches for part in parts]), images.patches)
    assert sum((part.grids for part in parts), start=()) == images.grids
    for part in parts:
        assert sum(grid.num_patches for grid in part.grids) == len(part.patches)
