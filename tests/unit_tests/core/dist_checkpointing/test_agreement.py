"""What one rank finds, all hear of."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import agreement
from megatron.core.dist_checkpointing.agreement import on_all_ranks, on_first_rank, sum_of_ranks
from megatron.core.dist_checkpointing.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
)
from megatron.core.options import ConfigError
from tests.helpers.ranks import run_ranks


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


@pytest.mark.parametrize(
    "error",
    [
        CheckpointDamagedError("a bit"),
        CheckpointNotFoundError("a folder"),
        CheckpointError("a key"),
        ConfigError("--x: y"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all_in_the_same_way(error):
    first, second = run_ranks(2, _failing_on, 1, error)
    prefix = "" if isinstance(error, ConfigError) else "rank 1: "
    assert first == f"{type(error).__name__}: {prefix}{error}"
    assert second == f"{type(error).__name__}: {error}"


def _succeeding() -> int:
    return on_all_ranks(dist.get_rank)


def test_numbers_of_all_ranks_are_summed_on_each():
    assert run_ranks(2, lambda: sum_of_ranks(2**40 + dist.get_rank())) == [2**41 + 1] * 2
    assert sum_of_ranks(5) == 5


def test_without_a_failure_every_rank_has_its_own_result():
    assert run_ranks(2, _succeeding) == [0, 1]


def _differently() -> str:
    def fail() -> None:
        raise CheckpointDamagedError("a bit") if dist.get_rank() else CheckpointError("a key")

    with pytest.raises(CheckpointError) as raised:
        on_all_ranks(fail)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_ranks_that_fail_differently_all_take_the_way_of_the_first():
    assert run_ranks(2, _differently) == [
        "CheckpointError: a key",
        "CheckpointError: rank 0: a key",
    ]


PLAIN = {"a": [1, -(2**80), 2.5, None, True, "\u2028é\ud800"], "b": {}}


def _plain_data() -> list[object]:
    return [on_first_rank(lambda: PLAIN if dist.get_rank() == 0 else None, "looking")]


def test_plain_data_arrives_as_it_was():
    assert run_ranks(2, _plain_data) == [[PLAIN], [PLAIN]]


def _answers_to(value: object) -> str:
    with pytest.raises(CheckpointError) as raised:
        on_first_rank(lambda: value, "looking")
    return str(raised.value)


@pytest.mark.parametrize(
    ("value", "name"), [((1, 2), "tuple"), ({1: 2}, "dict"), ({"a"}, "set"), ([b"x"], "list")]
)
def test_what_json_would_change_is_refused_on_all_ranks_also_in_a_world_of_one(value, name):
    expected = f"looking: TypeError: Expected plain data that JSON keeps as it is, got {name}."
    assert run_ranks(2, _answers_to, value) == [expected, expected]
    assert _answers_to(value) == expected


def _long_errors(kind: type[Exception]) -> list[int]:
    lengths = []
    for share in (lambda action: on_first_rank(action, "looking"), on_all_ranks):
        with pytest.raises(kind) as raised:
            share(lambda: _raise(kind("\U0001f600" * 10**6)) if dist.get_rank() == 0 else None)
        lengths.append(len(str(raised.value)))
    return lengths


def test_the_text_of_an_error_is_bounded_where_it_travels():
    first, second = run_ranks(2, _long_errors, ConfigError)
    assert first == [10**6, 10**6]
    assert second == [16384, 16384]
    # This one is bounded wherever it is raised.
    assert run_ranks(2, _long_errors, CheckpointError) == [[4000, 4000], [4000, 4000]]


def _receive(size: int, content: bytes) -> str:
    """What rank 1 makes of a rank 0 that sends this."""
    if dist.get_rank() == 0:
        dist.broadcast(torch.tensor(size), src=0)
        if content:
            dist.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8), src=0)
        return ""
    with pytest.raises(RuntimeError) as raised:
        on_first_rank(lambda: None, "looking")
    return str(raised.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            b"\x80\x04K\x01.",
            "Expected an answer of another rank as JSON, got b'\\x80\\x04K\\x01.'.",
        ),
        (b"[" * 10**5, "Expected an answer of another rank as JSON, got b'[["),
        (b"[1]", "Expected an answer of another rank as JSON, got b'[1]'."),
        (b'{"error": ["SystemExit", "x"]}', "Expected a result or an error of another rank, got"),
        (b'{"error": [1, 2]}', "Expected a result or an error of another rank, got"),
    ],
)
def test_what_is_no_answer_of_a_rank_is_refused_and_a_pickle_is_not_read(content, expected):
    assert run_ranks(2, _receive, len(content), content)[1].startswith(expected)


@pytest.mark.parametrize("size", [-1, 2**26 + 1, 2**62])
def test_a_size_without_bounds_is_refused_before_anything_is_allocated(size):
    expected = f"Expected 0 to 67108864 bytes from another rank, got {size}."
    assert run_ranks(2, _receive, size, b"")[1] == expected


def test_a_group_whose_backend_takes_no_cpu_tensors_is_served_on_its_own_device(monkeypatch):
    for config, device in [
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl", "cuda"),
        ("xpu:xccl", "xpu"),
    ]:
        monkeypatch.setattr(dist, "get_backend_config", lambda config=config: config)
        assert agreement._device_of_group() == torch.device(device)


def test_no_pickle_travels_between_the_ranks_of_a_run():
    """But for PyTorch's own planners, which docs/security.md names."""
    root = Path(__file__).resolve().parents[4] / "megatron"
    callers = [
        str(path.relative_to(root))
        for path in sorted(root.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and re.fullmatch(r"\w+_object_list|(all_)?gather_object", node.attr)
    ]
    assert callers == []
