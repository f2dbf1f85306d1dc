"""A model's weights in the format of the transformers library: safetensors files, config.json and a
tokenizer in one directory.

    save_hf(model, "exports/gpt", device, tokenizer=tokenizer)   # all ranks together
    load_hf(model, "exports/gpt")                                # on any number of ranks

    export = HfExport.of(model, torch.bfloat16, FolderExtras(tokenizer))   # all ranks together
    manager.save(iteration, contents, train_state, export=export)   # hf/ in a checkpoint

Our GPT is written under the names of an architecture that computes the same
(`megatron/core/models/hugging_face.py`). Models of the transformers library keep their names. Other
modules do, too, and get no config.json.

[Note: no tensor is gathered] Every rank writes the rows that it holds to the offsets that it has
computed, and brings them to disk (`hf_files.py`). Then rank 0 adds config and tokenizer and
publishes the directory. No tensor is gathered, sent or written twice.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Device
from megatron.core.dist_checkpointing.agreement import (
    on_all_ranks,
    on_first_rank,
    sum_of_ranks,
)
from megatron.core.dist_checkpointing.config import MAX_SHARD_BYTES
from megatron.core.dist_checkpointing.errors import CheckpointError, expect_same_model, few
from megatron.core.dist_checkpointing.format.index import (
    ExportedRows,
    ExportedTensor,
    ExportFile,
)
from megatron.core.dist_checkpointing.format.manifest import FURTHER_FILE
from megatron.core.dist_checkpointing.layout.boxes import Box, ranges
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.entries import Contents, Entry
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.distributed.torch_fsdp2 import reshard
from megatron.core.fp32_module import names_in_fp32
from megatron.core.low_precision.amax_history import is_history
from megatron.core.models.families.quantization import refuse_quantized_tensors
from megatron.core.models.families.row_map import RowMap
from megatron.core.models.hugging_face import (
    OwnModel,
    config_from_hf,
    description_of,
    hf_rows,
    ignored_prefixes,
    saved_buffers,
    tied_names,
)
from megatron.training.checkpoint.hf_config import (
    FolderExtras,
    config_problems,
    write_small_files,
)
from megatron.training.checkpoint.hf_files import (
    CONFIG_FILE,
    WeightFiles,
    expect_all_bytes,
    expect_same_layout,
    make_files,
    prepare_draft,
    publish_draft,
    write_own_rows,
)
from megatron.training.checkpoint.hf_layout import (
    FileTensor,
    FolderLayout,
    Part,
    RowPlan,
    check_dtype,
    file_dtype,
    row_boxes,
    tensors_of_parts,
)

logger = logging.getLogger(__name__)

HF_FOLDER = "hf"

_PREFIX = "model."  # of weights and buffers in our checkpoints
_OF_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")
_PIECE_NUMEL = 2 << 20  # elements that are read at once
# Constants that follow from config.json. Earlier versions of the transformers library saved them as
# buffers; its current versions ignore them.
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
    """Writes a model's weights into a new directory that `from_pretrained` loads. All ranks of the
    default group call it together.

    The directory appears once it is complete and on disk, or not at all. The main weights are
    written after their pending updates.

    Args:
        model: a model sharded by either engine, or a plain one that is the same on every rank.
        folder: a directory on a file system that all ranks share. Unfinished files of earlier saves
            to it are deleted.
        tokenizer, processor, base_model_path: as in `FolderExtras`; rank 0's are written.
        dtype: the dtype of all floating-point tensors, including buffers and except for parameters
            of an `Fp32Module`. None writes fp32 as bf16 and keeps other dtypes. `torch.float32`
            keeps the bits of fp32 main weights.
        max_shard_bytes: the limit of the tensors in one file; a larger tensor gets a separate file.

    Raises:
        ConfigError: if no architecture of the transformers library computes the same as our model.
        CheckpointError: on all ranks, if `folder` is not empty or cannot be written, a rank does
            not see rank 0's files, the ranks have different models, dtypes or shard sizes, or no
            rank has some rows; and for extras that cannot be written.
        ValueError: for a URL, an empty shard size, or a dtype that is not floating-point or that
            safetensors lacks.
    """
    if "://" in str(folder):
        raise ValueError(f"Expected a directory of a file system, got {folder}.")
    if max_shard_bytes < 1:
        raise ValueError(f"Expected shards of at least one byte, got {max_shard_bytes}.")
    check_dtype(dtype)

    start, folder = time.perf_counter(), Path(folder)
    extras = FolderExtras(tokenizer, processor, base_model_path)
    on_all_ranks(extras.check)
    contents = on_all_ranks(lambda: _collect(model))
    plan = on_all_ranks(lambda: _plan(model, contents, dtype, max_shard_bytes))
    _write(model, folder, device, contents, plan, extras)

    logger.info("saved weights in %s in %.2f s", folder, time.perf_counter() - start)


def load_hf(model: nn.Module, folder: str | Path, *, adds_rows: bool = False) -> None:
    """Loads weights from safetensors files into a model, in place. All ranks of the default group
    call it together.

    Each rank reads only its part. The compute weights and the main weights of an offloaded
    optimizer follow when they are next used; its other states stay. Floating-point dtypes are
    converted.

    Args:
        model: as in `save_hf`, without a pending save.
        folder: a directory with `model.safetensors`, or shards and their index. Its config.json, if
            any, must describe the model.
        adds_rows: whether our model's vocabulary may have more rows than the files. The added rows
            are the mean of the rows in the files.

    Raises:
        ConfigError: if no architecture of the transformers library computes the same as our model.
        CheckpointError: on all ranks, before anything is changed, for missing or damaged files, and
            for names, shapes, dtypes or a config of another model. Only reading may fail later.
    """
    folder = Path(folder)
    contents = on_all_ranks(lambda: _collect(model))
    with ExitStack() as stack:
        files = on_all_ranks(lambda: WeightFiles.open(folder, stack))
        if adds_rows:
            on_all_ranks(lambda: _add_rows(model, contents, files))
        placed = on_all_ranks(lambda: _found(model, contents, files))
        on_all_ranks(lambda: _load(files, placed))
    logger.info("loaded weights from %s", folder)


@dataclass(frozen=True)
class HfExport:
    """The directory `hf/` in a run's checkpoints: an `Export` of `megatron.core.dist_checkpointing`
    whose files equal the files of `save_hf`, byte for byte.

    Everything except the weights is rendered once, at the start of the run, so that a file that
    cannot be written is an error before the first step.
    """

    plan: RowPlan
    small_files: dict[str, bytes]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        dtype: torch.dtype | None,
        extras: FolderExtras,
        *,
        max_length: int | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> HfExport:
        """Plans the export. All ranks call it together, once per run.

        Args:
            model, dtype, max_shard_bytes: as in `save_hf`.
            extras: rank 0's are written.
            max_length: as in `write_small_files`.

        Raises:
            ConfigError, CheckpointError: on all ranks, as `save_hf`.
        """
        on_all_ranks(extras.check)
        plan = on_all_ranks(lambda: _plan(model, _collect(model), dtype, max_shard_bytes))
        small_files: dict[str, bytes] = {}

        def render() -> str:
            small_files.update(_rendered(model, plan.layout, extras, max_length))
            return plan.layout.fingerprint

        fingerprint = on_first_rank(render, f"Expected to make the files of {HF_FOLDER}/, got")
        on_all_ranks(lambda: expect_same_layout(plan.layout, fingerprint))
        return cls(plan, small_files)

    @property
    def is_exact(self) -> bool:
        """Whether `hf/` has all weights bit for bit, so that a checkpoint needs no other copy."""
        return self.plan.is_exact

    @cached_property
    def files(self) -> dict[str, ExportFile]:
        return {
            f"{HF_FOLDER}/{file.name}": ExportFile(file.header, file.nbytes)
            for file in self.plan.layout.files
        }

    @cached_property
    def tensors(self) -> dict[str, ExportedTensor]:
        return {own.name: ExportedTensor(own.dtype, own.shape) for own in self.plan.layout.tensors}

    def rows(self, key: str, box: Box) -> Iterator[ExportedRows]:
        for found in self.plan.rows(key, box):
            yield found._replace(file=f"{HF_FOLDER}/{found.file}")


def _rendered(
    model: nn.Module, layout: FolderLayout, extras: FolderExtras, max_length: int | None
) -> dict[str, bytes]:
    """Returns all files except the weights by their paths in the checkpoint."""
    # Tokenizers and configs of other libraries can only write themselves into a directory.
    with tempfile.TemporaryDirectory(prefix="hf-") as name:
        folder = Path(name)
        write_small_files(folder, model, layout, extras, max_length)
        found = {
            f"{HF_FOLDER}/{path.relative_to(folder).as_posix()}": path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }

    for file in found:
        if FURTHER_FILE.fullmatch(file) is None:
            raise CheckpointError(
                f"Expected names of files of letters, digits, '.', '-' and '_', got {file!r}."
            )
    return found


# Planning


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _collect(model: nn.Module) -> Contents:
    """Returns the weights after their pending updates, and the buffers that files have."""
    # After a forward without a backward, a module may have gathered compute weights.
    reshard(model)

    groups = {id(group): group for group in map(group_of, model.parameters()) if group is not None}
    for group in groups.values():
        group.wait_main_weight()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    contents = collect(model, rank=_rank(), world_size=world_size)
    kept = [
        group._replace(entries=[one for one in group.entries if not is_history(one.key)])
        for group in contents.groups
    ]
    return replace(contents, groups=kept)


def _plan(
    model: nn.Module, contents: Contents, dtype: torch.dtype | None, max_shard_bytes: int
) -> RowPlan:
    """Returns the files of a model and the offsets of its rows, the same on every rank."""
    rows, dtypes = _rows_of(model, contents), _file_dtypes(model, contents, dtype)
    return RowPlan.of(contents.entries, rows, dtypes, max_shard_bytes)


def _rows_of(
    model: nn.Module, contents: Contents, files: WeightFiles | None = None
) -> dict[str, RowMap]:
    """Returns the rows of each entry in the files' tensors, by key.

    Args:
        files: the files to load; None for the files of a save.
    """
    keys = [entry.key for entry in contents.entries]
    if not isinstance(model, OwnModel):
        return {key: RowMap(key.removeprefix(_PREFIX)) for key in keys}

    there = ((), None) if files is None else (files.names, files.config.get("model_type"))
    found = {f"{_PREFIX}{own}": rows for own, rows in hf_rows(model, *there).items()}
    if differing := sorted(set(keys) ^ set(found)):
        raise CheckpointError(
            f"Expected the weights of a model alone, got a difference in {few(differing)}."
        )
    return found


def _file_dtypes(
    model: nn.Module, contents: Contents, asked: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Returns the dtype in which each entry is written, by key."""
    in_fp32, parameters = names_in_fp32(model), dict(model.named_parameters())
    kept = {f"{_PREFIX}{own}" for name in in_fp32 for own in contents.names[parameters[name]]}
    if isinstance(model, OwnModel):
        kept |= {f"{_PREFIX}{own}" for own in saved_buffers(model)}
    return {
        entry.key: file_dtype(entry.saved_as.dtype, asked, stays_fp32=entry.key in kept)
        for entry in contents.entries
    }


