"""`--load-dcp`: loads weights and moments that another program saved with
`torch.distributed.checkpoint`, by a table (`dcp_key_map.py`).

    load_dcp("outputs/checkpoint/step-1000", "examples/torchtitan_llama3.yaml", config, state)

`DcpView` presents such a directory under our keys, so it is compared with the model and read like
our checkpoints. A rank reads only the chunks of its rows, one at a time. Chunks are read whole,
since a checksum covers the whole chunk. No code in the files is executed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.agreement import on_all_ranks
from megatron.core.dist_checkpointing.dcp.torch_dcp import TorchDcpCheckpoint
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.index import SavedAs
from megatron.core.dist_checkpointing.formats import read_piece
from megatron.core.dist_checkpointing.layout.saved import SavedTensor
from megatron.core.dist_checkpointing.load.reader import Wanted, check_contents, load_entries
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.dist_checkpointing.state.param_groups import PARAM_GROUPS
from megatron.core.dist_checkpointing.store import open_store
from megatron.core.optimizer.state_loading import check_step
from megatron.core.optimizer.state_tensors import STEP
from megatron.core.transformer.config import TransformerConfig
from megatron.training.checkpoint.dcp_key_map import Heads, KeyMap
from megatron.training.checkpoint.dcp_sources import (
    WEIGHTS,
    HeadOrder,
    RowSource,
    Sources,
    find_sources,
)
from megatron.training.checkpoint.run_state import RunState, split_path

logger = logging.getLogger(__name__)

# Our weights with a row per token.
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


class DcpView:
    """A directory that another program wrote with PyTorch DCP, under our keys. Thread-safe.

    Attributes:
        path: the directory and the table, for messages.
        sources: the sources of our tensors.
        tensors: our tensors, without chunks.
        plain, train_state: empty.
    """

    def __init__(self, checkpoint: TorchDcpCheckpoint, sources: Sources, path: str) -> None:
        self.path = path
        self.sources = sources
        self.plain: Collection[str] = ()
        self.train_state: dict[str, Any] = {}
        self._checkpoint = checkpoint
        self._lock = threading.Lock()  # the checkpoint caches the last chunk
        self.convert({})

    @classmethod
    def open(cls, folder: str, key_map: KeyMap) -> DcpView:
        """Opens a directory in a file system or a store of fsspec.

        Raises:
            CheckpointError: if it cannot be read, or as `find_sources`.
        """
        root, name = split_path(folder)
        checkpoint = TorchDcpCheckpoint.open(open_store(root), name)
        path = f"{checkpoint.path} (read by {key_map.path})"
        return cls(checkpoint, find_sources(checkpoint.tensors, key_map, path), path)

    def convert(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Sets the dtypes in which floating-point tensors and counters are read, by our key. The
        default is fp32.
        """
        self.tensors = {
            key: SavedTensor(key, _dtype(source, dtypes.get(key)), source.shape, [])
            for key, source in self.sources.ours.items()
        }
        # Under names that no model has, so that the comparison reports them.
        self.tensors |= {f"their {theirs.key}": theirs for theirs in self.sources.unknown}

    def doubled(self, own: Collection[str]) -> dict[str, str]:
        """Returns our keys of weights that are stored twice, each with the key of the first. The
        keys `own` of the model, which may tie them, are left out.
        """
        ours, tied = self.sources.ours, self.sources.tied
        return {key: first for key, first in tied.items() if first in ours and key not in own}

    def are_equal(self, key: str, other: str) -> bool:
        """Compares the values of two of our tensors, chunk by chunk."""
        one, two = (self.sources.ours[each] for each in (key, other))
        if one.shape != two.shape:
            return False
        for chunk in one.theirs.chunks:
            parts = (
                read_piece(self._checkpoint, each.theirs.key, chunk.box) for each in (one, two)
            )
            if not torch.equal(*parts):
                return False
        return True

    def leave_out(self, key: str) -> None:
        """Removes one of our tensors."""
        del self.sources.ours[key], self.tensors[key]

    def read(self, key: str, offsets: Sequence[int], out: torch.Tensor) -> int:
        """Reads like `PublishedCheckpoint.read`, but by whole chunks."""
        source = self.sources.ours[key]
        with self._lock:
            if not source.shape:
                sizes = source.theirs.shape
                return self._checkpoint.read(
                    source.rows.name, (0,) * len(sizes), out.detach().view(sizes)
                )
            if source.heads is not None:
                return self._read_heads(source, source.heads, offsets, out.detach())

            num_read, first = 0, offsets[0]
            for run in source.rows.ranges(first, first + out.shape[0]):
                part = out.detach()[run.own_start - first : run.own_stop - first]
                num_read += self._read_run(source, run.start, offsets[1:], part)
            return num_read

    def _read_run(
        self, source: RowSource, row: int, others: Sequence[int], out: torch.Tensor
    ) -> int:
        """Reads consecutive rows from `row` on, at the offsets `others` of the other dims."""
        rows = source.rows
        if rows.matrix_rows is None:
            return self._checkpoint.read(rows.name, (row, *others), out)
        place = (*divmod(row, rows.matrix_rows), *others)
        return self._checkpoint.read(rows.name, place, out.unsqueeze(0))

    def read_plain(self, key: str) -> NoReturn:
        """Raises CheckpointError: plain data of other programs is not loaded."""
        raise CheckpointError(f"Expected no plain data of {self.path} to be read, got {key!r}.")

    def check_step(self, key: str) -> None:
        """Raises CheckpointError unless a counter is a number of steps."""
        value = torch.empty((), dtype=torch.float64)
        self.read(key, (), value)
        try:
            check_step(value.item(), key)
        except ValueError as error:
            raise CheckpointError(f"{error} The checkpoint is {self.path}.") from None

    def _read_heads(
        self, source: RowSource, heads: HeadOrder, offsets: Sequence[int], out: torch.Tensor
    ) -> int:
        """Reads rows head by head, since their order differs."""
        order, size = heads.theirs(), heads.num_rows
        num_read, first, stop = 0, offsets[0], offsets[0] + out.shape[0]
        for begin in range(first - first % size, stop, size):
            # Groups never divide heads.
            (run,) = source.rows.ranges(begin, begin + size)
            head = torch.empty((size, *out.shape[1:]), dtype=source.theirs.dtype)
            num_read += self._read_run(source, run.start, offsets[1:], head)

            own = slice(max(first, begin), min(stop, begin + size))
            rows = head[order[own.start - begin : own.stop - begin]]
            out[own.start - first : own.stop - first].copy_(rows)
        return num_read


