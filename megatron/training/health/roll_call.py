"""The roll call: the ranks tell each other how they are, when something is wrong, and agree on one
verdict.

The keys, in the store of the process group, under the prefix `watchdog`:

    member/R      host, pid and machine of rank R, set at the start
    left/R        the last words of a rank that has ended: it had finished, or a `Record`
    round         how many roll calls there have been; the one key that is looked at in normal operation
    errors        counts the ranks that have failed by themselves, for their order
    N/record/R    what rank R says in roll call N
    N/silent/R    why rank R does not answer, by a rank on its machine
    N/verdict     the cause, by whoever was first to have all answers, or to run out of patience
    N/done        how many ranks have read the verdict

Every wait is bounded. A store that is lost leaves each rank with what it can see by itself. All but
the counters are signed records (`job_secret.py`): the store may be open to a network. One that was
not made by this start, or has other types, counts as missing and is one warning. Counters can only
have the roll called, which costs seconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron.core.log import printable
from megatron.training.health.cause import (
    Absent,
    Record,
    Silence,
    Verdict,
    find_cause,
    typed_fields,
)
from megatron.training.health.job_secret import Signer
from megatron.training.launch import Launch

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_STORE_SECONDS = 3.0  # for one request
_PATIENCE_SECONDS = 2.0  # for the answers of all ranks
_LOOK_SECONDS = 1.5  # after these, ranks say why their neighbours may be silent
_POLL_SECONDS = 0.05
# The first ranks collect the answers. The others ask for the verdict only, unless it does not come.
_NUM_JUDGES = 8
_JUDGES_SECONDS = 0.5
_AGREE_SECONDS = (
    2.0  # after their patience, ranks that cannot agree through the store go by their own verdict
)
_LINGER_SECONDS = 1.0


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
    """A store that is waited for only so long. A request that blocks for ever blocks a thread of
    its own.
    """

    def __init__(self, store: Store) -> None:
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self.is_lost = False
        threading.Thread(
            target=self._serve, args=(self._jobs, store), name="watchdog store", daemon=True
        ).start()

    def call(self, work: Callable[[Store], _T]) -> _T:
        """What `work` makes of the store. StoreLostError if it fails or takes too long, and at once
        from then on.
        """
        if self.is_lost:
            raise StoreLostError("Expected a store that answers, got one that was lost before.")
        job = _Job(work)
        self._jobs.put(job)
        if not job.is_done.wait(_STORE_SECONDS):
            self.is_lost = True
            raise StoreLostError(
                f"Expected an answer of the store within {_STORE_SECONDS} s, got none."
            )
        if job.error is not None:
            self.is_lost = True
            raise StoreLostError(
                f"Expected an answer of the store, got {job.error}."
            ) from job.error
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

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Member:
        """ValueError for other fields, or of other types."""
        return cls(**typed_fields(cls, content))

    def silence(self) -> Silence:
        """Why it does not answer; for a process of this machine."""
        state, birth = _stat(self.pid)
        if state in ("", "Z", "X") or (birth and birth != self.birth):
            return Silence.GONE
        return Silence.STOPPED if state in ("T", "t") else Silence.SILENT


@dataclass(frozen=True)
class _Words:
    """What a rank says of itself; None: it has finished."""

    record: Record | None

    @classmethod
    def from_json(cls, content: Mapping[str, Any], rank: int) -> _Words:
        """ValueError, KeyError or TypeError for anything else, and for the words of another
        rank.
        """
        record = None if content["record"] is None else Record.from_json(content["record"])
        if record is not None and record.rank != rank:
            raise ValueError(f"Expected the words of rank {rank}, got those of rank {record.rank}.")
        return cls(record)


@dataclass(frozen=True)
class _Answer:
    """What a roll call came to."""

    verdict: Verdict | None
    num_answered: int

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": None if self.verdict is None else self.verdict.to_json(),
            "num_answered": self.num_answered,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> _Answer:
        """ValueError, KeyError or TypeError for anything else."""
        verdict = None if content["verdict"] is None else Verdict.from_json(content["verdict"])
        num_answered = content["num_answered"]
        if type(num_answered) is not int:
            raise ValueError(f"Expected a number of ranks, got {type(num_answered).__name__}.")
        return cls(verdict, num_answered)


class RollCall:
    """This rank's part in the roll calls of one start of the job.

    Args:
        store: of the process group; None, or a world of one rank: there are no others.
        launch: where this process stands among them.
        signer: of this start's records.
        warn: is told, once, of a record that is ignored.
    """

    def __init__(
        self,
        store: Store | None,
        launch: Launch,
        signer: Signer | None = None,
        warn: Callable[[str], object] = logger.warning,
    ) -> None:
        self._signer = signer or Signer()
        self._warn = warn
        self._has_warned = False
        self._rank = launch.rank
        self._world_size = launch.world_size
        # torch's name for it. Otherwise the store ends with the process of rank 0.
        self._agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        # A connection of its own: a request of the main thread may block its connection for
        # minutes.
        self._store = None
        if store is not None and launch.world_size > 1:
            own_connection = store.clone()  # type: ignore[attr-defined]
            self._store = BoundedStore(PrefixStore("watchdog", own_connection))
        self._own = Member.of_this_process()
        self._members: dict[int, Member] = {}
        self.knows_all = self._store is None  # who the other ranks are
        self.number = 0  # of the last roll call that this rank has taken part in
        self._num_answered = self._num_done = (
            0  # ranks that answered in it, and that have read its verdict
        )

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks, and a store to reach them by."""
        return self._store is not None and not self._store.is_lost

    def join(self) -> None:
        """Says who this rank is. StoreLostError."""
        if self._store is not None:
            self._put(f"member/{self._rank}", asdict(self._own))

    def learn(self) -> None:
        """Reads once who the others are, as soon as all have joined. StoreLostError."""
        if self.knows_all:
            return
        keys = [f"member/{rank}" for rank in range(self._world_size)]
        if self._ask(lambda store: store.check(keys)):
            values = self._ask(lambda store: store.multi_get(keys))
            for rank, (key, value) in enumerate(zip(keys, values, strict=True)):
                self._note_member(rank, self._opened(key, value, rank, Member.from_json))
            self.knows_all = (
                True  # or some records cannot be trusted; those are looked at again in a roll call
            )

    def leave(self, last_words: Record | None = None) -> None:
        """Says that this rank ends, so that nobody takes it for dead: it has finished, or why not.
        StoreLostError.
        """
        if self._store is not None:
            self._put(
                f"left/{self._rank}",
                {"record": None if last_words is None else last_words.to_json()},
            )

    def close(self) -> None:
        """Ends the connection. What is under way comes to its end first."""
        if self._store is not None:
            self._store.close()

    def is_called(self) -> bool:
        """Whether there is a roll call that this rank has not answered yet. StoreLostError."""
        return self._store is not None and self._add("round", 0) > self.number

    def error_order(self) -> int:
        """A number larger than that of every error before, on whichever rank; 0 without other
        ranks.
        """
        try:
            return self._add("errors", 1) if self.has_peers else 0
        except StoreLostError:
            return 0

    def hold(self, record: Record) -> Verdict | None:
        """Calls the roll, or answers if it has been called: takes a few seconds at most.

        Returns:
            The cause of the run's end, the same on all ranks that are connected; None: no reason to
            end it was found.
        """
        if not self.has_peers:
            return self._judge_alone(record)
        try:
            if not self.is_called():
                last, following = str(self.number), str(self.number + 1)
                self._ask(lambda store: store.compare_set("round", last, following))
            number = self._add("round", 0)
            if number <= self.number:
                raise StoreLostError(
                    f"Expected a roll call after number {self.number}, got number {number}."
                )
            self.number = number
            return self._hold(f"{self.number}/", record)
        except StoreLostError:
            return self._judge_alone(record)

    def call(self) -> None:
        """Calls the roll without taking part in it: the others read this rank's last words. Raises
        nothing.
        """
        if self.has_peers:
            with contextlib.suppress(StoreLostError):
                number = self._add("round", 0)
                self._ask(lambda store: store.compare_set("round", str(number), str(number + 1)))

    def linger(self) -> None:
        """Before a process ends by a verdict: waits until all have read it, if the store is in this
        process.
        """
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
        self._put(f"{prefix}record/{self._rank}", {"record": record.to_json()})
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
                    if passed > _PATIENCE_SECONDS + _AGREE_SECONDS:
                        break  # somebody else overwrites the verdict: this rank has its own
                    continue
            time.sleep(_POLL_SECONDS)

        self._num_answered = answer.num_answered
        self._num_done = self._add(f"{prefix}done", 1)
        return answer.verdict

    def _answer(self, prefix: str) -> _Answer | None:
        """What has been agreed on in this roll call, as soon as there is something."""
        return self._read(f"{prefix}verdict", None, _Answer.from_json)

    def _has_spoken(self, prefix: str, rank: int) -> bool:
        """Whether it is known what a rank has to say, or that it is dead."""
        return self._words(prefix, rank) is not None or self._silence(prefix, rank) is Silence.GONE

    def _report_neighbours(self, prefix: str, only_gone: bool) -> None:
        """Tells the others which ranks of this machine are dead; in the end also what else keeps
        them silent.
        """
        for rank, member in self._neighbours():
            silence = member.silence()
            if silence is Silence.GONE or not only_gone:
                self._put(f"{prefix}silent/{rank}", {"silence": silence.name})

    def _judge(self, prefix: str, own: Record) -> _Answer:
        """Derives the verdict from what has been said, and gives it to all, unless another rank was
        faster.
        """
        records: list[Record] = []
        absent: list[Absent] = []
        for rank in range(self._world_size):
            words = self._words(prefix, rank)
            if words is None and rank == self._rank:
                records.append(own)  # its key holds something else
            elif words is None:
                absent.append(self._unheard(rank, self._silence(prefix, rank) or Silence.SILENT))
            elif words.record is not None:
                records.append(words.record)

        num_answered = sum(not record.has_left for record in records)
        answer = _Answer(find_cause(records, absent), num_answered)
        key = f"{prefix}verdict"
        text = self._signer.sign(key, self._rank, answer.to_json())
        # Nothing, or what no rank has written, is in the way of it.
        present = self._raw(key) or b""
        if self._opened(key, present, None, _Answer.from_json) is None:
            self._ask(lambda store: store.compare_set(key, present, text))  # type: ignore[arg-type]
        return answer

    def _words(self, prefix: str, rank: int) -> _Words | None:
        """A rank's last words, or what it has said in this roll call, or None."""

        def parse(content: dict[str, Any]) -> _Words:
            return _Words.from_json(content, rank)

        left = self._read(f"left/{rank}", rank, parse)
        return left if left is not None else self._read(f"{prefix}record/{rank}", rank, parse)

    def _silence(self, prefix: str, rank: int) -> Silence | None:
        """Why a rank does not answer, as one on its machine has found out."""
        return self._read(
            f"{prefix}silent/{rank}", None, lambda content: Silence[content["silence"]]
        )

    def _unheard(self, rank: int, silence: Silence = Silence.SILENT) -> Absent:
        member = self._members.get(rank)
        return (
            Absent(rank, silence)
            if member is None
            else Absent(rank, silence, member.host, member.pid)
        )

    def _judge_alone(self, record: Record) -> Verdict | None:
        """What this rank can tell without a store: its own state, and the processes on its
        machine.
        """
        if not (record.needs_all or record.error is not None or record.is_stuck):
            return None
        absent = [
            Absent(rank, member.silence(), member.host, member.pid)
            for rank, member in self._neighbours()
            if member.silence() is not Silence.SILENT
        ]
        if not self._agent_has_store and self._rank != 0:
            # The store was in the process of rank 0, so that one went first. Others that are gone
            # may have left since.
            absent = [one for one in absent if one.rank == 0] or [self._unheard(0)]
        return find_cause([record], absent, is_alone=self._world_size > 1)

    def _learn_who_is_there(self) -> None:
        """Reads those that have joined, if not all are known yet."""
        for rank in range(self._world_size):
            if rank not in self._members:
                self._note_member(rank, self._read(f"member/{rank}", rank, Member.from_json))

    def _note_member(self, rank: int, member: Member | None) -> None:
        if member is not None:
            self._members[rank] = member

    def _neighbours(self) -> list[tuple[int, Member]]:
        """The other ranks on this machine."""
        machine = self._own.machine
        return [
            (r, member)
            for r, member in self._members.items()
            if r != self._rank and member.machine == machine
        ]

    def _ask(self, work: Callable[[Store], _T]) -> _T:
        if self._store is None:
            raise StoreLostError("Expected a store, got a world of one rank.")
        return self._store.call(work)

    def _raw(self, key: str) -> bytes | None:
        """What is stored under a key, if anything is."""
        if not self._ask(lambda store: store.check([key])):
            return None
        return self._ask(lambda store: store.get(key))

    def _read(self, key: str, rank: int | None, parse: Callable[[dict[str, Any]], _T]) -> _T | None:
        """The record under a key, made by this rank; None if there is none that can be trusted."""
        raw = self._raw(key)
        return None if raw is None else self._opened(key, raw, rank, parse)

    def _opened(
        self, key: str, raw: bytes, rank: int | None, parse: Callable[[dict[str, Any]], _T]
    ) -> _T | None:
        if not raw:
            return None
        try:
            return parse(self._signer.open(key, raw, rank))
        except (ValueError, KeyError, TypeError) as error:
            # Once: whoever writes one may write many.
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"{key} in the launcher's store is ignored: {printable(str(error))}")
            return None

    def _put(self, key: str, content: dict[str, Any]) -> None:
        text = self._signer.sign(key, self._rank, content)
        self._ask(lambda store: store.set(key, text))

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
        # After the name, which may hold anything: state, parent, ..., and in the 20th place the
        # time of birth.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except OSError:
        pass
    try:  # there is no /proc on some systems
        os.kill(pid, 0)
    except OSError:
        return "", ""
    return "?", ""
