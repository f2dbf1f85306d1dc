"""What differs between kinds of accelerators. Only this file names cuda, and the help of
`--device`.

`Driver` uses PyTorch's common interface (`torch.accelerator`, `torch.Stream`, `torch.Event`), which
is all that most kinds need. `register_driver` adds another kind, which is then a device like any
other: the tests do so with a simulated one.

[Note: two watchdogs] Each NCCL process group of PyTorch has two separate threads. One looks for
errors and timeouts of collectives and ends the process for one; the other ends it if the first one
hangs or has found an error. Next to this project's watchdog, a rank that is killed in the middle of
a roll call would look like the cause. So `leave_failures_to_watchdog` has PyTorch's threads only
report errors on request (`ProcessGroupNCCL.get_error`). PyTorch reads these settings from the
environment when a group is made. Their names are in PyTorch 2.11 and 2.13; their effects are from
the sources of another version, and have not been run on a GPU.
"""

from __future__ import annotations

import itertools
import logging
import os
import resource
import shutil
import sysconfig
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

logger = logging.getLogger(__name__)

# The most channels of a head that PyTorch's FlashAttention takes on any device.
FLASH_HEAD_DIM = 256

# With any of these on, PyTorch ends ranks for errors of collectives or of their device. Where two
# names are given, the second one is read if the first is not set.
_ENDING = (
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
    ("TORCH_NCCL_ENABLE_MONITORING",),
    ("TORCH_NCCL_RETHROW_CUDA_ERRORS",),
)
# These are off by default. They turn error handling on again, or search for errors off.
_OPPOSING = (
    ("TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG"),
    ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"),
)
_NO = ("0", "n", "no", "f", "false")
_QUEUES, _MOST_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 32
# PyTorch 2.11 and 2.13 read the first of these that is set, when they allocate for the first time.
_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class PinError(RuntimeError):
    """Host memory could not be pinned."""


