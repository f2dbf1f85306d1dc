"""Replacements of a file that must not be opened, or not be read to the end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _terabyte(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(1 << 40)  # sparse: takes no space


# By the names that messages give them; each makes one at a path where there is nothing yet.
SPECIAL_FILES: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a device": _device,
    "a terabyte": _terabyte,
}