# Saving


def _write(
    model: nn.Module,
    folder: Path,
    device: Device,
    contents: Contents,
    plan: RowPlan,
    extras: FolderExtras,
) -> None:
    """Writes the directory on all ranks, see [Note: no tensor is gathered]."""
    layout = plan.layout
    name, fingerprint = on_first_rank(
        lambda: [prepare_draft(folder).name, layout.fingerprint],
        f"Expected to write into {folder.parent}, got",
    )
    # Ranks with different layouts would overwrite each other's rows.
    on_all_ranks(lambda: expect_same_layout(layout, fingerprint))
    draft, failure = folder.parent / name, f"Expected {folder} to be written, got"

    def make() -> None:
        draft.mkdir()
        make_files(draft, layout)

    def finish() -> None:
        write_small_files(draft, model, layout, extras)
        publish_draft(draft, layout, folder)

    try:
        on_first_rank(make, failure)
        own = plan.own_rows(contents.entries, _rank())
        num_bytes = on_all_ranks(lambda: write_own_rows(draft, own, device))
        expect_all_bytes(sum_of_ranks(num_bytes), layout)
        on_first_rank(finish, failure)
    finally:
        if _rank() == 0:
            shutil.rmtree(draft, ignore_errors=True)


# Loading


def _add_rows(model: nn.Module, contents: Contents, files: WeightFiles) -> None:
    """Extends the files' vocabulary to the rows of our model. ConfigError for a config.json of
    another model.
    """
    if not isinstance(model, OwnModel):
        return
    num_rows = description_of(model).vocab_size
    there = config_from_hf(files.config, str(files.folder / CONFIG_FILE)).vocab_size
    if num_rows <= there:
        return

    rows = _rows_of(model, contents, files)
    own = {at.name for key, at in rows.items() if key.endswith(_OF_VOCABULARY)}
    tied = {other for name, others in tied_names(model).items() if name in own for other in others}
    files.add_rows((own | tied) & set(files.names), num_rows)
    message = "the vocabulary of %s gets %d more rows, each of them the mean of its %d rows"
    logger.info(message, files.folder, num_rows - there, there)


