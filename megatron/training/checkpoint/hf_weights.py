"""Weights in the layout of the transformers library: safetensors files, config.json and a tokenizer
in one folder.

    save_hf(model, "exports/gpt", device, tokenizer=tokenizer)   # all ranks together
    load_hf(model, "exports/gpt")                                # on any number of ranks

Our GPT is written under the names of an architecture that computes the same
(`megatron/core/models/hugging_face.py`), a model of the transformers library under its own. Any
other module keeps its own names, too, and gets no config.json.

[Note: no tensor is gathered] The ranks write into one draft of the folder, beside it and under a
hidden name. Rank 0 makes the files; every rank writes the rows that it holds to the offsets that it
has computed, in the dtype that was asked for, and brings them to disk. Once all ranks are done,
rank 0 adds config and tokenizer and gives the folder its name. No tensor is gathered or sent, and
nothing is written twice.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.core.device import Device
from megatron.core.dist_checkpointing.agreement import (
    on_all_ranks,
    on_first_rank,
    sum_of_ranks,
)
from megatron.core.dist_checkpointing.errors import few, other_model
from megatron.core.dist_checkpointing.layout.boxes import Box, ranges
from megatron.core.dist_checkpointing.state.entries import Contents, Entry
from megatron.core.log import printable
from megatron.core.models.families.quantization import refuse_quantized_tensors
from megatron.core.models.families.row_map import RowMap
from megatron.core.models.hugging_face import (
    OwnModel,
    config_differences,
    config_from_hf,
    description_of,
    ignored_prefixes,
    tied_names,
)
from megatron.training.checkpoint.hf_config_check import their_config_differences
from megatron.training.checkpoint.hf_draft import draft_path, prepare_target, publish_draft
from megatron.training.checkpoint.hf_extras import FolderExtras
from megatron.training.checkpoint.hf_files import (
    CONFIG_FILE,
    WeightFiles,
    sync_files,
)
from megatron.training.checkpoint.hf_layout import (
    MAX_SHARD_BYTES,
    FileTensor,
    FolderLayout,
    Part,
    check_dtype,
    row_boxes,
    tensors_of_parts,
)
from megatron.training.checkpoint.hf_plan import (
    collect_weights,
    config_of,
    file_dtypes,
    own_rank,
    rows_of,
    write_small_files,
)
from megatron.training.checkpoint.hf_row_writer import (
    RowPlan,
    check_files,
    expect_all_bytes,
    expect_same_layout,
    make_files,
    write_own_rows,
)

logger = logging.getLogger(__name__)

_PREFIX = "model."  # of weights and buffers in our checkpoints
_OF_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")
_PIECE_NUMEL = 2 << 20  # elements that are read at once
# Constants that follow from config.json. Old versions of the transformers library saved them as
# buffers, and it ignores them by now.
_DERIVED = (".rotary_emb.inv_freq",)


def save_hf(
    model: nn.Module,
    folder: str | Path,
    device: Device,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    base_model_path: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a model's weights into a new folder that `from_pretrained` loads. All ranks of the
    default group call it together.

    The folder appears once it is whole and on disk, or not at all. The main weights are written,
    once pending updates of them are done.

    Args:
        model: sharded by either engine, or plain and the same on every rank.
        folder: on a file system that all ranks see. Unfinished files of earlier saves to it are
            deleted.
        tokenizer, processor, base_model_path: see `FolderExtras`; rank 0's are written.
        dtype: of all floating-point tensors, buffers too, but for parameters of an `Fp32Module`;
            None: bf16 for those in fp32, and the others as they are. `torch.float32` keeps fp32
            main weights to the bit.
        max_shard_bytes: of the tensors in one file; a larger tensor gets a file of its own.

    Raises:
        ConfigError: for a GPT that no architecture of the transformers library computes.
        CheckpointError: on all ranks, if `folder` holds something or cannot be written, a rank does
            not see what rank 0 writes, ranks were called with different models, dtypes or shard
            sizes, or some rows are on no rank; and for extras that cannot be written.
        ValueError: for a URL, shards that hold nothing, or a dtype that is no float or that
            safetensors does not have.
    """
    if "://" in str(folder):
        raise ValueError(f"Expected a folder of a file system, got {folder}.")
    if max_shard_bytes < 1:
        raise ValueError(f"Expected shards of at least one byte, got {max_shard_bytes}.")
    check_dtype(dtype)

    start, folder = time.perf_counter(), Path(folder)
    extras = FolderExtras(tokenizer, processor, base_model_path)
    on_all_ranks(extras.check)
    contents = on_all_ranks(lambda: collect_weights(model))
    plan = on_all_ranks(lambda: _plan(model, contents, dtype, max_shard_bytes))
    _write(model, folder, device, plan, extras)

    logger.info("saved weights in %s in %.2f s", folder, time.perf_counter() - start)


