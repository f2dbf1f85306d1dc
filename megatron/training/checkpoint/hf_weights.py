"""Weights in the layout of the transformers library: safetensors files, config.json and a tokenizer
in one folder.

    save_hf(model, "exports/gpt", device, tokenizer=tokenizer)   # all ranks together
    load_hf(model, "exports/gpt")                                # on any number of ranks

Our GPT is written under the names of an architecture that computes the same
(`megatron/core/models/gpt/hugging_face.py`), a model of the transformers library under its own. Any
other module keeps its own names, too, and gets no config.json.

[Note: no tensor is gathered] The ranks write their parts as a checkpoint of weights alone, beside
the folder and under a hidden name. Rank 0 reads it piece by piece, writes the pieces as
safetensors, and deletes it. No rank ever holds a whole tensor, but the disk needs room for the
weights twice.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron.core.device import Device
from megatron.core.dist_checkpointing.agreement import on_all_ranks, on_first_rank
from megatron.core.dist_checkpointing.errors import (
    CheckpointDamagedError,
    CheckpointError,
    few,
    other_model,
)
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.plan.boxes import Box, ranges
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.entries import Contents, Entry
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.distributed.fsdp.module import FsdpModule
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.distributed.torch_fsdp2 import reshard
from megatron.core.files import remove_empty_folder
from megatron.core.log import printable
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.hugging_face import config_differences, hf_names
from megatron.core.options import shown
from megatron.training.checkpoint.hf_extras import FolderExtras
from megatron.training.checkpoint.hf_files import (
    CONFIG_FILE,
    StoredTensor,
    WeightFiles,
    main_dtype,
    sync_files,
    write_gpt_config,
    write_weights,
)

logger = logging.getLogger(__name__)

_PREFIX = "model."  # of weights and buffers in our checkpoints
_PIECE_NUMEL = 2 << 20  # elements that are read at once
# Keys of a config.json that decide what weights of the same names and shapes compute in a model of
# the transformers library. Rotary embeddings are compared as well.
_ARITHMETIC = (
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "layer_norm_eps",
    "norm_epsilon",
    "no_rope_layers",
)


def save_hf(
    model: nn.Module,
    folder: str | Path,
    device: Device,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    base_model_path: str | Path | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a model's weights into a new folder that `from_pretrained` loads. All ranks of the
    default group call it together.

    The folder appears once it is whole and on disk, or not at all. The main weights are written, in
    their dtype, once pending updates of them are done.

    Args:
        model: sharded by either engine, or plain and the same on every rank.
        folder: on a file system that all ranks see. Unfinished files of earlier saves to it are
            deleted.
        tokenizer, processor, base_model_path: see `FolderExtras`; rank 0's are written.
        max_shard_bytes: of the tensors in one file; a larger tensor gets a file of its own.

    Raises:
        ConfigError: for a GPT that no architecture of the transformers library computes.
        CheckpointError: on all ranks, if `folder` holds something or cannot be written, or for
            extras that cannot.
        ValueError: for a URL, or shards that hold nothing.
    """
    if "://" in str(folder):
        raise ValueError(f"Expected a folder of a file system, got {folder}.")
    if max_shard_bytes < 1:
        raise ValueError(f"Expected shards of at least one byte, got {max_shard_bytes}.")

    start, folder = time.perf_counter(), Path(folder)
    extras = FolderExtras(tokenizer, processor, base_model_path)
    on_all_ranks(extras.check)
    contents = on_all_ranks(lambda: _collect(model))
    names = on_all_ranks(lambda: _names_of(model, contents))
    token = on_first_rank(lambda: _begin(folder), f"Expected to write into {folder.parent}, got")

    draft = _Draft(folder, token)
    try:
        on_all_ranks(lambda: _save_weights(draft, contents, device))
        on_first_rank(
            lambda: _export(draft, model, names, extras, max_shard_bytes),
            f"Expected {folder} to be written, got",
        )
    finally:
        if _rank() == 0:
            draft.remove()

    logger.info("saved weights in %s in %.2f s", folder, time.perf_counter() - start)


def load_hf(model: nn.Module, folder: str | Path) -> None:
    """Loads weights from safetensors files into a model, in place. All ranks of the default group
    call it together.

    Each rank reads its own part. Compute weights follow when they are next used, and so do the main
    weights of an offloaded optimizer; its other states stay. Floating-point dtypes are converted.

    Args:
        model: as in `save_hf`, with no save of it under way.
        folder: with `model.safetensors`, or shards and their index. Its config.json, if any, must
            describe what the model computes.

    Raises:
        ConfigError: for a GPT that no architecture of the transformers library computes.
        CheckpointError: on all ranks, before anything is changed, for missing or broken files, and
            for names, shapes, dtypes or a config of another model. Only reading may fail later.
    """
    folder = Path(folder)
    contents = on_all_ranks(lambda: _collect(model))
    with ExitStack() as stack:
        files = on_all_ranks(lambda: WeightFiles.open(folder, stack))
        sources = on_all_ranks(lambda: _sources(model, contents, files))
        on_all_ranks(lambda: _load(files, contents, sources))
    logger.info("loaded weights from %s", folder)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _collect(model: nn.Module) -> Contents:
    """The weights and buffers, with no update of them pending."""
    # After a forward without a backward, FSDP2's root module still shows gathered compute weights.
    reshard(model)

    groups = {id(group): group for group in map(group_of, model.parameters()) if group is not None}
    for group in groups.values():
        group.wait_main_weight()
    return collect(model, rank=_rank(), world_size=_world_size())


