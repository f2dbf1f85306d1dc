"""The roll call: when something is wrong, the ranks exchange their status and agree on one verdict.

The keys, in the store of the process group, under the prefix `watchdog`:

    member/R      host, pid and machine of rank R, set at startup
    left/R        written by rank R as it exits: that it has finished, or a `Record`
    round         number of roll calls so far; the only key read in normal operation
    errors        number of ranks that have failed so far, which orders their errors
    N/record/R    status of rank R in roll call N
    N/silent/R    why rank R does not respond, from a rank on its machine
    N/verdict     the cause, from the first rank that has all responses or times out
    N/done        number of ranks that have read the verdict

Every wait has a timeout, and every record is checked before use (`rank_store.py`). Without the
store, each rank decides from its own status and the processes on its machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron.training.health.cause import (
    Absent,
    Record,
    Silence,
    Verdict,
    find_cause,
    typed_fields,
)
from megatron.training.health.rank_store import RankStore, StoreLostError
from megatron.training.launch import Launch

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 2.0  # timeout for the responses of all ranks
_LOOK_SECONDS = 1.5  # after this time, ranks report why their neighbours may be silent
_POLL_SECONDS = 0.05
# The first ranks collect the responses. The others only poll for the verdict, unless it is late.
_NUM_JUDGES = 8
_JUDGES_SECONDS = 0.5
_LINGER_SECONDS = 1.0


@dataclass(frozen=True)
class Member:
    """The process of a rank."""

    host: str
    pid: int
    machine: str  # the same for processes that see each other's pids
    birth: str  # differs for a later process of the same pid

    @classmethod
    def of_this_process(cls) -> Member:
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _machine(), _stat(pid)[1])

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Member:
        """Inverts `asdict`. ValueError for other fields or types."""
        return cls(**typed_fields(cls, content))

    def silence(self) -> Silence:
        """Returns why a process of this machine is silent."""
        state, birth = _stat(self.pid)
        if state in ("", "Z", "X") or (birth and birth != self.birth):
            return Silence.GONE
        return Silence.STOPPED if state in ("T", "t") else Silence.SILENT

    def absent(self, rank: int, silence: Silence) -> Absent:
        return Absent(rank, silence, self.host, self.pid)


def _machine() -> str:
    """Returns a name that only processes with the same pid namespace share."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _stat(pid: int) -> tuple[str, str]:
    """Returns (state as one letter, start time) of a process of this machine; empty without one."""
    try:
        # The name in parentheses may contain spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except OSError:
        pass

    try:  # some systems have no /proc
        os.kill(pid, 0)
    except PermissionError:
        return "?", ""
    except (OSError, OverflowError):
        return "", ""
    return "?", ""


@dataclass(frozen=True)
class _Words:
    """The status of a rank; None if it has finished."""

    record: Record | None

    def to_json(self) -> dict[str, Any]:
        return {"record": None if self.record is None else self.record.to_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], rank: int) -> _Words:
        """Raises ValueError, KeyError or TypeError for other content, or that of another rank."""
        record = None if content["record"] is None else Record.from_json(content["record"])
        if record is not None and record.rank != rank:
            raise ValueError(f"Expected the words of rank {rank}, got words of rank {record.rank}.")
        return cls(record)


@dataclass(frozen=True)
class _Answer:
    """The outcome of a roll call."""

    verdict: Verdict | None
    num_answered: int

    def to_json(self) -> dict[str, Any]:
        verdict = None if self.verdict is None else self.verdict.to_json()
        return {"verdict": verdict, "num_answered": self.num_answered}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> _Answer:
        """Raises ValueError, KeyError or TypeError for other content."""
        verdict = None if content["verdict"] is None else Verdict.from_json(content["verdict"])
        num_answered = content["num_answered"]
        if type(num_answered) is not int:
            raise ValueError(f"Expected a number of ranks, got {type(num_answered).__name__}.")
        return cls(verdict, num_answered)


