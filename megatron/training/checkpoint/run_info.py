"""`RecoverInfo`: what a checkpoint says about its run besides tensors. It is `train_state.json`,
inside the checkpoint.

The states of random generators are not part of it: each rank has its own, and writes them as
tensors of the checkpoint (`rng.<rank>.<name>`). To stand here they would have to be gathered, and
saving communicates nothing.
"""

from __future__ import annotations

import dataclasses
import reprlib
from dataclasses import dataclass, field
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.training.step import StepInfo

FORMAT_VERSION = 1

_DICTS = ("data", "logger", "evaluator", "versions", "config")
_FIELDS = {"format_version", "progress", "schedule", "world_size", "loss_scaler", *_DICTS}
_COUNTERS = [counter.name for counter in dataclasses.fields(StepInfo)]
_MAX_COUNT = 2**63 - 1


@dataclass(frozen=True)
class RecoverInfo:
    """Plain data, the same on every rank.

    Attributes:
        step_info: how far the run had come.
        schedule: of the learning rate: what `LRSchedule.state` gave. Empty: there is none, and that
            of the run that loads it holds.
        loss_scaler: the scaler's state; None: the loss was not scaled.
        data: of the training data, what tells whether it is the same again.
        logger, evaluator: their states; empty if the run had none.
        world_size: ranks that have saved.
        versions: of torch and Python.
        config: the run's settings, by field.
    """

    step_info: StepInfo
    schedule: dict[str, Any]
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
            "schedule": self.schedule,
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
    def from_plain(cls, plain: dict[str, Any], source: str) -> RecoverInfo:
        """Takes back what `to_plain` gave.

        The schedule and the loss scaler's state are left to those that take them over, if they do.

        Args:
            source: the file, for messages.

        Raises:
            CheckpointError: for another version, and for anything that `to_plain` does not give. It
                names the field.
        """
        version = plain.get("format_version")
        is_known = type(version) is int and version == FORMAT_VERSION
        _check(is_known, "format_version", str(FORMAT_VERSION), version, source)
        if unknown := sorted(plain.keys() - _FIELDS):
            raise CheckpointError(
                f"Expected the fields of a run in {source}, got {reprlib.repr(unknown)} besides."
            )

        progress, schedule = plain.get("progress"), plain.get("schedule")
        is_whole = isinstance(progress, dict) and progress.keys() == set(_COUNTERS)
        _check(is_whole, "progress", f"the counters {', '.join(_COUNTERS)}", progress, source)
        assert isinstance(progress, dict), "as just checked"
        for name, value in progress.items():
            is_count = type(value) is int and 0 <= value <= _MAX_COUNT
            _check(is_count, f"progress.{name}", "an integer from 0 to 2**63 - 1", value, source)

        _check(isinstance(schedule, dict), "schedule", "an object", schedule, source)
        assert isinstance(schedule, dict), "as just checked"

        dicts: dict[str, Any] = {name: plain.get(name) for name in _DICTS}
        for name, value in dicts.items():
            _check(isinstance(value, dict), name, "an object", value, source)
        scaler, world_size = plain.get("loss_scaler"), plain.get("world_size")
        is_state = scaler is None or isinstance(scaler, dict)
        _check(is_state, "loss_scaler", "an object", scaler, source)
        is_number = type(world_size) is int and 0 < world_size <= _MAX_COUNT
        _check(is_number, "world_size", "a number of ranks", world_size, source)
        assert isinstance(world_size, int), "as just checked"
        return cls(StepInfo(**progress), schedule, scaler, world_size=world_size, **dicts)


def is_of_a_run(plain: dict[str, Any]) -> bool:
    """Whether this `train_state.json` is a run's. That of imported weights has no schedule."""
    return "schedule" in plain


def no_run_error(path: str, reason: str) -> CheckpointError:
    """The error for a checkpoint that cannot be resumed, though its weights may be whole.

    Args:
        path: the checkpoint.
        reason: what it is instead, or lacks, as a clause.
    """
    return CheckpointError(
        f"Expected the checkpoint of a run in {path}, got one without a run's state: {reason}. "
        "--finetune loads its weights, and begins at iteration 0 (in a program: with_optim=False)."
    )


def _check(is_met: bool, name: str, expected: str, got: object, source: str) -> None:
    if not is_met:
        shown = reprlib.repr(got)
        raise CheckpointError(f"Expected {name} in {source} to be {expected}, got {shown}.")
