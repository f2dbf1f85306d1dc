"""Figures from the operating system: memory, bytes read, files in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np


def of_status(name: str) -> int:
    """Bytes, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class BytesRead(NamedTuple):
    """By this process so far."""

    files: int  # whether or not they were in the page cache
    disk: int  # by the block device

    @classmethod
    def now(cls) -> BytesRead:
        lines = Path("/proc/self/io").read_text().splitlines()
        found = {name: int(value) for name, value in (line.split(": ") for line in lines)}
        return cls(found["rchar"], found["read_bytes"])


def resident_share(folder: Path) -> float:
    """The share of the files in a directory that is in the page cache."""
    resident = total = 0
    libc = ctypes.CDLL(None, use_errno=True)
    for path in filter(lambda path: path.stat().st_size, folder.iterdir()):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            num_pages = -(-len(mapped) // mmap.PAGESIZE)
            found = np.zeros(num_pages, np.uint8)
            view = np.frombuffer(mapped, np.uint8)
            status = libc.mincore(
                ctypes.c_void_p(view.ctypes.data),
                ctypes.c_size_t(len(mapped)),
                ctypes.c_void_p(found.ctypes.data),
            )
            del view
            if status:
                raise OSError(ctypes.get_errno(), "mincore")
            resident += int((found & 1).sum())
            total += num_pages
    return resident / total


def evict(folder: Path) -> None:
    """Evicts the files of a directory from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def growth() -> Iterator[list[int]]:
    """How many bytes more than at the beginning were resident at most; a list that has it in the
    end.
    """
    found: list[int] = []
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = of_status("VmRSS")
    yield found
    found.append(of_status("VmHWM") - before)
