"""The files of a tokenizer in a folder of the transformers library.

A tokenizer that was read from files is written as a copy of them, to the byte: what is read of them
here is less than what they say (chat templates, special tokens, how text is cleaned up).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.training.checkpoint.hf_files import copy_file, read_json, write_json
from megatron.training.tokenizer import (
    TOKENIZER_CONFIG,
    ByteTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    special_tokens,
)

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # in a config.json

_TOKENIZER_FILE = "tokenizer.json"
# Patterns of paths in the folder: those that may lie beside a tokenizer.json of any name, and those
# of a folder that is the tokenizer's own.
_BESIDE = (
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
_FILES = (
    *_BESIDE,
    "tokenizer*.json",
    "tokenization_*.py",  # code that tokenizer_config.json names
    "vocab.*",
    "merges.txt",
    "tekken.json",
    "*.model",
)


def tokenizer_files(folder: Path, patterns: Sequence[str] = _FILES) -> Iterator[Path]:
    """The paths of a tokenizer's files in a folder, relative to it."""
    for path in sorted((*folder.glob("*"), *folder.glob("additional_chat_templates/*"))):
        relative = path.relative_to(folder)
        is_wanted = any(fnmatch(relative.as_posix(), pattern) for pattern in patterns)
        if is_wanted and not path.is_dir():
            yield relative


def check_tokenizer(tokenizer: Any) -> None:
    """CheckpointError for a tokenizer that `save_tokenizer` cannot write."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        if not tokenizer.path.exists():
            raise CheckpointError(
                f"Expected the tokenizer's files in {tokenizer.path}, from where they are copied, "
                "got none: they were removed or renamed after they had been read."
            )
        return
    is_ours = isinstance(tokenizer, (ByteTokenizer, NullTokenizer))
    if (
        tokenizer is not None
        and not is_ours
        and not callable(getattr(tokenizer, "save_pretrained", None))
    ):
        raise CheckpointError(
            "Expected a tokenizer of ours or one with save_pretrained, got "
            f"{type(tokenizer).__name__}."
        )


def save_tokenizer(tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Writes a tokenizer's files. Returns the token ids that a config.json names.

    `NullTokenizer` has no files: its texts are token ids already.
    """
    if tokenizer is None:
        return {}
    if isinstance(tokenizer, NullTokenizer):
        return {"eos_token_id": tokenizer.eod}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _copy(tokenizer, folder)
    if isinstance(tokenizer, ByteTokenizer):
        fast = _byte_level()
        fast.save(str(folder / _TOKENIZER_FILE))
        _write_config(folder, {"eos_token": str(fast.id_to_token(tokenizer.eod))})
        return {"eos_token_id": tokenizer.eod}

    tokenizer.save_pretrained(folder)
    return {name: getattr(tokenizer, name, None) for name in TOKEN_IDS}


def _copy(tokenizer: HuggingFaceTokenizer, folder: Path) -> dict[str, Any]:
    """Copies a tokenizer's files, and adds to them what transformers would not find in them.
    Returns the ids of its special tokens.
    """
    is_folder = tokenizer.path.is_dir()
    source = tokenizer.path if is_folder else tokenizer.path.parent
    for name in tokenizer_files(source, _FILES if is_folder else _BESIDE):
        copy_file(source / name, folder / name)
    if not is_folder:
        copy_file(tokenizer.path, folder / _TOKENIZER_FILE)
    elif not (folder / _TOKENIZER_FILE).exists():
        tokenizer.backend.save(str(folder / _TOKENIZER_FILE))  # converted from another form

    named = special_tokens(source)
    named.setdefault("eos_token", str(tokenizer.backend.id_to_token(tokenizer.eod)))
    _write_config(folder, named)
    ids = {f"{name}_id": tokenizer.backend.token_to_id(token) for name, token in named.items()}
    return {name: ids[name] for name in TOKEN_IDS if ids.get(name) is not None}


def _write_config(folder: Path, named: dict[str, str]) -> None:
    """Writes tokenizer_config.json, or adds to it the end of a document if it names none."""
    path = folder / TOKENIZER_CONFIG
    content = read_json(path) if path.exists() else {}
    if content.get("eos_token") is not None:
        return
    # What tokenizer.json says, rather than what the model's architecture usually has.
    made = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(path, made | named | {name: own for name, own in content.items() if own is not None})


def _byte_level() -> tokenizers.Tokenizer:
    """`ByteTokenizer` in the form of the tokenizers library."""
    # The library's byte alphabet: printable bytes stand for themselves, the others are replaced by
    # letters from 256 on.
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
