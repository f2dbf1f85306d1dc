"""Directories to write into, on a disk and in memory."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

PLACES = ("tmpfs", "disk")


def add_folder_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name the parent directories."""
    parser.add_argument("--disk", default="runs", help="a directory on the disk to measure")
    parser.add_argument("--tmpfs", default="/dev/shm", help="a directory in memory")


@contextmanager
def temporary_folders(arguments: argparse.Namespace) -> Iterator[dict[str, Path]]:
    """A directory in each of the two places, removed afterwards with its contents, also after a
    signal to end the process: gigabytes would stay in memory.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with ExitStack() as stack:
        folders = {}
        for place in PLACES:
            parent = Path(getattr(arguments, place))
            parent.mkdir(parents=True, exist_ok=True)
            made = tempfile.TemporaryDirectory(prefix="benchmark-", dir=parent)
            folders[place] = Path(stack.enter_context(made)).resolve()
        yield folders


def empty(*folders: Path) -> None:
    """Removes the contents of directories, once all ranks have arrived, and syncs the disk. All
    ranks call this.
    """
    dist.barrier()
    if dist.get_rank() == 0:
        for path in (path for folder in folders for path in folder.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
    dist.barrier()
