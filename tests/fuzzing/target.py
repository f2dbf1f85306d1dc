"""What the worker's process is asked to make and to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Target:
    """One kind of files, and who reads them."""

    errors: tuple[type[BaseException], ...] = ()  # that may come of a file: named ones

    def __init__(self, name: str) -> None:
        self.name = name

    def prepare(self) -> None:
        """What the process needs, once."""

    def make(self, folder: Path) -> None:
        """The intact files."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forgets what the example before has loaded."""

    def read(self, folder: Path) -> Any:
        """Loads, and returns what has been loaded as a few words of JSON."""
        raise NotImplementedError

    def left(self) -> str:
        """What a load works on, as it is now: after an error it has to be what it was."""
        return ""
