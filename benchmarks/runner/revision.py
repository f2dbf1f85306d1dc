"""Of which code a result was measured."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Revision:
    """The commit, and whether files differ from it; None for both where there is no git."""

    commit: str | None
    is_dirty: bool | None

    @classmethod
    def of(cls, root: Path) -> Revision:
        commit = _git(root, "rev-parse", "HEAD")
        # Results of earlier runs say nothing about the code.
        changes = _git(root, "status", "--porcelain", "--", ".", ":!benchmarks/results")
        return cls(commit, None if commit is None or changes is None else bool(changes))


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints; None where there is no git, or no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
