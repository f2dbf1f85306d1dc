"""`--ckpt-format torch_dcp`: checkpoints in PyTorch DCP's format, for other engines.

A checkpoint consists of PyTorch DCP's files and `train_state.json`, which has the rest of the state
as plain data. It is written as a draft and published by rename, after DCP's collectives report that
all ranks have written.

Other programs choose their own keys. So `load_model_weights` finds weights by the names of the
model's parameters, whatever prefix they have in the directory:

    dcp.save({"model": model.state_dict()})          model.layers.0.weight
    dcp.save(model.state_dict())                     layers.0.weight
    dcp.save({"app": AppState(model, optimizer)})    app.model.layers.0.weight, app.optim.state....
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from megatron.core.dist_checkpointing.agreement import on_all_ranks, on_first_rank
from megatron.core.dist_checkpointing.dcp.dcp_checkpoint import TorchDcpCheckpoint
from megatron.core.dist_checkpointing.errors import CheckpointError, expect_same_model, few
from megatron.core.dist_checkpointing.format.blob_reading import read_plain
from megatron.core.dist_checkpointing.format.manifest import METADATA_FILE, TRAIN_STATE_FILE
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.formats import ReadableCheckpoint, read_piece
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.saved import FrozenChanges, differences, is_rounded
from megatron.core.dist_checkpointing.load.checkpoint import train_state_bytes
from megatron.core.dist_checkpointing.state.dcp_state import DCPState
from megatron.core.dist_checkpointing.state.param_groups import check_param_groups
from megatron.core.dist_checkpointing.store import (
    LocalStore,
    remove_or_warn,
    track,
)
from megatron.core.dtensors import local_tensor
from megatron.core.files import remove_empty_folder, sync_stream
from megatron.core.optimizer.state_loading import check_step

# Of the state of one parameter, in checkpoints of `torch_dcp` and of `fsdp_checkpoint`.
_STEP_KEY = re.compile(r"optim(?:izer)?\.state\..+\.step")


def save_checkpoint(
    root: str | Path,
    iteration: int,
    state: dict[str, Any],
    train_state: dict[str, Any] | None,
    *,
    name: str | None = None,
) -> Path:
    """Writes and publishes a checkpoint. Called by all ranks together; returns its directory.

    Args:
        root: the directory of all checkpoints, created if missing.
        iteration: of the checkpoint.
        state: nested dict of tensors (DTensors stay sharded: each rank writes its part) and of
            plain data: numbers, strings, and lists, tuples and dicts of them.
        train_state: plain data, for `train_state.json`; rank 0's is written. None: no such file.
        name: directory of a checkpoint outside of the run's sequence; the tracker file does not
            change. Default: `checkpoint_name(iteration)`.

    Raises:
        CheckpointError: on every rank, if any rank could not write. The draft is deleted then. Once
            the checkpoint is published, a failed sync or an unwritable tracker is a warning.
    """
    draft = _Draft(Path(root), checkpoint_name(iteration) if name is None else name)

    def prepare() -> None:
        # Only saves create a run's directories. The caller may have created this one.
        if name is not None:
            remove_empty_folder(draft.folder)
        draft.prepare(train_state)

    on_first_rank(prepare, f"preparing {draft.path}")
    try:
        with _no_word_about_single_process():
            writer = FileSystemWriter(draft.path, sync_files=True)
            save(state, storage_writer=writer, planner=_SavePlanner())
    except CheckpointException as failure:
        # DCP raises once all ranks have stopped writing.
        on_first_rank(draft.discard, f"discarding {draft.path}")
        got = "; ".join(
            f"rank {rank}: {type(error).__name__}: {error}"
            for rank, (error, _) in failure.failures.items()
        )
        raise CheckpointError(f"Expected {draft.path} to be written, got {got}.") from failure

    tracked = iteration if name is None else None
    on_first_rank(lambda: draft.publish(tracked), f"publishing {draft.folder}")
    return draft.folder


class _Draft:
    """A checkpoint that is being written. All ranks have its paths; only rank 0 calls methods."""

    def __init__(self, root: Path, final: str) -> None:
        self.folder = root / final
        # Without a token: no sweep comes before these saves, so the next save of this checkpoint
        # has to find the draft of a killed run.
        self.path = root / f"{final}.saving"
        self._store = LocalStore(root)
        self._train_state: bytes | None = None

    def prepare(self, train_state: dict[str, Any] | None) -> None:
        """Creates an empty directory."""
        if train_state is not None:
            self._train_state = train_state_bytes(train_state)
        if self.folder.exists():
            raise CheckpointError(
                f"Expected no checkpoint yet at {self.folder}, got a published one."
            )
        if self.path.exists():
            shutil.rmtree(self.path)
        with self._discarded_on_error():
            self._store.make_folder(self.path.name)

    def publish(self, tracked: int | None) -> None:
        """Publishes all ranks' files. `tracked`: the iteration for the tracker file."""
        with self._discarded_on_error():
            # DCP syncs this file while some of its content is still in DCP's buffer.
            with (self.path / METADATA_FILE).open("rb") as stream:
                sync_stream(stream)
            if self._train_state is not None:
                self._store.write(f"{self.path.name}/{TRAIN_STATE_FILE}", self._train_state)
            is_durable = self._store.publish(self.path.name, self.folder.name)

        # The tracker must not name a checkpoint that a crash may still undo.
        if is_durable and tracked is not None:
            track(self._store, tracked)

    def discard(self) -> None:
        """Deletes the files of a failed save, which must not keep a full disk full."""
        remove_or_warn(self._store, self.path.name)

    @contextmanager
    def _discarded_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.discard()
            raise


