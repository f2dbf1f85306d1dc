"""How much host memory there is, even where a machine is given its memory as it uses it."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

from megatron.core.host_memory import HostLimits

_STEP_BYTES = 1 << 30
_KEPT_FREE = 2 << 30  # for the stage itself, and what else runs


def grown_host_memory(wanted: int) -> int:
    """Bytes available, after having touched memory up to `wanted` where the machine showed less at
    first.

    A virtual machine may be given its memory as it uses it. What is touched here is given back, and
    stays the machine's. Where nothing has grown after half of what was available, nothing will.
    """
    total, first = total_bytes(), available_bytes()
    touched: list[mmap.mmap] = []
    while (room := available_bytes()) < wanted and room > _KEPT_FREE:
        num_bytes = len(touched) * _STEP_BYTES
        if num_bytes >= wanted or (num_bytes > first // 2 and total_bytes() == total):
            break
        block = mmap.mmap(-1, _STEP_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # One byte a page makes it resident.
        block[:: mmap.PAGESIZE] = b"\1" * (_STEP_BYTES // mmap.PAGESIZE)
        touched.append(block)
    for block in touched:
        block.close()
    return available_bytes()


def available_bytes() -> int:
    """What this process may still take: of the machine and of its control group."""
    limits = HostLimits.read()
    known = [room for room in (limits.mem_available, limits.cgroup_available) if room is not None]
    return min(known, default=1 << 62)


def total_bytes() -> int:
    """The memory of the machine, at the moment."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0
