"""ModelDescription: a model without its weights."""

from __future__ import annotations

from typing import NamedTuple

from megatron.core.models.multimodal.vision_config import VisionConfig
from megatron.core.transformer.config import TransformerConfig


class ModelDescription(NamedTuple):
    """The settings that decide a model's shapes and arithmetic.

    Attributes:
        config: of the model, or of its decoder.
        vocab_size: rows of the embedding, padding included.
        vision: of the tower and the projector of a model that reads images.
    """

    config: TransformerConfig
    vocab_size: int
    vision: VisionConfig | None = None
