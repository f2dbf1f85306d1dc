"""Imports a directory of Hugging Face weights as an initial checkpoint, in one process without a
model.

Tensors are copied from file to file: the weight files are mapped, and at most one of their tensors
is in memory. Like a run's checkpoint, the result has fp32 main weights and records the
architecture, the tokenizer and the directory in its settings.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.config import FSDP_DTENSOR
from megatron.core.dist_checkpointing.format.names import checkpoint_name, path_of
from megatron.core.dist_checkpointing.state.entries import Entry, Stored, Values
from megatron.core.dist_checkpointing.store import Store, open_store
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
from megatron_hybrid.checkpoint.from_file import expect_no_checkpoints, publish_import
from megatron_hybrid.checkpoint.to_file import Progress

_ITERATION = 0  # before any training


@dataclasses.dataclass(frozen=True)
class Import:
    """A checked import that has not written anything yet.

    Attributes:
        folder: the directory of the weights.
        store: the store that the checkpoint is written to.
        model: the model, on meta.
        config: the settings of a run that starts from the checkpoint, by field name.
    """

    folder: Path
    store: Store
    model: OwnModel
    config: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """The size of the checkpoint's tensors."""
        return sum(weight.numel() * 4 for weight in self.model.parameters())

    @property
    def target(self) -> str:
        """The checkpoint's path."""
        return path_of(self.store, checkpoint_name(_ITERATION))


def check_import(
    folder: str,
    root: str,
    *,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
    seq_length: int | None = None,
) -> Import:
    """Checks a directory and the target of its import, without writing.

    Args:
        folder: a directory with config.json, weights and a tokenizer.
        root: a store without checkpoints: a directory or a URL.
        tokenizer_model: a tokenizer that replaces the directory's.
        vocab_size: the number of embedding rows, if larger than in the files.
        seq_length: the sequence length of runs; default: the model's maximum.

    Raises:
        ConfigError: if no model here computes what config.json describes, or the tokenizer does not
            fit.
        CheckpointError: if `root` contains checkpoints.
    """
    expect_model_folder(folder)  # before resolve(), so that the message has the user's spelling
    place = Path(folder).resolve()
    values: dict[str, Any] = {}
    if tokenizer_model is not None:
        values["tokenizer_model"] = str(Path(tokenizer_model).resolve())
    if vocab_size is not None:
        values["vocab_size"] = vocab_size
    found = read_folder(place)
    if lines := take_settings(values, found):
        raise ConfigError(" ".join(lines))
    config = section_from_values(TransformerConfig, values)
    tokenizer_config = section_from_values(TokenizerConfig, values)
    tokenizer = build_tokenizer(tokenizer_config, rows_of=str(place))
    num_rows = padded_vocab_size(tokenizer_config, tokenizer)

    length = config.max_position_embeddings if seq_length is None else seq_length
    _check_length(length, config.max_position_embeddings)

    store = open_store(root)
    expect_no_checkpoints(store)
    with torch.device("meta"):
        model = build_model(ModelDescription(config, num_rows, found.model.vision))
    values |= {"seq_length": length, "hf_model": str(place), "ckpt_format": FSDP_DTENSOR}
    return Import(place, store, model, values)


def _check_length(length: int | None, longest: int | None) -> None:
    if length is None:
        raise ConfigError("--seq-length: expected a number, since config.json has none, got none.")
    if length < 1:
        raise ConfigError(f"--seq-length: expected at least 1, got {length}.")
    if longest is not None and length > longest:
        raise ConfigError(f"--seq-length: expected at most {longest}, got {length}.")


def write_import(checked: Import, progress: Progress) -> dict[str, Any]:
    """Writes and publishes the checkpoint. Returns a summary as plain data.

    Raises:
        CheckpointError: before anything is written, if the weights are damaged or of another model;
            later, if they cannot be read or written. A failed import leaves no files.
    """
    # The fields that --finetune and the programs that load a model need.
    train_state = {
        "format_version": FORMAT_VERSION,
        "progress": {"iteration": _ITERATION},
        "config": checked.config,
    }
    with ExitStack() as stack:
        files = WeightFiles.open(checked.folder, stack)
        entries = [
            _from_files(entry, rows, files) for entry, rows in entries_to_load(checked.model, files)
        ]
        publish_import(checked.store, entries, train_state, progress)
    return {
        "source": str(checked.folder),
        "target": checked.target,
        "num_tensors": len(entries),
        "num_bytes": checked.num_bytes,
    }


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
