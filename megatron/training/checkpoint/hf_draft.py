"""The hidden folder in which weights are written, until it gets its name in one rename.

    .gpt.4f0c93aa.writing/    beside the folder `gpt` that it becomes

A save that is killed leaves its draft. The next one into the same folder deletes it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.files import remove_empty_folder
from megatron.core.log import printable


def draft_path(folder: Path, token: str) -> Path:
    """The draft of a folder; the token is in no other draft's name."""
    return folder.parent / f".{folder.name}.{token}.writing"


def _sweep_drafts(folder: Path) -> None:
    """Deletes what killed saves to a folder have left."""
    pattern = re.compile(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{8}}\.writing")
    for name in LocalStore(folder.parent).folders():
        if pattern.fullmatch(name):
            shutil.rmtree(folder.parent / name, ignore_errors=True)


def prepare_target(folder: Path) -> str:
    """Checks that a folder is free, or removes it if it is empty. Deletes what is left of earlier
    saves.

    Returns:
        The token of the draft to make.

    Raises:
        CheckpointError: if something is there.
        OSError: if the folder that it is in cannot be made.
    """
    remove_empty_folder(folder)
    _expect_nothing(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep_drafts(folder)
    return secrets.token_hex(4)


def publish_draft(draft: Path, folder: Path) -> None:
    """Gives a draft, whose files are on disk, its name. CheckpointError if that is taken."""
    _expect_nothing(folder)
    LocalStore(folder.parent).publish(draft.name, folder.name)


def _expect_nothing(folder: Path) -> None:
    if not os.path.lexists(folder):
        return

    got = "a file" if folder.exists() else "a link to nothing"
    if folder.is_dir():
        inside = next(iter(sorted(folder.iterdir())), None)
        got = "an empty one that cannot be replaced"
        if inside is not None:
            got = f"one that holds {printable(inside.name)}"
    raise CheckpointError(
        f"Expected an absent or empty folder at {folder}, got {got}. Weights are never overwritten."
    )
