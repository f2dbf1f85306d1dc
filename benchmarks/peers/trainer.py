"""`Trainer`, the interface of a side, and the settings that all sides share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from benchmarks.peers.gpt import Shape

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Training:
    """The same for all sides: AdamW at a constant rate, gradients clipped by their global norm."""

    shape: Shape
    seed: int = 0
    lr: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_grad: float = 1.0

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Training:
        """From what `to_plain` gave, also by way of JSON."""
        betas = tuple(plain["betas"])
        return cls(**{**plain, "shape": Shape(**plain["shape"]), "betas": betas})


class Trainer(Protocol):
    """A side, on one of its ranks. All ranks call every method together."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that are this side's own, as plain data."""

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """A whole training step. Returns the loss, this rank's or the mean over ranks."""

    def finish_steps(self) -> None:
        """Waits for what `step` has left to do in the background."""

    def begin_save(self, root: Path, step: int) -> None:
        """Starts a save into a new subdirectory of `root`. Returns when training may continue."""

    def finish_save(self) -> None:
        """Waits until the files have been written; the caller has the disk write them out."""

    def load(self, root: Path, step: int) -> None:
        """Loads the checkpoint of step `step` in `root`."""

    def whole_state(self, *, with_moments: bool) -> dict[str, Tensor]:
        """Main weights by their names in the model, and both moments as `NAME.exp_avg` and
        `NAME.exp_avg_sq`: whole and in fp32. Only rank 0's is used. Before the first step there may
        be no moments.
        """

    def close(self) -> None:
        """Ends its threads and processes."""
