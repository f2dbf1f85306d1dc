from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.device import Device
from megatron.core.drivers import Driver, register_driver
from megatron.core.optimizer.kernels.adam import AdamStep
from megatron.core.optimizer.kernels.host_adam import HostAdam, available_bodies
from megatron.core.optimizer.kernels.host_threads import (
    LAUNCHING_CORES,
    HostThreads,
    host_threads,
)
from tests.unit_tests.core.optimizer.helpers.pieces import adam_piece

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="Linux alone has it"
)


class FakeDriver(Driver):
    """So many devices, on these nodes."""

    def __init__(self, nodes: list[int | None]) -> None:
        super().__init__("fake")
        self.nodes = nodes

    def device_count(self) -> int:
        return len(self.nodes)


class Machine:
    """Cores that the process may use, nodes of the host, and devices on them."""

    def __init__(
        self,
        monkeypatch,
        folder: Path,
        cores: range,
        nodes: dict[int, str],
        devices: list[int | None],
        quota: float | None = None,
    ):
        monkeypatch.setattr("megatron.core.local_ranks.cpu_quota", lambda: quota)
        monkeypatch.setattr("megatron.core.drivers._drivers", {})
        register_driver(FakeDriver(devices))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores), raising=False)
        monkeypatch.setattr(
            Device,
            "numa_node",
            property(lambda self: devices[self.index] if self.kind == "fake" else None),
        )
        self.folder = folder
        for node, cpus in nodes.items():
            (folder / f"node{node}").mkdir()
            (folder / f"node{node}" / "cpulist").write_text(cpus)

    def threads(self, rank: int, num_ranks: int, number: int | None = None) -> HostThreads:
        return host_threads(Device("fake", rank), num_ranks, number, self.folder)


def test_on_the_cpu_threads_have_all_of_a_ranks_cores_as_ever(monkeypatch, tmp_path):
    Machine(monkeypatch, tmp_path, range(8), {0: "0-3", 1: "4-7"}, [])
    assert host_threads(Device("cpu"), 2, None, tmp_path) == HostThreads(4, None)
    assert host_threads(Device("cpu"), 16, None, tmp_path) == HostThreads(1, None)
    assert host_threads(Device("cpu"), 2, 7, tmp_path) == HostThreads(7, None)


def test_beside_an_accelerator_two_cores_a_rank_are_left_to_the_launching_threads(
    monkeypatch, tmp_path
):
    machine = Machine(monkeypatch, tmp_path, range(16), {0: "0-15"}, [None, None])
    assert machine.threads(0, 1) == HostThreads(14, None)
    assert machine.threads(1, 2) == HostThreads(6, None)
    assert machine.threads(1, 2, number=3) == HostThreads(3, None)


def test_a_machine_of_two_cores_still_has_a_thread_on_any_core(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path, range(2), {0: "0-1"}, [0])
    assert machine.threads(0, 1) == HostThreads(1, None)


def test_threads_run_near_to_the_device_beside_the_cores_that_launch(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path, range(16), {0: "0-7", 1: "8-15"}, [0, 1])
    assert machine.threads(0, 2) == HostThreads(6, [2, 3, 4, 5, 6, 7])
    assert machine.threads(1, 2) == HostThreads(6, [10, 11, 12, 13, 14, 15])


def test_cores_that_the_process_may_not_use_do_not_count(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path, range(4, 12), {0: "0-7", 1: "8-15"}, [0])
    assert machine.threads(0, 1) == HostThreads(2, [6, 7])
    folder = tmp_path / "other"
    folder.mkdir()
    machine = Machine(monkeypatch, folder, range(8), {0: "0-7", 1: "8-15"}, [1])
    assert machine.threads(0, 1) == HostThreads(6, None), (
        "the device's node has none that may be used"
    )


def test_processes_that_each_see_one_device_are_taken_to_be_spread_evenly(monkeypatch, tmp_path):
    machine = Machine(monkeypatch, tmp_path, range(32), {0: "0-15", 1: "16-31"}, [1])
    assert machine.threads(0, 4) == HostThreads(6, list(range(20, 32)))


SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_CPUS_PER_TASK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")


def test_a_quota_of_time_is_divided_where_it_is_less_than_the_cores(monkeypatch, tmp_path):
    cores, nodes = range(16), {0: "0-7", 1: "8-15"}
    machine = Machine(monkeypatch, tmp_path, cores, nodes, [0, 1], quota=10.0)
    assert machine.threads(0, 2) == HostThreads(3, [2, 3, 4, 5, 6, 7])
    assert host_threads(Device("cpu"), 2, None, tmp_path) == HostThreads(5, None)


