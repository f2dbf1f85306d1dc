"""The names of checkpoint directories, and which of them count.

SAVE/latest_checkpointed_iteration.txt      moves last, atomically; for people and other programs
SAVE/iter_0000010/                          published
SAVE/iter_0000020.<token>.saving/           in flight or abandoned: never loaded

Only this file parses such names. It does not import torch, which would cost frequent tools two
seconds each time.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron.core.dist_checkpointing.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.store import Store

logger = logging.getLogger(__name__)

TRACKER_FILE = "latest_checkpointed_iteration.txt"
# ASCII digits: \d and int() accept digits of other scripts, too. 64 bits hold 18 of them.
_FOLDER = re.compile(r"iter_([0-9]{7,18})((?:\..+)?)")
_ITERATION = re.compile(r"[0-9]{1,18}")
_MAX_SHOWN = 40  # characters of a tracker file in a message


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

    # An iteration has one folder: "iter_00000010" is not the checkpoint that is "iter_0000010".
    found = FolderName(int(match.group(1)), match.group(2))
    return found if checkpoint_name(found.iteration) + found.suffix == name else None


def iteration_of(name: str) -> int | None:
    """The iteration of the published checkpoint of this name, or None if it is no such name."""
    found = parse_folder(name)
    return found.iteration if found is not None and not found.suffix else None


def path_of(store: Store, path: str) -> str:
    """A file or directory of a store, as messages name it."""
    return f"{store.root}/{path}"


def published_iterations(store: Store) -> list[int]:
    """The iterations of the published checkpoints, ascending; empty if the store has no directory
    yet.

    CheckpointError if there is a file in the directory's place.
    """
    # Only the root of a local store is a path of the file system.
    if store.is_rename_atomic and Path(store.root).exists() and not Path(store.root).is_dir():
        raise CheckpointError(f"Expected a folder of checkpoints at {store.root}, got a file.")
    names = {name: iteration_of(name) for name in store.folders()}
    found = [(name, iteration) for name, iteration in names.items() if iteration is not None]
    return sorted(iteration for name, iteration in found if store.is_published(name))


def latest_iteration(store: Store) -> int | None:
    """The iteration of the newest published checkpoint, or None.

    The directories decide, not the tracker file, which a crash may leave one behind.

    Raises:
        CheckpointError: if the tracker file is unreadable, or names a checkpoint that is not there.
            A run must not start afresh because its checkpoint cannot be found.
    """
    published = published_iterations(store)
    tracked = _read_tracker(store)
    if tracked is None:
        if published:
            # A crash between the publication of the very first checkpoint and the tracker's.
            logger.warning(
                "%s has no %s; taking its newest checkpoint, %d",
                store.root,
                TRACKER_FILE,
                published[-1],
            )
        return published[-1] if published else None

    tracker = path_of(store, TRACKER_FILE)
    if tracked not in published:
        raise CheckpointError(
            f"Expected {path_of(store, checkpoint_name(tracked))}, which {tracker} names, got "
            f"checkpoints {published}. Name one with --ckpt-step, or correct the file."
        )
    if tracked != published[-1]:
        logger.warning(
            "%s names %d, and %d has been published since; taking that. To go back, use "
            "--ckpt-step.",
            tracker,
            tracked,
            published[-1],
        )
    return published[-1]


def track(store: Store, iteration: int) -> bool:
    """Makes the tracker file name a published checkpoint. Returns whether that is durable.

    Never raises: the checkpoint is published, so a failure is only logged.
    """
    try:
        store.write(TRACKER_FILE, f"{iteration}\n".encode())
    except Exception as error:  # remote stores raise other errors, too
        path = path_of(store, checkpoint_name(iteration))
        message = "%s is published, but %s may still name another: %s"
        logger.warning(message, path, TRACKER_FILE, error)
        return False

    return True


def _read_tracker(store: Store) -> int | None:
    """The iteration in the tracker file, or None if there is no such file."""
    tracker = path_of(store, TRACKER_FILE)
    try:
        content = store.read(TRACKER_FILE)
    except FileNotFoundError:
        return None
    except OSError as error:
        got = error.strerror or error
        raise CheckpointError(f"Expected to read {tracker}, got {got}.") from error

    text = content.decode(errors="replace").strip()
    # Before int(), which raises another error for thousands of digits.
    if _ITERATION.fullmatch(text) is None:
        more = len(text) - _MAX_SHOWN
        shown = repr(text[:_MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")
        raise CheckpointError(f"Expected an iteration in {tracker}, got {shown}.")
    return int(text)
