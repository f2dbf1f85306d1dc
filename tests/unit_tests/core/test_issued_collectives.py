"""Collectives of a device that a test moves by hand, one event after the other."""

from __future__ import annotations

import ast
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.core import issued_collectives
from megatron.core.device import Device
from megatron.core.issued_collectives import IssuedCollectives, Outstanding, issuing
from megatron.core.lanes import Event, ThreadEvent
from megatron.core.rank_waits import rank_wait


class HandMoved(Device):
    """A device whose events a test completes, in the order in which they were recorded."""

    recorded: list[ThreadEvent]

    def __init__(self) -> None:
        super().__init__("cpu")
        object.__setattr__(self, "recorded", [])

    def event(self) -> Event:
        self.recorded.append(ThreadEvent())
        return self.recorded[-1]

    def move(self, num_events: int, error: BaseException | None = None) -> None:
        """The device comes past so many more events."""
        for event in [event for event in self.recorded if not event.is_done()][:num_events]:
            event.finish(error)


@pytest.fixture
def device() -> Iterator[HandMoved]:
    device = HandMoved()
    yield device
    device.move(10**6)  # lets go of the thread that walks


def issue(collectives: IssuedCollectives, device: Device, *names: str) -> None:
    for name in names:
        with collectives.issuing(name, device):
            pass


def test_a_process_without_collectives_has_none_outstanding():
    assert IssuedCollectives().oldest() is None


def test_a_collective_that_has_begun_and_is_not_over_is_waited_in(device):
    collectives = IssuedCollectives()
    issue(collectives, device, "gather")
    device.move(1)
    assert collectives.oldest() == Outstanding(1, "gather", has_begun=True)
    assert (
        str(collectives.oldest())
        == "its device is waiting in the gather, collective 1 of this rank"
    )


def test_a_collective_that_the_device_has_not_come_to_is_not_waited_in(device):
    collectives = IssuedCollectives()
    issue(collectives, device, "gather")
    assert collectives.oldest() == Outstanding(1, "gather", has_begun=False)
    assert "has not come to the gather" in str(collectives.oldest())


def test_the_oldest_that_is_not_over_counts(device):
    collectives = IssuedCollectives()
    issue(collectives, device, "first", "second", "third")
    device.move(3)
    assert collectives.oldest() == Outstanding(2, "second", has_begun=True)
    device.move(1)
    assert collectives.oldest() == Outstanding(3, "third", has_begun=False)


def test_of_two_streams_the_one_with_the_older_collective_counts(device):
    """The gather that was prefetched has started; the reduction before it waits for this rank's own
    computation.
    """
    reducing, gathering = device, HandMoved()
    collectives = IssuedCollectives()
    issue(collectives, reducing, "reduction")
    issue(collectives, gathering, "gather")
    gathering.move(1)
    assert collectives.oldest() == Outstanding(1, "reduction", has_begun=False)
    gathering.move(1)


def test_once_all_are_over_none_is_outstanding(device):
    collectives = IssuedCollectives()
    issue(collectives, device, "first", "second")
    device.move(3)
    assert collectives.oldest() == Outstanding(2, "second", has_begun=True)
    device.move(1)
    assert collectives.oldest() is None
    issue(collectives, device, "third")
    assert collectives.oldest() == Outstanding(3, "third", has_begun=False)


def test_a_device_that_comes_on_has_nothing_outstanding(device):
    """Slowly, but it does: that is no hang."""
    collectives = IssuedCollectives()
    issue(collectives, device, *map(str, range(100)))
    is_over = threading.Event()

    def come_on() -> None:
        while not is_over.wait(0.02):
            device.move(1)

    moving = threading.Thread(target=come_on)
    moving.start()
    try:
        assert collectives.oldest() is None
    finally:
        is_over.set()
        moving.join()


def test_a_host_that_is_held_up_in_issuing_a_collective_waits_in_it(device):
    """For example in the first one of a group, in which the ranks connect."""
    collectives, may_go = IssuedCollectives(), threading.Event()

    def issue_slowly() -> None:
        with collectives.issuing("gather", device):
            may_go.wait()

    issuing_thread = threading.Thread(target=issue_slowly)
    issuing_thread.start()
    while not device.recorded:
        time.sleep(0.001)
    device.move(1)
    assert collectives.oldest() == Outstanding(1, "gather", has_begun=True)
    may_go.set()
    issuing_thread.join()
    device.move(1)
    assert collectives.oldest() is None


