from __future__ import annotations

import errno
import itertools
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.device import Device
from megatron.core.dist_checkpointing.format.manifest import BLOCK_BYTES, DATA_ALIGNMENT, digests_of
from megatron.core.dist_checkpointing.save import data_file
from megatron.core.dist_checkpointing.save.data_file import (
    NUM_BUFFERS,
    SLAB_BUFFERS,
    BufferPool,
    DataFileWriter,
)
from megatron.core.dist_checkpointing.state import entries
from megatron.core.dist_checkpointing.state.entries import Landing
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.host_memory import HostLimits, HostMemoryError, HostSlab
from megatron.core.lanes import Event, Lane, delays
from megatron.core.optimizer import scaled_states
from megatron.core.shared_file import MEMORY_ALIGNMENT, address_of

CPU = Device("cpu")
SMALL = BLOCK_BYTES + 3 * DATA_ALIGNMENT  # bytes of a buffer that a block does not divide
FOLDER = "iter_0000010.token.saving"
FILE = f"{FOLDER}/__0_0.distcp"


class MemorySink:
    """Keeps the written bytes, and checks that direct I/O could write them."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.addresses: set[int] = set()
        self.is_closed = False
        self.num_aborts = 0

    def write(self, spans: Sequence[memoryview]) -> None:
        assert not self.is_closed
        for span in spans:
            assert len(self.content) % DATA_ALIGNMENT == 0, (
                "only the last span may be of any length"
            )
            address = address_of(span)
            assert address % MEMORY_ALIGNMENT == 0
            self.addresses.add(address)
            self.content += span

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.num_aborts += 1


class FailingSink(MemorySink):
    """A disk that is full from some write on, or when the file is closed."""

    def __init__(self, num_writes: int) -> None:
        super().__init__()
        self.num_writes = num_writes
        self.num_failures = 0

    def write(self, spans: Sequence[memoryview]) -> None:
        self._count()
        super().write(spans)

    def close(self) -> None:
        self.num_writes = min(self.num_writes, 0)
        self._count()
        super().close()

    def _count(self) -> None:
        self.num_writes -= 1
        if self.num_writes < 0:
            self.num_failures += 1
            raise OSError(errno.ENOSPC, "No space left on device", "/full")


class HeldSink(MemorySink):
    """A disk that writes only after an event."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = threading.Event()
        self.go_on = threading.Event()

    def write(self, spans: Sequence[memoryview]) -> None:
        self.has_begun.set()
        assert self.go_on.wait(600)
        super().write(spans)


@pytest.fixture(scope="module")
def pool() -> BufferPool:
    """A pool for all tests: each must return its buffers."""
    return BufferPool(CPU, buffer_bytes=SMALL)


@pytest.fixture
def disk() -> Iterator[Lane]:
    lane = CPU.host_lane("checkpoint disk")
    yield lane
    lane.close()


@pytest.fixture
def local(tmp_path) -> LocalStore:
    store = LocalStore(tmp_path)
    store.make_folder(FOLDER)
    return store


NOISE = torch.frombuffer(bytearray(random.Random(0).randbytes(32 * SMALL)), dtype=torch.uint8)
places = itertools.count(step=9973)


def random_tensor(nbytes: int, shift: int = 64) -> torch.Tensor:
    """Random bytes, different in each call.

    Args:
        shift: their offset in a page, which decides whether direct I/O could write them.
    """
    memory = torch.empty(nbytes + 2 * DATA_ALIGNMENT, dtype=torch.uint8)
    first = (shift - memory.data_ptr()) % DATA_ALIGNMENT
    begin = next(places) % (NOISE.numel() - nbytes)
    return memory[first : first + nbytes].copy_(NOISE[begin : begin + nbytes])


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def check_usable(pool: BufferPool, disk: Lane) -> None:
    """Writes a whole file."""
    sink, tensor = MemorySink(), random_tensor(5 * SMALL)
    writer = DataFileWriter(lambda: sink, pool, disk)
    assert writer.write_tensor(tensor) == digests_of(bytes_of(tensor))
    assert writer.finish() == 5 * SMALL
    assert sink.is_closed
    assert sink.content == bytes_of(tensor)


