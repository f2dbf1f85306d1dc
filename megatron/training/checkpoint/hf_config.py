"""The small files in a directory of Hugging Face weights: config.json, the tokenizer and the rest.

A run that starts from such a directory takes its settings from it. config.json defines the
arithmetic of the model, so a setting that contradicts it is rejected. Settings that only affect
training are left to the user:

    values = {"lr": 1e-4, "seq_length": 4096}  # set by the user, by field name
    take_settings(values, read_folder("models/qwen3"))  # adds num_layers, tokenizer_model, ...

A save writes the same files. Tokenizers that were read from files are copied byte for byte, since
the files contain more than a training run reads: chat templates, special tokens, the clean-up of
decoded text.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.distributed.fsdp.module import FsdpModule
from megatron.core.log import printable
from megatron.core.models.description import ModelDescription
from megatron.core.models.hugging_face import (
    OwnModel,
    config_differences,
    config_from_hf,
    description_of,
    hf_config,
)
from megatron.core.models.multimodal.vision_config import VisionConfig
from megatron.core.options import ConfigError, Field, options_of, shown
from megatron.core.transformer.config import TransformerConfig
from megatron.training.checkpoint.hf_files import CONFIG_FILE, copy_file, read_json, write_json
from megatron.training.checkpoint.hf_layout import INDEX_FILE, FolderLayout, main_dtype
from megatron.training.tokenizer import (
    TOKENIZER_CONFIG,
    ByteTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    TokenizerConfig,
    special_tokens,
)

_TOKENIZER_FILE = "tokenizer.json"
_SENTENCEPIECE_FILE = "tokenizer.model"
_GENERATION_FILE = "generation_config.json"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # in a config.json
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # owner/model

# Settings of training, and of the names of weights, which do not affect the arithmetic.
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
# Without a maximum length in config.json, the user may set any.
_NO_LIMIT = ("max_position_embeddings", None)

# Fields of the transformers library's configs that decide what weights of the same names and shapes
# compute. The last four describe rotary embeddings in its versions 4 and 5.
_ARITHMETIC = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "layer_norm_eps",
    "norm_epsilon",
    "no_rope_layers",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)

# Path patterns of a tokenizer's files: for copying a single tokenizer.json, and a whole directory.
_BESIDE = (
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
_TOKENIZER_FILES = (
    *_BESIDE,
    "tokenizer*.json",
    "tokenization_*.py",  # code that tokenizer_config.json refers to
    "vocab.*",
    "merges.txt",
    "tekken.json",
    "*.model",
)

# Files copied from the model that training started from: text and tokenizers, never weights.
_COPIED = ("*.json", "*.jinja", "*.model", "*.py", "*.txt")
_NOT_COPIED = (
    "*.index.json",
    INDEX_FILE,
    # These describe the training of the earlier model or an adapter.
    "adapter_config.json",
    "trainer_state.json",
    "training_args*",
    "*_results.json",
    "requirements*.txt",
)
# Fields of a generation config that contain token ids and are invalid for another tokenizer.
_OF_TOKENS = ("*token_id*", "*suppress_tokens", "*_ids", "sequence_bias")


# Settings of a run


class FolderModel(NamedTuple):
    """The model that a directory's config.json describes."""

    folder: str
    model: ModelDescription


def read_folder(folder: str | Path) -> FolderModel:
    """Reads the model that a directory's config.json describes.

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
    """Raises ConfigError with advice unless a directory with a config.json exists."""
    path = Path(folder)
    if os.path.lexists(path / CONFIG_FILE):
        return

    got = shown(str(folder))
    if os.path.lexists(path) and not path.is_dir():
        got += ", which is a file. Give its directory"
    elif path.is_dir():
        got += ", which has none"
        # The cache of the Hub's client has one directory per commit.
        snapshots = sorted(path.glob(f"snapshots/*/{CONFIG_FILE}"))
        if snapshots:
            got += f". Give its subdirectory {printable(str(snapshots[-1].parent))}"
    else:
        got += ", which does not exist"
        if _HUB_NAME.fullmatch(str(folder)):
            command = f"hf download {folder} --local-dir models/{path.name}"
            got += f". Models of the Hub are downloaded first: `{command}`"
    raise ConfigError(f"Expected a local directory with {CONFIG_FILE}, got {got}.")


def has_tokenizer(folder: str | Path) -> bool:
    """Returns whether a directory contains the files of a tokenizer."""
    return any(os.path.lexists(Path(folder) / name) for name in (_TOKENIZER_FILE, TOKENIZER_CONFIG))


def take_settings(values: dict[str, Any], model: FolderModel) -> list[str]:
    """Adds the settings of a directory to the user's settings.

    A contradicting setting is replaced by the directory's, so that the other checks still run
    before an error is raised.

    Args:
        values: converted values of the command line and YAML files, by field name; changed in
            place.

    Returns:
        A line for a ConfigError for each contradicting setting, with both values.
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
    """Returns the settings of a model by field name. None means that it lacks the part."""
    values = dataclasses.asdict(config)
    if config.num_query_groups == config.num_attention_heads:
        # One group per head is the default without the flag.
        del values["group_query_attention"]
    return values


