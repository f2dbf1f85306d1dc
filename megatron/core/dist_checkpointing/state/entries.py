"""The content of a `fsdp_dtensor` checkpoint: tensors under canonical keys.

    model.<fqn>                      main weights, once; persistent buffers
    optimizer.state.<fqn>.<name>     each with its parameter's global shape
    optimizer.param_groups           plain data, by parameters' names
    rng.<rank>.<name>                each rank's own

Keys and shapes are the same however the model is sharded and however much of it is offloaded. A
fused weight and its states are stored as sections, each under the name of a separate layer next to
the fused one: rows of `attention.linear_qkv.weight` as `attention.query.weight`.

An `Entry` is one tensor under one key, with this rank's part of it: memory of the live state, not a
copy. `TensorBytes` are its values as the bytes of a file, computed piece by piece where they are.

[Note: one stream] On a GPU, the thread that saves has a separate current stream, and the stream
that copies bytes down does not wait for it. So whatever a save computes from a tensor on a device
(the product of a stored moment and its scale, a contiguous copy, another dtype) is issued by the
work that copies it down, on the same lane. Computed earlier, it might be copied before it is
finished: the file would contain whatever the memory contained, and the digests would match that.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch

import megatron.core.optimizer.scaled_states as scaled_states
from megatron.core.dist_checkpointing.format.blob import plain_blob
from megatron.core.dist_checkpointing.format.index import Export, Index, SavedAs, build_index
from megatron.core.dist_checkpointing.format.manifest import BLOCK_BYTES, digests_of
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dtensors import local_tensor
from megatron.core.lanes import Event, Lane
from megatron.core.optimizer.state_tensors import like
from megatron.core.optimizer.state_units import KeepsScales, StateUnit


class Stored(NamedTuple):
    """A state as it is kept. Its values are `tensor`, or the fp32 products of that and `scale`."""

    tensor: torch.Tensor
    scale: torch.Tensor | None = None


class Values:
    """This rank's part of a state, as memory that may be read and written in place."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def stored(self) -> torch.Tensor:
        """The state as it is kept."""
        return self._tensor

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the values, as they are saved."""
        return self._tensor.dtype

    def as_stored(self) -> Stored:
        """The memory from which any stream can compute the values."""
        return Stored(self._tensor)

    def read(self) -> torch.Tensor:
        """The values: the state itself, or computed from it on this thread's current stream."""
        return self._tensor

    def target(self) -> torch.Tensor:
        """The memory to write loaded values to."""
        return self._tensor

    def install(self) -> None:
        """Installs the values that have been written to `target`."""


class ScaledValues(Values):
    """A state in a format with a scale, whose values are saved in fp32."""

    def __init__(self, optimizer: KeepsScales, parameter: torch.Tensor, name: str) -> None:
        super().__init__(local_tensor(optimizer.state[parameter][name]))
        self._place = (optimizer, parameter, name)
        self._loaded: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def as_stored(self) -> Stored:
        # The scale changes with every step, so it is looked up when it is needed.
        optimizer, parameter, name = self._place
        return Stored(self._tensor, optimizer.state_scale(parameter, name))

    def read(self) -> torch.Tensor:
        optimizer, parameter, name = self._place
        return local_tensor(optimizer.get_unscaled_state(parameter, name))

    def target(self) -> torch.Tensor:
        if self._loaded is None:
            self._loaded = self.read()  # a copy, because sections that are not loaded must stay
        return self._loaded

    def install(self) -> None:
        # Scale and values are computed anew from all of the state at once.
        if self._loaded is not None:
            optimizer, parameter, name = self._place
            optimizer.set_scaled_state(parameter, name, like(parameter, self._loaded))
            self._loaded = None


