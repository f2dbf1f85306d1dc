"""The stages, in order. Standard library only: the runner must not depend on what it checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stage:
    """One process.

    Attributes:
        function: `module:name` of what it calls, with its `Findings`.
        limit_seconds: after which it is killed.
        least_seconds: below which it is not worth beginning; the stage is skipped then.
        runs_alone: whether nothing may run beside it, since it measures time. The others share the
            GPU.
        keeps_time: whether its least seconds are kept for it, however much the stages before it
            take.
        environment: variables of its process, and so of its ranks.
    """

    name: str
    function: str
    help: str
    limit_seconds: float
    least_seconds: float = 10.0
    runs_alone: bool = False
    keeps_time: bool = False
    environment: dict[str, str] = field(default_factory=dict)


_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
_HERE = "tools.gpu_check"

STAGES: tuple[Stage, ...] = (
    Stage(
        "facts",
        f"{_HERE}.facts:facts",
        "the machine, its GPU, and which dependencies are missing",
        90,
        5,
        True,
    ),
    Stage("build", f"{_HERE}.facts:build", "compiles the host kernel", 90, 5, True),
    Stage(
        "lanes",
        f"{_HERE}.links:lanes",
        "order and overlap of lanes, pinning, the link to the device",
        60,
        10,
        True,
    ),
    Stage(
        "host",
        f"{_HERE}.links:host",
        "host memory bandwidth of the Adam pass by number of threads",
        45,
        8,
        True,
    ),
    Stage(
        "nccl",
        f"{_HERE}.two_ranks:probe",
        "which backend carries two ranks on one GPU",
        100,
        15,
        True,
    ),
    Stage(
        "adam", f"{_HERE}.adam:adam", "the Triton pass against the host kernel, bit for bit", 90, 15
    ),
    Stage(
        "documents",
        f"{_HERE}.documents:documents",
        "attention of documents by one kernel, against one after the other",
        60,
        10,
    ),
    Stage(
        "one_rank",
        f"{_HERE}.one_rank:plain",
        "every configuration on one rank: bits, synchronisations, allocations",
        150,
        20,
        environment=_DETERMINISTIC,
    ),
    Stage(
        "one_rank_delayed",
        f"{_HERE}.one_rank:delayed",
        "the same, with random pauses of the device before lane work",
        150,
        20,
        environment=_DETERMINISTIC,
    ),
    Stage(
        "one_rank_blocking",
        f"{_HERE}.one_rank:blocking",
        "the same, with every kernel waited for (CUDA_LAUNCH_BLOCKING=1)",
        150,
        20,
        environment={**_DETERMINISTIC, "CUDA_LAUNCH_BLOCKING": "1"},
    ),
    Stage(
        "two_ranks",
        f"{_HERE}.two_ranks:train",
        "every configuration on two ranks that share the GPU",
        180,
        30,
        environment=_DETERMINISTIC,
    ),
    Stage(
        "saves",
        f"{_HERE}.saves:saves",
        "saves beside training against a snapshot, loads, two ranks' checkpoint on one",
        120,
        25,
        environment=_DETERMINISTIC,
    ),
    Stage(
        "watchdog", f"{_HERE}.drills:drills", "ranks that die or hang, and who is blamed", 120, 40
    ),
    Stage(
        "bits",
        f"{_HERE}.verdict:bits",
        "whether the runs of one rank gave the same bits",
        30,
        2,
        True,
    ),
    Stage(
        "speed_device",
        f"{_HERE}.speed:device",
        "a 3B model with everything on the device",
        90,
        30,
        True,
    ),
    Stage(
        "speed_offload",
        f"{_HERE}.speed:offload_all",
        "the same, the optimizer in host memory",
        120,
        40,
        True,
    ),
    Stage(
        "speed_bf16",
        f"{_HERE}.speed:offload_bf16_moments",
        "all of it, with bf16 moments",
        110,
        40,
        True,
    ),
    Stage("speed_half", f"{_HERE}.speed:offload_half", "the same, half of it", 110, 40, True),
    Stage(
        "speed_fsdp2", f"{_HERE}.speed:fsdp2", "PyTorch FSDP2 with CPUOffloadPolicy", 120, 45, True
    ),
    Stage(
        "speed_verdict",
        f"{_HERE}.verdict:speed",
        "the bars, and measured against predicted",
        30,
        4,
        True,
        True,
    ),
)


def selected(stages: Sequence[Stage], names: str | None) -> list[Stage]:
    """The named stages, in the table's order; None: all. ValueError for an unknown name."""
    if names is None:
        return list(stages)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = sorted(set(wanted).difference(stage.name for stage in stages))
    if unknown or not wanted:
        known = ", ".join(stage.name for stage in stages)
        raise ValueError(
            f"--stages: expected names among {known}, got {', '.join(unknown) or 'none'}."
        )
    return [stage for stage in stages if stage.name in wanted]
