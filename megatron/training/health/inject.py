"""Fault injection: at a moment that a flag names, a rank dies, hangs, is slow, or gets a NaN or a
full disk.

    --inject kill:rank=1,step=17,at=step,delay=0.004 disk-full:step=20

For tests and drills. The flag is an error where a path looks like production
(`looks_like_production`). A fault is written to the event log and logged as a warning first.
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
from typing import TYPE_CHECKING, Any, NoReturn, cast

from megatron.core.dist_checkpointing.format.names import parse_folder
from megatron.core.files import Sync
from megatron.core.options import check_options, expect, option
from megatron.training.health.events import EventKind, EventLog
from megatron.training.health.progress import Phase

if TYPE_CHECKING:
    # Flags are generated from `InjectConfig`, and `--help` must not import torch.
    import torch
    from torch import nn

    from megatron.core.dist_checkpointing.save.data_file import DataSink
    from megatron.core.dist_checkpointing.store import Store
    from megatron.training.model_loss import ModelLoss
    from megatron.training.step import Batch, ForwardStep

logger = logging.getLogger(__name__)

# Faults strike at the start of the watchdog's phases.
PHASES = tuple(phase for phase in Phase if phase is not Phase.START)
ANY = "any"
# The keys of each kind besides rank, step and restart.
KINDS = {
    "kill": ("at", "delay"),
    "hang": ("at",),
    "nan": (),
    "slow": ("at", "seconds", "times"),
    "disk-full": (),
    "kill-in-save": (),
}
# The method of a checkpoint's data file in which a fault strikes.
_IN_SAVES = {"disk-full": "write", "kill-in-save": "close"}
_COMMON = ("rank", "step", "restart")
_PRODUCTION = {"prod", "production", "release", "live"}
_FLAG = "--inject"


@dataclass(frozen=True)
class Injection:
    """One fault, parsed from its specification `KIND:key=value,...`.

    Attributes:
        kind: `kill` sends SIGKILL to this process; `hang` sleeps for ever; `nan` makes the loss
            NaN; `slow` sleeps `seconds` in each iteration from `step` on; `disk-full` fails the
            writes of the checkpoint of `step`; `kill-in-save` sends SIGKILL before this rank closes
            its data file of that checkpoint.
        rank: None: all ranks.
        step: the iteration in which it strikes; of a save, the iteration that is saved; at the
            start, the iteration that the run resumes from. None: any, only for phases of the start.
        at: the phase at whose start it strikes.
        restart: the number of restarts of the job at which it strikes; None: any.
        delay: seconds from the start of the phase.
        seconds: for `slow`.
        times: the number of iterations for `slow`; None: all.
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
        """Parses a specification. ConfigError for unknown, missing or invalid parts."""
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
        """Returns whether the fault strikes now; for `slow`, now or earlier."""
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
            _expect(is_known, "step=0 at build, before the iteration is known", self.spec)

        is_timed = self.kind != "slow" or self.seconds > 0
        _expect(is_timed, "seconds=, more than 0, for slow", self.spec)
        _expect(self.times is None or self.times >= 1, "times= of at least 1", self.spec)


@dataclass(frozen=True)
class InjectConfig:
    """The faults to inject."""

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
        """Returns whether a fault strikes in the files of a save."""
        return any(injection.kind in _IN_SAVES for injection in self.injections)


@dataclass
class _Armed:
    """An injection of this process, and the number of its strikes."""

    injection: Injection
    num_taken: int = 0
    last_iteration: int | None = None

    def take(self, phase: Phase, iteration: int) -> bool:
        """Returns whether to strike now: once, or for `slow` once in each of its iterations."""
        limit = self.injection.times if self.injection.kind == "slow" else 1
        is_spent = limit is not None and self.num_taken >= limit
        if is_spent or iteration == self.last_iteration:
            return False
        if not self.injection.is_due(phase, iteration):
            return False

        self.num_taken += 1
        self.last_iteration = iteration
        return True