@dataclass(frozen=True)
class Entry:
    """One tensor under one key.

    Attributes:
        saved_as: key, dtype, global shape, and its shards on all ranks.
        offsets: of this rank's part in the global tensor.
        values: this rank's part; of a fused weight, including the other sections.
        first_row, num_rows: the rows of `values` that are this entry's; None for a scalar: all.
        is_own: False for an entry of another rank, which has no values here.
        is_copied: whether a save copies it at its start. Counters and buffers may change at any
            time: an offloaded optimizer counts a step when it is queued.
    """

    saved_as: SavedAs
    offsets: tuple[int, ...]
    values: Values
    first_row: int = 0
    num_rows: int | None = None
    is_own: bool = True
    is_copied: bool = False

    @property
    def key(self) -> str:
        return self.saved_as.key

    def part_of(self, values: torch.Tensor) -> torch.Tensor:
        """The rows of `values.read()` or `values.target()` that are this entry's."""
        return values if self.num_rows is None else values.narrow(0, self.first_row, self.num_rows)

    def box_of(self, box: Box, values: torch.Tensor) -> torch.Tensor:
        """A box of the global tensor as a view of `values`, which must have all of it."""
        part = self.part_of(values)
        return part[box.within(self.offsets).slices()] if box.sizes else part

    def frozen(self) -> Entry:
        """The entry with a copy of its present values."""
        # The copy has only this entry's rows, from its first row on.
        part = Values(self.part_of(self.values.read()).detach().clone())
        return replace(self, values=part, first_row=0)


class EntryGroup(NamedTuple):
    """Entries that may be written while the others are being updated.

    Attributes:
        unit: keeps them unchanged while they are read; None: they do not change.
        entries: in the order in which they are written.
    """

    unit: StateUnit | None
    entries: list[Entry]


@dataclass(frozen=True)
class Contents:
    """Everything in a checkpoint but `train_state.json`, in the order in which it is written.

    Attributes:
        groups: the entries.
        plain: numbers, strings, lists and dicts by key; the same on every rank.
        names: of every parameter its canonical names, one for each section.
        export: the files of another format in which the checkpoint has the weights, too.
    """

    groups: list[EntryGroup]
    plain: dict[str, Any]
    names: dict[torch.Tensor, list[str]]
    export: Export | None = None

    @property
    def entries(self) -> list[Entry]:
        return [entry for group in self.groups for entry in group.entries]

    @cached_property
    def plain_blobs(self) -> dict[str, bytes]:
        """What `torch.save` makes of the plain data, by key."""
        return {key: plain_blob(value) for key, value in self.plain.items()}

    def index(self, save_id: str, rank: int | None = None) -> Index:
        """The index of a checkpoint of this; with `rank`, of its chunks alone."""
        # Rank 0 writes the plain data, which is the same on every rank.
        plain = self.plain_blobs if rank in (None, 0) else {}
        nbytes = {key: len(blob) for key, blob in plain.items()}
        tensors = [entry.saved_as for entry in self.entries]
        return build_index(save_id, tensors, nbytes, rank, self.export)

    def frozen(self) -> Contents:
        """The same with copies of entries that do not wait for their readers."""
        groups = [
            EntryGroup(
                group.unit,
                [entry.frozen() if entry.is_copied else entry for entry in group.entries],
            )
            for group in self.groups
        ]
        # Learning rates, among the options, change with the next step.
        return replace(self, groups=groups, plain=copy.deepcopy(self.plain))


