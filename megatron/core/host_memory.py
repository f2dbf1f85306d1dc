"""Host memory in exact-size slabs, pinned once, and the check that it fits before it is allocated.

[Note: slabs] A slab is one private anonymous mapping. Allocators waste memory: the C library keeps
freed memory, and torch rounds pinned memory up to the next power of two, which for 33 GiB of
moments wastes 31 GiB. A mapping has exactly the size that was asked for, is zero without being
touched, and goes back to the system when it ends.

Arrays share a slab: it is pinned with one call, and its huge pages are not split between them:

    slab     |array 0      |..|array 1    |.|array 2          |
    offset   0             ^  64 * k        64 * l            nbytes
                           up to 63 bytes, so that every array starts on a cache line
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.device import Device
from megatron.core.host_keeper import KeeperError, KeptMemory
from megatron.core.local_ranks import CGROUPS, lines_of, local_world_size, own_cgroups
from megatron.core.log import counted
from megatron.core.mesh import all_reduce_over
from megatron.core.numa import prefer_node, touch_from_node

ARRAY_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load
_HUGE_PAGE = 2 << 20  # bytes


class HostMemoryError(MemoryError):
    """The host does not have the memory that a run needs."""


class HostSlab:
    """One piece of host memory, zero at first. See [Note: slabs].

    The memory and its pin are released with the slab and the last tensor in it; copies from and to
    the device must be done by then. A forked process does not have the slab: shared until written,
    every page written here would be held twice.

    With `kept`, the memory is the keeper's (host_keeper.py), and survives the process: a slab that
    is mapped again has the contents that it had.
    """

    def __init__(
        self,
        nbytes: int,
        device: Device,
        *,
        is_pinned: bool,
        purpose: str,
        kept: KeptMemory | None = None,
    ) -> None:
        """Maps the memory, and pins it.

        Args:
            nbytes: exact size; 0 is a slab without memory.
            device: whose copies reach it directly, if it is pinned.
            is_pinned: whether to pin it, if the device pins at all.
            purpose: its name in errors: "moments".
            kept: where the memory comes from; None: from the system.

        Raises:
            ValueError: for a negative size.
            HostMemoryError: if the system or the keeper does not give that much.
            PinError: if it cannot be pinned; the memory has been released then.
        """
        if nbytes < 0:
            raise ValueError(f"Expected a size of at least 0 bytes for {purpose}, got {nbytes}.")

        self.nbytes = nbytes
        self.is_pinned = is_pinned and device.pins_host_memory
        self._purpose = purpose
        self._begin = 0  # bytes from the beginning of the mapping
        self._memory = memoryview(b"")
        if nbytes:
            self._map(device, kept)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The flat array of `numel` elements of `dtype` at `offset`, with a storage of its size.

        Args:
            offset: bytes from the beginning of the slab, a multiple of the element size.

        Raises:
            ValueError: for an array that is not in the slab, or not on a multiple of its
                element size.
        """
        if not numel:
            return torch.empty(0, dtype=dtype)

        end = offset + numel * dtype.itemsize
        if min(offset, numel) < 0 or end > self.nbytes or offset % dtype.itemsize:
            raise ValueError(
                f"Expected an aligned array within the {self.nbytes} bytes for {self._purpose}, "
                f"got {numel} elements of {dtype} at byte {offset}."
            )
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=self._begin + offset)

    def _map(self, device: Device, kept: KeptMemory | None) -> None:
        try:
            if kept is not None:
                mapping = kept.map(self._purpose, self.nbytes)
            else:
                # With room to start on a huge page, since the system places a mapping anywhere.
                # Untouched pages cost only addresses.
                mapping = mmap.mmap(
                    -1, self.nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                )
        except (OSError, OverflowError, KeeperError) as error:
            raise HostMemoryError(
                f"Expected {format_bytes(self.nbytes)} of host memory for {self._purpose}, got: "
                f"{error}."
            ) from error

        self._memory = memoryview(mapping)
        address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        # A kept slab starts where its file does, wherever that is mapped.
        self._begin = -address % _HUGE_PAGE if kept is None else 0
        _advise(mapping, self._begin, self.nbytes)

        # Before the first touch, when a page gets its place. Pinning touches all of them. Restored
        # memory has its places, and contents that must not be written over.
        node = None if kept is not None and kept.is_restored else device.numa_node
        if node is not None and not prefer_node(address + self._begin, self.nbytes, node):
            touch_from_node(address + self._begin, self.nbytes, node)
        if self.is_pinned:
            self._pin(mapping, device, address + self._begin)

    def _pin(self, mapping: mmap.mmap, device: Device, address: int) -> None:
        try:
            device.pin(address, self.nbytes)
        except BaseException:
            # The traceback keeps the mapping alive, and pinning may have touched every page of it.
            self._memory.release()
            mapping.close()
            raise

        # Tensors hold the view; the finalizer holds the mapping, which so outlasts its pin.
        release = weakref.finalize(self._memory, _unpin, mapping, device, address, os.getpid())
        # The end of the process frees everything, and copies may still be in progress then.
        release.atexit = False


