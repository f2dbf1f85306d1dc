"""How much memory a rank has needed at most, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.helpers.processes import descendants


def reset_peak() -> None:
    """Forgets this process's peak so far."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The peak resident memory of this process and its children since the last `reset_peak`, shared
    memory included. Pages of files, which are libraries and the same for every rank, are not
    counted.
    """
    return sum(_peak_of(process) for process in (os.getpid(), *descendants(os.getpid())))


def _peak_of(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0  # it has ended meanwhile
    fields = {name: text for name, _, text in (line.partition(":") for line in lines)}
    if "VmHWM" not in fields:
        return 0  # it has ended, and is a zombie
    kib = int(fields["VmHWM"].split()[0]) - int(fields["RssFile"].split()[0])
    return kib * 1024
