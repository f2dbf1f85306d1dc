"""What a model's weights are in a folder of the transformers library: which rows of which tensors,
in which dtypes, under which config.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron.core.dist_checkpointing.errors import CheckpointError, few
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.distributed.fsdp.module import FsdpModule
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.distributed.torch_fsdp2 import reshard
from megatron.core.fp32_module import names_in_fp32
from megatron.core.models.families.row_map import RowMap
from megatron.core.models.hugging_face import (
    OwnModel,
    description_of,
    hf_rows,
    saved_buffers,
)
from megatron.training.checkpoint.hf_extras import FolderExtras
from megatron.training.checkpoint.hf_files import WeightFiles, write_json, write_own_config
from megatron.training.checkpoint.hf_layout import (
    INDEX_FILE,
    FolderLayout,
    file_dtype,
    main_dtype,
)

_PREFIX = "model."  # of weights and buffers in our checkpoints


def own_rank() -> int:
    """0 in a program without ranks."""
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def collect_weights(model: nn.Module) -> Contents:
    """The weights and buffers, with no update of them pending."""
    # After a forward without a backward, a module may show gathered compute weights.
    reshard(model)

    groups = {id(group): group for group in map(group_of, model.parameters()) if group is not None}
    for group in groups.values():
        group.wait_main_weight()
    return collect(model, rank=own_rank(), world_size=_world_size())


def rows_of(
    model: nn.Module, contents: Contents, files: WeightFiles | None = None
) -> dict[str, RowMap]:
    """Where the rows of each entry lie in the folder's tensors, by its key.

    `files` are the folder's, if there are any yet.
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


def file_dtypes(
    model: nn.Module, contents: Contents, asked: torch.dtype | None
) -> dict[str, torch.dtype]:
    """In which dtype each entry is written, by its key."""
    in_fp32, parameters = names_in_fp32(model), dict(model.named_parameters())
    kept = {f"{_PREFIX}{own}" for name in in_fp32 for own in contents.names[parameters[name]]}
    if isinstance(model, OwnModel):
        kept |= {f"{_PREFIX}{own}" for own in saved_buffers(model)}
    return {
        entry.key: file_dtype(entry.saved_as.dtype, asked, stays_fp32=entry.key in kept)
        for entry in contents.entries
    }


def write_small_files(
    folder: Path,
    model: nn.Module,
    layout: FolderLayout,
    extras: FolderExtras,
    max_length: int | None = None,
) -> None:
    """Writes everything but the weights: their index, the config, the extras.

    Args:
        max_length: of a text, for a GPT whose config names none. Other programs want one, and would
            otherwise take their own default.

    Raises:
        CheckpointError: for extras that cannot be written.
        ConfigError: for a GPT that no architecture of the transformers library computes.
    """
    if layout.index is not None:
        write_json(folder / INDEX_FILE, layout.index)
    ids = extras.save(folder)
    _write_config(model, folder, main_dtype(layout.tensors), ids, max_length)
    extras.copy_missing(folder, ids)


def _write_config(
    model: nn.Module,
    folder: Path,
    dtype: torch.dtype | None,
    ids: Mapping[str, Any],
    max_length: int | None,
) -> None:
    if isinstance(model, OwnModel):
        description = description_of(model)
        config = description.config
        if config.max_position_embeddings is None:
            config = replace(config, max_position_embeddings=max_length)
        write_own_config(folder, description._replace(config=config), dtype, ids)
        return

    theirs = config_of(model)
    if theirs is None:
        return

    theirs = copy.deepcopy(theirs)
    theirs.dtype = dtype
    theirs.architectures = [_original_class(model).__name__]
    theirs.save_pretrained(folder)

    generation = getattr(model, "generation_config", None)
    if callable(getattr(generation, "save_pretrained", None)):
        generation.save_pretrained(folder)  # type: ignore[union-attr]


def config_of(model: nn.Module) -> Any:
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