class SlabBuilder:
    """Adds up arrays, then makes the slab that holds them to the byte. See [Note: slabs]."""

    def __init__(self) -> None:
        self.nbytes = 0  # up to the end of the last array

    def add(self, numel: int, dtype: torch.dtype) -> int:
        """Adds an array of `numel` elements. Returns its offset in bytes, for `HostSlab.tensor`.

        Raises:
            ValueError: for a negative number of elements.
        """
        if numel < 0:
            raise ValueError(f"Expected at least 0 elements, got {numel}.")

        offset = -(-self.nbytes // ARRAY_ALIGNMENT) * ARRAY_ALIGNMENT
        if numel:
            self.nbytes = offset + numel * dtype.itemsize
        return offset

    def build(
        self, device: Device, *, is_pinned: bool, purpose: str, kept: KeptMemory | None = None
    ) -> HostSlab:
        """The slab, of `nbytes` bytes. Raises what `HostSlab` does."""
        return HostSlab(self.nbytes, device, is_pinned=is_pinned, purpose=purpose, kept=kept)


def _advise(mapping: mmap.mmap, begin: int, nbytes: int) -> None:
    """Requests huge pages, and keeps the mapping out of forked processes. Before any touch."""
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        # Not every system has both, and a kernel without huge pages fails.
        with contextlib.suppress(AttributeError, OSError):
            # Only to the end of the last page used: no huge page may reach beyond the slab.
            mapping.madvise(getattr(mmap, name), begin, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)


def _unpin(mapping: mmap.mmap, device: Device, address: int, owner: int) -> None:  # noqa: ARG001
    # As an argument, the mapping lives until here. A forked process inherits the slab's objects,
    # but neither its memory nor the device.
    if os.getpid() == owner:
        device.unpin(address)


class HostNeed(NamedTuple):
    """One item of a rank's host memory."""

    what: str  # "main weights"
    nbytes: int
    is_pinned: bool  # whether the device will pin it; never without `pins_host_memory`


@dataclass(frozen=True)
class HostLimits:
    """The memory that is left on this machine, in bytes. None: no limit is known.

    RLIMIT_MEMLOCK is not among them: it bounds mlock, but GPU drivers lock pages by themselves.
    Obeying it would reject runs in most containers, where it is 64 KiB or 8 MiB.

    Attributes:
        mem_available: of the machine: free, or page cache that can be dropped.
        cgroup_available: of the tightest cgroup this process is in, page cache included.
    """

    mem_available: int | None
    cgroup_available: int | None

    @classmethod
    def read(cls, proc: Path = Path("/proc"), cgroup: Path = CGROUPS) -> HostLimits:
        """The present limits. A file that is missing (no Linux, no such controller) sets none."""
        return cls(_mem_available(proc), min(_cgroup_rooms(proc, cgroup), default=None))

    @property
    def available(self) -> int | None:
        """The least of all known limits; None without any."""
        known = [
            nbytes for nbytes in (self.mem_available, self.cgroup_available) if nbytes is not None
        ]
        return min(known, default=None)


def check_host_memory(
    needs: Sequence[HostNeed], *, num_local_ranks: int, limits: HostLimits | None = None
) -> None:
    """Rejects a run whose host memory would not fit, before any of it is allocated.

    All ranks of the machine must pass before one of them allocates: memory that a rank has taken is
    missing in the check of another.

    Args:
        needs: of this rank; its neighbours are assumed to need the same.
        num_local_ranks: ranks on this machine, which share its memory and its cgroup.
        limits: default: the present ones.

    Raises:
        HostMemoryError: with the sum, term by term, and the limits.
    """
    limits = HostLimits.read() if limits is None else limits
    known = {"MemAvailable": limits.mem_available, "cgroup": limits.cgroup_available}
    available = {name: nbytes for name, nbytes in known.items() if nbytes is not None}

    local = sum(need.nbytes for need in needs)
    if available and local * num_local_ranks > min(available.values()):
        got = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in available.items())
        ranks = counted(num_local_ranks, "rank")
        raise HostMemoryError(
            f"Expected host memory for {_sum_shown(needs)}, times {ranks} on this machine = "
            f"{format_bytes(local * num_local_ranks)}, got available: {got}."
        )


