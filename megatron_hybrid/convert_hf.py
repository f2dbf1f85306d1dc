"""Converts models between Hugging Face directories and runs.

    python -m megatron_hybrid convert-hf import models/qwen3 runs/start
    python -m megatron_hybrid pretrain --hf-model models/qwen3 --load runs/start --finetune ...
    python -m megatron_hybrid convert-hf export runs/mine exports/mine --dtype bf16

`import` writes a checkpoint. `pretrain_gpt.py --hf-model` also starts from the directory itself; a
checkpoint is for stores that all machines share, and for the checkpoint tools. `export` is
`checkpoint export`. Runs in one process on the CPU. Exit code: 0, or 2 for errors, which leave no
files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.help_format import ProgramParser
from megatron.core.host_memory import format_bytes
from megatron.core.log import printable
from megatron_hybrid.checkpoint.export import add_export_flags, export_run, sentence
from megatron_hybrid.checkpoint.from_hf import import_hf
from megatron_hybrid.endings import one_line_errors

_MAX_LINE = 4000  # characters


def main(argv: Sequence[str] | None = None, program: str = "convert-hf") -> int:
    """Converts; returns the exit code."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    command: Callable[[argparse.Namespace], str] = arguments.command
    with one_line_errors(program, (CheckpointError, OSError, ValueError)):
        print(printable(command(arguments), _MAX_LINE))
        return 0
    return 2


def import_folder(arguments: argparse.Namespace) -> str:
    """Imports a Hugging Face directory as a checkpoint."""
    summary = import_hf(arguments)
    size = format_bytes(summary["num_bytes"])
    what = f"{summary['num_tensors']} tensors of {size} in fp32"
    return f"{summary['target']}: {what}, of {summary['source']}"


def export_folder(arguments: argparse.Namespace) -> str:
    """Exports a run's model as a Hugging Face directory."""
    return sentence(export_run(arguments))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ProgramParser(description="Converts models between the transformers library and runs.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    imported = commands.add_parser(
        "import", help=import_folder.__doc__, description=import_folder.__doc__
    )
    imported.set_defaults(command=import_folder)
    imported.add_argument(
        "folder", metavar="HF_DIR", help="directory with config.json, weights and a tokenizer"
    )
    imported.add_argument(
        "root", metavar="ROOT", help="directory for the checkpoint, without others"
    )
    imported.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="tokenizer.json, or the directory of a Hugging Face tokenizer (default: HF_DIR's)",
    )
    imported.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="rows of the embedding, if there are to be more than HF_DIR has (default: HF_DIR's)",
    )
    imported.add_argument(
        "--seq-length",
        type=int,
        metavar="N",
        help="tokens per training sample (default: the model's longest)",
    )

    exported = commands.add_parser(
        "export", help=export_folder.__doc__, description=export_folder.__doc__
    )
    exported.set_defaults(command=export_folder)
    exported.add_argument("run", metavar="RUN", help="directory of checkpoints, or one checkpoint")
    exported.add_argument("out", metavar="HF_DIR", help="directory to write, absent or empty")
    add_export_flags(exported)
    return parser.parse_args(argv)
