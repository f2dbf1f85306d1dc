"""`--load-dcp`: weights, and moments where they are there, from what another program saved with
`torch.distributed.checkpoint`, by a table (`dcp_key_map.py`).

    load_dcp("outputs/checkpoint/step-1000", "examples/torchtitan_llama3.yaml", heads, state)

`DcpView` shows such a folder under our keys, so that it is compared with the model and read into it
as any checkpoint is. A rank reads only the chunks that its own rows lie in, one at a time, each of
them whole, since its checksum covers all of it. Nothing of the folder is executed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.agreement import on_all_ranks
from megatron.core.dist_checkpointing.dcp.dcp_checkpoint import TorchDcpCheckpoint
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.formats import read_piece
from megatron.core.dist_checkpointing.layout.file_layout import SavedAs
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

# Our weights with a row for each token.
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


class DcpView:
    """A folder that another program wrote with PyTorch DCP, under our keys. Any number of threads
    may read it.

    Attributes:
        path: the folder and the table, for messages.
        sources: where our tensors lie.
        tensors: ours, without chunks.
        plain, train_state: empty.
    """

    def __init__(self, checkpoint: TorchDcpCheckpoint, sources: Sources, path: str) -> None:
        """For `open`."""
        self.path = path
        self.sources = sources
        self.plain: Collection[str] = ()
        self.train_state: dict[str, Any] = {}
        self._checkpoint = checkpoint
        self._lock = threading.Lock()  # of the checkpoint, which keeps the chunk it read last
        self.convert({})

    @classmethod
    def open(cls, folder: str, key_map: KeyMap) -> DcpView:
        """Opens a folder, in a file system or a store that fsspec knows.

        Raises:
            CheckpointError: if it cannot be read, or as `find_sources`.
        """
        root, name = split_path(folder)
        checkpoint = TorchDcpCheckpoint.open(open_store(root), name)
        path = f"{checkpoint.path} (read by {key_map.path})"
        return cls(checkpoint, find_sources(checkpoint.tensors, key_map, path), path)

    def convert(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Has floating-point tensors and counters read in these dtypes, by our key; the others in
        fp32.
        """
        self.tensors = {
            key: SavedTensor(key, _dtype(source, dtypes.get(key)), source.shape, [])
            for key, source in self.sources.ours.items()
        }
        # Under names that no model has: the comparison will say that nothing here takes them.
        self.tensors |= {f"their {theirs.key}": theirs for theirs in self.sources.unknown}

    def doubled(self, own: Collection[str]) -> dict[str, str]:
        """Our keys of weights that the folder holds a second time, and that are not among the keys
        `own` of a model that ties them; each with the key of the first.
        """
        ours, tied = self.sources.ours, self.sources.tied
        return {key: first for key, first in tied.items() if first in ours and key not in own}

    def are_equal(self, key: str, other: str) -> bool:
        """Whether two of our tensors have the same values, which are compared chunk by chunk."""
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
        """Forgets one of our tensors."""
        del self.sources.ours[key], self.tensors[key]

    def read(self, key: str, offsets: Sequence[int], out: torch.Tensor) -> int:
        """As `PublishedCheckpoint.read`, but by whole chunks."""
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
        """Rows that are consecutive there, from `row` on; `others`: where the other dims begin."""
        rows = source.rows
        if rows.matrix_rows is None:
            return self._checkpoint.read(rows.name, (row, *others), out)
        place = (*divmod(row, rows.matrix_rows), *others)
        return self._checkpoint.read(rows.name, place, out.unsqueeze(0))

    def read_plain(self, key: str) -> NoReturn:
        """CheckpointError: others' plain data means nothing here."""
        raise CheckpointError(f"Expected no plain data of {self.path} to be read, got {key!r}.")

    def check_step(self, key: str) -> None:
        """CheckpointError unless a counter counts steps."""
        value = torch.empty((), dtype=torch.float64)
        self.read(key, (), value)
        try:
            check_step(value.item(), key)
        except ValueError as error:
            raise CheckpointError(f"{error} The checkpoint is {self.path}.") from None

    def _read_heads(
        self, source: RowSource, heads: HeadOrder, offsets: Sequence[int], out: torch.Tensor
    ) -> int:
        """Rows that are read head by head, since their order is another."""
        order, size = heads.theirs(), heads.num_rows
        num_read, first, stop = 0, offsets[0], offsets[0] + out.shape[0]
        for begin in range(first - first % size, stop, size):
            # Heads are never cut by groups.
            (run,) = source.rows.ranges(begin, begin + size)
            head = torch.empty((size, *out.shape[1:]), dtype=source.theirs.dtype)
            num_read += self._read_run(source, run.start, offsets[1:], head)

            own = slice(max(first, begin), min(stop, begin + size))
            rows = head[order[own.start - begin : own.stop - begin]]
            out[own.start - first : own.stop - first].copy_(rows)
        return num_read


def load_dcp(folder: str, table: str, config: TransformerConfig, state: RunState) -> None:
    """Loads weights and, if the folder has any, moments and their counters into `state`, in place.
    Called by all ranks together, which may be any number.

    Counters of iterations and samples, schedule, options and random states stay as they are.

    Args:
        folder: as `torch.distributed.checkpoint.save` wrote it.
        table: the file of a `KeyMap`.
        config: of the model.

    Raises:
        ConfigError: for a table that cannot be used.
        CheckpointError: before anything is changed, in one error: tensors that the model lacks or
            that the folder lacks, others' shapes, counters that count nothing. Damage to a chunk is
            found as it is read: then some of `state` has been overwritten.
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
    """What to load. CheckpointError if they, or what the folder has besides, do not fit."""
    own = {entry.key: entry.saved_as for entry in contents.entries}
    view.convert({key: saved_as.dtype for key, saved_as in own.items()})
    for key, first in view.doubled(own).items():
        # Ranks compare them one by one, so no rank need wait for another.
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
    """A sentence on the number of tokens, if that differs."""
    for name in _VOCABULARY:
        source, saved_as = (found.get(f"{WEIGHTS}{name}") for found in (view.sources.ours, own))
        if source is not None and saved_as is not None and source.shape[0] != saved_as.shape[0]:
            return (
                f" The folder's vocabulary has {source.shape[0]} rows and this model's "
                f"{saved_as.shape[0]}, which --vocab-size and --make-vocab-size-divisible-by "
                "decide."
            )
    return ""


def _dtype(source: RowSource, asked: torch.dtype | None) -> torch.dtype:
    """In which a tensor is read. A counter may be an integer of theirs."""
    theirs = source.theirs.dtype
    converts = theirs.is_floating_point or not source.shape
    return asked or torch.float32 if converts else theirs
