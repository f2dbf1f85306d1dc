"""Fault injection: at a moment that a flag names, a rank dies, hangs, is slow, or gets a NaN or a
full disk.

    --inject kill:rank=1,step=17,at=step,delay=0.004 disk-full:step=20

For tests and drills. Nothing happens without the flag, and the flag is refused where a path looks
like production (`looks_like_production`). Before a fault strikes, it is written to the event log
and logged as a warning.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import nn

from megatron.core.dist_checkpointing.format.names import parse_folder
from megatron.core.dist_checkpointing.save.data_sink import DataSink
from megatron.core.dist_checkpointing.store import Store
from megatron.core.files import Sync
from megatron.core.options import check_options, expect, option
from megatron.training.health.events import EventKind, EventLog
from megatron.training.health.phases import Phase
from megatron.training.model_loss import ModelLoss
from megatron.training.step import Batch, ForwardStep

logger = logging.getLogger(__name__)

# Where faults can strike: wherever the watchdog is told of a phase.
PHASES = tuple(phase for phase in Phase if phase is not Phase.START)
ANY = "any"
# The keys that each kind admits besides rank, step and restart.
KINDS = {
    "kill": ("at", "delay"),
    "hang": ("at",),
    "nan": (),
    "slow": ("at", "seconds", "times"),
    "disk-full": (),
    "kill-in-save": (),
}
_IN_SAVES = ("disk-full", "kill-in-save")
_COMMON = ("rank", "step", "restart")
_PRODUCTION = {"prod", "production", "release", "live"}
_FLAG = "--inject"


@dataclass(frozen=True)
class Injection:
    """One fault, as its specification `KIND:key=value,...` names it.

    Attributes:
        kind: `kill` sends SIGKILL to this process; `hang` sleeps for ever; `nan` makes the loss
            NaN; `slow` sleeps `seconds` in each iteration from `step` on; `disk-full` fails the
            writes of the checkpoint of `step`; `kill-in-save` sends SIGKILL when this rank's data
            of that checkpoint is written, and its file is about to be closed.
        rank: None: all.
        step: the iteration, as phases count it: the one being made in a step, those made in a save,
            the one resumed from at the start. None: any; in phases of the start alone.
        at: the phase at whose beginning it strikes.
        restart: how often the job has been restarted when it strikes; None: however often.
        delay: seconds from the beginning of the phase, to strike in the middle of it.
        seconds: for `slow`.
        times: for `slow`: in so many iterations; None: to the end.
    """

    spec: str
    kind: str
    rank: int | None = 0
    step: int | None = None
    at: Phase = Phase.FORWARD
    restart: int | None = 0
    delay: float = 0.0
    seconds: float = 0.0
    times: int | None = None

    @classmethod
    def parse(cls, spec: str) -> Injection:
        """ConfigError, with what was expected, for what is unknown, missing or out of bounds."""
        kind, _, rest = spec.partition(":")
        _expect(kind in KINDS, f"KIND:key=value,... with a kind among {', '.join(KINDS)}", spec)

        known = (*_COMMON, *KINDS[kind])
        values: dict[str, Any] = {}
        for item in rest.split(",") if rest else ():
            key, _, text = item.partition("=")
            _expect(key in known, f"keys among {', '.join(known)} for {kind}", spec)
            _expect(key not in values, f"{key} once", spec)
            values[key] = _convert(key, text, spec)

        injection = cls(spec, kind, **values)
        injection._check()
        return injection

    def is_due(self, phase: Phase, iteration: int) -> bool:
        """Whether this is its moment; of a `slow` one, whether the moment has come or gone."""
        if self.step is None or self.kind == "slow":
            is_step = iteration >= (self.step or 0)
        else:
            is_step = iteration == self.step
        return phase is self.at and is_step

    def _check(self) -> None:
        at_start = self.at.is_of_start
        _expect(self.step is not None or at_start, "step=, the iteration to strike in", self.spec)
        if self.step is not None:
            least = 0 if at_start or self.at is Phase.EVALUATE else 1
            _expect(self.step >= least, f"step= of at least {least} at {self.at}", self.spec)
            is_known = self.step == 0 or self.at is not Phase.BUILD
            _expect(is_known, "step=0 at build, where no iteration is known yet", self.spec)

        is_timed = self.kind != "slow" or self.seconds > 0
        _expect(is_timed, "seconds=, more than 0, for slow", self.spec)
        _expect(self.times is None or self.times >= 1, "times= of at least 1", self.spec)


@dataclass(frozen=True)
class InjectConfig:
    """Which faults to inject."""

    inject: tuple[str, ...] = option(
        (),
        "faults to inject, as KIND:KEY=VALUE,...: kill, hang, nan, slow, disk-full or "
        "kill-in-save, e.g. kill:rank=1,step=17",
        metavar="FAULT",
        may_change=True,
    )

    def __post_init__(self) -> None:
        check_options(self)
        _ = self.injections

    @property
    def injections(self) -> tuple[Injection, ...]:
        return tuple(Injection.parse(spec) for spec in self.inject)

    @property
    def is_in_saves(self) -> bool:
        """Whether a fault strikes in the files of a save."""
        return any(injection.kind in _IN_SAVES for injection in self.injections)


@dataclass
class _Armed:
    """An injection of this process, and what has become of it."""

    injection: Injection
    num_taken: int = 0
    last_iteration: int | None = None

    def take(self, phase: Phase, iteration: int) -> bool:
        """Whether to strike now: once, or for `slow` once in each of so many iterations."""
        limit = self.injection.times if self.injection.kind == "slow" else 1
        is_spent = limit is not None and self.num_taken >= limit
        if (
            is_spent
            or iteration == self.last_iteration
            or not self.injection.is_due(phase, iteration)
        ):
            return False

        self.num_taken += 1
        self.last_iteration = iteration
        return True


class Injections:
    """The faults of this rank, in this restart of the job."""

    def __init__(self, config: InjectConfig, *, rank: int, restart: int, events: EventLog) -> None:
        self._events = events
        self._now = (Phase.START, 0)  # the phase that the main thread is in, and the iteration
        self._armed = [
            _Armed(injection)
            for injection in config.injections
            if injection.rank in (None, rank) and injection.restart in (None, restart)
        ]
        for armed in self._armed:
            logger.warning("a fault is to be injected: %s", armed.injection.spec)

    def at(self, phase: Phase, iteration: int) -> None:
        """The beginning of a phase: what is due now strikes, or begins to count its delay."""
        self._now = (phase, iteration)
        for armed in self._armed:
            if armed.injection.kind in ("kill", "hang", "slow") and armed.take(phase, iteration):
                self._strike(armed.injection, is_first=armed.num_taken == 1)

    def forward_step(self, forward_step: ForwardStep, iteration: int) -> ForwardStep:
        """The function for an iteration's microbatches: the given one, or one whose loss is NaN."""
        due = [
            armed.injection
            for armed in self._armed
            if armed.injection.kind == "nan" and armed.take(Phase.FORWARD, iteration)
        ]
        if not due:
            return forward_step

        def poisoned(model: nn.Module, batch: Batch) -> torch.Tensor | ModelLoss:
            while due:
                self._tell(due.pop(), Phase.FORWARD, iteration)
            said = forward_step(model, batch)
            if isinstance(said, ModelLoss):
                return said._replace(loss=said.loss * math.nan)
            return said * math.nan

        return poisoned

    def store(self, store: Store) -> Store:
        """Where checkpoints are written: the given store, or one with faults in some saves."""
        for armed in self._armed:
            if armed.injection.kind == "disk-full":
                store = cast(Store, _FullStore(store, armed.injection, self._tell))
            elif armed.injection.kind == "kill-in-save":
                store = cast(Store, _DeadlyStore(store, armed.injection, self._kill_in_save))
        return store

    def _strike(self, injection: Injection, is_first: bool) -> None:
        if injection.kind == "slow":
            if is_first:
                self._tell(injection, *self._now)
            time.sleep(injection.seconds)
        elif injection.delay:
            # From a thread, wherever the main thread has got to by then.
            timer = threading.Timer(injection.delay, self._kill, [injection])
            timer.daemon = True
            timer.start()
        elif injection.kind == "kill":
            self._kill(injection)
        else:
            self._tell(injection, *self._now)
            hang_for_ever()

    def _kill(self, injection: Injection) -> None:
        self._tell(injection, *self._now)
        os.kill(os.getpid(), signal.SIGKILL)

    def _kill_in_save(self, injection: Injection) -> None:
        assert injection.step is not None, "Injection.parse has seen to that"
        self._tell(injection, Phase.SAVE, injection.step)
        os.kill(os.getpid(), signal.SIGKILL)

    def _tell(self, injection: Injection, phase: Phase, iteration: int) -> None:
        self._events.write(EventKind.INJECT, spec=injection.spec, iteration=iteration, phase=phase)
        logger.warning("injected %s, in %s of iteration %d", injection.spec, phase, iteration)


