"""Files that the worker's process makes and reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Target:
    """One kind of files, and who reads them."""

    errors: tuple[type[BaseException], ...] = ()  # that may come of a file: named ones

    def __init__(self, name: str) -> None:
        self.name = name

    def prepare(self) -> None:
        """Prepares the process, once."""

    def make(self, folder: Path) -> None:
        """The intact files."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forgets the state that the previous example has loaded."""

    def read(self, folder: Path) -> Any:
        """Loads, and returns a summary of the loaded value in JSON."""
        raise NotImplementedError

    def left(self) -> str:
        """A digest of the state that a load changes: after an error it must be as before."""
        return ""
