"""`--profile-lanes 20:23`: a timeline of some iterations, one file a rank.

    runs/gpt/timelines/iterations_20-22/trace_rank0.json
                                        trace_rank1.json

Each recording has its own directory, which rank 0 names when the run starts: `iterations_20-22.2`
if an earlier start has recorded the same iterations. A file is written once all work of the
recorded iterations has ended, and appears as a whole; training continues if it cannot be written.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from pathlib import Path
from typing import Any, TypeAlias

from megatron.core.device import Device
from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.files import Sync, published, reason_of
from megatron.core.options import ConfigError
from megatron.core.timeline import NO_TIMELINE, NoTimeline, Timeline
from megatron.core.trace_file import Trace

logger = logging.getLogger(__name__)

REPORT = "report"  # a phase of the timeline alone: logging, and deciding whether to continue


class LaneProfile:
    """Records this rank's part. Either all ranks have one or no rank does."""

    def __init__(
        self, iterations: range, root: Path, device: Device, *, rank: int, world_size: int
    ) -> None:
        """
        Args:
            root: the directory of recordings.
        """
        self.timeline = Timeline(device)
        self._iterations = iterations
        self._root = root
        self._rank = rank
        self._world_size = world_size
        self._machine = _machine(device)
        self._zero = 0.0
        self._folder = root
        self._first_made = 0  # by this start of the run
        self._recorded: list[int] = []
        self._is_written = False

    def prepare(self, made: int, train_iters: int) -> None:
        """Agrees on the recording's directory and clock. All ranks call it together.

        Args:
            made: iterations before this start of the run.

        Raises:
            ConfigError: on all ranks, for a directory that cannot be created.
        """
        self._first_made = made + 1
        folder, self._zero = on_first_rank(self._new_recording, "beginning a timeline")
        self._folder = Path(folder)

        coming = range(max(made + 1, self._iterations.start), self._iterations.stop)
        if not coming or coming.start > train_iters:
            self._warn("will not be", range(self._first_made, train_iters + 1))

    def begin(self, iteration: int) -> None:
        """Starts an iteration and ends the one before. Writes the recording once it is complete."""
        if iteration in self._iterations:
            self._recorded.append(iteration)
            self.timeline.begin_iteration(iteration)
        elif self._recorded and not self._is_written:
            self.timeline.end_iteration()
            self._write(is_final=False)

    def phase(self, phase: str) -> None:
        """Starts a phase of the main thread."""
        self.timeline.phase(phase)

    def finish(self, iteration: int) -> None:
        """Ends the run after this iteration. Writes the rest, as far as it is complete."""
        self.timeline.end_iteration()
        if self._recorded and not self._is_written:
            # No later call waits for the end of the last iteration.
            self.timeline.synchronize()
            self._write(is_final=True)
        if len(self._recorded) < len(self._iterations):
            verb = "was not" if len(self._missing) == 1 else "were not"
            self._warn(verb, range(self._first_made, iteration + 1))

    def _new_recording(self) -> list[Any]:
        """On rank 0: the directory, which does not exist yet, and unix seconds near the present."""
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--profile-lanes: expected a writable directory, got {self._root} "
                f"({reason_of(error)})."
            ) from None

        name = f"iterations_{self._iterations[0]}-{self._iterations[-1]}"
        names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
        free = next(each for each in names if not (self._root / each).exists())
        return [str(self._root / free), float(int(time.time()))]

    def _write(self, *, is_final: bool) -> None:
        slices = self.timeline.slices(self._zero, is_final=is_final)
        if slices is None:
            return  # some work is still running: a later call writes

        trace = Trace(self._rank, self._world_size, self._zero, self._machine, tuple(slices))
        path = self._folder / f"trace_rank{self._rank}.json"
        self._is_written = True
        self.timeline.forget()
        try:
            # On another machine the root may be another directory, which rank 0 has not created.
            path.parent.mkdir(parents=True, exist_ok=True)
            with published(path, Sync.NOTHING) as stream:
                stream.write(trace.to_json())
        except OSError as error:
            logger.warning("Could not write %s: %s. Training continues.", path, error)
            return
        logger.info("timeline of %s in %s", _shown(self._recorded), path.parent)

    @property
    def _missing(self) -> list[int]:
        return [number for number in self._iterations if number not in self._recorded]

    def _warn(self, verb: str, made: range) -> None:
        done = f"makes {_shown(made)}" if made else "makes none"
        if self._rank == 0:
            missing = " and ".join(map(_shown, _runs(self._missing)))
            text = "--profile-lanes: %s %s recorded, since this start of the run %s."
            logger.warning(text, missing, verb, done)


class NoLaneProfile:
    """Records nothing."""

    timeline: NoTimeline = NO_TIMELINE

    def prepare(self, made: int, train_iters: int) -> None:
        """Does nothing."""

    def begin(self, iteration: int) -> None:
        """Does nothing."""

    def phase(self, phase: str) -> None:
        """Does nothing."""

    def finish(self, iteration: int) -> None:
        """Does nothing."""


NO_LANE_PROFILE = NoLaneProfile()

AnyLaneProfile: TypeAlias = LaneProfile | NoLaneProfile


def _shown(numbers: range | list[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return f"iteration {first}" if first == last else f"iterations {first} to {last}"


def _runs(numbers: list[int]) -> list[list[int]]:
    """Ascending numbers, apart where one is left out."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _machine(device: Device) -> str:
    """The hardware of this machine's ranks, in a few words."""
    if device.is_accelerator:
        return device.description
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, device.description)}, {os.cpu_count()} cores"
