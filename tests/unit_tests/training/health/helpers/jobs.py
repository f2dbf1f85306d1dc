"""Jobs whose ranks die, hang, stop and fail, in separate processes instead of the pool of
`tests/helpers/ranks.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from megatron.core import log
from megatron.core.device import Device
from megatron.training.health.events import EventLog, read_events
from megatron.training.health.exits import (
    ExitCode,
    ExitError,
    code_of,
    exit_process,
    is_foreseen,
    process_status,
)
from megatron.training.health.progress import Phase
from megatron.training.health.watchdog import Watchdog
from megatron.training.launch import Launch, process_group

WAIT = 300.0  # seconds, for expected events
TIMEOUT = 1.0  # --hang-timeout-seconds
NAMES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_RESTART_COUNT",
)
Body = Callable[["Rank"], None]


@dataclass
class Rank:
    """The arguments of a rank's body."""

    rank: int
    world_size: int
    watchdog: Watchdog
    pipe: Any

    def ready(self) -> None:
        """Reports to the test that this rank is here and has the others' members."""
        while not self.watchdog._roll_call.knows_all:
            time.sleep(0.01)
        self.pipe.send("ready")

    def train(self, fault: Callable[[], None], at: int = 3, iterations: int = 10**9) -> None:
        """Iterations with one all-reduce each; before that of iteration `at`, on every rank, the
        fault.
        """
        tensor = torch.ones(1000)
        for iteration in range(1, iterations + 1):
            self.watchdog.mark(Phase.FORWARD, iteration)
            if iteration == at:
                fault()
            self.watchdog.mark(Phase.AGREE, iteration)
            dist.all_reduce(tensor)
            self.watchdog.mark(Phase.STEP, iteration)
            if iteration >= at:
                time.sleep(0.01)  # leaves the cores to others


def live(rank: int, environment: dict[str, str], folder: str, job: bytes, pipe: Any) -> None:
    """The main function of a rank's process, as in `pretrain_gpt.py`."""
    output = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests' parent may ignore it
    torch.set_num_threads(1)
    body, options = cloudpickle.loads(job)
    launch = Launch.from_environment()
    log.configure(rank)
    code = ExitCode.FINISHED
    try:
        with process_group(launch, Device("cpu"), 1.0):
            watchdog = Watchdog(
                launch=launch,
                store=dist.distributed_c10d._get_default_store(),
                events=EventLog(folder, rank=rank),
                **{"hang_timeout_seconds": None, "tick_seconds": 0.2, **options},
            )
            with watchdog:
                guarded(body, Rank(rank, launch.world_size, watchdog, pipe))
    except BaseException as error:
        code = code_of(error)
        if not is_foreseen(error):
            traceback.print_exc()
    exit_process(process_status(code, launch.is_elastic))


def guarded(body: Body, rank: Rank) -> None:
    try:
        body(rank)
    except BaseException as error:
        if is_foreseen(error):
            raise
        cause = rank.watchdog.explain(error)
        if cause.is_own:
            raise
        raise ExitError(cause.code, cause.text, is_reported=True) from error


class Job:
    """The processes of one job, and their output."""

    def __init__(
        self, folder: Path, body: Body, world_size: int, is_elastic: bool, **options: Any
    ) -> None:
        self.folder = folder
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "megatron.training.health.watchdog"])
        if is_elastic:  # as under torchrun, whose agent holds the store; here it is this process
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port if is_elastic else free_port()
        self.processes: list[Any] = []
        self.pipes: list[Any] = []
        for rank in range(world_size):
            environment = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": world_size,
            }
            environment = {name: str(value) for name, value in environment.items()}
            environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            if is_elastic:
                environment.update(TORCHELASTIC_RUN_ID="test", TORCHELASTIC_USE_AGENT_STORE="True")
            ours, theirs = context.Pipe()
            job = cloudpickle.dumps((body, options))
            process = context.Process(
                target=live, args=(rank, environment, str(folder), job, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def wait_until_ready(self) -> None:
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(WAIT), f"rank {rank} did not become ready:\n{self.output(rank)}"
            pipe.recv()

    def kill(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid, number)

    def end(self, *ranks: int) -> list[int]:
        """The exit codes of ranks (default: all), once they have ended."""
        deadline = time.monotonic() + WAIT
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].join(max(0.0, deadline - time.monotonic()))
        codes = [self.processes[rank].exitcode for rank in ranks or range(len(self.processes))]
        assert None not in codes, f"within {WAIT} s: {codes}\n{self.outputs()}"
        return codes

    def output(self, rank: int) -> str:
        path = self.folder / f"{rank}.log"
        return path.read_text() if path.exists() else ""

    def outputs(self) -> str:
        return "\n".join(
            f"-- rank {rank}\n{self.output(rank)}" for rank in range(len(self.processes))
        )

    def causes(self) -> list[str]:
        """The errors in the logs of all ranks."""
        lines = [
            line for rank in range(len(self.processes)) for line in self.output(rank).splitlines()
        ]
        return [line.partition("ERROR: ")[2] for line in lines if "ERROR: " in line]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.folder) if event["event"] in kinds]

    def name(self, rank: int) -> str:
        return f"rank {rank} ({socket.gethostname()}, pid {self.processes[rank].pid})"


def free_port() -> int:
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def training(rank: Rank) -> None:
    """Trains for ever, well."""
    rank.train(rank.ready)


def forever() -> None:
    threading.Event().wait()


def in_c(holds_gil: bool = False) -> None:
    """Sleeps in C, where no signal handler runs. Other threads run unless it has the GIL."""
    libc = ctypes.PyDLL(None) if holds_gil else ctypes.CDLL(None)
    while True:
        libc.sleep(1000)


def on(victim: int, fault: Callable[[], None]) -> Body:
    """Training in which one rank has a fault."""

    def body(rank: Rank) -> None:
        def strike() -> None:
            rank.ready()
            if rank.rank == victim:
                fault()

        rank.train(strike)

    return body
