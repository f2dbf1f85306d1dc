"""Agreement among ranks about files: a result or an error of one rank reaches all of them.

Ranks exchange JSON of bounded size. `broadcast_object_list` and its like would send pickles, with
which an attacker who can write to the connection of two ranks could run code on a rank. Saving
needs no agreement: see [Note: saving] in save/manager.py. The exception are weights for the
transformers library, which all ranks write into the same files (`hf_weights.save_hf`).
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

# By the names under which they are sent; an error is of the first kind that it is an instance of.
_KINDS: dict[str, type[CheckpointError] | type[ConfigError]] = {
    "damaged": CheckpointDamagedError,
    "missing": CheckpointNotFoundError,
    "checkpoint": CheckpointError,
    "config": ConfigError,
}


def on_first_rank(action: Callable[[], T], what: str) -> T:
    """Runs `action` on rank 0, and returns its result or raises its error on every rank.

    So no two ranks see different files, and no rank waits for one that has failed.

    Args:
        action: returns plain data. All ranks get its JSON form, in which tuples are lists and keys
            are strings. Data that JSON cannot represent is an error on all ranks.
        what: the prefix of the message of an unforeseen error.

    Raises:
        CheckpointError, ConfigError: as `action` raised them; anything else as a CheckpointError
            with the prefix `what`.
    """
    content, failure = b"", None
    if not dist.is_initialized() or dist.get_rank() == 0:
        encoded, failure = _attempt(
            lambda: json.dumps({"result": action()}).encode("ascii"), f"{what}: "
        )
        content = encoded or b"" if failure is None else _encode_error(failure)

    answer = _decode(first_content(content)[1])
    # Only after the exchange, which the other ranks wait for.
    if failure is not None:
        raise failure
    if answer.keys() == {"result"}:
        result: T = answer["result"]
        return result
    raise _decoded_error(answer)


def on_all_ranks(action: Callable[[], T]) -> T:
    """Runs `action` on every rank, and raises an error on all of them if it has failed on any.

    Raises:
        CheckpointError, ConfigError: as `action` raised them here, anything else as a
            CheckpointError; or else an error with the text of the first rank that failed. All ranks
            raise the kind of that rank, so that they handle it alike.
    """
    result, error = _attempt(action, "")
    # Usually no rank has failed, and the ranks exchange only lengths.
    rank, content = first_content(b"" if error is None else _encode_error(error))
    if not content:
        returned: T = result  # type: ignore[assignment]  # it has not failed
        return returned

    first = _decoded_error(_decode(content))
    # This rank's error has a traceback, so it is raised if it has the common kind.
    if error is not None and _kind_of(error) == _kind_of(first):
        raise error
    if isinstance(first, ConfigError):
        raise first
    raise type(first)(f"rank {rank}: {first}") from error


def sum_of_ranks(value: int) -> int:
    """The sum of a number over the default process group, on every rank."""
    return _reduced(value, dist.ReduceOp.SUM)


def least_of_ranks(value: int) -> int:
    """The least of all numbers in the default process group, on every rank."""
    return _reduced(value, dist.ReduceOp.MIN)


def first_content(content: bytes) -> tuple[int, bytes]:
    """The first rank of the default process group whose content is not empty, and its content."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0, content

    device, num_ranks = _device_of_group(), dist.get_world_size()
    own_size = torch.tensor([len(content)], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(own_size) for _ in range(num_ranks)]
    with issuing("all-gather of lengths", own_size):
        dist.all_gather(sizes, own_size)
    rank, size = next(((i, int(each)) for i, each in enumerate(sizes) if each), (0, 0))
    # Before memory of that size is allocated.
    if not 0 <= size <= _MOST_BYTES:
        raise RuntimeError(f"Expected 0 to {_MOST_BYTES} bytes from another rank, got {size}.")
    if not size:
        return rank, b""

    shared = torch.empty(size, dtype=torch.uint8, device=device)
    if rank == dist.get_rank():
        shared.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    with issuing(f"broadcast of {size} bytes", shared):
        dist.broadcast(shared, src=rank)
    return rank, shared.cpu().numpy().tobytes()


def _reduced(value: int, op: dist.ReduceOp.RedOpType) -> int:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return int(value)
    total = torch.tensor([value], dtype=torch.int64, device=_device_of_group())
    with issuing("all-reduce of a number", total):
        dist.all_reduce(total, op)
    return int(total)


def _attempt(
    action: Callable[[], T], prefix: str
) -> tuple[T | None, CheckpointError | ConfigError | None]:
    """The result or the error of an action. The other ranks would wait if it were raised here."""
    try:
        return action(), None
    except (CheckpointError, ConfigError) as error:
        return None, error
    except Exception as error:
        failure = CheckpointError(f"{prefix}{type(error).__name__}: {error}")
        failure.__cause__ = error
        return None, failure


def _encode_error(error: CheckpointError | ConfigError) -> bytes:
    return json.dumps({"error": [_kind_of(error), str(error)[:_MOST_CHARACTERS]]}).encode("ascii")


def _kind_of(error: CheckpointError | ConfigError) -> str:
    return next(name for name, kind in _KINDS.items() if isinstance(error, kind))


def _decode(content: bytes) -> dict[str, Any]:
    """The message of another rank. RuntimeError for anything but a JSON object."""
    try:
        message = json.loads(content)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise RuntimeError(f"Expected a message of another rank as JSON, got {content[:80]!r}.")
    return message


def _decoded_error(message: dict[str, Any]) -> CheckpointError | ConfigError:
    """The error that another rank has raised. RuntimeError for any other message."""
    match message:
        case {"error": [str(kind), str(text)]} if len(message) == 1 and kind in _KINDS:
            return _KINDS[kind](text)
    raise RuntimeError(f"Expected a result or an error of another rank, got {str(message)[:80]!r}.")


def _device_of_group() -> torch.device:
    """The device for small tensors: the CPU, if the default process group has a backend for it."""
    # A backend per kind of device, "cpu:gloo" for example, separated by commas.
    kinds = [entry.partition(":")[0] for entry in dist.get_backend_config().split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])
