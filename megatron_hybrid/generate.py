"""Samples text from a trained model: a run's newest checkpoint, a given one, or an exported model.

    python -m megatron_hybrid generate --load runs/gpt_cpu --prompt "def main():"
    python -m megatron_hybrid generate --load imported/iter_0000001 --config run.yaml
    python -m megatron_hybrid generate --load exports/gpt --tokenizer-model other/tokenizer.json
    python -m megatron_hybrid generate --load runs/vlm --image cat.png --prompt "What is this?"

Runs in one process, since a checkpoint loads on any number of ranks. saved_model.py finds the model
and its tokenizer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron.core.device import Device, kind_of
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.drivers import kernels_of
from megatron.core.log import printable
from megatron.core.materialize import materialize
from megatron.core.models.hugging_face import OwnModel, build_model, description_of
from megatron.core.models.multimodal.vision_language_model import VisionLanguageModel
from megatron.core.options import ConfigError
from megatron.training.tokenizer import Tokenizer, say_prefix
from megatron_hybrid import parsers
from megatron_hybrid.endings import one_line_errors
from megatron_hybrid.picture_reader import PictureReader
from megatron_hybrid.saved_model import find_model

_ABOUT_PICTURES = ("What is in the picture?",)
_PROMPTS = ("class Counter:\n    def __init__(self", "def read_text(path):\n", "import os\n")


def main(argv: Sequence[str] | None = None, program: str = "generate") -> int:
    """Prints each prompt with its continuation; returns the exit code."""
    arguments = _parse(sys.argv[1:] if argv is None else argv, program)
    # ValueError: unusable pictures, and prompts that the tokenizer cannot encode.
    with one_line_errors(program, (CheckpointError, ValueError, OSError)):
        model, tokenizer, seq_length = load_model(
            arguments.load, arguments.ckpt_step, arguments.config, arguments.tokenizer_model
        )
        questions = _questions(arguments, model, tokenizer, seq_length)
        _check_ids(questions, description_of(model).vocab_size)
        if sentence := say_prefix(tokenizer):
            print(sentence)

        generator = torch.Generator().manual_seed(arguments.seed)
        for question in questions:
            tokens = sample(
                question.model,
                question.tokens,
                num_new_tokens=arguments.max_new_tokens,
                context_length=seq_length,
                num_tokens=tokenizer.vocab_size,
                eod=question.end,
                temperature=arguments.temperature,
                top_k=arguments.top_k,
                generator=generator,
            )
            print(f"--- {question.shown}{tokenizer.detokenize(tokens)}\n")
        return 0
    return 2


class _Question(NamedTuple):
    """A prompt to continue.

    Attributes:
        model: returns logits for tokens [1, tokens].
        end: the token at which generation stops.
        shown: text to print before the new text.
    """

    model: torch.nn.Module
    tokens: list[int]
    end: int
    shown: str


def _questions(
    arguments: argparse.Namespace, model: OwnModel, tokenizer: Tokenizer, seq_length: int
) -> list[_Question]:
    """Returns a question for each prompt. ValueError for unreadable pictures, and for prompts that
    the tokenizer cannot encode.
    """
    if arguments.image:
        if not isinstance(model, VisionLanguageModel):
            raise ConfigError(
                f"--image: expected a model that reads pictures, got {arguments.load}."
            )
        reader = PictureReader.of_model(
            model, tokenizer, arguments.load, processor=arguments.processor
        )
        questions = []
        for prompt in arguments.prompt or _ABOUT_PICTURES:
            asked = reader.ask(prompt, arguments.image)
            if (length := len(asked.tokens) + arguments.max_new_tokens) > seq_length:
                raise ConfigError(
                    f"--max-new-tokens: expected at most {seq_length} tokens with the prompt and "
                    f"pictures, got {length}."
                )
            names = ", ".join(map(str, arguments.image))
            shown = f"{printable(names)}: {prompt!r}\n"
            questions.append(_Question(asked.model, asked.tokens, reader.end, shown))
        return questions

    if arguments.processor is not None:
        raise ConfigError("--processor: expected --image with it, got none.")
    return [
        _Question(
            model,
            [*tokenizer.prefix, *tokenizer.tokenize(prompt)] or [tokenizer.eod],
            tokenizer.eod,
            f"prompt: {prompt!r}\n{prompt}",
        )
        for prompt in arguments.prompt or _PROMPTS
    ]


def _check_ids(questions: Sequence[_Question], num_rows: int) -> None:
    """Raises ValueError for a token without an embedding, such as a tokenizer's padding token."""
    for question in questions:
        if (most := max(question.tokens)) >= num_rows:
            raise ValueError(
                f"--prompt: expected token ids below the {num_rows} rows of the model's embedding, "
                f"got {most}."
            )


