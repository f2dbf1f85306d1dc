"""The folder of results: at most eight files and 16 MiB, whatever stages produce.

results.jsonl   every record, one JSON object a line, in the order in which stages ended
page.txt        a line for each stage
logs.txt        what failed stages printed last
*               files that stages asked to keep, traces above all
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

RESULTS, PAGE, LOGS = "results.jsonl", "page.txt", "logs.txt"
MOST_FILES = 8
MOST_BYTES = 16 << 20
# Kept files may not take the room of records and logs, which tell more.
_RESERVED = {RESULTS: 4 << 20, PAGE: 64 << 10, LOGS: 1 << 20}
_TAIL_BYTES = 16 << 10  # of one stage's output


class ResultFolder:
    """See the module's docstring."""

    def __init__(self, path: Path) -> None:
        """Makes the folder, and removes the files that an earlier run has left in it."""
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        for name in _RESERVED:
            (path / name).unlink(missing_ok=True)
        self._kept = [file for file in path.iterdir() if file.is_file()]
        self._room = dict(_RESERVED)

    def append(self, record: dict[str, Any]) -> None:
        """Adds a record, unless there is no room left for records."""
        self._append(RESULTS, json.dumps(record) + "\n")

    def append_log(self, stage: str, log: Path) -> None:
        """Adds the end of what a stage has printed."""
        text = tail(log)
        if text:
            self._append(LOGS, f"==== {stage} ====\n{text}\n")

    def write_page(self, text: str) -> None:
        (self.path / PAGE).write_text(text[: _RESERVED[PAGE]])

    def keep(self, file: Path) -> str | None:
        """Keeps a file. Returns why not, if there is no room for it."""
        # An earlier run's file of this name is overwritten.
        self._kept = [kept for kept in self._kept if kept.name != file.name]
        if len(self._kept) + len(_RESERVED) >= MOST_FILES:
            return f"{file.name} was left out: the folder holds {MOST_FILES} files at most"
        used = sum(kept.stat().st_size for kept in self._kept) + sum(_RESERVED.values())
        if used + file.stat().st_size > MOST_BYTES:
            size, most = file.stat().st_size >> 20, MOST_BYTES >> 20
            return f"{file.name} was left out: its {size} MiB are too many for {most}"
        target = self.path / file.name
        shutil.copyfile(file, target)
        self._kept.append(target)
        return None

    def _append(self, name: str, text: str) -> None:
        content = text.encode()
        if len(content) > self._room[name]:
            return
        self._room[name] -= len(content)
        with (self.path / name).open("ab") as file:
            file.write(content)


def tail(path: Path) -> str:
    """The end of a text file, a few thousand characters; nothing if there is no such file."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace").strip()
