"""The flags of programs that import torch, which takes seconds. `--help` is printed before that: no
module that this one imports may import torch or numpy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.core.dist_checkpointing.config import MAX_SHARD_BYTES
from megatron.core.dtype_names import FLOAT_NAMES
from megatron.core.help_format import ProgramParser
from megatron.core.models.multimodal.vision_config import VisionConfig
from megatron.core.options import Field, options_of
from megatron.training.flag_help import build_parser
from megatron.training.tokenizer import TokenizerConfig
from megatron_hybrid.input_files import TEXT_KEY
from megatron_hybrid.plan import quantities

_PLACES = {
    "root": "directory of checkpoints",
    "checkpoint": "directory of one checkpoint",
    "a": "directory of one checkpoint",
    "b": "directory of another checkpoint",
    "run": "directory of a run's checkpoints, or one checkpoint",
    "out": "directory to write, absent or empty",
}
_ABOUT_PLAN = """Plans a run: the memory that it needs on a machine, and the time of its steps.

    python -m megatron_hybrid plan --hf-model models/Llama-3.1-8B --bf16 --gpu-memory 80GB \\
        --host-memory 256GB
    python -m megatron_hybrid plan --config run.yaml --gpus 2 --measure

Prints the memory of a rank by kind, the smallest offload fraction that fits, the largest that costs
no time, the time of a step and its bottleneck, and the size of a checkpoint; see docs/offload.md.
Takes all flags of a run, too. No weights are allocated.
"""
# Of `plan`, by flag: the type, the metavar and the help line.
_PLAN_FLAGS = {
    "--gpu-memory": (
        quantities.size,
        "SIZE",
        "memory of each device, e.g. 80GB (default: not checked)",
    ),
    "--gpu-reserve": (
        quantities.size_or_zero,
        "SIZE",
        "part of --gpu-memory left to CUDA, its libraries and gaps between tensors (default: 5 %%, "
        "but at least 2GB)",
    ),
    "--host-memory": (
        quantities.size,
        "SIZE",
        "host memory for all ranks of the machine, e.g. 256GB (default: not checked)",
    ),
    "--flops": (
        quantities.flops,
        "RATE",
        "speed of a device in training, e.g. 400TFLOP/s (default: no step time)",
    ),
    "--link": (
        quantities.rate,
        "RATE",
        "bandwidth between device and host, each way, e.g. 50GB/s (default: no step time)",
    ),
    "--host-bandwidth": (
        quantities.rate,
        "RATE",
        "bandwidth at which all ranks' CPU threads update, e.g. 300GB/s (default: no step time)",
    ),
    "--dram-bandwidth": (
        quantities.rate,
        "RATE",
        "bandwidth of the host memory for threads and copies of all ranks (default: not a limit)",
    ),
    "--gpu-bandwidth": (
        quantities.rate,
        "RATE",
        "bandwidth of a device's memory (default: not counted)",
    ),
    "--interconnect": (
        quantities.rate,
        "RATE",
        "bandwidth at which a device sends and receives in collectives (default: not counted)",
    ),
}


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


def plan(program: str) -> argparse.ArgumentParser:
    """The parser of `plan`, without the flags of a run."""
    parser = ProgramParser(
        prog=program,
        description=_ABOUT_PLAN,
        allow_abbrev=False,
        epilog="Flags of a run may follow: python -m megatron_hybrid pretrain --help lists them.",
    )
    ranks = "ranks, all on one machine"
    parser.add_argument("--gpus", type=quantities.whole_number, default=1, metavar="N", help=ranks)
    for flag, (kind, metavar, text) in _PLAN_FLAGS.items():
        parser.add_argument(flag, type=kind, metavar=metavar, help=text)

    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure on this machine all rates that are not given; takes some seconds",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def preprocess(program: str) -> argparse.ArgumentParser:
    """The parser of `preprocess`."""
    parser = ProgramParser(prog=program, description="Tokenizes text into .bin/.idx token files.")
    parser.add_argument(
        "--input",
        nargs="+",
        type=Path,
        required=True,
        metavar="PATH",
        help="text files, JSON lines (.jsonl, .ndjson, .jsonlines, .json), either of them "
        "compressed (.gz, .bz2, .xz, .zst), and directories of such files",
    )
    parser.add_argument(
        "--suffix",
        nargs="+",
        metavar=".EXT",
        help="suffixes of the files to read from directories, e.g. .py .md (default: all files of "
        "UTF-8 text)",
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=[TEXT_KEY],
        metavar="KEY",
        help=f"keys of JSON lines to tokenize (default: {TEXT_KEY})",
    )
    parser.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="write PREFIX_KEY_document.bin and .idx",
    )
    parser.add_argument(
        "--train-tokenizer",
        action="store_true",
        help="first train a BPE tokenizer with --vocab-size tokens on the input, and save it as "
        "--tokenizer-model",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with the end-of-document token"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help='tokenize conversations, lines with {"messages": [...]}, by the chat template; write '
        "PREFIX_chat_document and its loss mask, PREFIX_chat_document_mask",
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja template (default: the tokenizer's)"
    )
    _add_skip_flag(parser)
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    for option in tokenizer_options():
        parser.add_argument(
            option.flag,
            type=option.scalar,
            default=option.default,
            choices=option.option.choices,
            metavar=option.metavar,
            help=option.option.help,
        )

    return parser


def tokenizer_options() -> list[Field]:
    """Returns the tokenizer's options, without the options of the embedding."""
    return [
        option
        for option in options_of(TokenizerConfig)
        if option.name != "make_vocab_size_divisible_by"
    ]


