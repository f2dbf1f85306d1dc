"""Which machine this is, how many ranks there are on it, which cores this one may use, and how many
ranks share them; and the control groups that this process is in, where a container's limits are.

[Note: shared cores] The cores that a process may use (its affinity) may be shared with others. A
container, or a Slurm job that torchrun divides, shows every rank the same cores, fewer than the
machine has; a task that Slurm has bound (`--cpus-per-task`) sees its own ones alone. So cores are
taken to be shared by all ranks of the machine, unless this is certain: Slurm started each rank as
its own task, and there are fewer cores than it allocated for the tasks of this machine together.
What `numactl` or another launcher binds is not recognised: there are too few threads then, never
too many.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine() -> str:
    """Identifies this machine among others, also from within containers, where Linux does."""
    return "".join(lines_of(_BOOT_ID)) or socket.gethostname()


def local_world_size() -> int:
    """Ranks on this machine, from launchers' variables."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def allowed_cores() -> frozenset[int]:
    """The numbers of the cores that this process may use; all there are, where the system does not
    report them.
    """
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def num_usable_cores() -> int:
    """As how many cores' time this process and the others in its container may use: its affinity,
    or a quota that is less.

    A container is often given the time of some cores rather than the cores: `docker --cpus 4`, or a
    limit of Kubernetes. More threads than that would all be stopped when the time is used up.
    """
    quota = cpu_quota()
    num_allowed = len(allowed_cores())
    return num_allowed if quota is None else max(1, min(num_allowed, int(quota)))


def cpu_quota(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> float | None:
    """The least of the quotas of the control groups that this process is in, in cores; None without
    any. Only Linux has them.
    """
    quotas = (_quota(group) for group in own_cgroups("cpu", cgroups, own))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: Cgroup) -> float | None:
    """Microseconds in a period, over the microseconds of the period; None for no limit: "max", or
    -1.
    """
    names = ("cpu.max",) if group.is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    words = " ".join(line for name in names for line in lines_of(group.folder / name)).split()
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def num_sharing_ranks(num_local_ranks: int) -> int:
    """How many of the machine's ranks, this one included, share `allowed_cores`. See [Note: shared
    cores].
    """
    return 1 if _is_bound_by_slurm(num_local_ranks) else num_local_ranks


def _is_bound_by_slurm(num_local_ranks: int) -> bool:
    tasks, cores_per_task = (
        os.environ.get(name, "") for name in ("SLURM_STEP_NUM_TASKS", "SLURM_CPUS_PER_TASK")
    )
    if not cores_per_task.isdigit() or "TORCHELASTIC_RUN_ID" in os.environ:
        return False
    if not tasks or tasks != os.environ.get("WORLD_SIZE"):
        return False  # one task started several ranks, which have its cores together

    # Not "as many as for one task": Slurm rounds up to whole cores of two threads.
    return len(allowed_cores()) < num_local_ranks * int(cores_per_task)


class Cgroup(NamedTuple):
    """A directory of limits, and whether it is of version 2, which has one hierarchy for all."""

    folder: Path
    is_v2: bool


def own_cgroups(controller: str, root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> Iterator[Cgroup]:
    """The groups of this process that a controller limits, and their parents.

    A path outside the container has no files under `root`; the container's own are at the top.

    Args:
        controller: "memory", or "cpu"; version 1 has a hierarchy for each.
        root: where they are mounted.
        own: the file that names this process's groups. Only Linux has it.
    """
    for line in lines_of(own):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        relative = PurePosixPath(path.lstrip("/"))
        for place in (relative, *relative.parents):
            yield Cgroup(top / place, is_v2=not controllers)


def lines_of(path: Path) -> list[str]:
    """The lines of a file; none if it does not exist or may not be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