def load_hf(model: nn.Module, folder: str | Path, *, adds_rows: bool = False) -> None:
    """Loads weights from safetensors files into a model, in place. All ranks of the default group
    call it together.

    Each rank reads its own part. Compute weights follow when they are next used, and so do the main
    weights of an offloaded optimizer; its other states stay. Floating-point dtypes are converted.

    Args:
        model: as in `save_hf`, with no save of it under way.
        folder: with `model.safetensors`, or shards and their index. Its config.json, if any, must
            describe what the model computes.
        adds_rows: whether the model's vocabulary may have more rows than the folder's, which then
            are the mean of the folder's rows. For our own models.

    Raises:
        ConfigError: for a GPT that no architecture of the transformers library computes.
        CheckpointError: on all ranks, before anything is changed, for missing or broken files, and
            for names, shapes, dtypes or a config of another model. Only reading may fail later.
    """
    folder = Path(folder)
    contents = on_all_ranks(lambda: collect_weights(model))
    with ExitStack() as stack:
        files = on_all_ranks(lambda: WeightFiles.open(folder, stack))
        if adds_rows:
            on_all_ranks(lambda: _add_rows(model, contents, files))
        placed = on_all_ranks(lambda: _found(model, contents, files))
        on_all_ranks(lambda: _load(files, placed))
    logger.info("loaded weights from %s", folder)


def entries_to_load(model: nn.Module, files: WeightFiles) -> Sequence[tuple[Entry, RowMap]]:
    """What a model is loaded from: its weights, which may be on meta, and the rows of a folder's
    tensors that each of them is. A vocabulary gets as many rows as the model has.

    Raises:
        ConfigError, CheckpointError: as `load_hf`.
    """
    contents = collect_weights(model)
    _add_rows(model, contents, files)
    return _found(model, contents, files)


# Saving


def _plan(
    model: nn.Module, contents: Contents, dtype: torch.dtype | None, max_shard_bytes: int
) -> RowPlan:
    """What is written where, and by which rank."""
    rows, dtypes = rows_of(model, contents), file_dtypes(model, contents, dtype)
    return RowPlan.of(contents.entries, rows, dtypes, own_rank(), max_shard_bytes)


def _write(
    model: nn.Module, folder: Path, device: Device, plan: RowPlan, extras: FolderExtras
) -> None:
    """All ranks: writes the folder, see [Note: no tensor is gathered]."""
    token, fingerprint = on_first_rank(
        lambda: [prepare_target(folder), plan.layout.fingerprint],
        f"Expected to write into {folder.parent}, got",
    )
    # Nobody learns of other offsets later: rows would end among those of other ranks.
    on_all_ranks(lambda: expect_same_layout(plan.layout, fingerprint))

    draft, failure = draft_path(folder, token), f"Expected {folder} to be written, got"
    try:
        on_first_rank(lambda: _make_draft(draft, plan.layout), failure)
        num_bytes = on_all_ranks(lambda: write_own_rows(draft, plan, device))
        expect_all_bytes(sum_of_ranks(num_bytes), plan.layout)
        on_first_rank(lambda: _finish(draft, folder, model, plan.layout, extras), failure)
    finally:
        if own_rank() == 0:
            shutil.rmtree(draft, ignore_errors=True)


def _make_draft(draft: Path, layout: FolderLayout) -> None:
    """Rank 0: makes the files of weights, for the rows of all ranks."""
    draft.mkdir()
    make_files(draft, layout)


def _finish(
    draft: Path, folder: Path, model: nn.Module, layout: FolderLayout, extras: FolderExtras
) -> None:
    """Rank 0: adds everything but the weights, and publishes."""
    write_small_files(draft, model, layout, extras)
    sync_files(draft)
    check_files(draft, layout)
    publish_draft(draft, folder)


# Loading


def _add_rows(model: nn.Module, contents: Contents, files: WeightFiles) -> None:
    """Shows the matrices of the vocabulary with as many rows as a model of ours has, if the files
    have fewer. ConfigError for a config.json of another model.
    """
    if not isinstance(model, OwnModel):
        return
    num_rows = description_of(model).vocab_size
    there = config_from_hf(files.config, str(files.folder / CONFIG_FILE)).vocab_size
    if num_rows <= there:
        return

    rows = rows_of(model, contents, files)
    own = {at.name for key, at in rows.items() if key.endswith(_OF_VOCABULARY)}
    tied = {other for name, others in tied_names(model).items() if name in own for other in others}
    files.add_rows((own | tied) & set(files.names), num_rows)
    message = "the vocabulary of %s gets %d more rows, each of them the mean of its %d rows"
    logger.info(message, files.folder, num_rows - there, there)


class _Placed(NamedTuple):
    """An entry, and where its rows lie."""

    entry: Entry
    rows: RowMap