def lies_on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor has to be copied down before the host can read it."""
    return tensor.device.type != "cpu"


class Landing(NamedTuple):
    """Where the bytes of a device arrive.

    Attributes:
        lane: copies them.
        pieces: of host memory that the device reaches directly, of one size, a number of blocks.
            With two of them, one is read while the other is filled.
    """

    lane: Lane
    pieces: tuple[memoryview, ...]


class TensorBytes:
    """The values of one tensor, row by row, for one save.

    Attributes:
        nbytes: of all values.
        is_on_device: whether they come down on a lane.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Does not read the tensor yet.

        Args:
            tensor: on any device, of any strides and dtype. It must not change until it is read.
            scale: of a state that is stored with one; its values are the fp32 products.
            dtype: of the values as they are read; None: their own.
        """
        own = tensor.dtype if scale is None else torch.float32
        self._dtype = dtype or own
        self._is_converted = self._dtype != own
        itemsize = self._dtype.itemsize
        self.nbytes = tensor.numel() * itemsize
        self.is_on_device = lies_on_device(tensor)
        self._tensor = tensor.detach()
        self._scale = scale
        self._itemsize = itemsize
        self._flat: torch.Tensor | None = None

    def in_host_memory(self) -> memoryview | None:
        """The bytes themselves, to be read in place; None if they have to be computed or reordered,
        or are on a device.
        """
        is_computed = self._is_converted or self._scale is not None
        if self.is_on_device or is_computed or not self._tensor.is_contiguous():
            return None
        return self._piece(0, self.nbytes).numpy().data

    def copy_out(
        self, target_of: Callable[[int, int], memoryview], landing: Landing
    ) -> tuple[str, ...]:
        """Copies all bytes, block by block, and hashes each at once, while it is in the cache. When
        this returns, they have been read.

        Args:
            target_of: given the first byte and how many there are at most, where they are to be
                copied: a whole number of blocks, or all the rest.
            landing: where they arrive from a device.

        Returns:
            The digest of each block.
        """
        arrivals = _Arrivals(self, landing) if self.is_on_device else None
        copy = self._copy if arrivals is None else arrivals.copy
        digests: list[str] = []
        begin = 0
        try:
            while begin < self.nbytes:
                target = target_of(begin, min(BLOCK_BYTES, self.nbytes - begin))
                copy(begin, target)
                digests += digests_of(target)
                begin += target.nbytes
        finally:
            if arrivals is not None:
                arrivals.finish()
        return tuple(digests)

    def send_down(self, begin: int, target: memoryview) -> None:
        """Copies bytes of a device. The host does not wait."""
        # The piece may be freed before the copy is done: its memory belongs to the lane's stream,
        # which reuses it in order.
        piece = self._piece(begin, target.nbytes)
        torch.frombuffer(target, dtype=torch.uint8).copy_(piece, non_blocking=True)

    def _copy(self, begin: int, target: memoryview) -> None:
        if self._is_converted:
            # Straight to its place: a piece of memory for the new values would cost as much again.
            values = torch.frombuffer(target, dtype=self._dtype)
            values.copy_(self._values(begin, target.nbytes))
        else:
            _copy_bytes(target, self._piece(begin, target.nbytes).numpy())

    def _piece(self, begin: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], on the tensor's device."""
        return self._values(begin, nbytes).to(self._dtype).view(torch.uint8)

    def _values(self, begin: int, nbytes: int) -> torch.Tensor:
        """The values that will take these bytes, in the dtype that they have."""
        if self._flat is None:
            # `reshape` would keep the strides of a tensor of one element, which may be any.
            self._flat = self._tensor.contiguous().as_strided((self._tensor.numel(),), (1,))
        part = self._flat[begin // self._itemsize : (begin + nbytes) // self._itemsize]
        return part if self._scale is None else scaled_states.read(part, self._scale)


class _Arrivals:
    """The bytes of a tensor on a device: while the host reads a piece, the next one comes down."""

    def __init__(self, source: TensorBytes, landing: Landing) -> None:
        self._source = source
        self._lane, self._pieces = landing
        self._number = -1  # of the piece that has arrived last
        self._on_its_way: deque[Event] = deque()
        self._sent = 0  # bytes

    def copy(self, begin: int, target: memoryview) -> None:
        """Copies bytes of one piece, which has to come next if it is not there yet."""
        number, offset = divmod(begin, self._pieces[0].nbytes)
        if number > self._number:
            # The piece before this one has been read, so its memory takes the next one.
            while len(self._on_its_way) < len(self._pieces) and self._sent < self._source.nbytes:
                self._send()
            self._on_its_way.popleft().synchronize()
            self._number = number
        piece = self._pieces[number % len(self._pieces)]
        _copy_bytes(target, np.frombuffer(piece[offset : offset + target.nbytes], np.uint8))

    def finish(self) -> None:
        """Waits for pieces that are not read after an error."""
        while self._on_its_way:
            self._on_its_way.popleft().synchronize()

    def _send(self) -> None:
        number = self._sent // self._pieces[0].nbytes
        piece = self._pieces[number % len(self._pieces)][: self._source.nbytes - self._sent]
        work = partial(self._source.send_down, self._sent, piece)
        self._on_its_way.append(self._lane.enqueue(work))
        self._sent += piece.nbytes


def _copy_bytes(target: memoryview, source: np.ndarray[Any, Any]) -> None:
    # NumPy copies in this thread, without the GIL. torch would use many threads, and take the cores
    # of the computation during the save.
    np.copyto(np.frombuffer(target, np.uint8), source)
