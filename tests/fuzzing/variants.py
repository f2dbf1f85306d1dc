"""Hypothesis strategies for the files of a target, of which one or two have been changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hypothesis import strategies as st

from megatron.core.dist_checkpointing.format.index import Index
from megatron.core.dist_checkpointing.format.manifest import (
    INDEX_FILE,
    MARKER_FILE,
    METADATA_FILE,
    data_file,
    digest,
    manifest_file,
)
from tests.fuzzing.edits import damaged, pick, text, yaml
from tests.fuzzing.harness import Files, Place
from tests.fuzzing.prepared import (
    array,
    chunk_index,
    exchanged,
    index,
    metadata,
    program,
    safetensors,
)
from tests.helpers.checkpoints import manifest_for

# Draws how to change the content of a file.
Mutation: TypeAlias = Callable[[st.DrawFn, bytes], bytes]


@dataclass(frozen=True)
class Variant:
    """Replacements of the intact files.

    Attributes:
        files: all of them.
        changed: the names of those that differ.
        is_prepared: whether somebody has made a file, with checksums of its own.
        is_sealed: whether digests in other files fit again.
        what: in words.
    """

    files: Files
    changed: tuple[str, ...]
    is_prepared: bool
    is_sealed: bool
    what: str

    def __repr__(self) -> str:
        shown = {name: _excerpt(self.files.get(name)) for name in self.changed}
        return f"{self.what}: {shown}"


def _excerpt(content: bytes | Place | None) -> str:
    if not isinstance(content, bytes):
        return f"{content}"
    return repr(content if len(content) <= 6000 else content[:3000] + b" ... " + content[-3000:])


# Which files, and whether their digests fit again.

_BY_ENDING: dict[str, list[Mutation]] = {
    ".metadata": [program, metadata, metadata],
    f"/{INDEX_FILE}": [chunk_index, chunk_index, text],
    ".json": [text],
    ".jsonl": [text],
    ".txt": [text],
    ".yaml": [yaml, yaml, text],
    ".npy": [array, array],
    ".safetensors": [safetensors, safetensors],
    ".distcp": [],
    ".idx": [index, index],
    ".bin": [],
}


class Intact:
    """The files of a target. Hypothesis prints its arguments, and this is short."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files


@st.composite
def variants(draw: st.DrawFn, intact: Intact) -> Variant:
    """Files of which one or two have been changed."""
    files: dict[str, bytes | Place] = dict(intact.files)
    marker = next((name for name in files if name.endswith(MARKER_FILE)), None)
    described = next((name for name in files if name.endswith(METADATA_FILE)), None)

    # Without a manifest of the data, an entry may be replaced by another.
    if marker is None and described is not None and pick(draw, [True, False, False]):
        data = described.replace(METADATA_FILE, data_file(0))
        both = exchanged(draw, intact.files[described], intact.files[data])
        files |= zip((described, data), both, strict=True)
        return Variant(files, (described, data), True, False, "an entry is another archive")

    what, is_prepared, is_sealed = [], False, False
    # The tracker is a number, and soon tried.
    names = [name for name in sorted(files) for _ in range(1 if name.endswith(".txt") else 4)]
    changed = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
    for name in changed:
        files[name], how = _changed(draw, name, intact.files[name])
        is_prepared |= how not in ("place", "damaged")
        what.append(f"{name}: {how}")
    if marker is not None and pick(draw, [False, True, True]):
        files |= sealed(files, marker, changed)
        is_sealed = True
        what.append("sealed again")
    return Variant(files, tuple(changed), is_prepared, is_sealed, ", ".join(what))


def _changed(draw: st.DrawFn, name: str, content: bytes) -> tuple[bytes | Place, str]:
    """The replacement of a file, and how it was made."""
    kinds = next((kinds for ending, kinds in _BY_ENDING.items() if name.endswith(ending)), [])
    kind = pick(draw, ["place", *["damage"] * 3, *["prepare"] * 4])
    if kind == "place":
        # Without a tokenizer.json, other files are asked for, and read by another library.
        is_needed = name == "tokenizer.json"
        places = [each for each in Place if not (is_needed and each is Place.MISSING)]
        return pick(draw, places), "place"
    if kind == "damage" or not kinds:
        return damaged(draw, content), "damaged"
    made = pick(draw, kinds)
    return made(draw, content), made.__name__


def sealed(files: Files, marker: str, changed: Sequence[str]) -> dict[str, bytes]:
    """Manifest and marker with sizes and digests of what there is, as far as they can be made."""
    folder = marker.rpartition("/")[0]
    found: dict[str, bytes] = {}
    manifest_name, data_name = f"{folder}/{manifest_file(0)}", f"{folder}/{data_file(0)}"
    data, content = files[data_name], files[f"{folder}/{INDEX_FILE}"]
    # A manifest that has been changed itself stays as it is: only the marker fits it.
    if isinstance(data, bytes) and isinstance(content, bytes) and manifest_name not in changed:
        try:
            planned = Index.from_bytes(content, None, "")
        except Exception:  # tested elsewhere
            planned = None
        if planned is not None:
            found[manifest_name] = manifest_for(planned, 0, data).to_bytes()

    content = files[marker]
    try:
        members = json.loads(content) if isinstance(content, bytes) else None
        assert isinstance(members, dict), "an object"
        assert isinstance(members["files"], dict), "an object"
    except (ValueError, RecursionError, KeyError, AssertionError):
        return found
    for name in members["files"]:
        small = found.get(f"{folder}/{name}", files.get(f"{folder}/{name}"))
        if isinstance(small, bytes):
            members["files"][name] = [len(small), None if name == data_file(0) else digest(small)]
    found[marker] = marker_bytes(members)
    return found


def marker_bytes(members: dict[str, Any]) -> bytes:
    """As `Marker.to_bytes` writes them, whatever they are."""
    members = {name: value for name, value in members.items() if name != "digest"}

    def dumped(value: object, **how: Any) -> str:
        return json.dumps(value, separators=(",", ":"), **how)

    own = digest(dumped(members, sort_keys=True).encode())
    files = members.pop("files", {})
    lines = ",".join(f"\n{dumped(name)}:{dumped(record)}" for name, record in sorted(files.items()))
    return f'{dumped(members)[:-1]},"files":{{{lines}\n}},"digest":{dumped(own)}}}\n'.encode()