def preprocess_multimodal(program: str) -> argparse.ArgumentParser:
    """The parser of `preprocess-multimodal`."""
    parser = ProgramParser(
        prog=program, description="Makes training files of conversations about pictures."
    )
    add: Callable[..., object] = parser.add_argument
    add(
        "--input",
        nargs="+",
        type=Path,
        required=True,
        metavar="FILE",
        help="files of JSON lines: messages in OpenAI's form, or conversations in LLaVA's",
    )
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="write PREFIX_text, PREFIX_images and PREFIX.json",
    )
    add(
        "--tokenizer-model",
        required=True,
        metavar="PATH",
        help="tokenizer.json, or the directory of a Hugging Face tokenizer, with the tokens of the "
        "Qwen chat template",
    )
    add("--chat-template", metavar="FILE", help="a Jinja template (default: the tokenizer's)")
    add(
        "--processor",
        metavar="DIR",
        help="directory with the preprocessor_config.json for resizing and normalizing pictures; "
        "the flags below override it",
    )
    add(
        "--image-folder",
        type=Path,
        metavar="DIR",
        help="directory of the pictures (default: that of the input file)",
    )
    add("--patch-size", type=int, help="side of a patch in pixels (default: 16)")
    add(
        "--merge-size",
        type=int,
        help="side of the square of patches of a token, in patches (default: 2)",
    )
    add("--min-pixels", type=int, help="least pixels of a resized picture (default: 65536)")
    add("--max-pixels", type=int, help="most pixels of a resized picture (default: 16777216)")
    for name, what in (("mean", "mean"), ("std", "standard deviation")):
        add(
            f"--image-{name}",
            dest=name,
            type=_numbers,
            metavar="R,G,B",
            help=f"{what} by which colors are normalized, from 0 to 1 (default: 0.5,0.5,0.5)",
        )
    _add_skip_flag(parser)
    add("--workers", type=int, default=1, help="processes that read pictures")
    return parser


def _add_skip_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--skip-bad-samples",
        action="store_true",
        help="leave out bad lines, and damaged files from the damage on, and count them; more than "
        "a tenth of bad lines is an error",
    )


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(one) for one in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers as in 0.5,0.5,0.5, got {text!r}"
        ) from None


