"""Runs a job of `tests/peers/helpers` on two ranks in the environment of the training loops
(`make .venv-peers/trainers/.installed`).
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-peers" / "trainers" / "bin" / "python"
NUM_RANKS = 2
TIMEOUT = 1800.0  # seconds, for a job that hangs

Settings = dict[str, Any]  # arguments of a job's `train`
Case = tuple[Settings, Settings]  # a run, and the one whose numbers it must have


def side(engine: str, optimizer: str, **settings: Any) -> Settings:
    return {"engine": engine, "optimizer": optimizer, **settings}


class PeerRuns:
    """The numbers of each run: losses and norms of all ranks."""

    def __init__(self, job: str, cases: Mapping[str, Case]) -> None:
        """Runs `train(**settings)` of the job for each run of `cases`."""
        runs = {_key(run): run for case in cases.values() for run in case}
        with tempfile.TemporaryDirectory() as directory:
            _launch(job, runs, Path(directory))
            self._ranks = [
                json.loads((Path(directory) / f"rank{rank}.json").read_text())
                for rank in range(NUM_RANKS)
            ]

    def __getitem__(self, run: Settings) -> list[float]:
        numbers = []
        for rank, outcomes in enumerate(self._ranks):
            outcome = outcomes[_key(run)]
            if "error" in outcome:
                pytest.fail(f"{run}, rank {rank}:\n{outcome['error']}")
            numbers += outcome["numbers"]
        return numbers


def _key(run: Settings) -> str:
    return json.dumps(run, sort_keys=True)


def _launch(job: str, runs: Mapping[str, Settings], directory: Path) -> None:
    (directory / "runs.json").write_text(json.dumps(runs))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    job_of_rank = ["-m", f"tests.peers.helpers.{job}", directory]
    run_with_peers([*launcher, *job_of_rank], directory, TOKENIZERS_PARALLELISM="false")


def run_with_peers(arguments: Sequence[object], directory: Path, **variables: str) -> None:
    """Runs the Python of the training loops' environment in a directory, to success."""
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is missing: make .venv-peers/trainers/.installed")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    own = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "hf")}
    ran = subprocess.run(
        [str(PYTHON), *map(str, arguments)],
        cwd=directory,
        env={**inherited, **own, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert ran.returncode == 0, ran.stderr[-20_000:]
