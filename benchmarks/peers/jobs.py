"""Jobs: the ranks of a side, as processes that wait to be told what to do."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.peers.protocol import Channel, ClosedError, first_ready
from benchmarks.runner.registry import ROOT

_TAIL_LINES = 12
_ANSWER_SECONDS = 600.0
_STOP_SECONDS = 60.0


class JobError(Exception):
    """A rank failed, ended or hung. The message has the rank, the cause, and its last output."""


@dataclass(frozen=True)
class Conversion:
    """How a checkpoint is converted for another number of ranks.

    Attributes:
        program: A module of the peer's, which takes `--input_folder` and `--output_folder`.
        module: Of `benchmarks.peers`; loads the outcome.
    """

    program: str
    module: str


@dataclass(frozen=True)
class Side:
    """One of the things compared.

    Attributes:
        name: For people.
        python: The interpreter of its environment.
        module: Of `benchmarks.peers`.
        variables: Of its processes' environment.
        converted: What loads on another number of ranks if `module` itself does not.
    """

    name: str
    python: Path
    module: str
    variables: tuple[tuple[str, str], ...] = ()
    converted: Conversion | None = None

    def environment(self, variables: Mapping[str, str] | None = None) -> dict[str, str]:
        """Of a process of this side, with these variables."""
        # Compilers' helpers of an environment (ninja) are found on the path alone.
        path = os.pathsep.join([str(self.python.parent), os.environ.get("PATH", "")])
        own = {"PYTHONPATH": str(ROOT), "PATH": path, **dict(self.variables)}
        return {**os.environ, **own, **(variables or {})}


class Job:
    """A context manager: all of its processes have ended after the block.

    All ranks get the same commands, and reply together.
    """

    def __init__(
        self,
        side: Side,
        num_ranks: int,
        training: dict[str, Any],
        log: Path,
        *,
        rank_module: str = "benchmarks.peers.rank",
    ) -> None:
        """
        Args:
            training: `Training.to_plain()`.
            log: File to which the output of the ranks is appended.
            rank_module: Module that a rank runs.
        """
        self.side = side
        self._log = log
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-job-")
        self._has_failed = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        command = [str(side.python), "-m", rank_module, "--side", side.module]
        command += ["--training", json.dumps(training), "--store", f"{self._folder.name}/store"]
        port = str(_free_port())
        with log.open("ab") as stream:
            for rank in range(num_ranks):
                environment = side.environment(_rank_variables(rank, num_ranks, port))
                self._start(command, environment, stream)

    def _start(self, command: list[str], environment: dict[str, str], log: IO[bytes]) -> None:
        to_rank, from_rank = os.pipe(), os.pipe()
        theirs = (to_rank[0], from_rank[1])
        self._processes.append(
            subprocess.Popen(
                [*command, "--channel", *map(str, theirs)],
                cwd=ROOT,
                env=environment,
                pass_fds=theirs,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
        for descriptor in theirs:
            os.close(descriptor)
        self._channels.append(Channel(from_rank[0], to_rank[1]))

    def wait_built(self) -> None:
        """JobError unless all ranks have built their trainers. Call it before anything else."""
        self._answers(_ANSWER_SECONDS)

    def ask(
        self, command: str, *, timeout_seconds: float = _ANSWER_SECONDS, **arguments: Any
    ) -> list[dict[str, Any]]:
        """Each rank's reply. JobError if one does not reply in time."""
        for number, channel in enumerate(self._channels):
            try:
                channel.send({"command": command, **arguments})
            except ClosedError:
                raise self._failed(self._ended(number)) from None
        return self._answers(timeout_seconds)

    def _answers(self, timeout_seconds: float) -> list[dict[str, Any]]:
        """Of all ranks, whichever comes first: one that fails leaves others waiting for it."""
        answers: dict[int, dict[str, Any]] = {}
        pending = dict(zip(self._channels, range(len(self._channels)), strict=True))
        deadline = time.monotonic() + timeout_seconds
        while pending:
            ready = first_ready(pending, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failed(
                    f"Expected a reply of {self.side.name} within {timeout_seconds:g} s, "
                    f"got none from ranks {sorted(pending.values())}."
                )
            for channel in ready:
                number = pending.pop(channel)
                answers[number] = self._answer(channel, number)
        return [answers[number] for number in sorted(answers)]

    def _answer(self, channel: Channel, number: int) -> dict[str, Any]:
        try:
            message = channel.receive()
        except ClosedError:
            raise self._failed(self._ended(number)) from None
        if "error" in message:
            raise self._failed(f"{self.side.name}, rank {number}: {message['error']}")
        answer: dict[str, Any] = message["answer"]
        return answer

    def _ended(self, number: int) -> str:
        try:
            how = f"ended with code {self._processes[number].wait(_STOP_SECONDS)}"
        except subprocess.TimeoutExpired:
            how = "without its pipe"
        return f"Expected {self.side.name} to continue, got rank {number} {how}."

    def _failed(self, message: str) -> JobError:
        """An error with the last output. All ranks are killed, since the remaining ones may wait
        for one that has ended.
        """
        self._has_failed = True
        for process in self._processes:
            _kill_group(process)
        lines = self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return JobError(message + "".join(f"\n    {line}" for line in lines))

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and not self._has_failed:
                self._stop()
        finally:
            for process in self._processes:
                # Also of one that has ended: it may have started others.
                _kill_group(process)
                process.wait()
            for channel in self._channels:
                channel.close()
            self._folder.cleanup()

    def _stop(self) -> None:
        """Lets the ranks end by themselves, and kills the others afterwards."""
        try:
            for channel in self._channels:
                channel.send({"command": "stop"})
            for process in self._processes:
                process.wait(_STOP_SECONDS)
        except (ClosedError, subprocess.TimeoutExpired):
            return


def _rank_variables(rank: int, num_ranks: int, port: str) -> dict[str, str]:
    """As torchrun sets them, and as DeepSpeed's launcher does (LOCAL_SIZE, CROSS_...)."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "LOCAL_SIZE": str(num_ranks),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        # Ranks that share cores slow each other down otherwise.
        "OMP_NUM_THREADS": "1",
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
