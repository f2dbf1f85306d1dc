"""Finds the model, the tokenizer and the weights at a path.

A run's checkpoint contains the run's configuration. Imported weights, and checkpoints of
torch.distributed.checkpoint, do not, so `--config` names a YAML file instead. A Hugging Face
directory has config.json and usually a tokenizer.

[Note: a tokenizer's relative path] A run's configuration has the tokenizer's path from the command
line, often relative to the directory where the run was started. If `--save` was relative too, that
directory is known from the path of the checkpoints. The tokenizer is looked up there first, then in
the current directory, and so is `--hf-model`.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from megatron.core.dist_checkpointing.config import FSDP_DTENSOR
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.manifest import TRAIN_STATE_FILE
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.formats import format_of
from megatron.core.dist_checkpointing.load.checkpoint import read_train_state
from megatron.core.dist_checkpointing.store import Store, latest_iteration, open_store, path_of
from megatron.core.models.description import ModelDescription
from megatron.core.models.multimodal.vision_config import VisionConfig
from megatron.core.options import ConfigError, shown
from megatron.core.transformer.config import TransformerConfig
from megatron.training.arguments import read_yaml, section_from_values
from megatron.training.checkpoint.hf_config import has_tokenizer, read_folder
from megatron.training.checkpoint.hf_files import CONFIG_FILE
from megatron.training.checkpoint.hf_weights import load_hf
from megatron.training.checkpoint.loading import load_weights
from megatron.training.checkpoint.run_state import named_checkpoint, place_of
from megatron.training.tokenizer import (
    HuggingFaceTokenizer,
    Tokenizer,
    TokenizerConfig,
    build_tokenizer,
    padded_vocab_size,
)


class SavedModel(NamedTuple):
    """A model on disk."""

    path: str  # for messages
    description: ModelDescription
    tokenizer: Tokenizer | None
    seq_length: int | None  # in training
    load_into: Callable[[nn.Module], None]  # loads the weights into a model, in place
    checkpoint: tuple[Store, str] | None  # None: a Hugging Face directory
    tokenizer_path: str | None = None  # None: a tokenizer without files
    base_model: str | None = None  # the Hugging Face directory of the initial weights, if any


def find_model(
    root: str,
    iteration: int | None = None,
    config: str | None = None,
    tokenizer_model: str | None = None,
) -> SavedModel:
    """Finds a saved model, without reading its weights.

    Uses only the model's and the tokenizer's settings of a run's configuration, because the data
    and devices of the training may not exist here.

    Args:
        root: a directory of checkpoints, a checkpoint, or a Hugging Face directory.
        iteration: the iteration of the checkpoint; default: the newest.
        config: a YAML file with the model's and the tokenizer's settings; default: the run's.
        tokenizer_model: a tokenizer that replaces the run's.

    Raises:
        CheckpointError, ConfigError: there is no model, or its settings are missing.
    """
    folder = Path(root)
    if "://" not in root and os.path.lexists(folder / CONFIG_FILE):
        for flag, value in (("--ckpt-step", iteration), ("--config", config)):
            if value is not None:
                raise ConfigError(
                    f"{flag}: expected a run or its checkpoint with it, got {root}, which has a "
                    f"{CONFIG_FILE}."
                )
        return _exported(folder, tokenizer_model)

    store, name = _locate(root, iteration)
    values = _saved_values(store, name) if config is None else read_yaml(config)
    seq_length = values.get("seq_length")
    if type(seq_length) is not int or seq_length < 1:
        where = config or f"the configuration in {path_of(store, name)}"
        got = reprlib.repr(seq_length)
        raise CheckpointError(f"Expected seq_length in {where} to be an integer >= 1, got {got}.")

    base_model = _path_of_run(store, values, "hf_model")
    if tokenizer_model is not None:
        kind = "HuggingFaceTokenizer"
        values = {**values, "tokenizer_type": kind, "tokenizer_model": tokenizer_model}
    elif config is None:
        values = {**values, "tokenizer_model": _tokenizer_of_run(store, values, base_model)}
    tokenizer_config = section_from_values(TokenizerConfig, values)
    rows_of = path_of(store, name) if config is None else None
    tokenizer = build_tokenizer(tokenizer_config, rows_of=rows_of)
    return SavedModel(
        path=path_of(store, name),
        description=ModelDescription(
            section_from_values(TransformerConfig, values),
            padded_vocab_size(tokenizer_config, tokenizer),
            _vision_of(values),
        ),
        tokenizer=tokenizer,
        seq_length=seq_length,
        load_into=lambda model: load_weights(store, name, model),
        checkpoint=(store, name),
        tokenizer_path=tokenizer_config.tokenizer_model,
        base_model=base_model,
    )


def _vision_of(values: dict[str, Any]) -> VisionConfig | None:
    """Returns the vision tower of a run's model; None for a text model."""
    if values.get("vision_num_layers") is None:
        return None
    return section_from_values(VisionConfig, values)


