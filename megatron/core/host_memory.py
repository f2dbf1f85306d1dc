"""Host memory in exact-size slabs, pinned once, and the check that it fits before any of it is
allocated.

[Note: slabs] A slab is one private anonymous mapping. Allocators round: the C library keeps what it
was given back, and the pinned memory of torch grows to the next power of two, which for 33 GiB of
moments is 31 GiB for nothing. A mapping has the size that was asked for, is zero without being
touched, and goes back to the system when it ends.

Many arrays share a slab, so that it is pinned with one call and its huge pages are not split
between them:

    slab     |array 0      |..|array 1    |.|array 2          |
    offset   0             ^  64 * k        64 * l            nbytes
                           up to 63 bytes, so that every array begins on a cache line
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

from megatron.core.device import Device
from megatron.core.numa import prefer_node

ARRAY_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load
_HUGE_PAGE = 2 << 20  # bytes


class HostMemoryError(MemoryError):
    """The host does not have the memory that a run needs."""


class HostSlab:
    """One piece of host memory, zero at first. See [Note: slabs].

    The memory and its pin are given back when the slab and the last tensor in it are gone; copies
    from and to the device must be done by then. A process forked from this one does not have the
    slab: were it shared until written, every page written here would be held twice from then on.
    """

    def __init__(self, nbytes: int, device: Device, *, is_pinned: bool, purpose: str) -> None:
        """Maps the memory, and pins it.

        Args:
            nbytes: exact size; 0 is a slab without memory.
            device: whose copies are to reach it directly, if it is pinned.
            is_pinned: whether to pin it, where the device pins at all.
            purpose: what it is for, as errors name it: "moments".

        Raises:
            ValueError: for a negative size.
            HostMemoryError: if the system does not map as much.
            PinError: if it cannot be pinned; the memory has been given back then.
        """
        if nbytes < 0:
            raise ValueError(f"Expected a size of at least 0 bytes for {purpose}, got {nbytes}.")
        self.nbytes = nbytes
        self.is_pinned = is_pinned and device.pins_host_memory
        self._purpose = purpose
        self._begin = 0  # bytes from the beginning of the mapping
        self._memory = memoryview(b"")
        if nbytes:
            self._map(device)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The array of `numel` elements of `dtype` at `offset`, flat, with a storage of its own
        size.

        Args:
            offset: bytes from the beginning of the slab, a multiple of the element size.

        Raises:
            ValueError: for an array that does not lie in the slab, or not on a multiple of its
                element size.
        """
        if not numel:
            return torch.empty(0, dtype=dtype)
        end = offset + numel * dtype.itemsize
        if min(offset, numel) < 0 or end > self.nbytes or offset % dtype.itemsize:
            raise ValueError(
                f"Expected an aligned array within the {self.nbytes} bytes for {self._purpose}, "
                f"got {numel} elements "
                f"of {dtype} at byte {offset}."
            )
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=self._begin + offset)

    def _map(self, device: Device) -> None:
        try:
            # A huge page more than is used: the system places a mapping where it likes. What is not
            # touched costs addresses only.
            mapping = mmap.mmap(
                -1, self.nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, OverflowError) as error:
            raise HostMemoryError(
                f"Expected {format_bytes(self.nbytes)} of host memory for {self._purpose}, got: "
                f"{error}."
            ) from error
        self._memory = memoryview(mapping)
        address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        self._begin = -address % _HUGE_PAGE
        _advise(mapping, self._begin, self.nbytes)
        node = device.numa_node
        if node is not None:
            # Before the first touch, which is when a page gets its place; pinning touches all of
            # them.
            prefer_node(address + self._begin, self.nbytes, node)
        if self.is_pinned:
            try:
                device.pin(address + self._begin, self.nbytes)
            except BaseException:
                # The traceback keeps this frame, and with it the mapping, of which pinning may have
                # touched every page.
                self._memory.release()
                mapping.close()
                raise
            # Tensors hold the view. The finalizer holds the mapping, which thus outlasts its pin.
            release = weakref.finalize(
                self._memory, _unpin, mapping, device, address + self._begin, os.getpid()
            )
            # The end of the process gives everything back, and copies may still be on their way
            # then.
            release.atexit = False


