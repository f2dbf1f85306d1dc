"""Finds the one cause of a run's end from the reports of its ranks, by pure functions.

When a rank dies, the others see consequences: closed connections and collectives that time out.
The ranks therefore hold a roll call (`roll_call.py`), for which each writes a `Record`. The cause
is the first of these that applies:

1. ranks that failed with an error that no other rank caused, in order of time;
2. ranks that are dead or silent;
3. ranks that a signal ended;
4. ranks that make no progress and wait for no other rank;
5. if all ranks wait for each other, the ranks that are furthest behind, or all of them;
6. a connection that failed between ranks that all responded.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, NoneType
from typing import Any

import torch.distributed as dist

from megatron.core.log import printable
from megatron.training.health.exits import ExitCode, ExitError
from megatron.training.health.progress import Phase

# Messages of torch 2.13 for failures of collectives over gloo and NCCL that another rank may have
# caused. Failures that are not plain RuntimeErrors have separate classes.
_PEER_FAILURE = re.compile(
    r"gloo/transport|Gloo connectFullMesh|monitoredBarrier|Timed out waiting \d+ ?ms|"
    r"Connection (closed|reset|refused)|Socket (Timeout|Error)|"
    r"NCCL|ncclComm|Watchdog caught collective"
)
_TIMEOUT = re.compile(r"[Tt]imed? ?out")
_LISTED = 8  # ranks by name; more are counted


@dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        # Without the directory in which the package is installed.
        for package in ("/megatron/", "/torch/"):
            head, found, tail = self.file.rpartition(package)
            if found and head:
                return f"{package[1:]}{tail}:{self.line} in {self.function}"
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.function}"


Stack = tuple[Frame, ...]  # the innermost frame last


@dataclass(frozen=True)
class Record:
    """A rank's report on itself for a roll call."""

    rank: int
    host: str = "?"
    pid: int = 0
    phase: Phase = Phase.START
    iteration: int = 0
    num_marks: int = 0  # phases since the start of the iteration, the same on all ranks
    idle_seconds: float = 0.0  # since the last mark
    is_stuck: bool = False  # idle for longer than allowed
    waits: bool = False  # the main thread waits for other ranks
    is_excused: bool = False  # it waits for its save, within the limit of saves
    place: str = ""  # where the main thread is
    stack: str = ""  # of the main thread, if it is stuck
    error: str | None = None  # an error that no other rank caused
    error_code: ExitCode = ExitCode.FAILED
    error_order: int = 0  # among all ranks' errors, as the store counted them
    failed_collective: str | None = None  # an error that another rank may have caused
    needs_all: bool = False  # it cannot continue without all others, including silent ones
    signal: str | None = None  # the signal that ended it
    has_left: bool = False  # written as the process exited

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Record:
        """Inverts `to_json`, with printable texts. ValueError for other types."""
        return cls(**typed_fields(cls, values))

    @property
    def name(self) -> str:
        """`rank 1 (host, pid 17)`"""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def when(self) -> str:
        """`in iteration 17, forward`"""
        return f"in iteration {self.iteration}, {self.phase}"


class Silence(enum.Enum):
    """Why a rank is silent, the most certain reason first; in singular and plural."""

    GONE = ("was killed or has crashed", "were killed or have crashed")
    STOPPED = (
        "does not respond, since its process is stopped (SIGSTOP, or a debugger)",
        "do not respond, since their processes are stopped (SIGSTOP, or a debugger)",
    )
    SILENT = (
        "does not respond: it hangs, or its machine or the network is down",
        "do not respond: they hang, or their machine or the network is down",
    )


@dataclass(frozen=True)
class Absent:
    """A silent rank, with the host and pid from its start."""

    rank: int
    silence: Silence
    host: str = "?"
    pid: int = 0

    @property
    def name(self) -> str:
        where = f" ({self.host}, pid {self.pid})" if self.pid else ""
        return f"rank {self.rank}{where}"


@dataclass(frozen=True)
class Verdict:
    """The cause, the same on all ranks of a roll call."""

    code: ExitCode  # of ranks that are not the cause
    ranks: tuple[int, ...]
    text: str
    speaker: int  # the lowest rank that responded, which logs the cause
    run_code: ExitCode  # of the run as a whole
    stack: str = ""  # of the first of `ranks`, if it hangs

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Verdict:
        """Inverts `to_json`, with printable texts. ValueError for other types."""
        fields = typed_fields(cls, values)
        return cls(**{**fields, "ranks": tuple(fields["ranks"])})


