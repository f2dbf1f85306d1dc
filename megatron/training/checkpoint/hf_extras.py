"""What a folder of Hugging Face weights holds besides weights and config.json: a tokenizer, a
processor, and files of the model that training began with.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.training.checkpoint.hf_files import CONFIG_FILE, copy_file, read_json, write_json
from megatron.training.checkpoint.hf_layout import INDEX_FILE
from megatron.training.checkpoint.hf_tokenizer import (
    TOKEN_IDS,
    check_tokenizer,
    save_tokenizer,
    tokenizer_files,
)

# Of the model that training began with: texts and tokenizers, never weights.
_COPIED = ("*.json", "*.jinja", "*.model", "*.py", "*.txt")
_NOT_COPIED = (
    "*.index.json",
    INDEX_FILE,
    # How the model came about, and adapters: not what it is now.
    "adapter_config.json",
    "trainer_state.json",
    "training_args*",
    "*_results.json",
    "requirements*.txt",
)
_GENERATION_FILE = "generation_config.json"
# Its settings that name tokens, and so mean another tokenizer's.
_OF_TOKENS = ("*token_id*", "*suppress_tokens", "*_ids", "sequence_bias")


class FolderExtras(NamedTuple):
    """See the module's docstring.

    Attributes:
        tokenizer: one of ours, or anything with `save_pretrained(folder)`.
        processor: anything with `save_pretrained(folder)`.
        base_model_path: the folder of the model that training began with. Files that the save does
            not write itself are copied from there: configs, the code they name, and, where neither
            a tokenizer nor a processor is given, the tokenizer's. With a tokenizer, the generation
            config gets its ids.
    """

    tokenizer: Any = None
    processor: Any = None
    base_model_path: str | Path | None = None

    @classmethod
    def of_model(
        cls, tokenizer: Any, tokenizer_path: str | None, base_model: str | None
    ) -> FolderExtras:
        """Those of a model that is trained here.

        Args:
            tokenizer: that it is trained with, which was read from `tokenizer_path`; None: it has
                no files.
            base_model: the folder of the model that training began with, if there was one.
        """
        if base_model is None or tokenizer_path is None:
            return cls(tokenizer, base_model_path=base_model)

        path = Path(tokenizer_path)
        folder = path.parent if path.name == "tokenizer.json" else path
        # The files of the folder's own tokenizer say more than what is read of them here.
        is_folders = folder.samefile(base_model)
        return cls(None if is_folders else tokenizer, base_model_path=base_model)

    def check(self) -> None:
        """CheckpointError for what cannot be written, or a folder that is not there."""
        check_tokenizer(self.tokenizer)
        if self.processor is not None and not callable(
            getattr(self.processor, "save_pretrained", None)
        ):
            raise CheckpointError(
                f"Expected a processor with save_pretrained, got {type(self.processor).__name__}."
            )
        base = self.base_model_path
        if base is not None and not Path(base).is_dir():
            raise CheckpointError(
                f"Expected the folder of the model that training began with as base_model_path, "
                f"got {os.fspath(base)!r}, where there is none. Give its local folder."
            )

    def save(self, folder: Path) -> dict[str, Any]:
        """Writes processor and tokenizer. Returns the token ids that a config.json names: the
        tokenizer's, or those of the base model, whose tokenizer is copied without one.

        Raises:
            CheckpointDamagedError: for a config.json of the base model that is no JSON object.
        """
        if self.processor is not None:
            self.processor.save_pretrained(folder)
        # Last: a processor may bring a tokenizer of its own.
        ids = save_tokenizer(self.tokenizer, folder)
        if self.tokenizer is None and self.base_model_path is not None:
            file = Path(self.base_model_path) / CONFIG_FILE
            content = read_json(file) if file.exists() else {}
            decoder = content.get("text_config", {})
            found = {name: content.get(name, decoder.get(name)) for name in TOKEN_IDS}
            ids = {name: own for name, own in found.items() if own is not None}
        return ids

    def copy_missing(self, folder: Path, ids: Mapping[str, Any]) -> None:
        """Copies what the base model's folder has and this one lacks, and writes a generation
        config with the tokenizer's ids beside a config.json if there is none.

        Args:
            ids: what `save` returned. The base model's generation config gets them with a
                tokenizer.

        Raises:
            CheckpointDamagedError: for a generation config that is no JSON object.
            OSError: if a file cannot be read, or is not a regular one.
        """
        if self.base_model_path is not None:
            self._copy_from(Path(self.base_model_path), folder, ids)
        generation = folder / _GENERATION_FILE
        if self.tokenizer is not None and not generation.exists():
            named = _with_ids({}, ids)
            if named and (folder / CONFIG_FILE).exists():
                write_json(generation, named)

    def _copy_from(self, base: Path, folder: Path, ids: Mapping[str, Any]) -> None:
        own = set(tokenizer_files(base))
        # One tokenizer's files among another's would be a third one. A processor may bring one.
        is_taken = self.tokenizer is not None or any(tokenizer_files(folder))
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


def _with_ids(generation: Mapping[str, Any], ids: Mapping[str, Any]) -> dict[str, Any]:
    """A generation config for another tokenizer."""
    kept = {name: value for name, value in generation.items() if not _matches(name, _OF_TOKENS)}
    return kept | {name: value for name, value in ids.items() if value is not None}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
