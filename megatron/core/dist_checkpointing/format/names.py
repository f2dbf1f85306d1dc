"""The names of checkpoint directories.

SAVE/latest_checkpointed_iteration.txt      moves last, atomically; for people and other programs
SAVE/iter_0000010/                          published
SAVE/iter_0000020.<token>.saving/           in flight or abandoned: never loaded

Only this file parses such names. It does not import torch, which would cost frequent tools two
seconds each time.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# ASCII digits: \d and int() accept digits of other scripts, too. 64 bits hold 18 of them.
_FOLDER = re.compile(r"iter_([0-9]{7,18})((?:\..+)?)")


class FolderName(NamedTuple):
    """The parts of the name of a checkpoint directory."""

    iteration: int
    suffix: str  # "" if it is published, or such as ".3f9a01c21.saving"


def checkpoint_name(iteration: int) -> str:
    """The directory of the checkpoint of this iteration."""
    return f"iter_{iteration:07d}"


def parse_folder(name: str) -> FolderName | None:
    """Parses a name. None for names that no run gives to a checkpoint."""
    match = _FOLDER.fullmatch(name)
    if match is None:
        return None

    # An iteration has one directory: "iter_00000010" is not the checkpoint that is "iter_0000010".
    found = FolderName(int(match.group(1)), match.group(2))
    return found if checkpoint_name(found.iteration) + found.suffix == name else None


def iteration_of(name: str) -> int | None:
    """The iteration of the published checkpoint of this name, or None if it is no such name."""
    found = parse_folder(name)
    return found.iteration if found is not None and not found.suffix else None
