from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.format.manifest import (
    BLOCK_BYTES,
    INDEX_FILE,
    MARKER_FILE,
    METADATA_FILE,
    data_file,
    manifest_file,
)
from megatron.core.dist_checkpointing.format.metadata import compose_metadata
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.layout.saved import SavedTensor
from megatron.core.dist_checkpointing.store import open_store
from megatron_hybrid.checkpoint.audit import Audit
from tests.helpers.checkpoints import (
    blob_span,
    chunks_of,
    mark_again,
    read_index,
    read_manifest,
    row_cuts,
    whole,
    write_checkpoint,
)

NAME = "iter_0000010"
BIG = torch.arange(5 * BLOCK_BYTES // 8 + 100).float().reshape(-1, 4)  # two and a half blocks
TENSORS = {
    "model.big": (BIG, row_cuts(BIG.shape, 1000, BIG.shape[0] - 1000)),
    "model.small": (torch.arange(12.0).reshape(4, 3).bfloat16(), row_cuts((4, 3), 2, 2)),
    "optimizer.state.big.step": (torch.tensor(3.0), whole(torch.tensor(3.0), rank=1)),
}
PLAIN = {"optimizer.param_groups": [{"lr": 0.1}]}


def problems(root: Path) -> list[str]:
    audit = Audit(open_store(root), NAME, [].append)
    audit.run()
    return audit.problems


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine")
    write_checkpoint(root / NAME, TENSORS, PLAIN, world_size=2)
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine / NAME, tmp_path / NAME)
    return tmp_path


def flip(path: Path, *bits: int) -> None:
    content = bytearray(path.read_bytes())
    for bit in bits:
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_written_checkpoint_has_no_problems_and_is_read_completely(pristine):
    steps: list[int] = []
    audit = Audit(open_store(pristine), NAME, steps.append)
    audit.run()
    assert audit.problems == []
    data_nbytes = sum((pristine / NAME / data_file(rank)).stat().st_size for rank in range(2))
    assert audit.num_bytes == sum(steps) == data_nbytes


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1), st.data())
def test_any_flipped_bit_in_a_data_file_is_found(pristine, rank, data):
    path = pristine / NAME / data_file(rank)
    # Where files are small, most bits are data: others are as likely to be drawn.
    ends = [0]
    for tensor, chunk in chunks_of(pristine / NAME, rank):
        begin, end = blob_span(pristine / NAME, tensor, chunk)
        ends += [begin, chunk.offset, chunk.offset + tensor.chunk_nbytes(chunk), end]
    spans = [span for span in itertools.pairwise(ends) if span[0] < span[1]]
    begin, end = data.draw(st.sampled_from(spans))
    bit = data.draw(st.integers(8 * begin, 8 * end - 1))
    flip(path, bit)
    try:
        (problem,) = problems(pristine)
        assert data_file(rank) in problem
    finally:
        flip(path, bit)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([METADATA_FILE, INDEX_FILE, manifest_file(0)]), st.data())
def test_any_flipped_bit_in_a_small_file_is_found(pristine, file, data):
    path = pristine / NAME / file
    bit = data.draw(st.integers(0, 8 * path.stat().st_size - 1))
    flip(path, bit)
    try:
        assert [file in problem for problem in problems(pristine)] == [True]
    finally:
        flip(path, bit)


def test_every_problem_is_listed(root):
    folder = root / NAME
    big, small = chunks_of(folder, 1)[:2]
    block = 8 * BLOCK_BYTES
    flip(
        folder / data_file(1),
        8 * big[1].offset,
        8 * big[1].offset + 2 * block,
        8 * blob_span(folder, *small)[0] + 99,
    )
    flip(folder / data_file(0), 5)
    flip(folder / manifest_file(0), 77)
    (folder / "train_state.json").unlink()
    found = problems(root)
    places = ["train_state.json", "train_state.json", "manifest_0.json", "2 of 3 blocks"]
    for place, problem in zip([*places, "'model.small' at (2, 0)"], found, strict=True):
        assert place in problem


def test_a_file_that_ends_too_early_is_gone_through_to_its_end(root):
    path = root / NAME / data_file(1)
    (_, first), (_, second) = chunks_of(root / NAME, 1)[:2]
    flip(path, 8 * first.offset)
    with path.open("r+b") as stream:
        stream.truncate(second.offset)
    size, damaged, truncated = problems(root)
    assert f"bytes in {path}, got {second.offset}" in size
    assert "digests of 'model.big'" in damaged
    assert str(path) in truncated


@pytest.mark.parametrize("is_missing", [True, False])
def test_without_a_marker_the_rest_is_still_looked_at(root, is_missing):
    marker = root / NAME / MARKER_FILE
    if is_missing:
        marker.unlink()
    else:
        flip(marker, 100)
    (only,) = problems(root)
    assert str(marker) in only
    flip(root / NAME / data_file(1), 8 * 5000)
    assert len(problems(root)) == 2


