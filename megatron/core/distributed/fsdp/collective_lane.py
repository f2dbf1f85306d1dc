"""`CollectiveLane`: a lane for collectives that keeps their notes and names disagreements."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from megatron.core.distributed.fsdp.collectives import MismatchError
from megatron.core.distributed.fsdp.note_history import NoteHistory
from megatron.core.lanes import Event, Lane


class CollectiveLane:
    """See the module's docstring."""

    def __init__(
        self,
        lane: Lane,
        describe: weakref.WeakMethod[Callable[[tuple[int, ...]], str]],
        history: NoteHistory,
    ) -> None:
        """
        Args:
            lane: that does the work.
            describe: from a note to what a rank with it is about to do, in words. Held weakly: the
                context that describes has the lane.
            history: gets the notes of queued work; lanes that one thread uses may share it.
        """
        self._lane = lane
        self._describe = describe
        self._history = history

    def enqueue(
        self,
        work: Callable[[], object],
        after: Sequence[Event] = (),
        notes: Sequence[Sequence[int]] = (),
    ) -> Event:
        """As `Lane.enqueue`. Where the ranks' notes differ, the event's error is a RuntimeError
        with names.

        Args:
            notes: of the collectives in `work`.
        """
        # Now, in the order in which the host issues, which is what ranks compare. In which order
        # two lanes come to their work differs from rank to rank.
        for note in notes:
            self._history.add(note)

        def named() -> None:
            try:
                work()
            except MismatchError as error:
                # The context may have been freed while its last work was still queued.
                describe = self._describe()
                if describe is None:
                    raise
                raise RuntimeError(
                    "Expected every rank to do the same, got: this rank is about to "
                    f"{describe(error.own)}; rank {error.peer} of its group is about to "
                    f"{describe(error.theirs)}."
                ) from error

        return self._lane.enqueue(named, after)

    def remember(self, note: Sequence[int]) -> None:
        """Takes the note of a collective that another stream runs at this point."""
        self._history.add(note)

    def close(self) -> None:
        """As `Lane.close`."""
        self._lane.close()
