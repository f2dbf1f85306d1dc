"""`.metadata` as vanilla DCP reads and writes it, as someone with bad intentions might write it,
and with holes.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import pathlib
import pickle
import pickletools
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import assume, example, given, settings
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
from megatron.core.dist_checkpointing.format.blob import blob_frame, blob_layout, plain_blob
from megatron.core.dist_checkpointing.format.index import blob_place
from megatron.core.dist_checkpointing.format.manifest import data_file, writer_of
from megatron.core.dist_checkpointing.format.metadata import compose_metadata, nested_path
from megatron.core.dist_checkpointing.format.metadata_reading import (
    _ADMITTED,
    Blob,
    DcpIndex,
    parse_metadata,
)
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.coverage import check_coverage
from megatron.core.dist_checkpointing.layout.saved import SavedChunk, SavedTensor
from tests.helpers.ranks import run_ranks

SOURCE = "iter_0000010/.metadata"
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]


def chunk_of(
    offsets: Sequence[int], sizes: Sequence[int], rank: int = 0, offset: int = 4096
) -> SavedChunk:
    """A box of a tensor, whose data lies at `offset` of a rank's file."""
    return SavedChunk(Box(tuple(offsets), tuple(sizes)), rank, data_file(rank), offset)


def plain_of(key: str, rank: int, offset: int, nbytes: int) -> SavedTensor:
    return SavedTensor(key, torch.uint8, (nbytes,), [chunk_of((0,), (nbytes,), rank, offset)])


# What DCP itself would have made of it.


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
    """What a load needs of these objects."""
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
        # No chunk has more bytes than a file; what it has is at one place or another of that.
        sizes = st.tuples(*[small] * (num_dims - 1), *[small | st.integers(0, 1 << 30)][:num_dims])
        chunks = [
            chunk_of(place, draw(sizes), draw(small), 4096 + draw(large))
            for place in draw(st.lists(places, max_size=5, unique=True))
        ]
        dtype = draw(st.sampled_from(DTYPES))
        found.append(SavedTensor(f"model.{key}", dtype, draw(places), chunks))
    return found


@settings(max_examples=200, deadline=None)
@given(drawn_tensors(), st.lists(st.integers(0, 300), max_size=300, unique=True))
def test_what_is_composed_is_the_pickle_of_what_dcp_would_have_made(tensors, ranks):
    plain = [plain_of(f"rng.{rank}.torch", rank, 1 << 33, 1000 + rank) for rank in ranks]
    content = compose_metadata(iter(tensors), iter(plain))
    assert content == compose_metadata(copy.deepcopy(tensors), copy.deepcopy(plain))
    expected = dcp_metadata(tensors, plain)
    written = pickle.loads(content)
    assert written == expected
    assert list(written.state_dict_metadata) == list(expected.state_dict_metadata)
    # Indices are equal whatever chunk of the list they point at.
    numbers = [[index.index for index in each.storage_data] for each in (written, expected)]
    assert numbers[0] == numbers[1]
    assert_same(parse_metadata(content, SOURCE), expected)
    assert pickletools.optimize(content)  # every opcode is where it may be


@settings(max_examples=100, deadline=None)
@given(drawn_tensors())
def test_what_is_composed_describes_the_same_tensors_with_the_places_of_blobs(tensors):
    plain = plain_of("p", 1, 5, 9)
    found, _, plain_blobs = parse_metadata(compose_metadata(tensors, [plain]), SOURCE)
    assert plain_blobs == {"p": Blob("__1_0.distcp", 5, 9, [])}
    assert list(found) == [tensor.key for tensor in tensors]
    for tensor in tensors:
        blobs = [chunk._replace(offset=blob_place(tensor, chunk)[0]) for chunk in tensor.chunks]
        assert found[tensor.key] == tensor._replace(chunks=blobs)


def test_who_wrote_a_chunk_is_told_by_the_name_of_its_file_or_not_known():
    metadata = metadata_of_one_tensor()
    info(metadata).relative_path = "part/x.distcp"
    chunks = parse_metadata(pickle.dumps(metadata), SOURCE).tensors["model.w"].chunks
    assert [(chunk.file, chunk.rank) for chunk in chunks] == [
        ("part/x.distcp", -1),
        ("__1_0.distcp", 1),
    ]
    assert writer_of("part/x.distcp") == -1


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