class _Placed(NamedTuple):
    """An entry with its rows in the files' tensors."""

    entry: Entry
    rows: RowMap


def _found(model: nn.Module, contents: Contents, files: WeightFiles) -> list[_Placed]:
    """Returns all entries with their rows. CheckpointError for weights of another model."""
    rows = _rows_of(model, contents, files)
    sources = _sources(model, contents, files, rows)
    return [
        _Placed(entry, replace(rows[entry.key], name=sources[rows[entry.key].name]))
        for entry in contents.entries
    ]


def _sources(
    model: nn.Module, contents: Contents, files: WeightFiles, rows: Mapping[str, RowMap]
) -> dict[str, str]:
    """Returns the name of the tensor to read for each tensor that a save would write.
    CheckpointError for weights of another model.
    """
    problems = config_problems(model, files.config)
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

    # The transformers library saves empty matrices for a model without shared experts.
    unexpected = {name for name in unexpected if 0 not in files.shape(name)}
    expect_same_model(str(files.folder), problems, missing=missing, extra=sorted(unexpected))
    return sources


def _tensors(
    contents: Contents, rows: Mapping[str, RowMap]
) -> Iterator[tuple[FileTensor, list[_Placed]]]:
    """Yields the tensors that a save would write, in our dtypes, with their entries."""
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
    """Returns further names of tied weights by the name that the transformers library writes."""
    if isinstance(model, OwnModel):
        return tied_names(model)

    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: others for first, *others in names.values() if others}


