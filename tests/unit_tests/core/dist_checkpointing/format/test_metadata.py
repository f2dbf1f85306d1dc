"""`.metadata`: composed as DCP writes it, read without running it, checked for gaps."""

from __future__ import annotations

import copy
import os
import pickle
import pickletools
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.index import blob_place
from megatron.core.dist_checkpointing.format.manifest import data_file, writer_of
from megatron.core.dist_checkpointing.format.metadata import (
    _ADMITTED,
    Blob,
    DcpIndex,
    compose_metadata,
    nested_path,
    parse_metadata,
)
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.saved import SavedChunk, SavedTensor, check_coverage
from tests.helpers.ranks import run_ranks

SOURCE = "iter_0000010/.metadata"
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]


def chunk_of(
    offsets: Sequence[int], sizes: Sequence[int], rank: int = 0, offset: int = 4096
) -> SavedChunk:
    """A box of a tensor, whose data starts at `offset` in a rank's file."""
    return SavedChunk(Box(tuple(offsets), tuple(sizes)), rank, data_file(rank), offset)


def plain_of(key: str, rank: int, offset: int, nbytes: int) -> SavedTensor:
    return SavedTensor(key, torch.uint8, (nbytes,), [chunk_of((0,), (nbytes,), rank, offset)])


# The objects that DCP itself would create.


def dcp_metadata(tensors: Sequence[SavedTensor], plain: Sequence[SavedTensor]) -> Metadata:
    """The objects whose pickle `compose_metadata` is."""
    entries: dict[str, Any] = {
        tensor.key: TensorStorageMetadata(
            TensorProperties(tensor.dtype),
            torch.Size(tensor.shape),
            [ChunkStorageMetadata(*map(torch.Size, chunk.box)) for chunk in tensor.chunks],
        )
        for tensor in tensors
    }
    entries |= {item.key: BytesStorageMetadata() for item in plain}
    places = {
        MetadataIndex(tensor.key, chunk.box.offsets, i): _StorageInfo(
            f"__{chunk.rank}_0.distcp", *blob_place(tensor, chunk)
        )
        for tensor in tensors
        for i, chunk in enumerate(tensor.chunks)
    }
    places |= {
        MetadataIndex(item.key): _StorageInfo(f"__{chunk.rank}_0.distcp", chunk.offset, item.nbytes)
        for item in plain
        for chunk in item.chunks
    }
    paths = {key: nested_path(key) for key in entries}
    return Metadata(entries, planner_data=paths, storage_data=places, version="1.0.0")


def index_of(metadata: Metadata) -> DcpIndex:
    """The contents of these objects, as `parse_metadata` returns them."""
    found = DcpIndex({}, {}, {})
    places = {
        (at.fqn, at.offset and tuple(at.offset)): Blob(
            it.relative_path, it.offset, it.length, it.transform_descriptors or []
        )
        for at, it in metadata.storage_data.items()
    }
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            found.plain[key] = places[key, None]
            continue
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        blobs = {box.offsets: places[key, box.offsets or torch.Size()] for box in boxes}
        found.blobs.update({(key, offsets): blob for offsets, blob in blobs.items()})
        chunks = [
            SavedChunk(box, writer_of(blobs[box.offsets].file), *blobs[box.offsets][:2])
            for box in boxes
        ]
        found.tensors[key] = SavedTensor(key, entry.properties.dtype, tuple(entry.size), chunks)
    return found


def assert_same(got: DcpIndex, expected: Metadata) -> None:
    wanted = index_of(expected)
    assert got == wanted
    assert [list(each) for each in got] == [list(each) for each in wanted]


