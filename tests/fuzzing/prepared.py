"""Malicious files: code instead of data, wrong sizes and offsets."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import struct
import warnings
import zipfile
import zlib
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from tests.fuzzing.edits import damaged, pick, text

# Programs: pickles.


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


_PROGRAMS = [
    _global("os", "system") + b"(X\x04\x00\x00\x00truetR",
    _global("posix", "mkdir") + b"(X\x06\x00\x00\x00canarytR",
    _global("builtins", "exec") + b"(X\x04\x00\x00\x001+11tR",
    _global("torch.serialization", "load") + b"(X\x01\x00\x00\x00xtR",
    _global("importlib", "import_module") + b"(X\x0b\x00\x00\x00antigravitytR",
    _global("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81",
    _global("collections", "OrderedDict") + b")R",
    _global("torch", "Size") + b"(" + b"J\xff\xff\xff\x7f" * 20 + b"t\x85R",
    b"(S'os'\ni__main__\nSystem\n",
    b"X\xff\xff\xff\xff",  # BINUNICODE of 4 GiB
    b"L" + b"9" * 5000 + b"L\n",
    b"]" * 5000 + b"a" * 4999,
    b"]\x94h\x00a",  # a list that contains itself
    b"K\x00Q",
    b"N",
    b"\x80\xff",
    b"",
]


def program(draw: st.DrawFn, content: bytes) -> bytes:
    """A pickle with something else where an opcode starts, or with opcodes moved."""
    try:
        begins = [place for _, _, place in pickletools.genops(content) if place is not None]
    except Exception:  # it has been damaged before
        return content + pick(draw, _PROGRAMS)
    for _ in range(pick(draw, [1, 1, 2])):
        places = [*(begin for begin in begins if begin < len(content)), len(content)]
        number = draw(st.integers(0, len(places) - 2))
        begin, end = places[number], places[number + 1]
        other = draw(st.integers(0, len(places) - 2))
        kind = pick(draw, ["insert", "replace", "move", "alone"])
        if kind == "insert":
            content = content[:begin] + pick(draw, _PROGRAMS) + content[begin:]
        elif kind == "replace":
            content = content[:begin] + pick(draw, _PROGRAMS) + content[end:]
        elif kind == "move":
            content = content[:begin] + content[places[other] : places[other + 1]] + content[end:]
        else:
            content = b"\x80\x02" + pick(draw, _PROGRAMS) + b"."
    return content


_JUNK: list[Any] = [
    *(None, True, 0, -1, 2**31, 2**40, 2**62, 2**100, 0.5, float("nan"), "", "../../etc/passwd"),
    *((), [], {}, (0,), (-1, 2), (2**40, 2**40), torch.Size((2**31, 2**31)), torch.Size(())),
    *("/dev/zero", "__0_0.distcp", "published.json", "." * 300, "\0", "\x1b[31m\n"),
    *(torch.float64, torch.int8, [[[[]]]], {"a": (1,)}),
]


def metadata(draw: st.DrawFn, content: bytes) -> bytes:
    """DCP's metadata with another value in a field: sizes, dtypes, offsets."""
    found = pickle.loads(content)
    for _ in range(pick(draw, [1, 1, 2])):
        if found.state_dict_metadata and found.storage_data:
            _set_somewhere(draw, found)
    if draw(st.sampled_from([False] * 9 + [True])):
        names = ["planner_data", "storage_data", "storage_meta", "state_dict_metadata", "version"]
        _force(found, pick(draw, names), pick(draw, _JUNK))
    try:
        return pickle.dumps(found, protocol=pick(draw, [2, 4]))
    except RuntimeError:  # a memory format that torch does not support
        return content


def chunk_index(draw: st.DrawFn, content: bytes) -> bytes:
    """The index of a checkpoint with other declared contents or offsets."""
    members = json.loads(content)
    for _ in range(pick(draw, [1, 1, 2])):
        _announce(draw, members)
    return json.dumps(members).encode()