class Model:
    """The expected contents of a data file."""

    def __init__(self) -> None:
        self.content = b""

    def pad_to(self, offset: int) -> None:
        self.content += bytes(offset - len(self.content))


# Contents.

NEAR_BOUNDARIES = st.builds(
    lambda unit, times, offset: max(0, unit * times + offset),
    st.sampled_from([DATA_ALIGNMENT, BLOCK_BYTES, SMALL]),
    st.integers(0, 3),
    st.integers(-2, 2),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "tensor", "in place"]), NEAR_BOUNDARIES | st.integers(0, 9000)
    ),
    max_size=8,
)


@pytest.mark.parametrize("reads", ["host", "device"])
@given(STEPS, st.integers(0, 3), st.integers(0, 1000))
@settings(deadline=None, max_examples=40)
def test_a_file_is_its_parts_in_order_with_zeros_between(reads, steps, num_extra_zeros, seed):
    pool, disk, sink, model = (
        BufferPool(CPU, buffer_bytes=SMALL),
        CPU.host_lane("disk"),
        MemorySink(),
        Model(),
    )
    writer = DataFileWriter(lambda: sink, pool, disk)
    with delays(seed), pytest.MonkeyPatch.context() as patch:
        if reads == "device":
            patch.setattr(entries, "lies_on_device", lambda _: True)
        patch.setattr(data_file, "_IN_PLACE_BYTES", DATA_ALIGNMENT)
        for kind, nbytes in steps:
            tensor = random_tensor(nbytes, 3 * MEMORY_ALIGNMENT if kind == "in place" else 64)
            if kind != "write":
                aligned = (
                    -(-len(model.content) // DATA_ALIGNMENT) * DATA_ALIGNMENT
                    + num_extra_zeros * DATA_ALIGNMENT
                )
                writer.pad_to(aligned)
                model.pad_to(aligned)
                assert writer.write_tensor(tensor) == digests_of(bytes_of(tensor))
            else:
                writer.write(bytes_of(tensor))
            model.content += bytes_of(tensor)
            assert writer.position == len(model.content)
            if seed % 2 and (read := writer.read_in_place()) is not None:
                read.synchronize()
                assert kind == "in place"
                assert reads == "host"
                tensor.zero_()
        assert writer.finish() == len(model.content)
    disk.close()
    assert sink.content == model.content
    assert sink.is_closed
    assert sink.num_aborts == 0


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (3, 0, 2), (1,), (5, 7), (400, 1000)], ids=str)
@pytest.mark.parametrize("reads", ["host", "device"])
def test_tensors_of_any_type_shape_and_strides_are_written_as_their_bytes(
    pool, disk, dtype, shape, reads, monkeypatch
):
    if reads == "device":
        monkeypatch.setattr(entries, "lies_on_device", lambda _: True)
    tensor = (torch.randn(shape) * 10).to(dtype).transpose(0, -1)
    sink = MemorySink()
    writer = DataFileWriter(lambda: sink, pool, disk)
    digests = writer.write_tensor(tensor)
    writer.finish()
    assert sink.content == bytes_of(tensor)
    assert digests == digests_of(bytes_of(tensor))


@pytest.mark.parametrize("reads", ["host", "device"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(), (3, 200_001)], ids=str)
def test_a_state_with_a_scale_is_written_as_its_values(
    pool, disk, reads, dtype, shape, monkeypatch
):
    if reads == "device":
        monkeypatch.setattr(entries, "lies_on_device", lambda _: True)
    stored, scale, sink = torch.randn(shape).to(dtype), torch.tensor(0.123), MemorySink()
    values = stored.float() * scale
    assert values.nbytes > 3 * SMALL or values.numel() < 2, "in several pieces"
    writer = DataFileWriter(lambda: sink, pool, disk)
    digests = writer.write_tensor(stored, scale)
    writer.finish()
    assert sink.content == bytes_of(values)
    assert digests == digests_of(bytes_of(values))


