"""What torch.save writes, and what only looks like it."""

from __future__ import annotations

import io
import tracemalloc
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
from megatron.core.dist_checkpointing.format.archive_directory import (
    MAX_BLOB_DIRECTORY_BYTES,
)
from megatron.core.dist_checkpointing.format.blob_reading import (
    Archive,
    open_memory,
    read_plain,
)
from tests.helpers.checkpoints import raw_bytes

DTYPES = [
    *(
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.bool, torch.complex64, torch.complex128),
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


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_are_read_bit_equal(dtype, protocol):
    whole = torch.arange(60).to(dtype).reshape(5, 3, 4)
    tensors = [
        whole,
        whole[1:, ::2].transpose(0, 2),
        whole[2, 1, 3],
        whole[:0],
        torch.ones(1).to(dtype).expand(6),
    ]
    for tensor in tensors:
        content = saved(tensor, pickle_protocol=protocol)
        expected = torch.load(io.BytesIO(content), weights_only=False)
        assert_same(read(content), expected)
        memory = memory_of(content)
        assert_same(open_memory(memory, "here", checks_crc=True).value.tensor(memory), expected)


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


def test_a_tensor_that_stands_in_two_places_is_one_and_its_memory_is_its_own():
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


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_truncated_archive_is_damaged(data):
    content = saved({"t": torch.arange(20.0)})
    with pytest.raises(CheckpointDamagedError, match="here"):
        read(content[: data.draw(st.integers(0, len(content) - 1))])


# Archives that announce what they do not have.


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


def twice(name: str) -> bytes:
    with pytest.warns(UserWarning, match="Duplicate"):
        return _append(saved(torch.ones(4)), name)


def _append(content: bytes, name: str) -> bytes:
    stream = io.BytesIO(content)
    with zipfile.ZipFile(stream, "a") as target:
        target.writestr(name, b"")
    return stream.getvalue()


ONES = torch.ones(4)
GRID = torch.ones(2, 2)
HUGE = b"\x8a\x08" + (2**62).to_bytes(8, "little")  # an integer
FORGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "a storage of 4 EiB": (
        lambda: changed(ONES, b"K\x04t", HUGE + b"t"),
        "a record '0' of .* bytes",
    ),
    "a storage of -1": (
        lambda: changed(ONES, b"K\x04t", b"J\xff\xff\xff\xfft"),
        "a record '0' of -4 bytes",
    ),
    "a shape of 4 EiB": (
        lambda: changed(ONES, b"K\x04\x85", HUGE + b"\x85"),
        "a tensor within the 16 bytes",
    ),
    "a stride beyond": (
        lambda: changed(GRID, b"K\x02K\x01\x86", HUGE + b"K\x01\x86"),
        "a tensor within the 16 bytes",
    ),
    "a negative stride": (
        lambda: changed(ONES, b"K\x01\x85", b"J\xff\xff\xff\xff\x85"),
        "at least 0",
    ),
    "an offset beyond": (
        lambda: changed(ONES, b"QK\x00K\x04", b"QK\x01K\x04"),
        "a tensor within the 16 bytes",
    ),
    "4 EiB that are one element": (
        lambda: changed(
            torch.ones(1).expand(4),
            b"K\x04\x85",
            b"\x8a\x08" + (2**60).to_bytes(8, "little") + b"\x85",
        ),
        "tensors of at most 67108864 bytes",
    ),
    "a string for a shape": (
        lambda: changed(ONES, b"K\x04\x85", b"X\x01\x00\x00\x00a\x85"),
        "at least 0",
    ),
    "another record": (
        lambda: changed(ONES, b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x007"),
        "a record '7'",
    ),
    "another folder": (
        lambda: changed(ONES, b"X\x01\x00\x00\x000", b"X\x04\x00\x00\x00../x"),
        "a record '../x'",
    ),
    "no pickle": (lambda: without("archive/data.pkl"), "0 records data.pkl"),
    "no data": (lambda: without("archive/data/0"), "a record '0' of 16 bytes.*none of that name"),
    "a record twice": (lambda: twice("archive/data/0"), "each record once"),
    "compressed records": (
        lambda: archive(records_of(saved(ONES)), zipfile.ZIP_DEFLATED),
        "as it is",
    ),
    "another order of bytes": (
        lambda: archive(records_of(saved(ONES)) | {"archive/byteorder": b"big"}),
        "low bytes",
    ),
    "two pickles": (lambda: _append(saved(ONES), "other/data.pkl"), "2 records data.pkl"),
    "a raw pickle": (lambda: b"\x80\x02N.", "no archive"),
    "the format before 1.6": (
        lambda: saved(ONES, _use_new_zipfile_serialization=False),
        "no archive .*_use_new_zipfile_serialization=False: load it with torch.load and save it "
        "again",
    ),
    "a name of 2000 characters": (
        lambda: _append(saved(ONES), "x" * 2000),
        "names of at most 1024",
    ),
    "a storage": (lambda: saved([ONES.untyped_storage()]), "plain data .* got a _Storage"),
    "a conjugate view": (
        lambda: saved(torch.ones(2, dtype=torch.complex64).conj()),
        "without conjugation",
    ),
    "a sparse tensor": (lambda: saved(ONES.to_sparse()), "nothing but tensors and plain data"),
    "a set": (lambda: saved({1}), "nothing but tensors and plain data"),
}


@pytest.mark.parametrize("name", FORGED)
def test_what_an_archive_announces_and_does_not_have_is_one_error(name):
    make, message = FORGED[name]
    content = make()
    for checks_crc in (True, False):
        with pytest.raises(CheckpointError, match=f"Expected .*{message}"):
            read(content, checks_crc=checks_crc)


def test_records_over_the_same_bytes_are_not_read_a_million_times():
    content = bytearray(archive({f"archive/{number}": b"x" * 1000 for number in range(3)}))
    end = content.rindex(b"PK\x05\x06")
    size, begin = (int.from_bytes(content[end + at : end + at + 4], "little") for at in (12, 16))
    directory = content[begin : begin + size]
    # Three entries of which each is the record of the first, and each as long as all together.
    for number in range(3):
        at = number * (size // 3)
        directory[at + 20 : at + 28] = (2 * (3000).to_bytes(4, "little"))[:8]
        directory[at + 42 : at + 46] = bytes(4)
    content[begin : begin + size] = directory
    with pytest.raises(
        CheckpointDamagedError, match=r"Expected (records of \d+ bytes together|what torch.save)"
    ):
        read(bytes(content))


def test_bytes_behind_the_archive_are_not_read():
    content, ends = saved(ONES), []
    stream = io.BytesIO(content + b"behind")

    def read_at(begin: int, nbytes: int) -> bytes:
        stream.seek(begin)
        ends.append(begin + nbytes)
        return stream.read(nbytes)

    archive = Archive(read_at, len(content), "here", checks_crc=True)
    archive.check_memory(memory_of(content))
    assert max(ends) <= len(content)
    assert_same(archive.value.tensor(memory_of(content)), ONES)


@pytest.mark.parametrize("where", ["data/0", "data.pkl", "version"])
def test_a_record_with_another_checksum_is_found_where_checksums_are_asked_for(where):
    content = bytearray(saved(torch.arange(1000, 1004)))
    record = records_of(bytes(content))[f"archive/{where}"]
    place = bytes(content).index(record)
    if where == "data.pkl":
        content[place + record.index(b"cpu")] ^= 1  # a device, which is not looked at
    else:
        content[place] ^= 1
    with pytest.raises(
        CheckpointDamagedError, match=rf"CRC-32 .* of the record 'archive/{where}' in here"
    ):
        read(bytes(content))
    assert isinstance(read(bytes(content), checks_crc=False), torch.Tensor)


def test_a_large_directory_is_refused_before_zipfile_makes_an_object_of_each_entry():
    entry = b"PK\x01\x02" + bytes(24) + (6).to_bytes(2, "little") + bytes(16)
    count = MAX_BLOB_DIRECTORY_BYTES // (len(entry) + 6) + 1
    directory = b"".join(entry + b"%06x" % number for number in range(count))
    end = b"PK\x05\x06" + bytes(4) + (count & 0xFFFF).to_bytes(2, "little") * 2
    end += len(directory).to_bytes(4, "little") + bytes(6)
    memory = memory_of(directory + end)

    tracemalloc.start()
    with pytest.raises(
        CheckpointDamagedError, match="Expected a directory of at most 1048576 bytes in here, got"
    ):
        open_memory(memory, "here", checks_crc=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20

    # The directory of a file may be larger.
    content = directory + end
    with pytest.raises(CheckpointDamagedError, match="Expected the record '000000' within"):
        Archive(lambda at, n: content[at : at + n], len(content), "here", checks_crc=False)


def test_a_recalled_tuple_of_arguments_is_bounded():
    content = changed(
        nn.Parameter(ONES),
        b"ctorch._utils\n_rebuild_parameter\n",
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_parameter\nctorch\nTensor\n("
        + b"N" * 17
        + b"tNtR.",
    )
    with pytest.raises(CheckpointDamagedError, match="Expected at most 16 arguments, got 17"):
        read(content)