def _untied(name: str, first: str, config: Mapping[str, Any]) -> str:
    # The transformers library also follows the weights rather than the config, and unties them.
    if config.get("tie_word_embeddings"):
        return (
            f"{name} is not {first}, with which {CONFIG_FILE} ties it; set tie_word_embeddings to "
            "false"
        )
    return f"{name} is not {first}, with which it is tied here"


def _are_equal(files: WeightFiles, name: str, other: str, entries: Sequence[_Placed]) -> bool:
    """Compares two tensors in the rows of these entries that this rank holds."""
    return all(
        torch.equal(files.read(name, there), files.read(other, there))
        for placed in entries
        for _, there in _pieces(placed)
    )


def _pieces(placed: _Placed) -> Iterator[tuple[Box, Box]]:
    """Yields boxes of a few MiB of this rank's part of an entry, each with the box of the same
    elements in the files' tensor.
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
    """Reads this rank's parts in place. The writes must increment the tensors' versions, by which
    the compute weights are updated.
    """
    for placed in found:
        entry, rows = placed
        part = entry.part_of(entry.values.target())
        for box, there in _pieces(placed):
            # In a stack of matrices the box in the file has one dim more.
            read = files.read(rows.name, there).view(box.sizes)
            part[box.within(entry.offsets).slices()].copy_(read)
        entry.values.install()