@st.composite
def drawn_tensors(draw: st.DrawFn) -> list[SavedTensor]:
    small, large = st.integers(0, 300), st.integers(0, 1 << 62)
    found = []
    for key in draw(st.lists(st.text("abß.", min_size=1, max_size=6), max_size=4, unique=True)):
        num_dims = draw(st.integers(0, 4))
        places = st.tuples(*[small | large] * num_dims)
        # No chunk has more bytes than a file.
        sizes = st.tuples(*[small] * (num_dims - 1), *[small | st.integers(0, 1 << 30)][:num_dims])
        chunks = [
            chunk_of(place, draw(sizes), draw(small), 4096 + draw(large))
            for place in draw(st.lists(places, max_size=5, unique=True))
        ]
        dtype = draw(st.sampled_from(DTYPES))
        found.append(SavedTensor(f"model.{key}", dtype, draw(places), chunks))
    return found


@settings(max_examples=80, deadline=None)
@given(drawn_tensors(), st.lists(st.integers(0, 300), max_size=300, unique=True))
def test_composed_metadata_is_the_pickle_of_the_objects_that_dcp_would_create(tensors, ranks):
    plain = [plain_of(f"rng.{rank}.torch", rank, 1 << 33, 1000 + rank) for rank in ranks]
    content = compose_metadata(iter(tensors), iter(plain))
    assert content == compose_metadata(copy.deepcopy(tensors), copy.deepcopy(plain))
    expected = dcp_metadata(tensors, plain)
    written = pickle.loads(content)
    assert written == expected
    assert list(written.state_dict_metadata) == list(expected.state_dict_metadata)
    # Indices compare equal whatever their number in the list of chunks.
    numbers = [[index.index for index in each.storage_data] for each in (written, expected)]
    assert numbers[0] == numbers[1]
    assert_same(parse_metadata(content, SOURCE), expected)
    assert pickletools.optimize(content)  # every opcode is where it may be


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("model.layers.0.weight", ("model", "layers.0.weight")),
        (
            "optimizer.state.layers.0.weight.exp_avg",
            ("optimizer", "state", "layers.0.weight", "exp_avg"),
        ),
        ("optimizer.param_groups", ("optimizer", "param_groups")),
        ("rng.3.torch", ("rng", "3", "torch")),
        ("iteration", ("iteration",)),
    ],
)
def test_keys_nest_as_the_state_dict_did(key, path):
    assert nested_path(key) == path
    nested: Any = 1
    for name in reversed(path):
        nested = {name: nested}
    _, paths = dcp._nested_dict.flatten_state_dict(nested)
    assert paths == {key: path}


# The `.metadata` of vanilla DCP.


def save_with_vanilla_dcp(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 5), nn.Linear(5, 1)
    )  # cut unevenly; the last weight has one row
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "columns": distribute_tensor(torch.arange(12.0).view(2, 6), mesh, [Shard(1)]),
        "copies": distribute_tensor(torch.arange(4), mesh, [Replicate()]),
        "plain": {"iteration": 3, "names": ["a", "b"], "tensors": [torch.ones(2), torch.tensor(1)]},
    }
    dcp.save(state, checkpoint_id=folder)


def test_the_metadata_of_vanilla_dcp_is_read_as_pickle_reads_it(tmp_path):
    run_ranks(2, save_with_vanilla_dcp, str(tmp_path))
    content = (tmp_path / ".metadata").read_bytes()
    expected = pickle.loads(content)
    got = parse_metadata(content, SOURCE)
    assert str(expected.storage_meta.checkpoint_id) == str(tmp_path)
    assert_same(got, expected)
    assert {"model.0.weight", "optimizer.state.0.exp_avg"} <= got.tensors.keys()
    assert "plain.iteration" in got.plain
    assert len(got.tensors["model.0.weight"].chunks) == 2
    check_coverage(got.tensors.values(), SOURCE)


# Malicious pickles.


class Command:
    """Unpickling it makes a file."""

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.call


def metadata_of_one_tensor() -> Metadata:
    tensors = [
        SavedTensor(
            "model.w",
            torch.float32,
            (4, 3),
            [chunk_of((0, 0), (2, 3), 0), chunk_of((2, 0), (2, 3), 1)],
        )
    ]
    return dcp_metadata(tensors, [plain_of("optimizer.param_groups", 0, 8192, 9)])


