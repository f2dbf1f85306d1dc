"""Saving beside the training: what is saved is what there was, and the training goes on as if
nothing were saved.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import logging
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.device import Device
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.manifest import BLOCK_BYTES
from megatron.core.dist_checkpointing.format.names import checkpoint_name, published_iterations
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.save import data_file
from megatron.core.dist_checkpointing.save import manager as manager_module
from megatron.core.dist_checkpointing.save import writer as writer_module
from megatron.core.dist_checkpointing.save.data_file import BufferPool, DataFileWriter
from megatron.core.dist_checkpointing.save.data_sink import DataSink
from megatron.core.dist_checkpointing.save.manager import CheckpointManager, Retention
from megatron.core.dist_checkpointing.state import tensor_bytes
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.entries import Contents, Entry, Stored
from megatron.core.dist_checkpointing.state.param_groups import PARAM_GROUPS
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.distributed.fsdp import (
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
)
from megatron.core.host_memory import HostLimits
from megatron.core.lanes import delays
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.kernels.host_adam import HostAdam
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.helpers.scenes import GatedStore, memory_folder

CPU = Device("cpu")
DIM = 64  # a rank's part of each matrix is more than what a save may copy, on 2 ranks too
FRACTIONS = (None, 0.0, 0.5, 1.0)
Parts = dict[
    str, tuple[tuple[int, ...], torch.Tensor]
]  # by key: what this rank has, and where it begins


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, 2 * DIM)
        self.second = nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Model(nn.Module):
    """Three layers, and a matrix before them, which the root has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Training:
    """A sharded model and its optimizer: plain, or with a fraction on the host and everything
    overlapping.
    """

    def __init__(self, fraction: float | None, *, with_states: bool = True, **options: Any) -> None:
        self.model = Model()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
        with fully_shard_context("cpu"):
            for module in (*self.model.layers, self.model):
                fully_shard(module, mesh, Placements.for_strategy("optim_grads_params"), policy)
        if fraction is None:
            self.optimizer: torch.optim.Optimizer = FusedAdam(self.model.parameters(), **options)
        else:
            overlaps = {"overlap_step_with_forward": True, "fetch_during_backward": True}
            self.optimizer = HybridDeviceOptimizer(self.model.parameters(), fraction, **overlaps)
        self.with_states = with_states

    def backward(self, number: int) -> None:
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        (self.model(torch.randn(4, DIM, generator=generator)) - 1).square().mean().backward()

    def update(self, number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 / (number + 1)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def contents(self) -> Contents:
        return collect(
            self.model,
            self.optimizer,
            with_states=self.with_states,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )

    def parts(self) -> Parts:
        """Copies of all there is now."""
        if isinstance(self.optimizer, HybridDeviceOptimizer):
            self.optimizer.synchronize()
        return parts_of(self.contents())


def parts_of(contents: Contents) -> Parts:
    return {
        entry.key: (entry.offsets, entry.part_of(entry.values.read()).clone())
        for entry in contents.entries
    }


def is_same(parts: Parts, others: Parts) -> bool:
    assert parts.keys() == others.keys()
    return all(torch.equal(value, others[key][1]) for key, (_, value) in parts.items())


def saved_parts(root: Path, iteration: int, like: Parts) -> Parts:
    """What a checkpoint has where this rank has its parts."""
    checkpoint = PublishedCheckpoint.open(LocalStore(root), checkpoint_name(iteration))
    assert set(checkpoint.tensors()) == set(like)
    found = {
        key: (offsets, torch.full_like(part, torch.nan)) for key, (offsets, part) in like.items()
    }
    for key, (offsets, part) in found.items():
        checkpoint.read(key, offsets, part)
    return found


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


# Bits.

NUM_STEPS, SAVED_AFTER = 4, (1, 3)  # steps


class Trained(NamedTuple):
    """What a run came to on one rank."""

    saved: list[Parts]  # what there was after the steps that are saved
    last: Parts


def _train(fraction: float | None, with_states: bool) -> Trained:
    """Without saving anything."""
    training, saved = Training(fraction, with_states=with_states), []
    for number in range(1, NUM_STEPS + 1):
        training.backward(number)
        training.update(number)
        if number in SAVED_AFTER:
            saved.append(training.parts())
    return Trained(saved, training.parts())


def _train_and_save(fraction: float | None, with_states: bool, root: Path, seed: int) -> Parts:
    """Every save begins while updates are under way, and reads nothing before the next update has
    begun.
    """
    training, gate = Training(fraction, with_states=with_states), threading.Event()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with (
        delays(seed),
        CheckpointManager(LocalStore(root), CPU, rank, world_size, "abcd") as manager,
    ):
        for number in range(1, NUM_STEPS + 1):
            training.backward(number)
            assert manager.is_busy or number - 1 not in SAVED_AFTER
            gate.set()
            training.update(number)
            if number in SAVED_AFTER:
                # The save before has been under way all the time until here.
                manager.finish()
                gate, contents = threading.Event(), training.contents()
                hold_all_back(contents, gate)
                manager.save(number, contents, {"number": number})
        gate.set()
        manager.finish()
    return training.parts()


def _saves_what_there_was(
    fraction: float | None, with_states: bool, root: Path, seeds: Sequence[int]
) -> None:
    expected = _train(fraction, with_states)
    assert not is_same(expected.saved[0], expected.saved[1])
    large = [part for _, part in expected.last.values() if part.nbytes > 4096]
    assert sum(part.nbytes for part in large) > 0.9 * sum(
        part.nbytes for _, part in expected.last.values()
    )
    for seed in seeds:
        own = root / f"{seed}"
        assert is_same(_train_and_save(fraction, with_states, own, seed), expected.last), (
            "saving changes nothing"
        )
        for number, parts in zip(SAVED_AFTER, expected.saved, strict=True):
            assert is_same(saved_parts(own, number, parts), parts), seed
            checkpoint = PublishedCheckpoint.open(LocalStore(own), checkpoint_name(number))
            if with_states:
                groups: Any = checkpoint.read_plain(PARAM_GROUPS)
                assert groups[0]["lr"] == 1e-2 / (number + 1)
            assert checkpoint.train_state == {"number": number}


MANY, FEW = range(20), range(20, 25)
DELAYED = [
    (1, 1.0, MANY),
    *((1, fraction, FEW) for fraction in (None, 0.0, 0.5)),
    *((2, fraction, FEW) for fraction in (None, 0.0, 0.5, 1.0)),
]


@pytest.mark.parametrize(
    ("world_size", "fraction", "seeds"),
    [
        *(pytest.param(*case, id=f"{case[0]}-{case[1]}-{len(case[2])}") for case in DELAYED),
        *(
            pytest.param(
                world_size, fraction, MANY, id=f"{world_size}-{fraction}-20", marks=pytest.mark.wide
            )
            for world_size, fraction in itertools.product((1, 2), FRACTIONS)
            if (world_size, fraction, MANY) not in DELAYED
        ),
    ],
)
def test_a_save_beside_the_training_is_what_there_was_whatever_is_delayed(
    home, world_size, fraction, seeds
):
    root = home / f"{fraction}_{world_size}_{len(seeds)}"
    run_ranks(world_size, _saves_what_there_was, fraction, True, root, seeds, timeout=300)


@pytest.mark.parametrize("fraction", [None, 1.0])
def test_a_save_of_weights_alone_is_what_there_was_whatever_is_delayed(home, fraction):
    run_ranks(1, _saves_what_there_was, fraction, False, home / f"weights_{fraction}", range(5))


# Who waits for whom.

SOON = 0.3  # seconds, in which what is not held back would have happened


@contextlib.contextmanager
def saving(
    root: Path, store: LocalStore | None = None, **settings: Any
) -> Iterator[CheckpointManager]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with CheckpointManager(
        store or LocalStore(root), CPU, rank, world_size, "abcd", **settings
    ) as manager:
        yield manager


def hold_back(contents: Contents, unit: int) -> tuple[threading.Event, set[str]]:
    """Has one unit of the states not be read before an event. Returns it, and the keys of the
    unit's tensors.
    """
    gate = threading.Event()
    return gate, _hold_back(
        [group for group in contents.groups if group.unit is not None][unit].entries, gate
    )


def hold_all_back(contents: Contents, gate: threading.Event) -> None:
    """Has nothing be read before an event, but what a save copies when it begins."""
    _hold_back(contents.entries, gate)


def _hold_back(entries: Sequence[Entry], gate: threading.Event) -> set[str]:
    held = [entry for entry in entries if not entry.is_copied]
    for entry in held:
        entry.values.as_stored = _after(gate, entry.values.as_stored)
    return {entry.key for entry in held}


def _after(gate: threading.Event, read: Callable[[], Stored]) -> Callable[[], Stored]:
    def read_then() -> Stored:
        assert gate.wait(60)
        return read()

    return read_then


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def _one_bucket_is_held_back(fraction: float, root: Path) -> None:
    training = Training(fraction)
    training.backward(1)
    training.update(1)
    before, contents = training.parts(), training.contents()
    gate, held = hold_back(contents, -1)
    with saving(root) as manager:
        manager.save(1, contents, {})
        training.backward(2)
        training.update(2)
        *others, last = training.optimizer.state_units()
        for unit in others:
            if unit.updated is not None:
                unit.updated.synchronize()
        waiting = in_thread(last.updated.synchronize)
        waiting.join(SOON)
        assert waiting.is_alive()
        now = parts_of(training.contents())
        changed = {key for key in before if not torch.equal(now[key][1], before[key][1])}
        assert not changed & held
        assert changed >= {key for key, (_, part) in before.items() if part.numel() > 1} - held
        gate.set()
        waiting.join(60)
        manager.finish()
    assert is_same(saved_parts(root, 1, before), before)
    assert not any(torch.equal(training.parts()[key][1], before[key][1]) for key in held)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_buckets_next_update_waits_until_that_bucket_has_been_read_and_no_others_does(
    home, fraction
):
    run_ranks(1, _one_bucket_is_held_back, fraction, home / f"held_{fraction}")


def _the_device_is_held_back(fraction: float | None, unit: int, root: Path) -> None:
    training = Training(fraction)
    training.backward(1)
    training.update(1)
    before, contents = training.parts(), training.contents()
    on_device = [
        group.unit
        for group in contents.groups
        if group.unit is not None and group.unit.updated is None
    ]
    assert len(on_device) == (4 if fraction is None else 2), "the layers, and what the root has"
    gate, held = hold_back(contents, unit)
    with saving(root) as manager:
        manager.save(1, contents, {})
        training.backward(2)
        stepping = in_thread(lambda: training.update(2))
        stepping.join(SOON)
        assert stepping.is_alive()
        # What has been read by then is not held back with the rest.
        now = parts_of(contents)
        changed = {key for key in before if not torch.equal(now[key][1], before[key][1])}
        assert not changed & held
        assert bool(changed) == (unit > 0)
        gate.set()
        stepping.join(60)
        after = training.parts()
        assert not any(torch.equal(after[key][1], before[key][1]) for key in held)
        manager.finish()
    assert is_same(saved_parts(root, 1, before), before)


@pytest.mark.parametrize(("fraction", "unit"), [(None, 0), (None, 3), (0.5, 0), (0.5, 1)])
def test_the_update_of_a_group_on_the_device_waits_until_that_group_has_been_read(
    home, fraction, unit
):
    run_ranks(1, _the_device_is_held_back, fraction, unit, home / f"device_{fraction}_{unit}")


def _begins_beside_an_update(root: Path) -> None:
    training, store, updating = Training(1.0), GatedStore(root), threading.Event()
    with pytest.MonkeyPatch.context() as patch, saving(root, store) as manager:
        real = HostAdam.run

        def run(*args: Any) -> Any:
            assert updating.wait(60)
            return real(*args)

        patch.setattr(HostAdam, "run", run)
        training.backward(1)
        training.update(1)
        manager.save(1, training.contents(), {})
        # Neither the states nor the disk are ready, and here we are.
        assert manager.is_busy
        assert not root.exists()
        store.gate.set()
        updating.set()
        manager.finish()
        expected = training.parts()
    assert is_same(saved_parts(root, 1, expected), expected)


def test_a_save_begins_while_updates_are_under_way_and_while_the_disk_does_nothing(home):
    run_ranks(1, _begins_beside_an_update, home / "beside")


@contextlib.contextmanager
def staging(available: int) -> Iterator[list[BufferPool]]:
    """As if all tensors lay on a device, and the host had so many bytes that are free. Yields the
    pools that are made.

    Buffers are so small that the states of `Training` do not fit into those that there are to begin
    with.
    """
    pools: list[BufferPool] = []

    def small_pool(device: Device, **settings: Any) -> BufferPool:
        pools.append(BufferPool(device, 2, BLOCK_BYTES, **settings))
        return pools[-1]

    with pytest.MonkeyPatch.context() as patch:
        for module in (tensor_bytes, writer_module):
            patch.setattr(module, "lies_on_device", lambda _: True)
        patch.setattr(HostLimits, "read", classmethod(lambda _: HostLimits(available, None)))
        patch.setattr(manager_module, "BufferPool", small_pool)
        patch.setattr(data_file, "SLAB_BUFFERS", 1)  # so that what is staged is what was needed
        yield pools


PLAIN: dict[str, Any] = {}
SCALED = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}


