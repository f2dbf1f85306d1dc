from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.blob import plain_blob
from megatron.core.dist_checkpointing.format.manifest import (
    BLOCK_BYTES,
    INDEX_FILE,
    MARKER_FILE,
    METADATA_FILE,
    TRAIN_STATE_FILE,
    data_file,
    digest,
    digests_of,
    manifest_file,
)
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.store import LocalStore, Then, ignore, open_store
from tests.helpers.checkpoints import (
    Cut,
    chunks_of,
    mark_again,
    raw_bytes,
    read_manifest,
    row_cuts,
    whole,
    write_checkpoint,
)

NAME = "iter_0000010"
ROWS = 3 * BLOCK_BYTES // (64 * 4)  # of 64 fp32 elements: three blocks


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randint(-99, 99, shape, generator=generator).to(dtype)


TENSORS: dict[str, tuple[torch.Tensor, list[Cut]]] = {
    # Three ranks' rows, several blocks each, whose chunks do not end with a block.
    "model.big": (
        _random(ROWS * 3 + 5, 64),
        row_cuts((ROWS * 3 + 5, 64), ROWS + 1, ROWS - 3, ROWS + 7),
    ),
    "model.small": (_random(7, 3, dtype=torch.bfloat16), row_cuts((7, 3), 2, 0, 5)),
    # Cut along two dims, as tensor parallelism would.
    "model.grid": (
        _random(4, 6, 5),
        [
            Cut((0, 0, 0), (3, 2, 5), 0),
            Cut((0, 2, 0), (3, 4, 5), 1),
            Cut((3, 0, 0), (1, 2, 5), 2),
            Cut((3, 2, 0), (1, 4, 5), 0),
        ],
    ),
    "optimizer.state.big.step": (torch.tensor(17.0), whole(torch.tensor(17.0), rank=1)),
    "model.mask": (_random(9).bool(), whole(_random(9), rank=2)),
    "model.nothing": (torch.empty(0, 4), []),
}
GROUPS = [{"lr": 0.1, "betas": [0.9, 0.95], "names": ["big", "small"]}]
PLAIN = {"optimizer.param_groups": GROUPS, "rng.0.python": {"state": [1, 2, 3]}}


class CountingStore(LocalStore):
    """Records the reads of data files: (path, offset, number of bytes); and the files whose sizes
    were asked for.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[tuple[str, int, int]] = []
        self.sized: list[str] = []

    def size(self, path: str) -> int:
        self.sized.append(path)
        return super().size(path)

    def read_into(
        self, path: str, offset: int, buffers: Iterable[memoryview], then: Then = ignore
    ) -> None:
        buffers = list(buffers)
        self.reads.append((path, offset, sum(buffer.nbytes for buffer in buffers)))
        super().read_into(path, offset, buffers, then)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one checkpoint of three ranks. Tests must not change it."""
    root = tmp_path_factory.mktemp("pristine")
    write_checkpoint(
        root / NAME, TENSORS, PLAIN, world_size=3, train_state={"progress": {"iteration": 10}}
    )
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    shutil.copytree(pristine / NAME, tmp_path / NAME)
    return tmp_path


@pytest.fixture
def checkpoint(pristine: Path) -> PublishedCheckpoint:
    return PublishedCheckpoint.open(open_store(pristine), NAME)


def read_all(root: Path, verify: bool = True) -> dict[str, Any]:
    """Everything in the checkpoint, as a load on one rank would read it."""
    checkpoint = PublishedCheckpoint.open(open_store(root), NAME, verify=verify)
    state: dict[str, Any] = {key: checkpoint.read_plain(key) for key in checkpoint.plain}
    for key, saved in checkpoint.tensors.items():
        state[key] = torch.empty(saved.shape, dtype=saved.dtype)
        checkpoint.read(key, (0,) * len(saved.shape), state[key])
    return state


