"""The files in a folder of weights of the transformers library: safetensors and JSON."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from megatron.core.dist_checkpointing.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    few,
    shown,
)
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.load.small_files import system_errors
from megatron.core.files import open_regular, read_regular, sync_folder, sync_stream
from megatron.core.json_reading import parse_json
from megatron.core.log import printable
from megatron.core.models.description import ModelDescription
from megatron.core.models.hugging_face import hf_config
from megatron.training.checkpoint.hf_layout import (
    DTYPE_NAMES,
    INDEX_FILE,
    WEIGHTS_FILE,
    FileTensor,
)
from megatron.training.checkpoint.safetensors_files import open_safetensors

CONFIG_FILE = "config.json"
_MAX_JSON_BYTES = 1 << 26  # the index of a model of 700 billion weights takes 9 MB
_SHOWN = 80  # characters of a name in a message


# The config of a model of ours


def write_own_config(
    folder: Path,
    description: ModelDescription,
    dtype: torch.dtype | None,
    ids: Mapping[str, Any],
) -> None:
    """Writes config.json.

    Args:
        dtype: of the weights.
        ids: what `save_tokenizer` gave.

    Raises:
        ConfigError: for a model that no architecture of the transformers library computes.
    """
    name = str(dtype).removeprefix("torch.")
    # Before version 4.56, transformers looked for torch_dtype.
    content = hf_config(description) | {"dtype": name, "torch_dtype": name}
    # Tokens are those of the decoder, which may be a section of the file.
    content.get("text_config", content).update(ids)
    write_json(folder / CONFIG_FILE, content)


def sync_files(folder: Path) -> None:
    """Brings all files and folders inside a folder to disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as stream:
                sync_stream(stream)


# Weights, read


