"""Ranks that save together, one operation at a time, in an order that a test chooses.

Each rank is a manager in this process. Its threads stop before every operation on the file system,
and only one rank runs at a time:

    ranks = Interleaved(root, world_size)
    outcome = ranks.save(pauses=Pause(rank=1, at=17, other=0, until=25), fault=None)

runs rank 1 up to its 17th operation, then rank 0 until it has done its 25th or cannot continue,
then rank 1 to its end, then the others. Time is simulated: a rank that polls advances its clock by
each wait. So a timeout of ten minutes passes at once, and "within seconds" is exact.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from megatron.core.dist_checkpointing.format.manifest import BLOCK_BYTES
from megatron.core.dist_checkpointing.save import manager as manager_module
from megatron.core.dist_checkpointing.save import publisher as publisher_module
from megatron.core.dist_checkpointing.save.data_file import BufferPool
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.store import LocalStore
from tests.unit_tests.core.dist_checkpointing.helpers.crashes import Operation, intercepted
from tests.unit_tests.core.dist_checkpointing.helpers.scenes import CPU, NEW, Size, State, ending_of

TINY = Size(2, 1)
TIMEOUT = 600.0  # seconds on the ranks' clocks
_STUCK = 60.0  # seconds of this machine, after which a test has hung


class Pause(NamedTuple):
    """Rank `rank` waits before its operation `at` until rank `other` has done its operation
    `until`, if it can.
    """

    rank: int
    at: int
    other: int
    until: int


class Fault(NamedTuple):
    """Operation `number` of a rank fails."""

    rank: int
    number: int
    is_carried_out: bool = False  # it has happened all the same: only the answer is an error
    is_of_syncs: bool = False  # instead, every fsync from there on fails, and nothing else

    def strikes(self, number: int, operation: Operation) -> bool:
        if self.is_of_syncs:
            return number >= self.number and operation.what == "fsync"
        return number == self.number


class Outcome(NamedTuple):
    """The results of a save."""

    endings: list[str | None]  # of each rank: its error; None: published
    operations: list[list[str]]  # of each rank
    num_in_pause: int  # operations of the other rank when the pause ended; -1: no pause
    seconds: float  # on the clock of the rank that waited longest


class _Rank:
    """A rank `runs`, is `ready` before an operation, `waits` while it polls, or has `ended`."""

    def __init__(self) -> None:
        self.state = "runs"
        self.clock = 0.0
        self.operations: list[str] = []
        self.num_changes_seen = -1


class _Schedule:
    """Runs one rank at a time: the one that the pause selects, or the first that can continue."""

    def __init__(self, world_size: int, pause: Pause | None, fault: Fault | None) -> None:
        self.ranks = [_Rank() for _ in range(world_size)]
        self.num_in_pause = -1
        self._pause = pause
        self._fault = fault
        self._rank_of: dict[int, int] = {}  # by thread
        self._num_changes = 0  # that others can see
        self._turn: int | None = None
        self._changed = threading.Condition()

    # For the ranks' threads

    def adopt(self, rank: int) -> None:
        self._rank_of[threading.get_ident()] = rank

    def before(self, operation: Operation) -> None:
        number = self._rank_of.get(threading.get_ident())
        if number is None:
            return
        rank = self.ranks[number]
        self._arrive(number, "ready")
        rank.operations.append(str(operation))
        self._num_changes += operation.is_change

        fault = self._fault
        if (
            fault is not None
            and fault.rank == number
            and fault.strikes(len(rank.operations) - 1, operation)
        ):
            if fault.is_carried_out and operation.carry_out is not None:
                operation.carry_out()
            raise OSError(errno.EIO, os.strerror(errno.EIO), operation.where)

    def wait(self, seconds: float) -> None:
        number = self._rank_of[threading.get_ident()]
        self.ranks[number].clock += seconds
        self._arrive(number, "waits")
        self.ranks[number].num_changes_seen = self._num_changes

    def end(self, number: int) -> None:
        with self._changed:
            self.ranks[number].state = "ended"
            self._next()

    def now(self) -> float:
        return self.ranks[self._rank_of[threading.get_ident()]].clock

    def _arrive(self, number: int, state: str) -> None:
        with self._changed:
            self.ranks[number].state = state
            self._next()
            if not self._changed.wait_for(lambda: self._turn == number, _STUCK):
                raise AssertionError(
                    f"Expected rank {number} to have its turn, got {[vars(r) for r in self.ranks]}."
                )
            self._turn = None

    def _next(self) -> None:
        """Selects the next rank once no rank runs."""
        if self._turn is not None or any(rank.state == "runs" for rank in self.ranks):
            return
        turn = self._choose()
        if turn is not None:
            self.ranks[turn].state = "runs"
            self._turn = turn
            self._changed.notify_all()

    def _choose(self) -> int | None:
        pause = self._pause
        if pause is not None and self.num_in_pause < 0 and self._is_at(pause):
            done = len(self.ranks[pause.other].operations)
            if done <= pause.until and self._can_continue(pause.other):
                return pause.other
            self.num_in_pause = done

        # A waiting rank can only poll. Pauses between its operations decide when it does.
        everyone = range(len(self.ranks))
        able = [number for number in everyone if self.ranks[number].state == "ready"]
        able = able or [number for number in everyone if self._can_continue(number)]
        for number in (pause.rank, pause.other) if pause is not None else ():
            if number in able:
                return number
        if able:
            return able[0]

        # All ranks wait for each other, so time has to pass.
        waiting = [rank for rank in self.ranks if rank.state == "waits"]
        if not waiting:
            return None
        last = min(waiting, key=lambda rank: rank.clock)
        last.clock += 1.0
        return self.ranks.index(last)

    def _is_at(self, pause: Pause) -> bool:
        rank = self.ranks[pause.rank]
        return rank.state == "ready" and len(rank.operations) == pause.at

    def _can_continue(self, number: int) -> bool:
        """A waiting rank need not poll again before the directory has changed."""
        rank = self.ranks[number]
        return rank.state == "ready" or (
            rank.state == "waits" and rank.num_changes_seen != self._num_changes
        )


class _Closing(threading.Event):
    """The event that a rank waits for while it polls."""

    def __init__(self, schedule: _Schedule) -> None:
        super().__init__()
        self._schedule = schedule

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        if not self.is_set():
            self._schedule.wait(timeout)
        return self.is_set()


class Interleaved:
    """Ranks that save to one directory repeatedly."""

    def __init__(self, root: Path, world_size: int) -> None:
        self._root = root
        self._world_size = world_size
        self._state = State(NEW, size=TINY)
        self._contents = [self._state.contents(rank, world_size) for rank in range(world_size)]

    def save(self, pause: Pause | None = None, fault: Fault | None = None) -> Outcome:
        """New ranks save the new checkpoint under a new schedule."""
        schedule = _Schedule(self._world_size, pause, fault)
        with ExitStack() as stack:
            stack.enter_context(_clock(schedule.now))
            managers = [
                stack.enter_context(
                    CheckpointManager(
                        LocalStore(self._root),
                        CPU,
                        rank,
                        self._world_size,
                        "abcd",
                        timeout_seconds=TIMEOUT,
                    )
                )
                for rank in range(self._world_size)
            ]
            for rank, manager in enumerate(managers):
                manager._is_closing = _Closing(schedule)
                for lane in (manager._lane, manager._disk):
                    lane.enqueue(lambda rank=rank: schedule.adopt(rank)).synchronize()
            with intercepted(self._root, schedule.before, looks_too=True):
                for rank, manager in enumerate(managers):
                    manager.save(NEW, self._contents[rank], self._state.train_state)
                    manager._lane.enqueue(lambda rank=rank: schedule.end(rank))
                endings = [ending_of(manager) for manager in managers]
            assert [manager.num_failed for manager in managers] == [
                ending is not None for ending in endings
            ]
        return Outcome(
            endings,
            [rank.operations for rank in schedule.ranks],
            schedule.num_in_pause,
            max(rank.clock for rank in schedule.ranks),
        )


@contextmanager
def _clock(now: Callable[[], float]) -> Iterator[None]:
    """Replaces the machine's clock by the ranks' clocks, and uses small buffers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher_module, "time", SimpleNamespace(monotonic=now))
        patch.setattr(
            manager_module, "BufferPool", lambda device, **_: BufferPool(device, 2, BLOCK_BYTES)
        )
        yield