@dataclass(frozen=True)
class Cause:
    """Why a run ends, from the view of this rank."""

    code: ExitCode  # of this rank
    ranks: tuple[int, ...]  # the ranks to blame
    text: str
    is_own: bool  # an error of this rank, whose traceback is printed


# The types of a field before and after JSON, by its annotation.
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "str | None": (str, NoneType),
    "Phase": (str, Phase),
    "ExitCode": (int, ExitCode),
    "tuple[int, ...]": (list,),
}
_ENUMS: dict[str, type[enum.Enum]] = {"Phase": Phase, "ExitCode": ExitCode}
_MOST_CHARACTERS = 2000  # of a text
_MOST_LINES = 100  # of a stack, which has 500 characters a line


def typed_fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a dataclass from another rank. ValueError for other names or types."""
    annotations = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    if not isinstance(values, Mapping) or values.keys() != annotations.keys():
        got = printable(repr(values), 80)
        raise ValueError(f"Expected the fields of a {kind.__name__}, got {got}.")
    return {name: _typed(name, annotations[name], value) for name, value in values.items()}


def _typed(name: str, annotation: str, value: Any) -> Any:
    is_known = type(value) in _JSON_TYPES[annotation]
    if annotation in _ENUMS:
        is_known = is_known and value in list(_ENUMS[annotation])
    elif annotation in ("int", "float", "tuple[int, ...]"):
        numbers = value if isinstance(value, list) else [value]
        is_known = is_known and all(map(_is_plausible, numbers))
    if not is_known:
        raise ValueError(f"Expected {name} as {annotation}, got {printable(repr(value), 80)}.")

    if annotation in _ENUMS:
        return _ENUMS[annotation](value)
    return _harmless(name, value) if isinstance(value, str) else value


def _is_plausible(number: object) -> bool:
    """Returns whether a value is a finite number of bounded size."""
    return isinstance(number, (int, float)) and not isinstance(number, bool) and abs(number) < 2**63


def _harmless(name: str, text: str) -> str:
    """Returns a text for the log: one line, or the indented lines of a stack."""
    if name != "stack" or not text:
        return printable(text, _MOST_CHARACTERS)

    lines = text[: 500 * _MOST_LINES].split("\n")[:_MOST_LINES]
    return "\n".join("  " + printable(line.strip(" ")) for line in lines)


def find_cause(
    records: Sequence[Record], absent: Sequence[Absent] = (), *, is_alone: bool = False
) -> Verdict | None:
    """Returns the cause of the run's end in any order of the arguments; None if the run continues.

    Args:
        records: the reports of ranks that responded or that exited with a failure. Without any,
            all responsive ranks have finished.
        absent: the silent ranks. Unless they are known to be dead, they count only if a rank cannot
            continue without all others.
        is_alone: whether this rank decides alone, because the store is lost.
    """
    if not records:
        return None

    records = sorted(records, key=lambda record: record.rank)
    answered = [record for record in records if not record.has_left]
    needs_all = any(record.needs_all for record in answered)
    absent = [one for one in absent if needs_all or one.silence is Silence.GONE]
    is_hang = any(record.is_stuck or _has_timed_out(record) for record in records)
    lost = [record for record in records if record.failed_collective is not None]
    ended = [record for record in records if record.signal is not None]
    speaker = answered[0].rank if answered else records[0].rank

    if any(record.error is not None for record in records):
        return _own_errors(records, speaker)
    if absent:
        return _silence(absent, answered, speaker, is_hang)
    if ended and (lost or is_hang):
        verb = "was" if len(ended) == 1 else "were"
        text = f"{_names(ended)} {verb} ended by {ended[0].signal}"
        return _verdict(ExitCode.LOST_RANK, ended, text, speaker)
    if is_hang:
        hangs = any(record.is_stuck and not record.waits for record in answered)
        # The others wait for one that waits for its disk.
        is_slow_save = not hangs and not lost and any(record.is_excused for record in answered)
        return None if is_slow_save else _hang(answered, speaker)
    if lost:
        besides = "the ranks' store has been lost too" if is_alone else "though all ranks respond"
        text = f"the connection of {lost[0].name} to another rank failed {lost[0].when}, {besides}"
        text += f": {lost[0].failed_collective}"
        return _verdict(ExitCode.LOST_RANK, lost, text, speaker)
    return None


def is_peer_failure(error: BaseException) -> bool:
    """Returns whether an error, or one that led to it, is a failed collective."""
    chain: BaseException | None = error
    seen: set[int] = set()
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        if isinstance(chain, dist.DistError) or (
            type(chain) is RuntimeError and _PEER_FAILURE.search(str(chain))
        ):
            return True
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    return False


def in_one_line(error: BaseException | None) -> str:
    """Returns the type and message of an error in one printable line; empty for None."""
    if error is None:
        return ""
    text = " ".join(str(error).split())
    name = "" if isinstance(error, ExitError) else type(error).__name__
    return printable(": ".join(part for part in (name, text) if part), 1000)


def stack_of(frame: FrameType | None) -> Stack:
    """Returns the stack of a frame."""
    frames = [
        Frame(each.f_code.co_filename, line, each.f_code.co_name)
        for each, line in traceback.walk_stack(frame)
    ]
    return tuple(reversed(frames))


def place_of(stack: Stack) -> str:
    """Returns the innermost frame of this project, and the innermost of all."""
    if not stack:
        return "an unknown place"

    own = [f for f in stack if "/megatron/" in f.file and "/site-packages/" not in f.file]
    return ", ".join(dict.fromkeys(map(str, (*own[-1:], stack[-1]))))


def _verdict(
    code: ExitCode, culprits: Sequence[Record | Absent], text: str, speaker: int, stack: str = ""
) -> Verdict:
    ranks = tuple(culprit.rank for culprit in culprits)
    return Verdict(code, ranks, text, speaker, run_code=code, stack=stack)


def _own_errors(records: Sequence[Record], speaker: int) -> Verdict:
    """Returns the cause if ranks have failed: the first failure."""
    failed = [record for record in records if record.error is not None]
    failed.sort(key=lambda record: (record.error_order, record.rank))
    first = failed[0]
    text = f"{first.name} failed {first.when}: {first.error}"
    if failed[1:]:
        text += f" (so did {_numbers(failed[1:])})"
    verdict = _verdict(ExitCode.LOST_RANK, failed, text, speaker)
    return dataclasses.replace(verdict, run_code=first.error_code)


def _silence(
    absent: Sequence[Absent], answered: Sequence[Record], speaker: int, is_hang: bool
) -> Verdict:
    """Returns the cause if ranks are silent: all of them, the most certain loss first."""
    certainty = list(Silence).index
    absent = sorted(absent, key=lambda one: (certainty(one.silence), one.rank))
    parts = []
    for silence, group in itertools.groupby(absent, key=lambda one: one.silence):
        silent = list(group)
        parts.append(f"{_names(silent)} {silence.value[len(silent) > 1]}")
    text = "; ".join(parts)

    if answered:
        furthest = max(answered, key=_progress)
        text += f" (rank {furthest.rank} is {furthest.when})"
    is_gone = absent[0].silence is Silence.GONE
    code = ExitCode.HANG if is_hang and not is_gone else ExitCode.LOST_RANK
    return _verdict(code, absent, text, speaker)


def _hang(answered: Sequence[Record], speaker: int) -> Verdict:
    """Returns the cause if a rank is stuck, and all others have responded."""
    longest = max(record.idle_seconds for record in answered)
    # A rank that makes progress does not hang, even outside of a wait.
    suspects = [
        record
        for record in answered
        if not record.waits
        and record.failed_collective is None
        and 2 * record.idle_seconds >= longest
    ]
    suspects = [record for record in suspects if not record.is_excused] or suspects

    all_wait = not suspects
    if all_wait:
        least = min(_progress(record) for record in answered)
        suspects = [record for record in answered if _progress(record) == least]

    first = suspects[0]
    where = f"{first.when}, at {first.place}"
    if all_wait and len(suspects) == len(answered) > 1:
        text = f"all {len(answered)} ranks wait for one another, {where}"
    else:
        text = f"{first.name} has made no progress for {first.idle_seconds:.0f} s, {where}"
        text += f" (nor has {_numbers(suspects[1:])})" if suspects[1:] else ""
    return _verdict(ExitCode.HANG, suspects, text, speaker, first.stack)


def _has_timed_out(record: Record) -> bool:
    return _TIMEOUT.search(record.failed_collective or "") is not None


def _progress(record: Record) -> tuple[int, int]:
    return record.iteration, record.num_marks


def _names(culprits: Sequence[Record | Absent]) -> str:
    return _list(culprit.name for culprit in culprits)


def _numbers(culprits: Sequence[Record | Absent]) -> str:
    return f"rank{'s' if culprits[1:] else ''} {_list(str(culprit.rank) for culprit in culprits)}"


def _list(items: Iterable[str]) -> str:
    """Returns the first items and the number of the others."""
    texts = list(items)
    more = f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return ", ".join(texts[:_LISTED]) + more
