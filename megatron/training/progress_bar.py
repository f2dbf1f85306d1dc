"""The line at the bottom of a terminal with the progress, speed and activity of a run.

     40%|########            | 200/500  loss 4.6962  5421 tok/s  378 ms/it  eta 1m53s
     40%|########            | 200/500  loss 4.6962  5421 tok/s  378 ms/it  validation 25%

tqdm draws it, and keeps the log's lines above it. Its rates are not used: tqdm would count
evaluations and saves as steps.
"""

from __future__ import annotations

import sys
from collections import deque

from tqdm import tqdm

from megatron.training.log_lines import duration, loss_digits, milliseconds, thousands

_RECENT_STEPS = 50
_FIRST = "running the first iteration"


class Pace:
    """The mean duration of recent steps, from which the remaining time is estimated.

    The first step of a process compiles, allocates and fills caches. It counts only until there is
    another one.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    def add(self, seconds: float) -> None:
        """A step has taken so long, without evaluations and saves."""
        if self._first is None:
            self._first = seconds
        else:
            self._seconds.append(seconds)

    @property
    def seconds(self) -> float | None:
        """The mean of the recent steps; None before the first."""
        if not self._seconds:
            return self._first
        return sum(self._seconds) / len(self._seconds)


class ProgressBar:
    """Shows itself on stderr, if that is a terminal."""

    def __init__(self, train_iters: int, start_iteration: int, *, is_wanted: bool) -> None:
        self._train_iters = train_iters
        self._iteration = start_iteration
        self._numbers = ""
        self._eta = ""
        self._is_paused = False
        self._width = 0  # of the longest text so far, so that the bar does not change its width
        self._bar = tqdm(
            total=train_iters,
            initial=start_iteration,
            file=sys.stderr,
            disable=not (is_wanted and sys.stderr.isatty()),
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}  {desc}",
            desc=_FIRST,
        )

    def step(self, loss: float, tokens_per_second: float, seconds: float) -> None:
        """An iteration is done.

        Args:
            tokens_per_second: over all devices.
            seconds: of a step, from recent ones.
        """
        self._iteration += 1
        if self._bar.disable:
            return
        self._numbers = (
            f"loss {loss_digits(loss)}  {thousands(tokens_per_second)} tok/s  "
            f"{milliseconds(seconds)}/it"
        )
        self._eta = f"eta {duration(seconds * (self._train_iters - self._iteration))}"
        self._show(self._eta, refresh=False)
        self._bar.update()

    def shows(self, activity: str) -> None:
        """Replaces the time left by an activity other than stepping."""
        if not self._bar.disable:
            self._is_paused = True
            self._show(activity)

    def resumes(self) -> None:
        """The run steps again, if it did something else."""
        if self._is_paused and self._iteration < self._train_iters:
            self._is_paused = False
            self._show(self._eta or _FIRST)

    def close(self) -> None:
        """Leaves the line as it is after the last step."""
        self._bar.set_description_str(self._numbers, refresh=False)
        self._bar.close()

    def _show(self, last: str, *, refresh: bool = True) -> None:
        text = "  ".join(part for part in (self._numbers, last) if part)
        self._width = max(self._width, len(text))
        self._bar.set_description_str(text.ljust(self._width), refresh=refresh)
