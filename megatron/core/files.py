"""Files that a reader finds whole or not at all, also after a crash.

A file is written under a name that no other writer has, brought to disk, and only then renamed to its own name; the
folder is brought to disk after that, or the rename might not outlive a crash.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def published(path: Path) -> Iterator[BinaryIO]:
    """A stream whose content stands under `path` once the block ends, whole and on disk; if it raises, nothing does."""
    temporary = temporary_path(path)
    try:
        with temporary.open("xb") as stream:
            yield stream
            sync_stream(stream)
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """A name beside `path` that no other writer has, of whatever process, container or node. To be opened with "x"."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")


def sync_stream(stream: BinaryIO) -> None:
    """Brings what has been written to disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Brings a folder's entries to disk, so that a rename in it outlives a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