def _names_of(model: nn.Module, contents: Contents) -> dict[str, str]:
    """The name that each entry has in the folder, by its key."""
    keys = [entry.key for entry in contents.entries]
    if not isinstance(model, GPTModel):
        return {key: key.removeprefix(_PREFIX) for key in keys}

    names = {f"{_PREFIX}{own}": name for own, name in hf_names(model).items()}
    if differing := sorted(set(keys) ^ set(names)):
        raise CheckpointError(
            f"Expected the weights of a GPT alone, got a difference in {few(differing)}."
        )
    return names


# Saving


class _Draft:
    """The hidden folders beside a folder while it is being written."""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder = folder
        self.token = token
        self.store = LocalStore(folder.parent)
        self.checkpoint = f".{folder.name}.{token}.weights"
        self.name = f".{folder.name}.{token}.writing"

    def remove(self) -> None:
        """Deletes what is left of this draft."""
        _remove(self.folder, re.escape(self.token))


def _remove(folder: Path, token: str) -> None:
    """Deletes the hidden folders of saves to `folder` whose tokens match a pattern."""

    pattern = re.compile(
        rf"\.{re.escape(folder.name)}\.{token}\.(weights(\.[0-9a-z]+\.saving)?|writing)"
    )
    for name in LocalStore(folder.parent).folders():
        if pattern.fullmatch(name):
            shutil.rmtree(folder.parent / name, ignore_errors=True)


def _begin(folder: Path) -> str:
    """Rank 0: checks that the folder is free, deletes remains of earlier saves, draws a token."""
    remove_empty_folder(folder)
    _check_is_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove(folder, "[0-9a-f]{8}")
    return secrets.token_hex(4)


def _check_is_free(folder: Path) -> None:
    if os.path.lexists(folder):
        raise CheckpointError(
            f"Expected nothing yet at {folder}, got what is there. Weights are never overwritten."
        )


def _save_weights(draft: _Draft, contents: Contents, device: Device) -> None:
    """Writes this rank's part of the checkpoint of weights alone."""
    with CheckpointManager(draft.store, device, _rank(), _world_size(), draft.token) as manager:
        manager.save(0, contents, {}, name=draft.checkpoint)
        manager.finish()


def _export(
    draft: _Draft,
    model: nn.Module,
    names: Mapping[str, str],
    extras: FolderExtras,
    max_shard_bytes: int,
) -> None:
    """Rank 0: writes the folder from the checkpoint."""
    target = draft.folder.parent / draft.name
    target.mkdir()

    checkpoint = PublishedCheckpoint.open(draft.store, draft.checkpoint)
    tensors = [StoredTensor(names[key], key, entry) for key, entry in checkpoint.tensors().items()]
    write_weights(target, checkpoint, tensors, max_shard_bytes)
    ids = extras.save(target)
    _save_config(model, target, main_dtype(tensors), ids)
    extras.copy_missing(target)
    sync_files(target)

    _check_is_free(draft.folder)
    draft.store.publish(draft.name, draft.folder.name)


def _save_config(
    model: nn.Module, folder: Path, dtype: torch.dtype | None, ids: Mapping[str, Any]
) -> None:
    if isinstance(model, GPTModel):
        write_gpt_config(folder, model.config, model.vocab_size, dtype, ids)
        return

    config = _config_of(model)
    if config is None:
        return

    config = copy.deepcopy(config)
    config.dtype = dtype
    config.architectures = [_original_class(model).__name__]
    config.save_pretrained(folder)

    generation = getattr(model, "generation_config", None)
    if callable(getattr(generation, "save_pretrained", None)):
        generation.save_pretrained(folder)  # type: ignore[union-attr]


def _config_of(model: nn.Module) -> Any:
    """The config of a model of the transformers library; None for other modules."""
    config = getattr(model, "config", None)
    is_theirs = all(
        callable(getattr(config, name, None)) for name in ("to_dict", "save_pretrained")
    )
    return config if is_theirs else None


def _original_class(model: nn.Module) -> type[nn.Module]:
    """The class that a model had before it was sharded."""
    kinds: Iterable[type[Any]] = type(model).__mro__
    return next(kind for kind in kinds if not issubclass(kind, (FsdpModule, FSDPModule)))


# Loading