def _found(model: nn.Module, contents: Contents, files: WeightFiles) -> list[_Placed]:
    """Every entry with its rows in the files. CheckpointError for weights of another model."""
    rows = rows_of(model, contents, files)
    sources = _sources(model, contents, files, rows)
    return [
        _Placed(entry, replace(rows[entry.key], name=sources[rows[entry.key].name]))
        for entry in contents.entries
    ]


def _sources(
    model: nn.Module, contents: Contents, files: WeightFiles, rows: Mapping[str, RowMap]
) -> dict[str, str]:
    """The tensor in the files to read, by the name of the one that we would write. CheckpointError
    for weights of another model.
    """
    problems = _config_problems(model, files.config)
    others, sources, missing = _other_names(model), {}, []
    unexpected = set(files.names)
    if isinstance(model, OwnModel):
        refuse_quantized_tensors(unexpected, str(files.folder))
        ignored = ignored_prefixes(model, files.config)
        unexpected = {
            name for name in unexpected if not (name.endswith(_DERIVED) or name.startswith(ignored))
        }
    for tensor, entries in _tensors(contents, rows):
        name = tensor.name
        there = [other for other in (name, *others.get(name, ())) if other in unexpected]
        unexpected.difference_update(there)
        if not there:
            missing.append(name)
            continue

        sources[name] = there[0]
        for other in there:
            problems += files.differences(other, tensor)
        if not problems:
            differing = [
                other for other in there[1:] if not _are_equal(files, there[0], other, entries)
            ]
            problems += [_untied(other, there[0], files.config) for other in differing]

    # Of shared experts without any, the transformers library saves matrices without elements.
    unexpected = {name for name in unexpected if 0 not in files.shape(name)}
    if missing:
        problems.append(f"it lacks {few(missing)}")
    if unexpected:
        problems.append(f"nothing here takes {printable(few(sorted(unexpected)))}")
    if problems:
        raise other_model(str(files.folder), problems)
    return sources


def _tensors(
    contents: Contents, rows: Mapping[str, RowMap]
) -> Iterator[tuple[FileTensor, list[_Placed]]]:
    """The tensors that we would write, in our dtypes, with the entries that each consists of."""
    placed: dict[str, list[_Placed]] = {}
    for entry in contents.entries:
        there = rows[entry.key]
        placed.setdefault(there.name, []).append(_Placed(entry, there))

    parts = [
        Part(there, entry.saved_as.shape, entry.saved_as.dtype)
        for entries in placed.values()
        for entry, there in entries
    ]
    return zip(tensors_of_parts(parts), placed.values(), strict=True)


def _other_names(model: nn.Module) -> dict[str, list[str]]:
    """Further names of tied weights, by the one name that the transformers library writes."""
    if isinstance(model, OwnModel):
        return tied_names(model)

    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: others for first, *others in names.values() if others}


def _untied(name: str, first: str, config: Mapping[str, Any]) -> str:
    # The transformers library, too, trusts the weights rather than such a config, and unties them.
    if config.get("tie_word_embeddings"):
        return (
            f"{name} is not {first}, with which {CONFIG_FILE} ties it; set tie_word_embeddings to "
            "false"
        )
    return f"{name} is not {first}, with which it is tied here"


def _are_equal(files: WeightFiles, name: str, other: str, entries: Sequence[_Placed]) -> bool:
    """Whether two tensors are the same in what this rank holds of these entries."""
    return all(
        torch.equal(files.read(name, there), files.read(other, there))
        for placed in entries
        for _, there in _pieces(placed)
    )


def _pieces(placed: _Placed) -> Iterator[tuple[Box, Box]]:
    """This rank's part of an entry, in boxes of some MiB of the whole entry, each with its place in
    the files' tensor.
    """
    entry, limit = placed.entry, _PIECE_NUMEL
    part = entry.part_of(entry.values.stored)
    if part.numel():
        for piece in ranges(
            Box(entry.offsets, tuple(part.shape)),
            entry.saved_as.shape,
            max_span=limit,
            max_gap=limit,
        ):
            yield from row_boxes(placed.rows, piece.box)


@torch.no_grad()
def _load(files: WeightFiles, found: Sequence[_Placed]) -> None:
    """Reads this rank's parts, in place. Autograd must see the writes: they make the compute
    weights follow.
    """
    for placed in found:
        entry, rows = placed
        part = entry.part_of(entry.values.target())
        for box, there in _pieces(placed):
            # A row of a stack of matrices has come with the dim of the matrices.
            read = files.read(rows.name, there).view(box.sizes)
            part[box.within(entry.offsets).slices()].copy_(read)
        entry.values.install()


def _config_problems(model: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """Differences in arithmetic between a config.json, if there is one, and the model."""
    if isinstance(model, OwnModel):
        return config_differences(saved, CONFIG_FILE, description_of(model)) if saved else []

    config = config_of(model)
    return their_config_differences(saved, {} if config is None else config.to_dict())
