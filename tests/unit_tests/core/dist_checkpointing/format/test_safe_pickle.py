"""Pickles that are bombs or programs, and those that are neither."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.safe_pickle import Call, expect_tree, read_pickle

LEAVES = (str, int, float, bool, type(None))


def walk(content: bytes, value: object) -> None:
    expect_tree(value, len(content), LEAVES, "here")


def read(content: bytes, **admitted: Any) -> object:
    return read_pickle(
        content, "here", {("names", name): value for name, value in admitted.items()}, "names"
    )


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**127), 2**127 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.tuples(inner, inner, inner, inner)
        | st.dictionaries(scalars | st.tuples(scalars, scalars), inner, max_size=3)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(values, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_plain_data_is_read_as_pickle_reads_it(value, protocol):
    content = pickle.dumps(value, protocol)
    got = read(content)
    assert repr(got) == repr(pickle.loads(content))
    walk(content, got)


@settings(max_examples=150, deadline=None)
@given(values, st.integers(0), st.integers(1, 255))
def test_altered_bytes_end_in_a_value_or_a_checkpoint_error(value, place, change):
    content = bytearray(pickle.dumps(value))
    content[place % len(content)] ^= change
    try:
        walk(bytes(content), read(bytes(content)))
    except CheckpointError as error:
        assert str(error).isprintable()  # noqa: PT017  a value is as good
        assert len(str(error)) < 1000  # noqa: PT017


def doublings(count: int, join: bytes) -> bytes:
    """A tuple of a tuple twice, of a tuple twice, and so on: 2 ** count values in 5 * count
    bytes.
    """
    return b")" + b"".join(b"q%ch%c" % (i, i) + join for i in range(count))


PROTO = b"\x80\x04"
LARGE_MEMO = PROTO + b"Nr" + struct.pack("<I", 2**32 - 1) + b"."
BOMBS = {
    "a string of eight exabytes": PROTO + b"\x8d" + struct.pack("<Q", 2**63 - 1) + b".",
    "bytes of a terabyte": PROTO + b"\x8e" + struct.pack("<Q", 2**40) + b".",
    "an array of a terabyte": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
    "a frame of eight exabytes": PROTO + b"\x95" + struct.pack("<Q", 2**63 - 1) + b"N.",
    "an integer of two gigabytes": PROTO + b"\x8b" + struct.pack("<I", 2**31 - 1) + b".",
    "an integer of 255 bytes": PROTO + b"\x8a\xff" + b"\x01" * 255 + b".",
    "an integer of a million digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "a long of 5000 digits": b"L" + b"9" * 5000 + b"L\n.",
    "a key that is 2 ** 60 tuples": PROTO + b"}" + doublings(60, b"\x86") + b"Ns.",
    "a key that is 100000 tuples deep": PROTO + b"}" + b")" + b"\x85" * 100_000 + b"Ns.",
    "an argument that is 100000 tuples deep": PROTO
    + b"cnames\nlook\n)"
    + b"\x85" * 100_000
    + b"R.",
    "a value that is 2 ** 60 tuples": PROTO + doublings(60, b"\x86") + b".",
    "a value that is 2 ** 60 lists": PROTO
    + b"]"
    + b"".join(b"q%c](h%ch%ce" % (i, i, i) for i in range(60))
    + b".",
    "a list in itself": PROTO + b"]q\x00h\x00a.",
    "a value that is 100000 lists deep": PROTO + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a hundred thousand marks": PROTO + b"(" * 100_000 + b".",
    "another protocol": b"\x80\x06N.",
    "an extension": PROTO + b"\x82\x01.",
    "a set": PROTO + b"\x8f(" + b"K\x01" + b"\x90.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_one_error_and_takes_no_memory(name):
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointDamagedError, match="here") as caught:
            walk(BOMBS[name], read(BOMBS[name], look=Call(lambda value: {}[value])))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 300e6
    assert len(str(caught.value)) < 1000


def test_a_memo_of_four_billion_places_takes_no_memory_here_and_64_gigabytes_elsewhere():
    tracemalloc.start()
    try:
        assert read(LARGE_MEMO) is None
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
    assert _outcome_in_a_child(LARGE_MEMO) == "MemoryError"
    assert _outcome_in_a_child(LARGE_MEMO.replace(b"\xff" * 4, b"\x03\x00\x00\x00")) == ""


_CHILD = """
import pickle, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    pickle.loads(bytes.fromhex(sys.argv[1]))
except MemoryError as error:
    print("MemoryError")
