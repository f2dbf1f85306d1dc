"""`RecoverInfo`: the plain data of a run's checkpoint, in its `train_state.json`.

The states of random generators are not part of it: each rank writes its states as tensors of the
checkpoint (`rng.<rank>.<name>`), since saving does not communicate.
"""

from __future__ import annotations

import dataclasses
import reprlib
from dataclasses import dataclass, field
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.training.step import StepInfo

FORMAT_VERSION = 1

_DICTS = ("schedule", "data", "logger", "evaluator", "versions", "config")
_FIELDS = {"format_version", "progress", "world_size", "loss_scaler", *_DICTS}
_COUNTERS = [counter.name for counter in dataclasses.fields(StepInfo)]
_MAX_COUNT = 2**63 - 1


@dataclass(frozen=True)
class RecoverInfo:
    """Plain data, the same on every rank.

    Attributes:
        step_info: the counters of the run.
        schedule: the state of the learning-rate schedule. Empty without a schedule: the schedule of
            the loading run then applies.
        loss_scaler: the scaler's state; None if the loss was not scaled.
        data: properties of the training data, to detect other data.
        logger, evaluator: their states, possibly empty.
        world_size: the number of ranks that saved.
        versions: the versions of torch and Python.
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
        """Returns the content of `train_state.json`."""
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
        """Inverts `to_plain`. The schedule and the loss scaler's state are checked when they are
        installed.

        Args:
            source: the file, for messages.

        Raises:
            CheckpointError: for another version, or other content than that of `to_plain`. It names
                the field.
        """

        def check(is_met: bool, name: str, expected: str, got: object) -> None:
            if not is_met:
                shown = reprlib.repr(got)
                raise CheckpointError(f"Expected {name} in {source} to be {expected}, got {shown}.")

        version = plain.get("format_version")
        is_known = type(version) is int and version == FORMAT_VERSION
        check(is_known, "format_version", str(FORMAT_VERSION), version)
        if unknown := sorted(plain.keys() - _FIELDS):
            raise CheckpointError(
                f"Expected the fields of a run in {source}, got {reprlib.repr(unknown)} besides."
            )

        progress, scaler = plain.get("progress"), plain.get("loss_scaler")
        is_whole = isinstance(progress, dict) and progress.keys() == set(_COUNTERS)
        check(is_whole, "progress", f"the counters {', '.join(_COUNTERS)}", progress)
        counters: dict[str, Any] = dict(progress or {})
        for name, value in counters.items():
            is_count = type(value) is int and 0 <= value <= _MAX_COUNT
            check(is_count, f"progress.{name}", "an integer from 0 to 2**63 - 1", value)

        dicts: dict[str, Any] = {name: plain.get(name) for name in _DICTS}
        for name, value in dicts.items():
            check(isinstance(value, dict), name, "an object", value)
        check(scaler is None or isinstance(scaler, dict), "loss_scaler", "an object", scaler)

        world_size: Any = plain.get("world_size")
        is_number = type(world_size) is int and 0 < world_size <= _MAX_COUNT
        check(is_number, "world_size", "a number of ranks", world_size)
        return cls(StepInfo(**counters), loss_scaler=scaler, world_size=world_size, **dicts)


def is_of_a_run(plain: dict[str, Any]) -> bool:
    """Returns whether a `train_state.json` is from a run. Weights alone have no schedule."""
    return "schedule" in plain


def no_run_error(path: str, reason: str) -> CheckpointError:
    """Returns the error for a checkpoint without a run's state.

    Args:
        path: the checkpoint.
        reason: a clause about the missing part.
    """
    return CheckpointError(
        f"Expected the checkpoint of a run in {path}, got one without a run's state: {reason}. "
        "--finetune loads its weights, and starts at iteration 0 (in a program: with_optim=False)."
    )
