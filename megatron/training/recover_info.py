"""`RecoverInfo`: what a checkpoint says of its run besides tensors. It is `train_state.json`, inside the checkpoint.

The states of random generators are not among it: they are each rank's own, and so are tensors of the checkpoint that
each rank writes (`rng.<rank>.<name>`). Put together here, they would have to be gathered, and saving communicates
nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.optimizer.lr_schedule import LRSchedule
from megatron.training.engine import StepInfo

FORMAT_VERSION = 1


@dataclass(frozen=True)
class RecoverInfo:
    """Plain data, the same on every rank.

    Attributes:
        step_info: how far the run had come.
        schedule: of the learning rate.
        loss_scaler: the scaler's state; None: the loss was not scaled.
        data: of the training data, what tells whether it is the same again.
        logger, evaluator: what they gave; empty in checkpoints of engines without them.
        world_size: ranks that have saved.
        versions: of torch and Python.
        config: the run's settings, by field.
    """

    step_info: StepInfo
    schedule: LRSchedule
    loss_scaler: dict[str, Any] | None = None
    data: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)
    evaluator: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    versions: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """For `train_state.json`."""
        plain: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "progress": dataclasses.asdict(self.step_info),
            "schedule": self.schedule.state(),
            "world_size": self.world_size,
            "versions": self.versions,
            "data": self.data,
            "logger": self.logger,
            "evaluator": self.evaluator,
            "config": self.config,
        }
        if self.loss_scaler is not None:
            plain["loss_scaler"] = self.loss_scaler
        return plain

    @classmethod
    def from_plain(cls, plain: dict[str, Any], folder: str) -> RecoverInfo:
        """Takes back what `to_plain` gave.

        Args:
            folder: the checkpoint, for messages.

        Raises:
            CheckpointError: for another version, and for what it cannot be without.
        """
        if plain.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"Expected format version {FORMAT_VERSION} in {folder}, got {plain.get('format_version')!r}."
            )
        try:
            step_info = StepInfo(**plain["progress"])
        except (KeyError, TypeError) as failure:
            raise CheckpointError(f"Expected the run's counters in {folder}, got {failure}.") from None
        try:
            schedule = LRSchedule.from_state(plain["schedule"])
        except (KeyError, TypeError) as failure:
            raise CheckpointError(f"Expected a learning-rate schedule in {folder}, got {failure}.") from None
        others = {name: plain.get(name) or {} for name in ("data", "logger", "evaluator", "versions", "config")}
        for name, value in others.items():
            if not isinstance(value, dict):
                raise CheckpointError(f"Expected {name} as a dict in {folder}, got {type(value).__name__}.")
        world_size = plain.get("world_size", 1)
        if type(world_size) is not int:
            raise CheckpointError(f"Expected the number of ranks in {folder}, got {world_size!r}.")
        return cls(step_info, schedule, plain.get("loss_scaler"), world_size=world_size, **others)