def hang_for_ever() -> NoReturn:
    """Where a rank hangs by injection. Reports of the hang show this name."""
    while True:
        time.sleep(3600.0)


def check_paths(config: InjectConfig, paths: Sequence[str]) -> None:
    """ConfigError if faults are to be injected and one of the paths looks like production."""
    words = ", ".join(sorted(_PRODUCTION))
    expected = f"local paths without {words} among the words of their folders"
    for path in paths if config.inject else ():
        expect(not looks_like_production(path), _FLAG, expected, path)


def looks_like_production(path: str) -> bool:
    """Whether no fault may be injected into a run that reads or writes there.

    That holds for every remote store ("s3://bucket/try"), and where a word of the path is prod,
    production, release or live, in any case. Words are runs of letters: "/data/prod-2" and
    "/data/GPT_Live1" look like production, "/data/products" and "/data/alive" do not.
    """
    words = {word.lower() for word in re.split(r"[^A-Za-z]+", path)}
    return "://" in path or not words.isdisjoint(_PRODUCTION)


class _FaultyStore:
    """A store that is another one but for the checkpoint of one iteration."""

    def __init__(self, store: Store, injection: Injection) -> None:
        assert injection.step is not None, "Injection.parse has seen to that"
        self._store = store
        self._injection = injection
        self._iteration = injection.step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _is_of_draft(self, path: str) -> bool:
        """Drafts have the checkpoint's name, or a token behind a dot (`Store.draft_name`)."""
        found = parse_folder(path.partition("/")[0])
        return found is not None and found.iteration == self._iteration