def _tokenizer_of_run(store: Store, values: dict[str, Any], base_model: str | None) -> str | None:
    """Returns the path of a run's tokenizer. ConfigError if it is a missing base model's."""
    path = _path_of_run(store, values, "tokenizer_model")
    if path is not None and path == base_model and not os.path.lexists(path):
        raise ConfigError(
            f"--tokenizer-model: expected the tokenizer in {shown(path)}, the run's base model, "
            "got no such directory. Set its new path by --tokenizer-model."
        )
    return path


def _exported(folder: Path, tokenizer_model: str | None) -> SavedModel:
    """Returns the model in a Hugging Face directory."""
    description = read_folder(folder).model
    tokenizer = None
    if tokenizer_model is not None:
        tokenizer = build_tokenizer(TokenizerConfig(tokenizer_model=tokenizer_model))
    elif has_tokenizer(folder):
        tokenizer = HuggingFaceTokenizer(folder)

    return SavedModel(
        path=str(folder),
        description=description,
        tokenizer=tokenizer,
        seq_length=description.config.max_position_embeddings,
        load_into=lambda model: load_hf(model, folder),
        checkpoint=None,
    )


def _locate(root: str, iteration: int | None) -> tuple[Store, str]:
    named = named_checkpoint(root)
    if named is not None:
        if iteration is not None:
            raise CheckpointError(
                f"Expected a directory of checkpoints with --ckpt-step, got the checkpoint {root}."
            )
        return open_store(named[0]), named[1]
    store = open_store(root)
    iteration = latest_iteration(store) if iteration is None else iteration
    if iteration is None:
        raise CheckpointError(f"Expected a checkpoint in {root}, got none.")
    return store, checkpoint_name(iteration)


def _saved_values(store: Store, name: str) -> dict[str, Any]:
    """Returns the run's configuration in a checkpoint."""
    path = path_of(store, name)
    found = format_of(store, name)
    if found is None:
        raise CheckpointError(f"Expected a checkpoint in {path}, got none.")
    # PyTorch writes no such file; a checkpoint of our format without it is damaged.
    has_state = found == FSDP_DTENSOR or store.exists(f"{name}/{TRAIN_STATE_FILE}")
    values = read_train_state(store, name).get("config") if has_state else None
    if not isinstance(values, dict) or not values:
        raise CheckpointError(
            f"Expected the run's configuration in {path}, got none: name a YAML file with the "
            "settings of the model and its tokenizer by --config."
        )

    return values


def _path_of_run(store: Store, values: dict[str, Any], name: str) -> str | None:
    """Resolves a path in a run's configuration; see [Note: a tokenizer's relative path]."""
    path, save = values.get(name), values.get("save")
    if not isinstance(path, str):
        return None
    if not isinstance(save, str) or not store.is_rename_atomic:
        return path
    if Path(path).is_absolute() or Path(save).is_absolute():
        return path

    place, ending = place_of(store.root), f"/{os.path.normpath(save)}"
    if place.endswith(ending):
        found = f"{place.removesuffix(ending)}/{path}"
        if os.path.lexists(found):
            return found
    return path