class NotedLane:
    """A lane that records whether it is running."""

    def __init__(self) -> None:
        self.lane = CPU.lane("noted")
        self.is_at_work = False
        self.num_pieces = 0

    def enqueue(self, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        def noted() -> None:
            self.is_at_work = True
            self.num_pieces += 1
            work()
            self.is_at_work = False

        return self.lane.enqueue(noted, after)


@pytest.mark.parametrize("is_strided", [False, True])
def test_values_computed_from_a_tensor_on_a_device_are_issued_with_its_copy(
    pool, disk, is_strided, monkeypatch
):
    lane, reads = NotedLane(), []
    real_read, real_contiguous = scaled_states.read, torch.Tensor.contiguous

    def noting(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def compute(*args: torch.Tensor) -> torch.Tensor:
            reads.append(lane.is_at_work)
            return real(*args)

        return compute

    stored = torch.randn(300, 1000).to(torch.float16)
    stored = stored.t() if is_strided else stored
    sink, scale = MemorySink(), torch.tensor(0.5)
    values = stored.float().contiguous() * scale
    monkeypatch.setattr(entries, "lies_on_device", lambda _: True)
    monkeypatch.setattr(scaled_states, "read", noting(real_read))
    monkeypatch.setattr(torch.Tensor, "contiguous", noting(real_contiguous))
    monkeypatch.setattr(pool, "landing", pool.landing._replace(lane=lane))
    writer = DataFileWriter(lambda: sink, pool, disk)
    writer.write_tensor(stored, scale)
    writer.finish()
    assert reads == [True] * (lane.num_pieces + 1), (
        "a contiguous copy, and of each piece the product"
    )
    assert lane.num_pieces > 2
    assert sink.content == bytes_of(values)


def test_a_large_file_needs_no_more_memory_than_the_pool_and_the_next_one_takes_the_same(
    pool, disk
):
    addresses = set()
    for _ in range(2):
        sink = MemorySink()
        writer = DataFileWriter(lambda sink=sink: sink, pool, disk)
        writer.write_tensor(random_tensor(20 * SMALL))
        writer.finish()
        addresses |= sink.addresses
    assert len(addresses) == NUM_BUFFERS


# In place.

LARGE = data_file._IN_PLACE_BYTES


@pytest.mark.parametrize("nbytes", [LARGE, 3 * SMALL + 5])
def test_a_large_tensor_in_host_memory_is_written_in_place(pool, disk, nbytes):
    sink, tensor = HeldSink(), random_tensor(nbytes, MEMORY_ALIGNMENT)
    writer = DataFileWriter(lambda: sink, pool, disk)
    writer.write(bytes(DATA_ALIGNMENT))
    before = bytes_of(tensor)
    assert writer.write_tensor(tensor) == digests_of(before)
    read = writer.read_in_place()
    assert read is not None
    assert sink.has_begun.wait(600)
    assert not read.is_done(), "the disk has not taken it"
    assert writer.read_in_place() is None, "nothing more since"

    sink.go_on.set()
    read.synchronize()
    assert tensor.data_ptr() in sink.addresses
    tensor.zero_()
    writer.write(b"footer")
    writer.finish()
    assert sink.content == bytes(DATA_ALIGNMENT) + before + b"footer"


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: random_tensor(LARGE - 512, 0), id="small"),
        pytest.param(lambda: random_tensor(LARGE, 64), id="at another address"),
        pytest.param(lambda: random_tensor(LARGE, 0).view(128, -1).t(), id="of other strides"),
    ],
)
def test_any_other_tensor_has_been_read_when_the_call_returns(pool, disk, make):
    sink, tensor = HeldSink(), make()
    writer, before = DataFileWriter(lambda: sink, pool, disk), bytes_of(tensor)
    writer.write_tensor(tensor)
    assert writer.read_in_place() is None
    tensor.zero_()
    sink.go_on.set()
    writer.finish()
    assert sink.content == before


