"""Changes to the bytes of a file: damage, as disks and crashes do it, and other words in a text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


def pick(draw: st.DrawFn, choices: Sequence[T]) -> T:
    """One of several; an entry listed twice is chosen twice as often."""
    return draw(st.sampled_from(choices))


_INTEGERS = [
    *(0, 1, 2, 7, 8, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1),
    *(2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
]
_LENGTHS = st.one_of(st.integers(0, 16), st.integers(0, 5000))


def _edited(draw: st.DrawFn, content: bytes) -> bytes:
    """One change of a few bytes or a range."""
    size = len(content)
    at = draw(st.integers(0, max(0, size - 1)))
    # Headers and ends of files matter more than the bytes between them.
    at = pick(draw, [at, at % 64, max(0, size - 1 - at % 256)])
    length = min(draw(_LENGTHS), size - at)
    kind = pick(
        draw,
        ["bit", "byte", "integer", "integer", "cut", "grow", "remove", "repeat", "swap", "zeros"],
    )
    head, middle, tail = content[:at], content[at : at + length], content[at + length :]

    if kind == "bit" and size:
        return head + bytes([content[at] ^ 1 << draw(st.integers(0, 7))]) + content[at + 1 :]
    if kind == "byte" and size:
        return head + draw(st.binary(min_size=1, max_size=8)) + content[at + 1 :]
    if kind == "integer":
        width, order = pick(draw, [1, 2, 4, 8]), pick(draw, ["little", "big"])
        number = pick(draw, _INTEGERS) & (1 << 8 * width) - 1
        return head + number.to_bytes(width, order) + content[at + width :]
    if kind == "cut":
        return head
    if kind == "grow":
        return content + pick(draw, [b"\0", b"\0" * 4096, content, b"\n", b"{}"])
    if kind == "remove":
        return head + tail
    if kind == "repeat":
        return head + middle * pick(draw, [2, 3, 100]) + tail
    if kind == "swap":
        return head + tail[:length] + middle + tail[length:]
    return head + bytes(length) + tail


def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """One to three such changes."""
    for _ in range(pick(draw, [1, 1, 1, 2, 3])):
        content = _edited(draw, content)
    return content


# Text of numbers and words, such as JSON.

_VALUES = [
    *("null", "true", "false", '""', "[]", "{}", "0", "-1", "1", "2", "3", "7", "0.5", "-0.0"),
    *("NaN", "-Infinity", "1e400", "1e-400", "1e15", '"1"', '"nan"', '"float64"', '"int8"'),
    *(str(number) for number in (2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**39, 10**300)),
    *("9" * 5000, "-" + "9" * 5000, '"' + "x" * 5000 + '"', '"\\u0000"', '"\\ud800"'),
    *('"\\u001b[31m\\nERROR: \\u202e"', '"../../../../etc/passwd"', '"/dev/zero"'),
    *('{"a": 1, "a": 2}', '{"": null}', "[[[[[]]]]]", "[1, [2, [3]]]", '["a", 1]', '{"a": {}}'),
    *("[" * 30 + "]" * 30, "[" * 200 + "]" * 200, "[" * 100_000 + "]" * 100_000),
    *('{"a":' * 50_000 + "1" + "}" * 50_000, "[" + "0," * 20_000 + "0]"),
]
_NO_VALUES = ["2026-11-22", "010", "1_0", "0x10", "'", "\\", "", ",", ":", "\n", "\u0661\u0662"]
# A string that a colon follows is a key: it is matched as one with its colon, and left out.
_VALUE = re.compile(
    rb'"(?:[^"\\]|\\.)*"(?:\s*:)?'
    rb"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
    rb"|\b(?:true|false|null)\b|\[[^\[\]{}]*\]|{[^\[\]{}]*}"
)
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}:,\n]')


def text(draw: st.DrawFn, content: bytes) -> bytes:
    """Another value in a value's place, mostly; or another word or sign in that of one."""
    if pick(draw, [False] * 9 + [True]):
        return pick(draw, [*_VALUES, *_NO_VALUES]).encode()

    for _ in range(pick(draw, [1, 1, 1, 2, 3])):
        kind = pick(draw, ["value"] * 6 + ["move", "wrap", "token"])
        found = (_TOKEN if kind == "token" else _VALUE).finditer(content)
        spans = [each.span() for each in found if not each[0].endswith(b":") or kind == "token"]
        if not spans:
            return content
        begin, end = pick(draw, spans)
        if kind == "value":
            new = pick(draw, _VALUES).encode()
        elif kind == "move":
            other_begin, other_end = pick(draw, spans)
            new = content[other_begin:other_end]
        elif kind == "wrap":
            new = b"[" + content[begin:end] + b"]"
        else:
            new = pick(draw, [b'"a"', *(each.encode() for each in _NO_VALUES)])
        content = content[:begin] + new + content[end:]
    return content


_YAML = [
    "a: &a [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n or ''}, *a{n or ''}]\n" for n in range(33)),
    "lr: &x\n  - *x\n",
    "lr: " + "[" * 3000 + "]" * 3000 + "\n",
    "lr: !!python/object/apply:os.system ['true']\n",
    "!!python/object/apply:os.mkdir ['canary']\n",
    *("lr: !!timestamp 2026-11-22\n", "lr: !!binary aGVsbG8=\n", "<<: {lr: 1}\n", "lr: .nan\n"),
    *("train-iters: 017\n", "train-iters: 0x1F\n", "train-iters: 1_000\n", "lr: 1:30\n"),
    *("? [a, b]\n: 1\n", "? " * 500 + "\n", "%YAML 9.9\n---\nlr: 1\n", "lr: 1\n---\nlr: 2\n"),
    *('lr: "\\x1b[31m"\n', "lr: \ufeff1\n", "load: ''\n", "load: 'memory://x'\n", 'load: "\\0"\n'),
    "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    "lr: " + "1" * 2_000_000 + "\n",
    *(f"{name}: {2**70}\n" for name in ("train-iters", "seq-length", "global-batch-size")),
    f"num-layers: {10**12}\nhidden-size: {10**12}\n",
    f"rampup-batch-size: [1, 1, {10**15}]\n",
    "data-path: [" + "1, x, " * 2000 + "]\nmock-data: false\n",
    "tokenizer-model: /dev/zero\ntokenizer-type: HuggingFaceTokenizer\n",
]


def yaml(draw: st.DrawFn, content: bytes) -> bytes:
    """A line is another, which YAML makes more of than a text."""
    lines = content.splitlines(keepends=True)
    at = draw(st.integers(0, len(lines)))
    new = pick(draw, _YAML).encode("utf-8", "surrogatepass")
    kind = pick(draw, ["insert", "replace", "alone", "value"])
    if kind == "alone":
        return new
    if kind == "value" and b": " in new:
        # What follows the first colon, under a key of the file.
        key = lines[at % len(lines)].partition(b":")[0]
        new = key + b": " + new.partition(b": ")[2]
    lines[at : at + (kind != "insert")] = [new]
    return b"".join(lines)