@pytest.mark.parametrize("verify", [True, False])
def test_everything_is_read_as_it_was_saved(pristine: Path, verify: bool):
    state = read_all(pristine, verify)
    assert {key: state[key] for key in PLAIN} == PLAIN
    assert state.keys() == {*TENSORS, *PLAIN}
    for key, (tensor, _) in TENSORS.items():
        assert state[key].dtype == tensor.dtype
        assert raw_bytes(state[key]) == raw_bytes(tensor), key


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_that_open_a_checkpoint_together_ask_for_each_size_once(pristine, world_size):
    store = CountingStore(pristine)
    for rank in range(world_size):
        before = len(store.sized)
        checkpoint = PublishedCheckpoint.open(store, NAME, rank=rank, world_size=world_size)
        assert len(store.sized) - before <= -(-len(checkpoint.marker.files) // world_size)
    assert sorted(store.sized) == sorted(f"{NAME}/{file}" for file in checkpoint.marker.files)


def test_opening_a_checkpoint_reads_no_data(pristine: Path):
    store = CountingStore(pristine)
    checkpoint = PublishedCheckpoint.open(store, NAME)
    assert list(checkpoint.tensors) == list(TENSORS)
    for key, (tensor, cuts) in TENSORS.items():
        saved = checkpoint.tensors[key]
        assert (saved.key, saved.dtype, saved.shape) == (key, tensor.dtype, tuple(tensor.shape))
        assert [(*chunk.box, chunk.rank) for chunk in saved.chunks] == cuts
    assert list(checkpoint.plain) == list(PLAIN)
    assert checkpoint.train_state == {"progress": {"iteration": 10}}
    assert checkpoint.marker.world_size == 3
    assert checkpoint.path == f"{pristine}/{NAME}"
    assert store.reads == []


@st.composite
def wanted_boxes(draw: st.DrawFn) -> tuple[str, Box]:
    key = draw(st.sampled_from(sorted(TENSORS)))
    offsets, sizes = [], []
    for size in TENSORS[key][0].shape:
        begin, end = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        offsets.append(begin)
        sizes.append(end - begin)
    return key, Box(tuple(offsets), tuple(sizes))


class Layouts:
    """Memory of a given shape to read into."""

    @staticmethod
    def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    @staticmethod
    def transposed(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape[::-1], dtype=dtype).permute([*reversed(range(len(shape)))])

    @staticmethod
    def part(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros([size + 2 for size in shape], dtype=dtype)[
            tuple(slice(1, size + 1) for size in shape)
        ]


@settings(max_examples=100, deadline=None)
@given(wanted_boxes(), st.sampled_from(["contiguous", "transposed", "part"]), st.booleans())
def test_any_box_is_read_into_any_memory(
    pristine: Path, wanted: tuple[str, Box], layout: str, verify: bool
):
    key, box = wanted
    tensor = TENSORS[key][0]
    checkpoint = PublishedCheckpoint.open(open_store(pristine), NAME, verify=verify)
    out = getattr(Layouts, layout)(box.sizes, tensor.dtype)
    num_read = checkpoint.read(key, box.offsets, out)
    assert raw_bytes(out) == raw_bytes(tensor[box.slices()])
    out.zero_()
    whole = out if out._base is None else out._base
    assert not whole.any(), "memory around the box is not written"
    if verify:
        nothing = torch.empty(box.sizes, dtype=checkpoint.tensors[key].dtype, device="meta")
        assert checkpoint.read(key, box.offsets, nothing) == num_read


def test_only_the_blocks_that_a_box_touches_are_read(pristine: Path):
    store = CountingStore(pristine)
    checkpoint = PublishedCheckpoint.open(store, NAME)
    # Rank 1's chunk starts at row ROWS + 1 and has two blocks and a part of a third.
    out = torch.empty(10, 64)
    first = (
        ROWS + 1 + BLOCK_BYTES // 256 - 4
    )  # rows of 256 bytes: six before the second block, four in it
    assert checkpoint.read("model.big", (first, 0), out) == 2 * BLOCK_BYTES
    assert torch.equal(out, TENSORS["model.big"][0][first : first + 10])
    assert {(path, nbytes) for path, _, nbytes in store.reads} == {
        (f"{NAME}/{data_file(1)}", BLOCK_BYTES)
    }
    one_row = torch.empty(1, 64)
    assert checkpoint.read("model.big", (ROWS + 1 + ROWS - 4, 0), one_row) == BLOCK_BYTES - 3 * 256


def test_blocks_inside_the_box_are_read_once(pristine: Path):
    store = CountingStore(pristine)
    checkpoint = PublishedCheckpoint.open(store, NAME)
    out = torch.empty_like(TENSORS["model.big"][0])
    assert checkpoint.read("model.big", (0, 0), out) == out.nbytes
    assert sum(nbytes for *_, nbytes in store.reads) == out.nbytes
    assert len(store.reads) == 3


def test_columns_are_read_block_by_block_and_no_block_twice(tmp_path: Path):
    # A row is two blocks; the wanted columns are in the second of each.
    columns = 2 * BLOCK_BYTES // 4
    tensor = torch.arange(6.0).reshape(6, 1) + torch.arange(columns) / columns
    write_checkpoint(tmp_path / NAME, {"model.w": (tensor, whole(tensor))}, {}, world_size=1)
    store = CountingStore(tmp_path)
    out = torch.empty(4, 8)
    assert (
        PublishedCheckpoint.open(store, NAME).read("model.w", (1, columns - 8), out)
        == 4 * BLOCK_BYTES
    )
    assert torch.equal(out, tensor[1:5, -8:])
    first = store.reads[0][1] - 3 * BLOCK_BYTES
    assert [(offset - first) // BLOCK_BYTES for _, offset, _ in store.reads] == [3, 5, 7, 9]
    # Rows of less than a block: all blocks hold some of the columns.
    narrow = tensor.reshape(-1, 1024)
    write_checkpoint(
        tmp_path / "iter_0000020", {"model.w": (narrow, whole(narrow))}, {}, world_size=1
    )
    out = torch.empty(narrow.shape[0], 8)
    assert (
        PublishedCheckpoint.open(store, "iter_0000020").read("model.w", (0, 16), out)
        == tensor.nbytes
    )
    assert torch.equal(out, narrow[:, 16:24])


def test_without_digests_only_what_is_wanted_is_read(pristine: Path):
    checkpoint = PublishedCheckpoint.open(open_store(pristine), NAME, verify=False)
    out = torch.empty(10, 64)
    assert checkpoint.read("model.big", (ROWS - 4, 0), out) == out.nbytes
    assert torch.equal(out, TENSORS["model.big"][0][ROWS - 4 : ROWS + 6])


def test_manifests_are_read_when_they_are_needed_and_once(
    pristine: Path, monkeypatch: pytest.MonkeyPatch
):
    store, read = LocalStore(pristine), []
    monkeypatch.setattr(
        store, "read", lambda path, *most: read.append(path) or LocalStore.read(store, path, *most)
    )
    checkpoint = PublishedCheckpoint.open(store, NAME)
    assert not [path for path in read if "manifest" in path]
    out = torch.empty(())
    for _ in range(2):
        checkpoint.read("optimizer.state.big.step", (), out)
    assert [path for path in read if "manifest" in path] == [f"{NAME}/{manifest_file(1)}"]


def test_threads_may_read_side_by_side(checkpoint: PublishedCheckpoint):
    tensor = TENSORS["model.big"][0]
    barrier = threading.Barrier(4)

    def rows(number: int) -> bool:
        barrier.wait()
        out = torch.empty(ROWS, 64)
        checkpoint.read("model.big", (number * 100, 0), out)
        return torch.equal(out, tensor[number * 100 : number * 100 + ROWS])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(rows, range(8)))


@pytest.mark.parametrize(
    ("key", "offsets", "out", "message"),
    [
        ("model.grid", (0, 0, 0), torch.empty(4, 6), "Expected a box of 'model.grid' of shape"),
        ("model.grid", (1, 0, 0), torch.empty(4, 6, 5), "got .4, 6, 5. at .1, 0, 0."),
        (
            "model.grid",
            (0, 0, 0),
            torch.empty(4, 6, 5).int(),
            "Expected torch.float32 for 'model.grid', got torch.int32",
        ),
    ],
)
def test_a_box_outside_of_the_tensor_is_rejected(
    checkpoint: PublishedCheckpoint,
    key: str,
    offsets: tuple[int, ...],
    out: torch.Tensor,
    message: str,
):
    with pytest.raises(ValueError, match=message):
        checkpoint.read(key, offsets, out)


def test_a_key_that_is_not_there_is_named(checkpoint: PublishedCheckpoint):
    with pytest.raises(
        CheckpointError,
        match=r"Expected the tensor 'model.no' in .*iter_0000010, got no such key",
    ):
        checkpoint.read("model.no", (), torch.empty(()))
    with pytest.raises(
        CheckpointError, match=r"Expected the tensor 'optimizer.param_groups' in .*, got plain data"
    ):
        checkpoint.read("optimizer.param_groups", (), torch.empty(()))
    with pytest.raises(
        CheckpointError, match=r"Expected plain data 'model.big' in .*, got a tensor"
    ):
        checkpoint.read_plain("model.big")


FILES = [
    MARKER_FILE,
    METADATA_FILE,
    INDEX_FILE,
    TRAIN_STATE_FILE,
    *(name for rank in range(3) for name in (data_file(rank), manifest_file(rank))),
]


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_or_one_of_another_length_is_named(root: Path, file: str):
    path = root / NAME / file
    content = path.read_bytes()
    for other in (content[:-1], content + b" ", b"", None):
        path.unlink() if other is None else path.write_bytes(other)
        with pytest.raises(CheckpointDamagedError, match=file):
            read_all(root, verify=False)


@settings(max_examples=40, deadline=None)
@given(
    # No load reads `.metadata`; the audit checks it.
    st.sampled_from([name for name in FILES if not name.endswith((".distcp", METADATA_FILE))]),
    st.data(),
)
def test_a_flipped_bit_in_a_small_file_is_detected(pristine: Path, file: str, data: st.DataObject):
    path = pristine / NAME / file
    content = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    try:
        path.write_bytes(_flipped(content, bit))
        with pytest.raises(CheckpointDamagedError, match=file):
            read_all(pristine)
    finally:
        path.write_bytes(content)


def _flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2), st.data())
def test_any_flipped_bit_in_data_is_detected_and_the_key_named(
    pristine: Path, rank: int, data: st.DataObject
):
    number = data.draw(st.integers(0, len(chunks_of(pristine / NAME, rank)) - 1))
    tensor, chunk = chunks_of(pristine / NAME, rank)[number]
    bit = data.draw(st.integers(0, 8 * tensor.chunk_nbytes(chunk) - 1))
    path = pristine / NAME / data_file(rank)
    content = path.read_bytes()
    try:
        path.write_bytes(_flipped(content, 8 * chunk.offset + bit))
        with pytest.raises(CheckpointDamagedError, match=rf"'{tensor.key}'.*{data_file(rank)}"):
            read_all(pristine)
        if tensor.key in TENSORS:
            read_all(pristine, verify=False)
            checkpoint = PublishedCheckpoint.open(open_store(pristine), NAME)
            nothing = torch.empty(chunk.box.sizes, dtype=tensor.dtype, device="meta")
            with pytest.raises(CheckpointDamagedError, match=rf"'{tensor.key}'.*{data_file(rank)}"):
                checkpoint.read(tensor.key, chunk.box.offsets, nothing)
    finally:
        path.write_bytes(content)


