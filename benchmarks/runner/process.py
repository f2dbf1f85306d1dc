"""A benchmark's process: its command, and that it ends when the runner does."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from benchmarks.helpers.benchmark import Benchmark

# torchrun gives its ranks 30 s to end before it kills them; alone it could not, once killed.
_GRACE_SECONDS = {signal.SIGINT: 10.0, signal.SIGTERM: 35.0}


class Command(NamedTuple):
    """How a benchmark is started."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    shown: str  # as one types it, without paths of this machine

    @classmethod
    def of(
        cls, benchmark: Benchmark, arguments: Sequence[str], package: str, root: Path
    ) -> Command:
        module = f"{package}.{benchmark.name}"
        python = _interpreter(benchmark, root)
        paths = (str(root), os.environ.get("PYTHONPATH", ""))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if benchmark.ranks == 1:
            words, shown = (python, "-m", module), ("python", "-m", module)
        else:
            environment["OMP_NUM_THREADS"] = "1"  # ranks that share cores slow each other down
            launch = ("--standalone", "--nproc-per-node", str(benchmark.ranks), "-m", module)
            words = (python, "-m", "torch.distributed.run", *launch)
            shown = ("torchrun", *launch)
        return cls((*words, *arguments), environment, shlex.join((*shown, *arguments)))


def _interpreter(benchmark: Benchmark, root: Path) -> str:
    """The peer's where its environment has been made; elsewhere this one, where the benchmark hands
    over that the peer's side was not run.
    """
    if benchmark.environment is None:
        return sys.executable
    python = root / ".venv-peers" / benchmark.environment / "bin" / "python"
    return str(python) if python.exists() else sys.executable


@contextmanager
def started(command: Command, root: Path, log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process, in a session of its own, of which nothing is left after the block."""
    process = subprocess.Popen(
        command.words,
        cwd=root,
        env=command.environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks first, so that temporary folders are removed, and torchrun ends its ranks."""
    try:
        for sent, grace in _GRACE_SECONDS.items():
            if process.poll() is not None:
                break
            _signal_group(process, sent)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace)
    finally:
        # Also once the process is gone: ranks that it has started may still be there.
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
