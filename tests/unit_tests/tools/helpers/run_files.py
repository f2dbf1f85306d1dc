"""A run's files, written as a run writes them, without a run."""

from __future__ import annotations

import math
import socket
from pathlib import Path

from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.training.health.events import METRICS_FILE, EventLog
from megatron.training.health.exits import ExitCode
from megatron.training.health.jsonl import JsonLines
from megatron_hybrid import run_status

BEGIN = 1_700_000_000.0  # unix seconds
HERE = socket.gethostname()
ELSEWHERE = "node7"


class Run:
    """A run that writes its files; `now` is its clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = BEGIN
        self.restart = -1
        self.process = {"pid": 4711, "host": ELSEWHERE}

    def events(self, rank: int = 0, restart: int | None = None) -> EventLog:
        restart = self.restart if restart is None else restart
        return EventLog(self.folder, rank=rank, restart=restart, clock=lambda: self.now)

    def start(self, *, restart: int | None = None, iteration: int | None = 0, **process) -> None:
        self.restart = self.restart + 1 if restart is None else restart
        given = {"pid": 4711 + self.restart, "host": ELSEWHERE, **process}
        self.process = {name: given[name] for name in ("pid", "host")}
        self.write("start", iteration=None, world_size=2, command=["pretrain_gpt.py"], **given)
        if iteration is not None:
            self.write("resume", iteration=iteration, world_size=2, seconds=0.1)

    def write(self, kind: str, rank: int = 0, **fields) -> None:
        self.events(rank).write(kind, **fields)

    def beat(self, iteration: int, **fields) -> None:
        values = {
            "train_iters": 500,
            "phase": "forward",
            "loss": 4.08127,
            "ms_per_iteration": 385.9,
        }
        self.events().beat(**self.process, iteration=iteration, **{**values, **fields})

    def save(self, iteration: int, seconds: float = 0.15) -> None:
        path = self.folder / checkpoint_name(iteration)
        self.write("save_begun", iteration=iteration)
        path.mkdir()
        self.write("save_published", iteration=iteration, checkpoint=str(path), seconds=seconds)

    def exit(self, code: ExitCode, reason: str, iteration: int | None, rank: int = 0) -> None:
        self.write("exit", rank, code=int(code), name=code.name, reason=reason, iteration=iteration)

    def status(self, **options) -> dict:
        found = run_status.run_status(self.folder, now=self.now, **options)
        assert found is not None
        return found

    def lines(self) -> list[str]:
        return run_status.lines_of(self.status())

    def metrics(self, iterations, **fields) -> None:
        """A record of each of these iterations; the loss is 5 / (1 + iteration / 100)."""
        lines = JsonLines(self.folder / METRICS_FILE)
        for iteration in iterations:
            record = {
                "iteration": iteration,
                "loss": 5.0 / (1.0 + iteration / 100.0),
                "grad_norm": 1.0 + 0.25 * math.sin(iteration),
                "learning_rate": 1e-3,
                "elapsed_ms": 400.0,
                "tokens_per_second": 5000.0,
                "peak_host_memory_bytes": 2**30,
            }
            lines.append({"kind": "train", **record, **fields})

    def evaluation(self, iteration: int, loss: float, split: str = "validation") -> None:
        record = {"kind": "eval", "iteration": iteration, "split": split, "loss": loss}
        JsonLines(self.folder / METRICS_FILE).append(record)
        self.write("evaluation", iteration=iteration, split=split, loss=loss)

    def lanes(self, iteration: int, kind: str = "timing") -> None:
        names = ("d2h", "host", "h2d", "waited_d2h", "waited_host", "waited_h2d")
        record = {f"{name}_ms": 1.5 + number for number, name in enumerate(names)}
        lines = JsonLines(self.folder / METRICS_FILE)
        lines.append({"kind": kind, "iteration": iteration, "num_steps": 10, **record})
