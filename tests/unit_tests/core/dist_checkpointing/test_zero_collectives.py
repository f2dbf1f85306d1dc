"""A save does not communicate: a rank that saves sends no byte, from any thread.

The tests count the bytes that the process has written to its connections and to the store of the
process group, which is a file here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
import termios
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.save.manager import CheckpointManager, Retention
from megatron.core.dist_checkpointing.store import open_store
from megatron.core.distributed.fsdp.placement import SHARDING_STRATEGIES
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.checkpoint.hf_config import FolderExtras
from megatron.training.checkpoint.hf_weights import HfExport
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.helpers.models import (
    DEVICE,
    HFSDP,
    HSDP,
    Setting,
    Trained,
    manager_of,
)
from tests.unit_tests.training.helpers.hf_folders import QWEN3, VOCAB

NUM_RANKS = 4

needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="reads the bytes sent by sockets from Linux"
)


def _sent_bytes() -> Counter[str]:
    """The bytes that this process has sent, whether or not its peers have received them yet."""
    sent = Counter({"store": _bytes_in_the_store()})
    for path in Path("/proc/self/fd").iterdir():
        # A descriptor that has been closed meanwhile must not be an error.
        with contextlib.suppress(OSError):
            if path.is_socket():
                with socket.socket(fileno=os.dup(int(path.name))) as connection:
                    if _is_tcp(connection):
                        sent[str(path.readlink())] = _written_bytes(connection)
    return sent


def _is_tcp(connection: socket.socket) -> bool:
    families = (socket.AF_INET, socket.AF_INET6)
    return connection.family in families and connection.type == socket.SOCK_STREAM


def _written_bytes(connection: socket.socket) -> int:
    def num_acknowledged() -> int:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked

    while True:
        before = num_acknowledged()
        (num_queued,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
        if num_acknowledged() == before:
            return before + num_queued


def _bytes_in_the_store() -> int:
    """The size of the process group's store: a file, to which every change is appended."""
    store = c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return Path(store.path).stat().st_size


def _bytes_of(work: Callable[[], object]) -> int:
    """The bytes that this rank sends while it works."""
    dist.barrier()
    before = _sent_bytes()
    work()
    # Without sockets closed meanwhile: groups of a previous test that are collected now.
    return (_sent_bytes() - before).total()


def _ways_to_communicate() -> dict[str, int]:
    """The bytes that the least of everything sends."""
    peer = dist.get_rank() ^ 1
    number = torch.ones(1)
    store = c10d._get_default_store()

    def swap() -> None:
        sent = dist.isend(number, peer)
        dist.recv(torch.empty(1), peer)
        sent.wait()

    return {
        "all_reduce": _bytes_of(lambda: dist.all_reduce(number.clone())),
        "barrier": _bytes_of(dist.barrier),
        "send": _bytes_of(swap),
        "store": _bytes_of(lambda: store.set(f"key of rank {peer}", "value")),
        "new_group": _bytes_of(dist.new_group),
    }


@needs_linux
def test_the_least_message_would_be_counted():
    for ways in run_ranks(NUM_RANKS, _ways_to_communicate):
        assert min(ways.values()) > 0, ways


# Saves


class Saved(NamedTuple):
    """What one rank sent during its saves."""

    num_bytes: int  # of a save that is waited for
    num_bytes_beside: int  # of training during a save
    num_bytes_of_training: int  # of the same training without a save
    names: list[str]  # published at the end


def _train(trained: Trained, begin: int, end: int) -> None:
    for number in range(begin, end):
        trained.step(number)
    trained.optimizer.synchronize()


def _save_counted(root: str, setting: Setting, hf_dtype: torch.dtype | None = None) -> Saved:
    """A synchronous save, then an asynchronous one that replaces it.

    Args:
        hf_dtype: of `hf/` in both checkpoints.
    """
    trained, export = Trained(setting, seed=0), None
    if hf_dtype is not None:
        with torch.device("meta"):
            model = GPTModel(QWEN3, VOCAB)
        trained = Trained(setting, seed=0, model=model)
        export = HfExport.of(model, hf_dtype, FolderExtras())
    # The first steps exchange more than later ones.
    _train(trained, 0, 2)
    retention = Retention(keep_last=1)
    manager = CheckpointManager(
        open_store(root), DEVICE, trained.rank, NUM_RANKS, "test", retention=retention
    )
    private = {"rng.torch": torch.get_rng_state()}

    def save(iteration: int) -> None:
        contents = replace(trained.contents(private=private), export=export)
        manager.save(iteration, contents, {"iteration": iteration})

    def save_and_wait() -> None:
        save(2)
        manager.finish()

    def train_beside_a_save() -> None:
        save(4)
        _train(trained, 4, 6)
        assert manager.failure() is None
        manager.finish()
        manager.close()

    num_bytes = _bytes_of(save_and_wait)
    of_training = _bytes_of(lambda: _train(trained, 2, 4))
    beside = _bytes_of(train_beside_a_save)
    dist.barrier()
    return Saved(num_bytes, beside, of_training, open_store(root).folders())


@needs_linux
@pytest.mark.parametrize(
    ("setting", "hf_dtype"),
    [
        (Setting("no_shard", 0.5), None),
        (Setting(HSDP), torch.float32),
        (Setting(fraction=0.5), torch.bfloat16),
        (Setting(HFSDP, 0.5, expert_size=2), None),
        *(
            pytest.param(Setting(strategy, fraction), None, marks=pytest.mark.wide)
            for strategy in (*SHARDING_STRATEGIES, HSDP, HFSDP)
            for fraction in (None, 0.5)
        ),
    ],
    ids=str,
)
def test_not_a_byte_leaves_a_rank_that_saves(tmp_path, setting, hf_dtype):
    for saved in run_ranks(NUM_RANKS, _save_counted, str(tmp_path), setting, hf_dtype):
        assert saved.num_bytes == 0
        assert saved.num_bytes_beside == saved.num_bytes_of_training > 0
        assert saved.names == [checkpoint_name(4)]


class _Full:
    """A store without room for data."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if name == "open_data":
            raise OSError(28, "No space left on device")
        return getattr(self._store, name)


def _fail_counted(root: str) -> tuple[int, str]:
    trained = Trained(Setting(HSDP, fraction=1.0), seed=0)
    store = open_store(root)
    manager = manager_of(_Full(store) if trained.rank == 2 else store, trained)
    failures: list[str] = []

    def save() -> None:
        manager.save(1, trained.contents(), {})
        try:
            manager.finish()
        except CheckpointError as error:
            failures.append(str(error))
        manager.close()

    return _bytes_of(save), "".join(failures)


@needs_linux
def test_that_a_save_has_failed_on_one_rank_is_known_on_all_without_communication(tmp_path):
    for num_bytes, failure in run_ranks(NUM_RANKS, _fail_counted, str(tmp_path)):
        assert num_bytes == 0
        assert "No space left on device" in failure
