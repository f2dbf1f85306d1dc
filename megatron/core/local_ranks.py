"""How many ranks there are on this machine, which cores this one may use, and how many ranks share
them.

[Note: shared cores] The cores that a process may use (its affinity) do not tell whether they are
its own. A container, or a Slurm job that torchrun divides, shows every rank the same cores, fewer
than the machine has; a task that Slurm has bound (`--cpus-per-task`) sees its own ones alone. So
cores are taken to be shared by all ranks of the machine, unless this is certain: Slurm started each
rank as a task of its own, and there are fewer cores than it allocated for the tasks of this machine
together. What `numactl` or another launcher binds is not recognised: there are too few threads
then, never too many.
"""

from __future__ import annotations

import os


def local_world_size() -> int:
    """Ranks on this machine, as launchers say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def allowed_cores() -> frozenset[int]:
    """The numbers of the cores that this process may use; all there are, where the system does not
    tell.
    """
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


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
