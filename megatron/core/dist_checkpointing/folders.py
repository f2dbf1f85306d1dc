"""The names of checkpoint folders, and which of them count.

SAVE/latest_checkpointed_iteration.txt      moves last, atomically; for people and other programs
SAVE/iter_0000010/                          published
SAVE/iter_0000020.<token>.saving/           in flight or abandoned: never loaded
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.manifest import MARKER_FILE
from megatron.core.dist_checkpointing.store import Store

logger = logging.getLogger(__name__)

TRACKER_FILE = "latest_checkpointed_iteration.txt"
_FOLDER = re.compile(r"iter_(\d{7,})")


def checkpoint_name(iteration: int) -> str:
    """The name of the folder of the checkpoint of this iteration."""
    return f"iter_{iteration:07d}"


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of this name is taken for one of a run's checkpoints."""
    return _FOLDER.fullmatch(name) is not None


def published_iterations(store: Store) -> list[int]:
    """The iterations of the published checkpoints, ascending; none if there is no such folder.

    CheckpointError if there is a file in the folder's place.
    """
    if store.is_rename_atomic and Path(store.root).exists() and not Path(store.root).is_dir():
        raise CheckpointError(f"Expected a folder of checkpoints at {store.root}, got a file.")
    matches = (_FOLDER.fullmatch(name) for name in store.folders())
    names = {match.group(): int(match.group(1)) for match in matches if match}
    return sorted(
        iteration
        for name, iteration in names.items()
        if store.is_rename_atomic or store.exists(f"{name}/{MARKER_FILE}")
    )


def latest_iteration(store: Store) -> int | None:
    """The newest published checkpoint's iteration, or None if the store holds nothing of a checkpoint.

    What counts is what has been published. The tracker file may lag by one after a crash between the two.

    Raises:
        CheckpointError: if the tracker file is unreadable, or names a checkpoint that is not there. "There is one that
            cannot be found" must not look like "there is none", or a run would begin anew over its own results.
    """
    published = published_iterations(store)
    tracker = f"{store.root}/{TRACKER_FILE}"
    try:
        text = store.read(TRACKER_FILE).decode(errors="replace").strip()
    except FileNotFoundError:
        if published:
            # A crash between the publication of the very first checkpoint and the tracker's.
            logger.warning("%s has no %s; taking its newest checkpoint, %d", store.root, TRACKER_FILE, published[-1])
        return published[-1] if published else None
    if not text.isdigit():
        raise CheckpointError(f"Expected an iteration in {tracker}, got {text!r}.")
    if int(text) not in published:
        raise CheckpointError(
            f"Expected {store.root}/{checkpoint_name(int(text))}, which {tracker} names, got checkpoints {published}. "
            "Name one with --ckpt-step, or correct the file."
        )
    if int(text) != published[-1]:
        logger.warning(
            "%s names %s, and %d has been published since; taking that. To go back, use --ckpt-step.",
            tracker,
            text,
            published[-1],
        )
    return published[-1]
