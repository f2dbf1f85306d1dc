"""The control groups that this process is in, where a container's limits are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


class Cgroup(NamedTuple):
    """A directory of limits, and whether it is of version 2, which has one hierarchy for all."""

    folder: Path
    is_v2: bool


def own_cgroups(controller: str, root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> Iterator[Cgroup]:
    """The groups of this process that a controller limits, and their parents.

    A path outside the container has no files under `root`; the container's own are at the top.

    Args:
        controller: "memory", or "cpu"; version 1 has a hierarchy for each.
        root: where they are mounted.
        own: the file that names this process's groups. Only Linux has it.
    """
    for line in lines_of(own):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        relative = PurePosixPath(path.lstrip("/"))
        for place in (relative, *relative.parents):
            yield Cgroup(top / place, is_v2=not controllers)


def lines_of(path: Path) -> list[str]:
    """The lines of a file; none if it does not exist or may not be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