class RollCall:
    """This rank's part in the roll calls of one start of the job.

    Args:
        store: the process group's store; may be None in a world of one rank.
        launch: this process's rank.
        warn: called once, for the first record that is ignored.
    """

    def __init__(
        self,
        store: Store | None,
        launch: Launch,
        warn: Callable[[str], object] = logger.warning,
    ) -> None:
        self._rank = launch.rank
        self._world_size = launch.world_size
        # torch's name for it. Otherwise the store ends with the process of rank 0.
        self._agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._store = None
        if store is not None and launch.world_size > 1:
            # A request of the main thread may block the main thread's connection for minutes.
            own_connection = store.clone()  # type: ignore[attr-defined]
            prefixed = PrefixStore("watchdog", own_connection)
            self._store = RankStore(prefixed, warn)

        self._own = Member.of_this_process()
        self._members: dict[int, Member] = {}
        self.knows_all = self._store is None  # whether `_members` is complete
        # The last roll call that this rank has joined, and how many ranks have responded to it and
        # have read its verdict:
        self.number = 0
        self._num_answered = self._num_done = 0

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks, and a store to reach them."""
        return self._store is not None and not self._store.is_lost

    def join(self) -> None:
        """Writes this rank's host, pid and machine. StoreLostError."""
        if self._store is not None:
            self._store.put(f"member/{self._rank}", asdict(self._own))

    def learn(self) -> None:
        """Reads the other ranks' members once all have joined. StoreLostError."""
        if self.knows_all:
            return

        keys = {rank: f"member/{rank}" for rank in range(self._world_size)}
        members = self._shared.read_all(keys, Member.from_json)
        if members is not None:
            self._members = members
            # A record that was ignored is read again in a roll call.
            self.knows_all = True

    def leave(self, last_words: Record | None = None) -> None:
        """Writes that this rank has finished, or why it exits. StoreLostError."""
        if self._store is not None:
            self._store.put(f"left/{self._rank}", _Words(last_words).to_json())

    def close(self) -> None:
        """Closes the connection after the pending requests."""
        if self._store is not None:
            self._store.close()

    def is_called(self) -> bool:
        """Whether there is a roll call that this rank has not joined yet. StoreLostError."""
        return self._store is not None and self._store.add("round", 0) > self.number

    def error_order(self) -> int:
        """Returns a number larger than any earlier error's on any rank; 0 without other ranks."""
        try:
            return self._shared.add("errors", 1) if self.has_peers else 0
        except StoreLostError:
            return 0

    def hold(self, record: Record) -> Verdict | None:
        """Starts a roll call, or joins the current one. Takes a few seconds at most.

        Returns:
            The cause, the same on all connected ranks; None if there is no reason to end the run.
        """
        if not self.has_peers:
            return self._judge_alone(record)

        before = self.number
        try:
            if not self.is_called():
                self._call_after(self.number)
            number = self._shared.add("round", 0)
            if number <= self.number:
                raise StoreLostError(f"Expected roll call {self.number + 1}, got {number}.")
            self.number = number
            return self._hold(f"{self.number}/", record)
        except StoreLostError:
            verdict = self._judge_alone(record)
            if verdict is None:
                self.number = before  # joins again if the store recovers
            return verdict

    def call(self) -> None:
        """Starts a roll call without joining it: the others read what `leave` wrote."""
        if self.has_peers:
            with contextlib.suppress(StoreLostError):
                self._call_after(self._shared.add("round", 0))

    def linger(self) -> None:
        """Waits until all have read the verdict, if the store ends with this process."""
        if self._rank != 0 or self._agent_has_store or not self.has_peers:
            return

        deadline = time.monotonic() + _LINGER_SECONDS
        with contextlib.suppress(StoreLostError):
            while self._num_done < self._num_answered and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                self._num_done = self._shared.add(f"{self.number}/done", 0)

    @property
    def _shared(self) -> RankStore:
        if self._store is None:
            raise StoreLostError("Expected a store, got a world of one rank.")
        return self._store

    def _call_after(self, number: int) -> None:
        """Starts the next roll call, unless another rank has."""
        self._shared.call(lambda store: store.compare_set("round", str(number), str(number + 1)))

    def _hold(self, prefix: str, record: Record) -> Verdict | None:
        begin = time.monotonic()

        self._learn_who_is_there()
        self._shared.put(f"{prefix}record/{self._rank}", _Words(record).to_json())
        is_judge, has_looked = self._rank < _NUM_JUDGES, False
        missing = [rank for rank in range(self._world_size) if rank != self._rank]

        while (answer := self._answer(prefix)) is None:
            passed = time.monotonic() - begin
            self._report_neighbours(prefix, only_gone=passed < _LOOK_SECONDS or has_looked)
            has_looked = passed >= _LOOK_SECONDS
            is_over = passed > _PATIENCE_SECONDS + (0.0 if is_judge else _JUDGES_SECONDS)
            if is_judge or is_over:
                missing = [rank for rank in missing if not self._has_spoken(prefix, rank)]
                if not missing or is_over:
                    answer = self._judge(prefix, record)
                    break
            time.sleep(_POLL_SECONDS)

        self._num_answered = answer.num_answered
        self._num_done = self._shared.add(f"{prefix}done", 1)
        return answer.verdict

    def _answer(self, prefix: str) -> _Answer | None:
        """Returns the agreed outcome of this roll call; None until a rank has written it."""
        return self._shared.read(f"{prefix}verdict", _Answer.from_json)

    def _has_spoken(self, prefix: str, rank: int) -> bool:
        """Whether a rank has responded, or is known to be dead."""
        return self._words(prefix, rank) is not None or self._silence(prefix, rank) is Silence.GONE

    def _report_neighbours(self, prefix: str, only_gone: bool) -> None:
        """Writes which ranks of this machine are dead, or why else they are silent."""
        for rank, member in self._neighbours():
            silence = member.silence()
            if silence is Silence.GONE or not only_gone:
                self._shared.put(f"{prefix}silent/{rank}", {"silence": silence.name})

    def _judge(self, prefix: str, own: Record) -> _Answer:
        """Derives the verdict from the responses, and writes it unless another rank was faster.

        Returns the verdict of the fastest rank; this rank's own if the store has no valid one.
        """
        records: list[Record] = []
        absent: list[Absent] = []
        for rank in range(self._world_size):
            words = self._words(prefix, rank)
            if words is None and rank == self._rank:
                records.append(own)  # this rank's key was overwritten
            elif words is None:
                absent.append(self._unheard(rank, self._silence(prefix, rank) or Silence.SILENT))
            elif words.record is not None:
                records.append(words.record)

        num_answered = sum(not record.has_left for record in records)
        answer = _Answer(find_cause(records, absent), num_answered)
        self._shared.put_first(f"{prefix}verdict", answer.to_json())
        return self._answer(prefix) or answer

    def _words(self, prefix: str, rank: int) -> _Words | None:
        """Returns the words of a rank from its exit or this roll call; None without any."""

        def parse(content: dict[str, Any]) -> _Words:
            return _Words.from_json(content, rank)

        left = self._shared.read(f"left/{rank}", parse)
        return left or self._shared.read(f"{prefix}record/{rank}", parse)

    def _silence(self, prefix: str, rank: int) -> Silence | None:
        """Returns why a rank does not respond, as reported by another rank on its machine."""
        key = f"{prefix}silent/{rank}"
        return self._shared.read(key, lambda content: Silence[content["silence"]])

    def _unheard(self, rank: int, silence: Silence = Silence.SILENT) -> Absent:
        member = self._members.get(rank)
        return Absent(rank, silence) if member is None else member.absent(rank, silence)

    def _judge_alone(self, record: Record) -> Verdict | None:
        """Returns a verdict from this rank's status and the processes on its machine."""
        if not (record.needs_all or record.error is not None or record.is_stuck):
            return None

        absent = [
            member.absent(rank, silence)
            for rank, member in self._neighbours()
            if (silence := member.silence()) is not Silence.SILENT
        ]
        if not self._agent_has_store and self._rank != 0:
            # The store was in the process of rank 0, so rank 0 died first. Other ranks that are
            # gone may have exited afterwards.
            absent = [one for one in absent if one.rank == 0] or [self._unheard(0)]
        return find_cause([record], absent, is_alone=self._world_size > 1)

    def _learn_who_is_there(self) -> None:
        """Reads the members that are still unknown."""
        for rank in set(range(self._world_size)) - self._members.keys():
            member = self._shared.read(f"member/{rank}", Member.from_json)
            if member is not None:
                self._members[rank] = member

    def _neighbours(self) -> list[tuple[int, Member]]:
        """The other ranks on this machine."""
        return [
            (rank, member)
            for rank, member in self._members.items()
            if rank != self._rank and member.machine == self._own.machine
        ]
