from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.format.manifest import (
    BLOCK_BYTES,
    MARKER_FILE,
    Manifest,
    data_file,
    manifest_file,
)
from megatron.core.dist_checkpointing.store import open_store
from megatron_hybrid.checkpoint.audit import Audit
from tests.helpers.checkpoints import row_cuts, whole, write_checkpoint

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


def test_what_was_written_has_no_problems_and_all_of_it_is_gone_through(pristine: Path):
    steps: list[int] = []
    audit = Audit(open_store(pristine), NAME, steps.append)
    audit.run()
    assert audit.problems == []
    data_nbytes = sum((pristine / NAME / data_file(rank)).stat().st_size for rank in range(2))
    assert audit.num_bytes == sum(steps) == data_nbytes


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1), st.data())
def test_any_flipped_bit_in_a_data_file_is_found(pristine: Path, rank: int, data: st.DataObject):
    path = pristine / NAME / data_file(rank)
    # Where files are small, most bits are data: others are as likely to be drawn.
    manifest = Manifest.from_bytes((pristine / NAME / manifest_file(rank)).read_bytes(), "")
    ends = [0]
    for chunk in manifest.chunks:
        data_end = chunk.data_offset + chunk.data_nbytes
        ends += [
            chunk.blob_offset,
            chunk.data_offset,
            data_end,
            chunk.blob_offset + chunk.blob_nbytes,
        ]
    spans = [span for span in itertools.pairwise(ends) if span[0] < span[1]]
    begin, end = data.draw(st.sampled_from(spans))
    bit = data.draw(st.integers(8 * begin, 8 * end - 1))
    flip(path, bit)
    try:
        (problem,) = problems(pristine)
        assert data_file(rank) in problem
    finally:
        flip(path, bit)


def test_every_problem_is_listed(root: Path):
    folder = root / NAME
    chunks = Manifest.from_bytes((folder / manifest_file(1)).read_bytes(), "").chunks
    big, small = chunks[:2]
    block = 8 * BLOCK_BYTES
    flip(
        folder / data_file(1),
        8 * big.data_offset,
        8 * big.data_offset + 2 * block,
        8 * small.blob_offset + 99,
    )
    flip(folder / data_file(0), 5)
    flip(folder / manifest_file(0), 77)
    (folder / "train_state.json").unlink()
    found = problems(root)
    assert len(found) == 5
    assert f"Expected to read {folder}/train_state.json, got FileNotFoundError" in found[0]
    assert "train_state.json" in found[1]
    assert f"of {folder}/manifest_0.json" in found[2]
    assert "the digests of 'model.big' at (1000, 0)" in found[3]
    assert "got others of 2 of 3 blocks, the first of them block 0" in found[3]
    assert "what torch.save writes before the data of 'model.small' at (2, 0)" in found[4]


def test_a_file_that_ends_too_early_is_gone_through_to_its_end(root: Path):
    path = root / NAME / data_file(1)
    chunks = Manifest.from_bytes((root / NAME / manifest_file(1)).read_bytes(), "").chunks
    flip(path, 8 * chunks[0].data_offset)
    with path.open("r+b") as stream:
        stream.truncate(chunks[1].data_offset)
    size, damaged, truncated = problems(root)
    assert f"bytes in {path}, got {chunks[1].data_offset}" in size
    assert "digests of 'model.big'" in damaged
    assert str(path) in truncated


@pytest.mark.parametrize("is_missing", [True, False])
def test_without_a_marker_the_rest_is_still_looked_at(root: Path, is_missing: bool):
    marker = root / NAME / MARKER_FILE
    if is_missing:
        marker.unlink()
    else:
        flip(marker, 100)
    (only,) = problems(root)
    assert str(marker) in only
    flip(root / NAME / data_file(1), 8 * 5000)
    assert len(problems(root)) == 2


def test_the_frame_of_another_torch_cannot_be_known(tmp_path: Path):
    state = {"versions": {"torch": "2.99"}}
    write_checkpoint(tmp_path / NAME, TENSORS, PLAIN, world_size=2, train_state=state)
    chunk = Manifest.from_bytes((tmp_path / NAME / manifest_file(0)).read_bytes(), "").chunks[0]
    flip(tmp_path / NAME / data_file(0), 8 * chunk.data_offset - 70)
    assert problems(tmp_path) == []
    flip(tmp_path / NAME / data_file(0), 8 * chunk.data_offset)
    assert len(problems(tmp_path)) == 1
