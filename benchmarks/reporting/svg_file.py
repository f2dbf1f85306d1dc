"""The file of a picture: what it was drawn from is written into it.

Its first comment holds two digests: of the picture's contents with the code that draws them, and of
the drawing that follows. The first says whether the picture would be drawn otherwise today; a
different matplotlib alone, which moves digits, does not change it. The second says whether somebody
has edited the drawing.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path

from benchmarks.reporting.contents import Contents

_HERE = Path(__file__).parent
_DRAWING_CODE = (*sorted((_HERE / "drawing").glob("*.py")), _HERE / "rounding.py")
_NOTE = re.compile(r"<!-- benchmarks: contents=(?P<contents>\w+) drawing=(?P<drawing>\w+) -->\n")
THEMES = ("light", "dark")


def file_names(name: str) -> dict[str, str]:
    """By theme, the file names of a picture."""
    return {theme: f"{name}_{theme}.svg" for theme in THEMES}


def contents_digest(contents: Contents, theme: str) -> str:
    """Of what is drawn, and of the code that draws it."""
    code = [path.read_bytes() for path in _DRAWING_CODE]
    shown = json.dumps([type(contents).__name__, theme, asdict(contents)], sort_keys=True)
    return _digest(shown.encode(), *code)


def with_note(svg: str, contents: Contents, theme: str) -> str:
    """The drawing with its digests before it."""
    digests = f"contents={contents_digest(contents, theme)} drawing={_digest(svg.encode())}"
    return f"<!-- benchmarks: {digests} -->\n{svg}"


def is_generated(path: Path) -> bool:
    """Whether a file is a picture that the report has drawn."""
    return _NOTE.match(path.read_text(encoding="utf-8")) is not None


def why_stale(path: Path, contents: Contents, theme: str) -> str | None:
    """Why the picture's file is not what would be drawn; None if it is."""
    if not path.is_file():
        return "it does not exist"
    text = path.read_text(encoding="utf-8")
    note = _NOTE.match(text)
    if note is None:
        return "it does not say what it was drawn from"
    if note["contents"] != contents_digest(contents, theme):
        return "its results, or the code that draws it, have changed"
    if note["drawing"] != _digest(text[note.end() :].encode()):
        return "it has been edited by hand"
    return None


def _digest(*parts: bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()[:16]