class WeightFile(NamedTuple):
    """An open safetensors file."""

    path: Path
    num_bytes: int
    tensors: Any  # of the safetensors library, which has mapped the file

    def slice(self, name: str) -> Any:
        return self.tensors.get_slice(name)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor, in new memory."""
        self._check_size()
        read: torch.Tensor = self.slice(name)[box.slices()]
        return read

    def mapped(self, name: str) -> torch.Tensor:
        """A tensor over the mapped file: it is read where it is used."""
        self._check_size()
        mapped: torch.Tensor = self.tensors.get_tensor(name)
        return mapped

    def _check_size(self) -> None:
        # Reading a mapped page beyond the file's end kills the process, see [Note: a data file
        # that shrinks].
        size = self.path.stat().st_size
        if size < self.num_bytes:
            raise CheckpointDamagedError(
                f"Expected {self.path} to keep its {self.num_bytes} bytes, got {size} by now."
            )


class WeightFiles:
    """The open safetensors files of a folder.

    Attributes:
        folder: where they are.
        config: the content of config.json; empty if there is none.
        names: of the tensors.

    [Note: added rows] A vocabulary may get more rows than its files have: `add_rows`. Readers see
    the tensors with these rows. Each is the mean of the rows in the file, which is also the mean of
    those that the transformers library draws.
    """

    def __init__(self, folder: Path, files: dict[str, WeightFile], config: dict[str, Any]) -> None:
        self.folder = folder
        self.config = config
        self.names = list(files)
        self._files = files  # by the name of the tensor
        self._num_rows: dict[str, int] = {}  # of tensors with added rows
        self._means: dict[str, torch.Tensor] = {}

    @classmethod
    def open(cls, folder: Path, stack: ExitStack) -> WeightFiles:
        """Opens the files until `stack` is closed. CheckpointError if one is missing or broken."""
        # The tensors of each file; None: any. As in the transformers library, the single file goes
        # before an index beside it.
        listed: dict[str, list[str] | None] = {WEIGHTS_FILE: None}
        if not os.path.lexists(folder / WEIGHTS_FILE):
            if not os.path.lexists(folder / INDEX_FILE):
                raise _no_weights(folder)
            listed = _read_index(folder / INDEX_FILE)

        found: dict[str, WeightFile] = {}
        for file, wanted in listed.items():
            opened = _open_weights(folder / file, stack)
            names = list(opened.tensors.keys())
            if differing := sorted(set(names) ^ set(names if wanted is None else wanted)):
                different = printable(few(differing))
                raise CheckpointDamagedError(
                    f"Expected {folder / file} to have what {INDEX_FILE} says, got a difference in "
                    f"{different}."
                )
            found |= dict.fromkeys(names, opened)

        path = folder / CONFIG_FILE
        return cls(folder, found, read_json(path) if os.path.lexists(path) else {})

    def add_rows(self, names: Collection[str], num_rows: int) -> None:
        """Shows matrices of the vocabulary with `num_rows` rows, see [Note: added rows]."""
        self._num_rows |= dict.fromkeys(names, num_rows)
        section = self.config.get("text_config", self.config)
        section["vocab_size"] = num_rows

    def shape(self, name: str) -> tuple[int, ...]:
        there = tuple(self._files[name].slice(name).get_shape())
        return (self._num_rows[name], *there[1:]) if name in self._num_rows else there

    def dtype(self, name: str) -> torch.dtype | None:
        """A tensor's dtype; None for one that is unknown here."""
        wanted = self._files[name].slice(name).get_dtype()
        return next((dtype for dtype, own in DTYPE_NAMES.items() if own == wanted), None)

    def differences(self, name: str, own: FileTensor) -> list[str]:
        """What keeps a tensor from being loaded into one of ours, as clauses."""
        found = []
        shape, dtype = self.shape(name), self.dtype(name)
        if shape != own.shape:
            found.append(f"{name} has shape {shape} where the model has {own.shape}")
        are_floats = dtype is not None and dtype.is_floating_point and own.dtype.is_floating_point
        if dtype != own.dtype and not are_floats:
            found.append(f"{name} is {dtype} where the model has {own.dtype}")
        return found

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor, in new memory."""
        with self._reading(name):
            file = self._files[name]
            there = file.slice(name).get_shape()[0] if name in self._num_rows else None
            if there is None or box.offsets[0] + box.sizes[0] <= there:
                return file.read(name, box)

            num_kept = max(0, there - box.offsets[0])
            rows, columns = box.sizes
            added = self._mean_row(name)[box.slices()[1]].expand(rows - num_kept, -1)
            if num_kept == 0:
                return added.clone()
            return torch.cat([file.read(name, Box(box.offsets, (num_kept, columns))), added])

    def mapped(self, name: str) -> torch.Tensor:
        """A tensor over its mapped file, which must not change: it is read where it is used. One
        with added rows is a copy.
        """
        if name in self._num_rows:
            shape = self.shape(name)
            return self.read(name, Box((0,) * len(shape), shape))
        with self._reading(name):
            return self._files[name].mapped(name)

    def _mean_row(self, name: str) -> torch.Tensor:
        if name not in self._means:
            there = self._files[name].mapped(name)
            self._means[name] = there.mean(0, dtype=torch.float32).to(there.dtype)
        return self._means[name]

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"Expected to read {name} from {self.folder}, got {error}."
            ) from error


def _no_weights(folder: Path) -> CheckpointError:
    if not folder.exists():
        return CheckpointNotFoundError(f"Expected {WEIGHTS_FILE} in {folder}, got no such folder.")
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if not pickles:
        return CheckpointError(f"Expected {WEIGHTS_FILE} or {INDEX_FILE} in {folder}, got neither.")
    return CheckpointError(
        f"Expected {WEIGHTS_FILE} or {INDEX_FILE} in {folder}, got {printable(few(pickles))}, "
        "which would have to be unpickled. If you trust it, convert it: "
        "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OTHER_DIR)."
    )


def _read_index(path: Path) -> dict[str, list[str] | None]:
    """The names of the tensors in each file."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        expected = "the files of tensors under 'weight_map'"
        raise CheckpointDamagedError(f"Expected {expected} in {path}, got {shown(weight_map)}.")

    names: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        # Nothing outside of the folder may be read. `Path("..").name` is "..".
        is_name = isinstance(file, str) and file not in ("", "..") and Path(file).name == file
        if not is_name or not file.isprintable():
            got = f"{shown(file)} for {printable(name, _SHOWN)}"
            raise CheckpointDamagedError(f"Expected names of files beside it in {path}, got {got}.")
        names.setdefault(file, []).append(name)

    return {file: names[file] for file in sorted(names)}


def _open_weights(path: Path, stack: ExitStack) -> WeightFile:
    try:
        opened = stack.enter_context(open_safetensors(path))
    except FileNotFoundError as error:
        raise CheckpointDamagedError(f"Expected the safetensors file {path}, got none.") from error
    except OSError as error:
        reason = printable(str(error))
        raise CheckpointDamagedError(
            f"Expected a whole safetensors file at {path}, got: {reason}."
        ) from error
    return WeightFile(path, opened.num_bytes, opened.reader)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file of one JSON object. CheckpointDamagedError if it is something else."""
    with system_errors(str(path)):
        text = read_regular(path, max_bytes=_MAX_JSON_BYTES, what="a JSON object")
    try:
        # NaN and infinities are allowed: some models' limits are infinite.
        content = parse_json(text, max_depth=100, allow_nan=True)
    except ValueError as error:
        raise CheckpointDamagedError(f"Expected a JSON object in {path}, got {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointDamagedError(f"Expected a JSON object in {path}, got {shown(content)}.")
    return content


# Small files


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a new file."""
    path.write_bytes((json.dumps(content, indent=2) + "\n").encode())


def copy_file(source: Path, target: Path) -> None:
    """Copies a file, which must be a regular one, to a new one. OSError if that is impossible."""
    target.parent.mkdir(exist_ok=True)
    with open_regular(source) as stream, target.open("xb") as copied:
        shutil.copyfileobj(stream, copied)
