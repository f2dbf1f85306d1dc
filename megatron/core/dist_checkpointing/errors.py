"""The exception for everything that is wrong with what is on disk."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_SHOWN = 8


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read. The message names the path and the reason."""


class CheckpointDamagedError(CheckpointError):
    """A checkpoint that is not intact: truncated, altered, or lacking a file. An older one may be whole."""


def other_model(path: str, problems: Sequence[str]) -> CheckpointError:
    """The error for a checkpoint that is not of the model that it is to be loaded into.

    Args:
        path: the checkpoint.
        problems: what differs, each as a clause.
    """
    more = len(problems) - _MAX_SHOWN
    return CheckpointError(
        f"Expected a checkpoint of this model in {path}, got another: "
        + "; ".join(problems[:_MAX_SHOWN])
        + (f"; and {more} more differences" if more > 0 else "")
        + "."
    )


def few(keys: Sequence[str]) -> str:
    """The first few of a list of keys, and how many more there are."""
    shown, more = ", ".join(keys[:_MAX_SHOWN]), len(keys) - _MAX_SHOWN
    return shown + (f" and {more} more" if more > 0 else "")
