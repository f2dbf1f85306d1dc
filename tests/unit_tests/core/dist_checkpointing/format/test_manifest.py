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
from megatron.core.dist_checkpointing.format.index import Index
from megatron.core.dist_checkpointing.format.manifest import (
    BLOCK_BYTES,
    DTYPES,
    FileRecord,
    Manifest,
    Marker,
    digest,
    digests_of,
    dtype_name,
    files_of,
    num_blocks,
    writer_of,
)

KEYS = st.text(min_size=1, max_size=12)


DIGESTS = st.integers(0, (1 << 128) - 1).map(lambda number: f"{number:032x}")


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Manifests of chunks with any number of blocks, including none."""
    digests = draw(st.lists(st.lists(DIGESTS, max_size=4).map(tuple), max_size=5))
    return Manifest(draw(KEYS), draw(st.integers(0, 5000)), draw(DIGESTS), tuple(digests))


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
    assert content.count(b"\n") == len(manifest.digests) + 2


def test_a_marker_is_read_as_it_was_written_regardless_of_the_order_of_its_files():
    written = marker(3)
    assert Marker.from_bytes(written.to_bytes(), "here") == written
    turned = dataclasses.replace(written, files=dict(reversed(written.files.items())))
    assert list(turned.files) != list(written.files)
    assert turned.to_bytes() == written.to_bytes()


def test_every_flipped_bit_of_a_marker_is_damage():
    content = marker().to_bytes()
    for place, bit in itertools.product(range(len(content)), range(8)):
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        with pytest.raises(CheckpointDamagedError, match="here"):
            Marker.from_bytes(bytes(changed), "here")


@pytest.mark.parametrize("spelled", [b"%s ", b" %s", b"%s\n"])
def test_another_spelling_of_a_marker_is_rejected(spelled: bytes):
    with pytest.raises(CheckpointDamagedError, match="here"):
        Marker.from_bytes(spelled % marker().to_bytes(), "here")


@given(st.binary(max_size=3 * BLOCK_BYTES // 1000).map(lambda part: part * 1000))
def test_there_is_a_digest_of_every_block(data: bytes):
    blocks = [data[begin : begin + BLOCK_BYTES] for begin in range(0, len(data), BLOCK_BYTES)]
    assert digests_of(data) == tuple(xxhash.xxh3_128(block).hexdigest() for block in blocks)
    assert len(digests_of(memoryview(bytearray(data)))) == num_blocks(len(data))


def test_digests_are_the_published_ones():
    # From the xxHash specification's reference implementation: XXH3_128bits of nothing, seed 0.
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float, torch.bfloat16, torch.float8_e4m3fn, torch.bool]
)
def test_dtypes_have_one_name(dtype: torch.dtype):
    assert DTYPES[dtype_name(dtype)] is dtype
    assert "." not in dtype_name(dtype)


def test_the_name_of_a_data_file_has_the_rank_that_wrote_it():
    assert [writer_of(f"__{rank}_0.distcp") for rank in (0, 7, 40_000)] == [0, 7, 40_000]
    assert writer_of("__3_5.distcp") == 3
    for other in ("hf/model.safetensors", "__0_0.distcp ", "a/__0_0.distcp", "__" + "9" * 5000):
        assert writer_of(other) == -1


DIGEST = digest(b"x")


def manifest_of(**members: Any) -> bytes:
    head = {
        "format_version": 4,
        "save_id": "an id",
        "rank": 0,
        "layout": digest(b"a layout"),
        "digests": [[DIGEST, digest(b"y")], [], [DIGEST]],
    }
    return json.dumps({**head, **members}).encode()


def test_the_manifest_that_is_changed_below_is_whole():
    manifest = Manifest.from_bytes(manifest_of(), "here")
    assert manifest.digests == ((DIGEST, digest(b"y")), (), (DIGEST,))


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        ("save_id", "", "a save id"),
        ("rank", -1, "a rank"),
        ("rank", True, "a rank"),
        ("layout", None, "the digest of a layout"),
        ("layout", DIGEST + "\n", "the digest of a layout"),
        ("digests", {}, "lists of digests"),
        ("digests", [[DIGEST], {DIGEST: DIGEST}], "lists of digests"),
        ("digests", [[], [DIGEST, DIGEST.upper()]], "digests of chunk 1"),
        ("digests", [[None]], "digests of chunk 0"),
        ("more", 1, "the members"),
    ],
)
def test_a_manifest_with_a_wrong_member_is_rejected(member: str, value: Any, message: str):
    with pytest.raises(CheckpointDamagedError, match=f"Expected {message}.* in here, got"):
        Manifest.from_bytes(manifest_of(**{member: value}), "here")


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
        ("world_size", 1, "further files in .* in here, got __1_0.distcp"),
        ("world_size", 3, "the files of 3 ranks"),
        ("world_size", 10**15, "the files of 10{15} ranks"),
        ("files", [], "files by name"),
        ("files", {}, "the files of 2 ranks"),
        *(
            ("files", {**FILES, outside: [1, None]}, "further files in")
            for outside in ("../x", "hf/..", "/x", "x", "hf/../b", "hf/a\n", "__2_0.distcp")
        ),
        ("files", {**FILES, "hf/a": [1, "0"]}, "the digest of hf/a"),
        ("files", {**FILES, ".metadata": [7, None]}, "the digest of .metadata"),
        ("files", {**FILES, "__0_0.distcp": [7, digest(b"")]}, "the digest of __0_0.distcp"),
        ("files", {**FILES, "__0_0.distcp": [-7, None]}, "a size and a digest of __0_0.distcp"),
        ("files", {**FILES, "__0_0.distcp": 7}, "a size and a digest of __0_0.distcp"),
        ("more", 1, "the members"),
    ],
)
def test_a_marker_with_a_wrong_member_is_rejected(member: str, value: Any, message: str):
    with pytest.raises(CheckpointDamagedError, match=f"Expected {message}"):
        Marker.from_bytes(signed(**{member: value}), "here")


@pytest.mark.parametrize("lost", [".metadata", "index.json", "train_state.json", "manifest_1.json"])
def test_a_marker_that_lacks_a_file_is_rejected(lost: str):
    files = {name: record for name, record in FILES.items() if name != lost}
    with pytest.raises(CheckpointDamagedError, match="Expected the files of 2 ranks in here"):
        Marker.from_bytes(signed(files=files), "here")
    # A further file does not replace it.
    with pytest.raises(CheckpointDamagedError, match="Expected the files of 2 ranks in here"):
        Marker.from_bytes(signed(files={**files, "hf/more": [7, None]}), "here")


def test_further_files_in_a_directory_may_have_a_digest_or_chunks():
    further = {
        "hf/config.json": FileRecord(7, digest(b"config")),
        "hf/model-00001-of-00002.safetensors": FileRecord(1 << 40, None),
        "hf/chat_templates/tools.jinja": FileRecord(8, digest(b"template")),
    }
    written = dataclasses.replace(marker(), files={**marker().files, **further})
    assert Marker.from_bytes(written.to_bytes(), "here") == written


def read_index(content: bytes, source: str) -> Index:
    return Index.from_bytes(content, None, source)


@pytest.mark.parametrize(
    ("read", "content"),
    [
        (Marker.from_bytes, signed),
        (Manifest.from_bytes, manifest_of),
        (read_index, lambda **members: json.dumps(members).encode()),
    ],
)
def test_another_version_of_the_format_is_no_damage(read: Any, content: Any):
    for other in (1, 3, 5):
        with pytest.raises(CheckpointError, match=f"version 4 in here, got {other}") as caught:
            read(content(format_version=other), "here")
        assert not isinstance(caught.value, CheckpointDamagedError)

    for wrong in (None, True, -1, "3", 3.0):
        with pytest.raises(CheckpointDamagedError, match="Expected a format version in here"):
            read(content(format_version=wrong), "here")