class SlabBuilder:
    """Adds up arrays, then makes the slab that holds them to the byte. See [Note: slabs]."""

    def __init__(self) -> None:
        self.nbytes = 0  # up to the end of the last array

    def add(self, numel: int, dtype: torch.dtype) -> int:
        """Takes in an array of `numel` elements. Returns its offset in bytes, for
        `HostSlab.tensor`.

        Raises:
            ValueError: for a negative number of elements.
        """
        if numel < 0:
            raise ValueError(f"Expected at least 0 elements, got {numel}.")
        offset = -(-self.nbytes // ARRAY_ALIGNMENT) * ARRAY_ALIGNMENT
        if numel:
            self.nbytes = offset + numel * dtype.itemsize
        return offset

    def build(self, device: Device, *, is_pinned: bool, purpose: str) -> HostSlab:
        """The slab, of `nbytes` bytes. Raises what `HostSlab` does."""
        return HostSlab(self.nbytes, device, is_pinned=is_pinned, purpose=purpose)


def _advise(mapping: mmap.mmap, begin: int, nbytes: int) -> None:
    """Asks for huge pages, before anything is touched or pinned, and that forked processes do
    without the mapping.
    """
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        # Each system has its own, and a kernel without huge pages refuses the wish.
        with contextlib.suppress(AttributeError, OSError):
            # To the end of the last page used and no further: a huge page must not reach beyond the
            # slab.
            mapping.madvise(getattr(mmap, name), begin, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)


def _unpin(mapping: mmap.mmap, device: Device, address: int, owner: int) -> None:  # noqa: ARG001 (kept until here)
    # A forked process has inherited the slab's objects, but neither its memory nor the use of the
    # device.
    if os.getpid() == owner:
        device.unpin(address)


class HostNeed(NamedTuple):
    """One term of what a rank needs in host memory."""

    what: str  # "main weights"
    nbytes: int
    # whether the device will pin it; nothing is pinned for a device without `pins_host_memory`
    is_pinned: bool


@dataclass(frozen=True)
class HostLimits:
    """What this machine can still give, in bytes. None: no limit is known.

    RLIMIT_MEMLOCK is not among them: it bounds mlock, while GPU drivers lock pages by themselves
    and do not ask it. To go by it would refuse runs in most containers, where it is 64 KiB or 8
    MiB.
    """

    mem_available: int | None  # of the machine: free, or page cache that can be given up
    cgroup_available: (
        int | None
    )  # of the tightest cgroup this process is in, its page cache counted as available

    @classmethod
    def read(cls, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> HostLimits:
        """The limits of the moment. Where a file is missing (no Linux, no such controller), it
        limits nothing.
        """
        return cls(_mem_available(proc), min(_cgroup_rooms(proc, cgroup), default=None))

    @property
    def available(self) -> int | None:
        """What there is by all limits that are known; None if none is."""
        known = [
            nbytes for nbytes in (self.mem_available, self.cgroup_available) if nbytes is not None
        ]
        return min(known, default=None)


def check_host_memory(
    needs: Sequence[HostNeed], *, num_local_ranks: int, limits: HostLimits | None = None
) -> None:
    """Refuses a run whose host memory would not fit, before any of it is allocated.

    Every rank of the machine must have passed before one of them allocates: what a rank has taken
    is no longer available to the check of another.

    Args:
        needs: what this rank needs; its neighbours are taken to need the same.
        num_local_ranks: ranks on this machine, which share its memory and its cgroup.
        limits: by default those of the moment.

    Raises:
        HostMemoryError: with the sum, term by term, and the limits.
    """
    limits = HostLimits.read() if limits is None else limits
    known = {"MemAvailable": limits.mem_available, "cgroup": limits.cgroup_available}
    available = {name: nbytes for name, nbytes in known.items() if nbytes is not None}
    local = sum(need.nbytes for need in needs)
    if available and local * num_local_ranks > min(available.values()):
        got = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in available.items())
        raise HostMemoryError(
            f"Expected host memory for {_sum_shown(needs)}, times {num_local_ranks} ranks on this "
            "machine = "
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
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


class _Names(NamedTuple):
    """What the files of a cgroup version are called, and its word for the page cache that can be
    given up.
    """

    limit: str
    usage: str
    page_cache: str


_UNLIMITED = 1 << 62  # bytes: version 1 has no word for it, but a number about 2**63
_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Names("memory.max", "memory.current", "inactive_file")


def _cgroup_rooms(proc: Path, root: Path) -> Iterator[int]:
    """What each limited cgroup above and around this process has left, in bytes.

    A path that names a place outside the container has no files under `root`; the container's own
    are at the top.
    """
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = (root / "memory", _VERSION_1) if controllers else (root, _VERSION_2)
        relative = PurePosixPath(path.lstrip("/"))
        for place in (relative, *relative.parents):
            yield from _room(top / place, names)


def _room(cgroup: Path, names: _Names) -> Iterator[int]:
    """Limit less usage, page cache left out; nothing for a cgroup without a limit."""
    limit, usage = _lines(cgroup / names.limit)[:1], _lines(cgroup / names.usage)[:1]
    if not limit or not usage or limit == ["max"] or int(limit[0]) >= _UNLIMITED:
        return
    counters = dict(line.split() for line in _lines(cgroup / "memory.stat"))
    yield max(0, int(limit[0]) - int(usage[0]) + int(counters.get(names.page_cache, 0)))


def _lines(path: Path) -> list[str]:
    """The lines of a file; none where there is no such file, or it may not be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
