"""The exception for everything that is wrong with what is on disk."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.log import printable

_MAX_SHOWN = 8
_MAX_MESSAGE = 4000  # characters


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read. The message names the path and the reason.

    It is one line of bounded length without control characters, whatever a checkpoint's names are.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message), _MAX_MESSAGE))


class CheckpointDamagedError(CheckpointError):
    """A checkpoint that is not intact: truncated, altered, or lacking a file. An older one may be
    whole.
    """


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


def shown(value: object, limit: int = 200, *, depth: int = 2) -> str:
    """What was read instead of what was expected, as a few words of a message.

    Not `repr`: a value that was read may hold itself, or one thing a million times.

    Args:
        limit: of characters.
        depth: how many levels of containers are shown; below that, their kinds and lengths.
    """
    if isinstance(value, str):
        return printable(repr(value[:limit]), limit)
    if isinstance(value, bool | float) or value is None:
        return repr(value)
    if isinstance(value, int):
        # Python refuses to write down an integer of thousands of digits.
        return (
            repr(value) if value.bit_length() <= 256 else f"an integer of {value.bit_length()} bits"
        )
    if isinstance(value, list | tuple) and depth:
        items = [shown(item, limit // 2, depth=depth - 1) for item in value[:_MAX_SHOWN]]
        rest = [f"{len(value) - _MAX_SHOWN} more"] if len(value) > _MAX_SHOWN else []
        return printable(f"[{', '.join(items + rest)}]", limit)
    if isinstance(value, list | tuple | dict | set):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def reason(error: Exception) -> str:
    """What an error says, in a message: not more than its kind if it carries what was read."""
    is_said = all(type(arg) in (str, int) for arg in error.args)
    return f"{type(error).__name__}: {error}" if is_said else type(error).__name__
