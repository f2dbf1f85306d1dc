"""VisionLanguageModel: a decoder whose text may contain images."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.log import counted
from megatron.core.models.gpt.gpt_model import GPTModel, Places, RoutingReport
from megatron.core.models.gpt.output_layer import Output
from megatron.core.models.multimodal.patch_grid import PatchGrid
from megatron.core.models.multimodal.vision_config import VisionConfig, sections_of
from megatron.core.models.multimodal.vision_tower import PatchMerger, VisionTower
from megatron.core.options import ConfigError, expect
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.sequence_slice import SequenceSlice


@dataclass(frozen=True, eq=False)
class Images:
    """The images of a batch, in the order in which its rows name them.

    Not a tuple: see `RotaryAngles`.

    Attributes:
        patches: [patches, channels * frames * rows * columns], floating point.
        grids: one per image, as Python integers.
    """

    patches: Tensor
    grids: tuple[PatchGrid, ...]

    def share(self, number: int, count: int) -> range:
        """Indices of the images that one of `count` ranks computes: about an equal share of the
        patches, of whole images.
        """
        starts = [0, *itertools.accumulate(grid.num_patches for grid in self.grids)]
        owners = [start * count // starts[-1] for start in starts[:-1]]
        return range(bisect_left(owners, number), bisect_left(owners, number + 1))

    def of(self, indices: range) -> Images:
        """Some of them, consecutive ones."""
        before = sum(grid.num_patches for grid in self.grids[: indices.start])
        grids = self.grids[indices.start : indices.stop]
        count = sum(grid.num_patches for grid in grids)
        return Images(self.patches[before : before + count], grids)


class VisionLanguageModel(nn.Module):
    """A decoder-only language model that reads images where the text has their tokens.

    Args:
        config: of the decoder.
        vision: of the tower, the projector, and the tokens that represent images.
        vocab_size: rows of the embedding, padding included.

    Attributes:
        sequence_slice: the part of each sequence whose hidden states this rank has between layers;
            None: all of it.

    Raises:
        ConfigError: for a decoder without rotary positions, or with fewer layers than the tower has
            for deepstack; for an image token that is not known, or beyond the vocabulary.
    """

    # What --freeze and --lr-multipliers may name.
    parts: ClassVar[dict[str, tuple[str, ...]]] = {
        "vision": ("vision_model.",),
        "projector": ("vision_projection.", "deepstack_projections."),
        "decoder": ("language_model.",),
    }

    sequence_slice: SequenceSlice | None = None

    def __init__(self, config: TransformerConfig, vision: VisionConfig, vocab_size: int) -> None:
        super().__init__()
        self._image_token = _checked_image_token(config, vision, vocab_size)
        self.config = config
        self.vision = vision
        self.vocab_size = vocab_size
        self.sections = sections_of(model_spec(config), vision)
        self.vision_model = VisionTower(vision, config.recompute_granularity)
        self.vision_projection = PatchMerger(vision, config.hidden_size)
        self.deepstack_projections = nn.ModuleList(
            PatchMerger(vision, config.hidden_size, is_normalized_first=False)
            for _ in vision.vision_deepstack_layers or ()
        )
        self.language_model = GPTModel(config, vocab_size)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        images: Images | None = None,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        loss_weights: Tensor | None = None,
        with_routing: bool = False,
    ) -> Output | tuple[Output, RoutingReport | None]:
        """The model's logits, or its losses against `labels`: see `GPTModel`.

        Args:
            tokens: [batch, seq] int64, with the image token for each block of patches.
            images: images of the rows, one row after the other.
            positions: [3, batch, seq] int64, see `decoder_positions`; None, without images only:
                counted from the beginning of each row.

        Raises:
            ValueError: as GPTModel; for images without positions; and, on a CPU, for other images
                than the tokens name.
        """
        places = Places(positions, None if positions is None else self.sections, documents)
        targets = self.language_model.checked_targets(tokens, labels, loss_weights, places)
        features, between = self._features(tokens, images, positions)

        is_image = tokens.eq(self._image_token)
        # The number of each image token among all of them, without a wait for the device.
        numbers = (is_image.flatten().cumsum(0) - 1).clamp(min=0).view_as(tokens)
        if self.sequence_slice is not None:
            is_image, numbers = map(self.sequence_slice.cut, (is_image, numbers))
        (tokens,), targets, places = self.language_model.cut((tokens,), targets, places)
        is_image = is_image.unsqueeze(-1)
        hidden = self.language_model.embedding(tokens)
        hidden = torch.where(is_image, features[numbers].to(hidden.dtype), hidden)
        additions = [torch.where(is_image, part[numbers].to(hidden.dtype), 0.0) for part in between]
        return self.language_model.decode(
            hidden, targets, places, additions, with_routing=with_routing
        )

    def _features(
        self, tokens: Tensor, images: Images | None, positions: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The decoder's inputs for image tokens: [image tokens, hidden], and the same
        for its first layers.
        """
        if images is not None and positions is None:
            raise ValueError("Expected positions with images, got none.")
        if tokens.device.type == "cpu":
            self._check_count(tokens, () if images is None else images.grids)
        if images is None:
            # The tower runs without images, too: other ranks may have some, and sharded weights are
            # gathered by all ranks or by none.
            return self._projected(self._blank(tokens.device))

        part = self.sequence_slice
        return self._projected(images) if part is None else self._divided(images, part)

    def _divided(self, images: Images, part: SequenceSlice) -> tuple[Tensor, list[Tensor]]:
        """As `_projected`, of which each rank that has a part of the same sequences computes some
        images.
        """
        indices = images.share(part.rank, part.size)
        own = images.of(indices) if indices else self._blank(images.patches.device)
        ends = [0, *itertools.accumulate(grid.num_patches for grid in images.grids)]
        first, stop, total = (
            end // self.vision.patches_per_token
            for end in (ends[indices.start], ends[indices.stop], ends[-1])
        )

        def gathered(features: Tensor) -> Tensor:
            return part.total(F.pad(features[: stop - first], (0, 0, first, total - stop)))

        features, between = self._projected(own)
        return gathered(features), [gathered(each) for each in between]

    def _projected(self, images: Images) -> tuple[Tensor, list[Tensor]]:
        """The features of images, for the decoder's input and for its first layers."""
        output = self.vision_model(images.patches, images.grids)
        between = [
            project(part)
            for project, part in zip(self.deepstack_projections, output.between, strict=True)
        ]
        return self.vision_projection(output.last), between

    def _check_count(self, tokens: Tensor, grids: Sequence[PatchGrid]) -> None:
        """ValueError unless there is a token for each block of patches."""
        given = int(tokens.eq(self._image_token).sum())
        wanted = sum(grid.num_patches for grid in grids) // self.vision.patches_per_token
        if given != wanted:
            raise ValueError(
                f"Expected {wanted} image tokens for the patches of "
                f"{counted(len(grids), 'image')}, got {given}."
            )

    def _blank(self, device: torch.device) -> Images:
        """The smallest image, which no token represents."""
        merge = self.vision.vision_merge_size
        grid = PatchGrid(1, merge, merge)
        shape = (grid.num_patches, math.prod(self.vision.patch_shape))
        return Images(torch.zeros(shape, device=device), (grid,))


def _checked_image_token(config: TransformerConfig, vision: VisionConfig, vocab_size: int) -> int:
    """The token that represents an image's patches. ConfigError without one, and for a decoder that
    cannot take the tower's output.
    """
    expect(
        config.position_embedding_type != "none",
        "--position-embedding-type",
        "rotary positions, which have the rows and columns of an image",
        config.position_embedding_type,
    )
    count = len(vision.vision_deepstack_layers or ())
    expect(
        count <= config.num_layers,
        "--vision-deepstack-layers",
        f"at most {config.num_layers}, one for each layer of the decoder",
        count,
    )
    token = vision.image_token_id
    if token is None or token >= vocab_size:
        raise ConfigError(
            f"--image-token-id: expected one of the {vocab_size} tokens, got {token}."
        )
    return token
