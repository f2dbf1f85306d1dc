"""`CheckpointManager`: saves during training, one at a time, and deletes old checkpoints.

    # The only call that communicates.
    manager = CheckpointManager.start("runs/gpt", device, rank, world_size)
    # Starts; training may continue.
    manager.save(iteration, collect(model, optimizer), train_state)
    # Published, or CheckpointError.
    manager.finish()

[Note: saving] A save is work on a lane of this rank: one piece for each group of entries, then the
manifest, then, on rank 0, the publication. Only counters, buffers, and tensors on a device are
copied (see [Note: staging] in data_file.py). The optimizer's next update of a group waits only for
the piece that reads it, and until the disk has the tensors that are written in place ([Note: in
place] there).

Every rank gets the outcome from the directory: rank 0 from the manifests of the others, they from
the files that rank 0 publishes or writes there. So no rank waits for another inside a collective,
and a rank that fails or dies delays the others by no more than the timeout.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from megatron.core.device import Device
from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.errors import CheckpointError, few
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.load.checkpoint import train_state_bytes
from megatron.core.dist_checkpointing.save.data_file import BufferPool
from megatron.core.dist_checkpointing.save.publisher import Publication, abandon, await_outcome
from megatron.core.dist_checkpointing.save.writer import Draft, RankWriter, is_only_draft
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.dist_checkpointing.store import (
    Store,
    open_store,
    path_of,
    published_iterations,
    remove_or_warn,
)
from megatron.core.lanes import Event, Lane, is_lane_thread, relay
from megatron.core.timeline import NO_TIMELINE, AnyTimeline
from megatron.core.trace_file import CHECKPOINT

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """Which published checkpoints to keep. Without either number, all of them.

    Attributes:
        keep_last: so many of the newest.
        interval: also the checkpoints of iterations that it divides.
    """

    keep_last: int | None = None
    interval: int | None = None

    def superseded(self, published: list[int], newest: int) -> list[int]:
        """The iterations to delete once `newest` is published."""
        if self.keep_last is None and self.interval is None:
            return []

        # Later ones are not this run's, and stay: it may have been told to load an older one.
        earlier = sorted(iteration for iteration in published if iteration <= newest)
        last = earlier[-(self.keep_last or 1) :]
        return [
            iteration
            for iteration in earlier
            if iteration not in last and (self.interval is None or iteration % self.interval)
        ]


class _Save:
    """A save in flight on this rank."""

    def __init__(self, draft: Draft, start: float) -> None:
        self.draft = draft
        self.start = start
        self.done: Event | None = None
        self.is_done = False
        self.failure: BaseException | None = None


class CheckpointManager:
    """Saves checkpoints as [Note: saving] describes. A context manager that ends with `close`.

    Attributes:
        store: where checkpoints are.
        num_failed: saves of this process that failed.
    """

    def __init__(
        self,
        store: Store,
        device: Device,
        rank: int,
        world_size: int,
        token: str,
        *,
        retention: Retention | None = None,
        timeout_seconds: float = 600.0,
        staging_share: float = 0.0,
        num_local_ranks: int = 1,
        on_published: Callable[[int, float], object] | None = None,
        on_failed: Callable[[int, str], object] | None = None,
        timeline: AnyTimeline = NO_TIMELINE,
    ) -> None:
        """Does not communicate: any processes with one token are the ranks of a save.

        Args:
            token: the same on all ranks, and different from any other run's.
            timeout_seconds: how long rank 0 waits for the others, and they for it.
            staging_share: of the free host memory, for states that are copied from a device to the
                disk, so that the next step need not wait for the disk. A caller that waits for the
                save itself should pass 0.
            num_local_ranks: ranks on this machine, which divide that share. The default is right
                for a rank alone on its machine; with several, each would take the whole share.
            on_published: called on a thread of the manager with the iteration of each published
                checkpoint, and the seconds that the save took.
            on_failed: called with the iteration of each failed save, and the reason, on the
                caller's thread.
            timeline: records the work of saves.
        """
        self.store = store
        self.num_failed = 0
        self._device = device
        self._rank = rank
        self._world_size = world_size
        self._token = token
        self._retention = retention or Retention()
        self._timeout_seconds = timeout_seconds
        self._on_published = on_published
        self._on_failed = on_failed
        self._timeline = timeline
        self._num_saves = 0
        self._last_published: float | None = None
        self._in_flight: _Save | None = None
        self._abandoned: list[str] = []  # drafts of this run's failed saves, on rank 0
        self._pool = BufferPool(
            device, staging_share=staging_share, num_local_ranks=num_local_ranks
        )
        # An error would end a lane for good, so the work of a save raises none: it keeps them in
        # `_Save.failure`.
        self._lane = device.host_lane("checkpoint")
        self._disk = device.host_lane("checkpoint disk")
        self._is_closing = threading.Event()
        # Also at the end of the program: a thread still saving while the interpreter shuts down
        # would crash the process.
        self._close = weakref.finalize(self, _close, self._is_closing, (self._lane, self._disk))

    @classmethod
    def start(
        cls,
        root: str | Store,
        device: Device,
        rank: int = 0,
        world_size: int = 1,
        **settings: Any,
    ) -> CheckpointManager:
        """Sweeps abandoned drafts and agrees on a token; called by all ranks together.

        Args:
            settings: of the constructor, by name.

        Raises:
            CheckpointError: on all ranks, if rank 0 cannot sweep.
        """
        store = open_store(root) if isinstance(root, str) else root
        # A single rank does not use the default process group, which may contain other ranks.
        sweep = partial(_sweep, store)
        token = on_first_rank(sweep, "sweeping") if world_size > 1 else sweep()
        return cls(store, device, rank, world_size, token, **settings)

    @property
    def staged_bytes(self) -> int:
        """Host memory that saves have taken so far within `staging_share`."""
        return self._pool.staged_bytes

    @property
    def is_busy(self) -> bool:
        """Whether a save is in flight on this rank."""
        save = self._in_flight  # read once: other threads may call this
        return save is not None and not save.is_done

    def save(
        self,
        iteration: int,
        contents: Contents,
        train_state: dict[str, Any],
        *,
        name: str | None = None,
    ) -> None:
        """Starts a save once the previous one has ended. All ranks pass the same iteration.

        Until the save is done, only the optimizer's `step` may write to states and weights, because
        it waits for their readers; `finish` waits for the whole save.

        Args:
            contents: from a call of `collect` just now.
            train_state: plain data; rank 0's is written.
            name: directory of a checkpoint outside of the run's sequence; the tracker file does not
                change. Default: `checkpoint_name(iteration)`.

        Raises:
            CheckpointError: if the previous save has failed. This one has started all the same.
            ValueError: for files of another format in a remote store.
        """
        if contents.export is not None and not self.store.is_rename_atomic:
            raise ValueError(
                f"Expected a directory of a file system for {few(list(contents.export.files))}, "
                f"which ranks write at offsets within one file, got {self.store.root}."
            )
        start = time.perf_counter()
        earlier = self._settle()

        self._num_saves += 1
        token = f"{self._token}{self._num_saves}"
        final = name or checkpoint_name(iteration)
        draft = Draft(
            self.store,
            self.store.draft_name(final, token),
            final,
            f"{token}-{iteration}",
            iteration,
            self._world_size,
            self._is_closing,
            is_tracked=name is None,
            shared_files=tuple(contents.export.files if contents.export is not None else ()),
        )

        # Counters, buffers and the train state change whenever they like, so they are copied now.
        # Everything else is read later, while the optimizer waits for the reader (`hold`).
        save = _Save(draft, start)
        contents = contents.frozen()
        content = train_state_bytes(train_state)
        writer = RankWriter(draft, contents, self._rank, self._pool, self._disk, self._timeline)
        now = self._device.event()  # the device's work up to here has to be done first
        for number, group in enumerate(contents.groups):
            read = relay(self._lane, partial(writer.write_group, number), after=[now])
            if group.unit is not None:
                group.unit.hold(read)

        self._in_flight = save
        end = partial(self._end, save, writer, contents, content)
        save.done = self._lane.enqueue(self._timeline.timed(CHECKPOINT, "publish", end))
        milliseconds = 1e3 * (time.perf_counter() - start)
        logger.debug("checkpoint %s: %.1f ms until training continued", final, milliseconds)
        if earlier is not None:
            raise earlier

    def finish(self) -> None:
        """Waits for the save in flight, if any.

        Raises:
            CheckpointError: if it failed. No checkpoint has been published then.
        """
        failure = self._settle()
        if failure is not None:
            raise failure

    def failure(self) -> CheckpointError | None:
        """The error of the last save if it has failed, once. Does not wait."""
        return None if self.is_busy else self._settle()

    def close(self, *, is_told: bool = False) -> None:
        """Abandons the save in flight, if any, and ends the lanes.

        Args:
            is_told: whether the end of the program has been logged; an abandoned save is then a
                warning, not an error.
        """
        # First: whatever is queued on the lanes then fails at its next check.
        self._is_closing.set()
        failure = self._settle()
        if failure is not None:
            logger.log(logging.WARNING if is_told else logging.ERROR, "%s", failure)
        self._close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _settle(self) -> CheckpointError | None:
        """Waits for the save in flight. Returns its failure, once."""
        save = self._in_flight
        if save is None:
            return None

        assert save.done is not None, "it was queued"
        save.done.synchronize()
        self._in_flight = None
        error = save.failure
        if error is None:
            return None

        self.num_failed += 1
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        failure = CheckpointError(
            f"Expected checkpoint {save.draft.final} to be published in {self.store.root}, got: "
            f"{kind}{error} ({self.num_failed} failed so far; {self._age()})"
        )
        failure.__cause__ = error
        if self._on_failed is not None:
            self._on_failed(save.draft.iteration, str(failure))
        return failure

    def _age(self) -> str:
        """How long ago this run published a checkpoint."""
        if self._last_published is None:
            return "this run has published none yet"
        return f"the last was published {time.monotonic() - self._last_published:.0f} s ago"

    # On the lane

    def _end(self, save: _Save, writer: RankWriter, contents: Contents, train_state: bytes) -> None:
        try:
            if self._rank == 0:
                self._publish(save.draft, writer, contents, train_state)
            else:
                writer.finish()
                self._await_outcome(save.draft, writer)
            self._tell_published(save)
        except BaseException as error:
            save.failure = error
        finally:
            save.is_done = True

    def _await_outcome(self, draft: Draft, writer: RankWriter) -> None:
        if writer.failure is not None and not writer.may_be_published:
            raise writer.failure
        try:
            await_outcome(draft, self._rank, 2 * self._timeout_seconds)  # rank 0 gives up first
        except Exception:
            # This rank's own error is more precise than rank 0's report.
            if writer.failure is not None:
                raise writer.failure from None
            raise

    def _tell_published(self, save: _Save) -> None:
        self._last_published = time.monotonic()
        seconds = time.perf_counter() - save.start
        path = path_of(self.store, save.draft.final)
        logger.info("saved checkpoint %s in %.2f s", path, seconds)
        if self._on_published is None:
            return
        try:
            self._on_published(save.draft.iteration, seconds)
        except Exception:  # the caller's; the checkpoint is published all the same
            logger.exception("%s is published, but the caller failed when told so", path)

    def _publish(
        self, draft: Draft, writer: RankWriter, contents: Contents, train_state: bytes
    ) -> None:
        try:
            publication = Publication(draft, contents, train_state)
            writer.finish(publication.describe)
            if writer.failure is not None:
                raise writer.failure
            is_tracked = publication.publish(self._timeout_seconds)
        except BaseException as error:
            abandon(draft, f"rank 0: {error}")
            self._abandoned.append(draft.name)
            raise

        try:
            # Only now: a rank that has written this save has read why earlier ones were abandoned.
            self._clear()
            if is_tracked:
                self._retain(draft.iteration)
        except Exception as error:  # remote stores raise other errors, too
            logger.warning("could not tidy up %s: %s", self.store.root, error)

    def _clear(self) -> None:
        while self._abandoned:
            name = self._abandoned.pop()
            if is_only_draft(self.store, name):
                remove_or_warn(self.store, name)

    def _retain(self, newest: int) -> None:
        for iteration in self._retention.superseded(published_iterations(self.store), newest):
            remove_or_warn(self.store, checkpoint_name(iteration))


def _sweep(store: Store) -> str:
    """Removes abandoned drafts and makes up a token. Raises CheckpointError alone."""
    try:
        swept = store.sweep()
    except Exception as error:  # remote stores raise other errors, too
        got = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"Expected a directory of checkpoints at {store.root}, got {got}."
        ) from error

    if swept:
        logger.warning(
            "swept what earlier runs left unfinished in %s: %s", store.root, ", ".join(swept)
        )
    return secrets.token_hex(4)


def _close(is_closing: threading.Event, lanes: Sequence[Lane]) -> None:
    is_closing.set()
    # The last reference to a manager may be that of its save. This then runs on the lane itself,
    # which cannot wait for its own end, and need not: it ends without a manager.
    for lane in () if is_lane_thread() else lanes:
        lane.close()