@needs_affinity
def test_what_launchers_say_to_openmp_does_not_starve_the_update(monkeypatch, tmp_path):
    Machine(monkeypatch, tmp_path, range(4), {}, [])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert HostAdam().num_threads == 4


FOUR_TASKS = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_CPUS_PER_TASK": "12", "WORLD_SIZE": "4"}


def set_environment(monkeypatch, environment: dict[str, str]) -> None:
    for name in SLURM:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_cores_that_slurm_has_bound_to_a_rank_are_not_divided_again(monkeypatch, tmp_path):
    set_environment(monkeypatch, FOUR_TASKS)
    machine = Machine(monkeypatch, tmp_path, range(12, 24), {0: "0-23", 1: "24-47"}, [0, 0, 1, 1])
    assert machine.threads(1, 4) == HostThreads(10, list(range(14, 24)))
    assert host_threads(Device("cpu"), 4, None, tmp_path) == HostThreads(12, None)

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert HostAdam().num_threads == 12

    # An odd number of threads, rounded up to whole cores of two.
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "11")
    assert machine.threads(1, 4).number == 10


@pytest.mark.parametrize(
    ("num_cores", "environment"),
    [
        (12, {}),  # a container that holds all ranks, or numactl
        (48, FOUR_TASKS),  # tasks that Slurm has not bound
        (
            12,
            {**FOUR_TASKS, "SLURM_STEP_NUM_TASKS": "1"},
        ),  # one task, in which a launcher started four ranks
        (12, {**FOUR_TASKS, "TORCHELASTIC_RUN_ID": "job"}),
        (12, {name: value for name, value in FOUR_TASKS.items() if name != "SLURM_CPUS_PER_TASK"}),
    ],
)
def test_cores_that_all_ranks_of_a_machine_may_use_are_divided(
    monkeypatch, tmp_path, num_cores, environment
):
    set_environment(monkeypatch, environment)
    machine = Machine(monkeypatch, tmp_path, range(num_cores), {}, [None] * 4)
    assert machine.threads(1, 4).number == num_cores // 4 - LAUNCHING_CORES


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 64), st.integers(1, 8), st.data())
def test_ranks_together_leave_their_launching_threads_room_wherever_there_is_any(
    num_cores, num_ranks, data
):
    split = data.draw(st.integers(0, num_cores))
    lists = {0: list(range(split)), 1: list(range(split, num_cores))}
    devices = data.draw(
        st.lists(st.sampled_from([0, 1, None]), min_size=num_ranks, max_size=num_ranks)
    )
    with pytest.MonkeyPatch.context() as monkeypatch, TemporaryDirectory() as folder:
        nodes = {number: ",".join(map(str, cores)) for number, cores in lists.items()}
        machine = Machine(monkeypatch, Path(folder), range(num_cores), nodes, devices)
        for rank in range(num_ranks):
            threads = machine.threads(rank, num_ranks)
            assert threads.number >= 1
            if threads.cores is not None:
                own = lists[devices[rank]]
                assert set(threads.cores) <= set(own)
                num_near = devices.count(devices[rank])
                assert len(own) - len(threads.cores) == LAUNCHING_CORES * num_near
                assert threads.number * num_near <= max(len(threads.cores), num_near)


@needs_affinity
@pytest.mark.skipif(available_bodies() == ["torch"], reason="the library was not built")
def test_the_kernels_threads_stay_on_their_cores_and_the_caller_does_not():
    before = os.sched_getaffinity(0)
    core = max(before)
    known = set(Path("/proc/self/task").iterdir())
    kernel = HostAdam(2, cores=[core])
    new = [int(thread.name) for thread in Path("/proc/self/task").iterdir() if thread not in known]
    assert len(new) == 2
    assert [os.sched_getaffinity(thread) for thread in new] == [{core}, {core}]
    assert os.sched_getaffinity(0) == before

    weight = torch.ones(100)
    kernel.run(
        [adam_piece(AdamStep(1, 0.1), torch.ones(100), weight, torch.zeros(100), torch.zeros(100))]
    )
    assert not weight.eq(1).any()


@needs_affinity
def test_unavailable_cores_are_ignored():
    before = os.sched_getaffinity(0)
    kernel = HostAdam(1, cores=[1023])
    assert os.sched_getaffinity(0) == before
    assert kernel.num_threads == 1
