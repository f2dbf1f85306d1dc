"""The files in a directory of Hugging Face weights: written by all ranks together, and read.

Rank 0 creates the files with their headers, at their full sizes, in a hidden draft directory next
to the target. Every rank computes all offsets (`hf_layout.py`) and which of the replicated rows it
writes (`holdings.py`), so the ranks write in parallel without communication:

    rows of this rank  ->  a buffer, in the file's dtype  ->  their offsets in the file
                   this thread                        a lane for the disk

A `DataFileWriter` writes them, as for `hf/` in a checkpoint. Once everything is on disk, one rename
publishes the draft:

    .gpt.4f0c93aa.writing/    next to `gpt`, the directory that it becomes

A save that is killed leaves its draft. The next save into the same directory deletes it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from megatron.core.device import Device
from megatron.core.dist_checkpointing.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    few,
    shown,
)
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.load.checkpoint import system_errors
from megatron.core.dist_checkpointing.save.data_file import BufferPool, DataFileWriter
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.files import (
    open_regular,
    read_regular,
    remove_empty_folder,
    sync_folder,
    sync_stream,
)
from megatron.core.host_memory import format_bytes
from megatron.core.json_reading import parse_json
from megatron.core.log import printable
from megatron.core.models.families.row_map import RowMap
from megatron.core.shared_file import SharedFile
from megatron.training.checkpoint.hf_layout import (
    DTYPE_NAMES,
    INDEX_FILE,
    WEIGHTS_FILE,
    FileTensor,
    FolderLayout,
    OwnRows,
    Place,
    rows_in_file,
)

CONFIG_FILE = "config.json"
_MAX_JSON_BYTES = 1 << 26  # the index of a model of 700 billion weights takes 9 MB
_SHOWN = 80  # characters of a name in a message


# Drafts


def prepare_draft(folder: Path) -> Path:
    """Makes room for a directory: removes it if it is empty, and the drafts of killed saves.

    Returns:
        The path of the new draft, which is not created yet.

    Raises:
        CheckpointError: if `folder` exists and is not an empty directory.
        OSError: if its parent directory cannot be created.
    """
    remove_empty_folder(folder)
    _expect_nothing(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    drafts = re.compile(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{8}}\.writing")
    for name in LocalStore(folder.parent).folders():
        if drafts.fullmatch(name):
            shutil.rmtree(folder.parent / name, ignore_errors=True)
    return folder.parent / f".{folder.name}.{secrets.token_hex(4)}.writing"


def publish_draft(draft: Path, layout: FolderLayout, folder: Path) -> None:
    """Syncs the files of a draft to disk, checks them and renames the draft to `folder`.

    Raises:
        CheckpointError: if a weight file is damaged, or if `folder` exists by now.
        OSError: if the file system fails.
    """
    for path in draft.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as stream:
                sync_stream(stream)
    check_files(draft, layout)
    _expect_nothing(folder)
    LocalStore(folder.parent).publish(draft.name, folder.name)


def _expect_nothing(folder: Path) -> None:
    if not os.path.lexists(folder):
        return

    got = "a file" if folder.exists() else "a dangling link"
    if folder.is_dir():
        inside = next(iter(sorted(folder.iterdir())), None)
        got = "an empty one that cannot be replaced"
        if inside is not None:
            got = f"one that holds {printable(inside.name)}"
    raise CheckpointError(
        f"Expected a missing or empty directory at {folder}, got {got}. Weights are never "
        "overwritten."
    )


# Writing weights


def make_files(folder: Path, layout: FolderLayout) -> None:
    """Creates all weight files in an empty directory, at their full sizes, without the tensors.

    Raises:
        CheckpointError: if the file system has too little space.
        OSError: if the file system fails.
    """
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    # The files are sparse at first, so a full disk would fail gigabytes later. Some network file
    # systems report no sizes.
    if system.f_blocks and free < layout.nbytes:
        raise CheckpointError(
            f"Expected room for {format_bytes(layout.nbytes)} of weights in {folder.parent}, got "
            f"{format_bytes(free)}: No space left on device."
        )

    for file in layout.files:
        with (folder / file.name).open("xb") as stream:
            stream.write(file.header)
            stream.truncate(file.nbytes)


def check_files(folder: Path, layout: FolderLayout) -> None:
    """Raises CheckpointError if the size or the header of a file changed since `make_files`.

    An improperly shared file system may lose either while several machines write.
    """
    for file in layout.files:
        path = folder / file.name
        with path.open("rb") as stream:
            header, size = stream.read(len(file.header)), os.fstat(stream.fileno()).st_size
        if size != file.nbytes:
            raise CheckpointError(f"Expected {path} to have {file.nbytes} bytes, got {size}.")
        if header != file.header:
            raise CheckpointError(f"Expected {path} to start with its header, got other bytes.")


def expect_same_layout(layout: FolderLayout, fingerprint: str) -> None:
    """Raises CheckpointError unless the layout has the fingerprint of rank 0's layout."""
    if layout.fingerprint != fingerprint:
        raise CheckpointError(
            "Expected the same tensors, dtypes and shard size on all ranks, got "
            f"{layout.fingerprint} here and {fingerprint} on rank 0."
        )


