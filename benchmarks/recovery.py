#!/usr/bin/env python3
"""The time that a killed rank costs: with `--keep-host-state`, and with a checkpoint on a disk or
in memory.

    python -m benchmarks.recovery

A GPT of about 59M parameters with all optimizer states in host memory, on two ranks of
`python -m megatron_hybrid launch`. A rank is killed while it updates in iteration 15, and the
launcher starts the ranks again.

    kept      the ranks continue from the kept host state
    tmpfs     they load the checkpoint of iteration 10 from memory (/dev/shm)
    disk      the same from a disk, whose cache the operating system may still have

Each side runs once a round, in an order drawn anew. The times are from the kill to

    first step     the end of the first step of the new ranks
    next step      the report of iteration 16, after all steps since the checkpoint

What the kept state costs is measured in the same runs, before the checkpoint: the median time of a
step, and the rank's peak of host memory. Until then the two other sides do the same, and both are
compared with; how far they are apart shows the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.folders import add_folder_arguments, temporary_folders
from benchmarks.helpers.processes import started
from benchmarks.helpers.result import Ratio, Result, measured
from benchmarks.runner.registry import ROOT
from megatron.training.health.events import read_events

BENCHMARK = Benchmark(
    name="recovery",
    question="From a rank's death to the next step: the kept host state against a checkpoint; "
    "and its cost without a failure",
    ranks=1,
    full=("--rounds=5",),
    quick=("--layers=2", "--hidden=256", "--vocabulary=8192", "--rounds=2"),
)

KEPT, TMPFS, DISK = "kept", "tmpfs", "disk"
FIRST, NEXT = "first step", "next step"
STEP, MEMORY = "step", "peak host memory"
UNITS = {FIRST: "s", NEXT: "s", STEP: "ms", MEMORY: "MiB"}
WARM_UP, SAVED, KILLED = 3, 10, 15  # iterations
LARGEST_RATIO = 1.01  # of steps and of host memory with and without the kept state
POLL_SECONDS = 0.005


def command(arguments: argparse.Namespace, side: str, saved: Path, metrics: Path) -> list[str]:
    """The words after the interpreter."""
    launcher = "-m megatron_hybrid launch --standalone --nproc-per-node 2 --max-restarts 1"
    return [
        *launcher.split(),
        str(ROOT / "pretrain_gpt.py"),
        *f"--num-layers {arguments.layers} --hidden-size {arguments.hidden}".split(),
        *"--num-attention-heads 8 --seq-length 64 --mock-data --num-workers 0".split(),
        *f"--tokenizer-type NullTokenizer --vocab-size {arguments.vocabulary - 1}".split(),
        *"--micro-batch-size 1 --global-batch-size 2 --lr 1e-4 --bf16".split(),
        *f"--train-iters {KILLED + 1} --eval-iters 0 --log-interval 1".split(),
        *f"--save-interval {SAVED} --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d".split(),
        *("--save", str(saved), "--metrics-jsonl", str(metrics)),
        *("--inject", f"kill:restart=0,rank=1,step={KILLED},at=step"),
        *(["--keep-host-state"] if side == KEPT else []),
    ]


def recovered(arguments: argparse.Namespace, side: str, folder: Path) -> dict[str, float]:
    """Seconds from the kill, and the cost before it, of one run."""
    saved, metrics = folder / "run", folder / "metrics.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *command(arguments, side, saved, metrics)]
    with (
        (folder / "log.txt").open("wb") as log,
        started(words, folder, environment, log) as process,
    ):
        reported = reported_at(metrics, process)
        returned = process.wait()
    if returned or reported is None:
        raise RuntimeError(f"Expected a run, got {returned}:\n{(folder / 'log.txt').read_text()}")
    events = read_events(saved)
    (killed,) = (event["time"] for event in events if event["event"] == "inject")
    _, resumed = (event for event in events if event["event"] == "resume")
    if (resumed["iteration"] == SAVED) == (side == KEPT):
        raise RuntimeError(f"Expected to resume from what {side} has, got {resumed}.")
    steps = [event["time"] for event in events if event["event"] == "step"]
    found = {FIRST: steps[-1] - killed, NEXT: reported - killed, **cost(metrics)}
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def cost(metrics: Path) -> dict[str, float]:
    """A step's median time in ms and the host memory's peak in MiB, before the checkpoint."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    chosen = [
        one for one in records if one["kind"] == "train" and WARM_UP < one["iteration"] <= SAVED
    ]
    return {
        STEP: statistics.median(one["elapsed_ms"] for one in chosen),
        MEMORY: chosen[-1]["peak_host_memory_bytes"] / 2**20,
    }


def reported_at(metrics: Path, process: subprocess.Popen[bytes]) -> float | None:
    """When the iteration after the killed one is reported."""
    wanted = f'"iteration": {KILLED + 1},'
    while process.poll() is None:
        if metrics.exists() and wanted in metrics.read_text():
            return time.time()
        time.sleep(POLL_SECONDS)
    return None


def gains(times: Mapping[str, Sequence[float]]) -> list[Ratio]:
    """How much later the run is where it was before the kill without the kept state."""
    medians = report.medians(times)
    return [
        Ratio(f"{NEXT}: {side} / {KEPT}", medians[side] / medians[KEPT]) for side in (TMPFS, DISK)
    ]


def costs(part: str, own: Mapping[str, Sequence[float]]) -> list[Ratio]:
    """What the kept state adds, and the difference of two sides that do the same."""
    medians, without = report.medians(own), statistics.median([*own[TMPFS], *own[DISK]])
    return [
        Ratio(f"{part}: {KEPT} / others", medians[KEPT] / without, at_most=LARGEST_RATIO),
        Ratio(f"{part}: {TMPFS} / {DISK}", medians[TMPFS] / medians[DISK]),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32768)
    add_folder_arguments(parser)
    arguments = parser.parse_args(argv)

    with temporary_folders(arguments) as folders:
        places: Mapping[str, Path] = {
            KEPT: folders[DISK],
            TMPFS: folders[TMPFS],
            DISK: folders[DISK],
        }
        sides = {side: partial(recovered, arguments, side, place) for side, place in places.items()}
        found = report.interleaved(sides, arguments.rounds)
    values = {
        part: {side: [own[part] for own in runs] for side, runs in found.items()} for part in UNITS
    }
    result = Result(
        tuple(one for part, own in values.items() for one in measured(own, UNITS[part], part)),
        (*gains(values[NEXT]), *costs(STEP, values[STEP]), *costs(MEMORY, values[MEMORY])),
        settings=report.settings_of(arguments),
    )
    report.hand_over(result, arguments.output)


if __name__ == "__main__":
    main()