def load_dcp(folder: str, table: str, config: TransformerConfig, state: RunState) -> None:
    """Loads weights and, if present, moments and their counters into `state`, in place. Called by
    all ranks together, on any number of ranks.

    Counters of iterations and samples, schedule, options and random states do not change.

    Args:
        folder: a directory written by `torch.distributed.checkpoint.save`.
        table: the file of a `KeyMap`.
        config: the model's config.

    Raises:
        ConfigError: for an invalid table.
        CheckpointError: one error before anything is changed, for missing and unexpected tensors,
            other shapes and invalid counters. A damaged chunk is only found as it is read, after
            some of `state` may have been overwritten.
    """
    view = on_all_ranks(lambda: DcpView.open(folder, KeyMap.read(table, Heads.of(config))))
    contents = collect(
        state.model,
        state.optimizer.optimizer,
        with_states=view.sources.has_moments,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )

    wanted = on_all_ranks(lambda: _check(view, contents))
    on_all_ranks(lambda: load_entries(view, contents, wanted))
    what = "weights and moments" if view.sources.has_moments else "weights, without moments,"
    logger.info("loaded %s from %s", what, view.path)


def _check(view: DcpView, contents: Contents) -> Wanted:
    """Returns the entries to load. CheckpointError for a checkpoint of another model."""
    own = {entry.key: entry.saved_as for entry in contents.entries}
    view.convert({key: saved_as.dtype for key, saved_as in own.items()})
    for key, first in view.doubled(own).items():
        # No collective is needed, since one rank compares.
        if dist.get_rank() == 0 and not view.are_equal(key, first):
            raise CheckpointError(
                f"Expected {key} to equal {first} in {view.path}, since this model ties the two, "
                "got other values. --untie-embeddings-and-output-weights keeps both."
            )
        view.leave_out(key)

    try:
        wanted = check_contents(view, contents, [PARAM_GROUPS])
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_on_vocabulary(view, own)}") from None

    for entry in wanted.entries:
        if entry.key.endswith(f".{STEP}") and not entry.saved_as.shape:
            view.check_step(entry.key)
    return wanted


def _on_vocabulary(view: DcpView, own: Mapping[str, SavedAs]) -> str:
    """Returns a sentence about the number of tokens, if it differs."""
    for name in _VOCABULARY:
        source, saved_as = (found.get(f"{WEIGHTS}{name}") for found in (view.sources.ours, own))
        if source is not None and saved_as is not None and source.shape[0] != saved_as.shape[0]:
            return (
                f" The checkpoint's vocabulary has {source.shape[0]} rows and this model's "
                f"{saved_as.shape[0]}, which --vocab-size and --make-vocab-size-divisible-by "
                "decide."
            )
    return ""


def _dtype(source: RowSource, asked: torch.dtype | None) -> torch.dtype:
    """Returns the dtype in which a tensor is read. Counters may be integers."""
    theirs = source.theirs.dtype
    converts = theirs.is_floating_point or not source.shape
    return asked or torch.float32 if converts else theirs
