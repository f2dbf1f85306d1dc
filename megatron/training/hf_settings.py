"""Settings that a folder of the transformers library decides: its architecture, the rows of its
embedding, and its tokenizer.

    values = {"lr": 1e-4, "seq_length": 4096}  # what a user has set, by field name
    take_settings(values, read_folder("models/qwen3"))  # adds num_layers, tokenizer_model, ...

The folder's config.json says what its weights compute, so a setting that contradicts it is refused
rather than overridden. What concerns training alone is the user's.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.log import printable
from megatron.core.models.description import ModelDescription
from megatron.core.models.hugging_face import config_from_hf
from megatron.core.models.multimodal.vision_config import VisionConfig
from megatron.core.options import ConfigError, Field, options_of, shown
from megatron.core.transformer.config import TransformerConfig
from megatron.training.checkpoint.hf_files import CONFIG_FILE, read_json
from megatron.training.tokenizer import TokenizerConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

_SENTENCEPIECE_FILE = "tokenizer.model"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # the owner and the model

# They change how a model is trained or what its weights are called, not what they compute.
_OF_TRAINING = (
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "vision_init_method_std",
    "recompute_granularity",
    "hf_architecture",
    "moe_router_dtype",
    "moe_router_bias_update_rate",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "z_loss_coeff",
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
)
# A config.json without a length leaves it to the user.
_NO_LIMIT = ("max_position_embeddings", None)


class FolderModel(NamedTuple):
    """What a folder's config.json describes."""

    folder: str
    model: ModelDescription


def read_folder(folder: str | Path) -> FolderModel:
    """The model that a folder's config.json describes.

    Raises:
        ConfigError: as `expect_model_folder`, or if no model here computes the same.
    """
    expect_model_folder(folder)
    file = Path(folder) / CONFIG_FILE
    try:
        content = read_json(file)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    return FolderModel(str(folder), config_from_hf(content, str(file)))


def expect_model_folder(folder: str | Path) -> None:
    """ConfigError if there is no folder with a config.json, with what to do instead."""
    path = Path(folder)
    if os.path.lexists(path / CONFIG_FILE):
        return

    got = shown(str(folder))
    if os.path.lexists(path) and not path.is_dir():
        got += ", which is a file. Give the folder that it is in"
    elif path.is_dir():
        got += ", which has none"
        # What the Hub's client keeps of a model, under the name of its commit.
        snapshots = sorted(path.glob(f"snapshots/*/{CONFIG_FILE}"))
        if snapshots:
            got += f". Give the folder inside it: {printable(str(snapshots[-1].parent))}"
    else:
        got += ", where there is none"
        if _HUB_NAME.fullmatch(str(folder)):
            command = f"hf download {folder} --local-dir models/{path.name}"
            got += f". Models of the Hub are downloaded first: `{command}`"
    raise ConfigError(f"Expected a local folder with {CONFIG_FILE}, got {got}.")


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return any(os.path.lexists(Path(folder) / name) for name in TOKENIZER_FILES)


def take_settings(values: dict[str, Any], model: FolderModel) -> list[str]:
    """Adds the settings of a folder to those that a user has set.

    Contradictions are replaced by what the folder says, so that the settings can be checked
    further before an error is raised.

    Args:
        values: converted values by field name, of the command line and YAML files; in place.

    Returns:
        A line of a ConfigError for each setting that contradicts the folder, with both values.
    """
    lines = []
    config, num_rows, vision = model.model
    fields = {field.name: field for field in options_of(TransformerConfig)}
    decided = _decided(config)
    if vision is not None:
        fields |= {field.name: field for field in options_of(VisionConfig)}
        decided |= dataclasses.asdict(vision)
    for name, value in decided.items():
        given = values.get(name)
        if given is not None and (name in _OF_TRAINING or (name, value) == _NO_LIMIT):
            continue
        if given not in (None, value):
            lines.append(_contradiction(fields[name], value, given, model.folder))
        if value is not None:
            values[name] = value
    return lines + _take_vocabulary(values, model.folder, num_rows)


def _decided(config: TransformerConfig) -> dict[str, Any]:
    """The settings that a folder's model has, by field name. None: a part that it does not have."""
    values = dataclasses.asdict(config)
    if config.num_query_groups == config.num_attention_heads:
        # One group per head is what the absence of the flag means.
        del values["group_query_attention"]
    return values


def _take_vocabulary(values: dict[str, Any], folder: str, num_rows: int) -> list[str]:
    """Adds the tokenizer, unless the user names one, and the number of rows of the embedding, which
    is the folder's and is not padded, unless the user asks for more. Returns a line for each
    contradiction.
    """
    kind = values.get("tokenizer_type", "HuggingFaceTokenizer")
    if kind == "HuggingFaceTokenizer" and values.get("tokenizer_model") is None:
        if not has_tokenizer(folder):
            got = "none"
            if os.path.lexists(Path(folder) / _SENTENCEPIECE_FILE):
                got = (
                    f"{_SENTENCEPIECE_FILE} alone, which must be converted to tokenizer.json first"
                )
            return [
                f"--tokenizer-model: expected a tokenizer's files in {folder}, or another "
                f"tokenizer, got {got}."
            ]
        values["tokenizer_model"] = folder

    lines: list[str] = []
    fields = {field.name: field for field in options_of(TokenizerConfig)}
    # The end of a document is an id of NullTokenizer's beyond those that --vocab-size counts.
    vocab_size = num_rows - (kind == "NullTokenizer")
    given = values.get("vocab_size")
    if type(given) is int and given > vocab_size:
        # Rows are added.
        values.setdefault("make_vocab_size_divisible_by", 1)
        return lines
    if given not in (None, vocab_size):
        lines.append(_contradiction(fields["vocab_size"], vocab_size, given, folder))
    values["vocab_size"] = vocab_size

    divisor = values.get("make_vocab_size_divisible_by", 1)
    if type(divisor) is int and divisor > 0 and num_rows % divisor:
        flag = fields["make_vocab_size_divisible_by"].flag
        expected = f"a divisor of the {num_rows} rows that the embedding in {folder} has"
        lines.append(f"{flag}: expected {expected}, got {divisor}.")
        divisor = 1
    values["make_vocab_size_divisible_by"] = divisor
    return lines


def _contradiction(field: Field, value: Any, given: Any, folder: str) -> str:
    file = Path(folder) / CONFIG_FILE
    return f"{field.flag}: expected {shown(value)}, as {file} says, got {shown(given)}."