def test_a_collective_that_could_not_be_issued_is_not_outstanding(device):
    collectives = IssuedCollectives()
    with pytest.raises(RuntimeError, match="no such group"), collectives.issuing("gather", device):
        raise RuntimeError("no such group")
    device.move(1)
    assert collectives.oldest() is None


def test_a_failed_device_waits_for_no_rank(device):
    """Every use of it raises, and the main thread raises the error itself."""
    collectives = IssuedCollectives()
    issue(collectives, device, "gather")
    device.move(2, RuntimeError("device-side assert triggered"))
    assert collectives.oldest() is None


def test_the_thread_that_asks_is_never_held_up_and_asking_again_starts_no_thread(device):
    collectives = IssuedCollectives()
    issue(collectives, device, "gather")
    walkers = set()
    for _ in range(3):
        assert collectives.oldest() == Outstanding(1, "gather", has_begun=False)
        walkers.add(collectives._walker)
    assert len(walkers) == 1


def test_a_run_of_any_length_keeps_a_bounded_number_of_records(device):
    collectives = IssuedCollectives()
    for _ in range(3 * issued_collectives._MOST_RECORDS):
        issue(collectives, device, "gather")
        device.recorded[-2:] = []
    assert len(collectives._records) == issued_collectives._MOST_RECORDS
    collectives._records.clear()


def test_collectives_of_the_cpu_leave_no_record_but_state_that_the_thread_waits():
    before = len(issued_collectives.OF_THIS_PROCESS._records)
    with issuing("all-reduce", torch.ones(1)):
        assert rank_wait(threading.get_ident()) == "all-reduce"
    assert rank_wait(threading.get_ident()) is None
    assert len(issued_collectives.OF_THIS_PROCESS._records) == before


def test_collectives_of_a_device_leave_one(device, monkeypatch):
    monkeypatch.setattr(issued_collectives, "OF_THIS_PROCESS", IssuedCollectives())
    monkeypatch.setattr(
        issued_collectives,
        "Device",
        lambda kind, index: device if (kind, index) == ("meta", 0) else None,
    )
    with issuing("all-reduce", torch.ones(1, device="meta")):
        pass
    assert issued_collectives.OF_THIS_PROCESS.oldest() == Outstanding(
        1, "all-reduce", has_begun=False
    )


def _collectives_that_leave_no_record(tree: ast.AST) -> list[str]:
    """Calls of collectives, without messages between two ranks, which only the CPU has."""
    recorded: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and any(
            "issuing(" in ast.unparse(item) for item in node.items
        ):
            recorded |= {id(inner) for inner in ast.walk(node)}
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and id(node) not in recorded
    ]
    names = [ast.unparse(call.func) for call in calls]
    return [
        name
        for name in names
        if re.fullmatch(
            r"dist\.(all_|broadcast|reduce|gather|scatter|barrier)\w*|_?(all|reduce)_\w+_on_device",
            name,
        )
        or name.endswith(".full_tensor")
    ]


def test_every_collective_of_the_project_leaves_a_record():
    """One that left none would have its rank blamed for waiting in it."""
    package = Path(issued_collectives.__file__).parents[1]
    found = {
        # By its path: several files may have one name.
        str(path.relative_to(package)): _collectives_that_leave_no_record(
            ast.parse(path.read_text())
        )
        for path in package.rglob("*.py")
    }
    assert {name: calls for name, calls in found.items() if calls} == {}
    unrecorded = (
        "dist.all_reduce(x)\nwith issuing('it', x):\n    dist.broadcast(x)\n"
        "all_gather_on_device(x)\nx.full_tensor()"
    )
    assert _collectives_that_leave_no_record(ast.parse(unrecorded)) == [
        "dist.all_reduce",
        "all_gather_on_device",
        "x.full_tensor",
    ]
