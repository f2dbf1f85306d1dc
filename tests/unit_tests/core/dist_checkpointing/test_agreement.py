"""A result or an error of one rank reaches all ranks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.agreement import (
    first_content,
    least_of_ranks,
    on_all_ranks,
    on_first_rank,
    sum_of_ranks,
)
from megatron.core.dist_checkpointing.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
)
from megatron.core.options import ConfigError
from tests.helpers.ranks import run_ranks

PLAIN = {"a": [1, -(2**80), 2.5, None, True, "\u2028é\ud800"], "b": {}}


def _answers() -> list[object]:
    rank = dist.get_rank()
    found: list[object] = [
        on_first_rank(lambda: f"seen by {rank}", "looking"),
        on_first_rank(lambda: PLAIN if rank == 0 else None, "looking"),
        on_first_rank(lambda: ("one", "kind"), "looking"),
        on_all_ranks(lambda: 10 + rank) - rank,
        sum_of_ranks(2**40 + rank),
        least_of_ranks(-(2**40) - rank),
        first_content(b"of 1" if rank else b""),
    ]
    for error in (ConfigError("--x: y"), OSError("gone")):
        with pytest.raises((ConfigError, CheckpointError)) as raised:
            on_first_rank(lambda error=error: _raise(error), "looking")
        found.append(f"{type(raised.value).__name__}: {raised.value}")
    return found


def _raise(error: Exception) -> None:
    raise error


def test_all_ranks_get_what_rank_zero_found_their_own_results_and_sums():
    errors = ["ConfigError: --x: y", "CheckpointError: looking: OSError: gone"]
    expected = ["seen by 0", PLAIN, ["one", "kind"], 10, 2**41 + 1]
    expected += [-(2**40) - 1, (1, b"of 1"), *errors]
    assert run_ranks(2, _answers) == [expected, expected]
    assert sum_of_ranks(5) == least_of_ranks(5) == 5


def _failing_on(rank: int, error: Exception) -> str:
    with pytest.raises((ConfigError, CheckpointError)) as raised:
        on_all_ranks(lambda: _raise(error) if dist.get_rank() == rank else None)
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize(
    "error",
    [
        CheckpointDamagedError("a bit"),
        CheckpointNotFoundError("a directory"),
        ConfigError("--x: y"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all(error):
    first, second = run_ranks(2, _failing_on, 1, error)
    prefix = "" if isinstance(error, ConfigError) else "rank 1: "
    assert first == f"{type(error).__name__}: {prefix}{error}"
    assert second == f"{type(error).__name__}: {error}"


def _differently() -> str:
    def fail() -> None:
        raise CheckpointDamagedError("a bit") if dist.get_rank() else CheckpointError("a key")

    with pytest.raises(CheckpointError) as raised:
        on_all_ranks(fail)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_different_errors_become_the_first_ranks_kind_on_all():
    assert run_ranks(2, _differently) == [
        "CheckpointError: a key",
        "CheckpointError: rank 0: a key",
    ]


def _answers_to(value: object) -> str:
    with pytest.raises(CheckpointError) as raised:
        on_first_rank(lambda: value, "looking")
    return str(raised.value)


def test_a_value_that_json_cannot_represent_is_rejected_on_all_ranks_and_on_a_single_one():
    for message in (*run_ranks(2, _answers_to, {"a"}), _answers_to({"a"})):
        assert message.startswith("looking: TypeError")
        assert "set" in message


def _long_errors(kind: type[Exception]) -> list[int]:
    lengths = []
    for share in (lambda action: on_first_rank(action, "looking"), on_all_ranks):
        with pytest.raises(kind) as raised:
            share(lambda: _raise(kind("\U0001f600" * 10**6)) if dist.get_rank() == 0 else None)
        lengths.append(len(str(raised.value)))
    return lengths


def test_the_text_of_an_error_is_bounded_when_it_is_sent():
    first, second = run_ranks(2, _long_errors, ConfigError)
    assert first == [10**6, 10**6]
    assert second == [16384, 16384]
    # The text of a CheckpointError is always bounded.
    assert run_ranks(2, _long_errors, CheckpointError) == [[4000, 4000], [4000, 4000]]


def _receive(size: int, content: bytes) -> str:
    """The error of rank 1 when rank 0 sends this."""
    if dist.get_rank() == 0:
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(sizes, torch.tensor([size]))
        if content:
            dist.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8), src=0)
        return ""
    with pytest.raises(RuntimeError) as raised:
        on_first_rank(lambda: None, "looking")
    return str(raised.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x80\x04K\x01.", r"b'\x80\x04K\x01.'"),
        (b"[1]", "b'[1]'"),
        (b'{"error": ["SystemExit", "x"]}', "SystemExit"),
    ],
)
def test_other_messages_than_those_of_a_rank_are_rejected_and_a_pickle_is_not_read(
    content, expected
):
    assert expected in run_ranks(2, _receive, len(content), content)[1]


@pytest.mark.parametrize("size", [-1, 2**62])
def test_a_size_out_of_bounds_is_rejected_before_memory_is_allocated(size):
    assert f"got {size}" in run_ranks(2, _receive, size, b"")[1]


def test_no_pickle_travels_between_the_ranks_of_a_run():
    """PyTorch's planners are the exception, which docs/security.md names."""
    root = Path(__file__).resolve().parents[4] / "megatron"
    callers = [
        str(path.relative_to(root))
        for path in sorted(root.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and re.fullmatch(r"\w+_object_list|(all_)?gather_object", node.attr)
    ]
    assert callers == []