def test_a_file_that_is_cut_while_it_is_read_is_named(root: Path):
    checkpoint = PublishedCheckpoint.open(open_store(root), NAME)
    with (root / NAME / data_file(0)).open("r+b") as stream:
        stream.truncate(5000)
    with pytest.raises(CheckpointDamagedError, match=data_file(0)):
        checkpoint.read("model.big", (0, 0), torch.empty(9, 64))
    (root / NAME / data_file(1)).unlink()
    with pytest.raises(
        CheckpointDamagedError, match=f"Expected to read .*{data_file(1)}, got FileNotFoundError"
    ):
        checkpoint.read("optimizer.state.big.step", (), torch.empty(()))


def test_errors_of_the_system_that_are_no_damage_have_another_type(
    pristine: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalStore, "read", refuse)
    with pytest.raises(
        CheckpointError, match=r"Expected to read .*published.json, got PermissionError"
    ) as caught:
        PublishedCheckpoint.open(open_store(pristine), NAME)
    assert not isinstance(caught.value, CheckpointDamagedError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: {"save_id": "another"}, "save id a-save in .*_0.json, got another"),
        (lambda _: {"rank": 1}, "rank 0 in .*_0.json, got 1"),
        (lambda _: {"layout": digest(b"another")}, "the 6 chunks .* got 6 others in .*_0.json"),
        (lambda it: {"digests": it.digests[1:]}, "the 6 chunks .* got 5 others in .*_0.json"),
        (
            lambda manifest: {"digests": (manifest.digests[0][1:], *manifest.digests[1:])},
            r"4 digests of 'model.big' at \(0, 0\) in .*manifest_0.json, got 3",
        ),
    ],
)
def test_a_manifest_that_contradicts_the_index_is_rejected(root: Path, change: Any, message: str):
    manifest = read_manifest(root / NAME, 0)
    changed = replace(manifest, **change(manifest))
    (root / NAME / manifest_file(0)).write_bytes(changed.to_bytes())
    mark_again(root / NAME)
    with pytest.raises(CheckpointDamagedError, match=message):
        read_all(root)


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff"])
def test_a_train_state_that_is_no_object_is_rejected(root: Path, content: bytes):
    (root / NAME / TRAIN_STATE_FILE).write_bytes(content)
    mark_again(root / NAME)
    with pytest.raises(CheckpointDamagedError, match=TRAIN_STATE_FILE):
        PublishedCheckpoint.open(open_store(root), NAME)


def test_plain_data_that_cannot_be_unpickled_safely_is_rejected(root: Path):
    folder = root / NAME
    tensor, chunk = chunks_of(folder, 0)[-1]
    assert tensor.key == "rng.0.python"
    content = bytearray((folder / data_file(0)).read_bytes())
    changed = plain_blob(PLAIN["rng.0.python"]).replace(b"state", b"s\x00\xff\xfee")
    content[chunk.offset :] = changed
    (folder / data_file(0)).write_bytes(content)
    manifest = read_manifest(folder, 0)
    digests = (*manifest.digests[:-1], digests_of(changed))
    (folder / manifest_file(0)).write_bytes(replace(manifest, digests=digests).to_bytes())
    mark_again(folder)
    with pytest.raises(
        CheckpointDamagedError,
        match=r"Expected .* plain data 'rng.0.python' in .*__0_0.distcp, got",
    ):
        read_all(root)
