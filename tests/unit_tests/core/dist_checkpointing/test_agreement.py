"""What one rank finds, all hear of."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron.core.dist_checkpointing.agreement import on_all_ranks, on_first_rank
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.options import ConfigError
from tests.ranks import run_ranks


def _different_views() -> list[str]:
    found = [on_first_rank(lambda: f"seen by {dist.get_rank()}", "looking")]
    for error in (ConfigError("--x: y"), OSError("gone")):
        with pytest.raises((ConfigError, CheckpointError)) as raised:
            on_first_rank(lambda error=error: _raise(error), "looking")
        found.append(f"{type(raised.value).__name__}: {raised.value}")
    return found


def _raise(error: Exception) -> None:
    raise error


def test_all_ranks_get_what_rank_zero_found():
    expected = ["seen by 0", "ConfigError: --x: y", "CheckpointError: looking: OSError: gone"]
    assert run_ranks(2, _different_views) == [expected, expected]


def _failing_on(rank: int, error: Exception) -> str:
    with pytest.raises((ConfigError, CheckpointError)) as raised:
        on_all_ranks(lambda: _raise(error) if dist.get_rank() == rank else None)
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("error", [CheckpointDamagedError("a bit"), CheckpointError("a key"), ConfigError("--x: y")])
def test_what_fails_on_one_rank_fails_on_all_in_the_same_way(error):
    first, second = run_ranks(2, _failing_on, 1, error)
    prefix = "" if isinstance(error, ConfigError) else "rank 1: "
    assert first == f"{type(error).__name__}: {prefix}{error}"
    assert second == f"{type(error).__name__}: {error}"


def _succeeding() -> int:
    return on_all_ranks(dist.get_rank)


def test_without_a_failure_every_rank_has_its_own_result():
    assert run_ranks(2, _succeeding) == [0, 1]


def _differently() -> str:
    def fail() -> None:
        raise CheckpointDamagedError("a bit") if dist.get_rank() else CheckpointError("a key")

    with pytest.raises(CheckpointError) as raised:
        on_all_ranks(fail)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_ranks_that_fail_differently_all_take_the_way_of_the_first():
    assert run_ranks(2, _differently) == ["CheckpointError: a key", "CheckpointError: rank 0: a key"]
