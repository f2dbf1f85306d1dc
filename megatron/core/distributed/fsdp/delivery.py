"""`Delivery`: how the compute weights of a parameter group get the updates of an optimizer that
works elsewhere.

Usually a group copies its main weights to the compute weights itself, before their next use. An
optimizer that updates main weights in host memory copies them to the device too, on lanes of its
own. It claims the group's delivery and announces each update with an event; the next gather comes
after that event.

    status      the compute weights                           next
    IDLE        no announced update is missing                ANNOUNCED
    ANNOUNCED   an update is missing, and no gather has been  AWAITED, or ANNOUNCED by a newer one
                queued after it
    AWAITED     a gather has been queued after the update     IDLE by `wait`, or ANNOUNCED again
    FAILED      could not be brought up to date               none: every later use fails too

Any status leads to FAILED, since a gather that waits for no update can fail as well.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from types import TracebackType

from megatron.core.lanes import Event


class Delivery:
    """The state of a parameter group's updates by an optimizer in host memory.

    Attributes:
        status: see `Status`.
    """

    class Status(enum.Enum):
        """Where the last announced update is."""

        IDLE = "idle"
        ANNOUNCED = "announced"
        AWAITED = "awaited"
        FAILED = "failed"

    def __init__(self) -> None:
        self.status = Delivery.Status.IDLE
        self._owner: weakref.ref[object] | None = None
        self._updated: Event | None = None  # after the last announced update, until that is done
        self._before_use: Callable[[], None] | None = None
        self._failure: tuple[Exception, TracebackType | None] | None = None

    def claim(self, owner: object) -> None:
        """Makes `owner` the only one that updates the main weights and delivers the compute
        weights.

        The group does not copy them after the owner's steps. The reference to it is weak.
        """
        self.synchronize()
        self._owner = weakref.ref(owner)

    def is_claimed_by(self, owner: object) -> bool:
        """Whether `owner` was the last to claim the delivery."""
        return self._owner is not None and self._owner() is owner

    def announce(self, updated: Event, before_use: Callable[[], None] | None = None) -> None:
        """Announces an update of the main weights and of this rank's post_optimizer_model_weight.

        Args:
            updated: both are up to date after this event.
            before_use: called by the thread that uses the weights, just before it waits for them,
                unless another update was announced before. It may wait for the event itself, to
                see how long that takes.
        """
        self._updated, self._before_use = updated, before_use
        if self.status is not Delivery.Status.FAILED:
            self.status = Delivery.Status.ANNOUNCED

    @property
    def is_announced(self) -> bool:
        """Whether the next gather must come after an update."""
        return self.status is Delivery.Status.ANNOUNCED

    @property
    def events(self) -> list[Event]:
        """The events that the next gather must come after."""
        return [self._updated] if self.is_announced and self._updated is not None else []

    def gather_queued(self) -> None:
        """Records that a gather has been queued after `events`."""
        if self.is_announced:
            self.status = Delivery.Status.AWAITED

    def wait(self, gathered: Event) -> None:
        """Waits for the compute weights; if that fails, every later `check` fails too."""
        before_use = None
        if self.status is Delivery.Status.AWAITED:
            self.status = Delivery.Status.IDLE
            before_use, self._before_use = self._before_use, None

        try:
            if before_use is not None:
                before_use()
            gathered.wait()
        except Exception as error:
            # The next user of the weights must not get the contents of the buffer.
            self.status = Delivery.Status.FAILED
            self._failure = error, error.__traceback__
            raise

    def check(self) -> None:
        """Raises again what `wait` has raised."""
        if self._failure is not None:
            error, traceback = self._failure
            raise error.with_traceback(traceback)

    def synchronize(self) -> None:
        """Blocks this thread until the last announced update is done. Raises its error."""
        if self._updated is not None:
            self._updated.synchronize()
            # Only now, since after a failure the next call must fail too; and not while a gather
            # has yet to be queued after it.
            if not self.is_announced:
                self._updated = None
