"""How many threads update weights in host memory for a rank, and on which cores.

With an accelerator, the threads that launch its kernels (the main thread, and autograd's) must
never wait for a core: the device would idle. So host threads leave two cores for each rank alone.
On a machine with several sockets they run near to the rank's device, where its host memory is. Two
ranks of 16 cores, devices on either node:

    node 0   cores 0 1 | 2 3 4 5 6 7        rank 0: 6 threads on cores 2 to 7
    node 1   cores 8 9 | 10 ... 15          rank 1: 6 threads on cores 10 to 15

Cores that Slurm has bound to one rank are not divided again; see local_ranks' [Note: shared cores].
A container's quota that is less than its cores is divided instead. OMP_NUM_THREADS, which launchers
set to 1, is ignored: it applies to the operators of the model.

On the CPU as a device the main thread waits for the host threads anyway, and they have all of a
rank's cores.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from megatron.core import numa
from megatron.core.device import Device
from megatron.core.drivers import driver_of
from megatron.core.local_ranks import allowed_cores, num_sharing_ranks, num_usable_cores
from megatron.core.log import counted

LAUNCHING_CORES = 2  # for each rank


class HostThreads(NamedTuple):
    """The threads of one rank; `cores` is None where they may run on any that the process may
    use.
    """

    number: int
    cores: Collection[int] | None

    def __str__(self) -> str:
        where = "any core" if self.cores is None else f"cores {_ranges(self.cores)}"
        allowed, usable = len(allowed_cores()), num_usable_cores()
        quota = "" if usable == allowed else f", of which a quota leaves {usable}"
        threads, cores = counted(self.number, "thread"), counted(allowed, "core")
        return f"{threads} a rank on {where}; {cores} allowed{quota}"


def _ranges(cores: Collection[int]) -> str:
    """Numbers as Linux lists them: "0-3,8"."""
    found: list[list[int]] = []
    for core in sorted(cores):
        if found and core == found[-1][-1] + 1:
            found[-1] = [found[-1][0], core]
        else:
            found.append([core])
    return ",".join("-".join(map(str, run)) for run in found)


def host_threads(
    device: Device, num_local_ranks: int, number: int | None = None, nodes: Path = numa.NODES
) -> HostThreads:
    """The host threads of one of the ranks of this machine.

    Args:
        device: the rank's.
        num_local_ranks: ranks on this machine, which share its cores unless they are bound to some
            each.
        number: how many threads; default: a rank's share of the cores, less the cores of the
            launching threads.
    """
    share, cores = _share_and_cores(device, num_local_ranks, nodes)
    return HostThreads(share if number is None else number, cores)


def _share_and_cores(
    device: Device, num_local_ranks: int, nodes: Path
) -> tuple[int, list[int] | None]:
    """A rank's share of the cores, and the ones they may run on, as in `HostThreads`."""
    allowed, num_sharing = allowed_cores(), num_sharing_ranks(num_local_ranks)
    num_usable = num_usable_cores()
    if not device.is_accelerator:
        return max(1, num_usable // num_sharing), None

    node = device.numa_node
    near = frozenset() if node is None else numa.cpus_of_node(node, nodes) & allowed
    if node is None or not near:
        return _share(num_usable, num_sharing), None

    num_ranks = min(num_sharing, _num_ranks_near(device, node, num_local_ranks, nodes))
    num_kept = num_ranks * LAUNCHING_CORES
    number = min(_share(len(near), num_ranks), _share(num_usable, num_sharing))
    return number, sorted(near)[num_kept:] if len(near) > num_kept else None


def _share(num_cores: int, num_ranks: int) -> int:
    # One at least, though on so few cores it competes with the threads that launch.
    return max(1, num_cores // num_ranks - LAUNCHING_CORES)


def _num_ranks_near(device: Device, node: int, num_local_ranks: int, nodes: Path) -> int:
    """How many ranks of this machine have their device on a node."""
    if driver_of(device.kind).device_count() < num_local_ranks:
        # Each process sees its own device only: they are spread evenly, most likely.
        return -(-num_local_ranks // numa.num_nodes(nodes))
    return (
        sum(Device(device.kind, index).numa_node == node for index in range(num_local_ranks)) or 1
    )
