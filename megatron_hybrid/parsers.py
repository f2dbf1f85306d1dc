"""`--help` of programs that import torch, which takes seconds. It is printed before their imports:
no module that this one imports may import torch or numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron.core.models.multimodal.vision_config import VisionConfig
from megatron.core.options import options_of
from megatron.training.flag_help import build_parser


class Trainer(NamedTuple):
    """A program that takes the flags of a run."""

    description: str
    rejected: set[str]  # names of options that the program rejects


TRAINERS = {
    "pretrain": Trainer(
        "Trains a GPT on text.", {field.name for field in options_of(VisionConfig)}
    ),
    # Attention never crosses samples with images, and there is no mock data for them.
    "pretrain-vlm": Trainer(
        "Trains a model that reads images and text.",
        {
            "sft",
            "sft_truncate",
            "reset_attention_mask",
            "reset_position_ids",
            "eod_mask_loss",
            "mock_data",
        },
    ),
}


def show_help_if_asked(command: str, argv: Sequence[str]) -> None:
    """Prints the help of a program and exits if `argv` has -h or --help."""
    if not {"-h", "--help"}.isdisjoint(argv) and command in TRAINERS:
        build_parser(*TRAINERS[command]).parse_args(["--help"])