def check_steps(checkpoint: TorchDcpCheckpoint) -> None:
    """Checks an optimizer's counters of steps, the only states for which some values are invalid.

    An optimizer rejects such values too, but only after weights and states have been loaded.

    Raises:
        CheckpointError: for a counter that is not a number of steps.
    """
    # `load_tensors` rejects tensors of more than one number for their shape.
    counters = [
        key
        for key, tensor in checkpoint.tensors.items()
        if _STEP_KEY.fullmatch(key) is not None and Box.whole(tensor.shape).numel == 1
    ]
    for key in checkpoint.in_order(counters):
        counter = torch.empty(checkpoint.tensors[key].shape, dtype=checkpoint.tensors[key].dtype)
        checkpoint.read(key, (0,) * counter.dim(), counter)
        try:
            check_step(counter.item(), key)
        except ValueError as error:
            raise CheckpointError(f"{error} The checkpoint is {checkpoint.path}.") from None


def load_tensors(
    checkpoint: TorchDcpCheckpoint,
    state: dict[str, Any],
    ignored_prefixes: tuple[str, ...],
    frozen: Collection[str] = (),
) -> FrozenChanges:
    """Reads a published checkpoint into the tensors of `state`. Called by all ranks together.

    Args:
        state: a state dict like the one saved; sharding may differ. Values are widened to the
            dtype of the tensor here; values of frozen weights are rounded to it.
        ignored_prefixes: prefixes of keys that may stay unread.
        frozen: keys of the weights that are frozen here.

    Returns:
        How the set of frozen parameters differs. States that start fresh have not been changed.

    Raises:
        CheckpointError: before anything is changed if a tensor is missing, extra, or of another
            shape or dtype, or if plain data is missing or more than that; afterwards only if a file
            cannot be read, which `TorchDcpCheckpoint.check` finds out in advance.
    """
    return on_all_ranks(lambda: _load(checkpoint, state, ignored_prefixes, frozen))


