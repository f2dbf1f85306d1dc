"""The roll call: the ranks tell each other how they are, when something is wrong, and agree on one verdict.

The keys, in the store of the process group, under the prefix `watchdog`:

    member/R      host, pid and machine of rank R, set at the start
    left/R        the last words of a rank that has ended: it had finished, or a `Record`
    round         how many roll calls there have been; the one key that is looked at in normal operation
    errors        counts the ranks that have failed by themselves, for their order
    N/record/R    what rank R says in roll call N
    N/silent/R    why rank R does not answer, by a rank on its machine
    N/verdict     the cause, by whoever was first to have all answers, or to run out of patience
    N/done        how many ranks have read the verdict

Every wait is bounded. A store that is lost leaves each rank with what it can see by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron.training.cause import Absent, Record, Silence, Verdict, find_cause
from megatron.training.launch import Launch

_T = TypeVar("_T")

_STORE_SECONDS = 3.0  # for one request
_PATIENCE_SECONDS = 2.0  # for the answers of all ranks
_LOOK_SECONDS = 1.5  # after these, ranks say why their neighbours may be silent
_POLL_SECONDS = 0.05
# The first ranks collect the answers. The others ask for the verdict only, unless it does not come.
_NUM_JUDGES = 8
_JUDGES_SECONDS = 0.5
_LINGER_SECONDS = 1.0
_FINISHED = "finished"


class StoreLostError(RuntimeError):
    """The store does not answer, and is not asked again."""


class _Job(Generic[_T]):
    """A request to the store, and what became of it."""

    def __init__(self, work: Callable[[Store], _T]) -> None:
        self._work = work
        self.is_done = threading.Event()
        self.result: _T | None = None
        self.error: BaseException | None = None

    def run(self, store: Store) -> None:
        try:
            self.result = self._work(store)
        except BaseException as error:
            self.error = error
        self.is_done.set()


class BoundedStore:
    """A store that is waited for only so long. A request that blocks for ever blocks a thread of its own."""

    def __init__(self, store: Store) -> None:
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self.is_lost = False
        threading.Thread(target=self._serve, args=(self._jobs, store), name="watchdog store", daemon=True).start()

    def call(self, work: Callable[[Store], _T]) -> _T:
        """What `work` makes of the store. StoreLostError if it fails or takes too long, and at once from then on."""
        if self.is_lost:
            raise StoreLostError("Expected a store that answers, got one that was lost before.")
        job = _Job(work)
        self._jobs.put(job)
        if not job.is_done.wait(_STORE_SECONDS):
            self.is_lost = True
            raise StoreLostError(f"Expected an answer of the store within {_STORE_SECONDS} s, got none.")
        if job.error is not None:
            self.is_lost = True
            raise StoreLostError(f"Expected an answer of the store, got {job.error}.") from job.error
        return job.result  # type: ignore[return-value]

    def close(self) -> None:
        self._jobs.put(None)

    @staticmethod
    def _serve(jobs: queue.SimpleQueue[_Job[Any] | None], store: Store) -> None:
        while (job := jobs.get()) is not None:
            job.run(store)


@dataclass(frozen=True)
class Member:
    """A process: where it runs, and how to recognise it there."""

    host: str
    pid: int
    machine: str  # the same for processes that see each other's pids
    birth: str  # tells the process from a later one of the same pid

    @classmethod
    def of_this_process(cls) -> Member:
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _machine(), _stat(pid)[1])

    def silence(self) -> Silence:
        """Why it does not answer; for a process of this machine."""
        state, birth = _stat(self.pid)
        if state in ("", "Z", "X") or (birth and birth != self.birth):
            return Silence.GONE
        return Silence.STOPPED if state in ("T", "t") else Silence.SILENT


class RollCall:
    """This rank's part in the roll calls of one start of the job.

    Args:
        store: of the process group; None, or a world of one rank: there are no others.
        launch: where this process stands among them.
    """

    def __init__(self, store: Store | None, launch: Launch) -> None:
        self._rank = launch.rank
        self._world_size = launch.world_size
        # torch's name for it. Otherwise the store ends with the process of rank 0.
        self._agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        # A connection of its own: a request of the main thread may block its connection for minutes.
        self._store = None
        if store is not None and launch.world_size > 1:
            own_connection = store.clone()  # type: ignore[attr-defined]
            self._store = BoundedStore(PrefixStore("watchdog", own_connection))
        self._own = Member.of_this_process()
        self._members: dict[int, Member] = {}
        self.knows_all = self._store is None  # who the other ranks are
        self.number = 0  # of the last roll call that this rank has taken part in
        self._num_answered = self._num_done = 0  # ranks that answered in it, and that have read its verdict

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks, and a store to reach them by."""
        return self._store is not None and not self._store.is_lost

    def join(self) -> None:
        """Says who this rank is. StoreLostError."""
        if self._store is not None:
            self._set(f"member/{self._rank}", json.dumps(asdict(self._own)))

    def learn(self) -> None:
        """Reads once who the others are, as soon as all have joined. StoreLostError."""
        if self.knows_all:
            return
        keys = [f"member/{rank}" for rank in range(self._world_size)]
        if self._ask(lambda store: store.check(keys)):
            values = self._ask(lambda store: store.multi_get(keys))
            self._members = {rank: Member(**json.loads(value)) for rank, value in enumerate(values)}
            self.knows_all = True

    def leave(self, last_words: Record | None = None) -> None:
        """Says that this rank ends, so that nobody takes it for dead: it has finished, or why not. StoreLostError."""
        if self._store is not None:
            words = _FINISHED if last_words is None else json.dumps(last_words.to_json())
            self._set(f"left/{self._rank}", words)

    def close(self) -> None:
        """Ends the connection. What is under way comes to its end first."""
        if self._store is not None:
            self._store.close()

    def is_called(self) -> bool:
        """Whether there is a roll call that this rank has not answered yet. StoreLostError."""
        return self._store is not None and self._add("round", 0) > self.number

    def error_order(self) -> int:
        """A number larger than that of every error before, on whichever rank; 0 without other ranks."""
        try:
            return self._add("errors", 1) if self.has_peers else 0
        except StoreLostError:
            return 0

    def hold(self, record: Record) -> Verdict | None:
        """Calls the roll, or answers if it has been called: takes a few seconds at most.

        Returns:
            The cause of the run's end, the same on all ranks that are connected; None: no reason to end it was found.
        """
        if not self.has_peers:
            return self._judge_alone(record)
        try:
            if not self.is_called():
                last, following = str(self.number), str(self.number + 1)
                self._ask(lambda store: store.compare_set("round", last, following))
            self.number = self._add("round", 0)
            return self._hold(f"{self.number}/", record)
        except StoreLostError:
            return self._judge_alone(record)

    def call(self) -> None:
        """Calls the roll without taking part in it: the others read this rank's last words. Raises nothing."""
        if self.has_peers:
            with contextlib.suppress(StoreLostError):
                number = self._add("round", 0)
                self._ask(lambda store: store.compare_set("round", str(number), str(number + 1)))

    def linger(self) -> None:
        """Before a process ends by a verdict: waits until all have read it, if the store is in this process."""
        if self._rank != 0 or self._agent_has_store or not self.has_peers:
            return
        deadline = time.monotonic() + _LINGER_SECONDS
        with contextlib.suppress(StoreLostError):
            while self._num_done < self._num_answered and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                self._num_done = self._add(f"{self.number}/done", 0)

    def _hold(self, prefix: str, record: Record) -> Verdict | None:
        begin = time.monotonic()
        self._learn_who_is_there()
        self._set(f"{prefix}record/{self._rank}", json.dumps(record.to_json()))
        is_judge, has_looked = self._rank < _NUM_JUDGES, False
        missing = [rank for rank in range(self._world_size) if rank != self._rank]
        while not self._has(f"{prefix}verdict"):
            passed = time.monotonic() - begin
            self._report_neighbours(prefix, only_gone=passed < _LOOK_SECONDS or has_looked)
            has_looked = passed >= _LOOK_SECONDS
            is_over = passed > _PATIENCE_SECONDS + (0.0 if is_judge else _JUDGES_SECONDS)
            if is_judge or is_over:
                missing = [rank for rank in missing if not self._has_spoken(prefix, rank)]
                if not missing or is_over:
                    self._judge(prefix)
                    continue
            time.sleep(_POLL_SECONDS)
        answer = json.loads(self._get(f"{prefix}verdict"))
        self._num_answered = answer["num_answered"]
        self._num_done = self._add(f"{prefix}done", 1)
        return None if answer["verdict"] is None else Verdict.from_json(answer["verdict"])

    def _has_spoken(self, prefix: str, rank: int) -> bool:
        """Whether it is known what a rank has to say, or that it is dead."""
        if self._has(f"{prefix}record/{rank}") or self._has(f"left/{rank}"):
            return True
        silent = f"{prefix}silent/{rank}"
        return self._has(silent) and self._get(silent) == Silence.GONE.name

    def _report_neighbours(self, prefix: str, only_gone: bool) -> None:
        """Tells the others which ranks of this machine are dead; in the end also what else keeps them silent."""
        for rank, member in self._neighbours():
            silence = member.silence()
            if silence is Silence.GONE or not only_gone:
                self._set(f"{prefix}silent/{rank}", silence.name)

    def _judge(self, prefix: str) -> None:
        """Derives the verdict from what has been said, unless another rank was faster."""
        records: list[Record] = []
        absent: list[Absent] = []
        for rank in range(self._world_size):
            words = self._words(prefix, rank)
            if words is None:
                absent.append(self._absent(prefix, rank))
            elif words != _FINISHED:
                records.append(Record.from_json(json.loads(words)))
        verdict = find_cause(records, absent)
        num_answered = sum(not record.has_left for record in records)
        answer = {"verdict": None if verdict is None else verdict.to_json(), "num_answered": num_answered}
        self._ask(lambda store: store.compare_set(f"{prefix}verdict", "", json.dumps(answer)))

    def _words(self, prefix: str, rank: int) -> str | None:
        """A rank's last words, or what it has said in this roll call, or None."""
        keys = (f"left/{rank}", f"{prefix}record/{rank}")
        return next((self._get(key) for key in keys if self._has(key)), None)

    def _absent(self, prefix: str, rank: int) -> Absent:
        key = f"{prefix}silent/{rank}"
        return self._unheard(rank, Silence[self._get(key)] if self._has(key) else Silence.SILENT)

    def _unheard(self, rank: int, silence: Silence = Silence.SILENT) -> Absent:
        member = self._members.get(rank)
        return Absent(rank, silence) if member is None else Absent(rank, silence, member.host, member.pid)

    def _judge_alone(self, record: Record) -> Verdict | None:
        """What this rank can tell without a store: its own state, and the processes on its machine."""
        if not (record.needs_all or record.error is not None or record.is_stuck):
            return None
        absent = [
            Absent(rank, member.silence(), member.host, member.pid)
            for rank, member in self._neighbours()
            if member.silence() is not Silence.SILENT
        ]
        if not self._agent_has_store and self._rank != 0:
            # The store was in the process of rank 0, so that one went first. Others that are gone may have left since.
            absent = [one for one in absent if one.rank == 0] or [self._unheard(0)]
        return find_cause([record], absent, is_alone=self._world_size > 1)

    def _learn_who_is_there(self) -> None:
        """Reads those that have joined, if not all are known yet."""
        for rank in range(self._world_size):
            key = f"member/{rank}"
            if not self.knows_all and rank not in self._members and self._has(key):
                self._members[rank] = Member(**json.loads(self._get(key)))

    def _neighbours(self) -> list[tuple[int, Member]]:
        """The other ranks on this machine."""
        machine = self._own.machine
        return [(r, member) for r, member in self._members.items() if r != self._rank and member.machine == machine]

    def _ask(self, work: Callable[[Store], _T]) -> _T:
        if self._store is None:
            raise StoreLostError("Expected a store, got a world of one rank.")
        return self._store.call(work)

    def _has(self, key: str) -> bool:
        return self._ask(lambda store: store.check([key]))

    def _get(self, key: str) -> str:
        return self._ask(lambda store: store.get(key)).decode()

    def _set(self, key: str, value: str) -> None:
        self._ask(lambda store: store.set(key, value))

    def _add(self, key: str, number: int) -> int:
        return self._ask(lambda store: store.add(key, number))


def _machine() -> str:
    """What processes that see each other's pids have in common, and others have not."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _stat(pid: int) -> tuple[str, str]:
    """(state as one letter, time of birth) of a process of this machine; empty if there is none."""
    try:
        # After the name, which may hold anything: state, parent, ..., and in the 20th place the time of birth.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except OSError:
        pass
    try:  # there is no /proc on some systems
        os.kill(pid, 0)
    except OSError:
        return "", ""
    return "?", ""
