"""What autograd saves in layers, kept in host memory between forward and backward.

[Note: activation offload] A layer's activations go down while the next layer computes, and come
back while the layer after it, whose backward comes first, goes backward:

    forward    computation   | layer 0 | layer 1 | layer 2 | layer 3 |
               d2h                     | 0 down  | 1 down  |
    backward   computation   | layer 3 | layer 2 | layer 1 | layer 0 |
               h2d                     | 1 up    | 0 up    |

The last two layers stay, since they would have to come back at once. So the device holds the
activations of two layers, whatever their number: a layer's forward starts when the activations of
the layer two before it have left, and its backward when at most the ones of the layer before are
still coming.

A link that is slower than a layer's forward makes each layer wait. Then fewer layers move: of every
`k`, the first one, which may take the time of `k` layers down and up. The device holds the others.

Memory of the host is one pinned slab, taken and given back as a stack: the last to go down comes up
first. What finds no room there stays on the device.

Copies move whole storages, once for all tensors that share one. What lives anyway stays where it
is: weights, and arguments that all layers share (angles, documents). So do storages of less than
`SMALLEST_NBYTES`, which cost more to move than they take.

[Note: one link] The offloaded optimizer has its own lanes, and each direction of the link is
shared at one time of a step: in the forward activations go down while weights come up, in the
backward activations come up while gradients go down. Where both go in one direction, at the end of
a step and with gradient accumulation, activations go first, for the computation waits for them
sooner; their lanes are urgent. They move at most the bytes of one layer while one layer computes,
so the optimizer's share is the rest of the link then.
"""

from __future__ import annotations

import copy
import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from megatron.core.device import Device
from megatron.core.host_memory import format_bytes
from megatron.core.host_stack import HostPiece, HostStack
from megatron.core.lane_timings import D2H, H2D, LaneTimings, NoTimings, Recorder, TimingRecorder
from megatron.core.lanes import Event, Lane, is_lane_thread
from megatron.core.spans import Span
from megatron.core.timeline import AnyTimeline
from megatron.core.trace_file import ACTIVATIONS

logger = logging.getLogger(__name__)

SMALLEST_NBYTES = 1 << 16  # of a storage that moves
_NUM_STAYING = 2  # layers, the last ones
_NUM_WARM_UP = 1  # steps before the one that is measured
COMPUTE = "compute"
_SPOILED = (
    "Expected that what autograd has saved is not modified in place before backward, got a tensor "
    "that was."
)


