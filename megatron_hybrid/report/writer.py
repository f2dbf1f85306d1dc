"""Writes a run's page, anew as often as it is told to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.files import Sync, published
from megatron_hybrid.report.collect import Collector
from megatron_hybrid.report.page import page_of


class PageWriter:
    """The page of the run in a folder. It remembers what it has read of the metrics."""

    def __init__(
        self,
        folder: Path,
        path: Path,
        *,
        refresh_seconds: float,
        date: Callable[[float], str],
        duration: Callable[[float], str],
    ) -> None:
        """
        Args:
            path: of the page. A browser finds it whole at any moment.
            refresh_seconds, date, duration: as in `page_of`.
        """
        self._collector = Collector(folder)
        self._path = path
        self._refresh_seconds = refresh_seconds
        self._date = date
        self._duration = duration

    def write(self, status: Mapping[str, Any], lines: Sequence[str], now: float) -> None:
        """Writes the page of this moment. OSError if it cannot be written or the run not read."""
        page = page_of(
            self._collector.collect(status, lines, now),
            refresh_seconds=self._refresh_seconds,
            date=self._date,
            duration=self._duration,
        )
        # It can be made again at any time, so it need not outlive a crash.
        with published(self._path, Sync.NOTHING) as stream:
            stream.write(page.encode())
