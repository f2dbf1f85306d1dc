from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.device import Device
from megatron.core.host_memory import HostSlab
from megatron.core.numa import cpus_of_node, num_nodes, parse_cpus, prefer_node, touch_from_node


def listed(cpus: set[int]) -> str:
    """As Linux writes them: ranges where there are any."""
    parts = []
    for cpu in sorted(cpus):
        if cpu - 1 not in cpus:
            last = cpu
            while last + 1 in cpus:
                last += 1
            parts.append(str(cpu) if last == cpu else f"{cpu}-{last}")
    return ",".join(parts) + "\n"


@settings(deadline=None)
@given(st.sets(st.integers(0, 300), max_size=40))
def test_lists_of_cores_are_read_as_linux_writes_them(cpus):
    assert parse_cpus(listed(cpus)) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1-2-3", "0x1"])
def test_other_lists_are_rejected(text):
    with pytest.raises(ValueError):
        parse_cpus(text)


def make_nodes(root: Path, lists: dict[int, str]) -> Path:
    """A directory as /sys/devices/system/node."""
    for node, cpus in lists.items():
        (root / f"node{node}").mkdir(parents=True)
        (root / f"node{node}" / "cpulist").write_text(cpus + "\n")
    (root / "nodes_that_are_none").mkdir(exist_ok=True)
    return root


def test_the_cores_of_each_node_are_read_and_of_others_there_are_none(tmp_path):
    nodes = make_nodes(tmp_path, {0: "0-1,4-5", 1: "2-3,6-7", 2: ""})
    assert cpus_of_node(0, nodes) == {0, 1, 4, 5}
    assert cpus_of_node(1, nodes) == {2, 3, 6, 7}
    assert cpus_of_node(2, nodes) == set(), "a node of memory alone"
    assert cpus_of_node(3, nodes) == set()
    assert num_nodes(nodes) == 2
    assert num_nodes(tmp_path / "nothing") == 1


class System:
    """A C library whose system call records its arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int = 0) -> None:
        self.calls: list[tuple[int, ...]] = []
        self._error = error
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: self)
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")

    def syscall(self, number: ctypes.c_long, *arguments: ctypes.c_ulong) -> int:
        address, nbytes, mode, mask, num_bits, flags = (argument.value for argument in arguments)
        words = (ctypes.c_ulong * (num_bits // 64)).from_address(mask)
        nodes = sum(word << 64 * place for place, word in enumerate(words))
        self.calls.append((number.value, address, nbytes, mode, nodes, num_bits, flags))
        ctypes.set_errno(self._error)
        return -1 if self._error else 0


def test_the_kernel_is_told_the_range_and_the_node_as_a_bit(monkeypatch):
    system = System(monkeypatch)
    assert prefer_node(8192, 100, 1)
    assert prefer_node(8192, 100, 70)
    assert system.calls == [
        (237, 8192, 100, 1, 1 << 1, 65, 0),
        (237, 8192, 100, 1, 1 << 70, 129, 0),
    ]


def test_slabs_lie_near_to_the_device_and_are_placed_before_they_are_pinned(monkeypatch):
    asked: list[tuple[Any, ...]] = []
    can_place = [True]

    def place(address: int, _: int, node: int) -> bool:
        asked.append(("place", address, node))
        return can_place[0]

    monkeypatch.setattr("megatron.core.host_memory.prefer_node", place)
    monkeypatch.setattr(
        "megatron.core.host_memory.touch_from_node",
        lambda address, nbytes, node: asked.append(("touch", address, nbytes, node)),
    )
    monkeypatch.setattr(Device, "pins_host_memory", property(lambda _: True))
    monkeypatch.setattr(
        Device, "pin", lambda _, address, nbytes: asked.append(("pin", address, nbytes))
    )
    monkeypatch.setattr(Device, "unpin", lambda *_: None)
    HostSlab(5000, Device("cpu"), is_pinned=False, purpose="moments")
    assert asked == [], "the CPU has no node of its own"

    monkeypatch.setattr(Device, "numa_node", property(lambda _: 3))
    slab = HostSlab(5000, Device("cpu"), is_pinned=True, purpose="gradients")
    address = slab.tensor(0, 1, torch.uint8).data_ptr()
    assert asked == [("place", address, 3), ("pin", address, 5000)]

    can_place[0] = False
    asked.clear()
    slab = HostSlab(5000, Device("cpu"), is_pinned=True, purpose="gradients")
    address = slab.tensor(0, 1, torch.uint8).data_ptr()
    assert asked == [("place", address, 3), ("touch", address, 5000, 3), ("pin", address, 5000)]


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, (3 << 20) + 5])
@pytest.mark.parametrize("num_cores", [1, 2])
def test_threads_of_a_node_touch_all_of_a_slab_where_its_place_cannot_be_asked_for(
    nbytes, num_cores, monkeypatch, tmp_path
):
    allowed = os.sched_getaffinity(0)
    cores = set(sorted(allowed)[:num_cores])
    nodes = make_nodes(tmp_path, {3: listed(cores).strip()})
    touched: list[tuple[int, int, set[int]]] = []
    fill = ctypes.memset

    def memset(address: int, value: int, count: int) -> int:
        touched.append((address, address + count, os.sched_getaffinity(0)))
        return fill(address, value, count)

    monkeypatch.setattr(ctypes, "memset", memset)
    memory = mmap.mmap(-1, nbytes + 1)
    memory[nbytes] = 7
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    touch_from_node(address, nbytes, 3, nodes)
    begins, ends, places = zip(*sorted(touched), strict=True)
    assert [*begins, address + nbytes] == [address, *ends]
    assert all(place == cores for place in places)
    assert memory[nbytes] == 7
    assert os.sched_getaffinity(0) == allowed, "of this thread"

    touched.clear()
    touch_from_node(address, nbytes, 4, nodes)
    assert touched == [], "there is no such node"