def test_after_a_failure_of_the_disk_no_tensor_is_read_in_place(pool, disk):
    writer = DataFileWriter(lambda: FailingSink(1), pool, disk)
    tensor = random_tensor(LARGE, 0)
    writer.write_tensor(tensor)
    read = writer.read_in_place()
    assert read is not None
    writer.pad_to(-(-writer.position // DATA_ALIGNMENT) * DATA_ALIGNMENT)
    writer.write_tensor(random_tensor(LARGE, 0))
    read.synchronize()
    with pytest.raises(OSError, match="No space left"):
        writer.finish()
    check_usable(pool, disk)


class Link:
    """A lane whose copies take until they are awaited. Keeps what happens, in order.

    Args:
        fails_at: the number of the copy whose wait raises.
    """

    def __init__(self, history: list[str], fails_at: int | None = None) -> None:
        self.history = history
        self.fails_at = fails_at
        self.pending: dict[int, Callable[[], object]] = {}

    def enqueue(self, work: Callable[[], object], after: Sequence[Event] = ()) -> Any:
        assert not after
        number = sum(line.startswith("send") for line in self.history)
        self.history.append(f"send {number}")
        self.pending[number] = work
        return SimpleNamespace(synchronize=lambda: self.arrive(number))

    def arrive(self, number: int) -> None:
        self.history.append(f"await {number}")
        work = self.pending.pop(number)
        if number == self.fails_at:
            raise OSError("the link is down")
        work()


@pytest.fixture
def link(pool, monkeypatch) -> Link:
    """That of the pool, whose blocks are hashed one at a time."""
    monkeypatch.setattr(entries, "lies_on_device", lambda _: True)
    found = Link([])

    def hashed(data: memoryview) -> tuple[str, ...]:
        found.history.append("hash")
        return digests_of(data)

    monkeypatch.setattr(entries, "digests_of", hashed)
    pieces = tuple(memoryview(bytearray(2 * BLOCK_BYTES)) for _ in range(2))
    monkeypatch.setattr(pool, "landing", Landing(found, pieces))
    return found


def test_while_a_piece_is_copied_and_hashed_the_next_one_comes_down(pool, disk, link):
    sink, tensor = MemorySink(), random_tensor(7 * BLOCK_BYTES + 5)
    writer = DataFileWriter(lambda: sink, pool, disk)
    digests = writer.write_tensor(tensor)
    tensor_was = bytes_of(tensor)
    tensor.zero_()
    assert link.history == [
        *("send 0", "send 1", "await 0", "hash", "hash"),
        *("send 2", "await 1", "hash", "hash"),
        *("send 3", "await 2", "hash", "hash"),
        *("await 3", "hash", "hash"),
    ]
    writer.finish()
    assert sink.content == tensor_was
    assert digests == digests_of(tensor_was)


@pytest.mark.parametrize("fails_at", [0, 2])
def test_after_an_error_no_piece_is_on_its_way_and_the_pool_can_be_used(
    pool, disk, link, fails_at, monkeypatch
):
    link.fails_at = fails_at
    writer = DataFileWriter(lambda: MemorySink(), pool, disk)
    with pytest.raises(OSError, match="the link is down"):
        writer.write_tensor(random_tensor(7 * BLOCK_BYTES + 5))
    assert link.pending == {}
    writer.abort()
    monkeypatch.undo()
    check_usable(pool, disk)


# Staging.


def room_for(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Fixes the machine's free memory."""
    monkeypatch.setattr(HostLimits, "read", classmethod(lambda _: HostLimits(None, nbytes)))


def test_staging_does_not_wait_for_the_disk_and_the_next_file_reuses_its_memory(disk, monkeypatch):
    room_for(monkeypatch, 12 * SMALL)
    monkeypatch.setattr(data_file, "SLAB_BUFFERS", 2)
    pool = BufferPool(CPU, buffer_bytes=SMALL, staging_share=0.5, num_local_ranks=1)
    for number in range(2):
        sink, tensor = HeldSink(), random_tensor(8 * SMALL + 5)
        before = bytes_of(tensor)
        writer = DataFileWriter(lambda sink=sink: sink, pool, disk)
        writer.is_staging = True
        digests = writer.write_tensor(tensor)
        tensor.zero_()
        assert sink.content == b"", "the disk has not begun"
        assert pool.staged_bytes == 6 * SMALL, number
        sink.go_on.set()
        assert writer.finish() == len(before)
        assert sink.content == before
        assert digests == digests_of(before)
    check_usable(pool, disk)
    assert pool.staged_bytes == 6 * SMALL


@pytest.mark.parametrize(
    ("share", "num_ranks", "num_buffers"), [(0.0, 1, 0), (0.5, 1, 50), (0.5, 4, 12), (0.25, 2, 12)]
)
def test_ranks_of_one_machine_stage_within_their_share_of_the_free_memory(
    share, num_ranks, num_buffers, monkeypatch
):
    pools = [
        BufferPool(CPU, buffer_bytes=SMALL, staging_share=share, num_local_ranks=num_ranks)
        for _ in range(num_ranks)
    ]

    def read(_: type) -> HostLimits:
        return HostLimits(100 * SMALL - sum(pool.staged_bytes for pool in pools), None)

    monkeypatch.setattr(HostLimits, "read", classmethod(read))
    while [pool for pool in pools if pool.lend_more()]:
        assert sum(pool.staged_bytes for pool in pools) <= share * 100 * SMALL
    # The first rank may have one more, where the share leaves a remainder.
    assert {pool.staged_bytes // SMALL for pool in pools} <= {num_buffers, num_buffers + 1}
    monkeypatch.setattr(HostLimits, "read", classmethod(lambda _: HostLimits(None, None)))
    assert pools[0].lend_more() == [], "the free memory is unknown"


def test_staging_maps_many_buffers_at_once_pins_none_and_takes_fewer_where_that_is_all_there_is(
    monkeypatch,
):
    device = PinningDevice("cpu")
    object.__setattr__(device, "pinned", [])
    pool = BufferPool(device, buffer_bytes=SMALL, staging_share=0.5)
    sizes = []
    for num_buffers in (1000, SLAB_BUFFERS + 5, SLAB_BUFFERS + 5):
        # Half of the free and the staged memory.
        room_for(monkeypatch, 2 * num_buffers * SMALL - pool.staged_bytes)
        sizes.append(len(pool.lend_more()))
    assert sizes == [SLAB_BUFFERS, 5, 0]
    assert [nbytes for _, nbytes in device.pinned] == [2 * pool.landing.pieces[0].nbytes]
    assert pool.staged_bytes == (SLAB_BUFFERS + 5) * SMALL

    buffers = pool.lend()
    assert {buffer.nbytes for buffer in buffers} == {SMALL}
    begins = sorted(torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() for buffer in buffers)
    assert len(begins) == NUM_BUFFERS + SLAB_BUFFERS + 5
    assert all(after - before >= SMALL for before, after in itertools.pairwise(begins))


def test_memory_that_is_not_there_ends_the_staging_and_not_the_save(disk, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    room_for(monkeypatch, 100 * SMALL)
    monkeypatch.setattr(data_file, "SLAB_BUFFERS", 1)
    pool = BufferPool(CPU, buffer_bytes=SMALL, staging_share=0.5, num_local_ranks=1)
    num_slabs = itertools.count(1)

    def slab(*args: Any, **named: Any) -> HostSlab:
        if next(num_slabs) > 2:
            raise HostMemoryError("Expected memory")
        return HostSlab(*args, **named)

    monkeypatch.setattr(data_file, "HostSlab", slab)
    sink, tensor = MemorySink(), random_tensor(20 * SMALL)
    before = bytes_of(tensor)
    writer = DataFileWriter(lambda: sink, pool, disk)
    gate = threading.Event()
    disk.enqueue(gate.wait)
    writer.is_staging = True
    saving = threading.Thread(target=writer.write_tensor, args=(tensor,))
    saving.start()
    while not caplog.records:
        saving.join(0.001)
    gate.set()
    saving.join()
    writer.finish()
    assert sink.content == before
    assert pool.staged_bytes == 2 * SMALL
    (record,) = caplog.records
    assert "and no more: Expected memory" in record.getMessage()


# Wrong calls.


def test_a_tensor_that_is_not_aligned_is_rejected_and_the_file_continues(pool, disk):
    sink = MemorySink()
    writer = DataFileWriter(lambda: sink, pool, disk)
    writer.write(b"header")
    with pytest.raises(ValueError, match=r"at a multiple of 4096 bytes, got .* at byte 6"):
        writer.write_tensor(torch.ones(1))
    writer.pad_to(DATA_ALIGNMENT)
    with pytest.raises(
        ValueError, match="Expected to pad a data file of 4096 bytes so far, got up to 4095"
    ):
        writer.pad_to(DATA_ALIGNMENT - 1)
    writer.finish()
    assert sink.content == b"header" + bytes(DATA_ALIGNMENT - 6)


def test_two_files_at_once_cannot_have_one_pool(pool, disk):
    first = DataFileWriter(lambda: MemorySink(), pool, disk)
    with pytest.raises(RuntimeError, match="Expected free buffers"):
        DataFileWriter(lambda: MemorySink(), pool, disk)
    first.abort()
    check_usable(pool, disk)


# When the disk fails.


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_writes", [0, 3, 8])
def test_an_error_of_the_disk_comes_up_once_and_the_next_save_has_everything_it_needs(
    pool, disk, num_writes, seed
):
    sink = FailingSink(num_writes)
    writer = DataFileWriter(lambda: sink, pool, disk)

    def save() -> None:
        for _ in range(8):
            writer.write_tensor(random_tensor(SMALL))
        writer.finish()

    with delays(seed):
        with pytest.raises(OSError, match="No space left on device: '/full'") as failure:
            save()
        assert failure.value.errno == errno.ENOSPC
        assert sink.num_failures == 1, "nothing is written after the first failure"
        assert sink.num_aborts == 1
        writer.abort()
        assert sink.num_aborts == 1
        check_usable(pool, disk)


# Aborted saves.


@pytest.mark.parametrize("seed", range(2))
def test_an_aborted_file_is_gone_and_queued_writes_are_skipped(pool, disk, local, seed):
    with delays(seed):
        writer = DataFileWriter(lambda: local.open_data(FILE), pool, disk)
        writer.write_tensor(random_tensor(2 * SMALL + 1))
        writer.abort()
        assert local.files(FOLDER) == []
        check_usable(pool, disk)


def fail() -> None:
    raise ValueError("of other work")


def test_a_lane_ended_by_other_work_is_an_error_and_not_a_file_with_holes(pool, disk):
    sink = MemorySink()
    writer = DataFileWriter(lambda: sink, pool, disk)
    writer.write_tensor(random_tensor(4 * SMALL))
    disk.enqueue(fail)
    with pytest.raises(ValueError, match="of other work"):
        writer.finish()
    assert not sink.is_closed
    assert sink.num_aborts == 1
    check_usable(pool, CPU.host_lane("another"))


# The buffers.


class PinningDevice(Device):
    """Records the memory that it pins."""

    pinned: list[tuple[int, int]]

    @property
    def pins_host_memory(self) -> bool:
        return True

    def pin(self, address: int, nbytes: int) -> None:
        self.pinned.append((address, nbytes))

    def unpin(self, address: int) -> None:
        pass


@pytest.mark.gpu
def test_a_tensor_on_a_gpu_is_copied_through_pinned_buffers(disk):
    device = Device("cuda")
    pool, sink = BufferPool(device), MemorySink()
    tensor = torch.randn(3, 1 << 20, device=device.torch_device)
    assert all(torch.frombuffer(piece, dtype=torch.uint8).is_pinned() for piece in pool.landing[1])
    writer = DataFileWriter(lambda: sink, pool, disk)
    digests = writer.write_tensor(tensor)
    writer.finish()
    assert sink.content == bytes_of(tensor.cpu())
    assert digests == digests_of(bytes_of(tensor.cpu()))
