"""A vision transformer over the patches of images of any size, and the projector behind it.

The patches of all images of a batch are one row; attention sees one frame of an image at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.device import send
from megatron.core.models.multimodal.patch_grid import PatchGrid, PatchPlaces, patch_places
from megatron.core.models.multimodal.vision_config import VisionConfig
from megatron.core.products import linear
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.fused_weight import Linear, reset_linear
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.rotary import RotaryAngles, rotary_angles
from megatron.core.transformer.spec import RotarySpec


class PatchEmbedding(nn.Module):
    """A 3-D convolution whose kernel is as large as its stride: a linear layer over the pixels of a
    patch.

    Attributes:
        weight: [hidden, channels, frames, rows, columns], as nn.Conv3d has it.
        bias: [hidden].
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.init_std = config.vision_init_method_std
        self.weight = nn.Parameter(torch.empty(config.vision_hidden_size, *config.patch_shape))
        self.bias = nn.Parameter(torch.empty(config.vision_hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the initial weights as in other linear layers."""
        reset_linear(self.weight, self.bias, self.init_std)

    def forward(self, patches: Tensor) -> Tensor:
        """[patches, channels * frames * rows * columns] -> [patches, hidden]."""
        return linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class PatchPositions(nn.Module):
    """Learned positions in a square grid, interpolated where an image has other rows and columns.

    Attributes:
        weight: [side * side, hidden], row by row.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.init_std = config.vision_init_method_std
        self.weight = nn.Parameter(
            torch.empty(config.vision_num_position_embeddings, config.vision_hidden_size)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the initial weights: normal(0, init_std)."""
        nn.init.normal_(self.weight, mean=0.0, std=self.init_std)

    def forward(self, places: PatchPlaces) -> Tensor:
        """The positions of patches: [patches, hidden]."""
        around = F.embedding(places.taps, self.weight)  # [patches, 4, hidden]
        mixed = (around * places.tap_weights.unsqueeze(-1)).sum(1)
        return mixed.to(self.weight.dtype)


class PatchMerger(nn.Module):
    """The projector: each block of merge x merge patches becomes a token of the decoder.

    Args:
        output_size: width of the decoder.
        is_normalized_first: the norm is of each patch; else of a block's patches together.
    """

    def __init__(
        self, config: VisionConfig, output_size: int, *, is_normalized_first: bool = True
    ) -> None:
        super().__init__()
        width, std = config.vision_hidden_size, config.vision_init_method_std
        self.block_size = config.patches_per_token * width
        self.is_normalized_first = is_normalized_first
        self.norm = build_norm(config.norm, width if is_normalized_first else self.block_size)
        self.linear_fc1 = Linear(self.block_size, self.block_size, init_std=std)
        self.linear_fc2 = Linear(self.block_size, output_size, init_std=std)

    def forward(self, patches: Tensor) -> Tensor:
        """[patches, hidden] -> [patches / (merge * merge), output_size]."""
        if self.is_normalized_first:
            patches = self.norm(patches)
        blocks = patches.view(-1, self.block_size)
        if not self.is_normalized_first:
            blocks = self.norm(blocks)
        output: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(blocks)))
        return output


class TowerOutput(NamedTuple):
    """A tower's output: [patches, hidden] each.

    Attributes:
        last: behind the last layer.
        between: behind the layers of --vision-deepstack-layers.
    """

    last: Tensor
    between: tuple[Tensor, ...]


class VisionTower(nn.Module):
    """Patches to features.

    Args:
        recompute_granularity: of its layers, see TransformerConfig.
    """

    def __init__(self, config: VisionConfig, recompute_granularity: str | None = None) -> None:
        super().__init__()
        self.config = config
        self._side = math.isqrt(config.vision_num_position_embeddings)
        # Half of a head's planes turn by the row, the others by the column.
        self._rotary = RotarySpec(config.head_dim // 2, config.vision_rotary_base)
        self.patch_embedding = PatchEmbedding(config)
        self.position_embeddings = PatchPositions(config)
        std = config.vision_init_method_std
        self.layers = nn.ModuleList(
            TransformerLayer(
                config.layer,
                config.vision_hidden_size,
                init_std=std,
                output_init_std=std,
                recompute_granularity=recompute_granularity,
            )
            for _ in range(config.vision_num_layers)
        )
        for module in self.modules():
            # Whole on every rank of tensor parallelism: ranks divide the images instead.
            module.tensor_dims = {}  # type: ignore[assignment]

    def forward(self, patches: Tensor, grids: Sequence[PatchGrid]) -> TowerOutput:
        """Runs the tower.

        Args:
            patches: [patches, channels * frames * rows * columns] of all images, normalised pixels
                of any floating dtype, in the order that `patch_grid` describes.
            grids: of the images.

        Raises:
            ValueError: patches of another shape, or not as many as the grids have.
        """
        self._check(patches, grids)
        places = PatchPlaces(
            *(
                send(part, patches.device)
                for part in patch_places(grids, self.config.vision_merge_size, self._side)
            )
        )
        hidden = self.patch_embedding(patches) + self.position_embeddings(places)
        hidden, between = hidden.unsqueeze(0), []
        angles = self._angles(places)
        frames = Documents(
            tuple(grid.rows * grid.columns for grid in grids for _ in range(grid.frames))
        )
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, angles, frames)
            if number in (self.config.vision_deepstack_layers or ()):
                between.append(hidden.squeeze(0))
        return TowerOutput(hidden.squeeze(0), tuple(between))

    def _angles(self, places: PatchPlaces) -> RotaryAngles:
        """Angles of a row of patches: [1, patches, head_dim / 2]."""
        rows, columns = (
            rotary_angles(self._rotary, part.unsqueeze(0)) for part in (places.rows, places.columns)
        )
        return RotaryAngles(
            torch.cat((rows.cos, columns.cos), dim=-1), torch.cat((rows.sin, columns.sin), dim=-1)
        )

    def _check(self, patches: Tensor, grids: Sequence[PatchGrid]) -> None:
        expected = (
            sum(grid.num_patches for grid in grids),
            math.prod(self.config.patch_shape),
        )
        if tuple(patches.shape) != expected or not patches.is_floating_point():
            raise ValueError(
                f"Expected floating point patches of shape {expected}, got {patches.dtype} "
                f"{tuple(patches.shape)}."
            )