class ActivationOffload:
    """Moves what layers save for backward to host memory, and back. The results are the same bits.

        offload = ActivationOffload(device, 32 << 30)
        offload.attach(model.layers, fraction=0.5)

    See [Note: activation offload].
    """

    def __init__(
        self,
        device: Device,
        nbytes: int,
        *,
        smallest_nbytes: int = SMALLEST_NBYTES,
        records_timings: bool = False,
    ) -> None:
        """Allocates host memory.

        Args:
            device: on which the layers compute.
            nbytes: of host memory, at most. On a GPU all of it is pinned at once.
            smallest_nbytes: of storages that move.
            records_timings: whether to record what `timings` returns.

        Raises:
            ValueError: for sizes that are not positive.
            HostMemoryError, PinError: see `HostSlab`.
        """
        if nbytes < 1 or smallest_nbytes < 1:
            raise ValueError(
                f"Expected sizes of at least one byte, got {nbytes} and {smallest_nbytes}."
            )

        self._device = device
        self._smallest_nbytes = smallest_nbytes
        self._stack = HostStack(nbytes, device)
        self._down = device.lane("activations d2h", is_urgent=True)
        self._up = device.lane("activations h2d", is_urgent=True)
        self._timings: Recorder = NoTimings()
        if records_timings:
            self._timings = TimingRecorder(device, has_lanes=True)
        self._step = self._timings.begin()

        # The forward that started last, as long as anything of it lives, and the one before it, if
        # it is moving down.
        self._last: weakref.ref[_Saving] | None = None
        self._leaving: _Saving | None = None
        # Memory of the device that copies still write, although it is not read again.
        self._orphans: deque[tuple[Event, Tensor]] = deque()
        self._has_warned = False
        self._stacks: list[_Stack] = []
        self._spans: dict[str, list[Span]] | None = None  # until "auto" is decided
        self._num_steps = 0
        # Whatever still copies is done before the memory of the host goes. At the end of the
        # process it goes anyway.
        weakref.finalize(self, _close, self._down, self._up, self._stack).atexit = False

    @property
    def nbytes(self) -> int:
        """Of host memory, in use or not."""
        return self._stack.nbytes

    @property
    def peak_nbytes(self) -> int:
        """The most of it that has been in use."""
        return self._stack.peak_nbytes

    @property
    def num_moving(self) -> int:
        """How many of the attached layers' activations move."""
        return sum(stack.num_moving for stack in self._stacks)

    def attach(
        self,
        layers: Iterable[nn.Module],
        *,
        stays_at_end: bool = True,
        fraction: float | Literal["auto"] = 1.0,
    ) -> None:
        """From now on forwards of these modules with gradients save in host memory.

        Args:
            layers: in the order in which they run, on one stream. Tensors among a layer's arguments
                behind the first are taken to be shared by all layers, and stay.
            stays_at_end: whether the last two stay on the device; False if other layers come
                behind them.
            fraction: how many of the others move, from 0 to 1, evenly spread. "auto": all in the
                first steps; once their times are known, as many as move while layers compute, and
                the layers for which the device has no room.

        Raises:
            ValueError: for another fraction, and for a layer that is attached already or comes
                twice; none is attached then.
        """
        if fraction != "auto" and not 0 <= fraction <= 1:
            raise ValueError(f"Expected a fraction from 0 to 1, or 'auto', got {fraction}.")
        layers = list(layers)
        for number, layer in enumerate(layers):
            if isinstance(layer.forward, _OffloadedForward):
                raise ValueError(f"Expected layers that are not attached yet, got layer {number}.")
            if any(layer is other for other in layers[:number]):
                raise ValueError(f"Expected layers that differ, got layer {number} twice.")

        if fraction == "auto":
            self._spans, fraction = {COMPUTE: [], D2H: []}, 1.0
        size = max(0, len(layers) - _NUM_STAYING) if stays_at_end else len(layers)
        stack = _Stack(size, round(fraction * size))
        self._stacks.append(stack)
        for number, layer in enumerate(layers):
            layer.forward = _OffloadedForward(self, layer, stack, number)

    def end_step(self) -> None:
        """A step of training is over: `timings` are means over these."""
        self._step = self._timings.begin()
        self._num_steps += 1
        if self._spans is None:
            return
        seconds = [[span.seconds for span in spans] for spans in self._spans.values()]
        self._spans = {COMPUTE: [], D2H: []}
        is_known = bool(seconds[0]) and not any(None in times for times in seconds)
        if is_known and self._num_steps > _NUM_WARM_UP:
            self._spans = None
            self._adapt(*(sum(filter(None, times)) for times in seconds))

    def _measured(self, what: str) -> AbstractContextManager[Any]:
        """A span of a layer's forward or of copies, while "auto" needs their times."""
        if self._spans is None:
            return nullcontext()
        self._spans[what].append(span := self._device.span())
        return span

    def _adapt(self, compute: float, link: float) -> None:
        """Has as many layers move as the link hides. Both times are of one step's forwards."""
        movable = self.num_moving
        hidden, needed = min(1.0, compute / link) if link else 1.0, 0.0
        if movable and self._device.is_accelerator:
            # The device must have room for what stays.
            room = self._device.spare_memory_bytes() * movable // max(1, self.peak_nbytes)
            needed = 1.0 if self._has_warned else min(1.0, 1.0 - room / movable)
        for stack in self._stacks:
            of_room = math.ceil(needed * stack.size)
            stack.num_moving = max(math.floor(hidden * stack.size), of_room)
        logger.info(
            "activations of %d of %d layers move: in a step's forwards all would take %.1f ms on "
            "the link, and layers compute for %.1f ms",
            self.num_moving,
            movable,
            1e3 * link,
            1e3 * compute,
        )

    def record_to(self, timeline: AnyTimeline) -> None:
        """Shows a timeline the lanes' work. RuntimeError without `records_timings`."""
        self._timings.record_to(timeline, ACTIVATIONS)

    def timings(self) -> LaneTimings | None:
        """Means over the steps since the last call; None without any, or without recording."""
        return self._timings.collect()

    @contextmanager
    def saving(
        self, kept: Callable[[], Iterable[Tensor]], *, stays: bool = False, window: int = 1
    ) -> Iterator[None]:
        """What autograd saves inside, of one layer, goes down while the next one computes.

        Args:
            kept: the tensors, at the moment, that live anyway, and whose storages stay. It is asked
                again and again: FSDP units within the layer have their full weights in turn.
            stays: whether all of it stays.
            window: how many forwards of layers its way down may take.
        """
        saving = self._begin(kept, stays=stays, window=window)
        hooks = torch.autograd.graph.saved_tensors_hooks(saving.pack, _unpack)
        try:
            with hooks, self._measured(COMPUTE):
                yield
        finally:
            saving.end()

    def _begin(self, kept: Callable[[], Iterable[Tensor]], *, stays: bool, window: int) -> _Saving:
        """A layer starts: the one before goes down at the same time, and one whose window is over
        is gone.
        """
        while self._orphans and self._orphans[0][0].is_done():
            self._orphans.popleft()

        if self._leaving is not None and self._leaving.is_due():
            leaving, self._leaving = self._leaving, None
            leaving.leave()
        last = None if self._last is None else self._last()
        if last is not None and last.begin_to_leave():
            self._leaving = last
        # Of the layers in a window, the last one's backward comes first, and brings it up.
        saving = _Saving(self, kept, self._leaving, stays=stays, window=window)
        self._last = weakref.ref(saving)
        return saving

    # For _Saving

    def moves(self, tensor: Tensor) -> bool:
        """Whether a tensor that autograd saves is one that moves."""
        return (
            type(tensor) in (Tensor, nn.Parameter)
            and tensor.layout == torch.strided
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.device == self._device.torch_device
            and tensor.untyped_storage().nbytes() >= self._smallest_nbytes
        )

    def send_down(self, storages: Sequence[_Storage]) -> Event | None:
        """Starts to copy storages to the host, as far as there is room; None without any."""
        moving = []
        for storage in storages:
            storage.piece = self._stack.take(storage.nbytes)
            if storage.piece is None:
                self._warn_once(storage.nbytes)
            else:
                moving.append((storage.piece.memory, storage.memory))
        if not moving:
            return None

        measured = self._measured(D2H)

        def send() -> None:
            with measured:
                for host, own in moving:
                    host.copy_(own, non_blocking=True)

        nbytes = sum(own.nbytes for _, own in moving)
        work = self._step.timed(D2H, send, nbytes, "activations")
        return self._down.enqueue(work, [self._device.event()])

    def bring_up(self, storages: Sequence[_Storage]) -> Event:
        """Starts to copy storages back, into new memory of the device."""
        # Allocated for the stream that computes, not the lane's: its work with that memory
        # until now must be done before the lane writes.
        moving = [
            (
                torch.empty(storage.nbytes, dtype=torch.uint8, device=self._device.torch_device),
                storage.on_host,
            )
            for storage in storages
        ]

        def bring() -> None:
            for own, host in moving:
                own.copy_(host, non_blocking=True)

        nbytes = sum(own.nbytes for own, _ in moving)
        work = self._step.timed(H2D, bring, nbytes, "activations")
        event = self._up.enqueue(work, [self._device.event()])
        for storage, (own, _) in zip(storages, moving, strict=True):
            storage.come_to(own)
        return event

    def wait(self, lane: str, event: Event) -> None:
        """The computation waits for a lane."""
        with self._step.waiting(lane):
            event.wait()

    def adopt(self, event: Event, memory: Tensor) -> None:
        """Keeps memory that is not read until the copy into it is done. Any thread may."""
        self._orphans.append((event, memory))

    def _warn_once(self, nbytes: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "some activations stay on the device: the %s of host memory that they may take "
                "have no room for %s more (--activation-offload-gib)",
                format_bytes(self._stack.nbytes),
                format_bytes(nbytes),
            )


