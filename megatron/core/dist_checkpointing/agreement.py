"""How ranks agree about files while they load: every rank learns what one has found.

Ranks exchange JSON of bounded size. `broadcast_object_list` and its like would send pickles, with
which anybody who can write to the connection of two ranks could run code on a rank. Saving needs no
agreement: see [Note: saving] in save/manager.py. The exception are weights for the transformers
library, which all ranks write into the same files (`hf_weights.save_hf`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
)
from megatron.core.issued_collectives import issuing
from megatron.core.options import ConfigError

T = TypeVar("T")

_MOST_BYTES = 64 * 2**20  # of a result
_MOST_CHARACTERS = 16384  # of an error's text
_MOST_ERROR_BYTES = 12 * _MOST_CHARACTERS + 64  # JSON escapes a character with up to 12 bytes

# By the names under which they are sent; an error is of the first kind that it is an instance of.
_KINDS: dict[str, type[CheckpointError] | type[ConfigError]] = {
    "damaged": CheckpointDamagedError,
    "missing": CheckpointNotFoundError,
    "checkpoint": CheckpointError,
    "config": ConfigError,
}


def on_first_rank(action: Callable[[], T], what: str) -> T:
    """Runs `action` on rank 0 and gives every rank its result, or its error.

    So no two ranks see different files, and none waits for a rank that gave up.

    Args:
        action: returns plain data that JSON keeps as it is: no tuples, and strings as keys.
            Anything else fails on all ranks like an error of `action`.
        what: begins the message of an unforeseen error.

    Raises:
        CheckpointError, ConfigError: as `action` raised them; anything else as a CheckpointError
            that begins with `what`.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    content, failure = b"", None
    if is_first:
        encoded, failure = _attempt(
            lambda: _encode({"result": _checked_plain(action())}, _MOST_BYTES), f"{what}: "
        )
        content = encoded or b"" if failure is None else _encode_error(failure)

    if dist.is_initialized() and dist.get_world_size() > 1:
        content = _broadcast(content)
    # Only after the broadcast: the others wait for it.
    if failure is not None:
        raise failure

    answer = _decode(content)
    if answer.keys() == {"result"}:
        result: T = answer["result"]
        return result
    raise _decoded_error(answer)