def inside(command: object) -> list[tuple[str, object]]:
    """`command` in every position of a metadata that may hold an object."""
    found: list[tuple[str, object]] = [("on its own", command)]
    for name in ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"):
        found.append((name, Metadata(**{**vars(metadata_of_one_tensor()), name: command})))
    places: dict[str, Callable[[Metadata], None]] = {
        "an entry": lambda it: it.state_dict_metadata.update({"model.w": command}),
        "a chunk": lambda it: it.state_dict_metadata["model.w"].chunks.append(command),
        "an offset": lambda it: setattr(
            it.state_dict_metadata["model.w"].chunks[0], "offsets", command
        ),
        "a dtype": lambda it: setattr(
            it.state_dict_metadata["model.w"].properties, "dtype", command
        ),
        "a file": lambda it: setattr(
            next(iter(it.storage_data.values())), "relative_path", command
        ),
        "an unknown field": lambda it: setattr(it, "more", command),
    }
    for place, put in places.items():
        metadata = metadata_of_one_tensor()
        put(metadata)
        found.append((place, metadata))
    return found


def test_a_pickle_that_runs_a_command_is_rejected_by_name_without_running_it(tmp_path):
    victim = tmp_path / "victim"
    command = Command(os.system, shlex.join(["touch", str(victim)]))
    for place, metadata in inside(command):
        content = pickle.dumps(metadata)
        with pytest.raises(CheckpointError, match=r"got (posix|nt)\.system") as caught:
            parse_metadata(content, SOURCE)
        assert SOURCE in str(caught.value), place
        assert not isinstance(
            caught.value, CheckpointDamagedError
        )  # no reason to try an older one in silence
        assert not victim.exists(), place
        pickle.loads(content)  # which runs it
        assert victim.exists(), place
        victim.unlink()


@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (eval, ("1",), "builtins.eval"),
        (torch.load, ("/nowhere",), "torch.serialization.load"),
        (torch.Tensor, (3,), "torch.Tensor"),
    ],
)
def test_only_the_classes_of_dcp_metadata_may_be_named(function, args, name):
    content = pickle.dumps(Command(function, *args))
    with pytest.raises(CheckpointError, match=name):
        parse_metadata(content, SOURCE)


def build_on(module: str, name: str, state: bytes) -> bytes:
    """A pickle that sets the attributes of a name."""
    return b"\x80\x02c%s\n%s\n%sb." % (module.encode(), name.encode(), state)


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in ("Metadata", "ChunkStorageMetadata")
        ),
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch", "float32"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
    ],
)
def test_a_pickle_cannot_set_attributes_of_the_classes_it_names(module, name, slots):
    state = pickle.dumps({"planted": 1}, 2)[2:-1]
    content = build_on(module, name, b"N" + state + pickle.TUPLE2 if slots else state)
    with pytest.raises(CheckpointDamagedError, match=SOURCE):
        parse_metadata(content, SOURCE)
    for changed in (getattr(sys.modules[module], name), _ADMITTED[module, name]):
        assert not hasattr(changed, "planted")
    blank = parse_metadata(pickle.dumps(metadata_of_one_tensor()), SOURCE)
    assert_same(blank, metadata_of_one_tensor())


@pytest.mark.parametrize(
    "file",
    [
        "a/../../victim",
        "/etc/passwd",
        "",
        "C:\\victim",
        "..\\victim",
        "a\0",
    ],
)
def test_data_files_outside_of_the_directory_are_rejected(file):
    metadata = metadata_of_one_tensor()
    next(iter(metadata.storage_data.values())).relative_path = file
    with pytest.raises(CheckpointError, match=f"Expected data files in the directory of {SOURCE}"):
        parse_metadata(pickle.dumps(metadata), SOURCE)