def checkpoint(program: str) -> argparse.ArgumentParser:
    """The parser of `checkpoint`."""
    parser = ProgramParser(
        prog=program,
        description="Lists, shows, verifies, compares and exports checkpoints.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, about: str, *places: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about, description=about)
        added.set_defaults(command=name)
        for place in places:
            added.add_argument(place, metavar=place.upper(), help=_PLACES[place])
        added.add_argument("--json", action="store_true", help="print JSON")
        return added

    add("list", "Lists the checkpoints in a directory, published or not.", "root")
    shown = add(
        "show",
        "Shows the content of a checkpoint, its files, and the ranks that wrote it.",
        "checkpoint",
    )
    shown.add_argument(
        "--chunks", action="store_true", help="also show a line for each chunk of a tensor"
    )
    add("verify", "Reads every byte of a checkpoint, and lists all problems.", "checkpoint")
    compared = add("diff", "Compares two checkpoints key by key.", "a", "b")
    for each in (shown, compared):
        each.add_argument(
            "--key",
            nargs="+",
            metavar="PATTERN",
            help="only keys that match these patterns, as in a shell",
        )
    exported = add(
        "export",
        "Exports a run's model for the transformers library: weights, config and tokenizer.",
        "run",
        "out",
    )
    exported.add_argument(
        "--dtype",
        choices=FLOAT_NAMES,
        help="dtype of the weights; fp16 has no values beyond 65504 (default: bf16 for weights in "
        "fp32, others unchanged)",
    )
    exported.add_argument(
        "--max-shard-size",
        type=quantities.size,
        default=MAX_SHARD_BYTES,
        metavar="SIZE",
        help="most bytes of tensors in one file, e.g. 500MB (default: 5GB)",
    )
    _add_model_flags(exported)
    return parser


def generate(program: str) -> argparse.ArgumentParser:
    """The parser of `generate`."""
    parser = ProgramParser(prog=program, description="Samples text from a checkpoint.")
    parser.add_argument(
        "--load",
        required=True,
        metavar="DIR",
        help="directory of a run's checkpoints, one checkpoint, or a directory in Hugging Face's "
        "format",
    )
    _add_model_flags(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue; may be given several times",
    )
    parser.add_argument(
        "--image",
        action="append",
        type=Path,
        metavar="FILE",
        help="a picture that the prompt is about; may be given several times",
    )
    parser.add_argument(
        "--processor",
        metavar="DIR",
        help="directory with the preprocessor_config.json for resizing pictures (default: as in "
        "training)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=100, help="most tokens to generate")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.5,
        help="sampling temperature; 0: always the likeliest token",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=50,
        help="sample from this many of the likeliest tokens; 0: from all",
    )
    parser.add_argument("--seed", type=int, default=1234, help="seed of the sampling")
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--config`, `--ckpt-step` and `--tokenizer-model`."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with the model's and the tokenizer's settings (default: the run's)",
    )
    parser.add_argument(
        "--ckpt-step", type=int, help="iteration of the checkpoint to load (default: the newest)"
    )
    parser.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="tokenizer.json, or the directory of a Hugging Face tokenizer (default: the run's)",
    )


# By command. Programs that are not here are quick to import, or have torchrun's flags.
_PARSERS: dict[str, Callable[[str], argparse.ArgumentParser]] = {
    "plan": plan,
    "preprocess": preprocess,
    "preprocess-multimodal": preprocess_multimodal,
    "checkpoint": checkpoint,
    "generate": generate,
}


def parser_of(command: str, program: str) -> argparse.ArgumentParser | None:
    """The parser of a command's `--help`; None if the command prints its help itself."""
    if command in TRAINERS:
        return build_parser(*TRAINERS[command])
    return _PARSERS[command](program) if command in _PARSERS else None


def show_help_if_asked(command: str, program: str, argv: Sequence[str]) -> None:
    """Prints the help of a program and exits if `argv` has -h or --help."""
    if {"-h", "--help"}.isdisjoint(argv):
        return
    parser = parser_of(command, program)
    if parser is not None:
        parser.parse_args(["--help"] if command in TRAINERS else argv)