_NUMBERS = [0, 1, 2, 4096, 2**20, 2**31, 2**40, 2**62, 2**63, -1, 0.5, True, None, "0", [], [0]]
_WRITERS = [
    *(["__0_0.distcp", 1], ["__1_0.distcp", 0], ["published.json", 0], ["../../x", 0]),
    *(["/dev/zero", 0], ["index.json", 0], ["__0_0.distcp", 2**40], [".", 0], ["hf/x", 0], []),
]
_DTYPES = ["float64", "int8", "float32", "float8_e4m3fn", "complex128", "quint8", "", "x", None]


def _announce(draw: st.DrawFn, members: dict[str, Any]) -> None:
    """Another member, tensor or chunk; or a consistent forgery."""
    group = members[pick(draw, ["tensors", "tensors", "tensors", "plain"])]
    keys = [key for key, saved in group.items() if saved and len(saved) == 4 and saved[3]]
    if not keys:
        return
    key = pick(draw, keys)
    saved = group[key]
    # A division that no other tensor has.
    rows = [list(row) for row in members["divisions"][saved[2]]]
    saved[2] = len(members["divisions"])
    members["divisions"].append(rows)
    offsets = saved[3]
    at = pick(draw, range(min(len(rows), len(offsets))))
    row, offset = rows[at], offsets[at]
    kinds = ["number", "number", "offset", "offset", "size", "size", "larger", "larger", "dtype"]
    kinds += ["twice", "exchange", "many", "split", "remove", "key", "group", "writer", "member"]
    kinds += ["dims", "division", "rows"]
    kind = pick(draw, kinds)
    if kind == "number":
        row[pick(draw, range(len(row)))] = pick(draw, _NUMBERS)
    elif kind == "offset":
        offsets[at] = pick(draw, _NUMBERS)
    elif kind == "size" and saved[1]:
        saved[1][pick(draw, range(len(saved[1])))] = pick(draw, _NUMBERS)
    elif kind == "larger":  # the tensor and its only chunk, which tile each other
        shape = pick(draw, [[2**40], [2**20, 2**20], [0, 2**62], [1] * 64, [1] * 500, [3], []])
        saved[1], saved[3] = shape, [offset]
        rows[:] = [[row[0], *(0 for _ in shape), *shape]]
    elif kind == "dtype":
        saved[0] = pick(draw, _DTYPES)
    elif kind == "twice":
        rows.append(list(row))
        offsets.append(offset)
    elif kind == "exchange":
        other = group[pick(draw, keys)]
        saved[2:], other[2:] = other[2:], saved[2:]
    elif kind == "many":
        number = pick(draw, [1, 3000])
        rows.extend([list(row)] * number)
        offsets.extend([offset] * number)
    elif kind == "split" and len(row) > 2 and isinstance(row[-1], int) and row[-1] < 100:
        size = row[-1]  # into columns, each at the same place or behind the last
        step = pick(draw, [0, 1, 4])
        del rows[at], offsets[at]
        half = len(row) // 2
        for column in range(size):
            rows.append([*row[:half], row[half] + column, *row[half + 1 : -1], 1])
            offsets.append(offset + column * step)
    elif kind == "remove":
        del group[key]
    elif kind == "key":
        group[pick(draw, ["", "other", "k" * 5000, "\x1b[31m\n", "../x"])] = group.pop(key)
    elif kind == "group":
        members[pick(draw, ["tensors", "plain", "exported"])][key] = saved
    elif kind == "writer":
        writers = members["writers"]
        writers[pick(draw, range(len(writers)))] = pick(draw, _WRITERS)
    elif kind == "member":
        name = pick(draw, [*members])
        members[name] = pick(draw, [None, {}, [], 0, "x", [[]], {key: saved}, 3])
    elif kind == "dims":
        half = len(saved[1]) + 1
        saved[1] = [*saved[1], 1]
        rows[:] = [[*each[:half], 0, *each[half:], 1] for each in rows]
    elif kind == "division":
        saved[2] = pick(draw, _NUMBERS)
    elif kind == "rows":
        del rows[at]


