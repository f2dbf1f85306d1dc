"""The memory that a relaunched job has of its earlier starts, read from its event log."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.log import printable
from megatron.training.health.events import EVENTS_FILE, EventKind, read_events

logger = logging.getLogger(__name__)

_MOST_CHARACTERS = 1000  # of a reason that is told again


@dataclass(frozen=True)
class EarlierFindings:
    """The findings of this job's processes since it was last launched by hand.

    Attributes:
        damaged: why checkpoints are damaged, by path.
        attempts: how often the job has resumed, by iteration.
        has_saved: whether a checkpoint of this job's own is there.
        begun: the iteration at which the job began; None: it did not get there.
    """

    damaged: dict[str, str] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    has_saved: bool = False
    begun: int | None = None

    @classmethod
    def read(cls, folder: str | Path) -> EarlierFindings:
        """From the events of the starts since the job was last launched by hand.

        The log is trusted like the folder of checkpoints that it is in by default: whoever can
        write it can also delete them. Torn lines say nothing. A log that cannot be read is a
        warning, like one that cannot be written: it is not worth a run.

        Raises:
            CheckpointError: for an event whose fields have other types than they are written with.
                Ignoring it might try a damaged checkpoint again, or relaunch a run for ever.
        """
        source = f"{folder}/{EVENTS_FILE}"
        try:
            events = read_events(folder)
        except OSError as error:
            text = "Could not read the event log: %s. What this job has found out is forgotten."
            logger.warning(text, error)
            return cls()

        starts = [number for number, event in enumerate(events) if _is_first_start(event)]
        damaged: dict[str, str] = {}
        attempts: dict[int, int] = {}
        has_saved = False

        for event in events[starts[-1] if starts else 0 :]:
            kind = event.get("event")
            if kind == EventKind.DAMAGED:
                reason = printable(_text(event, "reason", source), _MOST_CHARACTERS)
                damaged[_text(event, "checkpoint", source)] = reason
            elif kind in (EventKind.SAVE_PUBLISHED, EventKind.SET_ASIDE):
                # Another checkpoint is there now, or none.
                damaged.pop(_text(event, "checkpoint", source), None)
                has_saved |= kind == EventKind.SAVE_PUBLISHED
            elif kind == EventKind.RESUME:
                iteration = event.get("iteration")
                if type(iteration) is not int or iteration < 0:
                    raise _error(event, "iteration", "an integer >= 0", source)
                attempts[iteration] = attempts.get(iteration, 0) + 1
        return cls(damaged, attempts, has_saved, next(iter(attempts), None))

    def to_plain(self) -> dict[str, Any]:
        """For the other ranks, as JSON, whose keys are texts."""
        return {**vars(self), "attempts": [list(pair) for pair in self.attempts.items()]}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> EarlierFindings:
        """The inverse of `to_plain`."""
        return cls(**{**plain, "attempts": dict(plain["attempts"])})


def _is_first_start(event: Mapping[str, Any]) -> bool:
    """Whether a job was launched by hand here. JSON's false is not 0."""
    restart = event.get("restart")
    return event.get("event") == EventKind.START and type(restart) is int and restart == 0


def _text(event: Mapping[str, Any], name: str, source: str) -> str:
    value = event.get(name)
    if not isinstance(value, str):
        raise _error(event, name, "a string", source)
    return value


def _error(event: Mapping[str, Any], name: str, expected: str, source: str) -> CheckpointError:
    return CheckpointError(
        f"Expected {name} of the event {event['event']!r} in {source} to be {expected}, got "
        f"{reprlib.repr(event.get(name))}. A run that is launched by hand does not read it."
    )