def _take_vocabulary(values: dict[str, Any], folder: str, num_rows: int) -> list[str]:
    """Adds the tokenizer, unless the user sets one, and the number of embedding rows. The rows are
    not padded, unless the user requests more. Returns a line for each contradicting setting.
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
    # NullTokenizer adds an id for the end of a document to the ids of --vocab-size.
    vocab_size = num_rows - (kind == "NullTokenizer")
    given = values.get("vocab_size")
    if type(given) is int and given > vocab_size:
        # The user adds rows.
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
    return f"{field.flag}: expected {shown(value)}, as in {file}, got {shown(given)}."


# Comparison with a model


def config_problems(model: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """Returns the differences in arithmetic between a config.json and a model, as clauses.

    Args:
        saved: the content of config.json; empty without one.

    Raises:
        CheckpointDamagedError: if the transformers library rejects the content.
    """
    if isinstance(model, OwnModel):
        return config_differences(saved, CONFIG_FILE, description_of(model)) if saved else []
    config = config_of(model)
    if config is None or not saved:
        return []

    own, kind = config.to_dict(), saved.get("model_type")
    if kind is not None and kind != own.get("model_type"):
        return [_difference("model_type", kind, own.get("model_type"))]

    # Some classes allocate by the number of layers, which the file may claim to be any.
    layers = "num_hidden_layers"
    if layers in saved and saved[layers] != own.get(layers):
        return [_difference(layers, saved[layers], own.get(layers))]

    try:
        # The library converts files of its earlier versions and adds default values.
        there = type(config).from_dict(copy.deepcopy(dict(saved))).to_dict()
    except Exception as error:  # its validation raises many types
        raise CheckpointDamagedError(
            f"Expected a config of {type(config).__name__} in {CONFIG_FILE}, got "
            f"{shown(str(error))}."
        ) from error

    return [
        _difference(name, theirs, ours)
        for name in _ARITHMETIC
        if (theirs := _arithmetic(there, name)) != (ours := _arithmetic(own, name))
    ]


def _arithmetic(config: Mapping[str, Any], name: str) -> Any:
    """Returns a field without the older name of `rope_type`, which only some files have."""
    value = config.get(name)
    if isinstance(value, Mapping):
        return {key: inner for key, inner in value.items() if key != "type"}
    return value


def _difference(name: str, theirs: Any, ours: Any) -> str:
    return f"{CONFIG_FILE} says {name} {shown(theirs)} where the model has {shown(ours)}"


def config_of(model: nn.Module) -> Any:
    """Returns the config of a model of the transformers library; None for other modules."""
    config = getattr(model, "config", None)
    methods = ("from_dict", "to_dict", "save_pretrained")
    return config if all(callable(getattr(config, name, None)) for name in methods) else None


# Writing


class FolderExtras(NamedTuple):
    """The contents of a directory of Hugging Face weights besides weights and config.json.

    Attributes:
        tokenizer: one of our tokenizers, or an object with `save_pretrained(directory)`.
        processor: an object with `save_pretrained(directory)`.
        base_model_path: the directory of the model that training started from. Files that the save
            does not write are copied from it: configs, the code that they refer to, and the
            tokenizer's files if neither a tokenizer nor a processor is given. A given tokenizer's
            ids replace the ids in the generation config.
    """

    tokenizer: Any = None
    processor: Any = None
    base_model_path: str | Path | None = None

    @classmethod
    def of_model(
        cls, tokenizer: Any, tokenizer_path: str | None, base_model: str | None
    ) -> FolderExtras:
        """Returns the extras of a model that is trained here.

        Args:
            tokenizer: the tokenizer of the training run, read from `tokenizer_path`; None without
                files.
            base_model: the directory of the model that training started from, if any.
        """
        if base_model is None or tokenizer_path is None:
            return cls(tokenizer, base_model_path=base_model)

        path = Path(tokenizer_path)
        folder = path.parent if path.name == _TOKENIZER_FILE else path
        # The directory has more files of its tokenizer than a training run reads.
        is_base_tokenizer = folder.samefile(base_model)
        return cls(None if is_base_tokenizer else tokenizer, base_model_path=base_model)

    def check(self) -> None:
        """Raises CheckpointError for extras that cannot be written and for a missing directory."""
        _check_tokenizer(self.tokenizer)
        if self.processor is not None and not _can_save(self.processor):
            raise CheckpointError(
                f"Expected a processor with save_pretrained, got {type(self.processor).__name__}."
            )
        base = self.base_model_path
        if base is not None and not Path(base).is_dir():
            raise CheckpointError(
                "Expected base_model_path to be the local directory of the model that training "
                f"started from, got {os.fspath(base)!r}."
            )

    def save(self, folder: Path) -> dict[str, Any]:
        """Writes the processor and the tokenizer.

        Returns:
            The token ids for config.json: the tokenizer's, or without one, the base model's.

        Raises:
            CheckpointDamagedError: if the base model's config.json is not a JSON object.
        """
        if self.processor is not None:
            self.processor.save_pretrained(folder)

        # After the processor, which may write another tokenizer.
        ids = _save_tokenizer(self.tokenizer, folder)
        if self.tokenizer is None and self.base_model_path is not None:
            file = Path(self.base_model_path) / CONFIG_FILE
            content = read_json(file) if file.exists() else {}
            decoder = content.get("text_config", {})
            found = {name: content.get(name, decoder.get(name)) for name in _TOKEN_IDS}
            ids = {name: own for name, own in found.items() if own is not None}
        return ids

    def copy_missing(self, folder: Path, ids: Mapping[str, Any]) -> None:
        """Copies the base model's files that the directory lacks, and writes a generation config
        with the tokenizer's ids unless one exists.

        Args:
            ids: the return value of `save`.

        Raises:
            CheckpointDamagedError: if the generation config is not a JSON object.
            OSError: if a file cannot be read or is not a regular file.
        """
        if self.base_model_path is not None:
            self._copy_from(Path(self.base_model_path), folder, ids)
        generation = folder / _GENERATION_FILE
        if self.tokenizer is not None and not generation.exists():
            named = _with_ids({}, ids)
            if named and (folder / CONFIG_FILE).exists():
                write_json(generation, named)

    def _copy_from(self, base: Path, folder: Path, ids: Mapping[str, Any]) -> None:
        own = set(_tokenizer_files(base))
        # The files of two tokenizers must not be mixed. A processor may have written one.
        is_taken = self.tokenizer is not None or any(_tokenizer_files(folder))
        for name in sorted({Path(path.name) for path in base.iterdir()} | own):
            is_wanted = name in own or (
                _matches(name.name, _COPIED) and not _matches(name.name, _NOT_COPIED)
            )
            if is_taken and name in own:
                continue
            if not is_wanted or (folder / name).exists() or (base / name).is_dir():
                continue

            if name.name == _GENERATION_FILE and self.tokenizer is not None:
                write_json(folder / name, _with_ids(read_json(base / name), ids))
            else:
                copy_file(base / name, folder / name)


def write_small_files(
    folder: Path,
    model: nn.Module | ModelDescription,
    layout: FolderLayout,
    extras: FolderExtras,
    max_length: int | None = None,
) -> None:
    """Writes all files except the weights: their index, config.json and the extras.

    Args:
        max_length: the maximum length in config.json for one of our models without one. Other
            programs would use their default.

    Raises:
        CheckpointError: for extras that cannot be written.
        ConfigError: if no architecture of the transformers library computes the same as our model.
    """
    if layout.index is not None:
        write_json(folder / INDEX_FILE, layout.index)

    ids, dtype = extras.save(folder), main_dtype(layout.tensors)
    description = description_of(model) if isinstance(model, OwnModel) else model
    if isinstance(description, ModelDescription):
        _write_own_config(folder, description, dtype, ids, max_length)
    elif (theirs := config_of(description)) is not None:
        _write_their_config(folder, description, theirs, dtype)
    extras.copy_missing(folder, ids)


def _write_own_config(
    folder: Path,
    description: ModelDescription,
    dtype: torch.dtype | None,
    ids: Mapping[str, Any],
    max_length: int | None,
) -> None:
    config = description.config
    if config.max_position_embeddings is None:
        config = dataclasses.replace(config, max_position_embeddings=max_length)
    name = str(dtype).removeprefix("torch.")
    # transformers reads torch_dtype before version 4.56, and dtype since.
    content = hf_config(description._replace(config=config)) | {"dtype": name, "torch_dtype": name}
    # The ids belong to the decoder, which is a section in configs of multimodal models.
    content.get("text_config", content).update(ids)
    write_json(folder / CONFIG_FILE, content)


def _write_their_config(
    folder: Path, model: nn.Module, config: Any, dtype: torch.dtype | None
) -> None:
    config = copy.deepcopy(config)
    config.dtype = dtype
    config.architectures = [_original_class(model).__name__]
    config.save_pretrained(folder)

    generation = getattr(model, "generation_config", None)
    if _can_save(generation):
        generation.save_pretrained(folder)  # type: ignore[union-attr]


def _original_class(model: nn.Module) -> type[nn.Module]:
    """Returns the class of a model before it was sharded."""
    kinds: Iterable[type[Any]] = type(model).__mro__
    return next(kind for kind in kinds if not issubclass(kind, (FsdpModule, FSDPModule)))


def _can_save(value: Any) -> bool:
    return callable(getattr(value, "save_pretrained", None))


def _with_ids(generation: Mapping[str, Any], ids: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a generation config with the token ids of another tokenizer."""
    kept = {name: value for name, value in generation.items() if not _matches(name, _OF_TOKENS)}
    return kept | {name: value for name, value in ids.items() if value is not None}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