def _set_somewhere(draw: st.DrawFn, found: Any) -> None:
    entries, places = found.state_dict_metadata, found.storage_data
    junk = pick(draw, _JUNK)
    key = pick(draw, list(entries))
    entry = entries[key]
    indices = [index for index in places if getattr(index, "fqn", None) == key]
    index = indices[0] if indices else pick(draw, list(places))
    info = places[index]
    kinds = ["place", "place", "remove key", "remove place", "key", "entry", "exchange"]
    kinds += ["size", "chunk", "dtype", "more chunks"] if getattr(entry, "chunks", None) else []
    kind = pick(draw, kinds)
    if kind == "place":
        field = pick(draw, ["relative_path", "offset", "length", "transform_descriptors"])
        _force(info, field, junk)
    elif kind == "remove key":
        del entries[key]
    elif kind == "remove place":
        places.pop(index)
    elif kind == "key":
        name = junk if isinstance(junk, str | int | tuple) else "other"
        entries[name] = entries.pop(key)
    elif kind == "entry":
        entries[key] = junk
    elif kind == "exchange":
        other = pick(draw, list(places))
        places[index], places[other] = places[other], places[index]
    elif kind == "size":
        size = junk if isinstance(junk, tuple) else torch.Size((pick(draw, [0, 1, 2**20, 2**40]),))
        _force(entry, "size", size)
        if draw(st.booleans()):
            _force(entry.chunks[0], "sizes", size)
    elif kind == "chunk":
        _force(entry.chunks[0], pick(draw, ["offsets", "sizes"]), junk)
    elif kind == "dtype":
        field = pick(draw, ["dtype", "layout", "requires_grad", "memory_format", "pin_memory"])
        _force(entry.properties, field, junk)
    else:
        entry.chunks.extend(entry.chunks * pick(draw, [1, 3000]))


def _force(found: Any, field: str, value: object) -> None:
    """Sets a field, also of a frozen object."""
    object.__setattr__(found, field, value)


# Archives: what torch.save writes.


