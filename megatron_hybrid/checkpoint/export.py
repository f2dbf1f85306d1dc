"""`export`: writes the model of a run as a Hugging Face directory."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.formats import open_checkpoint
from megatron.core.dtypes import DTYPES
from megatron.core.host_memory import format_bytes
from megatron.core.log import printable
from megatron.core.models.hugging_face import hf_config
from megatron.training.checkpoint.hf_config import FolderExtras
from megatron.training.checkpoint.hf_export import bytes_to_export, export_hf
from megatron_hybrid.checkpoint.progress import progress_bar
from megatron_hybrid.saved_model import find_model


def export_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Exports the run on the command line. Returns a summary as plain data.

    Raises:
        CheckpointError, ConfigError: as `find_model` and `export_hf`, and for an exported
            directory.
    """
    model = find_model(
        arguments.run, arguments.ckpt_step, arguments.config, arguments.tokenizer_model
    )
    if model.checkpoint is None:
        raise CheckpointError(
            f"Expected a run or its checkpoint, got {model.path}, which is a Hugging Face "
            "directory."
        )

    checkpoint, description = open_checkpoint(*model.checkpoint), model.description
    if description.config.max_position_embeddings is None:
        # Without a length, other programs use their default.
        config = dataclasses.replace(description.config, max_position_embeddings=model.seq_length)
        description = description._replace(config=config)

    base_model = model.base_model
    if base_model is not None and not Path(base_model).is_dir():
        print(
            f"export: {printable(base_model)}, the base model of the run, does not exist: the "
            "export has no generation settings except the tokenizer's ids",
            file=sys.stderr,
        )
        base_model = None

    extras = FolderExtras.of_model(model.tokenizer, model.tokenizer_path, base_model)
    with progress_bar("export", bytes_to_export(checkpoint, description)) as progress:
        exported = export_hf(
            checkpoint,
            arguments.out,
            description,
            tokenizer=extras.tokenizer,
            base_model_path=base_model,
            dtype=None if arguments.dtype is None else DTYPES[arguments.dtype],
            max_shard_bytes=arguments.max_shard_size,
            progress=progress,
        )
    return {
        "source": checkpoint.path,
        "target": arguments.out,
        "architecture": hf_config(description)["architectures"][0],
        "num_tensors": exported.num_tensors,
        "num_bytes": exported.num_bytes,
        "dtype": str(exported.dtype).removeprefix("torch."),
    }


def sentence(summary: dict[str, Any]) -> str:
    """Returns a summary as a sentence."""
    size = format_bytes(summary["num_bytes"])
    what = f"{summary['num_tensors']} tensors of {size} in {summary['dtype']}"
    return f"{summary['target']}: {summary['architecture']}, {what}, of {summary['source']}"
