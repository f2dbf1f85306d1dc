"""The rounds of a comparison: all jobs alive, one of them at work at a time."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.helpers import report
from benchmarks.peers.jobs import Job


@dataclass
class Rounds:
    """The measurements of a side, one value a round.

    Attributes:
        losses: Of all steps so far, means over ranks.
        seconds: Of a round of training.
        peak_bytes: Of all ranks together, while training.
        saves: By quantity, seconds.
        peak_bytes_saving: Of all ranks together, while training and saving.
        last_saved: The step after which the checkpoint that is kept was saved.
        losses_after_save: Of the steps from there on.
        checkpoint_bytes: Of that checkpoint's files.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    saves: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes_saving: int = 0
    last_saved: int = 0
    losses_after_save: list[float] = field(default_factory=list)
    checkpoint_bytes: int = 0


def train(
    jobs: Mapping[str, Job], found: Mapping[str, Rounds], *, warm_up: int, rounds: int, steps: int
) -> None:
    """Rounds of so many steps of each job, in an order drawn anew each round."""

    def one(name: str) -> float:
        answers = jobs[name].ask("train", steps=steps)
        found[name].losses += answers[0]["losses"]
        seconds: float = max(answer["seconds"] for answer in answers)
        return seconds

    work = {name: partial(one, name) for name in jobs}
    report.interleaved(work, warm_up, seed=1)
    for job in jobs.values():
        job.ask("reset_peak")
    for name, seconds in report.interleaved(work, rounds).items():
        found[name].seconds = seconds
        found[name].peak_bytes = _peak(jobs[name])


def save(
    jobs: Mapping[str, Job],
    found: Mapping[str, Rounds],
    roots: Mapping[str, Path],
    *,
    rounds: int,
    steps: int,
) -> None:
    """Rounds of so many steps, then a save during as many steps. The last checkpoint of each job is
    kept.

    One more round comes first and does not count: memory that is kept for all saves is made then.
    """

    def one(name: str) -> dict[str, float]:
        # The previous checkpoint is no longer needed, and takes disk space.
        _empty(roots[name])
        own = found[name]
        # Just before, so that both had the same machine to themselves.
        without = jobs[name].ask("train", steps=steps)
        answers = jobs[name].ask("save", root=str(roots[name]), steps=steps)
        own.last_saved, own.losses_after_save = answers[0]["step"], answers[0]["losses"]
        called, stepped, durable = (
            max(answer[part] for answer in answers) for part in ("called", "stepped", "durable")
        )
        lost = stepped - max(answer["seconds"] for answer in without)
        return {"called": called, "lost": lost, "durable": durable}

    work = {name: partial(one, name) for name in jobs}
    report.interleaved(work, 1, seed=2)
    for job in jobs.values():
        job.ask("reset_peak")
    for name, saves in report.interleaved(work, rounds, seed=3).items():
        found[name].saves = {part: [save[part] for save in saves] for part in saves[0]}
        found[name].peak_bytes_saving = _peak(jobs[name])
        found[name].checkpoint_bytes = sum(
            path.stat().st_size for path in roots[name].rglob("*") if path.is_file()
        )


def _peak(job: Job) -> int:
    return sum(answer["bytes"] for answer in job.ask("peak"))


def _empty(root: Path) -> None:
    for folder in root.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