def _steps_while_the_disk_does_nothing(options: dict[str, Any], root: Path) -> None:
    training, store = Training(None, **options), GatedStore(root)
    training.backward(1)
    training.update(1)
    before = training.parts()
    nbytes = sum(part.nbytes for _, part in before.values())
    assert nbytes > 2 * BLOCK_BYTES
    with staging(1 << 30) as pools, saving(root, store, staging_share=0.5) as manager:
        for number in (2, 3):
            manager.save(number, training.contents(), {})
            training.backward(number)
            stepping = in_thread(lambda number=number: training.update(number))
            stepping.join(60)
            assert not stepping.is_alive()
            assert manager.is_busy
            assert not (root / checkpoint_name(number)).exists(), "the disk has done nothing"
            store.gate.set()
            manager.finish()
            store.gate.clear()
            assert is_same(saved_parts(root, number, before), before)
            assert not is_same(training.parts(), before)
            before = training.parts()
        assert 0 < pools[0].staged_bytes <= nbytes + BLOCK_BYTES, (
            "the second save takes what the first has taken"
        )


@pytest.mark.parametrize("options", [PLAIN, SCALED], ids=["plain", "scaled"])
def test_a_step_on_the_device_waits_until_its_states_have_come_down_and_for_no_disk(home, options):
    run_ranks(1, _steps_while_the_disk_does_nothing, options, home / f"staged_{len(options)}")


