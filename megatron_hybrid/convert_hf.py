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
from collections.abc import Sequence

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.host_memory import format_bytes
from megatron.core.log import printable
from megatron_hybrid import parsers
from megatron_hybrid.checkpoint.export import export_run, sentence
from megatron_hybrid.checkpoint.from_hf import import_hf
from megatron_hybrid.endings import one_line_errors

_MAX_LINE = 4000  # characters


def main(argv: Sequence[str] | None = None, program: str = "convert-hf") -> int:
    """Converts; returns the exit code."""
    arguments = parsers.convert_hf(program).parse_args(argv)
    command = import_folder if arguments.command == "import" else export_folder
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
