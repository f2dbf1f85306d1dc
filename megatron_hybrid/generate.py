"""Samples text from a trained GPT: loads the newest checkpoint of a run, or a given one.

    python tools/generate.py --load runs/gpt_cpu --prompt "def main():"
    python tools/generate.py --load imported/iter_0000001 --config run.yaml

One process, no torchrun: a checkpoint loads on any number of ranks. The model, its vocabulary and
its tokenizer are those that the checkpoint's configuration names. Imported weights, and those that
torch.distributed.checkpoint saved, have none; for them the YAML file of `--config` names them.
"""

from __future__ import annotations

import argparse
import reprlib
import sys
from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.device import Device, DeviceConfig
from megatron.core.dist_checkpointing.config import FSDP_DTENSOR
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.manifest import TRAIN_STATE_FILE
from megatron.core.dist_checkpointing.format.names import checkpoint_name, latest_iteration, path_of
from megatron.core.dist_checkpointing.formats import format_of
from megatron.core.dist_checkpointing.load.small_files import read_train_state
from megatron.core.dist_checkpointing.store import Store, open_store
from megatron.core.materialize import materialize
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.options import ConfigError
from megatron.core.transformer.config import TransformerConfig
from megatron.training.arguments import read_yaml, section_from_values
from megatron.training.checkpoint.loading import load_weights
from megatron.training.checkpoint.run_state import named_checkpoint
from megatron.training.tokenizer import (
    Tokenizer,
    TokenizerConfig,
    build_tokenizer,
    padded_vocab_size,
)

_PROMPTS = ("class Counter:\n    def __init__(self", "def read_text(path):\n", "import os\n")


def main(argv: Sequence[str] | None = None, program: str = "generate.py") -> int:
    """Prints each prompt with its continuation; returns the exit code.

    Args:
        argv: the arguments; default: the command line's.
        program: the name that error messages begin with.
    """
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    try:
        model, tokenizer, seq_length = load_model(
            arguments.load, arguments.ckpt_step, arguments.config
        )
    except (CheckpointError, ConfigError) as error:
        print(f"{program}: {error}", file=sys.stderr)
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


def load_model(
    root: str,
    iteration: int | None,
    config: str | None = None,
) -> tuple[GPTModel, Tokenizer, int]:
    """A model in fp32, its tokenizer, and its sequence length.

    Nothing else of the configuration is used: the training's data and devices may be gone.

    Args:
        root: a folder of checkpoints, of which the newest is taken, or a checkpoint.
        iteration: of the checkpoint in the folder, if it is not to be the newest.
        config: a YAML file with the model's and the tokenizer's settings; default: the run's own.

    Raises:
        CheckpointError, ConfigError: if there is no checkpoint, or it is not of this model, or has
            no configuration.
    """
    store, name = _locate(root, iteration)
    values = _saved_values(store, name) if config is None else read_yaml(config)
    seq_length = values.get("seq_length")
    if type(seq_length) is not int or seq_length < 1:
        where = config or f"the configuration in {path_of(store, name)}"
        shown = reprlib.repr(seq_length)
        raise CheckpointError(f"Expected seq_length in {where} to be an integer >= 1, got {shown}.")

    tokenizer_config = section_from_values(TokenizerConfig, values)
    tokenizer = build_tokenizer(tokenizer_config)
    with torch.device("meta"):
        model = GPTModel(
            section_from_values(TransformerConfig, values),
            padded_vocab_size(tokenizer_config, tokenizer),
        )

    materialize(model, Device.for_rank(DeviceConfig().kind, 0, 1).torch_device, seed=0)
    load_weights(store, name, model)
    return model.eval(), tokenizer, seq_length


def _locate(root: str, iteration: int | None) -> tuple[Store, str]:
    named = named_checkpoint(root)
    if named is not None:
        if iteration is not None:
            raise CheckpointError(
                f"Expected a folder of checkpoints with --ckpt-step, got the checkpoint {root}."
            )
        return open_store(named[0]), named[1]
    store = open_store(root)
    iteration = latest_iteration(store) if iteration is None else iteration
    if iteration is None:
        raise CheckpointError(f"Expected a checkpoint in {root}, got none.")
    return store, checkpoint_name(iteration)


def _saved_values(store: Store, name: str) -> dict[str, Any]:
    """The configuration of the run that a checkpoint is of."""
    path = path_of(store, name)
    found = format_of(store, name)
    if found is None:
        raise CheckpointError(f"Expected a checkpoint in {path}, got none.")
    # PyTorch alone writes no such file; a checkpoint of the other format without it is damaged.
    has_state = found == FSDP_DTENSOR or store.exists(f"{name}/{TRAIN_STATE_FILE}")
    values = read_train_state(store, name).get("config") if has_state else None
    if not isinstance(values, dict) or not values:
        raise CheckpointError(
            f"Expected the run's configuration in {path}, got none: name a YAML file with the "
            "settings of the model and its tokenizer by --config."
        )

    return values


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
    """Up to `num_new_tokens` token ids that follow `prompt`, ended early by `eod` (which is left
    out).

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


def _choose(
    logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator
) -> int:
    if temperature == 0:
        return int(logits.argmax())
    likeliest = torch.topk(logits, min(top_k or logits.numel(), logits.numel()))
    probabilities = torch.softmax(likeliest.values / temperature, dim=0)
    return int(likeliest.indices[torch.multinomial(probabilities, 1, generator=generator)])


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Samples text from a checkpoint.")
    parser.add_argument(
        "--load", required=True, help="folder of a run's checkpoints, or one checkpoint"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with the model's and the tokenizer's settings; default: the run's own",
    )
    parser.add_argument("--ckpt-step", type=int, help="iteration to load instead of the newest")
    parser.add_argument(
        "--prompt", action="append", help="text to continue; may be given several times"
    )
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument(
        "--temperature", type=float, default=0.5, help="0 takes the likeliest token every time"
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=50,
        help="draw from so many of the likeliest tokens; 0: from all",
    )
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args(argv)
    for name in ("max_new_tokens", "temperature", "top_k"):
        if not getattr(arguments, name) >= 0:
            parser.error(
                f"--{name.replace('_', '-')}: expected a number >= 0, got "
                f"{getattr(arguments, name)}."
            )

    return arguments
