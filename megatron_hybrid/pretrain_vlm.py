"""Trains a model that reads images and text. Run it alone or under torchrun.

    python -m megatron_hybrid launch --nproc-per-node 2 pretrain_vlm.py \\
        --config examples/qwen3_5_vl_proxy/train.yaml
    python -m megatron_hybrid launch --nproc-per-node 2 -m megatron_hybrid pretrain-vlm ...

Takes the flags of `pretrain_gpt.py`, and `--vision-...` for the tower. --data-path names files of
`python -m megatron_hybrid preprocess-multimodal`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core import log
from megatron.core.datasets.builder import build_image_text_datasets, image_format_of
from megatron.core.datasets.image_text_files import ImageFormat
from megatron.core.datasets.sample_dataset import SplitDatasets
from megatron.core.models.gpt.flops import num_floating_point_operations
from megatron.core.models.multimodal.vision_config import VisionConfig
from megatron.core.models.multimodal.vision_language_model import Images, VisionLanguageModel
from megatron.core.options import ConfigError
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.spec import ModelSpec
from megatron.training.arguments import parse_command_line
from megatron.training.config import RunConfig
from megatron.training.conversation_tokenizer import IMAGE, VIDEO, VISION_BEGIN, VISION_END
from megatron.training.images import normalized_patches
from megatron.training.launch import Launch
from megatron.training.model_loss import ModelLoss, loss_of, mean_of, weight_of
from megatron.training.pretrain import Outcome, pretrain
from megatron.training.step import Batch, ForwardStep
from megatron.training.tokenizer import (
    HuggingFaceTokenizer,
    Tokenizer,
    build_tokenizer,
    padded_vocab_size,
)
from megatron_hybrid.pretrain_gpt import run_to_its_end

# Image tokens in Qwen vocabularies.
_TOKENS = {
    "image_token_id": IMAGE,
    "vision_start_token_id": VISION_BEGIN,
    "vision_end_token_id": VISION_END,
    "video_token_id": VIDEO,
}
_OF_PICTURES = ("min_pixels", "max_pixels", "mean", "std")


def forward_step_of(
    spec: ModelSpec, vision: VisionConfig, images: ImageFormat, *, is_per_token: bool = False
) -> ForwardStep:
    """Returns the forward step: the mean cross entropy over a microbatch's loss mask.

    Args:
        spec: the decoder's spec.
        images: the normalization of the data's pixels.
        is_per_token: whether microbatches are weighted by their number of tokens in the mask.
    """
    has_routers = bool(spec.mixtures)

    def forward_step(model: nn.Module, batch: Batch) -> torch.Tensor | ModelLoss:
        output = model(
            batch["tokens"],
            batch["labels"],
            images=_images_of(batch, images, vision.vision_temporal_patch_size),
            positions=batch["positions"],
            documents=Documents(batch["lengths"], batch["padding"]),
            loss_weights=mean_of(batch["loss_mask"]),
            with_routing=has_routers,
        )
        return loss_of(spec, output, weight_of(batch["loss_mask"], is_per_token=is_per_token))

    return forward_step


def _images_of(batch: Batch, images: ImageFormat, num_frames: int) -> Images | None:
    if not batch["grids"]:
        return None
    patches = normalized_patches(batch["patches"], images.mean, images.std, num_frames)
    return Images(patches, batch["grids"])


def run(argv: Sequence[str]) -> Outcome:
    """Parses the command line and trains. Raises ConfigError before building the model."""
    launch = Launch.from_environment()
    parsed = parse_command_line(argv, launch.world_size)
    config = parsed.config
    log.configure(launch.rank, short_time=config.logging.is_short)
    parsed.log_without_effect()

    if config.data.boundaries or config.data.sft:
        raise ConfigError(
            "--sft, --reset-attention-mask, --reset-position-ids, --eod-mask-loss: not supported, "
            "since attention never crosses samples with images. Remove them."
        )
    tokenizer = build_tokenizer(config.tokenizer, rows_of=config.checkpoint.hf_model)
    tensor_size = config.parallel.tensor_model_parallel_size
    vocab_size = padded_vocab_size(config.tokenizer, tokenizer, tensor_size)
    images = image_format_of(config.data)
    vision = _checked_vision(config.vision, tokenizer, images)
    config = dataclasses.replace(config, vision=vision)
    assert images is not None, "checked with the tower"

    def model_provider(config: RunConfig) -> nn.Module:
        return VisionLanguageModel(config.model, vision, vocab_size)

    def datasets_provider(config: RunConfig, num_samples: tuple[int, int, int]) -> SplitDatasets:
        return build_image_text_datasets(
            config.data, num_samples, tokenizer.vocab_size, config.training.seed, tokenizer.eod
        )

    spec = model_spec(config.model)
    return pretrain(
        config,
        model_provider=model_provider,
        datasets_provider=datasets_provider,
        forward_step=forward_step_of(
            spec, vision, images, is_per_token=config.training.calculate_per_token_loss
        ),
        # Without the tower, since the number of patches differs between rows.
        flops_per_sequence=num_floating_point_operations(spec, vocab_size, config.data.seq_length),
    )


def _checked_vision(
    vision: VisionConfig | None, tokenizer: Tokenizer, images: ImageFormat | None
) -> VisionConfig:
    """Returns the tower with its image tokens. ConfigError for data of another tower."""
    if vision is None:
        raise ConfigError(
            "--vision-num-layers: expected the settings of a vision tower, or --hf-model with "
            "one, got none. Models of text alone are trained by pretrain_gpt.py."
        )
    if images is None:
        raise ConfigError(
            "--data-path: expected files of `python -m megatron_hybrid preprocess-multimodal`, got "
            "text without images."
        )

    find: Callable[[str], int | None] = lambda _: None  # noqa: E731
    if isinstance(tokenizer, HuggingFaceTokenizer):
        find = tokenizer.backend.token_to_id
    known: dict[str, Any] = {name: find(token) for name, token in _TOKENS.items()}
    known |= {f"image_{name}": getattr(images, name) for name in _OF_PICTURES}
    vision = dataclasses.replace(
        vision, **{name: value for name, value in known.items() if getattr(vision, name) is None}
    )

    for name, there in (
        ("vision_patch_size", images.patch_size),
        ("vision_merge_size", images.merge_size),
        ("vision_in_channels", len(images.mean)),
        ("image_token_id", images.image_token),
        *((f"image_{name}", getattr(images, name)) for name in _OF_PICTURES),
    ):
        if (own := getattr(vision, name)) != there:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: expected {there}, as the data has it, got {own}.")
    return vision


def main(argv: Sequence[str] | None = None, program: str = "pretrain_vlm.py") -> int:
    """Trains. Returns the exit status; docs/recovery.md lists them."""
    return run_to_its_end(run, sys.argv[1:] if argv is None else argv, program)
