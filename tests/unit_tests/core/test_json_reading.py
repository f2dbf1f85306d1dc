from __future__ import annotations

import json
import math

import pytest

from megatron.core.json_reading import parse_json


def test_what_json_writes_is_read_as_it_is():
    value = {"a": [1, -2.5, None, True, "é"], "b": {"": []}, "large": 2**63}
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 100_000, "more than 32 levels"),
        (b"[" * 100_000 + b"]" * 100_000, "more than 32 levels"),
        (b"[" * 33 + b"]" * 33, "more than 32 levels"),
        (b'{"a":' * 33 + b"1" + b"}" * 33, "more than 32 levels"),
        (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' twice"),
        (
            b'{"\x1b[31m": 1, "\x1b[31m": 3}'.replace(b"\x1b", b"\\u001b"),
            r"the key .*x1b\[31m' twice",
        ),
        (b"[NaN]", "NaN, which is no number"),
        (b"-Infinity", "-Infinity, which is no number"),
        (b"1e999", "the number 1e999, which is too large"),
        (b"9" * 5000, "an integer of 5000 digits"),
        (b"9" * 41, "an integer of 41 digits"),
        (b"{", "Expecting"),
        (b"", "Expecting"),
        (b"\xff\xfe\x00", "codec can't decode|Expecting"),
    ],
)
def test_what_is_not_strict_json_is_rejected_with_a_short_reason(content: bytes, reason: str):
    with pytest.raises(ValueError, match=reason) as caught:
        parse_json(content)
    assert len(str(caught.value)) < 200
    assert str(caught.value).isprintable()


def test_as_many_levels_as_are_allowed_are_read():
    assert parse_json(b"[" * 32 + b"]" * 32)
    assert parse_json(b"[" * 5 + b"1" + b"]" * 5, max_depth=5) == [[[[[1]]]]]


def test_numbers_that_are_none_are_read_where_they_are_allowed():
    value = parse_json('{"loss": NaN, "best": Infinity}', allow_nan=True)
    assert math.isnan(value["loss"])
    assert value["best"] == math.inf
