"""Imports a directory of Hugging Face weights as an initial checkpoint, in one process without a
model.

Tensors are copied from file to file: the weight files are mapped, and at most one of their tensors
is in memory. Like a run's checkpoint, the result has fp32 main weights and records the
architecture, the tokenizer and the directory in its settings.
"""

from __future__ import annotations

import argparse
import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.config import FSDP_DTENSOR
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.state.entries import Entry, Stored, Values
from megatron.core.dist_checkpointing.store import open_store, path_of
from megatron.core.models.description import ModelDescription
from megatron.core.models.families.row_map import RowMap
from megatron.core.models.hugging_face import OwnModel, build_model
from megatron.core.options import ConfigError
from megatron.core.transformer.config import TransformerConfig
from megatron.training.arguments import section_from_values
from megatron.training.checkpoint.hf_config import (
    expect_model_folder,
    read_folder,
    take_settings,
)
from megatron.training.checkpoint.hf_files import WeightFiles
from megatron.training.checkpoint.hf_weights import entries_to_load
from megatron.training.checkpoint.run_info import FORMAT_VERSION
from megatron.training.tokenizer import TokenizerConfig, build_tokenizer, padded_vocab_size
from megatron_hybrid.checkpoint.from_file import expect_no_checkpoint, publish_import
from megatron_hybrid.checkpoint.progress import progress_bar


def import_hf(arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes and publishes ROOT/iter_0000000. Returns a summary as plain data.

    Raises:
        ConfigError: no model here computes what config.json describes, or the tokenizer does not
            fit.
        CheckpointError: before writing, if ROOT contains checkpoints, or the weights are damaged or
            another model's; later, if they cannot be read or written. A failed import leaves no
            files.
    """
    expect_model_folder(arguments.folder)  # with the path as the user wrote it
    folder = Path(arguments.folder).resolve()
    store = open_store(arguments.root)
    expect_no_checkpoint(store)  # before reading large files

    model, config = _settings(folder, arguments)
    num_bytes = sum(weight.numel() * 4 for weight in model.parameters())

    # The fields that --finetune and the programs that load a model need.
    train_state = {
        "format_version": FORMAT_VERSION,
        "progress": {"iteration": 0},
        "config": config,
    }

    with ExitStack() as stack:
        progress = stack.enter_context(progress_bar("import", num_bytes))
        files = WeightFiles.open(folder, stack)
        entries = [_from_files(entry, rows, files) for entry, rows in entries_to_load(model, files)]
        publish_import(store, entries, train_state, progress)
    return {
        "source": str(folder),
        "target": path_of(store, checkpoint_name(0)),
        "num_tensors": len(entries),
        "num_bytes": num_bytes,
    }


def _settings(folder: Path, arguments: argparse.Namespace) -> tuple[OwnModel, dict[str, Any]]:
    """Returns the model on meta, and the config of runs that start from the checkpoint."""
    values: dict[str, Any] = {}
    if arguments.tokenizer_model is not None:
        values["tokenizer_model"] = str(Path(arguments.tokenizer_model).resolve())
    if arguments.vocab_size is not None:
        values["vocab_size"] = arguments.vocab_size
    found = read_folder(folder)
    if lines := take_settings(values, found):
        raise ConfigError(" ".join(lines))
    config = section_from_values(TransformerConfig, values)
    tokenizer_config = section_from_values(TokenizerConfig, values)
    tokenizer = build_tokenizer(tokenizer_config, rows_of=str(folder))
    num_rows = padded_vocab_size(tokenizer_config, tokenizer)

    longest = config.max_position_embeddings
    length = longest if arguments.seq_length is None else arguments.seq_length
    if length is None:
        raise ConfigError("--seq-length: expected a number, since config.json has none, got none.")
    if length < 1 or (longest is not None and length > longest):
        limit = "" if longest is None else f", at most {longest}"
        raise ConfigError(f"--seq-length: expected at least 1{limit}, got {length}.")

    with torch.device("meta"):
        model = build_model(ModelDescription(config, num_rows, found.model.vision))
    values |= {"seq_length": length, "hf_model": str(folder), "ckpt_format": FSDP_DTENSOR}
    return model, values


def _from_files(entry: Entry, rows: RowMap, files: WeightFiles) -> Entry:
    """Returns the entry of a model on meta with values that are read from files."""
    values = _FileRows(entry.part_of(entry.values.stored), rows, files)
    return dataclasses.replace(entry, values=values, first_row=0)


class _FileRows(Values):
    """Values that are rows of a tensor in a mapped file, converted to fp32.

    Args:
        like: a tensor on meta with the shape and dtype of the values.
    """

    def __init__(self, like: torch.Tensor, rows: RowMap, files: WeightFiles) -> None:
        super().__init__(like)
        self._rows = rows
        self._files = files

    def as_stored(self) -> Stored:
        whole = self._files.mapped(self._rows.name)
        if self._rows.matrix_rows is not None:
            whole = whole.flatten(0, 1)
        if whole.dim():
            runs = self._rows.ranges(0, self.shape[0])
            parts = [whole.narrow(0, run.start, run.own_stop - run.own_start) for run in runs]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        # A save multiplies by the scale in fp32, piece by piece, and so converts other dtypes
        # without a second tensor. Multiplication by 1 is exact.
        return Stored(whole, None if whole.dtype == torch.float32 else torch.ones(()))