def test_data_files_in_a_subdirectory_of_the_checkpoint_are_accepted():
    metadata = metadata_of_one_tensor()
    next(iter(metadata.storage_data.values())).relative_path = "part..0/__0_0.distcp"
    assert_same(parse_metadata(pickle.dumps(metadata), SOURCE), metadata)


def entry(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["model.w"]


def info(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data.values()))


def index(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data))


def put(owner: Callable[[Metadata], Any], name: str, value: object) -> Callable[[Metadata], None]:
    return lambda metadata: owner(metadata).__dict__.update({name: value})


WRONG: dict[str, Callable[[Metadata], None]] = {
    "a tuple for sizes": put(lambda it: entry(it).chunks[1], "sizes", (2, 3)),
    "a negative offset": put(lambda it: entry(it).chunks[1], "offsets", torch.Size((-2, 0))),
    "a string for a chunk": lambda it: entry(it).chunks.append("chunk"),
    "a tuple of chunks": put(entry, "chunks", ()),
    "no size": lambda it: entry(it).__dict__.pop("size"),
    "a dtype by name": put(lambda it: entry(it).properties, "dtype", "float32"),
    "a number for a key": lambda it: it.state_dict_metadata.update({3: BytesStorageMetadata()}),
    "a string for an entry": lambda it: it.state_dict_metadata.update({"model.w": "entry"}),
    "a list of entries": put(lambda it: it, "state_dict_metadata", []),
    "no places": put(lambda it: it, "storage_data", None),
    "a negative place": put(info, "offset", -1),
    "a number for a file": put(info, "relative_path", 5),
    "numbers for transforms": put(info, "transform_descriptors", [1]),
    "a string for an index": lambda it: it.storage_data.update({"index": info(it)}),
    "bytes for a key of an index": put(index, "fqn", b"model.w"),
    "a tuple for an offset of an index": put(index, "offset", (0, 0)),
}


@pytest.mark.parametrize("case", WRONG)
def test_fields_of_the_wrong_type_are_found(case):
    metadata = metadata_of_one_tensor()
    assert_same(parse_metadata(pickle.dumps(metadata), SOURCE), metadata)
    WRONG[case](metadata)
    with pytest.raises(CheckpointDamagedError, match=f"Expected .* in {SOURCE}, got "):
        parse_metadata(pickle.dumps(metadata), SOURCE)


def test_two_places_for_one_chunk_are_found():
    metadata = metadata_of_one_tensor()
    index(metadata).__dict__["offset"] = torch.Size(
        (2, 0)
    )  # what the second chunk's is, under another hash
    with pytest.raises(
        CheckpointDamagedError, match=r"one place for each chunk in .*, got 3 places for 2 chunks"
    ):
        parse_metadata(pickle.dumps(metadata), SOURCE)


# Damage.


def composed_example() -> bytes:
    chunks = [chunk_of((0, 0), (2, 3), 0), chunk_of((2, 0), (2, 3), 1)]
    tensors = [SavedTensor(f"model.{name}", torch.float32, (4, 3), chunks) for name in "ab"]
    return compose_metadata(tensors, [plain_of("optimizer.param_groups", 0, 8192, 1000)])


COMPOSED, PICKLED = composed_example(), pickle.dumps(metadata_of_one_tensor())


@pytest.mark.parametrize("content", [COMPOSED, PICKLED], ids=["ours", "vanilla"])
def test_a_truncated_file_is_damaged_wherever_it_ends(content):
    parse_metadata(content, SOURCE)
    for nbytes in range(len(content)):
        with pytest.raises(CheckpointDamagedError, match=SOURCE):
            parse_metadata(content[:nbytes], SOURCE)


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 500, COMPOSED + b"\0", COMPOSED + COMPOSED, b"N.", b"\x80\x04K\x01Q."]
)
def test_anything_but_one_pickle_of_metadata_is_damaged(content):
    with pytest.raises(CheckpointDamagedError, match=SOURCE):
        parse_metadata(content, SOURCE)


