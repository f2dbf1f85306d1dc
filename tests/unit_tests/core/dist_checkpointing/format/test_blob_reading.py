"""The reader of torch.save's archives, with good and damaged ones."""

from __future__ import annotations

import functools
import io
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.blob_reading import read_archive, read_plain
from tests.helpers.checkpoints import raw_bytes

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int8, torch.uint16, torch.bool),
]


def saved(value: object, **how: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **how)
    return stream.getvalue()


def memory_of(content: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if content
        else torch.empty(0, dtype=torch.uint8)
    )


def read(content: bytes, *, checks_crc: bool = True) -> Any:
    return read_plain(memory_of(content), "here", checks_crc=checks_crc)


def assert_same(got: object, expected: object) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        assert (got.dtype, got.shape, raw_bytes(got)) == (
            expected.dtype,
            expected.shape,
            raw_bytes(expected),
        )
    elif isinstance(expected, dict):
        assert isinstance(got, dict)
        assert list(got) == list(expected)
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert type(got) is type(expected)
        for mine, other in zip(got, expected, strict=True):
            assert_same(mine, other)
    else:
        assert (type(got), got) == (type(expected), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_are_read_bit_equal(dtype):
    whole = torch.arange(60).to(dtype).reshape(5, 3, 4)
    tensors = [
        whole,
        whole[1:, ::2].transpose(0, 2),
        whole[2, 1, 3],
        whole[:0],
        torch.ones(1).to(dtype).expand(6),
    ]
    for tensor in tensors:
        content = saved(tensor)
        expected = torch.load(io.BytesIO(content), weights_only=False)
        assert_same(read(content), expected)
        view = read_archive(memory_of(content), "here")
        assert_same(view, expected)
        assert view.stride() == expected.stride()


def test_state_dicts_parameters_and_plain_data_are_read():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    marked = nn.Parameter(torch.ones(2))
    marked.tensor_model_parallel = True  # as other projects mark theirs
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    value = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "marked": marked,
        "plain": OrderedDict(a=[1, 2.5, None, True, "é", (1, (2,))], b=-(2**100)),
        "types": [torch.bfloat16, torch.Size((3, 4))],
    }
    expected = {
        **value,
        "model": dict(value["model"]),
        "marked": marked.detach(),
        "plain": dict(value["plain"]),
    }
    assert_same(read(saved(value)), expected)


def test_a_shared_tensor_is_read_once_into_separate_memory():
    tensor = torch.arange(4.0)
    got = read(saved([tensor, {"again": tensor}, tensor[1:]]))
    assert got[0] is got[1]["again"]
    assert got[0].untyped_storage().nbytes() == 16
    assert_same(got[2], tensor[1:])


@settings(max_examples=60, deadline=None)
@given(st.integers(0), st.integers(1, 255))
def test_an_altered_byte_is_found_or_does_not_matter(place, change):
    value = {"t": torch.arange(20.0), "lr": 0.125, "names": ["a", "b"]}
    content = bytearray(saved(value))
    content[place % len(content)] ^= change
    try:
        got = read(bytes(content))
    except CheckpointError as error:
        assert "here" in str(error)  # noqa: PT017  it may as well not be raised
    else:
        assert_same(got, value)


def test_each_tensor_is_the_one_that_the_pickle_names_wherever_its_record_is():
    value = {name: torch.arange(12.0) + 100 * i for i, name in enumerate("abcd")}
    records = records_of(saved(value))
    names = list(records)
    first, second = names.index("archive/data/1"), names.index("archive/data/2")
    names[first], names[second] = names[second], names[first]

    stream = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(stream)
    for name in names:
        if name not in ("archive/version", "archive/.data/serialization_id"):  # written by itself
            content = records[name]
            writer.write_record(name.removeprefix("archive/"), content, len(content))
    writer.write_end_of_file()
    exchanged = stream.getvalue()
    assert exchanged.index(records["archive/data/2"]) < exchanged.index(records["archive/data/1"])

    for content in (exchanged, archive(records)):
        assert_same(torch.load(io.BytesIO(content), weights_only=True), value)
        assert_same(read(content), value)
        assert_same(read_archive(memory_of(content), "here"), value)


# Damaged archives, and archives of other objects.


