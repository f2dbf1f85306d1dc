"""Makes the simulated accelerator known: to torch as the device `sim`, and to this project as a
kind of device.

    # In a separate process, before any use of devices:
    import tests.simulated_accelerator.device as sim

    sim.configure(sim.Settings(schedule=sim.Schedule.LANES_LAST))
    x = torch.ones(3, device="sim")

Importing this changes torch for the whole process (there is an accelerator from here on), so test
processes never do: the ranks of `run_ranks(..., device="sim")` do.
"""

from __future__ import annotations

import atexit
import enum
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch._meta_registrations  # shapes of operators that define them in Python
import torch.distributed as dist

from megatron.core.drivers import Driver, pin_error, register_driver
from tests.simulated_accelerator import build

KIND = "sim"
COLLECTIVE_BACKEND = "cpu:gloo,sim:simccl"

# As in NCCL: without a watchdog a collective waits for its peers for ever.
_NO_TIMEOUT = timedelta(days=1)

_sim = build.load()
NUM_DEVICES: int = _sim.NUM_DEVICES


class Schedule(enum.IntEnum):
    """How streams get ahead of each other. A device may do any of these, so none may change a
    result.
    """

    PAUSES = 0  # each piece of work starts after a pause, drawn from the seed
    LANES_LAST = 1  # streams other than the default one run only when awaited
    DEFAULT_LAST = 2  # the default stream runs only when awaited
    ONE_QUEUE = 3  # all streams share a queue, in the order of launches: they never overlap


class Poison(enum.IntEnum):
    """When freed memory is overwritten with NaN of every floating-point dtype."""

    NEVER = 0
    WHEN_FREED = 1  # stricter than CUDA, where freed memory stays as it is until it is used again
    WHEN_REUSED = 2


@dataclass(frozen=True)
class Settings:
    """How the device behaves.

    Attributes:
        max_pause_us: of `Schedule.PAUSES`, in microseconds; one pause in sixteen is up to eight
            times as long.
        queue_depth: pieces of work that a stream takes before a launch waits.
        patience_ms: after this time a stream that comes last runs unawaited, since another rank
            may wait for it.
        memory_bytes: what each device says that it has; allocations beyond it succeed.
    """

    schedule: Schedule = Schedule.PAUSES
    poison: Poison = Poison.WHEN_REUSED
    max_pause_us: int = 0
    seed: int = 0
    queue_depth: int = 1024
    patience_ms: int = 200
    memory_bytes: int = 64 << 30


_current = Settings()


def configure(settings: Settings) -> None:
    """From here on all devices of this process behave like this."""
    global _current
    _current = settings
    _sim.configure(
        settings.schedule,
        settings.poison,
        settings.max_pause_us,
        settings.seed,
        settings.queue_depth,
        settings.patience_ms,
    )


@contextmanager
def configured(**changes: Any) -> Iterator[None]:
    """While open, the devices behave as now but for these fields of `Settings`."""
    before = _current
    configure(replace(before, **changes))
    try:
        yield
    finally:
        configure(before)


# Counters


@dataclass(frozen=True)
class Counters:
    """Work of this process on its devices so far; subtract two for the work in between.

    Attributes:
        kernels: operators and collectives that were launched.
        stream_syncs: how often a thread waited for a stream: for a copy that blocks, `item()`,
            `synchronize()`.
        event_syncs: how often a thread waited for an event, or in a barrier.
        full_queues: how often a launch waited for room.
        pageable_copies: asynchronous copies that blocked the host, since its memory is not
            pinned.
        fresh_blocks: allocations that no block freed before could serve.
        recorded_streams: calls of `record_stream` that made a difference.
        sync_operators: launches of operators whose result has a shape that the host waits for.
    """

    kernels: int = 0
    stream_syncs: int = 0
    event_syncs: int = 0
    full_queues: int = 0
    pageable_copies: int = 0
    fresh_blocks: int = 0
    recorded_streams: int = 0
    sync_operators: int = 0

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            **{name: count - getattr(earlier, name) for name, count in vars(self).items()}
        )


def counters() -> Counters:
    return Counters(**_sim.counted())


def syncs_by_thread() -> dict[str, int]:
    """How often each thread has waited for a stream or an event, by its name."""
    return _by_thread_name(_sim.syncs_by_thread().items())


