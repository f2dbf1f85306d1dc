"""Which updates wait for a save, and how much memory a save takes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.kernels.host_adam import HostAdam
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.helpers.async_saves import (
    SOON,
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
from tests.unit_tests.core.dist_checkpointing.helpers.scenes import GatedStore

# Updates that wait.


def hold_back(contents: Contents, unit: int) -> tuple[threading.Event, set[str]]:
    """Delays the reading of a unit until an event. Returns the event and the keys of the unit."""
    gate = threading.Event()
    return gate, hold_entries_back(
        [group for group in contents.groups if group.unit is not None][unit].entries, gate
    )


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
        waiting.join(600)
        manager.finish()
    assert is_same(saved_parts(root, 1, before), before)
    assert not any(torch.equal(training.parts()[key][1], before[key][1]) for key in held)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_only_the_next_update_of_a_bucket_waits_until_that_bucket_has_been_read(home, fraction):
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
        real = HostAdam.run

        def run(*args: Any) -> Any:
            assert updating.wait(600)
            return real(*args)

        patch.setattr(HostAdam, "run", run)
        training.backward(1)
        training.update(1)
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


def _updates_wait_for_the_disk(fraction: float | None, root: Path) -> None:
    training, store = Training(fraction), GatedStore(root)
    training.backward(1)
    training.update(1)
    before = training.parts()
    with in_place(), saving(root, store) as manager:
        manager.save(1, training.contents(), {})
        training.backward(2)
        updating = in_thread(lambda: [training.update(2), training.parts()])
        updating.join(SOON)
        assert updating.is_alive()
        assert manager.is_busy
        store.gate.set()
        updating.join(600)
        manager.finish()
    assert is_same(saved_parts(root, 1, before), before)
    assert not is_same(training.parts(), before)


@pytest.mark.parametrize("fraction", [None, 1.0])
def test_an_update_waits_until_the_disk_has_the_tensors_that_are_written_in_place(home, fraction):
    run_ranks(1, _updates_wait_for_the_disk, fraction, home / f"in_place_{fraction}")


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