def archive(draw: st.DrawFn, content: bytes) -> bytes:
    """A zip file whose parts have been changed and packed again, with checksums that fit."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as source:
            parts = {info.filename: source.read(info) for info in source.infolist()}
    except (zipfile.BadZipFile, NotImplementedError, zlib.error):
        return content
    name = draw(st.sampled_from(sorted(parts)))
    kinds = ["part", "part", "program", "remove", "name", "deflate", "bomb", "twice", "endian"]
    kind = pick(draw, kinds)
    stored = zipfile.ZIP_STORED
    pickled = next((each for each in parts if each.endswith("data.pkl")), name)
    if kind == "part":
        parts[name] = damaged(draw, parts[name])
    elif kind == "program":
        parts[pickled] = program(draw, parts[pickled])
    elif kind == "remove":
        del parts[name]
    elif kind == "name":
        other = pick(draw, ["../x", "/etc/passwd", "archive/../data.pkl", "x" * 5000])
        parts[other] = parts.pop(name)
    elif kind == "deflate":
        stored = zipfile.ZIP_DEFLATED
    elif kind == "bomb":
        parts[name], stored = bytes(1 << 24), zipfile.ZIP_DEFLATED
    elif kind == "endian":
        parts.pop(pickled.replace("data.pkl", "byteorder"), None)
        order = pickled.replace("data.pkl", pick(draw, ["byteorder", "BYTEORDER"]))
        parts[order] = pick(draw, [b"big", b"", b"little" * 1000])
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", stored) as target:
        for each, part in parts.items():
            target.writestr(each, part)
        if kind == "twice":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that this is no good idea
                target.writestr(name, parts[pickled])
    return stream.getvalue()


def exchanged(draw: st.DrawFn, described: bytes, data: bytes) -> tuple[bytes, bytes]:
    """DCP metadata and data, where one entry is another archive at the end of the file."""
    found = pickle.loads(described)
    info = found.storage_data[pick(draw, list(found.storage_data))]
    saved = data[info.offset : info.offset + info.length]
    blob = archive(draw, saved)
    if pick(draw, [True, False, False]):
        blob = b"\x80\x02" + pick(draw, _PROGRAMS) + b"."
    info.offset, info.length = len(data), len(blob)
    return pickle.dumps(found), data + blob


# numpy's.

_ARRAYS = [
    ("|O", (1,), b"\x80\x02" + _PROGRAMS[0] + b"."),
    ("<i8", (2**40,), b""),
    ("<i8", (2**62, 4), b""),
    ("<i8", (-1,), bytes(8)),
    ("<U1000000000", (1,), b""),
    ("<f8", (3, 46, 2), bytes(8 * 3 * 46 * 2)),
    (">i8", (3, 46, 2), bytes(8 * 3 * 46 * 2)),
    ([("a", "<i8"), ("b", "|O")], (1,), bytes(16)),
]


def array(draw: st.DrawFn, content: bytes) -> bytes:
    """A numpy file with another header, or wrong numbers."""
    if draw(st.booleans()):
        # The numbers are the last part; each is plausible by itself.
        at = 128 + 8 * draw(st.integers(0, (len(content) - 128) // 8 - 1))
        number = draw(st.one_of(st.integers(-2, 50), st.sampled_from([2**31, 2**62, -(2**63)])))
        return content[:at] + number.to_bytes(8, "little", signed=True) + content[at + 8 :]
    descr, shape, data = pick(draw, _ARRAYS)
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    others = [b"(" * 5000, b"9" * 5000, b"__import__('os').system('true')"]
    header = pick(draw, [header, header, *others])
    header = header.ljust(118) + b"\n"
    version = pick(draw, [1, 2, 3, 9])
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + data


# Megatron's index of token files.


def index(draw: st.DrawFn, content: bytes) -> bytes:
    """Another length or document, with all other fields adapted: a consistent forgery."""
    head = "<9sQBQQ"
    magic, version, code, num_sequences, num_documents = struct.unpack_from(head, content)
    begin = struct.calcsize(head)
    lengths = np.frombuffer(content, "<i4", num_sequences, begin).astype(np.int64)
    documents = np.frombuffer(content, "<i8", num_documents, begin + 12 * num_sequences).copy()

    at = draw(st.integers(0, num_sequences - 1))
    kind = pick(draw, ["length", "length", "move", "document", "code", "more"])
    if kind == "length":
        lengths[at] = pick(draw, [0, 1, -1, 29, 1000, 2**31 - 1])
    elif kind == "move":  # the same number of tokens
        lengths[at - 1], lengths[at] = lengths[at - 1] + lengths[at], 0
    elif kind == "document":
        documents[at] = pick(draw, [0, 1, -1, at + 1, 2**40])
    elif kind == "code":
        code = pick(draw, [1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 255])
    else:
        extra = pick(draw, [1, 5000])
        lengths = np.append(lengths, np.full(extra, pick(draw, [0, 1, 2**31 - 1])))
        documents = np.arange(len(lengths) + 1)

    pointers = 2 * np.concatenate([[0], np.cumsum(lengths)[:-1]])
    header = struct.pack(head, magic, version, code, len(lengths), len(documents))
    parts = (lengths.astype("<i4"), pointers.astype("<i8"), documents.astype("<i8"))
    return header + b"".join(part.tobytes() for part in parts)


# Safetensors.


def safetensors(draw: st.DrawFn, content: bytes) -> bytes:
    """Another header, with a length that fits."""
    nbytes = int.from_bytes(content[:8], "little")
    if not 0 <= nbytes <= len(content):
        return content
    header = text(draw, content[8 : 8 + nbytes])
    return len(header).to_bytes(8, "little") + header + content[8 + nbytes :]
