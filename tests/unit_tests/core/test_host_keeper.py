"""A keeper's memory survives the ranks, and ends with the launcher."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron.core import host_memory
from megatron.core.device import Device
from megatron.core.host_keeper import Keeper, KeeperError, KeptMemory, Records
from megatron.core.host_memory import HostMemoryError, HostSlab
from tests.unit_tests.core.dist_checkpointing.helpers.crashes import KILLED, Child, Forks, forks
from tests.unit_tests.core.helpers.keepers import keepers_of, launcher

RECORDS = ("first", "second")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Forks]:
    with forks("tests.unit_tests.core.helpers.keepers") as found:
        yield found


def _connected(pid: int, rank: int = 0, world_size: int = 1) -> Keeper:
    keeper = Keeper(pid, rank, world_size)
    keeper.connect(starts=True)
    return keeper


def _memory(pid: int, rank: int = 0, world_size: int = 1) -> KeptMemory:
    return KeptMemory(_connected(pid, rank, world_size))


def _comes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _write_and_die(pid: int, rank: int, content: bytes, world_size: int = 1) -> None:
    memory = _memory(pid, rank, world_size)
    memory.map("states", 1 << 20)[: len(content)] = content
    _die()


def _read(pid: int, rank: int) -> bytes:
    return _memory(pid, rank).map("states", 1 << 20)[:3]


def _survival() -> None:
    with launcher() as pid, launcher() as other:
        for rank, content in enumerate((b"abc", b"def")):
            assert Child(_write_and_die, pid, rank, content).end() == KILLED
        assert [Child(_read, pid, rank).result() for rank in (0, 1)] == [b"abc", b"def"]
        assert Child(_read, other, 0).result() == bytes(3)
        assert len(keepers_of(pid)) == len(keepers_of(other)) == 1


def test_memory_survives_a_killed_rank_apart_from_other_ranks_and_jobs(nursery):
    nursery.run(_survival)


def _end(end: signal.Signals) -> None:
    with launcher(end) as pid:
        keeper = _connected(pid)
        assert keeper.is_alive
        assert len(keepers_of(pid)) == 1
        os.kill(keepers_of(pid)[0], signal.SIGINT)  # as from a terminal
    assert _comes_true(lambda: not keeper.is_alive)
    assert _comes_true(lambda: not keepers_of(pid))


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_keeper_ends_when_its_launcher_does_in_any_way(nursery, end):
    nursery.run(_end, end)


def _leftover() -> None:
    with launcher() as pid:
        keeper = _connected(pid)
        leftover = keepers_of(pid)[0]
        os.kill(leftover, signal.SIGSTOP)
    with launcher() as pid:
        assert _connected(pid).is_alive
    assert keeper.is_alive
    os.kill(leftover, signal.SIGCONT)
    assert _comes_true(lambda: not keeper.is_alive)


def test_a_leftover_keeper_of_a_dead_job_is_not_in_the_way_of_the_next_job(nursery):
    nursery.run(_leftover)


def _limit() -> None:
    with launcher() as pid:
        memory = _memory(pid)
        limit = 1 << 20
        resource.prlimit(keepers_of(pid)[0], resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(HostMemoryError, match=r"2\.00 MiB .* for states"):
            HostSlab(2 * limit, Device("cpu"), is_pinned=False, purpose="states", kept=memory)
        assert memory.map("others", limit)[:1] == bytes(1)


def test_a_keeper_that_gets_no_memory_says_so_and_goes_on(nursery):
    nursery.run(_limit)


def _replacement() -> None:
    with launcher() as pid:
        Child(_read, pid, 0).result()
        keeper = _connected(pid)
        os.kill(keepers_of(pid)[0], signal.SIGKILL)
        assert _comes_true(lambda: not keeper.is_alive)
        with pytest.raises(KeeperError):
            keeper.open("states 0", 1 << 20)
        assert _connected(pid).files == {}


def test_a_killed_keeper_is_noticed_and_its_successor_has_no_files(nursery):
    nursery.run(_replacement)


def _hold(pid: int, ready: int) -> None:
    _memory(pid).map("states", 1 << 20)
    os.write(ready, b"x")
    signal.pause()


def _waiting() -> None:
    with launcher() as pid:
        ready, theirs = os.pipe()
        holder = Child(_hold, pid, theirs)
        os.read(ready, 1)
        # While the holder lives, no other process gets its memory.
        taker = Child(_read, pid, 0)
        time.sleep(0.3)
        assert not taker.has_ended
        os.kill(holder.pid, signal.SIGKILL)
        assert taker.result() == bytes(3)
        assert holder.end() == KILLED


def test_a_rank_waits_until_its_predecessor_has_ended(nursery):
    nursery.run(_waiting)


def _other_numbers() -> None:
    with launcher() as pid:
        ready, theirs = os.pipe()
        holder = Child(_hold, pid, theirs)
        os.read(ready, 1)
        taker = Child(lambda: _connected(pid, 1, 3).earlier.keys())
        time.sleep(0.3)
        assert not taker.has_ended
        os.kill(holder.pid, signal.SIGKILL)
        assert taker.result() == {1}
        holder.end()

        assert Child(_write_and_die, pid, 1, b"abc", 2).end() == KILLED
        keeper = _connected(pid, 1, 3)
        assert keeper.files == {}
        earlier = keeper.earlier[2][1]
        assert earlier.died_at > 0
        assert KeptMemory(earlier).map("states", 1 << 20)[:3] == b"abc"
        with pytest.raises(KeeperError):
            earlier.open("states 1", 1 << 20)
        keeper.forget_earlier(but=2)
        assert _connected(pid, 0, 3).earlier.keys() == {2}
        keeper.forget_earlier()
        assert _connected(pid, 0, 3).earlier == {}


def test_ranks_read_the_memory_of_another_number_of_ranks_that_have_ended(nursery):
    nursery.run(_other_numbers)


def _moved_ranks() -> None:
    with launcher() as pid:
        for rank in (0, 1):
            assert Child(_write_and_die, pid, rank, b"abc", 4).end() == KILLED
        # This machine has ranks 1 and 2 now.
        keeper = Keeper(pid, 1, 4, range(1, 3))
        keeper.connect(starts=False)
        assert keeper.files == {"states 0": 1 << 20}
        assert {number: list(ranks) for number, ranks in keeper.earlier.items()} == {4: [0]}
        keeper.forget_earlier()
        assert _connected(pid, 0, 4).files == {}
        assert keeper.open("states 0", 1 << 20) >= 0


def test_the_memory_of_a_rank_that_is_on_another_machine_now_is_dropped(nursery):
    nursery.run(_moved_ranks)


def _many_files() -> None:
    def map_many() -> int:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))
        memory = _memory(pid)
        return len([memory.map("states", 4096) for _ in range(100)])

    with launcher() as pid:
        assert Child(map_many).result() == 100


def test_ranks_may_have_more_files_than_a_process_has_descriptors_at_first(nursery):
    nursery.run(_many_files)


def _no_descriptors() -> None:
    with launcher() as pid:
        memory = _memory(pid)
        resource.prlimit(keepers_of(pid)[0], resource.RLIMIT_NOFILE, (20, 20))
        error: KeeperError | None = None
        for _ in range(20):
            try:
                memory.map("states", 4096)
            except KeeperError as found:
                error = found
        assert "open files" in str(error)
        assert memory._keeper.is_alive


def test_a_keeper_without_descriptors_says_so(nursery):
    nursery.run(_no_descriptors)


def _placed_again() -> None:
    host_memory.prefer_node = lambda *_: False  # type: ignore[assignment]
    host_memory.touch_from_node = (  # type: ignore[assignment]
        lambda address, nbytes, _: ctypes.memset(address, 0, nbytes)
    )
    Device.numa_node = property(lambda _: 0)  # type: ignore[assignment]

    def contents(memory: KeptMemory) -> bytes:
        slab = HostSlab(4096, Device("cpu"), is_pinned=False, purpose="states", kept=memory)
        values = slab.tensor(0, 3, torch.uint8)
        found = bytes(values.tolist())
        values.copy_(torch.tensor([1, 2, 3]))
        return found

    with launcher() as pid:
        assert contents(_memory(pid)) == bytes(3)
        memory = _memory(pid)
        memory.map_files({"states 0": 4096})
        assert contents(memory) == bytes([1, 2, 3])


def test_restored_memory_is_not_written_to_where_its_place_cannot_be_asked_for(nursery):
    nursery.run(_placed_again)


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def _places() -> None:
    with launcher() as pid:
        for purpose in ("gradients", "states"):
            _memory(pid).map(purpose, 1 << 20)
        memory = _memory(pid)
        states = memory.map("states", 1 << 20)
        memory.map_files({"gradients 0": 1 << 20, "states 0": 1 << 20})
        assert memory.place_of(_address(memory.files["gradients 0"]) + 5) == (0, 5)
        assert memory.place_of(_address(states) + 6) == (1, 6)
        # This mapping ends before the other one.
        assert memory.place_of(_address(memory.files["states 0"])) is None


def test_an_address_is_found_in_the_mapping_of_a_file_that_stays(nursery):
    nursery.run(_places)


def _refusals() -> None:
    with launcher() as pid:
        first = _memory(pid)
        sizes = {"states 0": 1 << 20, "states 1": 5000}
        for nbytes in sizes.values():
            first.map("states", nbytes)
        assert first._keeper.files == sizes
        memory = _memory(pid)
        memory.map_files(sizes)
        assert list(memory.files) == ["states 0", "states 1"]
        with pytest.raises(KeeperError, match="5001"):
            memory.map_files({**sizes, "states 1": 5001})
        descriptor = memory._keeper.open("states 1", 5000)
        os.ftruncate(descriptor, 4000)
        with pytest.raises(KeeperError, match="4000"):
            memory.map_files(sizes)
        with pytest.raises(KeeperError, match="1048576"):
            memory.map("states", 1 << 21)
        memory._keeper.forget()
        assert _memory(pid).map("states", 1 << 21)[:3] == bytes(3)


def test_memory_of_other_sizes_is_rejected_until_it_is_forgotten(nursery):
    nursery.run(_refusals)


def _cycles() -> None:
    def cycle() -> None:
        memory = _memory(pid)
        memory.map("states", 1 << 20)
        memory._keeper.forget()

    with launcher() as pid:
        Child(cycle).result()
        folder = Path(f"/proc/{keepers_of(pid)[0]}/fd")
        before = len(list(folder.iterdir()))
        for _ in range(50):
            Child(cycle).result()
        # The keeper may not have noticed the end of the first process before.
        assert _comes_true(lambda: len(list(folder.iterdir())) <= before)


def test_a_keeper_holds_no_descriptor_of_ranks_that_have_ended(nursery):
    nursery.run(_cycles)


def _keepers() -> None:
    for _ in range(50):
        with launcher() as pid:
            _read(pid, 0)
            (keeper,) = keepers_of(pid)
        assert _comes_true(lambda ended=keeper: not _runs(ended))  # type: ignore[misc]


def _runs(pid: int) -> bool:
    """Whether the process has not ended. A zombie has no memory."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_fifty_jobs_leave_no_keeper(nursery):
    nursery.run(_keepers)


def _records() -> None:
    with launcher() as pid:
        records = Records(_memory(pid), RECORDS)
        for number in (1, 2, 3):
            records.write("first", number, b"%d" % number)
        assert records.read("first") == {2: b"2", 3: b"3"}
        assert records.read("second") == {}

        # A record that is half written does not count; the other one does.
        begin = records._begin("first", 3) + records._HEADER.size
        records._memory[begin : begin + 1] = b"x"
        assert records.read("first") == {2: b"2"}
        records.clear("first")
        assert records.read("first") == {}


def test_the_last_two_records_of_a_kind_are_there_unless_damaged(nursery):
    nursery.run(_records)