def archive(records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as target:
        for name, content in records.items():
            target.writestr(name, content)
    return stream.getvalue()


def records_of(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as source:
        return {entry.filename: source.read(entry) for entry in source.infolist()}


def changed(value: object, old: bytes, new: bytes) -> bytes:
    """An archive in whose pickle something has been replaced."""
    records = records_of(saved(value))
    assert records["archive/data.pkl"].count(old) >= 1
    return archive(records | {"archive/data.pkl": records["archive/data.pkl"].replace(old, new)})


def without(name: str) -> bytes:
    records = records_of(saved(torch.ones(4)))
    return archive({key: content for key, content in records.items() if key != name})


def _append(content: bytes, name: str) -> bytes:
    stream = io.BytesIO(content)
    with zipfile.ZipFile(stream, "a") as target:
        target.writestr(name, b"")
    return stream.getvalue()


ONES = torch.ones(4)
GRID = torch.ones(2, 2)
HUGE = b"\x8a\x08" + (2**62).to_bytes(8, "little")  # an integer
# Damaged archives, and archives with other content.
DAMAGED: dict[str, Callable[[], bytes]] = {
    "a storage of 4 EiB": lambda: changed(ONES, b"K\x04t", HUGE + b"t"),
    "a shape of 4 EiB": lambda: changed(ONES, b"K\x04\x85", HUGE + b"\x85"),
    "a stride beyond": lambda: changed(GRID, b"K\x02K\x01\x86", HUGE + b"K\x01\x86"),
    "an offset beyond": lambda: changed(ONES, b"QK\x00K\x04", b"QK\x01K\x04"),
    "a string for a shape": lambda: changed(ONES, b"K\x04\x85", b"X\x01\x00\x00\x00a\x85"),
    "another record": lambda: changed(ONES, b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x007"),
    "no pickle": lambda: without("archive/data.pkl"),
    "no data": lambda: without("archive/data/0"),
    "compressed records": lambda: archive(records_of(saved(ONES)), zipfile.ZIP_DEFLATED),
    "another order of bytes": lambda: archive(
        records_of(saved(ONES)) | {"archive/byteorder": b"big"}
    ),
    "a name twice": lambda: _append(saved(ONES), "archive/DATA/0"),
    "two pickles": lambda: _append(saved(ONES), "other/data.pkl"),
    "an archive behind other bytes": lambda: b"\x80\x02N." + saved(ONES),
    "a raw pickle": lambda: b"\x80\x02N.",
    "the format before 1.6": lambda: saved(ONES, _use_new_zipfile_serialization=False),
    "2 ** 40 values": lambda: saved(functools.reduce(lambda x, _: [x, x], range(40), [])),
    "a list in itself": lambda: changed(["x"], b"X\x01\x00\x00\x00xq\x01", b"h\x00"),
}
REFUSED: dict[str, Callable[[], bytes]] = {
    "a storage": lambda: saved([ONES.untyped_storage()]),
    "a conjugate view": lambda: saved(torch.ones(2, dtype=torch.complex64).conj()),
    "a sparse tensor": lambda: saved(ONES.to_sparse()),
    "a set": lambda: saved({1}),
    "a class": lambda: saved(nn.Linear),
    "a tensor without data": lambda: saved(torch.empty(2, device="meta")),
    "a TorchScript archive": lambda: archive(
        records_of(saved(ONES)) | {"archive/constants.pkl": b""}, zipfile.ZIP_DEFLATED
    ),
    "a quantized tensor": lambda: saved(torch.quantize_per_tensor(ONES, 0.5, 0, torch.qint8)),
}


@pytest.mark.parametrize("checks_crc", [True, False])
@pytest.mark.parametrize("name", [*DAMAGED, *REFUSED])
def test_a_damaged_or_foreign_archive_is_one_error(name, checks_crc):
    with warnings.catch_warnings(action="ignore"):  # of deprecated kinds of tensors
        content = (DAMAGED | REFUSED)[name]()
    with pytest.raises(CheckpointError, match="here") as caught:
        read(content, checks_crc=checks_crc)
    assert isinstance(caught.value, CheckpointDamagedError) == (name in DAMAGED)
    assert str(caught.value).isprintable()


class Called:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[[int], object]) -> None:
        self.function = function

    def __reduce__(self) -> tuple[Callable[[int], object], tuple[int]]:
        return self.function, (1,)


CALLS: list[int] = []


def note_call(number: int) -> None:
    CALLS.append(number)


def test_an_error_about_an_archive_does_not_show_what_it_was_read_with():
    with pytest.raises(CheckpointError) as caught:
        read(b"no archive")
    assert caught.value.__suppress_context__


def test_functions_that_a_program_has_added_to_the_safe_globals_are_not_called():
    content = saved({"a": ONES, "b": Called(note_call)})
    with torch.serialization.safe_globals([note_call]):
        with pytest.raises(CheckpointError, match=r"in here, got .*note_call") as caught:
            read(content)
        assert not isinstance(caught.value, CheckpointDamagedError)
        assert not CALLS
        torch.load(io.BytesIO(content), weights_only=True)
    assert CALLS == [1]


@pytest.mark.parametrize("where", ["data/0", "data.pkl", "version"])
def test_a_record_with_another_checksum_is_found_in_data_only_on_request(where):
    content = bytearray(saved(torch.arange(1000, 1004)))
    record = records_of(bytes(content))[f"archive/{where}"]
    place = bytes(content).index(record)
    if where == "data.pkl":
        content[place + record.index(b"cpu")] ^= 1  # a device, which is not looked at
    else:
        content[place] ^= 1
    with pytest.raises(CheckpointDamagedError, match=rf"CRC-32 .* of 'archive/{where}' in here"):
        read(bytes(content))
    if where == "data/0":
        assert isinstance(read(bytes(content), checks_crc=False), torch.Tensor)
    else:
        with pytest.raises(CheckpointDamagedError, match="CRC-32"):
            read(bytes(content), checks_crc=False)


def test_tensors_are_views_of_the_memory_and_copies_in_plain_data():
    content = memory_of(saved({"a": torch.arange(4.0), "b": torch.ones(2, 3).t()}))
    storage = content.untyped_storage().data_ptr()
    views, copies = read_archive(content, "here"), read_plain(content, "here")
    for key in ("a", "b"):
        assert views[key].untyped_storage().data_ptr() == storage
        assert copies[key].untyped_storage().nbytes() == copies[key].nbytes
    views["a"].fill_(7.0)
    assert torch.equal(read_archive(content, "here", checks_crc=False)["a"], torch.full((4,), 7.0))


def test_a_tensor_that_is_not_aligned_in_its_file_is_read():
    content = saved(torch.arange(4.0))
    for shift in range(1, 5):
        memory = torch.cat([torch.zeros(shift, dtype=torch.uint8), memory_of(content)])[shift:]
        assert_same(read_archive(memory, "here"), torch.arange(4.0))
