"""How ranks come to agree about files while they load: what one has found, all hear of. Saving needs none of this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.options import ConfigError

T = TypeVar("T")


def on_first_rank(action: Callable[[], T], what: str) -> T:
    """Runs `action` on rank 0 and gives every rank its result, or its error, so that no two ranks see different files
    and none waits for a rank that gave up.

    Raises:
        CheckpointError, ConfigError: as `action` raised them; anything else as a CheckpointError that begins with
            `what`.
    """
    outcome: list[Any] = [None, None]  # result, error
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except (CheckpointError, ConfigError) as failure:
            outcome[1] = failure
        except Exception as failure:
            outcome[1] = CheckpointError(f"{what}: {type(failure).__name__}: {failure}")
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    result, error = outcome
    if error is not None:
        raise error
    returned: T = result
    return returned


def on_all_ranks(action: Callable[[], T]) -> T:
    """Runs `action` on every rank, and raises on all of them if it has failed on any.

    Raises:
        CheckpointError, ConfigError: as `action` raised them here, anything else as a CheckpointError; otherwise a
            CheckpointDamagedError or CheckpointError that says what the first rank that failed has raised. The kind
            is that of the first rank, so that all ranks take the same way from here.
    """
    result: T | None = None
    error: CheckpointError | ConfigError | None = None
    try:
        result = action()
    except (CheckpointError, ConfigError) as failure:
        error = failure
    except Exception as failure:  # or the other ranks would wait for this one
        error = CheckpointError(f"{type(failure).__name__}: {failure}")
        error.__cause__ = failure
    failures: list[Any] = [error]
    if dist.is_initialized() and dist.get_world_size() > 1:
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, error)
    for rank, first in enumerate(failures):
        if first is None:
            continue
        if error is not None and type(error) is type(first):
            raise error
        if isinstance(first, ConfigError):
            raise first
        kind = CheckpointDamagedError if isinstance(first, CheckpointDamagedError) else CheckpointError
        raise kind(f"rank {rank}: {first}") from error
    returned: T = result  # type: ignore[assignment]  # it has not failed
    return returned
