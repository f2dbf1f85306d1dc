"""Prompts with pictures, for vision-language models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megatron.core.models.multimodal.patch_grid import decoder_positions
from megatron.core.models.multimodal.vision_language_model import Images, VisionLanguageModel
from megatron.core.options import ConfigError
from megatron.training.conversation_tokenizer import PictureTokenizer
from megatron.training.conversations import Conversation
from megatron.training.images import PROCESSOR_FILE, ImageProcessing, normalized_patches
from megatron.training.tokenizer import Tokenizer


class PictureModel(nn.Module):
    """A vision-language model with fixed pictures, whose input is tokens."""

    def __init__(self, model: VisionLanguageModel, images: Images | None) -> None:
        super().__init__()
        self.model = model
        self._images = images

    def forward(self, tokens: Tensor) -> Tensor:
        """[1, tokens] -> logits [1, tokens, vocab]."""
        vision, grids = self.model.vision, () if self._images is None else self._images.grids
        assert vision.image_token_id is not None, "checked by the model"
        positions = decoder_positions(
            tokens[0].cpu().numpy(), vision.image_token_id, grids, vision.vision_merge_size
        )
        logits: Tensor = self.model(
            tokens,
            images=self._images,
            positions=torch.from_numpy(positions[:, np.newaxis]).to(tokens.device),
        )
        return logits


class Asked(NamedTuple):
    """The tokens of a prompt, and the model with its pictures."""

    model: PictureModel
    tokens: list[int]


class PictureReader:
    """Makes prompts with pictures.

    Args:
        processing: the preprocessing of pictures.

    Attributes:
        end: the token at which generation stops.

    Raises:
        ConfigError: a tokenizer without image tokens, or patches of another size.
    """

    def __init__(
        self, model: VisionLanguageModel, tokenizer: Tokenizer, processing: ImageProcessing
    ) -> None:
        self._model = model
        self._processing = processing
        self._conversations = PictureTokenizer(tokenizer)
        self.end = self._conversations.end
        vision = model.vision
        for name, own, wanted in (
            ("patch_size", processing.patch_size, vision.vision_patch_size),
            ("merge_size", processing.merge_size, vision.vision_merge_size),
            ("image token", self._conversations.image_token, vision.image_token_id),
        ):
            if own != wanted:
                raise ConfigError(
                    f"--processor: expected pictures with {name} {wanted}, as the model has it, "
                    f"got {own}."
                )

    @classmethod
    def of_model(
        cls,
        model: VisionLanguageModel,
        tokenizer: Tokenizer,
        source: str,
        processor: str | None = None,
    ) -> PictureReader:
        """Returns a reader with the preprocessing of the training or of a processor.

        Args:
            source: the model's path; a Hugging Face directory has a processor.
            processor: another directory with a processor.

        Raises:
            ConfigError: the preprocessing is unknown.
        """
        if processor is None and (Path(source) / PROCESSOR_FILE).is_file():
            processor = source
        if processor is not None:
            return cls(model, tokenizer, ImageProcessing.of_folder(processor))
        found = ImageProcessing.of_model(model.vision)
        if found is None:
            raise ConfigError(
                f"--processor: expected a directory with {PROCESSOR_FILE}, since {source} has no "
                "preprocessing of pictures, got none."
            )
        return cls(model, tokenizer, found)

    def ask(self, question: str, pictures: Sequence[Path]) -> Asked:
        """Returns the tokens of pictures and a question after them.

        Raises:
            ImageError: an unusable picture.
        """
        images = [self._processing.load(path) for path in pictures]
        parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": question}]
        turn = {"role": "user", "content": parts if pictures else question}
        block = self._processing.merge_size**2
        counts = [image.grid.num_patches // block for image in images]
        tokens = self._conversations.prompt(Conversation((turn,)), counts).tolist()
        if not images:
            return Asked(PictureModel(self._model, None), tokens)

        pixels = torch.from_numpy(np.concatenate([image.pixels for image in images]))
        device = next(self._model.parameters()).device
        patches = normalized_patches(
            pixels.to(device),
            self._processing.mean,
            self._processing.std,
            self._model.vision.vision_temporal_patch_size,
        )
        grids = tuple(image.grid for image in images)
        return Asked(PictureModel(self._model, Images(patches, grids)), tokens)