def _sources(model: nn.Module, contents: Contents, files: WeightFiles) -> dict[str, str]:
    """The tensor to load each entry from, by its key. CheckpointError for weights of another
    model.
    """
    problems = _config_problems(model, files.config)
    others, sources, missing = _other_names(model), {}, []
    wanted = _names_of(model, contents)
    unexpected = set(files.names)
    for entry in contents.entries:
        name = wanted[entry.key]
        there = [other for other in (name, *others.get(name, ())) if other in unexpected]
        unexpected.difference_update(there)
        if not there:
            missing.append(name)
            continue

        sources[entry.key] = there[0]
        for other in there:
            problems += _differences(files, other, entry)
        # Tied weights must be equal, unless the config ties them: then the first one counts.
        if not problems and len(there) > 1 and not files.config.get("tie_word_embeddings"):
            differing = [
                other for other in there[1:] if not _are_equal(files, there[0], other, entry)
            ]
            problems += [
                f"{other} is not {there[0]}, with which it is tied here" for other in differing
            ]

    if missing:
        problems.append(f"it lacks {few(missing)}")
    if unexpected:
        problems.append(f"nothing here takes {printable(few(sorted(unexpected)))}")
    if problems:
        raise other_model(str(files.folder), problems)
    return sources


def _other_names(model: nn.Module) -> dict[str, list[str]]:
    """Further names of tied weights, by the one name that the transformers library writes."""
    if isinstance(model, GPTModel):
        is_tied = model.output_layer is None
        return {"model.embed_tokens.weight": ["lm_head.weight"]} if is_tied else {}

    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: others for first, *others in names.values() if others}


def _differences(files: WeightFiles, name: str, entry: Entry) -> list[str]:
    found = []
    own, dtype = entry.saved_as, files.dtype(name)
    if files.shape(name) != own.shape:
        found.append(f"{name} has shape {files.shape(name)} where the model has {own.shape}")
    is_convertible = dtype is not None and dtype.is_floating_point and own.dtype.is_floating_point
    if dtype != own.dtype and not is_convertible:
        found.append(f"{name} is {dtype} where the model has {own.dtype}")
    return found


def _are_equal(files: WeightFiles, name: str, other: str, entry: Entry) -> bool:
    """Whether two tensors are the same in what this rank holds of an entry."""
    return all(torch.equal(files.read(name, box), files.read(other, box)) for box in _pieces(entry))


def _pieces(entry: Entry) -> Iterator[Box]:
    """This rank's part of an entry, in boxes of some MiB of the whole tensor."""
    part, limit = entry.part_of(entry.values.stored), _PIECE_NUMEL
    if part.numel():
        for piece in ranges(
            Box(entry.offsets, tuple(part.shape)),
            entry.saved_as.shape,
            max_span=limit,
            max_gap=limit,
        ):
            yield piece.box


@torch.no_grad()
def _load(files: WeightFiles, contents: Contents, sources: Mapping[str, str]) -> None:
    """Reads this rank's parts, in place. Autograd must see the writes: they make the compute
    weights follow.
    """
    for entry in contents.entries:
        part = entry.part_of(entry.values.target())
        for box in _pieces(entry):
            part[box.within(entry.offsets).slices()].copy_(files.read(sources[entry.key], box))
        entry.values.install()


def _config_problems(model: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """Differences in arithmetic between a config.json, if there is one, and the model."""
    if isinstance(model, GPTModel):
        if not saved:
            return []
        return config_differences(saved, CONFIG_FILE, model.config, model.vocab_size)

    # A model of the transformers library: whatever both say.
    config = _config_of(model)
    own: Mapping[str, Any] = {} if config is None else config.to_dict()
    pairs = {name: (saved.get(name), own.get(name)) for name in _ARITHMETIC}
    pairs["rope_parameters"] = _rope(saved), _rope(own)
    pairs["partial_rotary_factor"] = _rotated_share(saved), _rotated_share(own)
    return [
        f"{CONFIG_FILE} says {name} {_shown(theirs)} where the model has {_shown(ours)}"
        for name, (theirs, ours) in pairs.items()
        if theirs is not None and ours is not None and theirs != ours
    ]


def _shown(value: Any) -> str:
    """A value for a message: numbers as they are, texts and nested values bounded."""
    return printable(str(value)) if isinstance(value, (str, int, float)) else shown(value)


def _rotated_share(config: Mapping[str, Any]) -> Any:
    parameters = _section(config, "rope_parameters")
    return parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))


def _rope(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rotary embedding in a config.json, in the form of transformers 5 or of those before."""
    parameters = _section(config, "rope_parameters") or _section(config, "rope_scaling")
    theta = parameters.pop("rope_theta", config.get("rope_theta"))
    if theta is None:
        return None
    if isinstance(theta, bool) or not isinstance(theta, (int, float)):
        raise CheckpointDamagedError(
            f"Expected a number as rope_theta in {CONFIG_FILE}, got {shown(theta)}."
        )

    kind = parameters.pop("rope_type", "default")
    older = parameters.pop("type", kind)
    # Architectures have different defaults for it; `_rotated_share` compares it.
    parameters.pop("partial_rotary_factor", None)
    return {"rope_type": older if kind == "default" else kind, "rope_theta": theta, **parameters}


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of an object inside a config.json; empty if it is missing."""
    found = config.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise CheckpointDamagedError(
            f"Expected an object as {name} in {CONFIG_FILE}, got {shown(found)}."
        )
    return dict(found or {})