def on_all_ranks(action: Callable[[], T]) -> T:
    """Runs `action` on every rank, and raises on all of them if it has failed on any.

    Raises:
        CheckpointError, ConfigError: as `action` raised them here, anything else as a
            CheckpointError; or else an error with the text of the first rank that failed. All ranks
            raise the kind of that rank, so all of them go the same way from here.
    """
    result, error = _attempt(action, "")
    # Mostly no rank has failed, and then the ranks exchange nothing but lengths.
    contents = [b"" if error is None else _encode_error(error)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        contents = _gather(contents[0])
    failures = [(rank, content) for rank, content in enumerate(contents) if content]
    if not failures:
        returned: T = result  # type: ignore[assignment]  # it has not failed
        return returned

    rank, content = failures[0]
    first = _decoded_error(_decode(content))
    # This rank's own error has its traceback, so it is raised if it is of the common kind.
    if error is not None and _kind_of(error) == _kind_of(first):
        raise error
    if isinstance(first, ConfigError):
        raise first
    raise type(first)(f"rank {rank}: {first}") from error


def sum_of_ranks(value: int) -> int:
    """The sum of a number over the default process group, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    total = torch.tensor([value], dtype=torch.int64, device=_device_of_group())
    with issuing("all-reduce of a number", total):
        dist.all_reduce(total)
    return int(total)


def _attempt(
    action: Callable[[], T], prefix: str
) -> tuple[T | None, CheckpointError | ConfigError | None]:
    """What an action returns, or what it raises: the other ranks would wait for this one."""
    try:
        return action(), None
    except (CheckpointError, ConfigError) as error:
        return None, error
    except Exception as error:
        failure = CheckpointError(f"{prefix}{type(error).__name__}: {error}")
        failure.__cause__ = error
        return None, failure


def _checked_plain(value: T) -> T:
    """`value`, if other ranks receive an equal one. TypeError otherwise."""
    # On rank 0, too: it would otherwise go on with another value than the rest.
    try:
        is_plain = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError, RecursionError):
        is_plain = False
    if not is_plain:
        raise TypeError(
            f"Expected plain data that JSON keeps as it is, got {type(value).__name__}."
        )
    return value


def _kind_of(error: CheckpointError | ConfigError) -> str:
    return next(name for name, kind in _KINDS.items() if isinstance(error, kind))


def _encode_error(error: CheckpointError | ConfigError) -> bytes:
    return _encode({"error": [_kind_of(error), str(error)[:_MOST_CHARACTERS]]}, _MOST_ERROR_BYTES)


def _encode(answer: dict[str, Any], most_bytes: int) -> bytes:
    content = json.dumps(answer).encode("ascii")
    if len(content) > most_bytes:
        raise ValueError(
            f"Expected at most {most_bytes} bytes to share among ranks, got {len(content)}."
        )
    return content


def _decode(content: bytes) -> dict[str, Any]:
    """The answer that another rank has encoded. RuntimeError for anything else."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise RuntimeError(f"Expected an answer of another rank as JSON, got {content[:80]!r}.")
    return answer


def _decoded_error(answer: dict[str, Any]) -> CheckpointError | ConfigError:
    """The error that another rank has raised. RuntimeError for any other answer."""
    match answer:
        case {"error": [str(kind), str(text)]} if len(answer) == 1 and kind in _KINDS:
            return _KINDS[kind](text)
    raise RuntimeError(f"Expected a result or an error of another rank, got {str(answer)[:80]!r}.")


def _broadcast(content: bytes) -> bytes:
    """The bytes of rank 0, on every rank of the default process group."""
    device = _device_of_group()
    size = torch.tensor(len(content), dtype=torch.int64, device=device)
    with issuing("broadcast of a length", size):
        dist.broadcast(size, src=0)
    num_bytes = _checked_size(int(size), _MOST_BYTES)

    # The content follows in a second broadcast: receivers have to know its size first.
    if dist.get_rank() == 0:
        sent = _as_tensor(content, num_bytes, device)
    else:
        sent = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    with issuing(f"broadcast of {num_bytes} bytes", sent):
        dist.broadcast(sent, src=0)
    return sent.cpu().numpy().tobytes()


def _gather(content: bytes) -> list[bytes]:
    """The bytes of every rank of the default process group, on all of them; each may be empty."""
    device, num_ranks = _device_of_group(), dist.get_world_size()
    own_size = torch.tensor([len(content)], dtype=torch.int64, device=device)
    all_sizes = [torch.empty_like(own_size) for _ in range(num_ranks)]
    with issuing("all-gather of lengths", own_size):
        dist.all_gather(all_sizes, own_size)
    sizes = [_checked_size(int(size), _MOST_ERROR_BYTES) for size in all_sizes]
    if not any(sizes):
        return [b""] * num_ranks

    # All ranks know all sizes, so all pad to the same, as an all-gather needs it.
    own = _as_tensor(content, max(sizes), device)
    padded = [torch.empty_like(own) for _ in range(num_ranks)]
    with issuing("all-gather of results", own):
        dist.all_gather(padded, own)
    return [part[:size].cpu().numpy().tobytes() for part, size in zip(padded, sizes, strict=True)]


def _checked_size(num_bytes: int, most_bytes: int) -> int:
    """RuntimeError before anything of that size is allocated."""
    if not 0 <= num_bytes <= most_bytes:
        raise RuntimeError(f"Expected 0 to {most_bytes} bytes from another rank, got {num_bytes}.")
    return num_bytes


def _device_of_group() -> torch.device:
    """The device for small tensors: the CPU, if the default process group has a backend for it."""
    # A backend per kind of device, "cpu:gloo" for example, separated by commas.
    kinds = [entry.partition(":")[0] for entry in dist.get_backend_config().split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def _as_tensor(content: bytes, numel: int, device: torch.device) -> torch.Tensor:
    """uint8 [numel]: the bytes, and zeros behind them."""
    padded = bytearray(content.ljust(numel, b"\0"))
    return torch.frombuffer(padded, dtype=torch.uint8).to(device)
