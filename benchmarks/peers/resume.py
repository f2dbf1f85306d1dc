"""Whether new processes resume bit for bit, and on how many ranks a checkpoint loads."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.helpers import report
from benchmarks.peers.jobs import Job, JobError, Side
from benchmarks.peers.trainer import MOMENTS, Training


class Saved(NamedTuple):
    """A checkpoint, and how the processes that saved it continued.

    Attributes:
        root: Its directory.
        step: The one it was saved after.
        losses: Of the steps that followed.
        state: The file of the state after these.
    """

    root: Path
    step: int
    losses: Sequence[float]
    state: Path


@dataclass(frozen=True)
class Differences:
    """The largest absolute ones between two states."""

    weights: float
    moments: float

    @property
    def is_exact(self) -> bool:
        return self.weights == 0.0 == self.moments


class Loading(NamedTuple):
    """The result of loading a side's checkpoint.

    Attributes:
        facts: As plain data.
        seconds: Of the load on the same number of ranks, by its slowest rank.
    """

    facts: dict[str, Any]
    seconds: float


def differences(one: Path, other: Path) -> Differences:
    """Between the states in two files of `Rank.write_state`.

    Raises:
        RuntimeError: If they have other tensors or shapes.
    """
    first, second = (torch.load(path, weights_only=True) for path in (one, other))
    shapes = [
        {name: tuple(tensor.shape) for name, tensor in state.items()} for state in (first, second)
    ]
    if shapes[0] != shapes[1]:
        odd = dict(shapes[0].items() ^ shapes[1].items())
        raise RuntimeError(f"Expected the same tensors in both states, got {odd} in one alone.")
    found = {name: _largest_difference(first[name], second[name]) for name in first}
    moments = {name for name in found if name.endswith(MOMENTS)}
    return Differences(
        max(found[name] for name in found.keys() - moments),
        max((found[name] for name in moments), default=0.0),
    )


def _largest_difference(one: Tensor, other: Tensor) -> float:
    if torch.equal(one, other):
        return 0.0
    return float((one.double() - other.double()).abs().max())


class Loader:
    """Loads a side's checkpoint in new processes."""

    def __init__(self, side: Side, saved: Saved, training: Training, folder: Path) -> None:
        """
        Args:
            folder: The directory of logs and states.
        """
        self._side = side
        self._saved = saved
        self._training = training
        self._folder = folder
        self._log = folder / "resume.log"
        self._at_save = folder / "at_save.pt"

    def run(self, num_ranks: int, others: Sequence[int]) -> Loading:
        """On as many ranks as have saved, where training is repeated; then on other numbers."""
        facts, seconds = self._resume(num_ranks)
        facts["loads_on"] = {str(number): self._load_on(number) for number in others}
        conversion = self._side.converted
        if conversion is not None and "no" in {
            each["loads"] for each in facts["loads_on"].values()
        }:
            facts["after_conversion"] = self._convert(conversion.program)
            side = replace(self._side, module=conversion.module)
            root = self._folder / "converted"
            facts["after_conversion"]["loads_on"] = {
                str(number): self._load_on(number, side, root) for number in others
            }
        return Loading(facts, seconds)

    def _resume(self, num_ranks: int) -> tuple[dict[str, Any], float]:
        after = self._folder / "resumed.pt"
        with self._job(num_ranks, self._side) as job:
            job.wait_built()
            answers = job.ask("load", root=str(self._saved.root), step=self._saved.step)
            job.ask("write_state", path=str(self._at_save))
            trained = job.ask("train", steps=len(self._saved.losses))
            job.ask("write_state", path=str(after))
        losses = trained[0]["losses"]
        largest = max(abs(a - b) for a, b in zip(losses, self._saved.losses, strict=True))
        found = differences(self._saved.state, after)
        facts = {
            "is_exact": found.is_exact and largest == 0.0,
            "steps": len(losses),
            "largest_difference": {"losses": largest, **asdict(found)},
        }
        return facts, max(answer["seconds"] for answer in answers)

    def _load_on(
        self, num_ranks: int, side: Side | None = None, root: Path | None = None
    ) -> dict[str, Any]:
        """Whether it loads on so many ranks, with the saved values."""
        loaded = self._folder / f"on_{num_ranks}.pt"
        try:
            with self._job(num_ranks, side or self._side) as job:
                job.wait_built()
                job.ask("load", root=str(root or self._saved.root), step=self._saved.step)
                job.ask("write_state", path=str(loaded))
        except JobError as error:
            return {"loads": "no", "why": str(error).partition("\n")[0]}
        found = differences(self._at_save, loaded)
        return {"loads": "yes", "is_exact": found.is_exact, "largest_difference": asdict(found)}

    def _convert(self, program: str) -> dict[str, Any]:
        name = f"step_{self._saved.step}"
        source, target = self._saved.root / name, self._folder / "converted" / name
        command = [str(self._side.python), "-m", program]
        command += ["--input_folder", str(source), "--output_folder", str(target)]
        with self._log.open("ab") as log:
            seconds = report.seconds(
                lambda: subprocess.run(
                    command, stdout=log, stderr=log, check=True, env=self._side.environment()
                )
            )
        return {"program": program, "seconds": round(seconds, 2)}

    def _job(self, num_ranks: int, side: Side) -> Job:
        return Job(side, num_ranks, self._training.to_plain(), self._log)
