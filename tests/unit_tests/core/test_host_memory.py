from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.device import Device
from megatron.core.drivers import CudaDriver, PinError
from megatron.core.host_memory import (
    ARRAY_ALIGNMENT,
    HostLimits,
    HostMemoryError,
    HostNeed,
    HostSlab,
    SlabBuilder,
    check_host_memory,
)

CPU = Device("cpu")
MIB, GIB = 1 << 20, 1 << 30
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float64]
needs_proc = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc")


class PinningDevice(Device):
    """Records pins, and whether the memory is still mapped when it is unpinned."""

    events: list[tuple[str, int, int]]

    @property
    def pins_host_memory(self) -> bool:
        return True

    def pin(self, address: int, nbytes: int) -> None:
        self.events.append(("pin", address, nbytes))

    def unpin(self, address: int) -> None:
        self.events.append(("unpin", address, len(mappings_of(address))))


@pytest.fixture
def pinning() -> PinningDevice:
    device = PinningDevice("cpu")
    object.__setattr__(device, "events", [])
    return device


def slab(nbytes: int, device: Device = CPU, *, is_pinned: bool = False) -> HostSlab:
    return HostSlab(nbytes, device, is_pinned=is_pinned, purpose="moments")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def mappings_of(address: int) -> list[str]:
    """Returns the line of /proc/self/maps that contains an address; empty if it is not mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return [
        line for line, (start, stop) in zip(lines, ranges, strict=True) if start <= address < stop
    ]


def flags_of(address: int) -> set[str]:
    """Returns the kernel's flags of the mapping that contains an address.

    Mapping and flags are from one read: a shared mapping such as the heap may grow between two
    reads.
    """
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if not word.endswith(":"):
            start, stop = (int(end, 16) for end in word.split("-"))
            is_inside = start <= address < stop
        elif is_inside and word == "VmFlags:":
            return set(line.split()[1:])
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_a_slab_has_the_requested_size_and_rejects_arrays_beyond_it():
    memory = slab(1001)
    assert memory.nbytes == 1001
    assert memory.tensor(1000, 1, torch.uint8).numel() == 1
    for offset, numel, dtype in [
        (1001, 1, torch.uint8),
        (0, 251, torch.float32),
        (2, 1, torch.float32),
        (-4, 1, torch.float32),
        (0, -1, torch.float32),
    ]:
        with pytest.raises(
            ValueError, match="Expected an aligned array within the 1001 bytes for moments, got"
        ):
            memory.tensor(offset, numel, dtype)


def test_a_failed_allocation_has_the_purpose_in_its_error():
    with pytest.raises(
        HostMemoryError, match=r"Expected 1048576\.00 TiB of host memory for moments, got: "
    ):
        slab(1 << 60)
    with pytest.raises(HostMemoryError, match="for moments"):
        slab(1 << 80)


@settings(max_examples=100, deadline=None)
@given(arrays=st.lists(st.tuples(st.integers(0, 200), st.sampled_from(DTYPES)), max_size=8))
def test_the_builder_adds_up_aligned_arrays_that_do_not_overlap_and_end_with_the_slab(arrays):
    builder = SlabBuilder()
    offsets = [builder.add(numel, dtype) for numel, dtype in arrays]
    memory = builder.build(CPU, is_pinned=False, purpose="test")
    assert memory.nbytes == builder.nbytes
    tensors = [
        memory.tensor(offset, numel, dtype)
        for offset, (numel, dtype) in zip(offsets, arrays, strict=True)
    ]
    end = 0
    for index, tensor in enumerate(tensors):
        assert not tensor.any(), "an array before it reached into it"
        tensor.fill_(index + 1)
        if tensor.numel():
            assert tensor.data_ptr() % ARRAY_ALIGNMENT == 0
            assert 0 <= offsets[index] - end < ARRAY_ALIGNMENT
            end = offsets[index] + tensor.nbytes
    assert end == memory.nbytes
    assert all((tensor == index + 1).all() for index, tensor in enumerate(tensors))


@needs_proc
def test_memory_is_released_with_the_last_array():
    before = resident_bytes()
    memory = slab(64 * MIB)
    assert resident_bytes() - before < 8 * MIB, "not resident until it is touched"
    left, right = (
        memory.tensor(0, 32 * MIB, torch.uint8),
        memory.tensor(32 * MIB, 32 * MIB, torch.uint8),
    )
    left.fill_(1)
    right.fill_(2)
    del memory, left
    gc.collect()
    assert resident_bytes() - before > 60 * MIB, "an array keeps the slab"
    assert (right == 2).all()
    address = right.data_ptr()
    del right
    gc.collect()
    assert mappings_of(address) == []
    assert resident_bytes() - before < 8 * MIB


@needs_proc
def test_a_slab_may_have_huge_pages_and_is_not_forked():
    memory = slab(3 * MIB)
    address = memory.tensor(0, 1, torch.uint8).data_ptr()
    assert address % (2 * MIB) == 0
    flags = flags_of(address)
    assert "dc" in flags
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags
    ordinary = torch.empty(8 * MIB, dtype=torch.uint8).fill_(1)
    assert "dc" not in flags_of(ordinary.data_ptr())


@needs_proc
def test_a_slab_is_pinned_once_and_unpinned_while_it_is_still_mapped(pinning):
    memory = slab(10_000, pinning, is_pinned=True)
    assert memory.is_pinned
    array = memory.tensor(0, 10, torch.float32)
    address = array.data_ptr()
    assert pinning.events == [("pin", address, 10_000)]
    del memory
    gc.collect()
    assert len(pinning.events) == 1, "an array keeps the pin"
    del array
    gc.collect()
    assert pinning.events[1:] == [("unpin", address, 1)]
    assert mappings_of(address) == []


def test_a_forked_process_unpins_nothing(pinning, monkeypatch):
    memory = slab(100, pinning, is_pinned=True)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del memory
    gc.collect()
    assert [event[0] for event in pinning.events] == ["pin"]


@needs_proc
def test_memory_is_released_if_it_cannot_be_pinned(pinning, monkeypatch):
    def refuse(_: Device, address: int, nbytes: int) -> None:
        refused.append((address, nbytes))
        raise PinError("Expected to pin.")

    refused: list[tuple[int, int]] = []
    monkeypatch.setattr(PinningDevice, "pin", refuse)
    with pytest.raises(PinError) as caught:
        slab(8 * MIB, pinning, is_pinned=True)
    [(address, nbytes)] = refused
    assert caught.tb is not None
    assert nbytes == 8 * MIB
    assert mappings_of(address) == []
    assert pinning.events == [], "memory that was not pinned is not unpinned"


def test_the_error_of_a_failed_pin_has_the_limit_and_the_flags_to_change(monkeypatch):
    calls = []
    driver = SimpleNamespace(
        cudaHostRegister=lambda *args: calls.append(args) or 2,
        cudaGetErrorString=lambda status: f"error {status}",
        cudaHostUnregister=lambda address: calls.append(address),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    for needs_a_gpu in ("_clear_error", "pci_address"):
        monkeypatch.setattr(CudaDriver, needs_a_gpu, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr("resource.getrlimit", lambda _: (65536, 65536))
    with pytest.raises(
        PinError,
        match=r"pin 4096 bytes .*got: error 2 .*is 65536 bytes.*"
        r"--no-pin-cpu-params and --no-pin-cpu-grads",
    ):
        Device("cuda").pin(8192, 4096)
    assert calls == [(8192, 4096, 0)]
    monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))
    with pytest.raises(PinError, match="is unlimited"):
        slab(100, Device("cuda"), is_pinned=True)
    driver.cudaHostRegister = lambda *_: 0
    memory = slab(100, Device("cuda"), is_pinned=True)
    address = memory.tensor(0, 1, torch.uint8).data_ptr()
    del memory
    gc.collect()
    assert calls[-1] == address
    assert len(calls) == 3, "memory that was not pinned is not unpinned"


@pytest.mark.gpu
def test_cuda_reports_a_slab_as_pinned_until_it_is_freed():
    device = Device.for_rank("cuda", 0, 1)
    memory = slab(4 * MIB, device, is_pinned=True)
    array = memory.tensor(0, MIB, torch.float32)
    assert array.is_pinned()
    there = torch.arange(MIB, dtype=torch.float32, device=device.torch_device)
    array.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(array, there.cpu())
    assert not slab(4 * MIB, device).tensor(0, 1, torch.float32).is_pinned()


NEEDS = [HostNeed("main weights", 12 * GIB, False), HostNeed("gradients", 4 * GIB, True)]


@pytest.mark.parametrize(
    "limits",
    [HostLimits(32 * GIB, None), HostLimits(None, 32 * GIB), HostLimits(32 * GIB, 1 << 50)],
)
def test_the_smallest_limit_applies_to_the_byte(limits):
    check_host_memory(NEEDS, num_local_ranks=2, limits=limits)
    with pytest.raises(HostMemoryError):
        check_host_memory(
            [*NEEDS, HostNeed("one more", 1, False)], num_local_ranks=2, limits=limits
        )
    with pytest.raises(HostMemoryError):
        check_host_memory(NEEDS, num_local_ranks=3, limits=limits)


def test_any_size_passes_without_known_limits(tmp_path):
    limits = HostLimits.read(tmp_path / "proc", tmp_path / "cgroup")
    assert limits == HostLimits(None, None)
    check_host_memory(NEEDS, num_local_ranks=1000, limits=limits)


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def read_limits(tmp_path: Path, membership: str, files: dict[str, object]) -> HostLimits:
    proc = write(
        tmp_path / "proc",
        {"self/cgroup": membership, "meminfo": "MemTotal: 9 kB\nMemAvailable:  5 kB"},
    )
    return HostLimits.read(proc, write(tmp_path / "cgroup", files))


NO_LIMIT = 0x7FFFFFFFFFFFF000
VERSION_1 = "9:cpuset:/other\n4:cpu,memory:/job\n0::/"


@pytest.mark.parametrize(
    ("membership", "files", "available"),
    [
        ("0::/", {"memory.max": 100, "memory.current": 150}, 0),
        (
            "0::/job",
            {"job/memory.max": 1000, "job/memory.current": 700}
            | {"job/memory.stat": "anon 500\ninactive_file 200"},
            500,
        ),
        (
            "0::/slice/job/step",
            {"slice/memory.max": 2000, "slice/memory.current": 900, "slice/job/memory.max": 500}
            | {"slice/job/memory.current": 100, "slice/job/step/memory.max": "max"},
            400,
        ),
        (
            VERSION_1,
            {"memory/job/memory.limit_in_bytes": 800, "memory/job/memory.usage_in_bytes": 600}
            | {"memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 50"}
            | {"memory/memory.limit_in_bytes": NO_LIMIT, "memory/memory.usage_in_bytes": 900},
            250,
        ),
        (
            VERSION_1,
            {"memory/memory.limit_in_bytes": NO_LIMIT, "memory/memory.usage_in_bytes": 900},
            None,
        ),
    ],
    ids=["over its limit", "page cache", "parents", "version 1", "version 1 without a limit"],
)
def test_the_smallest_cgroup_limit_applies_and_page_cache_is_available(
    tmp_path, membership, files, available
):
    assert read_limits(tmp_path, membership, files) == HostLimits(5 * 1024, available)