def expect_all_bytes(written: int, layout: FolderLayout) -> None:
    """Raises CheckpointError unless the ranks wrote all bytes of the tensors. Rows that no rank
    holds would be zeros.
    """
    expected = sum(tensor.nbytes for tensor in layout.tensors)
    if written != expected:
        raise CheckpointError(
            f"Expected the ranks to write {expected} bytes of weights, got {written}: some rows "
            "are on no rank, or on several."
        )


def write_own_rows(folder: Path, shares: Sequence[OwnRows], device: Device) -> int:
    """Writes this rank's rows into the files and syncs them. Returns the number of bytes.

    Args:
        folder: the directory of `make_files`, on a file system that all ranks share.
        device: the device of the model. Its queued work is waited for.

    Raises:
        CheckpointError: if this rank does not see the files.
        OSError: if the file system fails.
    """
    device.event().synchronize()
    # The pool first: where it fails, there is no lane to close.
    pool = BufferPool(device)
    disk = device.host_lane("rows to disk")
    writer = DataFileWriter(None, pool, disk, open_exported=lambda name: open_rows(folder / name))
    try:
        for entry, row_map, place, box in shares:
            stored = entry.values.as_stored()
            for rows in rows_in_file(row_map, box, place):
                writer.write_rows(rows, entry.box_of(rows.own, stored.tensor), stored.scale)
        writer.finish()
    finally:
        writer.abort()
        disk.close()
    return sum(own.box.numel * own.place.tensor.dtype.itemsize for own in shares)


def write_rows(file: SharedFile, rows: RowMap, box: Box, place: Place, content: memoryview) -> None:
    """Writes the bytes of a box of one of our tensors to their offsets.

    Args:
        rows: the rows of our tensor in the tensor at `place`.
        content: the box in the file's dtype, row by row.
    """
    begin = 0
    for part in rows_in_file(rows, box, place):
        file.write_at(part.offset, content[begin : begin + part.nbytes])
        begin += part.nbytes


def open_rows(path: Path) -> SharedFile:
    """Opens a file of `make_files` for writing. CheckpointError if this rank does not see it."""
    try:
        return SharedFile(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"Expected every rank to see {path}, which rank 0 has made, got no such file. Save to "
            "a file system that all ranks share."
        ) from error


# Reading weights