class Driver:
    """One kind of accelerator.

    Attributes:
        kind: as in `torch.device(kind)`.
        collective_backend: for `init_process_group`; carries CPU tensors too.
        has_triton: whether Triton compiles for it, on machines where `why_triton_fails` is None.
        has_varlen_attention: whether PyTorch's FlashAttention for sequences of many lengths runs on
            it.
        widens_as_it_reads: whether reductions to a wider dtype read narrow tensors as they are,
            without a copy.
        visible_devices: the environment variable with the devices that a process may use,
            separated by commas; empty if no variable lists them.
    """

    collective_backend = ""
    has_triton = False
    has_varlen_attention = False
    widens_as_it_reads = False
    visible_devices = ""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @property
    def module(self) -> Any:
        """What torch calls the device's module: `torch.cuda` and its like."""
        return torch.get_device_module(self.kind)

    def is_available(self) -> bool:
        """Whether this machine has one that can be used."""
        return bool(self.module.is_available())

    def device_count(self) -> int:
        """How many of them this process sees."""
        return int(self.module.device_count())

    def make_current(self, index: int) -> None:
        """Makes the device with this index the default of this thread."""
        self.module.set_device(index)

    def description(self, index: int) -> str:
        """Its name, for logs and result files."""
        return f"{self.kind}:{index}"

    def peak_memory_bytes(self, index: int) -> int:
        """The most memory that tensors have held at once."""
        return int(self.module.max_memory_allocated(index))

    def memory_info(self, index: int) -> tuple[int, int]:
        """Bytes of memory that no process uses, and of all of it."""
        free, total = self.module.mem_get_info(index)
        return int(free), int(total)

    def rng_state(self, index: int) -> torch.Tensor:
        """The state of the random generator, uint8 on the CPU."""
        state: torch.Tensor = self.module.get_rng_state(index)
        return state

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        """Restores what `rng_state` returned."""
        self.module.set_rng_state(state, index)

    def pci_address(self, index: int) -> str | None:  # noqa: ARG002
        """The device's PCI address, as sysfs writes it: `0000:3b:00.0`; None if it is unknown."""
        return None

    def flash_head_dim(self, index: int) -> int:  # noqa: ARG002
        """The most channels of a head that PyTorch's FlashAttention takes, forward and backward; 0
        if the device has none.
        """
        return FLASH_HEAD_DIM

    def attention_of_varying_shapes(self) -> AbstractContextManager[None]:
        """While open, PyTorch's attention uses no kernel that it builds for each batch size and
        length.
        """
        return nullcontext()

    def takes_two_widths(
        self,
        query: torch.Tensor,  # noqa: ARG002
        key: torch.Tensor,  # noqa: ARG002
        value: torch.Tensor,  # noqa: ARG002
        dropout: float,  # noqa: ARG002
        is_causal: bool,  # noqa: ARG002
    ) -> bool:
        """Whether PyTorch's attention has a kernel for these inputs, whose values are not as wide
        as keys, that is as fast as FlashAttention.
        """
        return False

    def prepare_collectives(self) -> None:
        """See `Device.prepare_collectives`."""

    def order_collectives(self) -> None:
        """See `Device.order_collectives`."""

    def prepare_determinism(self) -> None:
        """Has the kind's libraries give the same bits for the same input, before they are used."""

    # Pinned memory

    def pin(self, index: int, address: int, nbytes: int) -> None:  # noqa: ARG002
        """See `Device.pin`. PinError unless a kind of device supports it."""
        raise pin_error(nbytes, f"no way to pin memory for {self.kind}")

    def unpin(self, index: int, address: int) -> None:
        """See `Device.unpin`."""

    # Streams

    def new_stream(self, index: int, *, is_urgent: bool) -> torch.Stream:
        """A stream. The work of an urgent one goes before what waits on others."""
        return torch.Stream(torch.device(self.kind, index), priority=-1 if is_urgent else 0)

    def current_stream(self, index: int) -> torch.Stream:
        """The stream to which this thread issues its work on the device."""
        return torch.accelerator.current_stream(index)

    def on_stream(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        """While open, this thread issues to `stream`."""
        return stream

    def new_event(self, index: int, *, is_timed: bool = False) -> torch.Event:
        """An event. A thread that waits for an untimed one yields its core, if the kind can."""
        return torch.Event(torch.device(self.kind, index), enable_timing=is_timed)


class CudaDriver(Driver):
    """NVIDIA's. It has not been run on one."""

    collective_backend = "cpu:gloo,cuda:nccl"
    has_triton = True
    has_varlen_attention = True
    widens_as_it_reads = True
    visible_devices = "CUDA_VISIBLE_DEVICES"

    def __init__(self) -> None:
        super().__init__("cuda")
        self._has_warned = False

    def is_available(self) -> bool:
        prepare_cuda(os.environ)
        return super().is_available()

    def make_current(self, index: int) -> None:
        prepare_cuda(os.environ)
        if not self._has_warned:
            self._has_warned = True
            warn_of_one_queue(os.environ)
        super().make_current(index)

    def description(self, index: int) -> str:
        return torch.cuda.get_device_name(index)

    def flash_head_dim(self, index: int) -> int:
        major, minor = torch.cuda.get_device_capability(index)
        if major < 8:
            return 0
        # Some wider heads have no backward on cards with less shared memory: 8.6, 8.9 and 12.x.
        has_little_shared_memory = (major == 8 and minor > 0) or major >= 12
        return 192 if has_little_shared_memory else FLASH_HEAD_DIM

    @contextmanager
    def attention_of_varying_shapes(self) -> Iterator[None]:
        # PyTorch prefers cuDNN on Hopper and Blackwell. FlashAttention and the memory-efficient
        # kernel remain.
        was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(was_enabled)

    def takes_two_widths(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout: float,
        is_causal: bool,
    ) -> bool:
        # PyTorch's choice, by the widths, the device and the release of cuDNN.
        chosen = torch._fused_sdp_choice(query, key, value, None, dropout, is_causal)
        return chosen == SDPBackend.CUDNN_ATTENTION.value

    def prepare_collectives(self) -> None:
        leave_failures_to_watchdog()

    def order_collectives(self) -> None:
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")

    def prepare_determinism(self) -> None:
        choose_deterministic_algorithms()

    def pci_address(self, index: int) -> str | None:
        found = torch.cuda.get_device_properties(index)
        parts = [getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
        if None in parts:
            return None

        domain, bus, device = parts
        return f"{domain:04x}:{bus:02x}:{device:02x}.0"

    def pin(self, index: int, address: int, nbytes: int) -> None:
        with torch.cuda.device(index):
            status = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
            if int(status) != 0:
                self._clear_error(index)
                raise pin_error(nbytes, torch.cuda.cudart().cudaGetErrorString(status))

    def unpin(self, index: int, address: int) -> None:
        with torch.cuda.device(index):
            torch.cuda.cudart().cudaHostUnregister(address)

    @staticmethod
    def _clear_error(index: int) -> None:
        """Takes the error that the runtime keeps and reports at the next kernel launch."""
        with suppress(RuntimeError):
            torch.ones(1, device=torch.device("cuda", index)).add_(1)

    # torch's generic events spin while they wait, and its CUDA events take CUDA streams only.

    def new_stream(self, index: int, *, is_urgent: bool) -> torch.Stream:
        return torch.cuda.Stream(index, priority=-1 if is_urgent else 0)

    def current_stream(self, index: int) -> torch.Stream:
        return torch.cuda.current_stream(index)

    def on_stream(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        assert isinstance(stream, torch.cuda.Stream), "made here"
        return torch.cuda.stream(stream)

    def new_event(self, index: int, *, is_timed: bool = False) -> torch.Event:  # noqa: ARG002
        return torch.cuda.Event(enable_timing=is_timed, blocking=not is_timed)


def pin_error(nbytes: int, reason: str) -> PinError:
    """The error of memory that could not be pinned, with what may be the cause."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
    return PinError(
        f"Expected to pin {nbytes} bytes of host memory, got: {reason} (RLIMIT_MEMLOCK, which some "
        f"systems apply to it, is {shown}). --no-pin-cpu-params and --no-pin-cpu-grads train "
        "without pinned memory."
    )


def why_triton_fails() -> str | None:
    """Returns the requirement of Triton that this machine lacks; None if it has all.

    Triton brings a compiler for kernels, but builds the C code that launches them at run time.
    """
    if find_spec("triton") is None:
        return "no package triton (pip install triton)"
    named = os.environ.get("CC")
    if not any(map(shutil.which, ["gcc", "clang"] if named is None else [named])):
        got = "no gcc or clang in the PATH" if named is None else f"no {named}, which CC names"
        return f"{got}; Triton compiles C at run time"
    # As Triton looks for it; compilers also search the directories of the variables.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    folders = [sysconfig.get_paths(scheme)["include"]]
    for name in ("CPATH", "C_INCLUDE_PATH"):
        folders += filter(None, os.environ.get(name, "").split(os.pathsep))
    if not any(Path(folder, "Python.h").is_file() for folder in folders):
        return f"no Python.h in {folders[0]} (python3-dev); Triton compiles C at run time"
    return None


def prepare_cuda(environment: MutableMapping[str, str]) -> None:
    """Sets what CUDA and PyTorch's allocator read from the environment when they start. The user's
    settings stay; so does everything once CUDA has started.
    """
    if not torch.backends.cuda.is_built() or torch.cuda.is_initialized():
        return
    # Each lane is a stream, and NCCL and activation offload have streams too. CUDA maps streams to
    # queues, of which it has 8 by default; work of one queue runs in the order of its launch.
    environment.setdefault(_QUEUES, str(_MOST_QUEUES))
    # Segments that grow in place: lengths of batches that vary leave no gaps of unusable sizes.
    if not any(name in environment for name in _ALLOCATOR_SETTINGS):
        environment[_ALLOCATOR_SETTINGS[-1]] = "expandable_segments:True"


def warn_of_one_queue(environment: Mapping[str, str]) -> None:
    """Has the first rank warn if CUDA has a single hardware queue."""
    if environment.get(_QUEUES) == "1" and environment.get("RANK", "0") == "0":
        logger.warning(
            "%s=1, which Megatron-LM's scripts set, puts all streams on one hardware queue: "
            "collectives and copies no longer overlap with computation. Unset it.",
            _QUEUES,
        )


def leave_failures_to_watchdog(environment: MutableMapping[str, str] = os.environ) -> None:
    """Has PyTorch find failures of collectives without ending a rank. Call it before the process
    group is made.

    The user's settings stay. If that lets PyTorch end ranks all the same, one warning names the
    settings.
    """
    disarming = [
        f"{name}={environment[name]}"
        for name in itertools.chain(*_ENDING, *_OPPOSING)
        if environment.get(name, "0").lower() not in _NO
    ]
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        disarming.append("TORCH_DISTRIBUTED_DEBUG=DETAIL")
    if disarming:
        logger.warning(
            "with these settings PyTorch may end ranks for failures of collectives, or not find "
            "them, and the watchdog may name the wrong rank, or none: %s",
            ", ".join(disarming),
        )

    for names in _ENDING:
        if not any(name in environment for name in names):
            environment[names[0]] = "0"
    # A request for a dump goes through torchrun's store, without a prefix: the next start of the
    # job would find it.
    environment.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


def choose_deterministic_algorithms(environment: MutableMapping[str, str] = os.environ) -> None:
    """Has cuBLAS, NCCL and compiled layers add up in one order. Settings of users stay."""
    # Streams that share a workspace of cuBLAS may get different algorithms each time. PyTorch
    # raises an error for products without this setting.
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Switches (NVLS) add in the order in which ranks arrive; a ring's order is fixed, and it has
    # all collectives.
    environment.setdefault("NCCL_ALGO", "Ring")
    # Otherwise Inductor pads matrices where that is faster in a measurement. It reads this when it
    # is imported, to compile for the first time.
    environment.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")


_drivers: dict[str, Driver] = {}


def register_driver(driver: Driver) -> None:
    """Adds a kind of accelerator, or replaces one. `auto` prefers the kinds added first."""
    _drivers[driver.kind] = driver


def driver_of(kind: str) -> Driver:
    """The driver of this kind of accelerator. ValueError if none is known."""
    if kind not in _drivers:
        raise ValueError(f"Expected a device of kind cpu, {', '.join(_drivers)}, got {kind!r}.")
    return _drivers[kind]


def kernels_of(device: torch.device) -> Driver:
    """The driver of this device, for its kernels. Devices that are no accelerators have the
    kernels of `Driver`.
    """
    return _drivers.get(device.type) or Driver(device.type)


def kinds_of_accelerators() -> list[str]:
    """The registered kinds, in order."""
    return list(_drivers)


register_driver(CudaDriver())