# Coverage.


def tensor_of(shape: Sequence[int], boxes: Sequence[Box]) -> SavedTensor:
    chunks = [chunk_of(offsets, sizes) for offsets, sizes in boxes]
    return SavedTensor("model.w", torch.float32, tuple(shape), chunks)


def check_boxes(shape: Sequence[int], boxes: Sequence[Box]) -> None:
    check_coverage([tensor_of(shape, boxes)], SOURCE)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that tile it: pieces are cut in two at random, in any dimension."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dim]))  # 0 and all: one of the pieces is empty
        boxes.append(Box(offsets, (*sizes[:dim], at, *sizes[dim + 1 :])))
        beyond = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        boxes.append(Box(beyond, (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])))
    return shape, boxes


@settings(max_examples=200, deadline=None)
@given(tilings())
def test_chunks_that_tile_a_tensor_are_accepted(tiling):
    check_boxes(*tiling)


def times_covered(shape: Sequence[int], boxes: Sequence[Box]) -> np.ndarray:
    times = np.zeros(shape, dtype=int)
    for box in boxes:
        times[box.slices()] += 1
    return times


def assert_coverage_is_that_of_counting(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Returns whether the boxes are a tiling."""
    times = times_covered(shape, boxes)
    wrong = np.argwhere(times != 1)
    if not len(wrong):
        check_boxes(shape, boxes)
        return True
    first = tuple(int(offset) for offset in wrong[0])  # in the order of rows
    with pytest.raises(CheckpointDamagedError) as caught:
        check_boxes(shape, boxes)
    assert str(caught.value) == (
        f"Expected each element of model.w in one chunk in {SOURCE}, got the one at {first} in "
        f"{times[first]}."
    )
    return False


@settings(max_examples=300, deadline=None)
@given(tilings(), st.data())
def test_a_lost_added_or_moved_chunk_is_found_at_its_first_element(tiling, data):
    shape, boxes = tiling
    changed = list(boxes)
    _, sizes = changed.pop(data.draw(st.integers(0, len(boxes) - 1)))
    for _ in range(data.draw(st.integers(0, 2))):
        moved = tuple(
            data.draw(st.integers(0, full - size)) for full, size in zip(shape, sizes, strict=True)
        )
        changed.append(Box(moved, sizes))
    assert_coverage_is_that_of_counting(shape, changed)


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [
        ((3, 0), (2, 3)),
        ((0,), (4,)),
        ((0, 0), (5, 3)),
    ],
)
def test_chunks_outside_of_their_tensor_are_found(offsets, sizes):
    with pytest.raises(
        CheckpointDamagedError, match=r"Expected chunks of model.w inside \(4, 3\) in .*, got"
    ):
        check_boxes((4, 3), [(offsets, sizes)])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0, 2)])
def test_tensors_without_elements_need_no_chunks(shape):
    check_boxes(shape, [])
    check_boxes(shape, [((0,) * len(shape), shape)])


@pytest.mark.parametrize("shape", [(1 << 40, 1 << 40), (1 << 62, 0, 4)])
def test_more_elements_than_torch_can_count_are_rejected(shape):
    with pytest.raises(
        CheckpointDamagedError, match=r"Expected model\.w in .* to have at most \d+ elements, got"
    ):
        check_boxes(shape, [((0,) * len(shape), shape)])


def test_a_chunk_or_a_value_without_a_place_is_found():
    for lost, name in enumerate(
        [r"model.w at \(0, 0\)", r"model.w at \(2, 0\)", "optimizer.param_groups"]
    ):
        metadata = metadata_of_one_tensor()
        del metadata.storage_data[list(metadata.storage_data)[lost]]
        with pytest.raises(CheckpointDamagedError, match=f"a place for {name} in {SOURCE}"):
            parse_metadata(pickle.dumps(metadata), SOURCE)