class _FullStore(_FaultyStore):
    """A store whose disk is full while the checkpoint of one iteration is written."""

    def __init__(
        self, store: Store, injection: Injection, tell: Callable[[Injection, Phase, int], None]
    ) -> None:
        super().__init__(store, injection)
        self._tell = tell
        self._lock = threading.Lock()
        self._is_told = False

    def write(self, path: str, content: bytes, sync: Sync = Sync.ALL) -> None:
        # An empty file takes no room, on a real disk either.
        if content and self._is_of_draft(path):
            raise self._error(path)
        self._store.write(path, content, sync)

    def open_data(self, path: str) -> DataSink:
        sink = self._store.open_data(path)
        if not self._is_of_draft(path):
            return sink
        return cast(DataSink, _FullSink(sink, lambda: self._error(path)))

    def _error(self, path: str) -> OSError:
        with self._lock:
            is_first, self._is_told = not self._is_told, True
        if is_first:
            self._tell(self._injection, Phase.SAVE, self._iteration)
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{self._store.root}/{path}")


class _FullSink:
    """A data file of which not a byte can be written."""

    def __init__(self, sink: DataSink, error: Callable[[], OSError]) -> None:
        self._sink = sink
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def write(self, _spans: Sequence[memoryview]) -> None:
        raise self._error()


class _DeadlyStore(_FaultyStore):
    """A store that kills this process in the middle of a save, at the same operation each time."""

    def __init__(self, store: Store, injection: Injection, kill: Callable[[Injection], None]):
        super().__init__(store, injection)
        self._kill = kill

    def open_data(self, path: str) -> DataSink:
        sink = self._store.open_data(path)
        if not self._is_of_draft(path):
            return sink
        return cast(DataSink, _DeadlySink(sink, lambda: self._kill(self._injection)))


class _DeadlySink:
    """A data file that takes all its bytes, and never gets closed."""

    def __init__(self, sink: DataSink, kill: Callable[[], None]) -> None:
        self._sink = sink
        self._kill = kill

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def close(self, _nbytes: int) -> None:
        self._kill()


def _convert(key: str, text: str, spec: str) -> Any:
    """A key's value as `Injection` has it."""
    if key == "at":
        _expect(text in PHASES, f"at= one of {', '.join(PHASES)}", spec)
        return Phase(text)
    if key in ("rank", "restart") and text == ANY:
        return None
    if key in ("delay", "seconds"):
        number = _number(text)
        is_duration = math.isfinite(number) and number >= 0
        _expect(is_duration, f"{key}= a number of seconds, 0 or more", spec)
        return number
    or_any = f", or {ANY}" if key in ("rank", "restart") else ""
    _expect(text.isascii() and text.isdigit(), f"{key}= a whole number, 0 or more{or_any}", spec)
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _expect(condition: bool, expected: str, spec: str) -> None:
    expect(condition, _FLAG, expected, spec)
