"""Tiny models of this project that read the images of `their_images`."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.models.multimodal.vision_config import VisionConfig
from megatron.core.models.multimodal.vision_language_model import VisionLanguageModel
from megatron.core.transformer.config import TransformerConfig
from tests.unit_tests.core.models.families.helpers.their_models import VOCAB
from tests.unit_tests.core.models.multimodal.helpers.their_images import IMAGE

VISION = VisionConfig(
    vision_num_layers=2,
    vision_hidden_size=24,
    vision_ffn_hidden_size=20,
    vision_num_attention_heads=3,
    vision_patch_size=4,
    vision_num_position_embeddings=25,
    image_token_id=IMAGE,
)
TEXT: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def build(
    vision: VisionConfig = VISION, vocab_size: int = VOCAB, **options: Any
) -> VisionLanguageModel:
    torch.manual_seed(0)
    return VisionLanguageModel(TransformerConfig(**{**TEXT, **options}), vision, vocab_size)