def frozen_changes(
    checkpoint: TorchDcpCheckpoint, state: dict[str, Any], frozen: Collection[str] = ()
) -> FrozenChanges:
    """What `load_tensors` returns, before it is called."""
    wanted, saved = flatten_state_dict(state)[0], checkpoint.tensors
    prefix = "model."  # wherever there are states of an optimizer
    names = [key.removeprefix(prefix) for key in wanted if key.startswith(prefix) and key in saved]
    rounded = [
        key
        for key in frozen
        if key in saved and key in wanted and is_rounded(saved[key].dtype, wanted[key].dtype)
    ]
    own = [key for key, value in wanted.items() if isinstance(value, torch.Tensor)]
    return FrozenChanges.of(own, saved.keys(), names)._replace(rounded=rounded)


def _load(
    checkpoint: TorchDcpCheckpoint,
    state: dict[str, Any],
    ignored_prefixes: tuple[str, ...],
    frozen: Collection[str],
) -> FrozenChanges:
    wanted, places = flatten_state_dict(state)
    changes = frozen_changes(checkpoint, state, frozen)
    fresh = changes.fresh_keys
    wanted = {key: value for key, value in wanted.items() if key not in fresh}
    _check_fits(checkpoint, wanted, ignored_prefixes, changes)
    values = {
        key: checkpoint.read_plain(key)
        for key, value in wanted.items()
        if not isinstance(value, torch.Tensor)
    }
    for key in checkpoint.in_order(wanted.keys() - values.keys()):
        for offsets, memory in _local_parts(wanted[key]):
            checkpoint.read(key, offsets, memory)
    for key, value in values.items():
        set_element(state, places[key], value)
    changes.log()
    return changes


def _check_fits(
    checkpoint: TorchDcpCheckpoint,
    wanted: dict[str, Any],
    ignored_prefixes: tuple[str, ...],
    changes: FrozenChanges,
) -> None:
    """Compares the wanted values with the checkpoint, without changes."""
    tensors = {key: value for key, value in wanted.items() if isinstance(value, torch.Tensor)}
    plain, saved = wanted.keys() - tensors.keys(), checkpoint.tensors
    ignored = changes.left_out_keys
    extra = [
        key
        for key in saved
        if key not in wanted and key not in ignored and not key.startswith(ignored_prefixes)
    ]
    missing = [key for key in tensors if key not in saved]
    missing += sorted(plain - saved.keys() - set(checkpoint.plain))

    problems = [
        f"{key} is a tensor where plain data is wanted" for key in sorted(plain & saved.keys())
    ]
    for key, value in tensors.items():
        if key in saved:
            may_round = key in changes.rounded
            problems += differences(
                saved[key], tuple(value.shape), value.dtype, may_round=may_round
            )
    expect_same_model(checkpoint.path, problems, missing=missing, extra=extra)