# Vanilla DCP reads it.


def write_checkpoint(
    folder: Path, values: dict[str, Any], boxes: dict[str, list[tuple[int, Any, Any]]]
) -> None:
    """A checkpoint of blobs whose data begin on multiples of 4096.

    Args:
        boxes: for each tensor the rank, offsets and sizes of its chunks.
    """
    files: dict[int, bytearray] = {}

    def add(rank: int, header: bytes, data: bytes, footer: bytes) -> tuple[int, int]:
        file = files.setdefault(rank, bytearray())
        file += bytes(-(len(file) + len(header)) % 4096)
        offset = len(file)
        file += header + data + footer
        return offset, len(file) - offset

    tensors, plain = [], []
    for key, value in values.items():
        if not isinstance(value, torch.Tensor):
            plain.append(plain_of(key, 1, *add(1, plain_blob(value), b"", b"")))
            continue
        chunks = []
        for rank, offsets, sizes in boxes[key]:
            box = value[
                tuple(
                    slice(offset, offset + size)
                    for offset, size in zip(offsets, sizes, strict=True)
                )
            ]
            header, footer = blob_frame(value.dtype, sizes)
            data = box.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            offset, nbytes = add(rank, header, data, footer)
            assert nbytes == blob_layout(value.dtype, sizes).nbytes
            chunks.append(chunk_of(offsets, sizes, rank, offset + len(header)))
        tensors.append(SavedTensor(key, value.dtype, tuple(value.shape), chunks))
    content = compose_metadata(tensors, plain)
    check_coverage(parse_metadata(content, SOURCE).tensors.values(), SOURCE)
    (folder / ".metadata").write_bytes(content)
    for rank, file in files.items():
        (folder / f"__{rank}_0.distcp").write_bytes(file)


VANILLA = """
import sys
sys.modules["megatron"] = None  # must not be imported
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

folder = sys.argv[1]
expected = torch.load(folder + "/expected.pt", weights_only=True)

def assert_same(got, place=""):
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert got[key].dtype == value.dtype and got[key].shape == value.shape, key
            ours, theirs = (tensor.reshape(-1).view(torch.uint8) for tensor in (got[key], value))
            assert torch.equal(ours, theirs), key
        else:
            assert got[key] == value, key

blank = lambda value: torch.full_like(value, 1) if isinstance(value, torch.Tensor) else None
flat = {key: blank(value) for key, value in expected.items()}
dcp.load(flat, checkpoint_id=folder)
assert_same(flat)

dcp_to_torch_save(folder, folder + "/all.pt")
nested = torch.load(folder + "/all.pt", weights_only=True)
states = nested["optimizer"]["state"]
got = {f"model.{name}": value for name, value in nested["model"].items()}
for name in states:
    got |= {f"optimizer.state.{name}.{key}": value for key, value in states[name].items()}
got["optimizer.param_groups"] = nested["optimizer"]["param_groups"]
for rank, by_name in nested["rng"].items():
    got |= {f"rng.{rank}.{name}": value for name, value in by_name.items()}
assert got.keys() == expected.keys()
assert_same(got)

target = {"model": {"layers.0.weight": torch.ones(37, 5)}}
dcp.load(target, checkpoint_id=folder)
assert torch.equal(target["model"]["layers.0.weight"], expected["model.layers.0.weight"])
print("read", len(expected))
"""


