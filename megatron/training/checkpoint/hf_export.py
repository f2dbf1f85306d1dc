"""A GPT's checkpoint as a folder of the transformers library, made by one process without a model.

Tensors go from file to file in pieces of a few MiB.

    checkpoint = open_checkpoint(store, "iter_0000500")
    export_hf(checkpoint, "exports/gpt", ModelDescription(config, vocab_size), tokenizer=tokenizer)

The ranks of a run that still lives save such folders by `hf_weights.save_hf`.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.core.dist_checkpointing.dcp.plain_dcp import MODEL_PREFIX, weights_prefix
from megatron.core.dist_checkpointing.errors import CheckpointError, few, other_model
from megatron.core.dist_checkpointing.formats import ReadableCheckpoint, read_piece
from megatron.core.dist_checkpointing.layout.boxes import Box, pieces
from megatron.core.dist_checkpointing.layout.saved import SavedTensor
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.load.chunk_data import bytes_of
from megatron.core.fp32_module import names_in_fp32
from megatron.core.log import printable
from megatron.core.models.description import ModelDescription
from megatron.core.models.families.row_map import RowMap
from megatron.core.models.hugging_face import (
    OwnModel,
    build_model,
    hf_rows,
    saved_buffers,
    section_names,
)
from megatron.core.transformer.fused_weight import fused_weights
from megatron.training.checkpoint.hf_draft import draft_path, prepare_target, publish_draft
from megatron.training.checkpoint.hf_extras import FolderExtras
from megatron.training.checkpoint.hf_files import (
    sync_files,
    write_json,
    write_own_config,
)
from megatron.training.checkpoint.hf_layout import (
    INDEX_FILE,
    MAX_SHARD_BYTES,
    FolderLayout,
    Part,
    file_dtype,
    main_dtype,
    tensors_of_parts,
)
from megatron.training.checkpoint.hf_row_writer import (
    check_files,
    make_files,
    open_rows,
    write_rows,
)

_PIECE_BYTES = 8 << 20  # of a tensor that are in memory at once, in the checkpoint's dtype


class Exported(NamedTuple):
    """What was written."""

    num_tensors: int
    num_bytes: int
    dtype: torch.dtype | None  # of most elements


def export_hf(
    checkpoint: ReadableCheckpoint,
    folder: str | Path,
    model: ModelDescription,
    *,
    tokenizer: Any = None,
    base_model_path: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int], object] = lambda _num_bytes: None,
) -> Exported:
    """Writes a checkpoint's weights into a folder that `from_pretrained` loads.

    The folder appears once it is whole and on disk, or not at all.

    Args:
        checkpoint: of either format; other states in it are not read.
        folder: absent or empty. Unfinished files of earlier exports to it are deleted.
        model: what it is.
        tokenizer, base_model_path, dtype: as for `save_hf`.
        max_shard_bytes: of the tensors in one file; a larger tensor gets a file of its own.
        progress: called with each number of bytes of the checkpoint's tensors that are done;
            `bytes_to_export` says how many there are.

    Raises:
        ConfigError: for a model that no architecture of the transformers library computes.
        CheckpointError: if the weights are not those of this model or are damaged, `folder` holds
            something or cannot be written, or for a tokenizer of another kind.
    """
    if "://" in str(folder):
        raise CheckpointError(f"Expected a local folder to export to, got {folder}.")
    # Through links: the folder that a link names is replaced, not the link.
    target = Path(folder).resolve()
    extras = FolderExtras(tokenizer, base_model_path=base_model_path)
    extras.check()
    tensors = _tensors(checkpoint, model, dtype)
    layout = FolderLayout.of(tensors_of_parts(tensor.part for tensor in tensors), max_shard_bytes)
    written_dtype = main_dtype(layout.tensors)
    with _system_errors(target):
        draft = draft_path(target, prepare_target(target))
        try:
            draft.mkdir()
            write_weights(draft, checkpoint, tensors, layout, progress)
            ids = extras.save(draft)
            write_own_config(draft, model, written_dtype, ids)
            extras.copy_missing(draft, ids)

            sync_files(draft)
            check_files(draft, layout)
            publish_draft(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    return Exported(
        len(layout.tensors), sum(tensor.nbytes for tensor in layout.tensors), written_dtype
    )


def bytes_to_export(checkpoint: ReadableCheckpoint, model: ModelDescription) -> int:
    """Of the checkpoint's tensors that `export_hf` reads. CheckpointError for another model's."""
    tensors = _tensors(checkpoint, model, None)
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)


class StoredTensor(NamedTuple):
    """One of our tensors in a checkpoint, with the place of its rows in one of theirs."""

    rows: RowMap
    key: str  # in the checkpoint
    entry: SavedTensor
    file_dtype: torch.dtype  # in which it is written
    section: tuple[int, int] | None = None  # its rows in a fused weight there; None: all

    @property
    def shape(self) -> tuple[int, ...]:
        if self.section is None:
            return self.entry.shape
        start, stop = self.section
        return (stop - start, *self.entry.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.entry.dtype

    @property
    def part(self) -> Part:
        return Part(self.rows, self.shape, self.file_dtype)

    def read(self, checkpoint: ReadableCheckpoint, box: Box) -> torch.Tensor:
        """A box of it, in new memory."""
        if self.section is not None:
            box = Box((box.offsets[0] + self.section[0], *box.offsets[1:]), box.sizes)
        return read_piece(checkpoint, self.key, box)


def write_weights(
    folder: Path,
    checkpoint: ReadableCheckpoint,
    tensors: Sequence[StoredTensor],
    layout: FolderLayout,
    progress: Callable[[int], object],
) -> None:
    """Writes the tensors of a checkpoint into an empty folder, piece by piece.

    Args:
        layout: of all parts.
        progress: as for `export_hf`.

    Raises:
        CheckpointError: if the file system lacks the room, and for a damaged checkpoint.
        OSError: if the file system failed.
    """
    make_files(folder, layout)
    by_file: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        by_file.setdefault(layout.places[tensor.rows.name].file, []).append(tensor)

    for name, own in by_file.items():
        with closing(open_rows(folder / name)) as file:
            for tensor in own:
                place = layout.places[tensor.rows.name]
                for box in pieces(tensor.shape, _PIECE_BYTES // tensor.dtype.itemsize):
                    # No name for the piece: it would live on while the next one is read.
                    write_rows(
                        file,
                        tensor.rows,
                        box,
                        place,
                        bytes_of(tensor.read(checkpoint, box).to(place.tensor.dtype)),
                    )
                    progress(math.prod(box.sizes) * tensor.dtype.itemsize)

    if layout.index is not None:
        write_json(folder / INDEX_FILE, layout.index)


class _Part(NamedTuple):
    """A tensor of the model as our checkpoints have it: a parameter, rows of one, or a buffer."""

    map: RowMap  # in theirs
    own: str  # ours, of the section
    parameter: str
    parameter_shape: tuple[int, ...]
    rows: tuple[int, int] | None  # of a fused parameter; None: the parameter is not fused

    @property
    def shape(self) -> tuple[int, ...]:
        if self.rows is None:
            return self.parameter_shape
        start, stop = self.rows
        return (stop - start, *self.parameter_shape[1:])


def _parts(model: OwnModel) -> Iterator[_Part]:
    maps, fused = hf_rows(model), fused_weights(model)
    for parameter, weight in model.named_parameters():
        shape, sections = tuple(weight.shape), fused.get(parameter)
        if sections is None:
            yield _Part(maps[parameter], parameter, parameter, shape, None)
            continue

        for own, section in zip(section_names(parameter, sections), sections.names, strict=True):
            yield _Part(maps[own], own, parameter, shape, sections.row_range(section))
    for name, buffer in saved_buffers(model).items():
        yield _Part(maps[name], name, name, tuple(buffer.shape), None)


def _tensors(
    checkpoint: ReadableCheckpoint,
    model: ModelDescription,
    dtype: torch.dtype | None,
) -> list[StoredTensor]:
    """The tensors to write, in the order of the model. CheckpointError for another model's."""
    with torch.device("meta"):
        built = build_model(model)
    parts, in_fp32 = list(_parts(built)), {*names_in_fp32(built), *saved_buffers(built)}
    stored = checkpoint.tensors
    prefix = MODEL_PREFIX
    if not isinstance(checkpoint, PublishedCheckpoint):
        parameters = [name for name, _ in built.named_parameters()]
        prefix = weights_prefix(parameters, list(stored), checkpoint.path)

    found: list[StoredTensor] = []
    problems, missing = [], []
    for part in parts:
        key, rows, shape = f"{prefix}{part.own}", None, part.shape
        if key not in stored and part.rows is not None:
            # `torch_dcp` keeps fused weights as they are in the model.
            key, rows, shape = f"{prefix}{part.parameter}", part.rows, part.parameter_shape
        if key not in stored:
            missing.append(f"{prefix}{part.own}")
            continue

        written = file_dtype(stored[key].dtype, dtype, stays_fp32=part.parameter in in_fp32)
        tensor = StoredTensor(part.map, key, stored[key], written, rows)
        found.append(tensor)
        if tensor.entry.shape != shape:
            problems.append(f"{key} has shape {tensor.entry.shape} where the model has {shape}")
        if not tensor.dtype.is_floating_point:
            problems.append(f"{key} is {tensor.dtype} where the model has floats")

    known = {tensor.key for tensor in found}
    others = [key for key in stored if _is_weight(key, prefix) and key not in known]
    if missing:
        problems.append(f"it lacks {few(missing)}")
    if others:
        problems.append(f"nothing here takes {printable(few(others))}")
    if problems:
        raise other_model(checkpoint.path, problems)
    return found


def _is_weight(key: str, prefix: str) -> bool:
    """Whether a key with this prefix of the model's weights belongs to the model."""
    if prefix:
        return key.startswith(prefix)
    return not key.startswith(("optim.", "optimizer.", "rng."))


@contextlib.contextmanager
def _system_errors(target: Path) -> Iterator[None]:
    """CheckpointError for what the file system says."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"Expected to write {target}, got {error}.") from error
