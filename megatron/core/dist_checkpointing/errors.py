"""The exception for everything that is wrong with what is on disk."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read. The message names the path and the reason."""


class CheckpointDamagedError(CheckpointError):
    """A checkpoint that is not intact: truncated, altered, or lacking a file. An older one may be whole."""
