"""Tiny models of the transformers library that read images, and batches with images of many
sizes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megatron.core.models.multimodal.patch_grid import PatchGrid, decoder_positions
from megatron.core.models.multimodal.vision_language_model import Images
from tests.unit_tests.core.models.families.helpers.their_models import (
    QWEN3_5,
    QWEN3_NEXT,
    SIZES,
    VOCAB,
)

IMAGE, START, END, VIDEO = VOCAB - 1, VOCAB - 2, VOCAB - 3, VOCAB - 4
MERGE = 2
TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_heads": 3,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": MERGE,
    "out_hidden_size": SIZES["hidden_size"],
    "num_position_embeddings": 25,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 900.0},
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_QWEN3_VL = {
    "head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 700.0,
        "mrope_section": [2, 3, 1],
        "mrope_interleaved": True,
    },
}
CASES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"text_config": {**SIZES, **QWEN3_5}, "vision_config": TOWER},
    "qwen3_5 tied": {
        "text_config": {**SIZES, **QWEN3_5, "num_key_value_heads": 4},
        "vision_config": {**TOWER, "hidden_act": "gelu", "temporal_patch_size": 1},
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe": {
        "text_config": {**SIZES, **QWEN3_NEXT, "rope_parameters": QWEN3_5["rope_parameters"]},
        "vision_config": TOWER,
    },
    "qwen3_vl": {
        "text_config": {**SIZES, **_QWEN3_VL},
        "vision_config": {**TOWER, "deepstack_visual_indexes": [0, 2]},
    },
}


def their_model(transformers: Any, case: str) -> nn.Module:
    """With random weights, all unlike their initial values."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(case.split()[0], **CASES[case], **TOKENS)
    return _with_random_weights(build(transformers, config))


def build(transformers: Any, config: Any) -> nn.Module:
    """A model of the library in its plain arithmetic."""
    kind = getattr(transformers, config.architectures[0]) if config.architectures else None
    auto = transformers.AutoModelForImageTextToText
    model: nn.Module = (kind._from_config if kind else auto.from_config)(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    return model


def _with_random_weights(model: nn.Module) -> nn.Module:
    """Large enough that all of them show in the logits. Twice as large ones make a model that is
    ill-conditioned: in fp32, both models are then up to 1e-3 from the same in float64.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


class ImageBatch(NamedTuple):
    """Rows of text, each with images.

    Attributes:
        tokens: [rows, tokens] int64.
        positions: [3, rows, tokens] int64.
    """

    tokens: Tensor
    positions: Tensor
    images: Images

    @property
    def theirs(self) -> dict[str, Tensor]:
        """The arguments of a model of the library."""
        return {
            "input_ids": self.tokens,
            "mm_token_type_ids": (self.tokens == IMAGE).int(),
            "pixel_values": self.images.patches,
            "image_grid_thw": torch.tensor([list(grid) for grid in self.images.grids]),
        }


# Wide, high, and the smallest there is; the rows are of one length.
GRIDS = (
    (PatchGrid(1, 4, 6), PatchGrid(1, 2, 2)),
    (PatchGrid(1, 8, 2), PatchGrid(1, 2, 4), PatchGrid(1, 2, 2)),
)


def image_batch(grids: tuple[tuple[PatchGrid, ...], ...] = GRIDS, width: int = 96) -> ImageBatch:
    """Random text around images, one row for each tuple of grids, and random pixels.

    Args:
        width: channels * frames * rows * columns of a patch.
    """
    generator = torch.Generator().manual_seed(0)
    rows = [_row(own, generator) for own in grids]
    length = max(map(len, rows)) + 3
    filler = torch.randint(0, VIDEO, (len(rows), length), generator=generator)
    for row, filled in zip(rows, filler, strict=True):
        filled[: len(row)] = torch.tensor(row)
    positions = np.stack(
        [
            decoder_positions(row.numpy(), IMAGE, own, MERGE)
            for row, own in zip(filler, grids, strict=True)
        ],
        axis=1,
    )
    flat = tuple(grid for own in grids for grid in own)
    count = sum(grid.num_patches for grid in flat)
    patches = torch.randn(count, width, generator=generator)
    return ImageBatch(filler, torch.from_numpy(positions), Images(patches, flat))


def _row(grids: tuple[PatchGrid, ...], generator: torch.Generator) -> list[int]:
    row: list[int] = []
    for number, grid in enumerate(grids):
        row += torch.randint(0, VIDEO, (number + 1,), generator=generator).tolist()
        row += [START, *[IMAGE] * (grid.num_patches // MERGE**2), END]
    return row