def test_vanilla_dcp_reads_a_checkpoint_put_together_from_frames_and_composed_metadata(tmp_path):
    torch.manual_seed(0)
    values = {
        "model.layers.0.weight": torch.randn(37, 5),
        "model.layers.0.norm": torch.randn(9).bfloat16(),
        "optimizer.state.layers.0.weight.exp_avg": torch.randn(37, 5).to(torch.float8_e4m3fn),
        "optimizer.state.layers.0.weight.step": torch.tensor(7.0),
        "optimizer.state.layers.0.weight.grid": torch.randn(6, 300, 2, dtype=torch.float64),
        "optimizer.param_groups": [
            {"lr": 0.1, "betas": (0.9, 0.95), "params": ["layers.0.weight"]}
        ],
        "rng.0.torch": torch.get_rng_state(),
        "rng.1.python": (3, (1, 2, 3), None),
    }
    rows = [(2, (0, 0), (10, 5)), (0, (10, 0), (1, 5)), (1, (11, 0), (26, 5))]
    grid = [
        (i, (a, b, 0), (c, d, 2))
        for i, (a, c) in enumerate([(0, 4), (4, 2)])
        for b, d in [(0, 1), (1, 256), (257, 43)]
    ]
    boxes = {
        "model.layers.0.weight": rows,
        "model.layers.0.norm": [(0, (0,), (9,))],
        "optimizer.state.layers.0.weight.exp_avg": rows,
        "optimizer.state.layers.0.weight.step": [(2, (), ())],
        "optimizer.state.layers.0.weight.grid": grid,
        "rng.0.torch": [(0, (0,), (values["rng.0.torch"].numel(),))],
    }
    write_checkpoint(tmp_path, values, boxes)
    torch.save(values, tmp_path / "expected.pt")
    result = subprocess.run(
        [sys.executable, "-c", VANILLA, tmp_path], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "read 8\n"


# We read what vanilla DCP writes.


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


def test_what_vanilla_dcp_writes_is_read_as_it_is(tmp_path):
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


# Pickles with bad intentions.


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
    """`command` in every place of a metadata where an object may stand."""
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


def test_a_pickle_that_runs_a_command_is_refused_by_name_and_the_command_has_not_run(tmp_path):
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
        (getattr, (1, "real"), "builtins.getattr"),
        (torch.load, ("/nowhere",), "torch.serialization.load"),
        (torch.Tensor, (3,), "torch.Tensor"),
        (torch.jit.load, ("/nowhere",), "torch.jit._serialization.load"),
        (pathlib.Path.unlink, ("/nowhere",), "pathlib.*unlink"),
        (dcp.load, ({},), "torch.distributed.checkpoint.state_dict_loader.load"),
    ],
)
def test_only_the_classes_of_dcp_metadata_may_be_named(function, args, name):
    content = pickle.dumps(Command(function, *args))
    with pytest.raises(CheckpointError, match=f"{name}|builtins.getattr"):
        parse_metadata(content, SOURCE)


def test_a_persistent_id_is_refused():
    with pytest.raises(CheckpointError, match="persistent"):
        parse_metadata(b"\x80\x04K\x01Q.", SOURCE)


def build_on(module: str, name: str, state: bytes) -> bytes:
    """A pickle that names something and sets its attributes."""
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
def test_a_pickle_cannot_set_attributes_of_what_it_names(module, name, slots):
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
        "../victim",
        "a/../../victim",
        "/etc/passwd",
        "..",
        "",
        "C:\\victim",
        "..\\victim",
        "\\\\host\\victim",
        "a\0",
    ],
)
def test_data_files_outside_of_the_folder_are_refused(file):
    metadata = metadata_of_one_tensor()
    next(iter(metadata.storage_data.values())).relative_path = file
    with pytest.raises(CheckpointError, match=f"Expected data files in the directory of {SOURCE}"):
        parse_metadata(pickle.dumps(metadata), SOURCE)


def test_data_files_in_a_folder_of_the_checkpoint_are_accepted():
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


def share_transforms(metadata: Metadata) -> None:
    put(info, "transform_descriptors", ["zstd"])(metadata)
    put(entry, "size", info(metadata).transform_descriptors)(metadata)