def test_the_frame_of_another_torch_cannot_be_known(tmp_path):
    state = {"versions": {"torch": "2.99"}}
    write_checkpoint(tmp_path / NAME, TENSORS, PLAIN, world_size=2, train_state=state)
    _, chunk = chunks_of(tmp_path / NAME, 0)[0]
    flip(tmp_path / NAME / data_file(0), 8 * chunk.offset - 70)
    assert problems(tmp_path) == []
    flip(tmp_path / NAME / data_file(0), 8 * chunk.offset)
    assert len(problems(tmp_path)) == 1


# What PyTorch reads is what the index says, even where somebody has put it together anew.


def describe(folder: Path, **changed: SavedTensor | None) -> None:
    """Writes another `.metadata`, and a marker that vouches for it.

    Args:
        changed: tensors by key, with "__" for a dot; None leaves one out.
    """
    index = read_index(folder)
    named = {key.replace("__", "."): tensor for key, tensor in changed.items()}
    tensors = {**index.tensors, **named}
    kept = [tensor for tensor in tensors.values() if tensor is not None]
    (folder / METADATA_FILE).write_bytes(compose_metadata(kept, index.plain.values()))
    mark_again(folder)


def small_of(folder: Path) -> SavedTensor:
    return read_index(folder).tensors["model.small"]


def with_first_chunk(tensor: SavedTensor, **changed: Any) -> SavedTensor:
    first, *others = tensor.chunks
    return tensor._replace(chunks=[first._replace(**changed), *others])


@pytest.mark.parametrize(
    "change",
    [
        lambda it: it._replace(dtype=torch.float16),
        lambda it: it._replace(shape=(4, 4)),
        lambda it: it._replace(chunks=it.chunks[:1]),
        lambda it: it._replace(chunks=it.chunks[::-1]),
        lambda it: it._replace(chunks=[*it.chunks, it.chunks[0]._replace(box=Box((9, 0), (2, 3)))]),
        lambda it: with_first_chunk(it, offset=it.chunks[0].offset + 4096),
        lambda it: with_first_chunk(it, file=data_file(1)),
        lambda it: with_first_chunk(it, box=Box((0, 0), (1, 3))),
        lambda it: with_first_chunk(it, box=Box((0, 1), (2, 3))),
        lambda _: None,
    ],
)
def test_metadata_that_describes_a_tensor_otherwise_is_found(root, change):
    describe(root / NAME, model__small=change(small_of(root / NAME)))
    found = problems(root)
    assert (
        f"Expected 'model.small' in {root / NAME / METADATA_FILE} as {INDEX_FILE} has it, got "
        "another, or none."
    ) in found
    assert not [problem for problem in found if "model.big" in problem]


@pytest.mark.parametrize("by", [-1, 1])
def test_metadata_with_a_blob_that_is_not_around_the_data_is_found(root, by):
    tensor = small_of(root / NAME)
    moved = with_first_chunk(tensor, offset=tensor.chunks[0].offset + by)
    describe(root / NAME, model__small=moved)
    found = problems(root)
    where = f"the data of 'model.small' at (0, 0) in {root / NAME / data_file(0)}, got other bytes."
    for place in ("before", "behind"):
        assert f"Expected what torch.save writes {place} {where}" in found


def test_metadata_with_a_key_more_is_found(root):
    more = small_of(root / NAME)._replace(key="model.more")
    describe(root / NAME, model__more=more)
    (problem,) = problems(root)
    assert problem == (
        f"Expected the keys of {INDEX_FILE} in {root / NAME / METADATA_FILE}, got model.more."
    )


def test_metadata_without_the_plain_data_or_with_other_plain_data_is_found(root):
    folder, source = root / NAME, root / NAME / METADATA_FILE
    index = read_index(folder)
    (item,) = index.plain.values()
    for plain, got in (
        ([], "not all of optimizer.param_groups"),
        ([item, item._replace(key="rng")], "rng"),
    ):
        source.write_bytes(compose_metadata(index.tensors.values(), plain))
        mark_again(folder)
        (problem,) = problems(root)
        assert problem == f"Expected the keys of {INDEX_FILE} in {source}, got {got}."


def test_metadata_that_is_none_is_found_and_data_gone_through_all_the_same(root):
    (root / NAME / METADATA_FILE).write_bytes(b"(nothing")
    mark_again(root / NAME)
    (problem,) = problems(root)
    assert str(root / NAME / METADATA_FILE) in problem
    _, chunk = chunks_of(root / NAME, 1)[0]
    flip(root / NAME / data_file(1), 8 * chunk.offset)
    assert [METADATA_FILE in each for each in problems(root)] == [True, False]


def test_a_manifest_that_is_not_of_the_index_is_found(root):
    folder = root / NAME
    manifest = replace(read_manifest(folder, 1), rank=0)
    (folder / manifest_file(1)).write_bytes(manifest.to_bytes())
    mark_again(folder)
    assert problems(root) == [f"Expected rank 1 in {folder / manifest_file(1)}, got 0."]