def format_bytes(nbytes: int) -> str:
    """A size as errors and logs show it: "12.00 GiB"."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def _sum_shown(needs: Sequence[HostNeed]) -> str:
    terms = [
        f"{need.what} {format_bytes(need.nbytes)}{' (pinned)' if need.is_pinned else ''}"
        for need in needs
    ]
    return f"{' + '.join(terms)} = {format_bytes(sum(need.nbytes for need in needs))}"


def _mem_available(proc: Path) -> int | None:
    for line in lines_of(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


class _Names(NamedTuple):
    """The names of a cgroup version's files, and of its counter of page cache it can drop."""

    limit: str
    usage: str
    page_cache: str


_UNLIMITED = 1 << 62  # bytes; version 1 writes "unlimited" as a number of about 2**63
_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Names("memory.max", "memory.current", "inactive_file")


def _cgroup_rooms(proc: Path, root: Path) -> Iterator[int]:
    """The bytes left in each limited cgroup of this process and above it."""
    for group in own_cgroups("memory", root, proc / "self" / "cgroup"):
        yield from _room(group.folder, _VERSION_2 if group.is_v2 else _VERSION_1)


def _room(cgroup: Path, names: _Names) -> Iterator[int]:
    """Limit less usage, not counting page cache; none for a cgroup without a limit."""
    limit, usage = lines_of(cgroup / names.limit)[:1], lines_of(cgroup / names.usage)[:1]
    if not limit or not usage or limit == ["max"] or int(limit[0]) >= _UNLIMITED:
        return

    counters = dict(line.split() for line in lines_of(cgroup / "memory.stat"))
    yield max(0, int(limit[0]) - int(usage[0]) + int(counters.get(names.page_cache, 0)))


def check_memory_on_all_ranks(
    needs: Sequence[HostNeed], num_local_ranks: int | None, mesh: DeviceMesh | None
) -> None:
    """Checks that every rank's machine has the memory that its ranks need.

    All ranks share the result: no rank continues alone, or allocates while another still looks.

    Raises:
        HostMemoryError: on all ranks of the mesh, with the sum that does not fit, or with the
            needs of the rank that failed.
    """
    if num_local_ranks is None:
        num_local_ranks = local_world_size()
    # Each rank checks its own machine, whose limits other ranks cannot read.
    failure = None
    try:
        check_host_memory(needs, num_local_ranks=num_local_ranks)
    except HostMemoryError as error:
        failure = error

    # The largest sum that does not fit anywhere; 0 where all fit.
    failed_bytes = 0 if failure is None else sum(need.nbytes for need in needs) * num_local_ranks
    device = "cpu" if mesh is None else mesh.device_type
    most = torch.tensor(failed_bytes, dtype=torch.int64, device=device)
    if mesh is not None:
        all_reduce_over(mesh, most, dist.ReduceOp.MAX, "the host memory that is missing")

    if failure is not None:
        raise failure
    if most:
        raise HostMemoryError(
            "Expected host memory on every rank's machine, got one that needs "
            f"{format_bytes(int(most))} for its ranks and has less."
        )