WRONG: dict[str, Callable[[Metadata], None]] = {
    "strings for sizes": put(lambda it: entry(it).chunks[1], "sizes", ("2", "3")),
    "a tuple for sizes": put(lambda it: entry(it).chunks[1], "sizes", (2, 3)),
    "a negative offset": put(lambda it: entry(it).chunks[1], "offsets", torch.Size((-2, 0))),
    "a string for a chunk": lambda it: entry(it).chunks.append("chunk"),
    "a tuple of chunks": put(entry, "chunks", ()),
    "no size": lambda it: entry(it).__dict__.pop("size"),
    "a size of a number": put(entry, "size", 12),
    "a dtype by name": put(lambda it: entry(it).properties, "dtype", "float32"),
    "a chunk for properties": lambda it: put(entry, "properties", entry(it).chunks[0])(it),
    "a number for a key": lambda it: it.state_dict_metadata.update({3: BytesStorageMetadata()}),
    "a string for an entry": lambda it: it.state_dict_metadata.update({"model.w": "entry"}),
    "a field too many": put(lambda it: entry(it).chunks[1], "more", 1),
    "a field of bytes": put(lambda it: it.state_dict_metadata["optimizer.param_groups"], "more", 1),
    "a list of entries": put(lambda it: it, "state_dict_metadata", []),
    "no places": put(lambda it: it, "storage_data", None),
    "a negative place": put(info, "offset", -1),
    "a bool for a length": put(info, "length", True),
    "a number for a file": put(info, "relative_path", 5),
    "a list for a file": put(info, "relative_path", ["a"]),
    "numbers for transforms": put(info, "transform_descriptors", [1]),
    "transforms for a size": share_transforms,
    "an offset for transforms": lambda it: put(info, "transform_descriptors", index(it).offset)(it),
    "a string for a place": lambda it: it.storage_data.update({index(it): "place"}),
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


def test_objects_that_stand_in_several_places_are_read():
    metadata = metadata_of_one_tensor()
    metadata.state_dict_metadata["model.tied"] = entry(metadata)
    first = entry(metadata).chunks[0]
    for chunk in entry(metadata).chunks:
        metadata.storage_data[MetadataIndex("model.tied", chunk.offsets)] = info(metadata)
    metadata.state_dict_metadata["model.other"] = TensorStorageMetadata(
        TensorProperties(), first.sizes, [first]
    )
    metadata.storage_data[MetadataIndex("model.other", first.offsets)] = info(metadata)
    assert_same(parse_metadata(pickle.dumps(metadata), SOURCE), metadata)


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
    "content", [b"", b"\0" * 500, COMPOSED + b"\0", COMPOSED + COMPOSED, b"N.", b"{}", b"(" * 999]
)
def test_what_is_no_pickle_of_metadata_or_more_than_that_is_damaged(content):
    with pytest.raises(CheckpointDamagedError, match=SOURCE):
        parse_metadata(content, SOURCE)


def has_large_memo(content: bytes) -> bool:
    """Whether an opcode has Python's unpickler allocate a memo of millions of places."""
    with contextlib.suppress(Exception):  # where the pickle is damaged, it ends
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "LONG_BINPUT" and argument > 1 << 20:
                return True
    return False


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([COMPOSED, PICKLED]), st.integers(0), st.integers(1, 255))
@example(PICKLED, 6418, 124)  # a record as the name of a field
def test_altered_bytes_never_end_in_anything_but_a_metadata_or_a_checkpoint_error(
    content, place, change
):
    damaged = bytearray(content)
    damaged[place % len(content)] ^= change
    assume(not has_large_memo(bytes(damaged)))
    with contextlib.suppress(CheckpointError):
        metadata = parse_metadata(bytes(damaged), SOURCE)
        check_coverage(metadata.tensors.values(), SOURCE)


BOMBS = {
    "a memory format of 2 ** 60 tuples": b"ctorch.distributed.checkpoint.metadata\n"
    b"_MEM_FORMAT_ENCODING\n)" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(60)) + b"\x85R.",
    "a size in itself": b"ctorch\nSize\n]q\x00h\x00a\x85R.",
    "a size of strings": b"ctorch\nSize\n\x8c\x01a\x85\x85R.",
    "a folder of numbers": b"cpathlib\nPosixPath\nK\x01\x85R.",
    "a list for a dict": b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81]q\x00h\x00ab.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_in_the_place_of_metadata_is_one_short_error(name):
    with pytest.raises(CheckpointDamagedError, match=SOURCE) as caught:
        parse_metadata(b"\x80\x04" + BOMBS[name], SOURCE)
    assert len(str(caught.value)) < 500


def test_a_list_of_chunks_that_all_tensors_share_is_not_read_again_for_each():
    metadata = metadata_of_one_tensor()
    metadata.state_dict_metadata |= {f"model.{number}": entry(metadata) for number in range(100)}
    with pytest.raises(
        CheckpointDamagedError, match=f"no more chunks than the 3 places in {SOURCE}"
    ):
        parse_metadata(pickle.dumps(metadata), SOURCE)


