"""Runs of two ranks on an accelerator of which one dies, hangs or is slow: exit codes, and whom the
watchdog blames.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron.training.health.events import EventKind, read_events
from megatron.training.health.exits import ExitCode
from tests.functional_tests.helpers.runs import ROOT, environment
from tests.helpers.gpu import shared_gpu_environment
from tests.helpers.ranks import prepare_simulator
from tests.unit_tests.training.health.helpers.jobs import WAIT, free_port

# As in pretrain_gpt.py, in a process that knows the simulated accelerator.
SIMULATED = """
import sys, pretrain_gpt, tests.simulated_accelerator.device
from megatron.training.health.exits import exit_process
exit_process(pretrain_gpt.main(sys.argv[1:]))
"""
# A machine whose cores simulate devices for two ranks may keep each of them waiting.
HANG_SECONDS = {"sim": "30", "cuda": "8"}
PROGRAMS = {"sim": ["-c", SIMULATED], "cuda": ["pretrain_gpt.py"]}
FLAGS = """
    --num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 16 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 1023 --num-workers 0 --bf16
    --micro-batch-size 2 --global-batch-size 8 --log-interval 1 --train-iters 6
    --normalization RMSNorm --attention-dropout 0 --hidden-dropout 0
    --eval-interval 3 --eval-iters 2 --lr 1e-2 --lr-decay-style constant
""".split()
OFFLOADED = [
    "--optimizer-cpu-offload",
    "--overlap-cpu-optimizer-d2h-h2d",
    "--overlap-optimizer-with-forward",
]


class Fault(NamedTuple):
    """What happens to rank 1, and what must come of it."""

    injected: str
    statuses: tuple[int, int]
    event: EventKind | None  # that is written, and names rank 1
    flags: tuple[str, ...] = ()


HANGS = (int(ExitCode.HANG), int(ExitCode.HANG))
FAULTS = {
    "killed in backward": Fault(
        "kill:rank=1,step=3,at=backward", (int(ExitCode.LOST_RANK), -signal.SIGKILL), EventKind.LOST
    ),
    "hangs in forward": Fault("hang:rank=1,step=4,at=forward", HANGS, EventKind.HANG),
    "hangs in evaluation": Fault("hang:rank=1,step=3,at=evaluate", HANGS, EventKind.HANG),
    "hangs in step, offloaded": Fault(
        "hang:rank=1,step=4,at=step", HANGS, EventKind.HANG, tuple(OFFLOADED)
    ),
    "is slow": Fault("slow:rank=1,step=4,at=forward,seconds=3,times=1", (0, 0), None),
}
# Of these `make gpu-check` makes do.
QUICK = ("killed in backward", "hangs in forward", "hangs in step, offloaded")


@pytest.mark.parametrize(
    "accelerator",
    [
        pytest.param("sim", marks=(pytest.mark.sim, pytest.mark.wide)),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.wide) for name in FAULTS],
)
def test_a_rank_that_dies_or_hangs_on_an_accelerator_is_blamed(tmp_path: Path, accelerator, name):
    if accelerator == "sim":
        prepare_simulator()
    fault = FAULTS[name]
    flags = [*FLAGS, *fault.flags, "--device", accelerator, "--events-dir", str(tmp_path)]
    flags += ["--hang-timeout-seconds", HANG_SECONDS[accelerator], "--inject", fault.injected]
    # Each rank is a machine of one rank, so that both use its first device.
    ranks = {**environment(), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, *PROGRAMS[accelerator], *flags],
            cwd=ROOT,
            env={**ranks, **shared_gpu_environment(rank), "RANK": str(rank)},
            stdout=(tmp_path / f"{rank}.log").open("wb"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        statuses = tuple(process.wait(WAIT) for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()

    logs = [(tmp_path / f"{rank}.log").read_text()[-4000:] for rank in range(2)]
    assert statuses == fault.statuses, "\n".join(logs)
    events = list(read_events(tmp_path))
    blamed = [
        (event["event"], event["ranks"])
        for event in events
        if event["event"] in (EventKind.LOST, EventKind.HANG)
    ]
    assert blamed == ([(fault.event.value, [1])] if fault.event else [])
    assert sum(event["event"] == EventKind.INJECT for event in events) == 1