def _steps_when_the_disk_has_done_something(available: int, share: float, root: Path) -> None:
    training, store = Training(None), GatedStore(root)
    training.backward(1)
    training.update(1)
    before = training.parts()
    with staging(available) as pools, saving(root, store, staging_share=share) as manager:
        manager.save(2, training.contents(), {})
        training.backward(2)
        stepping = in_thread(lambda: training.update(2))
        stepping.join(SOON)
        assert stepping.is_alive()
        store.gate.set()
        stepping.join(60)
        manager.finish()
        assert pools[0].staged_bytes <= share * available
    assert is_same(saved_parts(root, 2, before), before)
    assert not is_same(training.parts(), before)


@pytest.mark.parametrize(("available", "share"), [(BLOCK_BYTES, 0.5), (1 << 30, 0.0)])
def test_where_states_on_the_device_find_no_room_to_be_staged_the_step_waits_for_the_disk(
    home, available, share
):
    run_ranks(
        1, _steps_when_the_disk_has_done_something, available, share, home / f"unstaged_{share}"
    )


def test_what_an_update_waits_for_is_written_before_what_nothing_changes():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad = False
    contents = collect(model, FusedAdam([p for p in model.parameters() if p.requires_grad]))
    assert [group.unit is not None for group in contents.groups] == [True, False, False, False]
    first = contents.groups[0].entries
    assert {entry.key for entry in first if entry.key.startswith("model")} == {
        "model.0.bias",
        "model.1.weight",
        "model.1.bias",
    }