class Injections:
    """The faults of this rank, in this restart of the job."""

    def __init__(self, config: InjectConfig, *, rank: int, restart: int, events: EventLog) -> None:
        self._events = events
        self._now = (Phase.START, 0)  # the main thread's phase and iteration
        self._armed = [
            _Armed(injection)
            for injection in config.injections
            if injection.rank in (None, rank) and injection.restart in (None, restart)
        ]
        for armed in self._armed:
            logger.warning("a fault will be injected: %s", armed.injection.spec)

    def at(self, phase: Phase, iteration: int) -> None:
        """Called at the start of a phase: due faults strike, or start their delay."""
        self._now = (phase, iteration)
        for armed in self._armed:
            if armed.injection.kind in ("kill", "hang", "slow") and armed.take(phase, iteration):
                self._strike(armed.injection, is_first=armed.num_taken == 1)

    def forward_step(self, forward_step: ForwardStep, iteration: int) -> ForwardStep:
        """Returns an iteration's forward step: the given one, or one whose loss is NaN."""
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
            loss = forward_step(model, batch)
            if isinstance(loss, tuple):
                return loss._replace(loss=loss.loss * math.nan)
            return loss * math.nan

        return poisoned

    def store(self, store: Store) -> Store:
        """Returns the store for checkpoints: the given one, or one with faults in some saves."""
        for armed in self._armed:
            if armed.injection.kind in _IN_SAVES:
                store = cast("Store", _FaultyStore(store, armed.injection, self._tell))
        return store

    def _strike(self, injection: Injection, is_first: bool) -> None:
        if injection.kind == "slow":
            if is_first:
                self._tell(injection, *self._now)
            time.sleep(injection.seconds)

        elif injection.delay:
            # From a thread, while the main thread continues.
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

    def _tell(self, injection: Injection, phase: Phase, iteration: int) -> None:
        self._events.write(EventKind.INJECT, spec=injection.spec, iteration=iteration, phase=phase)
        logger.warning("injected %s, in %s of iteration %d", injection.spec, phase, iteration)


def hang_for_ever() -> NoReturn:
    """Sleeps for ever. Reports of an injected hang show this name."""
    while True:
        time.sleep(3600.0)


def check_paths(config: InjectConfig, paths: Sequence[str]) -> None:
    """ConfigError if faults are to be injected and one of the paths looks like production."""
    words = ", ".join(sorted(_PRODUCTION))
    expected = f"local paths without {words} as a word of a directory's name"
    for path in paths if config.inject else ():
        expect(not looks_like_production(path), _FLAG, expected, path)


def looks_like_production(path: str) -> bool:
    """Returns whether no fault may be injected into a run that reads or writes a path.

    True for a remote store ("s3://bucket/try"), and where a word of the path is prod, production,
    release or live, in any case. Words are runs of letters: "/data/prod-2" and "/data/GPT_Live1"
    look like production, "/data/products" and "/data/alive" do not.
    """
    words = {word.lower() for word in re.split(r"[^A-Za-z]+", path)}
    return "://" in path or not words.isdisjoint(_PRODUCTION)


class _FaultyStore:
    """A store with a fault in the files of one iteration's checkpoint."""

    def __init__(
        self, store: Store, injection: Injection, tell: Callable[[Injection, Phase, int], None]
    ) -> None:
        self._store = store
        self._injection = injection
        self._tell = tell
        self._lock = threading.Lock()
        self._is_told = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, path: str, content: bytes, sync: Sync = Sync.ALL) -> None:
        # An empty file needs no space, on a real disk either.
        if content and self._injection.kind == "disk-full" and self._is_of_draft(path):
            self._strike(path)
        self._store.write(path, content, sync)

    def open_data(self, path: str) -> DataSink:
        sink = self._store.open_data(path)
        if self._is_of_draft(path):
            setattr(sink, _IN_SAVES[self._injection.kind], lambda *_: self._strike(path))
        return sink

    def _is_of_draft(self, path: str) -> bool:
        # Drafts have the checkpoint's name and a token after a dot (`Store.draft_name`).
        found = parse_folder(path.partition("/")[0])
        return found is not None and found.iteration == self._injection.step

    def _strike(self, path: str) -> None:
        assert self._injection.step is not None, "checked by Injection.parse"
        with self._lock:
            is_first, self._is_told = not self._is_told, True
        if is_first:
            self._tell(self._injection, Phase.SAVE, self._injection.step)

        if self._injection.kind == "kill-in-save":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            text = os.strerror(errno.ENOSPC)
            raise OSError(errno.ENOSPC, text, f"{self._store.root}/{path}")


def _convert(key: str, text: str, spec: str) -> Any:
    """Converts a key's value."""
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
