#!/usr/bin/env python3
"""Trains a GPT. Run it alone or under torchrun; `--help` lists the flags, README.md shows the two commands.

torchrun --nproc-per-node 2 pretrain_gpt.py --config examples/gpt_cpu.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from megatron.core.datasets.builder import GPTDatasets, build_gpt_datasets
from megatron.core.models.gpt.flops import num_floating_point_operations
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.options import ConfigError
from megatron.training.arguments import parse_config
from megatron.training.config import RunConfig
from megatron.training.launch import Launch
from megatron.training.pretrain import Outcome, pretrain
from megatron.training.step import Batch
from megatron.training.tokenizer import build_tokenizer, padded_vocab_size

_EXIT_BAD_CONFIGURATION = 2


def forward_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean cross entropy over all tokens of a microbatch."""
    losses: torch.Tensor = model(batch["tokens"], batch["labels"])  # [batch, seq] fp32
    return losses.mean()


def run(argv: Sequence[str]) -> Outcome:
    """Parses the command line and trains. ConfigError before anything is built if it cannot be honoured."""
    config = parse_config(argv, Launch.from_environment().world_size)
    tokenizer = build_tokenizer(config.tokenizer)
    vocab_size = padded_vocab_size(config.tokenizer, tokenizer)

    def model_provider(config: RunConfig) -> nn.Module:
        return GPTModel(config.model, vocab_size)

    def datasets_provider(config: RunConfig, num_samples: tuple[int, int, int]) -> GPTDatasets:
        return build_gpt_datasets(config.data, num_samples, tokenizer.vocab_size, config.training.seed)

    return pretrain(
        config,
        model_provider=model_provider,
        datasets_provider=datasets_provider,
        forward_step=forward_step,
        flops_per_sequence=num_floating_point_operations(config.model, vocab_size, config.data.seq_length, 1),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 for a configuration that cannot be honoured."""
    try:
        run(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        if Launch.from_environment().rank == 0:
            print(f"pretrain_gpt.py: {error}", file=sys.stderr)
        return _EXIT_BAD_CONFIGURATION
    return 0


if __name__ == "__main__":
    sys.exit(main())