def _local_parts(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """This rank's memory of a tensor, with its offsets in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return [((0,) * tensor.dim(), tensor.detach())]
    # Of PyTorch, or of uneven shards, which replace the method. At most one chunk has elements.
    chunks = [chunk for chunk in tensor.__create_chunk_list__() if 0 not in chunk.sizes]
    return [(tuple(chunk.offsets), local_tensor(tensor).detach()) for chunk in chunks]


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner, which also rejects plain data that a load would reject."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        written = super().transform_object(write_item, object)
        # Reading the bytes back is the surest test, and plain data is small.
        if write_item.type == WriteItemType.BYTE_IO:
            content = torch.frombuffer(bytearray(written.getbuffer()), dtype=torch.uint8)
            read_plain(content, repr(write_item.index.fqn))
        return written


@contextmanager
def _no_word_about_single_process() -> Iterator[None]:
    # Without a process group DCP works alone, as it should here, and warns of that every time.
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        yield


MODEL_PREFIX = "model."  # the usual one, and that of our checkpoints

# Keys that stay unread if weights have no prefix. With a prefix, all other keys do.
_OTHERS = ("optim.", "optimizer.", "rng.")
_OPTION_KEY = re.compile(r"optim(?:izer)?\.param_groups\.(\d{1,9})\.(.+)")


def load_model_weights(checkpoint: TorchDcpCheckpoint, model: nn.Module) -> None:
    """Loads a model's weights and buffers in place from a directory that DCP wrote.

    Args:
        model: sharded or plain; every rank of its process group calls this.

    Raises:
        CheckpointError: before anything is changed, if weights are missing, if the model does not
            have all weights under the prefix, or if shapes or dtypes differ.
    """
    app = DCPState(model)
    own = app.state_dict()["model"]
    prefix = _prefix(checkpoint, own)
    others: tuple[str, ...] = _OTHERS
    if prefix:
        others = tuple(key for key in checkpoint.keys if not key.startswith(prefix))

    # The tensors are the model's own memory. Plain data, of extra states, comes back in the dict.
    wanted = {f"{prefix}{name}": value for name, value in own.items()}
    load_tensors(checkpoint, wanted, others, [f"{prefix}{name}" for name in app.frozen])
    app.load_state_dict({"model": {name: wanted[f"{prefix}{name}"] for name in own}})


def weight_keys(checkpoint: TorchDcpCheckpoint, model: nn.Module) -> set[str]:
    """The keys that `load_model_weights` would read. Raises the same errors for missing weights."""
    own = DCPState(model).state_dict()["model"]
    return {f"{_prefix(checkpoint, own)}{name}" for name in own}


def _prefix(checkpoint: TorchDcpCheckpoint, own: Collection[str]) -> str:
    return weights_prefix(own, checkpoint.keys, checkpoint.path)


def weights_prefix(names: Collection[str], keys: Sequence[str], path: str) -> str:
    """The prefix of a model's weights in the keys: "model.", "app.model.", "".

    If no prefix has all names, it is the one with most of them, so the missing ones can be named.
    Of several with equally many, it is `model.`.

    Args:
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: if no prefix has any of the names, or if several have equally many and none
            of them is `model.`.
    """
    known = set(names)
    # A key counts for every prefix that leaves a name of the model.
    found: Counter[str] = Counter()
    for key in keys:
        starts = [0, *(match.end() for match in re.finditer(r"\.", key))]
        found.update(key[:start] for start in starts if key[start:] in known)
    if not found:
        raise CheckpointError(
            f"Expected the weights of this model in {path}, as {MODEL_PREFIX}<name> or under any "
            f"other prefix, got {few(list(keys)) or 'nothing'}, where the model has "
            f"{few(list(names))}."
        )

    most = max(found.values())
    best = [prefix for prefix, number in found.items() if number == most]
    if MODEL_PREFIX in best:
        return MODEL_PREFIX
    if len(best) > 1:
        raise CheckpointError(
            f"Expected the weights of this model under one prefix in {path}, got {most} of its "
            f"{len(known)} names under each of {few([repr(prefix) for prefix in sorted(best)])}."
        )
    return best[0]


def dcp_param_groups(checkpoint: ReadableCheckpoint) -> list[dict[str, Any]]:
    """The parameter groups in a checkpoint that PyTorch DCP wrote:
    `optim.param_groups.<number>.<option>`, or `optimizer.param_groups...`.

    Raises:
        CheckpointError: for missing or wrong parameter groups.
    """
    groups: dict[int, dict[str, Any]] = {}
    for key in [*checkpoint.plain, *checkpoint.tensors]:
        match = _OPTION_KEY.fullmatch(key)
        if match is None:
            continue
        group, tensor = groups.setdefault(int(match[1]), {}), checkpoint.tensors.get(key)
        if tensor is None:
            group[match[2]] = checkpoint.read_plain(key)
        elif (whole := Box.whole(tensor.shape)).numel == 1:
            # A learning rate that an optimizer keeps on the device, for example.
            group[match[2]] = read_piece(checkpoint, key, whole).item()
    if not groups:
        raise CheckpointError(f"Expected parameter groups in {checkpoint.path}, got none.")
    return check_param_groups([groups[number] for number in sorted(groups)], checkpoint.path)
