"""Exports a checkpoint to a directory of the transformers library, in one process without a model.

Tensors are copied from file to file in pieces of a few MiB.

    checkpoint = open_checkpoint(store, "iter_0000500")
    export_hf(checkpoint, "exports/gpt", ModelDescription(config, vocab_size), tokenizer=tokenizer)

`hf_weights.save_hf` writes the same files from the ranks of a live run.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.core.dist_checkpointing.config import MAX_SHARD_BYTES
from megatron.core.dist_checkpointing.dcp.torch_dcp import MODEL_PREFIX, weights_prefix
from megatron.core.dist_checkpointing.errors import CheckpointError, expect_same_model
from megatron.core.dist_checkpointing.formats import ReadableCheckpoint, read_piece
from megatron.core.dist_checkpointing.layout.boxes import Box, pieces
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint, bytes_of
from megatron.core.fp32_module import names_in_fp32
from megatron.core.low_precision.amax_history import is_history
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
from megatron.training.checkpoint.hf_config import FolderExtras, write_small_files
from megatron.training.checkpoint.hf_files import (
    make_files,
    open_rows,
    prepare_draft,
    publish_draft,
    write_rows,
)
from megatron.training.checkpoint.hf_layout import (
    FolderLayout,
    Part,
    file_dtype,
    main_dtype,
    tensors_of_parts,
)

_PIECE_BYTES = 8 << 20  # read into memory at once, in the checkpoint's dtype


class Exported(NamedTuple):
    """A summary of the written weights."""

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
    """Writes a checkpoint's weights into a directory that `from_pretrained` loads.

    The directory appears once it is complete and on disk, or not at all.

    Args:
        checkpoint: a checkpoint of either format. States of the optimizer are not read.
        folder: a missing or empty directory. Unfinished files of earlier exports to it are deleted.
        model: the description of the model.
        tokenizer, base_model_path, dtype: as in `save_hf`.
        max_shard_bytes: the limit of the tensors in one file; a larger tensor gets a separate file.
        progress: called with the number of the checkpoint's bytes that each piece has. The sum is
            `bytes_to_export`.

    Raises:
        ConfigError: if no architecture of the transformers library computes the same as the model.
        CheckpointError: for weights that are damaged or of another model, a `folder` that is not
            empty or cannot be written, or a tokenizer that cannot be written.
    """
    if "://" in str(folder):
        raise CheckpointError(f"Expected a local directory to export to, got {folder}.")
    # The directory that a link points to is replaced, not the link.
    target = Path(folder).resolve()
    extras = FolderExtras(tokenizer, base_model_path=base_model_path)
    extras.check()
    tensors = _tensors(checkpoint, model, dtype)
    layout = FolderLayout.of(tensors_of_parts(tensor.part for tensor in tensors), max_shard_bytes)
    draft = None
    try:
        draft = prepare_draft(target)
        draft.mkdir()
        _write_weights(draft, checkpoint, tensors, layout, progress)
        write_small_files(draft, model, layout, extras)
        publish_draft(draft, layout, target)
    except OSError as error:
        raise CheckpointError(f"Expected to write {target}, got {error}.") from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)

    num_bytes = sum(tensor.nbytes for tensor in layout.tensors)
    return Exported(len(layout.tensors), num_bytes, main_dtype(layout.tensors))


def bytes_to_export(checkpoint: ReadableCheckpoint, model: ModelDescription) -> int:
    """Returns the size of the tensors that `export_hf` reads. CheckpointError for another model."""
    tensors = _tensors(checkpoint, model, None)
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)


class _StoredTensor(NamedTuple):
    """One of our tensors in a checkpoint, with its rows in a tensor of the files."""

    rows: RowMap
    key: str  # in the checkpoint
    shape: tuple[int, ...]
    dtype: torch.dtype
    file_dtype: torch.dtype
    first_row: int  # in the checkpoint's tensor, which may be a fused weight

    @property
    def part(self) -> Part:
        return Part(self.rows, self.shape, self.file_dtype)

    def read(self, checkpoint: ReadableCheckpoint, box: Box) -> torch.Tensor:
        """Returns a copy of a box of the tensor."""
        if box.offsets:
            box = Box((box.offsets[0] + self.first_row, *box.offsets[1:]), box.sizes)
        return read_piece(checkpoint, self.key, box)


def _write_weights(
    folder: Path,
    checkpoint: ReadableCheckpoint,
    tensors: Sequence[_StoredTensor],
    layout: FolderLayout,
    progress: Callable[[int], object],
) -> None:
    """Writes the tensors of a checkpoint into an empty directory, piece by piece.

    Raises:
        CheckpointError: if the file system has too little space, and for a damaged checkpoint.
        OSError: if the file system fails.
    """
    make_files(folder, layout)
    by_file: dict[str, list[_StoredTensor]] = {}
    for tensor in tensors:
        by_file.setdefault(layout.places[tensor.rows.name].file, []).append(tensor)

    for name, own in by_file.items():
        with closing(open_rows(folder / name)) as file:
            for tensor in own:
                place = layout.places[tensor.rows.name]
                for box in pieces(tensor.shape, _PIECE_BYTES // tensor.dtype.itemsize):
                    # A variable would keep the piece in memory while the next one is read.
                    write_rows(
                        file,
                        tensor.rows,
                        box,
                        place,
                        bytes_of(tensor.read(checkpoint, box).to(place.tensor.dtype)),
                    )
                    progress(math.prod(box.sizes) * tensor.dtype.itemsize)


class _ModelTensor(NamedTuple):
    """A parameter, a section of a fused parameter, or a buffer of the model."""

    name: str  # in our checkpoints
    shape: tuple[int, ...]
    parameter: str  # a fused parameter, or the same name
    parameter_shape: tuple[int, ...]
    first_row: int = 0  # in the fused parameter


def _model_tensors(model: OwnModel) -> Iterator[_ModelTensor]:
    fused = fused_weights(model)
    for name, weight in model.named_parameters():
        whole = tuple(weight.shape)
        if name not in fused:
            yield _ModelTensor(name, whole, name, whole)
            continue

        sections = fused[name]
        for own, section in zip(section_names(name, sections), sections.names, strict=True):
            start, stop = sections.row_range(section)
            yield _ModelTensor(own, (stop - start, *whole[1:]), name, whole, start)

    for name, buffer in saved_buffers(model).items():
        yield _ModelTensor(name, tuple(buffer.shape), name, tuple(buffer.shape))


def _tensors(
    checkpoint: ReadableCheckpoint,
    model: ModelDescription,
    dtype: torch.dtype | None,
) -> list[_StoredTensor]:
    """Returns the tensors to write, in the model's order. CheckpointError for another model."""
    with torch.device("meta"):
        built = build_model(model)
    maps, in_fp32 = hf_rows(built), {*names_in_fp32(built), *saved_buffers(built)}
    stored = checkpoint.tensors
    prefix = MODEL_PREFIX
    if not isinstance(checkpoint, PublishedCheckpoint):
        parameters = [name for name, _ in built.named_parameters()]
        prefix = weights_prefix(parameters, list(stored), checkpoint.path)

    found: list[_StoredTensor] = []
    problems, missing = [], []
    for own in _model_tensors(built):
        key, shape, first_row = f"{prefix}{own.name}", own.shape, 0
        if key not in stored:
            # `torch_dcp` stores fused weights whole.
            key, shape, first_row = f"{prefix}{own.parameter}", own.parameter_shape, own.first_row
        if key not in stored:
            missing.append(f"{prefix}{own.name}")
            continue

        saved = stored[key]
        written = file_dtype(saved.dtype, dtype, stays_fp32=own.parameter in in_fp32)
        rows = maps[own.name]
        found.append(_StoredTensor(rows, key, own.shape, saved.dtype, written, first_row))
        if saved.shape != shape:
            problems.append(f"{key} has shape {saved.shape} where the model has {shape}")
        if not saved.dtype.is_floating_point:
            problems.append(f"{key} is {saved.dtype} where the model has floats")

    known = {tensor.key for tensor in found}
    extra = [key for key in stored if _is_weight(key, prefix) and key not in known]
    expect_same_model(checkpoint.path, problems, missing=missing, extra=extra)
    return found


def _is_weight(key: str, prefix: str) -> bool:
    """Returns whether a key belongs to the model, whose keys have this prefix."""
    if is_history(key):
        return False
    if prefix:
        return key.startswith(prefix)
    return not key.startswith(("optim.", "optimizer.", "rng."))