def load_model(
    root: str,
    iteration: int | None,
    config: str | None = None,
    tokenizer_model: str | None = None,
) -> tuple[OwnModel, Tokenizer, int]:
    """Returns a model in fp32, its tokenizer, and its sequence length.

    Args:
        root, iteration, config, tokenizer_model: as for `find_model`.

    Raises:
        CheckpointError, ConfigError: there is no model, or its settings are missing.
    """
    found = find_model(root, iteration, config, tokenizer_model)
    if found.tokenizer is None or found.seq_length is None:
        lacking = "tokenizer" if found.tokenizer is None else "max_position_embeddings"
        raise CheckpointError(
            f"Expected a {lacking} in {found.path}, got none: name a tokenizer by "
            "--tokenizer-model, or a YAML file with the model's settings by --config."
        )

    with torch.device("meta"):
        model = build_model(found.description)
    materialize(model, Device.for_rank(kind_of(), 0, 1).torch_device, seed=0)
    found.load_into(model)
    return model.eval(), found.tokenizer, found.seq_length


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
    """Samples up to `num_new_tokens` token ids after `prompt`, until `eod`.

    Args:
        context_length: the number of last tokens in the model's input.
        num_tokens: the number of ids without the embedding's padding.
        temperature: 0 chooses the most likely token.
        top_k: the number of most likely tokens to sample from; 0 for all.

    Raises:
        ValueError: logits are not finite.
    """
    device = next(model.parameters()).device
    tokens = list(prompt)
    for _ in range(num_new_tokens):
        context = torch.tensor([tokens[-context_length:]], device=device)  # [1, context]
        with kernels_of(device).attention_of_varying_shapes():
            logits = model(context)[0, -1, :num_tokens].float().cpu()  # [num_tokens]
        if not logits.isfinite().all():
            raise ValueError(
                "Expected finite logits, got NaN or infinity: the weights or activations are not "
                "finite. Load an earlier checkpoint by --ckpt-step."
            )
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
    # Differences first: quotients of a low temperature overflow to infinity.
    below_best = likeliest.values.double() - likeliest.values[0]
    probabilities = torch.softmax((below_best / temperature).float(), dim=0)
    return int(likeliest.indices[torch.multinomial(probabilities, 1, generator=generator)])


def _parse(argv: Sequence[str], program: str) -> argparse.Namespace:
    parser = parsers.generate(program)
    arguments = parser.parse_args(argv)
    for name in ("max_new_tokens", "temperature", "top_k"):
        if not getattr(arguments, name) >= 0:
            parser.error(
                f"--{name.replace('_', '-')}: expected a number >= 0, got "
                f"{getattr(arguments, name)}."
            )
    if not -(1 << 63) <= arguments.seed < 1 << 64:
        parser.error(f"--seed: expected a number of 64 bits, got {arguments.seed}.")
    for prompt in arguments.prompt or ():
        # Python decodes invalid bytes of the command line as halves of surrogate pairs.
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):
            parser.error(f"--prompt: expected text in UTF-8, got {prompt!r}.")

    return arguments
