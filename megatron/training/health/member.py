"""The process of a rank, as another process of its machine sees it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.training.health.cause import Absent, Silence, typed_fields


@dataclass(frozen=True)
class Member:
    """A process: where it runs, and how to recognise it there."""

    host: str
    pid: int
    machine: str  # the same for processes that see each other's pids
    birth: str  # tells the process from a later one of the same pid

    @classmethod
    def of_this_process(cls) -> Member:
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _machine(), _stat(pid)[1])

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Member:
        """ValueError for other fields, or of other types."""
        return cls(**typed_fields(cls, content))

    def silence(self) -> Silence:
        """Why it does not answer. For a process of this machine."""
        state, birth = _stat(self.pid)
        if state in ("", "Z", "X") or (birth and birth != self.birth):
            return Silence.GONE
        return Silence.STOPPED if state in ("T", "t") else Silence.SILENT

    def absent(self, rank: int, silence: Silence) -> Absent:
        return Absent(rank, silence, self.host, self.pid)


def _machine() -> str:
    """A name that is the same for processes that see each other's pids, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _stat(pid: int) -> tuple[str, str]:
    """(state as one letter, time of birth) of a process of this machine; empty if there is none."""
    try:
        # After the name, which may hold anything: state, parent, ..., and in the 20th place the
        # time of birth.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except OSError:
        pass

    try:  # there is no /proc on some systems
        os.kill(pid, 0)
    except OSError:
        return "", ""
    return "?", ""