"""


def _outcome_in_a_child(content: bytes) -> str:
    """What Python's own unpickler does, with a gigabyte of memory."""
    command = [sys.executable, "-c", _CHILD, content.hex()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Reduced:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize(
    "function", [os.system, eval, print, exec, getattr, pickle.loads, OrderedDict]
)
def test_what_is_not_listed_is_refused_by_name(function, protocol):
    content = pickle.dumps(Reduced(function, ("x",)), protocol)
    with pytest.raises(CheckpointError, match="Expected nothing but names in here, got ") as caught:
        read(content, system=Call(os.mkdir))
    assert not isinstance(caught.value, CheckpointDamagedError)


def test_only_what_is_a_call_can_be_called_and_only_a_record_has_state():
    for opcodes in (
        b"cnames\nvalue\n)R.",
        b"cnames\nvalue\n}b.",
        b"cnames\nvalue\n)\x81.",
        b"cnames\ncall\n}b.",
        b"]Nb.",
    ):
        with pytest.raises(CheckpointDamagedError, match="here"):
            read(b"\x80\x02" + opcodes, value=int, call=Call(int))
    assert read(b"\x80\x02cnames\ncall\n)R.", call=Call(int)) == 0


def test_names_in_messages_are_bounded_and_printable():
    name = "\x1b[31m\n" * 10_000
    content = b"\x80\x04" + pickle.dumps(name, 4)[2:-1] * 2 + b"\x93."
    with pytest.raises(CheckpointError) as caught:
        read(content)
    assert len(str(caught.value)) <= 4000
    assert str(caught.value).isprintable()


# What a pickle recalls in two bytes, however long it is.


def with_recalled(spelled: bytes, use: bytes, count: int) -> bytes:
    """Spells something as number 0 of the memo and uses it many times."""
    return b"\x80\x04" + spelled + b"q\x000" + use * count + b"N."


LONG_TUPLE = b"(" + b"N" * 50_000 + b"t"


@pytest.mark.parametrize(
    "use",
    [
        b"}h\x00Ns0",  # as a key, whose hash takes as long as it is
        b"cnames\nf\nh\x00R0",  # as the arguments of a call
    ],
)
def test_a_long_tuple_cannot_be_walked_again_and_again(use):
    calls = []
    function = Call(lambda *args: calls.append(len(args)))
    with pytest.raises(CheckpointDamagedError, match="Expected at most"):
        read(with_recalled(LONG_TUPLE, use, 1000), f=function)
    assert calls == []


def test_short_keys_and_arguments_may_be_recalled_often():
    function = Call(lambda *args: len(args))
    assert read(with_recalled(b"(NNNt", b"}h\x00Ns0cnames\nf\nh\x00R0", 1000), f=function) is None


def test_a_dict_with_a_long_key_cannot_be_copied_again_and_again():
    value = [{(0,) * 50_000: 1}] * 1000
    content = pickle.dumps(value)
    with pytest.raises(
        CheckpointDamagedError, match=r"Expected at most \d+ values in here, got more"
    ):
        walk(content, read(content))


def test_equal_long_strings_are_one_object_so_that_comparing_them_takes_no_time():
    text = "k" * 1000
    content = pickle.dumps([text, "".join(["k"] * 1000)])
    assert content.count(text.encode()) == 2
    first, second = read(content)
    assert first is second
