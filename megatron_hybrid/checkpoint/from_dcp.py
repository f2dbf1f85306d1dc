"""Imports `torch.distributed.checkpoint` checkpoints of other programs, without a model.

Tensors are copied from file to file by the table of `--dcp-key-map`: one tensor and one chunk of
the source are in memory at a time. The first load reports missing tensors, since no model is
available here. Weights, moments and counters are written in fp32, as in a run.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from megatron.core.dist_checkpointing.errors import CheckpointError, few
from megatron.core.dist_checkpointing.format.index import SavedAs
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.layout.holdings import replicated
from megatron.core.dist_checkpointing.state.entries import Entry, Stored, Values
from megatron.core.dist_checkpointing.store import open_store, path_of
from megatron.core.optimizer.state_tensors import STEP
from megatron.training.checkpoint.dcp_import import DcpView
from megatron.training.checkpoint.dcp_key_map import COUNTS, Heads, KeyMap
from megatron.training.checkpoint.dcp_sources import RowSource
from megatron.training.checkpoint.run_info import FORMAT_VERSION, RecoverInfo
from megatron.training.step import StepInfo
from megatron_hybrid.checkpoint.from_file import expect_no_checkpoint, publish_import
from megatron_hybrid.checkpoint.progress import progress_bar


def import_dcp(arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes and publishes ROOT/iter_0000000. Returns a summary as plain data.

    Raises:
        ConfigError: an unusable table.
        CheckpointError: before writing, if ROOT contains checkpoints, PATH is unreadable or has
            tensors that are not in the table; later, if a chunk is damaged. A failed import leaves
            no files.
    """
    store = open_store(arguments.root)
    expect_no_checkpoint(store)  # before chunks are read

    given = {name: getattr(arguments, name) for name in COUNTS}
    heads = Heads({name: count for name, count in given.items() if count is not None})
    view = DcpView.open(arguments.path, KeyMap.read(arguments.dcp_key_map, heads))
    _check(view)

    entries = [_entry(view, key, source) for key, source in view.sources.ours.items()]
    num_bytes = sum(entry.values.stored.nbytes for entry in entries)
    with progress_bar("import", num_bytes) as progress:
        publish_import(store, entries, _train_state(view), progress)
    return {
        "source": view.path,
        "target": path_of(store, checkpoint_name(0)),
        "num_tensors": len(entries),
        "num_bytes": num_bytes,
        "has_moments": view.sources.has_moments,
    }


def _check(view: DcpView) -> None:
    if unknown := [tensor.key for tensor in view.sources.unknown]:
        raise CheckpointError(
            f"Expected only tensors that the table names or ignores in {view.path}, got "
            f"{few(unknown)}."
        )
    if not view.sources.ours:
        raise CheckpointError(f"Expected tensors that the table names in {view.path}, got none.")

    for key, first in view.doubled(()).items():
        if view.are_equal(key, first):
            view.leave_out(key)
    for key, source in view.sources.ours.items():
        if key.endswith(f".{STEP}") and not source.shape:
            view.check_step(key)


def _train_state(view: DcpView) -> dict[str, Any]:
    if view.sources.has_moments:
        # A run before its first iteration, which gets the schedule of the run that loads it.
        return RecoverInfo(StepInfo(), {}).to_plain()
    # Enough for --finetune, and for programs that load a model.
    return {"format_version": FORMAT_VERSION, "progress": {"iteration": 0}}


def _entry(view: DcpView, key: str, source: RowSource) -> Entry:
    shape, values = source.shape, _Rows(view, key, source)
    saved_as = SavedAs(key, values.dtype, shape, replicated(shape, [0]))
    return Entry(saved_as, (0,) * len(shape), values)


class _Rows(Values):
    """A tensor that is read when it is written."""

    def __init__(self, view: DcpView, key: str, source: RowSource) -> None:
        super().__init__(torch.empty(source.shape, dtype=view.tensors[key].dtype, device="meta"))
        self._view = view
        self._key = key

    def as_stored(self) -> Stored:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self._view.read(self._key, (0,) * tensor.dim(), tensor)
        return Stored(tensor)
