"""What every benchmark shares: interleaved timing, and a result file with the machine in it."""

from __future__ import annotations

import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parents[1] / "results"


def schedule(names: list[str], num_rounds: int, seed: int = 0) -> Iterator[str]:
    """Every name once a round, in another order each round, the same on every rank."""
    generator = random.Random(seed)
    for _ in range(num_rounds):
        yield from generator.sample(names, len(names))


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    """The median of each list."""
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": torch.multiprocessing.cpu_count(),
        "platform": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write(name: str, content: dict[str, Any]) -> Path:
    """Writes `results/NAME_DATE.json` and returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}_{date.today().isoformat()}.json"
    path.write_text(json.dumps({"machine": machine(), **content}, indent=1) + "\n")
    return path
