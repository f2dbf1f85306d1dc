"""Saves during training: they have the values at the start of the save and do not change training,
only updates of tensors that are still to be read wait, and a save may end early.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.save.data_file import DataSink
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.dist_checkpointing.state.param_groups import PARAM_GROUPS
from megatron.core.dist_checkpointing.store import LocalStore, published_iterations
from megatron.core.lanes import delays
from megatron.core.optimizer.cpu_offloading import streamed_pass
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.kernels.host_adam import HostAdam
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.helpers.async_saves import (
    CPU,
    SLOT,
    SOON,
    Parts,
    Training,
    hold_entries_back,
    in_place,
    in_thread,
    is_same,
    parts_of,
    saved_parts,
    saving,
)
from tests.unit_tests.core.dist_checkpointing.helpers.live_bytes import peak_growth
from tests.unit_tests.core.dist_checkpointing.helpers.scenes import GatedStore, memory_folder
from tests.unit_tests.core.optimizer.cpu_offloading.helpers.nets import EXECUTORS


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """The directory that these tests save to."""
    with memory_folder() as folder:
        yield folder


def new_folder(home: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=home))


# Contents.

FRACTIONS = (None, 0.0, 0.5, 1.0)


NUM_STEPS, SAVED_AFTER = 4, (1, 3)  # steps


class Trained(NamedTuple):
    """The results of a run on one rank."""

    saved: list[Parts]  # after the steps that are saved
    last: Parts


def _train(fraction: float | None, with_states: bool) -> Trained:
    """Trains without saving."""
    training, saved = Training(fraction, with_states=with_states), []
    for number in range(1, NUM_STEPS + 1):
        training.backward(number)
        training.update()
        if number in SAVED_AFTER:
            saved.append(training.parts())
    return Trained(saved, training.parts())


def _train_and_save(
    fraction: float | None, with_states: bool, root: Path, seed: int, options: dict[str, Any]
) -> Parts:
    """Every save starts while updates are in flight. With some seeds it reads at once, with others
    only after the next update has started.
    """
    training = Training(fraction, with_states=with_states, **options)
    gate, reads_late = threading.Event(), seed % 4 < 2
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with (
        delays(seed),
        in_place(seed % 2 == 0),
        CheckpointManager(LocalStore(root), CPU, rank, world_size, "abcd") as manager,
    ):
        for number in range(1, NUM_STEPS + 1):
            training.backward(number)
            assert manager.is_busy or not reads_late or number - 1 not in SAVED_AFTER
            gate.set()
            training.update()
            if number in SAVED_AFTER:
                # The previous save has been running until here.
                manager.finish()
                gate, contents = threading.Event(), training.contents()
                if reads_late:
                    hold_entries_back(contents.entries, gate)
                manager.save(number, contents, {"number": number})
        gate.set()
        manager.finish()
    return training.parts()


def _saves_values(
    fraction: float | None,
    with_states: bool,
    root: Path,
    seeds: Sequence[int],
    options: dict[str, Any],
) -> None:
    """`options` belong to the saved optimizer, and change no value."""
    streamed_pass.SLOT_NUMEL = SLOT
    expected = _train(fraction, with_states)
    assert not is_same(expected.saved[0], expected.saved[1])
    large = [part for _, part in expected.last.values() if part.nbytes > 4096]
    assert sum(part.nbytes for part in large) > 0.9 * sum(
        part.nbytes for _, part in expected.last.values()
    )
    for seed in seeds:
        own = root / f"{seed}"
        last = _train_and_save(fraction, with_states, own, seed, options)
        assert is_same(last, expected.last), "saving changes nothing"
        for number, parts in zip(SAVED_AFTER, expected.saved, strict=True):
            assert is_same(saved_parts(own, number, parts), parts), seed
            checkpoint = PublishedCheckpoint.open(LocalStore(own), checkpoint_name(number))
            if with_states:
                groups: Any = checkpoint.read_plain(PARAM_GROUPS)
                assert groups[0]["lr"] == 1e-2 / (number + 1)
            assert checkpoint.train_state == {"number": number}


@pytest.mark.parametrize(
    ("world_size", "fraction", "seeds", "options"),
    [
        (1, 1.0, range(6), {}),
        (1, None, range(4), {}),
        (2, 0.5, range(4), {}),
        (2, 1.0, range(4), EXECUTORS["streamed"]),
        (1, 1.0, range(4), EXECUTORS["early and streamed"]),
        *(
            pytest.param(world_size, fraction, range(20), {}, marks=pytest.mark.wide)
            for world_size, fraction in itertools.product((1, 2), FRACTIONS)
        ),
        *(
            pytest.param(world_size, fraction, range(20), options, marks=pytest.mark.wide)
            for world_size, fraction, options in itertools.product(
                (1, 2), (0.5, 1.0), EXECUTORS.values()
            )
        ),
    ],
)
def test_a_save_during_training_has_the_values_at_its_start_under_any_delays(
    home, world_size, fraction, seeds, options
):
    root = new_folder(home)
    run_ranks(world_size, _saves_values, fraction, True, root, seeds, options, timeout=600)


@pytest.mark.parametrize(
    ("fraction", "options"), [(None, {}), (1.0, {}), (1.0, EXECUTORS["streamed"])]
)
def test_a_save_of_weights_alone_has_the_values_at_its_start_under_any_delays(
    home, fraction, options
):
    run_ranks(1, _saves_values, fraction, False, new_folder(home), range(2), options)


# Updates that wait.


def hold_back(contents: Contents, unit: int) -> tuple[threading.Event, set[str]]:
    """Delays the reading of a unit until an event. Returns the event and the keys of the unit."""
    gate = threading.Event()
    return gate, hold_entries_back(
        [group for group in contents.groups if group.unit is not None][unit].entries, gate
    )


def _one_bucket_is_held_back(fraction: float, options: dict[str, Any], root: Path) -> None:
    training = Training(fraction, **options)
    training.backward(1)
    training.update()
    before, contents = training.parts(), training.contents()
    gate, held = hold_back(contents, -1)
    with saving(root) as manager:
        manager.save(1, contents, {})
        training.backward(2)
        training.update()
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
        waiting.join(600)
        manager.finish()
    assert is_same(saved_parts(root, 1, before), before)
    assert not any(torch.equal(training.parts()[key][1], before[key][1]) for key in held)


@pytest.mark.parametrize(
    ("fraction", "options"), [(0.5, {}), (1.0, {}), (1.0, EXECUTORS["streamed"])]
)
def test_only_the_next_update_of_a_bucket_waits_until_that_bucket_has_been_read(
    home, fraction, options
):
    run_ranks(1, _one_bucket_is_held_back, fraction, options, new_folder(home))


def _the_device_is_held_back(fraction: float | None, unit: int, root: Path) -> None:
    training = Training(fraction)
    training.backward(1)
    training.update()
    before, contents = training.parts(), training.contents()
    on_device = [
        group.unit
        for group in contents.groups
        if group.unit is not None and group.unit.updated is None
    ]
    assert len(on_device) == (4 if fraction is None else 2), "the layers, and the root's group"
    gate, held = hold_back(contents, unit)
    with saving(root) as manager:
        manager.save(1, contents, {})
        training.backward(2)
        stepping = in_thread(lambda: training.update())
        stepping.join(SOON)
        assert stepping.is_alive()
        # Groups that have been read by then may be updated.
        now = parts_of(contents)
        changed = {key for key in before if not torch.equal(now[key][1], before[key][1])}
        assert not changed & held
        assert bool(changed) == (unit > 0)
        gate.set()
        stepping.join(600)
        after = training.parts()
        assert not any(torch.equal(after[key][1], before[key][1]) for key in held)
        manager.finish()
    assert is_same(saved_parts(root, 1, before), before)


@pytest.mark.parametrize(("fraction", "unit"), [(None, 0), (0.5, 1)])
def test_the_update_of_a_group_on_the_device_waits_until_that_group_has_been_read(
    home, fraction, unit
):
    run_ranks(1, _the_device_is_held_back, fraction, unit, home / f"device_{fraction}_{unit}")


def _begins_beside_an_update(root: Path) -> None:
    training, store, updating = Training(1.0), GatedStore(root), threading.Event()
    with pytest.MonkeyPatch.context() as patch, saving(root, store) as manager:
        real = HostAdam.submit

        def submit(*args: Any) -> Any:
            assert updating.wait(600)
            return real(*args)

        patch.setattr(HostAdam, "submit", submit)
        training.backward(1)
        training.update()
        manager.save(1, training.contents(), {})
        # `save` has returned, and neither the states nor the disk are ready.
        assert manager.is_busy
        assert not root.exists()
        store.gate.set()
        updating.set()
        manager.finish()
        expected = training.parts()
    assert is_same(saved_parts(root, 1, expected), expected)


def test_a_save_starts_while_updates_are_in_flight_and_the_disk_is_blocked(home):
    run_ranks(1, _begins_beside_an_update, home / "beside")


def _updates_wait_for_the_disk(fraction: float | None, options: dict[str, Any], root: Path) -> None:
    training, store = Training(fraction, **options), GatedStore(root)
    training.backward(1)
    training.update()
    before = training.parts()
    with in_place(), saving(root, store) as manager:
        manager.save(1, training.contents(), {})
        training.backward(2)
        updating = in_thread(lambda: [training.update(), training.parts()])
        updating.join(SOON)
        assert updating.is_alive()
        assert manager.is_busy
        store.gate.set()
        updating.join(600)
        manager.finish()
    assert is_same(saved_parts(root, 1, before), before)
    assert not is_same(training.parts(), before)


@pytest.mark.parametrize(
    ("fraction", "options"), [(None, {}), (1.0, {}), (1.0, EXECUTORS["streamed"])]
)
def test_an_update_waits_until_the_disk_has_the_tensors_that_are_written_in_place(
    home, fraction, options
):
    run_ranks(1, _updates_wait_for_the_disk, fraction, options, new_folder(home))


def test_states_that_an_update_waits_for_are_written_before_frozen_weights_and_buffers():
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


# Memory.


def _takes_memory(on_host: bool, root: Path) -> tuple[int, int]:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    optimizer = FusedAdam(model.parameters())
    if on_host:
        optimizer = HybridDeviceOptimizer(model.parameters(), 1.0)
    optimizer.init_state()
    for state in optimizer.state.values():
        state["exp_avg"].normal_(), state["exp_avg_sq"].fill_(1)
    contents = collect(model, optimizer)
    nbytes = sum(entry.values.read().nbytes for entry in contents.entries)
    with saving(root) as manager:
        # The first save imports modules and reserves buffers.
        manager.save(1, collect(nn.Linear(8, 8)), {})
        manager.finish()

        def save() -> None:
            manager.save(2, contents, {})
            manager.finish()

        growth = peak_growth(save)
        assert (
            peak_growth(lambda: [entry.values.read().clone() for entry in contents.entries])
            > 0.9 * nbytes
        )
    return nbytes, growth


@pytest.mark.parametrize("on_host", [False, True])
def test_a_save_of_100_mb_takes_no_memory_but_its_buffers(tmp_path, on_host):
    ((nbytes, growth),) = run_ranks(1, _takes_memory, on_host, tmp_path / "large")
    assert nbytes > 100e6
    assert growth < 8e6


# Saves that end early.


class SlowStore(LocalStore):
    """A store whose disk writes only after a gate is opened."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate, self.is_writing = threading.Event(), threading.Event()
        self.num_bytes = 0

    def open_data(self, path: str) -> DataSink:
        sink = super().open_data(path)
        write = sink.write

        def slow_write(spans: Sequence[memoryview]) -> None:
            self.is_writing.set()
            assert self.gate.wait(600)
            self.num_bytes += sum(span.nbytes for span in spans)
            write(spans)

        sink.write = slow_write
        return sink


