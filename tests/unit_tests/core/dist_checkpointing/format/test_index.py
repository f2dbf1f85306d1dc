"""The index: read as it was written, and rejected if no save would write it."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.blob import blob_frame, blob_layout
from megatron.core.dist_checkpointing.format.index import (
    Index,
    SavedAs,
    blob_place,
    build_index,
    manifest_problems,
)
from megatron.core.dist_checkpointing.format.manifest import (
    BLOCK_BYTES,
    DATA_ALIGNMENT,
    FileRecord,
    Manifest,
    Marker,
    data_file,
    digest,
    files_of,
)
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.holdings import FlatShards, RankMesh, replicated
from megatron.core.dist_checkpointing.layout.saved import SavedChunk, SavedTensor
from megatron.core.distributed.fsdp.layout import GlobalLayout

SOURCE = "iter_0000010/index.json"
SAVE_ID = "a save"
HF_FILE = "hf/model.safetensors"
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]


def marker(world_size: int = 3, nbytes: int = 1 << 40, save_id: str = SAVE_ID) -> Marker:
    """A marker whose data files and exported file have this size."""
    files = {
        name: FileRecord(nbytes, None if name.endswith(".distcp") else digest(name.encode()))
        for name in files_of(world_size)
    }
    files[HF_FILE] = FileRecord(nbytes, None)
    files["hf/config.json"] = FileRecord(9, digest(b"config"))
    return Marker(save_id, 10, world_size, files)


class _Files:
    """Places that follow each other in files."""

    def __init__(self) -> None:
        self._ends: dict[str, int] = {}

    def place(self, file: str, before: int, nbytes: int) -> int:
        offset = self._ends.get(file, 0) + before
        self._ends[file] = offset + nbytes
        return offset


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    """Tensors in rows of several ranks, plain data, and tensors of a file in another format."""
    files = _Files()
    keys = draw(st.lists(st.text(min_size=1, max_size=9), max_size=8, unique=True))
    first, second = sorted(draw(st.integers(0, len(keys))) for _ in range(2))

    def chunk(box: Box, itemsize: int, file: str, rank: int) -> SavedChunk:
        before = draw(st.integers(0, 5000))
        return SavedChunk(box, rank, file, files.place(file, before, box.numel * itemsize))

    def tensor(key: str, *, is_exported: bool) -> SavedTensor:
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        boxes = [Box.whole(shape)] if math.prod(shape) else []
        if shape and boxes:
            cuts = sorted({0, shape[0], *draw(st.lists(st.integers(0, shape[0]), max_size=2))})
            tail = shape[1:]
            boxes = [
                Box((begin, *(0,) * len(tail)), (end - begin, *tail))
                for begin, end in itertools.pairwise(cuts)
            ]
        chunks = []
        for box in draw(st.permutations(boxes)):
            rank = draw(st.integers(0, 2))
            file = HF_FILE if is_exported else data_file(rank)
            chunks.append(chunk(box, dtype.itemsize, file, rank))
        return SavedTensor(key, dtype, shape, chunks)

    def plain(key: str) -> SavedTensor:
        box = Box.whole((draw(st.integers(1, 3 * BLOCK_BYTES)),))
        return SavedTensor(key, torch.uint8, box.sizes, [chunk(box, 1, data_file(0), 0)])

    return Index(
        draw(st.text(min_size=1, max_size=5)),
        {key: tensor(key, is_exported=False) for key in keys[:first]},
        {key: plain(key) for key in keys[first:second]},
        {key: tensor(key, is_exported=True) for key in keys[second:]},
    )


@settings(max_examples=200, deadline=None)
@given(indexes())
def test_an_index_is_read_as_it_was_written(index: Index):
    content = index.to_bytes()
    for known in (marker(save_id=index.save_id), None):
        found = Index.from_bytes(content, known, SOURCE)
        assert found == index
        assert list(found.tensors) == list(index.tensors)
        assert found.to_bytes() == content
    tensors = [*index.all_tensors]
    num_divisions = len(json.loads(content)["divisions"])
    assert content.count(b"\n") == len(tensors) + num_divisions + 6
    assert all(f"\n{json.dumps(tensor.key)}:".encode() in content for tensor in tensors)


@settings(deadline=None)
@given(indexes())
def test_the_chunks_of_each_rank_are_in_the_order_of_tensors_exported_ones_and_plain_data(index):
    tensors = [*index.tensors.values(), *index.exported.values(), *index.plain.values()]
    expected = [(tensor, chunk) for tensor in tensors for chunk in tensor.chunks]
    by_rank = index.chunks_by_rank
    assert by_rank.keys() == {chunk.rank for _, chunk in expected}
    for rank, found in by_rank.items():
        assert found == [each for each in expected if each[1].rank == rank]
    assert index.layout_of(99) == Index("", {}).layout_of(0)


@settings(deadline=None)
@given(indexes())
def test_digests_are_one_for_each_block_of_each_chunk_in_that_order(index):
    for rank in range(3):
        chunks = index.chunks_by_rank.get(rank, [])
        sizes = [-(-tensor.chunk_nbytes(chunk) // BLOCK_BYTES) for tensor, chunk in chunks]
        digests = tuple((digest(b""),) * size for size in sizes)
        manifest = Manifest(index.save_id, rank, index.layout_of(rank), digests)
        assert list(manifest_problems(manifest, rank, index, "here")) == []


# An index that tests change by hand.


def example() -> dict[str, Any]:
    """w is sharded over two ranks, s is on the second, x in another file, p is plain."""
    return {
        "format_version": 4,
        "save_id": SAVE_ID,
        "writers": [["__0_0.distcp", 0], ["__1_0.distcp", 1], [HF_FILE, 1]],
        "tensors": {
            "w": ["float32", [4, 3], 0, [4096, 4096]],
            "s": ["bfloat16", [], 1, [8192]],
            "e": ["float32", [0, 3], 2, []],
            "v": ["float32", [4, 3], 0, [12288, 12288]],
        },
        "plain": {"p": ["uint8", [100], 3, [9000]]},
        "exported": {"x": ["bfloat16", [4], 4, [88]]},
        "divisions": [
            [[0, 0, 0, 2, 3], [1, 2, 0, 2, 3]],
            [[1]],
            [],
            [[0, 0, 100]],
            [[2, 0, 4]],
        ],
    }


def parse(members: Any, known: Marker | None = None) -> Index:
    return Index.from_bytes(json.dumps(members).encode(), known or marker(), SOURCE)


def test_the_index_that_is_changed_below_is_whole():
    index = parse(example())
    assert list(index.tensors) == ["w", "s", "e", "v"]
    box = Box((2, 0), (2, 3))
    assert index.tensors["w"].chunks[1] == SavedChunk(box, 1, "__1_0.distcp", 4096)
    assert index.exported["x"].chunks == [SavedChunk(Box.whole((4,)), 1, HF_FILE, 88)]
    assert [(tensor.key, chunk.offset) for tensor, chunk in index.chunks_by_rank[1]] == [
        ("w", 4096),
        ("s", 8192),
        ("v", 12288),
        ("x", 88),
    ]


def put(value: object, *path: str | int) -> Callable[[dict[str, Any]], None]:
    """Replaces one value of the example."""

    def change(members: Any) -> None:
        for name in path[:-1]:
            members = members[name]
        members[path[-1]] = value

    return change


W, S, P = ("tensors", "w"), ("tensors", "s"), ("plain", "p")
FIRST = ("divisions", 0, 0)  # of w's boxes: writer, offsets and sizes

WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an empty save id": (put("", "save_id"), "a save id"),
    "the save id of another save": (put("another", "save_id"), "save id a save"),
    "an object of writers": (put({}, "writers"), "a list of writers"),
    "a writer that is text": (put("__0_0.distcp", "writers", 0), "a file and a rank"),
    "a rank that is true": (put(["__0_0.distcp", True], "writers", 0), "a file and a rank"),
    "a negative rank": (put(["__0_0.distcp", -1], "writers", 0), "a file and a rank"),
    "a rank that is not there": (
        put(["__0_0.distcp", 3], "writers", 0),
        "data files of 3 ranks in .*, got __0_0.distcp of 3",
    ),
    "a file that has no chunks": (put(["hf/config.json", 0], "writers", 0), "data files of 3"),
    "a file elsewhere": (put(["../__0_0.distcp", 0], "writers", 0), "a file with chunks in"),
    "a list of tensors": (put([], "tensors"), "tensors by key"),
    "an empty key": (put(["float32", [0], []], "tensors", ""), "keys that are not empty"),
    "a tensor without chunks": (put(["float32", [0]], *W), "dtype, shape, division and"),
    "a dtype that is not one": (put("float33", *W, 0), "a dtype in 'w'"),
    "a dtype that is a list": (put(["float32"], *W, 0), "a dtype in 'w'"),
    "a negative size": (put([-4, 3], *W, 1), "a shape in 'w'"),
    "a size that is a fraction": (put([4.0, 3], *W, 1), "a shape in 'w'"),
    "a size beyond all": (put([1 << 62, 3], *W, 1), "a shape in 'w'"),
    "a shape of 65 dims": (put([1] * 65, *S, 1), "a shape in 's'"),
    "an object of offsets": (put({}, *W, 3), "each of 2 boxes in 'w'"),
    "an offset too few": (put([4096], *W, 3), "each of 2 boxes in 'w'"),
    "a negative offset": (put(-1, *W, 3, 0), "each of 2 boxes in 'w'"),
    "an offset that is true": (put(True, *W, 3, 0), "each of 2 boxes in 'w'"),
    "a division that is not there": (put(5, *W, 2), "one of 5 divisions in 'w' in .*, got 5"),
    "a division before the first": (put(-1, *W, 2), "one of 5 divisions in 'w'"),
    "a division that is true": (put(True, *W, 2), "one of 5 divisions in 'w'"),
    "an object of divisions": (put({}, "divisions"), "a list of divisions"),
    "a division that is an object": (put({}, "divisions", 0), "a list of boxes"),
    "a box that is a number": (put(4096, *FIRST), "a writer and a box"),
    "a box without all of its sizes": (put([0, 0, 0, 4], *FIRST), "a writer and a box"),
    "boxes of different dims": (put([0, 0, 4], *FIRST), "a writer and a box"),
    "a division of other dims": (put(3, *W, 2), "each of 1 boxes"),
    "a box of more dims than its tensor": (
        put([[0, 0, 0, 1, 1]], "divisions", 1),
        r"chunks of s inside \(\)",
    ),
    "a writer that is not there": (put(3, *FIRST, 0), "one of 3 writers in .*, got 3"),
    "a writer before the first": (put(-1, *FIRST, 0), "a writer and a box"),
    "a box without elements": (put(0, *FIRST, 4), "a box with elements"),
    "a box in another": (put(3, *FIRST, 3), r"each element of w in one chunk .* in 2"),
    "a box that reaches out": (put(9, *FIRST, 3), r"chunks of w inside \(4, 3\)"),
    "a gap": (put(1, *FIRST, 3), r"each element of w in one chunk .* at \(1, 0\) in 0"),
    "a division that tiles another shape": (
        put([5, 3], "tensors", "v", 1),
        r"each element of v in one chunk .* at \(4, 0\) in 0",
    ),
    "no chunk of a scalar": (
        put(["bfloat16", [], 2, []], *S),
        r"each element of s in one chunk .* at \(\) in 0",
    ),
    "no chunk of an exported tensor": (
        put(["bfloat16", [4], 2, []], "exported", "x"),
        "each element of x in one",
    ),
    "more elements than torch can count": (
        put([1 << 61, 0, 4], "tensors", "e", 1),
        r"e in .* to have at most \d+ elements",
    ),
    "a chunk before the last one's end": (
        put([4119], *S, 3),
        "'s' from byte 4120 of __1_0.distcp on in .*, where 'w' ends, got byte 4119",
    ),
    "plain data in a tensor's place": (
        put([4000], *P, 3),
        "'w' from byte 4100 of __0_0.distcp",
    ),
    "a place behind the end of the file": (
        put((1 << 40) - 23, *W, 3, 0),
        f"'w' within the {1 << 40} bytes of __0_0.distcp in .*, got byte {(1 << 40) + 1}",
    ),
    "an exported tensor behind the end of its file": (
        put((1 << 40) - 7, "exported", "x", 3, 0),
        f"'x' within the {1 << 40} bytes of {HF_FILE}",
    ),
    "plain data of another dtype": (put("int8", *P, 0), "plain data"),
    "plain data in two chunks": (
        lambda it: (
            it["plain"].update(p=["uint8", [100], 5, [9000, 9050]]),
            it["divisions"].append([[0, 0, 50], [0, 50, 50]]),
        ),
        "plain data",
    ),
    "a key of two kinds": (
        lambda it: (
            it["plain"].update(w=["uint8", [1], 5, [9500]]),
            it["divisions"].append([[0, 0, 1]]),
        ),
        "'w' as plain data",
    ),
    "a member too many": (put(1, "more"), "the members"),
    **{
        f"no {name}": (lambda it, name=name: it.pop(name), "the members")
        for name in ("save_id", "writers", "divisions", "tensors", "plain", "exported")
    },
    "no version": (lambda it: it.pop("format_version"), "a format version"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_index_that_no_save_writes_is_damage_that_names_the_file(case: str):
    change, message = WRONG[case]
    members = example()
    change(members)
    with pytest.raises(CheckpointDamagedError, match=f"Expected .*{message}") as caught:
        parse(members)
    assert SOURCE in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]",
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps(example()).replace('"s":', '"w":').encode(),  # a key twice
        json.dumps(example()).replace("4096", "NaN").encode(),
    ],
)
def test_anything_but_a_json_object_is_rejected(content: bytes):
    with pytest.raises(CheckpointDamagedError, match=SOURCE) as caught:
        Index.from_bytes(content, marker(), SOURCE)
    assert len(str(caught.value)) < 1000


def test_a_truncated_index_is_damaged_wherever_it_ends():
    content = parse(example()).to_bytes()
    for nbytes in range(len(content) - 1):  # the last byte ends the line
        with pytest.raises(CheckpointDamagedError, match=SOURCE):
            Index.from_bytes(content[:nbytes], marker(), SOURCE)


JUNK = [None, True, -1, 0.5, 1 << 62, 1 << 100, "", "../x", [], {}, [[]], [0], [-1], {"a": [1]}]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_anything_in_any_place_is_an_index_that_can_be_written_or_damage(data: st.DataObject):
    members: Any = copy.deepcopy(example())
    place, name = members, data.draw(st.sampled_from(sorted(members)))
    while isinstance(place[name], dict | list) and place[name] and data.draw(st.booleans()):
        place = place[name]
        name = data.draw(
            st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place)))
        )
    place[name] = data.draw(st.sampled_from(JUNK))
    for known in (marker(), None):
        content = json.dumps(members).encode()
        # Another version is not damage.
        kind = CheckpointError if name == "format_version" else CheckpointDamagedError
        try:
            index = Index.from_bytes(content, known, SOURCE)
        except kind as error:
            said = str(error)
        else:
            again = Index.from_bytes(index.to_bytes(), known, SOURCE)
            said = f"{SOURCE} is the same" if again == index else "another"
        assert SOURCE in said


# Plans.


def test_layouts_differ_when_any_part_of_them_does():
    index = parse(example())
    (tensor, chunk), *rest = index.chunks_by_rank[0]
    box = chunk.box
    layouts = [
        [(tensor, chunk), *rest],
        [*rest, (tensor, chunk)],
        rest,
        [],
        [(tensor, chunk), (tensor, chunk), *rest],
        [(tensor._replace(key="v"), chunk), *rest],
        [(tensor._replace(key="w\0"), chunk), *rest],
        [(tensor._replace(dtype=torch.int32), chunk), *rest],  # of as many bytes
        [(tensor, chunk._replace(offset=chunk.offset + 4096)), *rest],
        [(tensor, chunk._replace(file="__1_0.distcp")), *rest],
        [(tensor, chunk._replace(box=Box((1, 0), box.sizes))), *rest],
        [(tensor, chunk._replace(box=Box((0, 1), box.sizes))), *rest],
        [(tensor, chunk._replace(box=Box(box.offsets, (3, 2)))), *rest],
        [(tensor, chunk._replace(box=Box((0,), (6,)))), *rest],
    ]
    found = [
        Index("", {str(i): one._replace(chunks=[own]) for i, (one, own) in enumerate(layout)})
        for layout in layouts
    ]
    assert len({one.layout_of(0) for one in found}) == len(layouts)
    assert found[0].layout_of(0) == index.layout_of(0)
    assert index.layout_of(0) != index.layout_of(1)


# Files.


def test_a_blob_is_around_its_data():
    index, (header, _) = parse(example()), blob_frame(torch.bfloat16, ())
    s = index.tensors["s"]
    assert blob_place(s, s.chunks[0]) == (
        8192 - len(header),
        blob_layout(torch.bfloat16, ()).nbytes,
    )


# Indexes that are computed for a save.


def state(shapes: list[tuple[int, ...]], num_ranks: int, is_sharded: bool) -> list[SavedAs]:
    """Three tensors for every shape, and a scalar that all ranks have."""
    mesh = RankMesh((num_ranks,), tuple(range(num_ranks)))
    shards = FlatShards(GlobalLayout.build(shapes, num_ranks), mesh, (is_sharded,))
    tensors = [
        SavedAs(f"{i}.{dtype}", dtype, shape, partial(shards.holdings, i))
        for i, shape in enumerate(shapes)
        for dtype in DTYPES[:3]
    ]
    return [*tensors, SavedAs("step", torch.float32, (), replicated((), mesh.ranks))]


sizes = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=4)


PLAIN = {"optimizer.param_groups": 1234, "rng.0.python": 77}


@settings(deadline=None)
@given(sizes, st.integers(1, 5), st.booleans())
def test_blobs_follow_each_other_with_data_on_pages(shapes, num_ranks, is_sharded):
    ends = dict.fromkeys(range(num_ranks), 0)
    index = build_index("a save", state(shapes, num_ranks, is_sharded), PLAIN)
    for tensor in index.tensors.values():
        for chunk in tensor.chunks:
            assert chunk.file == data_file(chunk.rank)
            assert chunk.offset % DATA_ALIGNMENT == 0
            begin, nbytes = blob_place(tensor, chunk)
            layout = blob_layout(tensor.dtype, chunk.box.sizes)
            assert (chunk.offset - begin, nbytes) == (layout.header_nbytes, layout.nbytes)
            assert 0 <= begin - ends[chunk.rank] < DATA_ALIGNMENT
            ends[chunk.rank] = begin + nbytes
    for key, nbytes in PLAIN.items():
        (chunk,) = index.plain[key].chunks
        assert (chunk.rank, chunk.file, chunk.offset) == (0, data_file(0), ends[0])
        assert chunk.box == Box.whole((nbytes,))
        ends[0] += nbytes
    assert {rank: index.data_files.get(rank, 0) for rank in ends} == ends


@settings(deadline=None)
@given(sizes, st.integers(1, 5), st.booleans())
def test_a_rank_lays_out_its_file_and_rank_zero_all_files(shapes, num_ranks, is_sharded):
    tensors = state(shapes, num_ranks, is_sharded)
    everything = build_index("a save", tensors, PLAIN)
    for rank in range(num_ranks):
        own = build_index("a save", tensors, PLAIN, rank)
        assert own.tensors.keys() == everything.tensors.keys()
        for key, tensor in everything.tensors.items():
            chunks = [chunk for chunk in tensor.chunks if chunk.rank == rank]
            assert own.tensors[key] == tensor._replace(chunks=chunks)
        assert own.plain == (everything.plain if rank == 0 else {})
        assert own.layout_of(rank) == everything.layout_of(rank)
        assert own.data_files.get(rank) == everything.data_files.get(rank)


@settings(deadline=None)
@given(sizes, st.integers(1, 5), st.booleans())
def test_readers_accept_a_built_index(shapes, num_ranks, is_sharded):
    index = build_index("a save", state(shapes, num_ranks, is_sharded), PLAIN)
    assert Index.from_bytes(index.to_bytes(), None, "here") == index
    assert [*index.tensors] == [tensor.key for tensor in state(shapes, num_ranks, is_sharded)]
