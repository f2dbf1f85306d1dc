"""`export`: the model of a run as a folder of the transformers library."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, NamedTuple

import torch

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.metadata import tensors_of
from megatron.core.dist_checkpointing.formats import ReadableCheckpoint, nbytes_of, open_checkpoint
from megatron.core.models.gpt.hugging_face import hf_config
from megatron.training.checkpoint.hf_export import export_hf
from megatron_hybrid.checkpoint.to_file import Progress
from megatron_hybrid.saved_model import SavedModel, find_model


class Source(NamedTuple):
    """What is exported."""

    model: SavedModel
    checkpoint: ReadableCheckpoint

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        tensors = tensors_of(self.checkpoint.metadata)
        others = ("optim", "rng")
        return sum(nbytes_of(entry) for key, entry in tensors.items() if not key.startswith(others))


def find_source(arguments: argparse.Namespace) -> Source:
    """The checkpoint that the command line names, and its model.

    Raises:
        CheckpointError, ConfigError: as `find_model`, and for a folder that is exported already.
    """
    model = find_model(
        arguments.run, arguments.ckpt_step, arguments.config, arguments.tokenizer_model
    )
    if model.checkpoint is None:
        raise CheckpointError(
            f"Expected a run or its checkpoint, got {model.path}, which is in the format of the "
            "transformers library."
        )
    return Source(model, open_checkpoint(*model.checkpoint))


def write_export(
    source: Source, out: str, dtype: torch.dtype | None, progress: Progress
) -> dict[str, Any]:
    """Writes the folder `out`. Returns what was done, as plain data.

    Args:
        dtype: of the weights there, as for `export_hf`.

    Raises:
        CheckpointError, ConfigError: as `export_hf`.
    """
    model, config = source.model, source.model.config
    if config.max_position_embeddings is None:
        # Other programs want a length, and would otherwise take their own default for it.
        config = dataclasses.replace(config, max_position_embeddings=model.seq_length)

    exported = export_hf(
        source.checkpoint,
        out,
        config,
        model.vocab_size,
        tokenizer=model.tokenizer,
        dtype=dtype,
        progress=progress,
    )
    return {
        "source": source.checkpoint.path,
        "target": out,
        "architecture": hf_config(config, model.vocab_size)["architectures"][0],
        "num_tensors": exported.num_tensors,
        "num_bytes": exported.num_bytes,
        "dtype": str(exported.dtype).removeprefix("torch."),
    }
