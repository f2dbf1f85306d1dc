from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.manifest import (
    BLOCK_BYTES,
    DATA_ALIGNMENT,
    ChunkRecord,
    FileRecord,
    Manifest,
    Marker,
    data_file,
    digest,
    digests_of,
    dtype_name,
    dtype_named,
    files_of,
    num_blocks,
)

KEYS = st.text(min_size=1, max_size=12)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Manifests of tensors of different sizes, scalars and plain data, laid out as a writer
    would.
    """
    records, end = [], 0
    for key in draw(st.lists(KEYS, max_size=5)):
        if draw(st.booleans()):
            sizes = tuple(draw(st.lists(st.integers(1, 400), max_size=3)))
            dtype = draw(st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "bool"]))
            data_nbytes = torch.Size(sizes).numel() * dtype_named(dtype).itemsize
            data_offset = -(-(end + draw(st.integers(64, 512))) // DATA_ALIGNMENT) * DATA_ALIGNMENT
            begin = data_offset - 64
            blob_nbytes = 64 + data_nbytes + 100
        else:
            sizes, dtype, data_nbytes = (), "", draw(st.integers(0, 3 * BLOCK_BYTES))
            begin = data_offset = end
            blob_nbytes = data_nbytes
        digests = tuple(digest(str(number).encode()) for number in range(num_blocks(data_nbytes)))
        offsets = tuple(draw(st.integers(0, 1 << 40)) for _ in sizes)
        records.append(
            ChunkRecord(
                key, dtype, offsets, sizes, begin, blob_nbytes, data_offset, data_nbytes, digests
            )
        )
        end = begin + blob_nbytes
    rank = draw(st.integers(0, 5000))
    return Manifest(draw(KEYS), rank, data_file(rank), end, tuple(records))


def marker(world_size: int = 2) -> Marker:
    files = {
        name: FileRecord(7, None if name.endswith(".distcp") else digest(name.encode()))
        for name in files_of(world_size)
    }
    return Marker("an id", 10, world_size, files)


@given(manifests())
def test_a_manifest_is_read_as_it_was_written(manifest: Manifest):
    content = manifest.to_bytes()
    assert Manifest.from_bytes(content, "here") == manifest
    assert Manifest.from_bytes(content, "here").to_bytes() == content
    assert content.count(b"\n") == len(manifest.chunks) + 2


def test_a_marker_is_read_as_it_was_written_whatever_the_order_of_its_files():
    written = marker(3)
    assert Marker.from_bytes(written.to_bytes(), "here") == written
    turned = dataclasses.replace(written, files=dict(reversed(written.files.items())))
    assert list(turned.files) != list(written.files)
    assert turned.to_bytes() == written.to_bytes()


def test_every_flipped_bit_of_a_marker_is_noticed():
    content = marker().to_bytes()
    for place, bit in itertools.product(range(len(content)), range(8)):
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        with pytest.raises(CheckpointDamagedError, match="here"):
            Marker.from_bytes(bytes(changed), "here")


@pytest.mark.parametrize("spelled", [b"%s ", b" %s", b"%s\n"])
def test_another_spelling_of_a_marker_is_not_what_was_written(spelled: bytes):
    with pytest.raises(CheckpointDamagedError, match="got others that mean the same"):
        Marker.from_bytes(spelled % marker().to_bytes(), "here")


@given(st.binary(max_size=3 * BLOCK_BYTES // 1000).map(lambda part: part * 1000))
def test_there_is_a_digest_of_every_block(data: bytes):
    blocks = [data[begin : begin + BLOCK_BYTES] for begin in range(0, len(data), BLOCK_BYTES)]
    assert digests_of(data) == tuple(xxhash.xxh3_128(block).hexdigest() for block in blocks)
    assert len(digests_of(memoryview(bytearray(data)))) == num_blocks(len(data))


def test_digests_of_arrays_without_elements_are_none():
    assert digests_of(memoryview(torch.empty(0, 3).numpy())) == ()
    assert num_blocks(0) == 0


def test_digests_are_the_published_ones():
    # From the xxHash specification's reference implementation: XXH3_128bits of nothing, seed 0.
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float, torch.bfloat16, torch.float8_e4m3fn, torch.bool]
)
def test_dtypes_have_one_name(dtype: torch.dtype):
    assert dtype_named(dtype_name(dtype)) is dtype
    assert "." not in dtype_name(dtype)


TENSOR = ["w", "float32", [4, 0], [2, 3], 100, 4100, 4096, 24, [digest(b"x")]]
PLAIN = ["p", "", [], [], 5000, 10, 5000, 10, [digest(b"y")]]


def manifest_of(*chunks: Any, **members: Any) -> bytes:
    head = {
        "format_version": 1,
        "save_id": "an id",
        "rank": 0,
        "file": "__0_0.distcp",
        "nbytes": 6000,
        "chunk_fields": list(ChunkRecord._fields),
        "chunks": list(chunks),
    }
    return json.dumps({**head, **members}).encode()


def test_the_manifest_that_is_changed_below_is_whole():
    manifest = Manifest.from_bytes(manifest_of(TENSOR, PLAIN), "here")
    assert [chunk.key for chunk in manifest.chunks] == ["w", "p"]
    assert manifest.chunks[0].offsets == (4, 0)


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        ("save_id", "", "a save id"),
        ("save_id", None, "a save id"),
        ("rank", -1, "a rank"),
        ("rank", True, "a rank"),
        ("rank", 1, "the file __1_0.distcp in here, got __0_0.distcp"),
        ("file", "../__0_0.distcp", "the file __0_0.distcp"),
        ("nbytes", 1.5, "a number of bytes"),
        ("nbytes", 5009, "blobs within the 5009 bytes of the file in here, got 5010"),
        ("chunk_fields", ["key"], "the fields"),
        ("chunks", {}, "a list of chunks"),
        ("chunks", [[]], "a chunk of 9 values"),
        ("chunks", [5], "a chunk of 9 values"),
        ("chunks", [PLAIN, TENSOR], "a blob from byte 5010 on in 'w' in here, got 100"),
        ("more", 1, "the members"),
    ],
)
def test_a_manifest_that_was_not_written_so_is_refused(member: str, value: Any, message: str):
    with pytest.raises(CheckpointDamagedError, match=f"Expected .*{message}"):
        Manifest.from_bytes(manifest_of(TENSOR, PLAIN, **{member: value}), "here")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("key", "", "a key"),
        ("key", 3, "a key"),
        ("dtype", "float33", "a dtype in 'w' in here, got float33"),
        ("dtype", ["float32"], "a dtype"),
        ("dtype", "float64", "48 bytes of data"),
        ("dtype", "", "a blob that is all data"),
        ("offsets", [4], "as many offsets as sizes"),
        ("offsets", [4, -1], "as many offsets as sizes"),
        ("sizes", [2, "3"], "as many offsets as sizes"),
        ("sizes", [2, 4], "32 bytes of data"),
        ("blob_offset", -1, "places"),
        ("blob_offset", 4097, "data within the blob"),
        ("blob_nbytes", 4019, "data within the blob"),
        ("data_offset", 4095, "aligned data"),
        ("data_offset", 0, "data within the blob"),
        ("data_nbytes", 1 << 70, "places in the file"),
        ("data_nbytes", 1 << 60, "digests"),
        ("digests", [], "1 digests"),
        ("digests", [digest(b"x").upper()], "digests"),
        ("digests", ["0"], "digests"),
    ],
)
def test_a_chunk_whose_values_do_not_fit_each_other_is_refused(
    field: str, value: Any, message: str
):
    changed = [*TENSOR]
    changed[ChunkRecord._fields.index(field)] = value
    with pytest.raises(CheckpointDamagedError, match=f"Expected .*{message}"):
        Manifest.from_bytes(manifest_of(changed), "here")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"format_version": 1}']
)
def test_what_is_no_json_object_of_the_format_is_refused(content: bytes):
    for read in (Manifest.from_bytes, Marker.from_bytes):
        with pytest.raises(CheckpointDamagedError, match="here"):
            read(content, "here")


def signed(**members: Any) -> bytes:
    """A marker with these members and a digest that fits them."""
    content = {**json.loads(marker().to_bytes()), **members}
    del content["digest"]
    canonical = json.dumps(content, separators=(",", ":"), sort_keys=True).encode()
    return json.dumps({**content, "digest": digest(canonical)}, separators=(",", ":")).encode()


FILES = {name: list(record) for name, record in marker().files.items()}


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        ("save_id", 5, "a save id"),
        ("iteration", -1, "an iteration"),
        ("world_size", 0, "a number of ranks"),
        ("world_size", 1, "the files of 1 ranks"),
        ("world_size", 10**15, "the files of 10{15} ranks"),
        ("files", [], "files by name"),
        ("files", {**FILES, "../../etc/passwd": [1, None]}, "the files of 2 ranks"),
        ("files", {**FILES, ".metadata": [7, None]}, "the digest of .metadata"),
        ("files", {**FILES, "__0_0.distcp": [7, digest(b"")]}, "the digest of __0_0.distcp"),
        ("files", {**FILES, "__0_0.distcp": [-7, None]}, "a size and a digest of __0_0.distcp"),
        ("files", {**FILES, "__0_0.distcp": 7}, "a size and a digest of __0_0.distcp"),
        ("more", 1, "the members"),
    ],
)
def test_a_marker_that_was_not_written_so_is_refused(member: str, value: Any, message: str):
    with pytest.raises(CheckpointDamagedError, match=f"Expected {message}"):
        Marker.from_bytes(signed(**{member: value}), "here")


def test_another_version_of_the_format_is_no_damage():
    for read, content in (
        (Marker.from_bytes, signed(format_version=2)),
        (Manifest.from_bytes, manifest_of(format_version=2)),
    ):
        with pytest.raises(
            CheckpointError, match="Expected format version 1 in here, got 2"
        ) as caught:
            read(content, "here")
        assert not isinstance(caught.value, CheckpointDamagedError)