def test_closing_aborts_a_save_on_a_slow_disk_before_all_of_it_is_written(tmp_path):
    store, model = SlowStore(tmp_path), nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
    manager = CheckpointManager(store, CPU, 0, 1, "abcd")
    manager.save(1, collect(model), {})
    assert store.is_writing.wait(600)
    closing = in_thread(manager.close)
    closing.join(SOON)
    store.gate.set()
    closing.join(600)
    assert store.num_bytes <= 4 * 4 * 1024**2 < 48 * 1024**2, "the buffers, and one tensor"
    assert manager.num_failed == 1
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
        thread.join(600)
        assert not thread.is_alive()


def test_closing_aborts_a_save_that_waits_for_another_rank_at_once(tmp_path):
    for rank in range(2):
        manager = CheckpointManager(LocalStore(tmp_path), CPU, rank, 2, f"abcd{rank}")
        manager.save(1, collect(nn.Linear(64, 64), rank=rank, world_size=2), {})
        own = tmp_path / f"iter_0000001.abcd{rank}1.saving"
        while not (own / f"manifest_{rank}.json").exists():
            time.sleep(0.001)
        manager.close()
        assert manager.num_failed == 1
    assert published_iterations(LocalStore(tmp_path)) == []


def test_an_exception_aborts_the_save_and_is_raised(tmp_path):
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


def _an_update_fails(root: Path) -> None:
    training = Training(1.0)
    with pytest.MonkeyPatch.context() as patch, saving(root) as manager:
        training.backward(1)
        patch.setattr(HostAdam, "submit", lambda *_: 1 / 0)
        training.update()
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


def test_a_failed_update_fails_the_save(home):
    run_ranks(1, _an_update_fails, home / "update")
