"""`EarlyUpdates`: the host updates buckets before the norm of the gradients is known.

    backward   once the gradients of a bucket are in host memory, it is updated with the expected
               factor of the gradients. The kernel copies old values to an undo log.
    step       With the expected factor, the update is final, and its weights go up. Otherwise the
               old values are restored, and the bucket is updated again.

Readers and writers of main weights and states call `Bucket.settle` first, which restores the old
values before the step. So an early update changes no bit of a run. It moves work of the host into
the backward, during which the host's threads are idle.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Sequence

from megatron.core.lane_timings import HOST, StepRecorder
from megatron.core.lanes import Event, Lane
from megatron.core.optimizer.kernels.piece import HostKernel, Piece

_LONGEST_PAUSE = 64  # steps


class EarlyPhase(enum.Enum):
    """How far an early update has come.

    phase     main weights and states         next
    QUEUED    are the old ones                STARTED by `start`, DROPPED by `drop` or `expire`
    STARTED   may be the new ones             EXPIRED by `expire`
    EXPIRED   may be new ones of gradients    none
              that have been replaced
    DROPPED   are the old ones                none
    """

    QUEUED = "queued"
    STARTED = "started"
    EXPIRED = "expired"
    DROPPED = "dropped"


class EarlyUpdate:
    """An early update of one bucket. Any thread may call its methods.

    Attributes:
        done: the event after which main weights and states are written to no more.
    """

    done: Event

    def __init__(self, pieces: Sequence[Piece], grad_scale: float) -> None:
        """`pieces`: of the expected step, with an undo log."""
        self.pieces = pieces
        self.grad_scale = grad_scale
        self._phase = EarlyPhase.QUEUED
        self._lock = threading.Lock()

    @property
    def is_queued(self) -> bool:
        """Whether the update has neither started nor been dropped."""
        return self._phase is EarlyPhase.QUEUED

    def start(self) -> bool:
        """Returns whether the update is still wanted; the caller starts it then."""
        return self._to(EarlyPhase.STARTED) is EarlyPhase.STARTED

    def drop(self) -> bool:
        """Drops the update if it has not started; returns whether it is dropped."""
        return self._to(EarlyPhase.DROPPED) is EarlyPhase.DROPPED

    def expire(self) -> bool:
        """As `drop`, and otherwise makes sure that the update does not become final. Its gradients
        may be written over while it reads them.
        """
        if self.drop():
            return True
        self._phase = EarlyPhase.EXPIRED
        return False

    def is_final(self, pieces: Sequence[Piece], grad_scale: float) -> bool:
        """Whether a step with these pieces and this factor has been done by the update."""
        return (
            self._phase is EarlyPhase.STARTED
            and grad_scale == self.grad_scale
            and [*map(_work, pieces)] == [*map(_work, self.pieces)]
        )

    def restore(self) -> None:
        """Waits for the update, and restores the old values."""
        self.done.synchronize()
        for piece in self.pieces:
            piece.restore_old()

    def _to(self, phase: EarlyPhase) -> EarlyPhase:
        """Leaves QUEUED for a phase; returns the present one."""
        with self._lock:
            if self._phase is EarlyPhase.QUEUED:
                self._phase = phase
            return self._phase


def _work(piece: Piece) -> tuple[object, int, int]:
    """The scalars and the place of a piece in a bucket."""
    return piece.step, piece.weight.data_ptr(), piece.numel


class EarlyUpdates:
    """Queues the early updates of one optimizer.

    After a step whose factor was another one than expected, there are none for 1 step, then for 2,
    4 and so on up to 64, until a factor is the expected one again: clipping in every step costs
    little. The factor is the same on all ranks, and so are the pauses.

    At most two updates have started and not ended. The others can still be dropped, so that a step
    serves the forward's first layers first.

    Attributes:
        grad_scale: the expected factor of the gradients of the next step.
    """

    def __init__(self, start: Lane, host: Lane, kernel: HostKernel) -> None:
        """`start`, `host`: see `Lanes`."""
        self.grad_scale = 1.0
        self._start = start
        self._host = host
        self._kernel = kernel
        self._pause = 0  # steps without early updates that are still to come
        self._next_pause = 1
        self._last: deque[Event] = deque(maxlen=2)  # after the last updates

    @property
    def is_paused(self) -> bool:
        """Whether the coming step has no early updates."""
        return self._pause > 0

    def queue(
        self, pieces: Sequence[Piece], after: Sequence[Event], timings: StepRecorder, name: str
    ) -> EarlyUpdate:
        """Queues the update of one bucket.

        Args:
            pieces: of the expected step, with an undo log.
            after: after which gradients may be read, and main weights and states be written to.
            name: of the bucket.
        """
        early = EarlyUpdate(pieces, self.grad_scale)
        started: list[Callable[[], None]] = []

        def start() -> None:
            if early.start():
                started.append(self._kernel.submit(pieces, early.grad_scale))

        def update() -> None:
            for wait in started:
                wait()

        last_but_one = [self._last[0]] if len(self._last) == 2 else []
        is_started = self._start.enqueue(start, [*after, *last_but_one])
        early.done = self._host.enqueue(timings.timed(HOST, update, name=name), [is_started])
        self._last.append(early.done)
        return early

    def step_ended(self, grad_scale: float) -> None:
        """Counts a step with this factor."""
        if self._pause:
            self._pause -= 1
        elif grad_scale == self.grad_scale:
            self._next_pause = 1
        else:
            self._pause = self._next_pause
            self._next_pause = min(_LONGEST_PAUSE, 2 * self._pause)