class WeightFile(NamedTuple):
    """An open safetensors file."""

    path: Path
    num_bytes: int
    tensors: Any  # the safetensors library's handle, which maps the file

    def slice(self, name: str) -> Any:
        return self.tensors.get_slice(name)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Returns a copy of a box of a tensor."""
        self._check_size()
        read: torch.Tensor = self.slice(name)[box.slices()]
        return read

    def mapped(self, name: str) -> torch.Tensor:
        """Returns a tensor over the mapped file, which is read when the tensor is used."""
        self._check_size()
        mapped: torch.Tensor = self.tensors.get_tensor(name)
        return mapped

    def _check_size(self) -> None:
        # Reading a mapped page beyond the end of the file kills the process, see [Note: a data file
        # that shrinks].
        size = self.path.stat().st_size
        if size < self.num_bytes:
            raise CheckpointDamagedError(
                f"Expected {self.path} to keep its {self.num_bytes} bytes, got {size} by now."
            )


class WeightFiles:
    """The open safetensors files of a directory.

    Attributes:
        folder: the directory.
        config: the content of config.json; empty without one.
        names: the names of the tensors.

    [Note: added rows] `add_rows` extends the tensors of a vocabulary. Each added row is the mean of
    the rows in the file. The transformers library draws added rows from a distribution with the
    same mean.
    """

    def __init__(self, folder: Path, files: dict[str, WeightFile], config: dict[str, Any]) -> None:
        self.folder = folder
        self.config = config
        self.names = list(files)
        self._files = files  # by tensor name
        self._num_rows: dict[str, int] = {}  # of the tensors with added rows
        self._means: dict[str, torch.Tensor] = {}

    @classmethod
    def open(cls, folder: Path, stack: ExitStack) -> WeightFiles:
        """Opens the files until `stack` is closed. CheckpointError if one is missing or damaged."""
        # The expected tensors of each file; None accepts any. As in the transformers library, a
        # single file takes precedence over an index.
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
                    f"Expected the tensors of {INDEX_FILE} in {folder / file}, got a difference in "
                    f"{different}."
                )
            found |= dict.fromkeys(names, opened)

        path = folder / CONFIG_FILE
        return cls(folder, found, read_json(path) if os.path.lexists(path) else {})

    def add_rows(self, names: Collection[str], num_rows: int) -> None:
        """Extends matrices of the vocabulary to `num_rows` rows, see [Note: added rows]."""
        self._num_rows |= dict.fromkeys(names, num_rows)
        section = self.config.get("text_config", self.config)
        section["vocab_size"] = num_rows

    def shape(self, name: str) -> tuple[int, ...]:
        there = tuple(self._files[name].slice(name).get_shape())
        return (self._num_rows[name], *there[1:]) if name in self._num_rows else there

    def dtype(self, name: str) -> torch.dtype | None:
        """Returns the dtype of a tensor; None for one that PyTorch lacks or we do not load."""
        wanted = self._files[name].slice(name).get_dtype()
        return next((dtype for dtype, own in DTYPE_NAMES.items() if own == wanted), None)

    def differences(self, name: str, own: FileTensor) -> list[str]:
        """Returns the differences that keep a tensor from being loaded, as clauses."""
        found = []
        shape, dtype = self.shape(name), self.dtype(name)
        if shape != own.shape:
            found.append(f"{name} has shape {shape} where the model has {own.shape}")
        are_floats = dtype is not None and dtype.is_floating_point and own.dtype.is_floating_point
        if dtype != own.dtype and not are_floats:
            found.append(f"{name} is {dtype} where the model has {own.dtype}")
        return found

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Returns a copy of a box of a tensor."""
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
        return CheckpointNotFoundError(
            f"Expected {WEIGHTS_FILE} in {folder}, got no such directory."
        )
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if not pickles:
        return CheckpointError(f"Expected {WEIGHTS_FILE} or {INDEX_FILE} in {folder}, got neither.")
    return CheckpointError(
        f"Expected {WEIGHTS_FILE} or {INDEX_FILE} in {folder}, got {printable(few(pickles))}, "
        "which would have to be unpickled. If you trust it, convert it: "
        "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OTHER_DIR)."
    )


def _read_index(path: Path) -> dict[str, list[str] | None]:
    """Returns the names of the tensors in each file."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        expected = "the files of tensors under 'weight_map'"
        raise CheckpointDamagedError(f"Expected {expected} in {path}, got {shown(weight_map)}.")

    names: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        # An index must not name files outside of the directory. `Path("..").name` is "..".
        is_name = isinstance(file, str) and file not in ("", "..") and Path(file).name == file
        if not is_name or not file.isprintable():
            got = f"{shown(file)} for {printable(name, _SHOWN)}"
            raise CheckpointDamagedError(
                f"Expected names of files in its directory in {path}, got {got}."
            )
        names.setdefault(file, []).append(name)

    return {file: names[file] for file in sorted(names)}


def _open_weights(path: Path, stack: ExitStack) -> WeightFile:
    try:
        reader = stack.enter_context(open_safetensors(path))
        return WeightFile(path, path.stat().st_size, reader)
    except FileNotFoundError as error:
        raise CheckpointDamagedError(f"Expected the safetensors file {path}, got none.") from error
    except OSError as error:
        raise _damaged(path, error) from error


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Opens a file with the safetensors library, which maps it, for the length of a block.

    Raises:
        CheckpointDamagedError: if it is not a whole safetensors file.
        OSError: as `open`, and for a directory, a FIFO, a socket or a device.
    """
    # The library would block on a FIFO.
    open_regular(path, "a safetensors file").close()
    try:
        opened = safe_open(path, framework="pt")
    except (SafetensorError, MemoryError) as error:
        raise _damaged(path, error) from error
    with opened as reader:
        yield reader


def _damaged(path: Path, error: Exception) -> CheckpointDamagedError:
    # The library reports incomplete metadata if a file is truncated.
    size = f"{path.stat().st_size} bytes, " if path.is_file() else ""
    reason = printable(str(error) or type(error).__name__)
    return CheckpointDamagedError(
        f"Expected a whole safetensors file at {path}, got: {size}{reason}."
    )


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file of one JSON object. CheckpointDamagedError for any other content."""
    with system_errors(str(path)):
        text = read_regular(path, max_bytes=_MAX_JSON_BYTES, what="a JSON object")
    try:
        # NaN and infinities are accepted: the limits of some models are infinite.
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
    """Copies a regular file to a new one. OSError if either cannot be opened."""
    target.parent.mkdir(exist_ok=True)
    with open_regular(source) as stream, target.open("xb") as copied:
        shutil.copyfileobj(stream, copied)