class _Stack:
    """Layers that run one after the other, of which some move.

    Attributes:
        size: how many may move; further ones, at the end, stay.
        num_moving: how many do.
    """

    def __init__(self, size: int, num_moving: int) -> None:
        self.size = size
        self.num_moving = num_moving

    @property
    def window(self) -> int:
        """How many layers compute while one moves."""
        return self.size // max(1, self.num_moving)

    def moves(self, number: int) -> bool:
        """Whether the layer with this number moves: the first of each `size / num_moving`."""
        return number < self.size and number * self.num_moving % self.size < self.num_moving


def moving_layers(num_layers: int, fraction: float | Literal["auto"]) -> list[int]:
    """The layers of a model, by number, that a fraction moves; "auto": in its first steps."""
    size = max(0, num_layers - _NUM_STAYING)
    stack = _Stack(size, size if fraction == "auto" else round(fraction * size))
    return [number for number in range(size) if stack.moves(number)]


class _OffloadedForward:
    """The new forward of an attached layer."""

    def __init__(
        self, offload: ActivationOffload, layer: nn.Module, stack: _Stack, number: int
    ) -> None:
        self._offload = offload
        self._stack = stack
        self._number = number
        # Weak, and no bound method: the layer holds this.
        self._layer = weakref.ref(layer)
        self._own_forward = vars(layer).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer()
        if layer is None:
            raise RuntimeError("Expected the layer that was attached, got one that is gone.")
        if not torch.is_grad_enabled():
            return self._run(layer, *args, **kwargs)

        # All but the hidden states, by whatever name.
        shared = (args[1:], kwargs) if args else list(kwargs.values())[1:]

        def kept() -> list[Tensor]:
            return [*_tensors_in(shared), *layer.parameters(), *layer.buffers()]

        stack = self._stack
        stays = not stack.moves(self._number)
        with self._offload.saving(kept, stays=stays, window=stack.window):
            return self._run(layer, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the layer is not attached."""
        copied = memo[id(self._layer())]
        if self._own_forward is not None:
            return copy.deepcopy(self._own_forward, memo)
        return MethodType(type(copied).forward, copied)

    def _run(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._own_forward is not None:
            return self._own_forward(*args, **kwargs)
        # Of the class as it is now: FSDP gives the layer another one.
        return type(layer).forward(layer, *args, **kwargs)


class _Saving:
    """What one forward of a layer saves. It lives as long as anything of it."""

    def __init__(
        self,
        offload: ActivationOffload,
        kept: Callable[[], Iterable[Tensor]],
        previous: _Saving | None,
        *,
        stays: bool,
        window: int,
    ) -> None:
        self._offload = offload
        self._stays = stays
        self._window = window  # forwards that may start before it is gone
        self._previous = None if previous is None else weakref.ref(previous)
        self._find_kept: Callable[[], Iterable[Tensor]] | None = kept
        self._kept: set[int] = set()
        self._storages: list[weakref.ref[_Storage]] = []
        # By their addresses, until the forward ends: another storage may get the address of one
        # that is gone. Then the ones moving down.
        self._held: dict[int, _Storage] = {}
        self._down: Event | None = None
        self._up: Event | None = None
        self._is_needed = False  # whether its backward has started

    # Forward

    def pack(self, tensor: Tensor) -> _SavedTensor | _SavedHere | Tensor:
        """Called by autograd for each tensor that it saves."""
        if not self._offload.moves(tensor) or self._is_kept(key := _key(tensor)):
            # An output of the very operation that saves it must not be saved with its node: the
            # two would never be freed.
            return tensor if tensor.is_leaf else _SavedHere(tensor)

        storage = self._held.get(key)
        if storage is None or storage.version != tensor._version:
            storage = self._held[key] = _Storage(self, tensor)
            self._storages.append(weakref.ref(storage))
        return _SavedTensor(storage, tensor)

    def _is_kept(self, key: int) -> bool:
        if key not in self._kept and key not in self._held and self._find_kept is not None:
            self._kept = {_key(tensor) for tensor in self._find_kept() if _has_storage(tensor)}
        return key in self._kept

    def end(self) -> None:
        """The layer's forward is over."""
        self._held.clear()
        self._kept.clear()
        self._find_kept = None

    def begin_to_leave(self) -> bool:
        """Starts to copy to the host what backward will need, if it is to go there."""
        if self._stays or self._is_needed:
            return False

        alive = self._alive()
        self._down = self._offload.send_down(alive)
        if self._down is None:
            return False

        self._held = dict(enumerate(alive))
        return True

    def is_due(self) -> bool:
        """A forward starts. Whether it must be gone by then."""
        self._window -= 1
        return self._window <= 0

    def leave(self) -> None:
        """Waits until the host has it, and frees the device's memory."""
        try:
            if self._down is not None and not self._is_needed:
                self._offload.wait(D2H, self._down)
                for storage in self._held.values():
                    storage.leave()
        finally:
            self._held.clear()

    # Backward

    def need(self) -> None:
        """Backward needs it now, and one of the layers before soon."""
        if not self._is_needed:
            self._held.clear()
            self.come()
            previous = None if self._previous is None else self._previous()
            if previous is not None:
                previous.come()
            self._is_needed = True

        if self._up is not None:
            self._offload.wait(H2D, self._up)
            self._up = None

    def come(self) -> None:
        """Starts to copy offloaded storages back to the device."""
        gone = [storage for storage in self._alive() if storage.is_gone]
        if gone:
            self._up = self._offload.bring_up(gone)

    def forget(self, memory: Tensor) -> None:
        """Memory of a storage that is not read again. Any thread, at any time."""
        if self._up is not None:
            self._offload.adopt(self._up, memory)

    def _alive(self) -> list[_Storage]:
        return [storage for ref in self._storages if (storage := ref()) is not None]


class _Storage:
    """A storage that autograd has saved tensors of, on the device, in host memory, or both.

    Attributes:
        nbytes: its size.
        version: of its tensors, when they were saved.
        piece: in host memory.
    """

    def __init__(self, saving: _Saving, tensor: Tensor) -> None:
        self.saving = saving
        self.nbytes = tensor.untyped_storage().nbytes()
        self.piece: HostPiece | None = None
        self._memory: Tensor | None = _bytes_of(tensor)
        # Shares the version of the tensor, which changes when it is written in place.
        self._witness: Tensor | None = tensor.detach()
        self.version = tensor._version
        self._is_spoiled = False

    @property
    def memory(self) -> Tensor:
        """The device's: [nbytes] uint8."""
        assert self._memory is not None
        return self._memory

    @property
    def is_gone(self) -> bool:
        """Whether it is in host memory only."""
        return self._memory is None

    def check(self) -> None:
        """RuntimeError if a tensor of it was written after autograd had saved it."""
        self._note_version()
        if self._is_spoiled:
            raise RuntimeError(_SPOILED)

    def _note_version(self) -> None:
        if self._witness is not None and self._witness._version != self.version:
            self._is_spoiled = True

    def leave(self) -> None:
        """Frees the device's memory, if the host has the same."""
        self._note_version()
        if self.piece is not None:
            self._memory = self._witness = None

    @property
    def on_host(self) -> Tensor:
        """The host's memory: [nbytes] uint8."""
        assert self.piece is not None
        return self.piece.memory

    def come_to(self, memory: Tensor) -> None:
        """`memory` is the device's from now on."""
        self._memory = memory

    def __del__(self) -> None:
        if self._memory is not None:
            self.saving.forget(self._memory)
        if self.piece is not None:
            self.piece.give_back()


class _SavedTensor:
    """Autograd's replacement of a tensor: its view of its storage."""

    def __init__(self, storage: _Storage, tensor: Tensor) -> None:
        self._storage = storage
        self._dtype = tensor.dtype
        self._layout = tensor.storage_offset(), tensor.size(), tensor.stride()

    def unpack(self) -> Tensor:
        """The tensor, when backward needs it."""
        storage = self._storage
        storage.saving.need()
        storage.check()
        memory = storage.memory
        tensor = torch.empty(0, dtype=self._dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), *self._layout)


class _SavedHere:
    """Autograd's replacement of a tensor that stays, without the node that computed it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def unpack(self) -> Tensor:
        """The tensor."""
        if self._tensor._version != self._version:
            raise RuntimeError(_SPOILED)
        return self._tensor


def _unpack(saved: _SavedTensor | _SavedHere | Tensor) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.unpack()


def _close(down: Lane, up: Lane, stack: HostStack) -> None:  # noqa: ARG001  lives until the end
    # Garbage may be collected in a lane's own thread, which must not wait for itself.
    if not is_lane_thread():
        down.close()
        up.close()


def _key(tensor: Tensor) -> int:
    """The same for tensors that share a storage, while they live."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage: [nbytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)


def _tensors_in(values: Any) -> list[Tensor]:
    """Tensors in containers and in dataclasses, which may keep more than their fields."""
    found, seen, left = [], set(), [values]
    while left:
        for leaf in tree_leaves(left.pop()):
            if isinstance(leaf, Tensor):
                found.append(leaf)
            elif is_dataclass(leaf) and id(leaf) not in seen:
                seen.add(id(leaf))
                left.append([getattr(leaf, field.name, None) for field in fields(leaf)])
                left.append(getattr(leaf, "__dict__", {}))
    return found