def sync_operator_names() -> set[str]:
    """The operators behind `Counters.sync_operators`."""
    return _sim.sync_operator_names()


def touched_devices() -> dict[int, set[str]]:
    """The names of the threads that have used each device: on CUDA, it has a context of this
    process's now.
    """
    found: dict[int, set[str]] = {}
    names = _thread_names()
    for device, thread in _sim.touched():
        found.setdefault(device, set()).add(names.get(thread, "not Python's"))
    return found


def forget_touched_devices() -> None:
    _sim.reset_touched()


def _thread_names() -> dict[int, str]:
    return {
        thread.native_id: thread.name
        for thread in threading.enumerate()
        if thread.native_id is not None
    }


def _by_thread_name(counts: Any) -> dict[str, int]:
    names, found = _thread_names(), dict[str, int]()
    for thread, count in counts:
        name = names.get(thread, "not Python's")
        found[name] = found.get(name, 0) + count
    return found


# Faults and inspection


@contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """While open, the stream does not start work that is issued from here on."""
    gate = _sim.hold(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        gate.open()


def fail_on_stream(message: str) -> None:
    """Launches a kernel on the current stream that fails."""
    _sim.fail(message)


def has_error() -> bool:
    """Whether a kernel has failed. Does not raise."""
    return bool(_sim.has_error())


def reset_error() -> None:
    """Makes the device usable again after a failure, which is impossible on CUDA."""
    _sim.reset_error()


def peek(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's current memory. Does not wait."""
    return _sim.kernel_view(tensor).clone()


# torch.sim


def _index(device: Any = None) -> int:
    if device is None:
        return int(_sim.current_device())
    index = device if isinstance(device, int) else torch.device(device).index
    return int(_sim.current_device()) if index is None else index


def _make_module() -> types.ModuleType:
    """The counterpart of `torch.cuda`, as far as torch and this project use it."""
    module: Any = types.ModuleType("torch.sim")
    generators = tuple(_sim.generator(device) for device in range(NUM_DEVICES))

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    module.default_generators = generators
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.device_count = lambda: NUM_DEVICES
    module.current_device = _sim.current_device
    module.set_device = lambda device: _sim.set_current_device(_index(device))
    module.synchronize = lambda device=None: _sim.synchronize(_index(device))
    module.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    module.Stream = lambda device=None, priority=0: torch.Stream(
        torch.device(KIND, _index(device)), priority=priority
    )
    module.Event = lambda enable_timing=False, **_: torch.Event(KIND, enable_timing=enable_timing)
    module.stream = lambda stream: stream  # streams are contexts themselves
    module.get_rng_state = lambda device=None: generators[_index(device)].get_state()
    module.set_rng_state = lambda state, device=None: generators[_index(device)].set_state(state)
    module.manual_seed = module.manual_seed_all = manual_seed_all
    module.max_memory_allocated = lambda device=None: _sim.peak_bytes(_index(device))
    module.memory_allocated = lambda device=None: _sim.allocated_bytes(_index(device))
    module.memory_reserved = module.max_memory_reserved = lambda device=None: _sim.reserved_bytes(
        _index(device)
    )
    module.mem_get_info = lambda device=None: (
        _current.memory_bytes - _sim.reserved_bytes(_index(device)),
        _current.memory_bytes,
    )
    module.reset_peak_memory_stats = lambda device=None: _sim.reset_peak(_index(device))
    return module


class SimDriver(Driver):
    """As another vendor's would be."""

    collective_backend = COLLECTIVE_BACKEND

    def pin(self, index: int, address: int, nbytes: int) -> None:  # noqa: ARG002
        try:
            _sim.register_host_memory(address, nbytes)
        except RuntimeError as error:
            raise pin_error(nbytes, str(error)) from None

    def unpin(self, index: int, address: int) -> None:  # noqa: ARG002
        _sim.unregister_host_memory(address)


def _create_communicator(store: Any, rank: int, size: int, timeout: timedelta) -> Any:  # noqa: ARG001
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("simccl", store), rank, size, _NO_TIMEOUT)
    return _sim.Communicator(gloo, rank, size)


def _register() -> None:
    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, _make_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("simccl", _create_communicator, devices=[KIND])
    register_driver(SimDriver(KIND))
    configure(Settings())
    # Before torch's own objects go: streams may still have work that uses them.
    atexit.register(_sim.stop_streams)


_register()