def cpu_seconds_to_parse(metadata: Metadata) -> float:
    """The shortest of three times."""
    content = pickle.dumps(metadata)
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        parse_metadata(content, SOURCE)
        seconds.append(time.process_time() - begin)
    return min(seconds)


def sharing_descriptors(length: int) -> Metadata:
    shared = ["a"] * length
    places = {
        MetadataIndex("k", torch.Size([i])): _StorageInfo("f", 0, 1, shared) for i in range(1000)
    }
    return Metadata({}, storage_data=places)


def test_what_a_thousand_records_share_is_looked_at_once():
    # To look at all of it for each record took more than twenty times as long.
    long, short = map(cpu_seconds_to_parse, map(sharing_descriptors, (5000, 1)))
    assert long < 5 * short


LONG: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "a key": (
        lambda it: it.state_dict_metadata.update({"k" * 4097: BytesStorageMetadata()}),
        "keys of at most 4096",
    ),
    "the key of an index": (put(index, "fqn", "k" * 4097), "keys of at most 4096"),
    "a size": (
        put(entry, "size", torch.Size([1] * 65)),
        "at most 64 sizes",
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_what_readers_walk_for_every_chunk_has_a_bounded_length(name):
    change, message = LONG[name]
    metadata = metadata_of_one_tensor()
    change(metadata)
    with pytest.raises(CheckpointDamagedError, match=f"Expected .*{message}"):
        parse_metadata(pickle.dumps(metadata), SOURCE)


def test_the_longest_keys_are_read():
    longest = SavedTensor("k" * 4096, torch.float32, (0,), [])
    parse_metadata(compose_metadata([longest], []), SOURCE)
    with pytest.raises(CheckpointDamagedError, match="keys of at most 4096"):
        parse_metadata(compose_metadata([longest._replace(key="k" * 4097)], []), SOURCE)


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


def test_all_sets_of_boxes_in_a_small_tensor_are_judged_as_by_counting():
    shape = (2, 3)
    ranges = [[(a, b - a) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    boxes = [
        Box(tuple(a for a, _ in box), tuple(n for _, n in box))
        for box in itertools.product(*ranges)
    ]
    judged = [
        assert_coverage_is_that_of_counting(shape, chosen)
        for number in range(5)
        for chosen in itertools.combinations_with_replacement(boxes, number)
    ]
    assert len(judged) == 7315
    assert sum(judged) == 26  # of the 34 ways to cut it up, 7 are into five boxes and 1 is into six


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [
        ((3, 0), (2, 3)),
        ((0, 1), (4, 3)),
        ((0,), (4,)),
        ((0, 0, 0), (4, 3, 1)),
        ((9, 9), (0, 0)),
        ((0, 0), (5, 3)),
    ],
)
def test_chunks_outside_of_their_tensor_are_found(offsets, sizes):
    with pytest.raises(
        CheckpointDamagedError, match=r"Expected chunks of model.w inside \(4, 3\) in .*, got"
    ):
        check_boxes((4, 3), [(offsets, sizes)])


@example(torch.Size((0, 3)))
@example(torch.Size((3, 0, 2)))
@given(st.lists(st.integers(0, 3), max_size=3).filter(lambda sizes: 0 in sizes).map(torch.Size))
def test_tensors_without_elements_need_no_chunks(shape):
    check_boxes(shape, [])
    check_boxes(shape, [((0,) * len(shape), tuple(shape))])


def test_a_tensor_without_chunks_is_not_covered():
    for shape in [(), (1,), (2, 3)]:
        with pytest.raises(CheckpointDamagedError, match=r"got the one at .* in 0"):
            check_boxes(shape, [])


def test_boxes_cut_along_many_dimensions_are_refused_before_their_corners_are_counted():
    shape = (2,) * 40
    corner = ((0,) * 40, (1,) * 40)
    with pytest.raises(CheckpointDamagedError, match="cut along at most 8 dimensions, got 40"):
        check_boxes(shape, [corner])


@pytest.mark.parametrize("shape", [(1 << 60,), (1 << 40, 1 << 40), (0, 1 << 62), (1 << 62, 0, 4)])
def test_more_elements_than_torch_can_count_are_refused(shape):
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
