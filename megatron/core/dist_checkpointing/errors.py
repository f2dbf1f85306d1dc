"""The exceptions for checkpoints on disk, and how their messages show wrong values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from megatron.core.log import printable

_MAX_SHOWN = 8
_MAX_MESSAGE = 4000  # characters


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read. The message names the path and the reason.

    It is one line of bounded length without control characters, whatever a checkpoint's names are.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message), _MAX_MESSAGE))


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The named checkpoint does not exist."""


class CheckpointDamagedError(CheckpointError):
    """A checkpoint that is truncated, altered or lacks a file. An older one may be intact."""


def fail(expected: str, got: str, source: str) -> NoReturn:
    """Raises the error for a wrong value in a file, which `source` names."""
    # Without the handled error, whose frames would keep the bytes alive.
    raise CheckpointDamagedError(f"Expected {expected} in {source}, got {got}.") from None


def expect_same_model(
    path: str,
    differences: Sequence[str],
    *,
    missing: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> None:
    """CheckpointError for a checkpoint that does not fit the model it is to be loaded into.

    Args:
        path: the checkpoint.
        differences: each as a clause.
        missing, extra: the keys that only the model has, and that only the checkpoint has.
    """
    clauses = [f"it lacks {few(missing)}"] if missing else []
    clauses += [f"it has unexpected keys {few(extra)}"] if extra else []
    clauses += differences
    if clauses:
        more = len(clauses) - _MAX_SHOWN
        raise CheckpointError(
            f"Expected a checkpoint of this model in {path}, got another: "
            + "; ".join(clauses[:_MAX_SHOWN])
            + (f"; and {more} more differences" if more > 0 else "")
            + "."
        )


def few(keys: Sequence[str]) -> str:
    """The first few of a list of keys, and how many more there are."""
    shown, more = ", ".join(keys[:_MAX_SHOWN]), len(keys) - _MAX_SHOWN
    return shown + (f" and {more} more" if more > 0 else "")


def shown(value: object, limit: int = 200, *, depth: int = 2) -> str:
    """A value that was read instead of the expected one, in a few words for a message.

    Not `repr`: a value that was read may contain itself, or one thing a million times.

    Args:
        limit: of characters.
        depth: how many levels of containers are shown; below that, their kinds and lengths.
    """
    if isinstance(value, str):
        return printable(repr(value[:limit]), limit)
    # Python cannot convert an integer of thousands of digits to text.
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, bool | int | float) or value is None:
        return repr(value)

    if isinstance(value, list | tuple) and depth:
        items = [shown(item, limit // 2, depth=depth - 1) for item in value[:_MAX_SHOWN]]
        rest = [f"{len(value) - _MAX_SHOWN} more"] if len(value) > _MAX_SHOWN else []
        return printable(f"[{', '.join(items + rest)}]", limit)
    if isinstance(value, list | tuple | dict | set):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def reason(error: Exception) -> str:
    """An error's text for a message; only its type if it carries objects that were read."""
    # Other arguments may be objects that were read, of any size.
    is_said = all(type(arg) in (str, int) for arg in error.args)
    return f"{type(error).__name__}: {error}" if is_said else type(error).__name__
