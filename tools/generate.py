#!/usr/bin/env python3
"""Lets a trained GPT write: loads the newest checkpoint of a run and samples from it.

    python tools/generate.py --load runs/gpt_cpu --prompt "def main():"

One process, no torchrun: a checkpoint loads on any number of ranks. The model, its vocabulary and its tokenizer are
those that the checkpoint's configuration names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from megatron.core.device import Device, DeviceConfig
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.folders import checkpoint_name, latest_iteration
from megatron.core.dist_checkpointing.small_files import read_train_state
from megatron.core.dist_checkpointing.store import open_store
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.options import ConfigError
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.init import materialize
from megatron.training.arguments import section_from_values
from megatron.training.loading import load_weights
from megatron.training.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer, padded_vocab_size

_PROMPTS = ("class Counter:\n    def __init__(self", "def read_text(path):\n", "import os\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints each prompt with its continuation; returns the exit code."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    try:
        model, tokenizer, seq_length = load_model(arguments.load, arguments.ckpt_step)
    except (CheckpointError, ConfigError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    generator = torch.Generator().manual_seed(arguments.seed)
    for prompt in arguments.prompt or _PROMPTS:
        tokens = sample(
            model,
            tokenizer.tokenize(prompt) or [tokenizer.eod],
            num_new_tokens=arguments.max_new_tokens,
            context_length=seq_length,
            num_tokens=tokenizer.vocab_size,
            eod=tokenizer.eod,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            generator=generator,
        )
        print(f"--- prompt: {prompt!r}\n{prompt}{tokenizer.detokenize(tokens)}\n")
    return 0


def load_model(root: str, iteration: int | None) -> tuple[GPTModel, Tokenizer, int]:
    """The model of a run's newest checkpoint, or of the one named, in fp32; its tokenizer; its sequence length.

    Of the checkpoint's configuration only this is used: the data and the devices it was trained with may be gone.
    """
    store = open_store(root)
    iteration = latest_iteration(store) if iteration is None else iteration
    if iteration is None:
        raise CheckpointError(f"Expected a checkpoint in {root}, got none.")
    name = checkpoint_name(iteration)
    values = read_train_state(store, name).get("config")
    if not isinstance(values, dict) or not isinstance(values.get("seq_length"), int):
        raise CheckpointError(f"Expected the run's configuration in {root}/{name}, got none.")
    tokenizer_config = section_from_values(TokenizerConfig, values)
    tokenizer = build_tokenizer(tokenizer_config)
    with torch.device("meta"):
        model = GPTModel(section_from_values(TransformerConfig, values), padded_vocab_size(tokenizer_config, tokenizer))
    materialize(model, Device.for_rank(DeviceConfig().kind, 0, 1).torch_device, seed=0)
    load_weights(store, name, model)
    return model.eval(), tokenizer, values["seq_length"]


@torch.no_grad()
def sample(
    model: torch.nn.Module,
    prompt: list[int],
    *,
    num_new_tokens: int,
    context_length: int,
    num_tokens: int,
    eod: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
) -> list[int]:
    """Up to `num_new_tokens` token ids that follow `prompt`, ended early by `eod` (which is left out).

    Args:
        context_length: the model sees the last so many tokens.
        num_tokens: ids from here on are padding of the embedding and are never drawn.
        temperature: 0 takes the likeliest token every time.
        top_k: how many of the likeliest tokens are drawn from; 0 for all.
    """
    device = next(model.parameters()).device
    tokens = list(prompt)
    for _ in range(num_new_tokens):
        context = torch.tensor([tokens[-context_length:]], device=device)  # [1, context]
        logits = model(context)[0, -1, :num_tokens].float().cpu()  # [num_tokens]
        chosen = _choose(logits, temperature, top_k, generator)
        if chosen == eod:
            break
        tokens.append(chosen)
    return tokens[len(prompt) :]


def _choose(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    likeliest = torch.topk(logits, min(top_k or logits.numel(), logits.numel()))
    probabilities = torch.softmax(likeliest.values / temperature, dim=0)
    return int(likeliest.indices[torch.multinomial(probabilities, 1, generator=generator)])


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Samples text from a checkpoint.")
    parser.add_argument("--load", required=True, help="folder of a run's checkpoints")
    parser.add_argument("--ckpt-step", type=int, help="iteration to load instead of the newest")
    parser.add_argument("--prompt", action="append", help="text to go on from; may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.5, help="0 takes the likeliest token every time")
    parser.add_argument("--top-k", type=int, default=50, help="draw from so many of the likeliest tokens; 0: from all")
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args(argv)
    for name in ("max_new_tokens", "temperature", "top_k"):
        if not getattr(arguments, name) >= 0:
            parser.error(f"--{name.replace('_', '-')}: expected a number >= 0, got {getattr(arguments, name)}.")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
