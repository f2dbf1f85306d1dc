"""Which memory and cores of a machine with several sockets are near to each other. Only Linux
reports it.

A node is a socket's memory and cores, or a part of these. Cores of one node reach the memory and
the devices of another through the link between sockets, which all of them share. All of this is
advice: where the system does not report it, or does not let a container choose, everything works as
without it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

NODES = Path("/sys/devices/system/node")
_MBIND = {
    "x86_64": 237,
    "aarch64": 235,
}  # numbers of the system call, which the C library does not wrap
_MPOL_PREFERRED = 1  # not MPOL_BIND: a node that is full must not end the program
_TOUCHING_THREADS = 8
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

_binds = [True]  # of this process


def set_binding(*, is_on: bool) -> None:
    """Whether this process puts host memory, and the threads that work on it, near to devices. What
    is there already stays where it is.
    """
    _binds[0] = is_on


def is_binding() -> bool:
    """See `set_binding`."""
    return _binds[0]


def cpus_of_node(node: int, nodes: Path = NODES) -> frozenset[int]:
    """The cores of a node, offline ones left out; none if there is no such node."""
    try:
        return parse_cpus((nodes / f"node{node}" / "cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def num_nodes(nodes: Path = NODES) -> int:
    """How many nodes with cores there are; at least 1."""
    found = [path.name.removeprefix("node") for path in nodes.glob("node*")]
    return max(1, sum(bool(cpus_of_node(int(name), nodes)) for name in found if name.isdigit()))


def parse_cpus(text: str) -> frozenset[int]:
    """Numbers as Linux lists them: "0-3,8" is 0, 1, 2, 3 and 8. ValueError for anything else."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, dash, last = part.partition("-")
            found.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(found)


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Requests pages of a node, where there are any left, for memory that has been mapped and not
    been touched yet.

    Args:
        address: where the memory starts, a multiple of the page size.

    Returns:
        Whether the system will.
    """
    number = _MBIND.get(platform.machine())
    libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    if number is None or libc is None or not hasattr(libc, "syscall"):
        return False

    words = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
    words[node // _WORD_BITS] = 1 << node % _WORD_BITS
    num_bits = len(words) * _WORD_BITS + 1  # the kernel reads one bit less than it is told of
    arguments = (address, nbytes, _MPOL_PREFERRED, ctypes.addressof(words), num_bits, 0)
    status = libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments))
    if status != 0:
        # Containers often forbid it, and some kernels do not have it.
        logger.debug(
            "Host memory is not placed on node %d: %s.", node, os.strerror(ctypes.get_errno())
        )
    return bool(status == 0)


def touch_from_node(address: int, nbytes: int, node: int, nodes: Path = NODES) -> None:
    """Has threads on a node's cores write zeros to memory, which is zero and has not been touched
    yet. The system takes a page from the node of the core that touches it first.

    Containers that forbid `prefer_node` allow this. Without cores there that this process may use,
    it has no effect.
    """
    cores = cpus_of_node(node, nodes) & os.sched_getaffinity(0)
    if not cores:
        return

    def touch(begin: int) -> None:
        with suppress(OSError):  # the cores that are allowed may change at any time
            os.sched_setaffinity(0, cores)  # of this thread alone
        ctypes.memset(address + begin, 0, min(part, nbytes - begin))

    num_threads = min(len(cores), _TOUCHING_THREADS)
    part = -(-nbytes // (num_threads * mmap.PAGESIZE)) * mmap.PAGESIZE
    with ThreadPoolExecutor(num_threads, "touching memory") as threads:
        for _ in threads.map(touch, range(0, nbytes, part)):
            pass
