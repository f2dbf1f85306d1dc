from __future__ import annotations

import concurrent.futures
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import mesh
from megatron.core.device import Device
from megatron.core.drivers import CudaDriver
from megatron.core.options import ConfigError
from megatron.training.launch import Launch, agree_on_start, process_group
from tests.helpers.ranks import run_ranks

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    """The tests may themselves run under torchrun or Slurm."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def test_without_torchrun_a_process_is_a_world_of_one(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert Launch.from_environment() == Launch(
        rank=0, world_size=1, local_rank=0, local_world_size=1
    )


def test_torchruns_variables_are_read(monkeypatch):
    for name, value in zip(NAMES, ("5", "8", "1", "4"), strict=True):
        monkeypatch.setenv(name, value)
    assert Launch.from_environment() == Launch(
        rank=5, world_size=8, local_rank=1, local_world_size=4
    )


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, 0),
        ({"SLURM_RESTART_COUNT": "2"}, 2),
        ({"TORCHELASTIC_RESTART_COUNT": "3"}, 3),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": "2"}, 0),
    ],
)
@pytest.mark.parametrize("rank", ["0", None])
def test_restarts_are_counted_by_torchrun_or_else_by_slurm(monkeypatch, counts, expected, rank):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {**counts, **({} if rank is None else dict.fromkeys(NAMES, "1"))}.items():
        monkeypatch.setenv(name, value)
    assert Launch.from_environment().restart_count == expected


def test_an_invalid_count_of_restarts_is_rejected(monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "twice")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="SLURM_RESTART_COUNT: expected an integer, got 'twice'"):
        Launch.from_environment()


def test_a_rank_of_torchrun_detects_that_its_agent_would_restart_it(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert not Launch.from_environment().is_elastic
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert Launch.from_environment().is_elastic


def test_an_incomplete_environment_is_rejected(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="torchrun: expected integers in RANK, WORLD_SIZE"):
        Launch.from_environment()


def test_a_process_alone_opens_and_closes_its_own_group(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert not dist.is_initialized()
    with process_group(Launch(), Device("cpu"), timeout_minutes=1.0):
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()


@pytest.mark.parametrize(("watched", "timeout"), [(None, None), (40.0, 140.0), (5.0, 70.0)])
def test_where_a_watchdog_will_run_the_backend_of_a_gpu_leaves_failures_to_it(
    monkeypatch, watched, timeout
):
    """Before the group is made, since that reads the settings; and its own timeout is the longer
    one.
    """
    done: list[object] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(CudaDriver, "collective_backend", "gloo")
    monkeypatch.setattr(
        CudaDriver, "prepare_collectives", lambda _self: done.append(dist.is_initialized())
    )
    monkeypatch.setattr(
        mesh, "set_timeout", lambda _device, timeout: done.append(timeout.total_seconds())
    )
    monkeypatch.setattr(mesh, "connect", done.append)
    with process_group(Launch(), Device("cuda"), timeout_minutes=1.0, watched_seconds=watched):
        pass
    assert done == [*([] if watched is None else [False, timeout]), torch.device("cuda", 0)]


def _existing_group() -> bool:
    with process_group(Launch.from_environment(), Device("cpu"), timeout_minutes=1.0):
        pass
    with (
        pytest.raises(RuntimeError, match="Expected a process group of 3 ranks, got one of 2"),
        process_group(Launch(world_size=3), Device("cpu"), timeout_minutes=1.0),
    ):
        pass
    return dist.is_initialized()


def test_a_group_that_is_there_is_used_and_left_standing():
    assert run_ranks(2, _existing_group) == [True, True]


def _start(store: dist.Store, world_size: int, seconds: float = 30.0) -> list[str]:
    """The names that the ranks of one start agree on, each rank a thread."""
    with ThreadPoolExecutor(world_size) as pool:
        ranks = [
            pool.submit(agree_on_start, store, rank, world_size, timedelta(seconds=seconds))
            for rank in range(world_size)
        ]
        return [rank.result() for rank in ranks]


def test_every_start_from_one_store_has_a_name_of_its_own_on_which_its_ranks_agree():
    """Also when it has fewer ranks, or more, than the one before."""
    store = dist.HashStore()
    names = []
    for world_size in (3, 3, 2, 4, 1):
        agreed = _start(store, world_size)
        assert len(set(agreed)) == 1
        names.append(agreed[0])
    assert len(set(names)) == 5


class _CountingStore:
    """A store that counts the bytes that a rank reads of the records of others."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.records: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        content: bytes = self._store.get(key)
        self.records[key] = len(content)
        return content


@pytest.mark.parametrize("world_size", [3, 24])
def test_a_rank_reads_one_short_record_however_many_start(world_size):
    store = dist.HashStore()
    with ThreadPoolExecutor(world_size) as pool:
        stores = [_CountingStore(store) for _ in range(world_size)]
        ranks = [
            pool.submit(agree_on_start, own, rank, world_size, timedelta(seconds=60))
            for rank, own in enumerate(stores)
        ]
        assert len({rank.result() for rank in ranks}) == 1
    for rank, own in enumerate(stores[1:], 1):
        assert own.records.keys() == {f"start/welcome/{rank}"}
        assert max(own.records.values()) < 128


def test_values_of_an_earlier_start_are_ignored():
    """Rank 0 finds a hello and a ready of everybody, and still waits for the ranks of its own
    start.
    """
    store = dist.HashStore()
    _start(store, 2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(agree_on_start, store, 0, 2, timedelta(seconds=30))
        with pytest.raises(concurrent.futures.TimeoutError):
            first.result(0.5)
        second = pool.submit(agree_on_start, store, 1, 2, timedelta(seconds=30))
        assert first.result() == second.result()


def test_a_rank_does_not_continue_with_the_welcome_of_an_earlier_start():
    store = dist.HashStore()
    _start(store, 2)
    with pytest.raises(
        RuntimeError, match="Expected rank 0 of this start, got one of an earlier start"
    ):
        agree_on_start(store, 1, 2, timedelta(seconds=0.3))


def test_ranks_that_do_not_come_are_named():
    with pytest.raises(
        RuntimeError,
        match=r"Expected all ranks to start, got no start/hello/1, start/hello/2 in the",
    ):
        agree_on_start(dist.HashStore(), 0, 3, timedelta(seconds=0.3))
    store = dist.HashStore()
    _start(store, 3)
    with pytest.raises(
        RuntimeError,
        match=r"Expected all 3 ranks, got no response from rank 1, rank 2, within the timeout",
    ):
        agree_on_start(store, 0, 3, timedelta(seconds=0.3))


@pytest.mark.parametrize(
    "value",
    ['{"name": "theirs", "to": []}', '{"name": 1, "to": {}, "number": [[1]]}', "[", "\xff", "{}"],
)
def test_foreign_values_in_the_store_do_not_prevent_agreement(value):
    store = dist.HashStore()
    for key in ("start/welcome/1", "start/hello/1", "start/ready/1"):
        store.set(key, value)
    names = _start(store, 2)
    assert names[0] == names[1] != "theirs"
