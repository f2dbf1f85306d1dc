"""How a benchmark is started."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.helpers.benchmark import Benchmark


class Command(NamedTuple):
    """A command line with its environment."""

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
