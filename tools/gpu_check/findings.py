"""What a stage has found: checks, figures, notes and files, written down as they come.

A stage that dies keeps what it had found before. Standard library only.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from pathlib import Path
from typing import Any

_MOST_CHARACTERS = 2000  # of one text in a record


class SkippedError(Exception):
    """The stage cannot say anything here; the message is the reason."""


class Findings:
    """The records of one process of a stage, and what it may ask about its run.

    Attributes:
        simulate: whether this runs on the simulated accelerator, with tiny sizes.
        scratch: a folder of this stage's own.
        shared: a folder that all stages of a run have.
    """

    def __init__(
        self,
        stage: str,
        records: Path,
        scratch: Path,
        shared: Path,
        *,
        simulate: bool,
        deadline: float,
        rank: int | None = None,
    ) -> None:
        """
        Args:
            records: the file that records are appended to, one JSON object a line.
            deadline: of `time.monotonic`, at which the process is killed.
            rank: of a stage that has several.
        """
        self.stage = stage
        self.simulate = simulate
        self.scratch = scratch
        self.shared = shared
        self._records = records
        self._deadline = deadline
        self._of_rank = {} if rank is None else {"rank": rank}
        self._lock = threading.Lock()
        self.num_checks = 0
        self.num_failed = 0

    @property
    def seconds_left(self) -> float:
        """The time until the process is killed."""
        return self._deadline - time.monotonic()

    def expect(self, what: str, got: Any, expected: Any) -> bool:
        """A check: whether two values are equal. Returns whether they are."""
        return self._check(what, got == expected, got, expected)

    def expect_at_most(self, what: str, got: Any, limit: Any) -> bool:
        return self._check(what, got <= limit, got, f"at most {limit}")

    def expect_at_least(self, what: str, got: Any, limit: Any) -> bool:
        return self._check(what, got >= limit, got, f"at least {limit}")

    def figure(self, name: str, value: Any, unit: str = "", *, is_telling: bool = False) -> None:
        """Something measured.

        Args:
            is_telling: whether it belongs on the page at the end.
        """
        self.record("figure", name=name, value=value, unit=unit, telling=is_telling)

    def note(self, text: str) -> None:
        """Something that a reader should know."""
        self.record("note", text=text[:_MOST_CHARACTERS])

    def error(self, text: str) -> None:
        """An exception that the stage survived; it counts as a failure."""
        self.num_failed += 1
        self.record("error", text=text[-_MOST_CHARACTERS:])

    def keep(self, path: Path) -> None:
        """Asks for a file to be among the results, if there is room for it."""
        folder = self.shared / "keep"
        folder.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / path.name)

    def share(self, name: str, content: Any) -> None:
        """Leaves something for later stages."""
        (self.shared / f"{name}.json").write_text(json.dumps(content))

    def shared_by(self, name: str) -> Any:
        """What an earlier stage has left; None if it did not run, or did not get that far."""
        path = self.shared / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def _check(self, what: str, is_ok: bool, got: Any, expected: Any) -> bool:
        with self._lock:
            self.num_checks += 1
            self.num_failed += not is_ok
        self.record("check", what=what, ok=is_ok, got=got, expected=expected)
        return is_ok

    def record(self, kind: str, **fields: Any) -> None:
        """One line of the results."""
        line = json.dumps(
            {"stage": self.stage, **self._of_rank, "kind": kind, **_plain(fields)}, default=_shown
        )
        with self._lock, self._records.open("a") as file:
            file.write(line + "\n")


def _plain(value: Any) -> Any:
    """JSON has no NaN, and a reader of bits wants to see it."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _shown(value: Any) -> str:
    return str(value)[:_MOST_CHARACTERS]
