"""`--ckpt-format torch_dcp`: checkpoints in PyTorch DCP's format, for other engines.

A checkpoint consists of PyTorch DCP's files and `train_state.json`, which has the rest of the state
as plain data. It is written as a draft and published by rename, after DCP's collectives report that
all ranks have written.

`TorchDcpCheckpoint` reads such checkpoints without executing code: DCP's own reader unpickles
whatever is not a tensor, code included. Here every blob is compared with its `.metadata` before
memory is taken for it, read once, and checked in that memory.

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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
from megatron.core.dist_checkpointing.errors import (
    CheckpointDamagedError,
    CheckpointError,
    expect_same_model,
    few,
)
from megatron.core.dist_checkpointing.format.blob import MAX_FRAME_BYTES
from megatron.core.dist_checkpointing.format.blob_reading import read_archive, read_plain
from megatron.core.dist_checkpointing.format.manifest import METADATA_FILE, TRAIN_STATE_FILE
from megatron.core.dist_checkpointing.format.metadata import Blob, DcpIndex, parse_metadata
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.layout.boxes import Box, BoxIndex
from megatron.core.dist_checkpointing.layout.saved import (
    FrozenChanges,
    SavedChunk,
    SavedTensor,
    check_coverage,
    differences,
    is_rounded,
)
from megatron.core.dist_checkpointing.load.checkpoint import (
    read_train_state,
    system_errors,
    train_state_bytes,
)
from megatron.core.dist_checkpointing.state.dcp_state import DCPState
from megatron.core.dist_checkpointing.state.param_groups import check_param_groups
from megatron.core.dist_checkpointing.store import (
    MOST_METADATA_BYTES,
    LocalStore,
    Store,
    path_of,
    remove_or_warn,
    track,
)
from megatron.core.dtensors import local_tensor
from megatron.core.files import remove_empty_folder, sync_stream
from megatron.core.optimizer.state_loading import check_step


class TorchDcpCheckpoint:
    """A checkpoint as PyTorch DCP wrote it, read chunk by chunk. For one thread. Errors name the
    file, and the key where there is one.

    Attributes:
        path, tensors, plain: as in `ReadableCheckpoint`. A chunk's offset is that of its blob.
    """

    def __init__(
        self, store: Store, name: str, index: DcpIndex, *, checks_crc: bool = True
    ) -> None:
        """For `open`."""
        self.path = path_of(store, name)
        self.tensors: Mapping[str, SavedTensor] = index.tensors
        self.plain: Collection[str] = index.plain.keys()
        self._store = store
        self._name = name
        self._index = index
        self._checks_crc = checks_crc
        # A blob's checksum covers all of it, so chunks are read whole. Tensors are read piece by
        # piece, in order: the tensor and the chunk that were read last are mostly needed again.
        self._boxes = ("", BoxIndex([]))
        self._loaded: tuple[str, SavedChunk, torch.Tensor] | None = None

    @classmethod
    def open(cls, store: Store, name: str, *, checks_crc: bool = True) -> TorchDcpCheckpoint:
        """Opens the checkpoint in the directory `name`, and compares the sizes in `.metadata` with
        the files, before tensors are allocated.

        Args:
            checks_crc: whether to compare blobs with the CRC-32 of `torch.save` as they are read.

        Raises:
            CheckpointDamagedError: if its metadata cannot be read, or does not cover all tensors,
                for a file that is missing or too short, and for a blob that is too short or too
                long for its tensor.
        """
        source = path_of(store, f"{name}/{METADATA_FILE}")
        with system_errors(source):
            content = store.read(f"{name}/{METADATA_FILE}", MOST_METADATA_BYTES)
        index = parse_metadata(content, source)
        check_coverage(index.tensors.values(), source)
        found = cls(store, name, index, checks_crc=checks_crc)
        found._check_sizes()
        return found

    @property
    def train_state(self) -> dict[str, Any]:
        """As in `ReadableCheckpoint`; may be empty."""
        has_state = self._store.exists(f"{self._name}/{TRAIN_STATE_FILE}")
        return read_train_state(self._store, self._name) if has_state else {}

    @property
    def keys(self) -> list[str]:
        """Of tensors and of plain data."""
        return [*self.tensors, *self.plain]

    def in_order(self, keys: Iterable[str]) -> list[str]:
        """Keys of tensors in the order of their first chunks in the files."""
        return sorted(keys, key=lambda key: [chunk[2:] for chunk in self.tensors[key].chunks[:1]])

    def read(self, key: str, offsets: Sequence[int], out: torch.Tensor) -> int:
        """As `PublishedCheckpoint.read`, but by whole chunks, of which the last one is kept.

        Raises:
            CheckpointDamagedError: for bytes of another tensor.
            CheckpointError: if they name anything else, or were transformed by DCP's extensions.
        """
        chunks = self.tensors[key].chunks
        if self._boxes[0] != key:
            self._boxes = (key, BoxIndex([chunk.box for chunk in chunks]))

        index, box, num_read = self._boxes[1], Box(tuple(offsets), tuple(out.shape)), 0
        for number, overlap in index.overlaps(box):
            chunk = chunks[number]
            if self._loaded is None or self._loaded[:2] != (key, chunk):
                self._loaded = None  # its memory first
                self._loaded = (key, chunk, self._chunk(key, chunk))
                num_read += self._loaded[2].nbytes
            part = self._loaded[2][overlap.within(chunk.box.offsets).slices()]
            out[overlap.within(box.offsets).slices()].copy_(part)
        return num_read

    def read_plain(self, key: str) -> object:
        """The plain data of a key. Raises as `read`."""
        memory, source = self._read(key, self._index.plain[key])
        return read_plain(memory, source, checks_crc=self._checks_crc)

    def check(
        self, keys: Collection[str] | None = None, *, rank: int = 0, world_size: int = 1
    ) -> None:
        """Reads blobs, and compares each with `.metadata` and its CRC-32. Raises as `read`.

        Args:
            keys: whose; None: all.
            rank, world_size: ranks divide the blobs among them.
        """
        blobs = {
            (key, chunk): self._index.blobs[key, chunk.box.offsets]
            for key, tensor in self.tensors.items()
            for chunk in tensor.chunks
        } | {(key, None): blob for key, blob in self._index.plain.items()}
        wanted = [each for each in blobs if keys is None or each[0] in keys]
        for key, chunk in sorted(wanted, key=lambda each: blobs[each][:2])[rank::world_size]:
            if chunk is not None:
                self._chunk(key, chunk)
            else:
                read_archive(*self._read(key, blobs[key, None]), checks_crc=self._checks_crc)

    def _chunk(self, key: str, chunk: SavedChunk) -> torch.Tensor:
        """A chunk of a tensor, in host memory."""
        memory, source = self._read(key, self._index.blobs[key, chunk.box.offsets])
        found = read_archive(memory, source, checks_crc=self._checks_crc)
        wanted = (self.tensors[key].dtype, chunk.box.sizes)
        if isinstance(found, torch.Tensor) and (found.dtype, tuple(found.shape)) == wanted:
            return found

        got = f"a {type(found).__name__}"
        if isinstance(found, torch.Tensor):
            got = f"{found.dtype} {tuple(found.shape)}"
        raise CheckpointDamagedError(f"Expected {wanted[0]} {wanted[1]} for {source}, got {got}.")

    def _read(self, key: str, blob: Blob) -> tuple[torch.Tensor, str]:
        """All bytes of a blob, read once, and its name for messages."""
        source = f"{key!r} in {self.path}/{blob.file}"
        # Undoing a transform would run an extension of DCP that the file chooses.
        if blob.transforms:
            raise CheckpointError(
                f"Expected {source} as torch.save writes it, got it transformed by "
                f"{', '.join(blob.transforms)}."
            )
        # Again, for files that have changed since: the length comes before the memory.
        self._check_reaches(blob.file, blob.offset + blob.nbytes)
        memory = torch.empty(blob.nbytes, dtype=torch.uint8)
        with system_errors(f"{self.path}/{blob.file}"):
            path = f"{self._name}/{blob.file}"
            self._store.read_into(path, blob.offset, [memory.numpy().data])
        return memory, source

    def _check_sizes(self) -> None:
        for key, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                least, blob = tensor.chunk_nbytes(chunk), self._index.blobs[key, chunk.box.offsets]
                most = least + MAX_FRAME_BYTES
                # The length of a transformed blob does not depend on the tensor alone.
                if not least <= blob.nbytes <= most and not blob.transforms:
                    raise CheckpointDamagedError(
                        f"Expected {least} to {most} bytes of {key!r} in {self.path}/{blob.file}, "
                        f"got {blob.nbytes} bytes."
                    )

        ends: dict[str, int] = {}
        for blob in (*self._index.plain.values(), *self._index.blobs.values()):
            ends[blob.file] = max(ends.get(blob.file, 0), blob.offset + blob.nbytes)
        # A file's size is asked for once, however many blobs it has: stores may be remote.
        for file, end in ends.items():
            self._check_reaches(file, end)

    def _check_reaches(self, file: str, end: int) -> None:
        """CheckpointDamagedError if a file is missing, or ends before this byte."""
        source = f"{self.path}/{file}"
        with system_errors(source):
            size = self._store.size(f"{self._name}/{file}")
        if size < end:
            raise CheckpointDamagedError(f"Expected {end} bytes or more in {source}, got {size}.")


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
        try:
            check_step(_number(checkpoint, key), key)
        except ValueError as error:
            raise CheckpointError(f"{error} The checkpoint is {checkpoint.path}.") from None


def _number(checkpoint: TorchDcpCheckpoint, key: str) -> float:
    """The value of a tensor of one element."""
    tensor = checkpoint.tensors[key]
    value = torch.empty(tensor.shape, dtype=tensor.dtype)
    checkpoint.read(key, (0,) * value.dim(), value)
    return value.item()


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
    """This rank's memory of a tensor, chunk by chunk, with the offsets in the whole tensor."""
    local = local_tensor(tensor).detach()
    if not isinstance(tensor, DTensor) or not local.dim():
        return [((0,) * tensor.dim(), local)]
    # Of PyTorch, or of uneven shards, which replace the method: several chunks are in the order of
    # their rows.
    chunks = [chunk for chunk in tensor.__create_chunk_list__() if 0 not in chunk.sizes]
    parts = local.split([chunk.sizes[0] for chunk in chunks]) if chunks else ()
    return [(tuple(chunk.offsets), part) for chunk, part in zip(chunks, parts, strict=True)]


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
    prefix = weights_prefix(own, checkpoint.keys, checkpoint.path)
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
    prefix = weights_prefix(own, checkpoint.keys, checkpoint.path)
    return {f"{prefix}{name}" for name in own}


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


def dcp_param_groups(checkpoint: TorchDcpCheckpoint) -> list[dict[str, Any]]:
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
        elif Box.whole(tensor.shape).numel == 1:
            # A learning rate that an optimizer keeps on the device, for example.
            group[match[2]] = _number(checkpoint, key)
    if not groups:
        raise CheckpointError(f"Expected parameter groups in {checkpoint.path}, got none.")
    return check_param_groups([groups[number] for number in sorted(groups)], checkpoint.path)