# Writing a tokenizer


def _tokenizer_files(folder: Path, patterns: Sequence[str] = _TOKENIZER_FILES) -> Iterator[Path]:
    """Yields the paths of a tokenizer's files relative to their directory."""
    for path in sorted((*folder.glob("*"), *folder.glob("additional_chat_templates/*"))):
        relative = path.relative_to(folder)
        if _matches(relative.as_posix(), patterns) and not path.is_dir():
            yield relative


def _check_tokenizer(tokenizer: Any) -> None:
    """Raises CheckpointError for a tokenizer that `_save_tokenizer` cannot write."""
    if tokenizer is None or isinstance(tokenizer, (ByteTokenizer, NullTokenizer)):
        return
    if isinstance(tokenizer, HuggingFaceTokenizer):
        if not tokenizer.path.exists():
            raise CheckpointError(
                f"Expected the tokenizer's files in {tokenizer.path}, got none: they were removed "
                "or renamed after they had been read."
            )
    elif not _can_save(tokenizer):
        raise CheckpointError(
            "Expected a tokenizer of this project, or one with save_pretrained, got "
            f"{type(tokenizer).__name__}."
        )


def _save_tokenizer(tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Writes a tokenizer's files. Returns the token ids for config.json.

    `NullTokenizer` has no files, since its text consists of token ids.
    """
    if tokenizer is None:
        return {}
    if isinstance(tokenizer, NullTokenizer):
        return {"eos_token_id": tokenizer.eod}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _copy_tokenizer(tokenizer, folder)
    if isinstance(tokenizer, ByteTokenizer):
        fast = _byte_level()
        fast.save(str(folder / _TOKENIZER_FILE))
        _write_tokenizer_config(folder, {"eos_token": str(fast.id_to_token(tokenizer.eod))})
        return {"eos_token_id": tokenizer.eod}

    tokenizer.save_pretrained(folder)
    return {name: getattr(tokenizer, name, None) for name in _TOKEN_IDS}


def _copy_tokenizer(tokenizer: HuggingFaceTokenizer, folder: Path) -> dict[str, Any]:
    """Copies a tokenizer's files and adds the fields that the transformers library requires.
    Returns the ids of its special tokens.
    """
    is_folder = tokenizer.path.is_dir()
    source = tokenizer.path if is_folder else tokenizer.path.parent
    for name in _tokenizer_files(source, _TOKENIZER_FILES if is_folder else _BESIDE):
        copy_file(source / name, folder / name)
    if not is_folder:
        copy_file(tokenizer.path, folder / _TOKENIZER_FILE)
    elif not (folder / _TOKENIZER_FILE).exists():
        tokenizer.backend.save(str(folder / _TOKENIZER_FILE))  # converted from another format

    named = special_tokens(source)
    named.setdefault("eos_token", str(tokenizer.backend.id_to_token(tokenizer.eod)))
    _write_tokenizer_config(folder, named)
    ids = {f"{name}_id": tokenizer.backend.token_to_id(token) for name, token in named.items()}
    return {name: ids[name] for name in _TOKEN_IDS if ids.get(name) is not None}


def _write_tokenizer_config(folder: Path, named: dict[str, str]) -> None:
    """Writes tokenizer_config.json, or adds the special tokens if it has no end of a document."""
    path = folder / TOKENIZER_CONFIG
    content = read_json(path) if path.exists() else {}
    if content.get("eos_token") is not None:
        return
    # The class that uses tokenizer.json as it is, instead of the architecture's usual one.
    made = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(path, made | named | {name: own for name, own in content.items() if own is not None})


def _byte_level() -> tokenizers.Tokenizer:
    """Returns `ByteTokenizer` as a tokenizer of the tokenizers library."""
    # The library's byte alphabet: printable bytes are themselves, and characters from 256 on
    # replace the others.
    is_printable = [chr(byte) in set(pre_tokenizers.ByteLevel.alphabet()) for byte in range(256)]
    others = iter(range(256, 512))
    letters = [chr(byte) if is_printable[byte] else chr(next(others)) for byte in range(256)]

    found = tokenizers.Tokenizer(
        models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[])
    )
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(["<|endoftext|>"])
    return found