def _one_at_a_time(root: Path) -> None:
    training, store = Training(1.0), GatedStore(root)
    with saving(root, store) as manager:
        training.backward(1)
        training.update(1)
        first = training.parts()
        manager.save(1, training.contents(), {})
        second = in_thread(lambda: manager.save(2, training.contents(), {}))
        second.join(SOON)
        assert second.is_alive(), "it waits for the one before"
        assert not root.exists()
        store.gate.set()
        second.join(60)
        assert published_iterations(store) in ([1], [1, 2])
        manager.finish()
    assert published_iterations(store) == [1, 2]
    for iteration in (1, 2):
        assert is_same(saved_parts(root, iteration, first), first)


def test_there_is_one_save_at_a_time(home):
    run_ranks(1, _one_at_a_time, home / "one")


# Memory.


def _peak_growth(work: Callable[[], object]) -> int:
    """By how many bytes the memory that is resident at most exceeds that before."""
    gc.collect()
    # What was freed but kept would serve the work unseen, and hide what it takes.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[1])
    work()
    (peak,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return 1024 * int(peak.split()[1]) - before


def _takes_memory(on_host: bool, root: Path) -> tuple[int, int]:
    model = nn.Sequential(*(nn.Linear(1440, 1440) for _ in range(8)))
    optimizer = FusedAdam(model.parameters())
    if on_host:
        optimizer = HybridDeviceOptimizer(model.parameters(), 1.0)
    optimizer.init_state()
    for state in optimizer.state.values():
        state["exp_avg"].normal_(), state["exp_avg_sq"].fill_(1)
    contents = collect(model, optimizer)
    nbytes = sum(entry.values.read().nbytes for entry in contents.entries)
    with saving(root) as manager:
        # What the first save imports and reserves is there once.
        manager.save(1, collect(nn.Linear(8, 8)), {})
        manager.finish()

        def save() -> None:
            manager.save(2, contents, {})
            manager.finish()

        growth = _peak_growth(save)
        assert (
            _peak_growth(lambda: [entry.values.read().clone() for entry in contents.entries])
            > 0.9 * nbytes
        )
    return nbytes, growth


@pytest.mark.parametrize("on_host", [False, True])
def test_a_save_of_200_mb_takes_no_memory_but_its_buffers(tmp_path, on_host):
    ((nbytes, growth),) = run_ranks(1, _takes_memory, on_host, tmp_path / "large")
    assert nbytes > 199e6
    assert growth < 8e6


# Ends.


class SlowStore(LocalStore):
    """A store whose disk writes nothing before a gate is opened."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate, self.is_writing = threading.Event(), threading.Event()
        self.num_bytes = 0

    def open_data(self, path: str) -> DataSink:
        sink = super().open_data(path)
        write = sink.write

        def slow_write(buffer: memoryview) -> None:
            self.is_writing.set()
            assert self.gate.wait(60)
            self.num_bytes += buffer.nbytes
            write(buffer)

        sink.write = slow_write
        return sink


def test_closing_gives_up_a_save_whose_disk_is_slow_before_it_is_written(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    store, model = SlowStore(tmp_path), nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
    manager = CheckpointManager(store, CPU, 0, 1, "abcd")
    manager.save(1, collect(model), {})
    assert store.is_writing.wait(60)
    closing = in_thread(manager.close)
    closing.join(SOON)
    store.gate.set()
    closing.join(60)
    assert store.num_bytes <= 4 * 4 * 1024**2 < 48 * 1024**2, (
        "what was in the buffers, and one share"
    )
    assert "Expected time to finish the save, got the end of the run." in caplog.text
    assert published_iterations(store) == []


def test_closing_gives_up_a_save_whose_disk_is_slow_though_all_of_it_is_staged(
    tmp_path, monkeypatch
):
    store, model, is_read = SlowStore(tmp_path), nn.Linear(1024, 2048), threading.Event()
    finish = DataFileWriter.finish

    def finish_then(file: DataFileWriter) -> int:
        is_read.set()
        return finish(file)

    monkeypatch.setattr(DataFileWriter, "finish", finish_then)
    contents = collect(model, FusedAdam(model.parameters()))
    with staging(1 << 30) as pools:
        manager = CheckpointManager(store, CPU, 0, 1, "abcd", staging_share=0.5)
        manager.save(1, contents, {})
        assert store.is_writing.wait(60)
        assert is_read.wait(60)
        assert pools[0].staged_bytes > 24e6
        closing = in_thread(manager.close)
        while not manager._is_closing.is_set():
            time.sleep(0.001)
        store.gate.set()
        closing.join(60)
    assert store.num_bytes <= BLOCK_BYTES, "the write that was under way"
    assert published_iterations(store) == []


def test_a_manager_that_is_closed_leaves_no_thread_behind(tmp_path):
    others = set(threading.enumerate())
    manager = CheckpointManager(LocalStore(tmp_path), CPU, 0, 1, "abcd")
    manager.save(1, collect(nn.Linear(64, 64)), {})
    manager.finish()
    manager.save(1, collect(nn.Linear(64, 64)), {})
    with contextlib.suppress(CheckpointError):
        manager.finish()
    threads = set(threading.enumerate()) - others
    assert len(threads) >= 2
    manager.close()
    manager.close()
    del manager
    gc.collect()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_closing_gives_up_a_save_that_waits_for_another_rank_at_once(tmp_path):
    for rank in range(2):
        manager = CheckpointManager(LocalStore(tmp_path), CPU, rank, 2, f"abcd{rank}")
        manager.save(1, collect(nn.Linear(64, 64), rank=rank, world_size=2), {})
        own = tmp_path / f"iter_0000001.abcd{rank}1.saving"
        while not (own / f"manifest_{rank}.json").exists():
            time.sleep(0.001)
        start = time.monotonic()
        manager.close()
        assert time.monotonic() - start < 10
        assert manager.num_failed == 1
    assert published_iterations(LocalStore(tmp_path)) == []


def test_an_exception_gives_up_the_save_and_is_what_comes_out(tmp_path):
    store = GatedStore(tmp_path)
    opening = threading.Timer(SOON, store.gate.set)

    def run() -> None:
        with CheckpointManager(store, CPU, 0, 1, "abcd") as manager:
            manager.save(1, collect(nn.Linear(64, 64)), {})
            opening.start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert published_iterations(store) == []
    with CheckpointManager.start(str(tmp_path), CPU) as manager:
        manager.save(1, collect(nn.Linear(64, 64)), {})
        manager.finish()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["iter_0000001"]


# Failures.


def _an_update_fails(root: Path) -> None:
    training = Training(1.0)
    with pytest.MonkeyPatch.context() as patch, saving(root) as manager:
        training.backward(1)
        patch.setattr(HostAdam, "run", lambda *_: 1 / 0)
        training.update(1)
        manager.save(1, training.contents(), {})
        with pytest.raises(
            CheckpointError, match=r"got: ZeroDivisionError: division by zero \(1 failed"
        ) as failure:
            manager.finish()
        assert isinstance(failure.value.__cause__, ZeroDivisionError)
    assert published_iterations(LocalStore(root)) == []
    with saving(root, None) as manager:
        manager.save(2, collect(nn.Linear(64, 64)), {})
        manager.finish()


def test_an_update_that_fails_is_why_the_save_does(home):
    run_ranks(1, _an_update_fails, home / "update")


class BrokenStore(LocalStore):
    """A store that takes nothing, or ends a program that hands it something."""

    def __init__(self, root: Path, error: BaseException) -> None:
        super().__init__(root)
        self._error = error

    def open_data(self, _: str) -> DataSink:
        raise self._error


def _saves_fail(fraction: float | None, root: Path) -> None:
    expected = _train(fraction, True)
    for error in (
        OSError("no disk"),
        RuntimeError("no driver"),
        KeyboardInterrupt(),
        MemoryError(),
    ):
        training = Training(fraction)
        with saving(root, BrokenStore(root, error)) as manager:
            for number in range(1, NUM_STEPS + 1):
                training.backward(number)
                training.update(number)
                manager.save(number, training.contents(), {})
                with pytest.raises(
                    CheckpointError,
                    match=rf"iter_000000{number} .* got: .*\({number} failed so far",
                ):
                    manager.finish()
        assert is_same(training.parts(), expected.last)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_saves_that_fail_change_nothing_of_the_training(home, fraction):
    run_ranks(1, _saves_fail, fraction, home / f"broken_{fraction}")


# What stays.


@given(
    st.lists(st.integers(0, 60), unique=True, min_size=1),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 9),
    st.data(),
)
def test_what_is_superseded_is_older_than_the_last_few_and_no_multiple(
    published, keep_last, interval, data
):
    newest = data.draw(st.sampled_from(published))
    superseded = Retention(keep_last, interval).superseded(published, newest)
    kept = [iteration for iteration in published if iteration not in superseded]
    assert newest in kept
    assert all(iteration in kept for iteration in published if iteration > newest), (
        "they are not this run's"
    )
    if keep_last is None and interval is None:
        assert superseded == []
        return
    older = sorted(iteration for iteration in published if iteration <= newest)
    assert set(older[-(keep_last or 1) :]) <= set(kept)
    if interval is not None:
        assert all(iteration in kept for iteration in older if iteration % interval == 0)
    for iteration in older[: -(keep_last or 1)]:
        assert (iteration in kept) == (interval is not None and iteration % interval == 0)


class Notes(LocalStore):
    """A store that writes down what becomes of folders, and fails where it is told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.events: list[str] = []
        self.fails = False

    def publish(self, draft: str, final: str) -> bool:
        if self.fails:
            raise OSError("not now")
        is_durable = super().publish(draft, final)
        self.events.append(f"+{final[-1]}")
        return is_durable

    def remove(self, name: str) -> None:
        super().remove(name)
        if name.startswith("iter_") and not name.endswith(".saving"):
            self.events.append(f"-{name[-1]}")


def test_checkpoints_are_deleted_once_the_next_is_published_and_what_failed_does_not_count(
    tmp_path,
):
    store, contents = Notes(tmp_path), collect(nn.Linear(8, 8))
    with CheckpointManager(store, CPU, 0, 1, "abcd", retention=Retention(2, 4)) as manager:
        for iteration in range(1, 10):
            store.fails = iteration in (3, 5, 6)
            manager.save(iteration, contents, {})
            if store.fails:
                with pytest.raises(CheckpointError, match="not now"):
                    manager.finish()
            manager.finish()
    assert store.events == ["+1", "+2", "+4", "-1", "+7", "-2", "+8", "+9", "-7"]
    assert published_iterations(store) == [4, 8, 9]


def test_a_checkpoint_that_cannot_be_deleted_fails_nothing_and_goes_with_the_next(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    store, contents = LocalStore(tmp_path), collect(nn.Linear(8, 8))
    with CheckpointManager(store, CPU, 0, 1, "abcd", retention=Retention(1)) as manager:
        for iteration in (1, 2, 3):
            with pytest.MonkeyPatch.context() as patch:
                if iteration == 2:
                    patch.setattr(store, "remove", lambda _: (_ for _ in ()).throw(OSError("busy")))
                manager.save(iteration, contents, {})
                manager.finish()
            assert published_iterations(store) == {1: [1], 2: [1, 2], 3: [3]}[iteration]
    assert f"could not delete {tmp_path}/iter_0000001: busy" in caplog.text


def _starts(root: Path) -> str:
    """All ranks begin, and save."""
    with CheckpointManager.start(str(root), CPU, dist.get_rank(), dist.get_world_size()) as manager:
        manager.save(
            3,
            collect(nn.Linear(64, 64), rank=dist.get_rank(), world_size=dist.get_world_size()),
            {},
        )
        manager.finish()
    marker = json.loads((root / "iter_0000003" / "published.json").read_text())
    return str(marker["save_id"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_sweeps_what_was_never_published_when_it_begins_and_nothing_else(
    tmp_path, world_size
):
    for iteration in (1, 2):
        with CheckpointManager(LocalStore(tmp_path), CPU, 0, 1, "abcd") as manager:
            manager.save(iteration, collect(nn.Linear(8, 8)), {})
            manager.finish()
    for name in ("iter_0000002.dead1.saving", "iter_0000009.saving", "iter_0000001.0123.deleting"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "published.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes.saving").mkdir()
    save_ids = run_ranks(world_size, _starts, tmp_path)
    assert len(set(save_ids)) == 1, "of all ranks"
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == ["iter_0000001", "iter_0000002", "iter_0000003", "notes", "notes.saving"]


def _cannot_start(root: Path) -> str:
    with pytest.raises(CheckpointError) as failure:
        CheckpointManager.start(str(root), CPU, dist.get_rank(), dist.get_world_size())
    return str(failure.value)


def test_a_run_that_cannot_begin_says_why_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    for message in run_ranks(2, _cannot_start, tmp_path / "file"):
        assert message.startswith(
            f"Expected a folder of checkpoints at {tmp_path}/file, got NotADirectoryError"
        )
